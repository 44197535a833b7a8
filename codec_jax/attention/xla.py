"""The plan on any device: every thread block of the plan is one entry of a batched loop.

Entry c works off the blocks of its segments in order, as thread block c of a GPU kernel does: step i of the loop
gathers one block of pages for each entry, adds it to the running partial (PAC), and stores the partial where a
segment ends. Each page is gathered once per row tile and kv head, however many requests read it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from codec_jax.attention.pac_por import Partial, add_sinks, pac, por, por_segments
from codec_jax.forest.latent_pages import meant
from codec_jax.planning.tiling import any_device
from pallas_kernels import Call, Family, Heads, Scores, query_rows
from pallas_kernels.plan_format import Page, PlanArrays, Segment
from pallas_kernels.token_mask import bounds, is_reader, readers_of_token, unpack_readers
from pallas_kernels.varying import vary_like


def why_not(heads: Heads, device: jax.Device, scores: Scores | None = None, plan: PlanArrays | None = None) -> None:
    """It serves everything."""


# A step calls it in every layer: a jitted function is traced once for all.
@partial(jax.jit, static_argnames="scores")
def attend(call: Call, scores: Scores) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"], Float[Array, "B T N"]]:
    """Run the plan's segments and merge them, as `Family.attend` promises."""
    plan, done = call.plan, _segments(call, scores)
    number = jnp.arange(plan.num_partials, dtype=jnp.int32)
    group = jnp.searchsorted(plan.merge_ptr, number, side="right").astype(jnp.int32) - 1
    merged = por_segments(done, group, plan.num_tiles * plan.heads.num_kv_heads)
    holds = call.guard.holds(call.forest)

    def finish(rows: Float[Array, "groups R *rest"]) -> Float[Array, "B T N *rest"]:
        by_tile = rows.reshape(plan.num_tiles, plan.heads.num_kv_heads, *rows.shape[1:])
        return jnp.where(holds, query_rows.to_requests(by_tile, call), jnp.nan)

    out, residuals = finish(merged.out), (finish(merged.max), finish(merged.sum))
    if call.value_scale is not None:  # before the output is rounded
        out *= jnp.repeat(call.value_scale, plan.heads.group)[None, None, :, None]
    if call.sinks is not None:
        out, residuals = add_sinks(out, residuals, call.sinks)
    return out.astype(call.query.dtype), *residuals


XLA = Family("xla", why_not, any_device, attend)


