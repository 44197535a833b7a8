"""Re-planning: what changes in a plan when leaves grow are the pages at the ends of a few streams (paper, section 5).

    stream    |b0 |b1 |b2 |b3..|            a leaf of it grew by two pages: one fits the last block,
              |b0 |b1 |b2 |b3 p|b4 p..|     the other opens a new one, and later streams move up

Streams, cuts and merge lists stay; the last segment of such a stream gets the new blocks. So the plan is as exact as a
new one, and a little less balanced with every time, until it is made anew.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import expand
from codec_jax.forest import Forest
from codec_jax.plan import Plan, list_runs, make_plan, most_length
from codec_jax.schedule import loads
from pallas_kernels.columns import Page, Segment

#: A plan whose busiest thread block has more than this much of the mean load, and a block, is made anew.
_MOST_IMBALANCE = 1.08


def replan(plan: Plan, planned: Forest, forest: Forest, *, steps: int = 1) -> Plan:
    """Plan for a forest on the host, given the plan of the forest that it grew from.

    Where `forest` is `planned` with longer leaves, which may have got pages for it, the plan is extended; where it is
    anything else, or the extended plan would not be balanced, it is made anew, with the sizes and the costs of `plan`,
    and the default policy and `least_wide_tokens`. The result depends on the arguments alone.

    Args:
      plan: the plan made for `planned`, with NumPy arrays.
      planned: the forest before.
      forest: the forest to plan for.
      steps: tokens that every leaf may grow by before a new plan is due, as in `make_plan`.

    Raises what `make_plan` raises.
    """
    checks.positive("steps", steps)
    if planned.is_host and forest.is_host:
        extended = _extended(plan, planned, forest, steps)
        if extended is not None and _is_balanced(extended):
            return extended
    return make_plan(
        forest,
        num_q_heads=plan.num_q_heads,
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        steps=steps,
        query_tokens=plan.query_tokens,
        num_ctas=len(plan.runs),
        tile_rows=plan.tile_rows,
        block_tokens=plan.block_tokens,
        lanes=plan.lanes,
        block_capacity=len(plan.pages),
        cost_model=plan.cost_model,
    )


def _is_balanced(plan: Plan) -> bool:
    """Whether no thread block has much more to do than the mean, beside what rounding to whole blocks may add."""
    load = loads(plan)
    excess = float(load.max() - _MOST_IMBALANCE * load.mean())
    if excess <= 0:
        return True
    return excess <= plan.estimate.block_us.max()


def _extended(plan: Plan, planned: Forest, forest: Forest, steps: int) -> Plan | None:
    """Return the plan with what the leaves grew by, or None if more has changed or there is no room for it."""
    if plan.query_tokens > 1 or plan.structure != planned.structure or not _only_leaves_grew(planned, forest):
        return None
    # What a plan lists is never too much: tokens past a node's end are masked.
    most = np.maximum(most_length(forest, steps), plan.most_length)
    slot = plan.slot_tokens
    listed, needed = -(-plan.most_length // slot), -(-most // slot)
    pages = _with_pages(plan, forest, listed, needed) if (needed > listed).any() else (plan.pages, plan.segments)
    if pages is None:
        return None
    blocks, segments = pages
    return replace(
        plan,
        pages=blocks,
        segments=segments,
        runs=list_runs(plan.cta_ptr, segments, blocks),
        least_length=forest.length,
        most_length=most,
        structure=forest.structure,
    )


def _only_leaves_grew(planned: Forest, forest: Forest) -> bool:
    """Whether the trees are the same but for leaves of one reader that are longer or have further pages."""
    for before, after in ((planned.parent, forest.parent), (planned.leaf, forest.leaf)):
        if before.shape != after.shape or (before != after).any():
            return False
    if planned.page_size != forest.page_size:
        return False
    own = np.zeros(forest.node_capacity, bool)
    leaf = forest.leaf[forest.leaf >= 0]
    own[leaf] = forest.row_hi[leaf] - forest.row_lo[leaf] == 1
    added, grown = forest.page_count - planned.page_count, forest.length - planned.length
    change = added | grown  # negative if one of them is, 0 if both are
    if np.where(own, change < 0, change != 0).any():
        return False
    # Nodes lie one after another: without the added pages, the lists of pages are the same.
    entries, grows = forest.used_pages, np.flatnonzero(added)
    group, nth = expand(added[grows])
    kept = np.ones(len(entries), bool)
    kept[(forest.page_offset + planned.page_count)[grows][group] + nth] = False
    return np.array_equal(entries[kept], planned.used_pages)


def _with_pages(
    plan: Plan, forest: Forest, listed: Int[np.ndarray, " nodes"], needed: Int[np.ndarray, " nodes"]
) -> tuple[Int[np.ndarray, "blocks slots 4"], Int[np.ndarray, "segments 10"]] | None:
    """List pages [listed, needed) of every node too, at the end of the stream that has it; None if there is no room."""
    slots, slot = plan.pages.shape[1], plan.slot_tokens
    node = np.flatnonzero(needed > listed)
    node = node[np.argsort(forest.row_lo[node], kind="stable")]
    row_lo, row_hi = forest.row_lo[node] * plan.group, forest.row_hi[node] * plan.group
    tile = row_lo // plan.tile_rows
    if (tile != (row_hi - 1) // plan.tile_rows).any():
        return None  # a node that several tiles read may be in several streams
    used = plan.segments[: plan.runs[-1, 1]]
    segment = Segment(*used.T)
    last = np.zeros(plan.num_tiles, np.int64)  # the block after the last of each tile's narrow stream
    narrow = ~segment.is_wide
    np.maximum.at(last, segment.tile[narrow], segment.hi[narrow])

    # By stream: what is added to it, and what free slots its last block has.
    first = np.concatenate([[0], 1 + np.flatnonzero(tile[1:] != tile[:-1])])
    end, count = last[tile[first]], (needed - listed)[node]
    if not end.all():
        return None  # a tile that has no stream yet
    added = np.add.reduceat(count, first)
    filled = np.count_nonzero(plan.pages[end - 1][..., Page._fields.index("readers")], axis=1)
    extra = -(-np.maximum(filled + added - slots, 0) // slots)
    before = np.cumsum(extra) - extra  # blocks that open in earlier streams
    num_blocks = int(segment.hi.max())
    if num_blocks + int(extra.sum()) > len(plan.pages):
        return None
    blocks = np.empty_like(plan.pages)
    bounds = [0, *end[extra > 0].tolist(), num_blocks]
    opened = [*extra[extra > 0].tolist(), len(blocks)]
    for lo, hi, by, opening in zip(bounds[:-1], bounds[1:], np.cumsum([0, *opened[:-1]]).tolist(), opened, strict=True):
        # What lies between two ends that open blocks moves up together; the rest is empty.
        blocks[lo + by : hi + by] = plan.pages[lo:hi]
        blocks[hi + by : hi + by + opening] = 0

    stream = np.searchsorted(first, np.arange(len(node)), side="right") - 1
    entry, nth = expand(count)
    free = (end + before - 1) * slots + filled  # the first free slot of each stream
    place = (free - np.cumsum(added) + added)[stream[entry]] + np.arange(len(entry))
    page, node = listed[node[entry]] + nth, node[entry]
    per_page = forest.page_size // slot
    pool_page = forest.pages[forest.page_offset[node] + page // per_page]
    lo, hi = row_lo - tile * plan.tile_rows, row_hi - tile * plan.tile_rows
    fields = Page(pool_page * per_page + page % per_page, node, page * slot, (lo + (hi << 16))[entry])
    blocks.reshape(-1, len(Page._fields))[place] = np.stack(fields, axis=1)

    # A segment moves with its stream, and the last one of a stream that opens blocks gets them.
    moved = np.concatenate([[0], np.cumsum(extra)]).astype(np.int32)[np.searchsorted(end, segment.lo, side="right")]
    of_tile = np.zeros(plan.num_tiles, np.int32)
    of_tile[tile[first]] = extra
    segments = plan.segments.copy()
    columns = Segment(*segments[: len(used)].T)
    for column in (columns.lo, columns.masked, columns.hi):
        column += moved
    is_last = narrow & (segment.hi == last[segment.tile])
    columns.hi[is_last] += of_tile[segment.tile[is_last]]
    return blocks, segments
