"""The plan on Hopper GPUs: its arrays go to the Pallas kernels as they are, two launches a call.

The kernels are imported where they are used, since a JAX that was built without GPU support may not have their dialect.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from codec_jax import rows
from codec_jax.forest import Forest
from codec_jax.plan import Plan
from pallas_kernels.config import LARGE, SMALL, config_of
from pallas_kernels.packing import TILE_ROWS, Packing


def why_not(query: Array, key_pages: Array, plan: Plan) -> str | None:
    """Say why the kernels cannot serve these arguments on the default device; None if they can."""
    device = jax.devices()[0]
    if device.platform != "gpu" or not str(device.compute_capability).startswith("9."):
        return f"it needs a Hopper GPU (sm_90), the default device is {device.device_kind}"
    if query.dtype not in (jnp.bfloat16, jnp.float16) or key_pages.dtype != query.dtype:
        return f"it takes bfloat16 or float16, the same for all, got {query.dtype} and {key_pages.dtype}"
    if plan.head_dim not in LARGE:
        return f"it takes head sizes {', '.join(map(str, LARGE))}, got {plan.head_dim}"
    tile_rows, block = Packing.of(plan.group).tile_rows, plan.block_tokens
    if plan.tile_rows != tile_rows or plan.lanes != 2 or config_of(plan.head_dim, block) is None:
        blocks = sorted({configs[plan.head_dim].block_tokens for configs in (LARGE, SMALL)})
        return (
            f"it takes plans of {tile_rows} rows a tile, 2 lanes and blocks of {' or '.join(map(str, blocks))} tokens, "
            f"got {plan.tile_rows} rows, {plan.lanes} lanes and blocks of {block} tokens"
        )
    return None


def attend(
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"],
    value_pages: Float[Array, "num_pages page_size K H"],
    forest: Forest,
    plan: Plan,
    scale: float,
    readers_of_tokens: Int[Array, "blocks S"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "tiles K R"], Float[Array, "tiles K R"]]:
    """Run the plan's segments and merge them; returns the output in the caller's order, and max and sum of all rows.

    All are NaN where the plan does not hold; the output is 0 for free request slots. Query tokens are causal among
    themselves unless `readers_of_tokens` says which rows see which token (`codec_jax.drafts`).
    """
    config = config_of(plan.head_dim, plan.block_tokens)
    assert config is not None
    arrays = query, key_pages, value_pages, forest, plan, readers_of_tokens
    return _attend(*arrays, scale=scale, stages=config.stages)


# Lowering the kernels takes seconds, and a step calls them in every layer. A jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("scale", "stages"))
def _attend(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    forest: Forest,
    plan: Plan,
    readers_of_tokens: Array | None,
    *,
    scale: float,
    stages: int,
) -> tuple[Array, Array, Array]:
    from pallas_kernels import pac_mosaic, por_mosaic

    packing = Packing.of(plan.group)
    causal = None
    if plan.query_tokens > 1 and readers_of_tokens is None:
        positions = jnp.pad(rows.positions(forest, plan).reshape(-1), (0, TILE_ROWS))
        causal = pac_mosaic.Causal(node_start=forest.start, query_position=positions)
    merges = pac_mosaic.Merges(plan.merge_ptr, plan.used_rows)
    partials = pac_mosaic.pac(
        query,
        key_pages,
        value_pages,
        forest.request_of_row,
        forest.length,
        plan.pages,
        plan.segments,
        plan.runs,
        pac_mosaic.Exactness(
            least=plan.least_length,
            most=plan.most_length,
            structure=forest.structure.reshape(1),
            planned_structure=plan.structure.reshape(1),
        ),
        merges,
        causal=causal,
        readers_of_tokens=readers_of_tokens,
        packing=packing,
        num_partials=plan.num_partials,
        stages=stages,
        scale=scale,
    )
    out, row_max, row_sum = por_mosaic.por(
        *partials,
        merges.merge_ptr,
        forest.request_of_row,
        merges.used_rows,
        num_ctas=plan.runs.shape[0],
        packing=packing,
        query_shape=query.shape,
        dtype=query.dtype,
    )
    row_max = jnp.where(row_sum == 0, -jnp.inf, row_max)
    row_max, row_sum = (
        x.reshape(plan.num_tiles, plan.num_kv_heads, -1)[..., : plan.tile_rows] for x in (row_max, row_sum)
    )
    return out, row_max, row_sum
