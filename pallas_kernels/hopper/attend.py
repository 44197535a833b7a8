"""The plan on Hopper GPUs: its arrays go to the Pallas kernels as they are, two launches a call."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import two_launches
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores
from pallas_kernels.hopper.tiling import LONG, columns_of
from pallas_kernels.varying import unvaried, vary_like


# Lowering the kernels takes seconds, and a step calls them in every layer. A jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("scores",))
@jax.enable_x64(False)  # the kernels count in int32
def attend(call: Call, scores: Scores) -> tuple[Array, Array, Array]:
    """Run PAC and POR, as `Family.attend` promises."""
    # A JAX that was built without GPU support may not have their dialect.
    from pallas_kernels.hopper.por import por

    out, row_max, row_sum = two_launches.run(padded(call), partial(_partials, scores=scores), por)
    return out[..., : call.plan.heads.value_head_dim], row_max, row_sum


@partial(jax.jit, static_argnames=("scores", "sizes"))
@jax.enable_x64(False)
def attend_and_merge(call: Call, scores: Scores, mailbox: Any, sizes: Sizes) -> tuple[Any, tuple[Array, Array, Array]]:
    """Run PAC, and POR across devices, as `Family.attend_and_merge` promises."""
    from pallas_kernels.between_devices.por import por

    alone = jax.tree.map(unvaried, padded(call))
    mailbox, merged = por(_partials(alone, scores), alone, mailbox, sizes)
    out, row_max, row_sum = (vary_like(x, call) for x in merged)
    return mailbox, (out[..., : call.plan.heads.value_head_dim], row_max, row_sum)


def _partials(call: Call, scores: Scores) -> tuple[Array, ...]:
    from pallas_kernels.hopper.latent import latent_pac
    from pallas_kernels.hopper.pac import pac

    if (call.plan.heads.head_dim, call.plan.heads.value_head_dim) in LONG:
        return latent_pac(call, scores)
    if call.query.dtype == jnp.float32:  # terms of 8 bits hold no more of it
        call = call._replace(query=call.query.astype(jnp.bfloat16))
    return pac(call, scores)


def padded(call: Call) -> Call:
    """Give the query, and the plan's heads, the columns that rows have in shared memory.

    The query and the output are small, so that XLA pads and cuts them, and the kernels copy whole rows of them.
    """
    heads = call.plan.heads
    columns, value_columns = columns_of((heads.head_dim, heads.value_head_dim))
    padding = [(0, 0)] * 3 + [(0, columns - heads.head_dim)]
    plan = replace(call.plan, heads=replace(heads, head_dim=columns, value_head_dim=value_columns))
    return call._replace(query=jnp.pad(call.query, padding), plan=plan)
