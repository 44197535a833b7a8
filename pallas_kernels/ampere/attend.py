"""The plan on GPUs since Ampere: its arrays go to the Pallas kernels as they are, two launches a call."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import query_rows
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores
from pallas_kernels.varying import unvaried, vary_like


# Lowering the kernels takes seconds, and a step calls them in every layer. A jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("scores",))
@jax.enable_x64(False)  # the kernels count in int32
def attend(call: Call, scores: Scores) -> tuple[Array, Array, Array]:
    """Run PAC and POR, as `Family.attend` promises."""
    # A JAX that was built without GPU support may not have their dialect, and one before 0.11 not their products.
    from pallas_kernels.ampere.pac import pac
    from pallas_kernels.ampere.por import por

    alone = jax.tree.map(unvaried, call)
    out, *softmax = (vary_like(x, call) for x in por(*pac(alone, scores), alone))
    tiles = (call.plan.num_tiles, call.plan.heads.num_kv_heads, -1)
    row_max, row_sum = (
        query_rows.to_requests(rows.reshape(tiles)[..., : call.plan.tile_rows], call) for rows in softmax
    )
    return out, jnp.where(row_sum == 0, -jnp.inf, row_max), row_sum
