"""The plan on Hopper GPUs: its arrays go to the Pallas kernels as they are, two launches a call."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import query_rows
from pallas_kernels.heads import Scores
from pallas_kernels.hopper.packing import TILE_ROWS
from pallas_kernels.hopper.tiling import stages_of
from pallas_kernels.plan_format import ForestArrays, PlanArrays, PlanGuard


# Lowering the kernels takes seconds, and a step calls them in every layer. A jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("scores",))
@jax.enable_x64(False)  # the kernels count in int32
def attend(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    query_position: Array,
    forest: ForestArrays,
    plan: PlanArrays,
    guard: PlanGuard,
    scores: Scores,
    readers_of_tokens: Array | None,
) -> tuple[Array, Array, Array]:
    """Run PAC and POR, as `Family.attend` promises."""
    # A JAX that was built without GPU support may not have their dialect.
    from pallas_kernels.hopper.pac import pac
    from pallas_kernels.hopper.por import por

    causal = None
    if plan.query_tokens > 1 and readers_of_tokens is None:
        positions = query_rows.positions(query_position, forest, plan)
        causal = jnp.pad(positions.reshape(-1), (0, TILE_ROWS))
    stages = stages_of(plan.heads.head_dim, plan.block_tokens)
    assert stages is not None
    partials = pac(
        query,
        key_pages,
        value_pages,
        forest,
        plan,
        guard,
        query_position=causal,
        readers_of_tokens=readers_of_tokens,
        stages=stages,
        scale=scores.scale,
    )
    out, row_max, row_sum = por(*partials, forest, plan, query_shape=query.shape, dtype=query.dtype)
    row_max = jnp.where(row_sum == 0, -jnp.inf, row_max)
    row_max, row_sum = (
        query_rows.to_requests(
            x.reshape(plan.num_tiles, plan.heads.num_kv_heads, -1)[..., : plan.tile_rows], forest, plan
        )
        for x in (row_max, row_sum)
    )
    return out, row_max, row_sum