def _segments(call: Call, scores: Scores) -> Partial:
    """Compute the partials of all segments, [num_partials, R]."""
    plan = call.plan
    tiles = query_rows.to_tiles(call)  # [tiles, K, R, H]
    if call.key_scale is not None:
        tiles = tiles.astype(jnp.float32) * call.key_scale[None, :, None, None]
    position = query_rows.by_row(call.query_position, call)  # [tiles, R]
    num_rows, head_dim, value_dim, lanes = *tiles.shape[2:], plan.heads.value_head_dim, plan.lanes
    num_segments, last_segment = plan.segments.shape[0], plan.cta_ptr[1:]  # [C], exclusive
    num_ctas = last_segment.shape[0]
    rows = (num_ctas, lanes * num_rows)  # of both tiles, if segments have two lanes

    def fields_of(segment: Array) -> Segment:
        """The fields of one segment for each thread block, [C] each."""
        return Segment(*plan.segments[jnp.minimum(segment, num_segments - 1)].T)

    def step(carry: tuple) -> tuple:
        segment, block, running, done = carry
        working = segment < last_segment  # [C]
        fields = fields_of(segment)
        tile = jnp.stack([fields.tile0, fields.tile1][:lanes], axis=1)  # [C, L]
        partials = jnp.stack([fields.partial0, fields.partial1][:lanes], axis=1)
        head = fields.head
        pages = Page(*jnp.moveaxis(plan.block_pages[block], -1, 0))  # [C, pages_per_block]
        keys = _keys(call, pages.page_id, head[:, None])  # [C, pages, page_tokens, H]
        values = keys[..., :value_dim]
        if call.value_pages is not None:
            values = call.value_pages[pages.page_id, :, head[:, None]]
            values = _times(values, call.value_scale_of_tokens, pages.page_id, head[:, None])
        of_block = pac(
            tiles[tile, head[:, None]].reshape(*rows, head_dim),
            keys.reshape(num_ctas, -1, head_dim),  # [C, S, H]
            values.reshape(num_ctas, -1, value_dim),
            _mask(call, block, pages, position[tile].reshape(rows)),
            scores.scale,
            scores.softcap,
        )
        running = por(running, of_block)
        # Where a segment ends, its partials are stored and the lane starts afresh with the next one.
        ends = block + 1 == fields.end
        target = jnp.where((working & ends)[:, None], partials, plan.num_partials)  # [C, L]

        def store(stored: Array, new: Array) -> Array:
            return stored.at[target].set(new.reshape(num_ctas, lanes, num_rows, *new.shape[2:]), mode="drop")

        done = jax.tree.map(store, done, running)
        running = jax.tree.map(
            lambda start, new: jnp.where(ends.reshape(-1, *[1] * (new.ndim - 1)), start, new),
            Partial.empty(rows, value_dim),
            running,
        )
        segment = jnp.where(ends, segment + 1, segment)
        block = jnp.where(ends, fields_of(segment).begin, block + 1)
        return segment, jnp.where(working, block, 0), running, done

    first = plan.cta_ptr[:-1]
    partials = Partial.empty(rows, value_dim), Partial.empty((plan.num_partials, num_rows), value_dim)
    carry = (first, fields_of(first).begin, *partials)
    carry = jax.tree.map(lambda x: vary_like(x, call), carry)
    return lax.while_loop(lambda carry: (carry[0] < last_segment).any(), step, carry)[3]


def _keys(call: Call, page: Int[Array, "C pages"], head: Int[Array, "C 1"]) -> Float[Array, "C pages page_tokens H"]:
    """Return the keys of pages as they are meant; the factors of whole kv heads are the caller's."""
    keys = _times(call.key_pages[page, :, head], call.key_scale_of_tokens, page, head)
    if call.latent_scale is None or call.rotated_keys is None:
        return keys
    return meant(keys, call.latent_scale[page, :, head], call.rotated_keys[page, :, head])


def _times(
    tokens: Float[Array, "C pages page_tokens H"],
    scale: Float[Array, "num_pages K page_size"] | None,
    page: Int[Array, "C pages"],
    head: Int[Array, "C 1"],
) -> Float[Array, "C pages page_tokens H"]:
    """Return tokens of the plan's pages times their scales, which are in the caller's pages."""
    if scale is None:
        return tokens
    parts = scale.shape[2] // tokens.shape[2]
    of_parts = scale.reshape(*scale.shape[:2], parts, tokens.shape[2])
    return tokens.astype(jnp.float32) * of_parts[page // parts, head, page % parts][..., None]


def _mask(call: Call, block: Int[Array, " C"], pages: Page, query_position: Int[Array, "C R"]) -> Bool[Array, "C R S"]:
    """Tell which rows see which tokens of each thread block's block."""
    num_ctas, num_rows = query_position.shape
    forest, offset = call.forest, jnp.arange(call.plan.page_tokens, dtype=jnp.int32)[None, None]
    token = pages.token[..., None] + offset  # [C, pages, page_tokens]
    if call.readers_of_tokens is not None:
        readers = call.readers_of_tokens[block]
    else:
        readers = readers_of_token(pages.readers[..., None], token, forest.length[pages.node][..., None])
    first, count = unpack_readers(readers.reshape(num_ctas, 1, -1))
    mask = is_reader(jnp.arange(num_rows, dtype=jnp.int32)[None, :, None], first, count)
    causal, window = call.plan.query_tokens > 1 and call.readers_of_tokens is None, call.plan.window
    if causal or window is not None:
        position = call.positions_of_tokens
        position = forest.start[pages.node][..., None] + token if position is None else position[block]
        position = position.reshape(num_ctas, 1, -1)
        for bound, is_within in bounds(query_position, causal, window):
            mask &= is_within(position, bound[..., None])
    return mask
