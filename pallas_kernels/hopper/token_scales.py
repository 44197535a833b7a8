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
from pallas_kernels.hopper.pac_pipeline import MAX_BLOCK_TOKENS, Pipeline, Sizes
from pallas_kernels.plan_format import Segment

#: Where in shared memory.
KEY, VALUE = 0, 1


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


def first(pipeline: Pipeline, segment: Segment) -> Ahead:
    """Ask for what the first blocks of a segment need."""
    page_ids = _page_ids(pipeline, segment.begin)
    return Ahead(_gathered(pipeline, segment, page_ids), _page_ids(pipeline, segment.begin + 1))


def put(pipeline: Pipeline, segment: Segment, block: jax.Array, stage: jax.Array, ahead: Ahead) -> Ahead:
    """Store the scales of a block of the plan, and ask for those of the blocks after it."""
    following = Ahead(_gathered(pipeline, segment, ahead.page_ids), _page_ids(pipeline, block + 2))
    for which, scale in zip((KEY, VALUE), ahead.scales, strict=True):
        pipeline.refs.token_scales.at[stage, which][...] = scale
    return following


def of_block(pipeline: Pipeline, stage: jax.Array, which: int) -> jax.Array:
    """Load the scales of a block's keys, or of its values, [block]."""
    place = pipeline.refs.token_scales.at[stage, which, pl.ds(0, pipeline.sizes.block)]
    return load(place, plgpu.Layout.WGMMA.reduce(0))


def _page_ids(pipeline: Pipeline, block: jax.Array) -> tuple[jax.Array, ...]:
    """Load the pages of a block, or of the plan's last one past its end."""
    return pipeline.page_ids(jnp.minimum(block, pipeline.refs.block_pages.shape[0] - 1))


def _gathered(pipeline: Any, segment: Segment, page_ids: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Load the scales of a block of these pages, which may be parts of the caller's."""
    refs, page_tokens, page_size = pipeline.refs, pipeline.sizes.page_tokens, pipeline.sizes.scale_page_tokens
    page_of, offset = by_thread.page_and_token(page_tokens)
    parts, num_kv_heads = jnp.int32(page_size // page_tokens), refs.keys.shape[1]
    begin = plgpu.layout_cast(jnp.full((MAX_BLOCK_TOKENS,), 0, jnp.int32), by_thread.THREAD)
    for j, page in enumerate(page_ids):
        row = lax.div(page, parts) * num_kv_heads + segment.head
        begin = jnp.where(page_of == j, row * page_size + lax.rem(page, parts) * page_tokens, begin)
    # Copies find zeros past the end of an array, loads of threads must not look there, whatever a plan says.
    index = jnp.clip(begin + offset, 0, refs.key_scale_of_tokens.shape[0] - 1)
    return by_thread.gather(refs.key_scale_of_tokens, index), by_thread.gather(refs.value_scale_of_tokens, index)
