"""Scales of each token and kv head, for pages of one byte a number: from memory to where lanes read them.

    pages of block i + 2 ─► scales of block i + 1 ─► registers ─► shared memory, with the mask of block i
      (token_pages)           a token for each thread of the preparing warpgroup

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

from pallas_kernels import by_thread, token_pages
from pallas_kernels.compat import load
from pallas_kernels.family import Call
from pallas_kernels.hopper.pac_pipeline import MAX_BLOCK_TOKENS, Pipeline, Sizes
from pallas_kernels.plan_format import Segment

#: Where in shared memory.
KEY, VALUE = 0, 1


class Ahead(NamedTuple):
    """What the preparing warpgroup has asked for."""

    scales: tuple[jax.Array, jax.Array]  # of keys and of values of a block, [128] each
    page_id: jax.Array  # of the tokens of the block after it, [128]


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
    page_ids = [token_pages.field(pipeline.refs, pipeline.sizes, segment.begin + i, "page_id") for i in range(2)]
    return Ahead(_gathered(pipeline, segment, page_ids[0]), page_ids[1])


def put(pipeline: Pipeline, segment: Segment, block: jax.Array, stage: jax.Array, ahead: Ahead) -> Ahead:
    """Store the scales of a block of the plan, and ask for those of the blocks after it."""
    later = token_pages.field(pipeline.refs, pipeline.sizes, block + 2, "page_id")
    following = Ahead(_gathered(pipeline, segment, ahead.page_id), later)
    for which, scale in zip((KEY, VALUE), ahead.scales, strict=True):
        pipeline.refs.token_scales.at[stage, which][...] = scale
    return following


def of_block(pipeline: Pipeline, stage: jax.Array, which: int) -> jax.Array:
    """Load the scales of a block's keys, or of its values, [block]."""
    place = pipeline.refs.token_scales.at[stage, which, pl.ds(0, pipeline.sizes.block)]
    return load(place, plgpu.Layout.WGMMA.reduce(0))


def _gathered(pipeline: Any, segment: Segment, page_id: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Load the scales of the tokens of these pages, which may be parts of the caller's."""
    refs, sizes = pipeline.refs, pipeline.sizes
    page_size, num_kv_heads = sizes.scale_page_tokens, refs.keys.shape[1]
    parts = jnp.int32(page_size // sizes.page_tokens)
    row = lax.div(page_id, parts) * num_kv_heads + segment.head
    index = row * page_size + lax.rem(page_id, parts) * sizes.page_tokens + token_pages.offset(sizes)
    # Copies find zeros past the end of an array, loads of threads must not look there, whatever a plan says.
    index = jnp.clip(index, 0, refs.key_scale_of_tokens.shape[0] - 1)
    return by_thread.gather(refs.key_scale_of_tokens, index), by_thread.gather(refs.value_scale_of_tokens, index)
