"""Streams in which a row's sums do not depend on who is beside it: what policy "invariant" makes of those of tiles.

How the result of a row is rounded depends on four things. Here each of them follows from the row's own context:

    places  page q of a context stands in block q // P at place q % P, P pages to a block. Requests that have the same
            pages there share the block; others have blocks of their own
    lanes   blocks come in the order of their numbers; of two lanes, one takes the even and one the odd ones. Kernels
            that do not divide narrow segments take plans of one lane (`Tiling.sums`)
    cuts    partials end at the same tokens of every context (`parts_of`), wherever the load would want them to
    merges  POR takes a row's partials in their order

Whatever else is in the row's streams are blocks and partials that it does not see: their weights are 0, they leave the
maximum alone, and the factor of what is there is 1, so that not a bit changes. Who shares a stream is thus free, and
is chosen by the load: rows of a tile whose parts have many blocks get several streams for them.

Nothing is said of where tokens stand in their pages: a request has the bits that it has alone if it is laid out in the
same way. It is if nodes begin at multiples of the page size (`Forest.from_sequences(..., whole_pages=True)`), and so it
is in every view of a forest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax.arrays import expand
from codec_jax.forest import Forest
from codec_jax.forest.depth_first import sum_above
from codec_jax.planning.streams import Grid, Runs, Streams, list_streams

#: Tokens of a part: a quarter of those before it, rounded down to a power of two, from 2^10 to 2^12. So a short context
#: has enough parts for many thread blocks, and a long one not too many to merge.
_QUARTER, _SHORTEST, _LONGEST = 2, 10, 12
#: Blocks of a stream that serves several requests, at most, as a share of what a thread block has to do.
_SHARE = 0.5


class _Blocks(NamedTuple):
    """Blocks of one kv head, each with the pages that all of its readers have there."""

    tile: Int[np.ndarray, " blocks"]
    number: Int[np.ndarray, " blocks"]  # in the contexts of its readers
    row_lo: Int[np.ndarray, " blocks"]  # readers, counted from the first row of the tile
    row_hi: Int[np.ndarray, " blocks"]
    whole: Bool[np.ndarray, " blocks"]  # whether every row of the tile sees every token
    first_extent: Int[np.ndarray, " blocks+1"]  # of each block, in `extents`
    extents: Streams  # each within a block
    place: Int[np.ndarray, " extents"]  # in the block, of the first page


class _Placed(NamedTuple):
    """Blocks in streams. One that is read in several streams is there several times."""

    tile: Int[np.ndarray, " streams"]
    first: Int[np.ndarray, " streams+1"]  # stream s has places [first[s], first[s + 1]) for blocks
    block: Int[np.ndarray, " placed"]
    place: Int[np.ndarray, " placed"]
    row_lo: Int[np.ndarray, " placed"]
    row_hi: Int[np.ndarray, " placed"]


def list_invariant_streams(
    forest: Forest, max_length: Int[np.ndarray, " nodes"], runs: Runs, grid: Grid, *, steps: int
) -> Streams:
    """List what `list_streams` does, in narrow streams in which no row's sums depend on the other rows.

    Every block has all of its pages; those that nobody reads fill up.
    """
    streams = list_streams(forest, max_length, runs, grid._replace(lanes=1), steps=steps)
    if not len(streams.stream):
        return streams
    blocks = _blocks(streams, forest, grid)
    placed = _place(blocks, grid)
    size, total = grid.pages_per_block, int(placed.first[-1])
    stream_of_place = np.repeat(np.arange(len(placed.tile)), np.diff(placed.first))
    seen = np.zeros(total, bool)
    alone = (placed.row_lo == blocks.row_lo[placed.block]) & (placed.row_hi == blocks.row_hi[placed.block])
    seen[placed.place] = blocks.whole[placed.block] & alone
    # Blocks without a mask are the first of a stream.
    first_masked = np.minimum.reduceat(np.where(seen, total, np.arange(total)), placed.first[:-1])

    which, nth = expand(np.diff(blocks.first_extent)[placed.block])
    extent = blocks.first_extent[placed.block][which] + nth
    page = placed.place[which] * size + blocks.place[extent]
    filled = np.zeros(total * size, bool)
    of_extent, nth = expand(blocks.extents.pages[extent])
    filled[page[of_extent] + nth] = True
    spare = np.flatnonzero(~filled)
    order = np.argsort(np.concatenate([page, spare]), kind="stable")

    def then_spare(values: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([values, np.full(len(spare), fill)])[order]

    at = then_spare(page, 0)
    at[order >= len(page)] = spare
    at //= size
    stream = stream_of_place[at]
    return Streams(
        tile0=placed.tile,
        tile1=placed.tile,
        stream=stream,
        masked=at >= first_masked[stream],
        node=then_spare(blocks.extents.node[extent], 0),
        first=then_spare(blocks.extents.first[extent], 0),
        pages=then_spare(blocks.extents.pages[extent], 1),
        row_lo=then_spare(placed.row_lo[which], 0),
        row_hi=then_spare(placed.row_hi[which], 0),
    )


def _blocks(streams: Streams, forest: Forest, grid: Grid) -> _Blocks:
    """Cut extents at the ends of blocks, and part the readers of a block wherever one of its extents has others."""
    size, rows = grid.pages_per_block, grid.tile_rows + 1
    before = sum_above(forest.parent, -(-forest.length // grid.page_tokens))  # pages of the nodes above
    begin = before[streams.node] + streams.first
    extent, nth = expand((begin + streams.pages - 1) // size - begin // size + 1)
    number = begin[extent] // size + nth
    first = np.maximum(begin[extent], number * size)
    extents = streams._replace(
        stream=streams.stream[extent],
        masked=streams.masked[extent],
        node=streams.node[extent],
        first=streams.first[extent] + first - begin[extent],
        pages=np.minimum((begin + streams.pages)[extent], (number + 1) * size) - first,
        row_lo=streams.row_lo[extent],
        row_hi=streams.row_hi[extent],
    )
    most = int(number.max()) + 1
    key = (extents.stream * most + number) * rows  # rows of one block of one tile are neighbours on a line
    bounds = np.unique(np.concatenate([key + extents.row_lo, key + extents.row_hi]))
    from_, to = (np.searchsorted(bounds, key + row) for row in (extents.row_lo, extents.row_hi))
    extent, nth = expand(to - from_)
    interval = from_[extent] + nth
    order = np.lexsort((first[extent], interval))
    extent, interval = extent[order], interval[order]
    opens = np.append(np.flatnonzero(np.diff(interval, prepend=-1)), len(interval))
    interval = interval[opens[:-1]]
    extents = extents._replace(**{name: getattr(extents, name)[extent] for name in Streams._fields[2:]})
    of_block, row_lo = np.divmod(bounds[interval], rows)
    tile, number_of_block = np.divmod(of_block, most)
    unmasked = np.add.reduceat(np.where(extents.masked, 0, extents.pages), opens[:-1])
    return _Blocks(
        tile=tile,
        number=number_of_block,
        row_lo=row_lo,
        row_hi=bounds[interval + 1] % rows,
        whole=unmasked == size,
        first_extent=opens,
        extents=extents,
        place=first[extent] % size,
    )


def _place(blocks: _Blocks, grid: Grid) -> _Placed:
    """Choose the rows that share a stream in each part of their contexts, and the place of each block there."""
    rows, lanes = grid.tile_rows + 1, grid.lanes
    load = math.ceil(_SHARE * len(blocks.tile) * grid.num_kv_heads / grid.num_ctas)
    tokens, tiles = grid.pages_per_block * grid.page_tokens, -(-grid.rows_per_request // grid.tile_rows)
    part = parts_of(int(blocks.number.max()) + 1, tokens, tiles)[blocks.number]
    key = (blocks.tile * (int(part.max()) + 1) + part) * rows
    points, count = np.unique(key + blocks.row_lo, return_counts=True)
    before, of_part = np.cumsum(count) - count, points // rows
    before -= before[np.searchsorted(of_part, of_part)]
    opens = (np.diff(of_part, prepend=-1) != 0) | (np.diff(before // load, prepend=0) != 0)
    stream_of_point, opens = np.cumsum(opens) - 1, np.flatnonzero(opens)
    first_row = points[opens] % rows
    last = np.append(of_part[opens[1:]] != of_part[opens[:-1]], True)  # of its part
    end_row = np.where(last, grid.tile_rows, np.roll(first_row, -1))
    tile = of_part[opens] // (int(part.max()) + 1)

    from_ = stream_of_point[np.searchsorted(points, key + blocks.row_lo)]
    to = stream_of_point[np.searchsorted(points, key + blocks.row_hi) - 1]
    block, nth = expand(to - from_ + 1)
    stream = from_[block] + nth
    row_lo = np.maximum(blocks.row_lo[block], first_row[stream])
    row_hi = np.minimum(blocks.row_hi[block], end_row[stream])
    # Each lane's blocks in order; where one lane has fewer of a stream than the other, places stay empty.
    lane = stream * lanes + blocks.number[block] % lanes
    order = np.lexsort((row_lo, blocks.number[block], lane))
    lane = lane[order]
    nth = np.arange(len(lane)) - np.searchsorted(lane, lane)
    most = np.bincount(lane, minlength=len(tile) * lanes).reshape(-1, lanes).max(axis=1)
    first = np.concatenate([[0], np.cumsum(most * lanes)])
    place = first[stream[order]] + nth * lanes + lane % lanes
    return _Placed(tile, first, block[order], place, row_lo[order], row_hi[order])


def parts_of(num_blocks: int, block_tokens: int, tiles: int) -> Int[np.ndarray, " blocks"]:
    """Return the part of a context that each of its blocks belongs to.

    Where the rows of one request fill several tiles, parts are as many times as long: there is enough to divide.
    """
    token = np.arange(num_blocks) * block_tokens // tiles
    length = 1 << np.clip(np.log2(np.maximum(token, 1)).astype(np.int64) - _QUARTER, _SHORTEST, _LONGEST)
    return np.cumsum(np.diff(token // length * length, prepend=0) != 0)


def room_for_more(num_ctas: int, num_kv_heads: int, block_tokens: int) -> tuple[int, int]:
    """Bound the streams of a kv head beyond one of each tile and part, and the blocks that these read once more."""
    streams = math.ceil(num_ctas / (_SHARE * num_kv_heads))
    return streams, streams * -(-(1 << _LONGEST) // block_tokens)
