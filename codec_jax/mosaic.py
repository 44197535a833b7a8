"""The plan on Hopper GPUs: its segments go to the Pallas kernels as they are.

The kernels are imported where they are used, since a JAX that was built without GPU support may not have their dialect.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from codec_jax.forest import Forest
from codec_jax.partial import Partial
from codec_jax.plan import Plan

_LN2 = 0.6931471805599453


def why_not(query: Array, key_pages: Array, plan: Plan) -> str | None:
    """Say why the kernels cannot serve these arguments on the default device; None if they can."""
    device, block = jax.devices()[0], plan.page_id.shape[1] * plan.page_size
    if device.platform != "gpu" or not str(device.compute_capability).startswith("9."):
        return f"it needs a Hopper GPU (sm_90), the default device is {device.device_kind}"
    from pallas_kernels import pac_mosaic

    if query.dtype not in (jnp.bfloat16, jnp.float16) or key_pages.dtype != query.dtype:
        return f"it takes bfloat16 or float16, the same for all, got {query.dtype} and {key_pages.dtype}"
    if plan.head_dim not in (64, 128):
        return f"it takes head sizes 64 and 128, got {plan.head_dim}"
    if plan.query_tokens != 1:
        return f"it takes one query token per request, got {plan.query_tokens}"
    if plan.tile_rows != pac_mosaic.TILE_ROWS or block != 128:
        return (
            f"it takes plans of {pac_mosaic.TILE_ROWS} rows and blocks of 128 tokens, and so page sizes that divide "
            f"128, got {plan.tile_rows} rows and blocks of {block} tokens"
        )
    return None


def attend(
    query: Float[Array, "tiles K R H"],
    key_pages: Float[Array, "num_pages page_size K H"],
    value_pages: Float[Array, "num_pages page_size K H"],
    forest: Forest,
    plan: Plan,
    scale: float,
) -> Partial:
    """Run the plan's segments and merge them: attention of all row tiles, as partials [tiles, K, R]."""
    from pallas_kernels import pac_mosaic, por_mosaic

    num_tiles, num_kv_heads, num_rows, head_dim = query.shape
    packed = query.transpose(1, 0, 2, 3).reshape(num_kv_heads, num_tiles * num_rows, head_dim)
    # Which rows see each token of each block; none, where a page is not full.
    node_length = forest.length[plan.page_node]
    token = plan.page_token[..., None] + jnp.arange(plan.page_size, dtype=jnp.int32)
    readers = plan.page_lo + plan.page_hi * pac_mosaic.LAST_READER
    columns = jnp.where(token < node_length[..., None], readers[..., None], 0).reshape(-1)
    segments = pac_mosaic.Segments(
        tile=plan.segment_tile,
        head=plan.segment_head,
        lo=plan.segment_lo,
        masked=plan.segment_masked,
        hi=plan.segment_hi,
        cta_ptr=plan.cta_ptr,
    )
    partials = pac_mosaic.pac(packed, key_pages, value_pages, plan.page_id, columns, segments, scale=scale)
    out, row_max, row_sum = por_mosaic.por(
        *partials,
        plan.merge_ptr,
        plan.merge_segment,
        num_kv_heads=num_kv_heads,
        dtype=query.dtype,
    )
    row_max = jnp.where(row_sum > 0, row_max * _LN2, -jnp.inf)

    def tiled(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(num_kv_heads, num_tiles, num_rows, *x.shape[2:]), 0, 1)

    return Partial(tiled(out), tiled(row_max), tiled(row_sum))
