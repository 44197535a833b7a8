"""The cuts of a plan as rows: segments, where they begin in the query, and which partials they write and POR merges."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from codec_jax.arrays import bucket
from codec_jax.forest import Forest
from codec_jax.planning.streams import Grid, Streams
from codec_jax.planning.work import Schedule, Work
from pallas_kernels.plan_format import Segment


def query_starts(forest: Forest, grid: Grid) -> Int[np.ndarray, " tiles"]:
    """Find the tiles whose query rows are consecutive in the caller's order: the entry that each begins with, or -1."""
    group = grid.rows_per_request // grid.query_tokens
    if grid.tile_rows % group:
        return np.full(grid.num_tiles, -1)
    units = grid.tile_rows // group
    first = np.arange(grid.num_tiles) * units
    order = forest.request_of_row
    if not len(order):
        return np.full(grid.num_tiles, -1)
    # Rows of requests that directly follow each other in both orders have the same value here.
    run = np.cumsum(np.diff(order, prepend=order[0]) != 1)
    begin, end = first // grid.query_tokens, np.minimum((first + units - 1) // grid.query_tokens, len(order) - 1)
    entry = order[begin].astype(np.int64) * grid.query_tokens + first % grid.query_tokens
    # Rows that a tile writes past the last request must fall past the end of the query.
    total = len(order) * grid.query_tokens
    inside = (first + units <= total) | (entry + total - first == total)
    return np.where((run[begin] == run[end]) & inside, entry, -1)


def list_segments(
    schedule: Schedule,
    work: Work,
    streams: Streams,
    grid: Grid,
    starts: Int[np.ndarray, " tiles"],
    least: int,
) -> tuple[Int[np.ndarray, "segments 10"], Int[np.ndarray, " tiles*K+1"], int]:
    """Write the cuts as rows; return them, the merge lists, and how many partials to make room for."""
    # Cuts between streams and thread blocks keep within bounds that do not depend on the tree; others may not.
    heads, num_ctas = work.num_kv_heads, len(schedule.cta_ptr) - 1
    num_merges, num_pairs = grid.num_tiles * heads, (grid.num_tiles // 2) * heads * (grid.lanes - 1)
    wide = work.wide[schedule.stream]
    num_segments, num_partials = len(wide), len(wide) + int(np.count_nonzero(wide))
    capacity = max(num_merges + num_pairs + num_ctas, least)
    capacity = capacity if num_segments <= capacity else bucket(num_segments)
    room = capacity + num_pairs + num_ctas * (grid.lanes - 1)
    room = room if num_partials <= room else bucket(num_partials)

    tile0, tile1 = streams.tile0[schedule.stream], streams.tile1[schedule.stream]
    partial0, partial1, merge_ptr = _partials(tile0, tile1, schedule, heads, num_merges, room)
    columns = Segment(
        tile0=tile0,
        tile1=tile1,
        head=schedule.head,
        begin=schedule.begin,
        first_masked=np.clip(work.first_masked[schedule.stream], schedule.begin, schedule.end),
        end=schedule.end,
        partial0=partial0,
        partial1=partial1,
        query_start0=starts[tile0],
        query_start1=starts[tile1],
    )
    segments = np.zeros((capacity, len(Segment._fields)), np.int32)
    segments[:num_segments] = np.stack(columns, axis=1)
    return segments, merge_ptr, room


def _partials(
    tile0: Int[np.ndarray, " segments"],
    tile1: Int[np.ndarray, " segments"],
    schedule: Schedule,
    num_kv_heads: int,
    num_merges: int,
    nowhere: int,
) -> tuple[Int[np.ndarray, " segments"], Int[np.ndarray, " segments"], Int[np.ndarray, " merges+1"]]:
    """Number the partials such that those of one (tile, head) are consecutive, in the order of their blocks.

    A narrow segment has one; its other goes nowhere.
    """
    merge = np.stack([tile0, tile1], axis=1) * num_kv_heads + schedule.head[:, None]
    merge[tile0 == tile1, 1] = num_merges
    merge = merge.reshape(-1)
    number = np.empty(len(merge), np.int64)
    number[np.lexsort((np.repeat(schedule.begin, 2), merge))] = np.arange(len(merge))
    number[merge == num_merges] = nowhere
    merge_ptr = np.cumsum(np.bincount(merge + 1, minlength=num_merges + 2)[: num_merges + 1])
    partial0, partial1 = number.reshape(-1, 2).T
    return partial0, partial1, merge_ptr.astype(np.int32)
