"""The readers of every token of a plan, and its position, candidates of draft trees included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from codec_jax.forest import DraftTrees, Forest
from pallas_kernels.plan_format import Page, PlanArrays, Segment
from pallas_kernels.token_mask import pack_readers, readers_of_token, unpack_readers


def readers_of_tokens(drafts: DraftTrees, forest: Forest, plan: PlanArrays) -> Int[Array, "blocks S"]:
    """Return the query rows that see each token of each of the plan's blocks, as `token_mask` packs them.

    As in `Page.readers`, rows are counted from the first row of the stream's first tile.
    """
    page, token = _pages(plan), _tokens(plan)
    tokens, group = plan.query_tokens, plan.heads.group
    drafted, request, place = _candidates(forest, plan)
    row = forest.row_lo[page.node]
    # Rows of the page's readers, which are this request's as far as they are in the stream; none, where it is padding.
    first, count = unpack_readers(page.readers)
    begin = row * tokens * group - _first_row_of_blocks(plan)[:, None, None]
    end = begin + drafts.subtree_end[request, place] * group
    begin += place * group
    of_draft = pack_readers(jnp.clip(begin, first, first + count), jnp.clip(end, first, first + count))
    readers = jnp.where(drafted, of_draft, page.readers)
    return readers_of_token(readers, token, forest.length[page.node]).reshape(plan.block_pages.shape[0], -1)


def positions_of_tokens(drafts: DraftTrees, forest: Forest, plan: PlanArrays) -> Int[Array, "blocks S"]:
    """Return the position of each token of each of the plan's blocks: of a candidate, the one that its depth gives."""
    drafted, request, place = _candidates(forest, plan)
    position = forest.start[_pages(plan).node] + _tokens(plan)
    position = jnp.where(drafted, drafts.positions(forest)[request, place], position)
    return position.reshape(plan.block_pages.shape[0], -1)


def _pages(plan: PlanArrays) -> Page:
    """Return the pages of all blocks, [blocks, pages_per_block, 1]."""
    return Page(*jnp.moveaxis(plan.block_pages[..., None], 2, 0))


def _tokens(plan: PlanArrays) -> Int[Array, "blocks pages_per_block page_tokens"]:
    """Return the index of each token within its node."""
    return _pages(plan).token + jnp.arange(plan.page_tokens, dtype=jnp.int32)[None, None]


def _candidates(forest: Forest, plan: PlanArrays) -> tuple[Array, Array, Array]:
    """Tell which tokens are candidates, whose they are, and their place in the tree, [blocks, pages, page_tokens]."""
    node = _pages(plan).node
    request = forest.request_of_row[forest.row_lo[node]]  # the only one that reads the node, if it is the leaf of one
    place = _tokens(plan) - (forest.length[node] - plan.query_tokens)
    drafted = (forest.leaf[request] == node) & (forest.readers[node] == 1) & (place >= 0)
    return drafted, request, jnp.clip(place, 0, plan.query_tokens - 1)


def _first_row_of_blocks(plan: PlanArrays) -> Int[Array, " blocks"]:
    """Return the first row of the first tile of each block's stream."""
    segment = Segment(*plan.segments.T)
    blocks = plan.block_pages.shape[0]
    # A stream begins where some segment begins, so the last segment that begins at or before a block has its tile.
    at = jnp.where(segment.end > segment.begin, segment.begin, blocks)
    begins = jnp.full(blocks, -1, jnp.int32).at[at].set(segment.tile0, mode="drop")
    number = jnp.arange(blocks, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(begins >= 0, number, 0))
    return begins[last] * plan.tile_rows
