"""Scales of each token and kv head, for pages of one byte a number: from memory to where lanes read them.

    page ids of block i + 2 ─► scales of block i + 1 ─► registers ─► shared memory, with the mask of block i
      (block_pages)              a token for each thread of the preparing warpgroup

A trip to memory takes about as long as a block, so what a block needs is asked for in the two before it. Lanes multiply
the products of keys, and later the weights, each by a number of its column. What says that a mask is in place, or not
needed any more, says so of its scales.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread
from pallas_kernels.compat import load
from pallas_kernels.family import Call
from pallas_kernels.hopper.pac_pipeline import MAX_BLOCK_TOKENS, Sizes
from pallas_kernels.plan_format import Page, Segment

_KEY, _VALUE = 0, 1


class Ahead(NamedTuple):
    """What the preparing warpgroup has asked for."""

    scales: tuple[jax.Array, jax.Array]  # of keys and of values of a block, [128] each
    page_ids: tuple[jax.Array, ...]  # of the block after it


def inputs_of(call: Call) -> dict[str, jax.Array]:
    """Return the scales, if there are any, [num_pages x K x page_size] each."""
    if call.key_scale_of_tokens is None or call.value_scale_of_tokens is None:
        return {}
    return {
        "key_scale_of_tokens": call.key_scale_of_tokens.reshape(-1),
        "value_scale_of_tokens": call.value_scale_of_tokens.reshape(-1),
    }


def scratch(sizes: Sizes) -> dict[str, Any]:
    """Describe shared memory for them."""
    return {"token_scales": plgpu.SMEM((sizes.stages, 2, MAX_BLOCK_TOKENS), jnp.float32)}


def first(refs: Any, sizes: Any, segment: Segment) -> Ahead:
    """Ask for what the first blocks of a segment need."""
    page_ids = _page_ids(refs, sizes, segment.begin)
    return Ahead(_gathered(refs, sizes, segment, page_ids), _page_ids(refs, sizes, segment.begin + 1))


def put(refs: Any, sizes: Any, segment: Segment, block: jax.Array, stage: jax.Array, ahead: Ahead) -> Ahead:
    """Store the scales of a block of the plan, and ask for those of the blocks after it."""
    following = _gathered(refs, sizes, segment, ahead.page_ids), _page_ids(refs, sizes, block + 2)
    for which, scale in zip((_KEY, _VALUE), ahead.scales, strict=True):
        refs.token_scales.at[stage, which][...] = scale
    return Ahead(*following)


def of_keys(refs: Any, block: int, stage: jax.Array) -> jax.Array:
    """Load the scales of a block's keys, [block]."""
    return _of(refs, block, stage, _KEY)


def of_values(refs: Any, block: int, stage: jax.Array) -> jax.Array:
    """Load the scales of a block's values, [block]."""
    return _of(refs, block, stage, _VALUE)


def _of(refs: Any, block: int, stage: jax.Array, which: int) -> jax.Array:
    along = plgpu.Layout.WGMMA.reduce(0)
    return load(refs.token_scales.at[stage, which, pl.ds(0, block)], along)


def _page_ids(refs: Any, sizes: Any, block: jax.Array) -> tuple[jax.Array, ...]:
    at = jnp.minimum(block, refs.block_pages.shape[0] - 1)
    return tuple(refs.block_pages[at, j, Page._fields.index("page_id")] for j in range(sizes.pages_per_block))


def _gathered(refs: Any, sizes: Any, segment: Segment, page_ids: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Load the scales of a block of these pages, which may be parts of the caller's."""
    index = plgpu.broadcasted_iota(jnp.int32, (MAX_BLOCK_TOKENS,), 0, layout=by_thread.THREAD)
    page_of, offset = lax.div(index, jnp.int32(sizes.page_tokens)), lax.rem(index, jnp.int32(sizes.page_tokens))
    parts = sizes.scale_page_tokens // sizes.page_tokens
    begin = plgpu.layout_cast(jnp.full((MAX_BLOCK_TOKENS,), 0, jnp.int32), by_thread.THREAD)
    for j, page in enumerate(page_ids):
        row = lax.div(page, jnp.int32(parts)) * sizes.num_kv_heads + segment.head
        at = row * sizes.scale_page_tokens + lax.rem(page, jnp.int32(parts)) * sizes.page_tokens
        begin = jnp.where(page_of == j, at, begin)
    # Copies find zeros past the end of an array, loads of threads must not look there, whatever a plan says.
    index = jnp.clip(begin + offset, 0, refs.key_scale_of_tokens.shape[0] - 1)
    return by_thread.gather(refs.key_scale_of_tokens, index), by_thread.gather(refs.value_scale_of_tokens, index)
