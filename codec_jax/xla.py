"""The plan on any device: every thread block of the plan is one entry of a batched loop.

Entry c works off the blocks of its segments in order, as thread block c of a GPU kernel does: step i of the loop
gathers one block of pages for each entry, adds it to the running partial (PAC), and stores the partial where a
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
from pallas_kernels.columns import Page, Segment


def attend(
    query: Float[Array, "tiles K R H"],
    key_pages: Float[Array, "num_pages page_size K H"],
    value_pages: Float[Array, "num_pages page_size K H"],
    query_position: Int[Array, "tiles R"],
    forest: Forest,
    plan: Plan,
    scale: float,
    readers_of_tokens: Int[Array, "blocks S"] | None = None,
) -> Partial:
    """Run the plan's segments and merge them: attention of all row tiles, as partials [tiles, K, R].

    The pages hold plan.slot_tokens tokens each. Query tokens are causal among themselves unless `readers_of_tokens`
    says which rows see which token (`codec_jax.drafts`).
    """
    num_tiles, num_kv_heads, num_rows, head_dim = query.shape
    num_segments, lanes = plan.segments.shape[0], plan.lanes
    last_segment = plan.cta_ptr[1:]  # [C], exclusive
    num_ctas = last_segment.shape[0]
    row = jnp.arange(lanes * num_rows, dtype=jnp.int32)  # of both tiles, if segments have two lanes

    def fields_of(segment: Array) -> Segment:
        """The fields of one segment for each thread block, [C] each."""
        return Segment(*plan.segments[jnp.minimum(segment, num_segments - 1)].T)

    def block_mask(block: Array, position: Array) -> Array:
        """Which rows see which tokens of each thread block's block: [C, L x R, S]."""
        if readers_of_tokens is not None:
            readers = readers_of_tokens[block][:, None]  # [C, 1, S]
            return (row[:, None] >= readers & 0xFFFF) & (row[:, None] < readers >> 16)
        page = Page(*jnp.moveaxis(plan.pages[block], -1, 0))  # [C, slots]
        token = page.token[..., None] + jnp.arange(plan.slot_tokens, dtype=jnp.int32)  # [C, slots, slot_tokens]
        in_node = token < forest.length[page.node][..., None]
        # A token past its node's end has an empty interval of readers.
        readers = page.readers[..., None]
        lo, hi = readers & 0xFFFF, jnp.where(in_node, readers >> 16, 0)
        lo, hi = (jnp.broadcast_to(x, token.shape).reshape(num_ctas, 1, -1) for x in (lo, hi))
        mask = (row[:, None] >= lo) & (row[:, None] < hi)
        if plan.query_tokens > 1:
            token_position = (forest.start[page.node][..., None] + token).reshape(num_ctas, 1, -1)
            mask &= token_position <= position[..., None]
        return mask

    def step(carry: tuple) -> tuple:
        segment, block, running, done = carry
        working = segment < last_segment  # [C]
        fields = fields_of(segment)
        head = fields.head
        tiles, partials = (
            jnp.stack(of_lanes[:lanes], axis=1)  # [C, L]
            for of_lanes in ((fields.tile, fields.other_tile), (fields.partial, fields.other_partial))
        )
        page = Page(*jnp.moveaxis(plan.pages[block], -1, 0)).page_id  # [C, slots]
        rows, tokens = (num_ctas, lanes * num_rows), (num_ctas, -1, head_dim)
        partial = pac(
            query[tiles, head[:, None]].reshape(*rows, head_dim),
            key_pages[page, :, head[:, None]].reshape(tokens),  # [C, S, H]
            value_pages[page, :, head[:, None]].reshape(tokens),
            block_mask(block, query_position[tiles].reshape(rows)),
            scale,
        )
        running = por(running, partial)
        # Where a segment ends, its partials are stored and the lane starts afresh with the next one.
        ends = block + 1 == fields.hi
        target = jnp.where((working & ends)[:, None], partials, plan.num_partials)  # [C, L]

        def store(stored: Array, new: Array) -> Array:
            return stored.at[target].set(new.reshape(num_ctas, lanes, num_rows, *new.shape[2:]), mode="drop")

        done = jax.tree.map(store, done, running)
        running = jax.tree.map(
            lambda start, new: jnp.where(ends.reshape(-1, *[1] * (new.ndim - 1)), start, new),
            Partial.empty(rows, head_dim),
            running,
        )
        segment = jnp.where(ends, segment + 1, segment)
        block = jnp.where(ends, fields_of(segment).lo, block + 1)
        return segment, jnp.where(working, block, 0), running, done

    first = plan.cta_ptr[:-1]
    carry = (
        first,
        fields_of(first).lo,
        Partial.empty((num_ctas, lanes * num_rows), head_dim),
        Partial.empty((plan.num_partials, num_rows), head_dim),
    )
    _, _, _, done = lax.while_loop(lambda carry: (carry[0] < last_segment).any(), step, carry)
    number = jnp.arange(plan.num_partials, dtype=jnp.int32)
    stream = jnp.searchsorted(plan.merge_ptr, number, side="right").astype(jnp.int32) - 1
    merged = por_segments(done, stream, num_tiles * num_kv_heads)
    return jax.tree.map(lambda x: x.reshape(num_tiles, num_kv_heads, *x.shape[1:]), merged)
