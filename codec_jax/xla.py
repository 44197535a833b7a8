"""The plan on any device: every thread block of the plan is one lane of a batched loop.

Lane c works off the blocks of its segments in order, as thread block c of a GPU kernel does: step i of the loop
gathers one block of pages for each lane, adds it to the lane's running partial (PAC), and stores the partial where a
segment ends. Each page is gathered once per row tile and kv head, however many requests read it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from codec_jax.forest import Forest
from codec_jax.partial import Partial, pac, por, por_segments
from codec_jax.plan import Plan


def attend(
    query: Float[Array, "tiles K R H"],
    key_pages: Float[Array, "num_pages page_size K H"],
    value_pages: Float[Array, "num_pages page_size K H"],
    query_position: Int[Array, "tiles R"],
    forest: Forest,
    plan: Plan,
    scale: float,
) -> Partial:
    """Run the plan's segments and merge them: attention of all row tiles, as partials [tiles, K, R]."""
    num_tiles, num_kv_heads, num_rows, head_dim = query.shape
    num_segments = plan.segment_tile.shape[0]
    last_segment = plan.cta_ptr[1:]  # [C], exclusive
    num_lanes = last_segment.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)

    def block_mask(block: Array, tile: Array) -> Array:
        """Which rows see which tokens of each lane's block: [C, R, S]."""
        node, first = plan.page_node[block], plan.page_token[block]  # [C, slots]
        token = first[..., None] + jnp.arange(plan.page_size, dtype=jnp.int32)  # [C, slots, page_size]
        in_node = token < forest.length[node][..., None]
        # A token past its node's end has an empty interval of readers.
        lo = plan.page_lo[block][..., None]
        hi = jnp.where(in_node, plan.page_hi[block][..., None], 0)
        lo, hi = (jnp.broadcast_to(x, token.shape).reshape(num_lanes, 1, -1) for x in (lo, hi))
        mask = (row[:, None] >= lo) & (row[:, None] < hi)
        if plan.query_tokens > 1:
            position = (forest.start[node][..., None] + token).reshape(num_lanes, 1, -1)
            mask &= position <= query_position[tile][..., None]
        return mask

    def step(carry: tuple) -> tuple:
        segment, block, running, done = carry
        working = segment < last_segment  # [C]
        at = jnp.minimum(segment, num_segments - 1)
        tile = jnp.minimum(plan.segment_tile[at], num_tiles - 1)
        head = plan.segment_head[at]
        page = plan.page_id[block]  # [C, slots]
        tokens = (num_lanes, -1, head_dim)
        partial = pac(
            query[tile, head],  # [C, R, H]
            key_pages[page, :, head[:, None]].reshape(tokens),  # [C, S, H]
            value_pages[page, :, head[:, None]].reshape(tokens),
            block_mask(block, tile),
            scale,
        )
        running = por(running, partial)
        # Where a segment ends, its partial is stored and the lane starts afresh with the next one.
        ends = block + 1 == plan.segment_hi[at]
        target = jnp.where(working & ends, segment, num_segments)
        done = jax.tree.map(lambda stored, new: stored.at[target].set(new, mode="drop"), done, running)
        empty = Partial.empty((num_lanes, num_rows), head_dim)
        running = jax.tree.map(
            lambda start, new: jnp.where(ends.reshape(-1, *[1] * (new.ndim - 1)), start, new), empty, running
        )
        segment = jnp.where(ends, segment + 1, segment)
        next_block = plan.segment_lo[jnp.minimum(segment, num_segments - 1)]
        block = jnp.where(ends, next_block, block + 1)
        return segment, jnp.where(working, block, 0), running, done

    first = plan.cta_ptr[:-1]
    carry = (
        first,
        plan.segment_lo[jnp.minimum(first, num_segments - 1)],
        Partial.empty((num_lanes, num_rows), head_dim),
        Partial.empty((num_segments, num_rows), head_dim),
    )
    _, _, _, done = lax.while_loop(lambda carry: (carry[0] < last_segment).any(), step, carry)
    stream = plan.segment_tile * num_kv_heads + plan.segment_head
    merged = por_segments(done, stream, num_tiles * num_kv_heads)
    return jax.tree.map(lambda x: x.reshape(num_tiles, num_kv_heads, *x.shape[1:]), merged)
