"""Streams: the KV pages that each row tile, or each pair of row tiles, reads, and the blocks that they make up.

A narrow stream serves one row tile. A wide stream serves two neighbouring tiles and holds the pages that both read, so
that those are loaded once for both. Every (row, KV token) that is visible is in exactly one stream.

    rows      [ tile 0 ][ tile 1 ][ tile 2 ]        node A is read by all rows, node B by those of tile 1
    streams   [ wide 0: A        ]
              [narrow 0][narrow 1][narrow 2]        narrow 1: B;  narrow 2: A
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax.arrays import expand, reduce_intervals
from codec_jax.forest import Forest
from codec_jax.forest.page_subset import PageSubset
from pallas_kernels.heads import Window
from pallas_kernels.plan_format import Page
from pallas_kernels.token_mask import pack_readers, pages_behind, pages_seen

#: Pages for fewer KV tokens than this stay in the narrow streams of the two tiles: a stream has fixed costs.
MIN_WIDE_TOKENS = 3072


class Grid(NamedTuple):
    """How query rows make up tiles, pages make up blocks, and who works on them."""

    rows_per_request: int  # T x G
    query_tokens: int  # T
    window: Window | None
    tile_rows: int
    num_tiles: int
    lanes: int  # tiles that a stream may serve
    page_tokens: int  # of a block's page: a page of the pool, or an equal part of one
    pages_per_block: int
    num_kv_heads: int
    num_ctas: int
    min_wide_tokens: float  # KV tokens that both tiles of a pair must read to share segments for them


class Runs(NamedTuple):
    """Consecutive pages of nodes that some request sees: of a whole node, or of the part that is in a subset."""

    node: Int[np.ndarray, " runs"]
    first: Int[np.ndarray, " runs"]  # index within the node of its first page, of `page_tokens` tokens as in a block
    pages: Int[np.ndarray, " runs"]  # at least 1


class Streams(NamedTuple):
    """Extents, consecutive pages of one node in one stream: stream by stream, those without a mask first.

    Wide streams come before narrow ones. A page here holds `page_tokens` tokens: a page of the pool, or a part of one.
    """

    tile0: Int[np.ndarray, " streams"]
    tile1: Int[np.ndarray, " streams"]  # of a wide stream, else tile0 again
    stream: Int[np.ndarray, " extents"]
    masked: Bool[np.ndarray, " extents"]  # whether some row of the stream does not see all of its tokens
    node: Int[np.ndarray, " extents"]
    first: Int[np.ndarray, " extents"]  # index within the node of its first page
    pages: Int[np.ndarray, " extents"]  # at least 1
    row_lo: Int[np.ndarray, " extents"]  # rows that read it, counted from the first row of tile0
    row_hi: Int[np.ndarray, " extents"]

    @property
    def wide(self) -> Bool[np.ndarray, " streams"]:
        """Which streams serve two tiles."""
        return self.tile0 != self.tile1

    def sum_pages(self, pages: Int[np.ndarray, " extents"]) -> Int[np.ndarray, " streams"]:
        """Add up pages of extents by stream."""
        return np.bincount(self.stream, pages, len(self.tile0)).astype(np.int64)


def count_kv_tokens(
    forest: Forest, rows_per_request: int, tile_rows: int, hidden: Int[np.ndarray, " nodes"] | int = 0
) -> tuple[int, int]:
    """Count the KV tokens that any row tile reads, and how often they are read again, by another tile."""
    first, end = forest.row_lo * rows_per_request // tile_rows, -(-forest.row_hi * rows_per_request // tile_rows)
    tiles = np.where(forest.row_hi > forest.row_lo, end - first, 0).astype(np.int64)
    length = np.maximum(forest.length - hidden, 0)
    once = int(length[tiles > 0].sum(dtype=np.int64))
    return once, int(tiles @ length) - once


def list_runs(
    forest: Forest,
    max_length: Int[np.ndarray, " nodes"],
    page_tokens: int,
    subset: PageSubset | None,
    hidden: Int[np.ndarray, " nodes"],
) -> Runs:
    """List the pages that are read: all of them, or those of a subset."""
    node = np.flatnonzero((forest.row_hi > forest.row_lo) & (max_length > hidden))
    begin, end = hidden[node] // page_tokens, -(-max_length[node] // page_tokens)
    if subset is None:
        return Runs(node, begin, end - begin)
    parts = forest.page_size // page_tokens
    begin //= parts
    which, nth = expand(-(-end // parts) - begin)
    nth += begin[which]
    found = np.flatnonzero(subset.place[forest.page_ids[forest.page_offset[node][which] + nth]] >= 0)
    which, nth = which[found], nth[found]
    opens = np.flatnonzero((np.diff(which, prepend=-1) != 0) | (np.diff(found, prepend=-1) != 1))
    last = np.append(nth[opens[1:] - 1], nth[-1:]) + 1  # exclusive
    which, first = which[opens], nth[opens] * parts
    return Runs(node[which], first, np.minimum(last * parts, end[which]) - first)


def list_streams(
    forest: Forest, max_length: Int[np.ndarray, " nodes"], runs: Runs, grid: Grid, *, steps: int
) -> Streams:
    """List every (stream, page) such that some row of the stream reads the page while leaves grow by `steps`."""
    node = runs.node
    lo, hi = forest.row_lo[node] * grid.rows_per_request, forest.row_hi[node] * grid.rows_per_request
    num_pairs = grid.num_tiles // 2 if grid.lanes == 2 else 0
    source, stream = _streams_of_runs(
        lo // grid.tile_rows, (hi - 1) // grid.tile_rows, runs.pages * grid.page_tokens, num_pairs, grid.min_wide_tokens
    )

    pair, single = np.arange(num_pairs), np.arange(grid.num_tiles)
    tile0, tile1 = np.concatenate([pair * 2, single]), np.concatenate([pair * 2 + 1, single])
    stream_lo, width = tile0 * grid.tile_rows, (1 + tile1 - tile0) * grid.tile_rows
    used_rows = int(forest.active.sum()) * grid.rows_per_request
    stream_hi = np.minimum((tile1 + 1) * grid.tile_rows, used_rows)

    # The pages that all rows see in full are the first of a node, and so are those that some row may see at all.
    node, lo, hi, first, count = node[source], lo[source], hi[source], runs.first[source], runs.pages[source]
    positions = _positions_of_streams(forest, grid, tile0, tile1)[:, stream] if grid.query_tokens > 1 else None
    whole, seen = pages_seen(forest.length[node], forest.start[node], grid.page_tokens, steps, positions)
    if seen is not None:
        count = np.clip(seen - first, 0, count).astype(count.dtype)
    everyone = (lo <= stream_lo[stream]) & (hi >= stream_hi[stream])
    lo, hi = np.maximum(lo, stream_lo[stream]), np.minimum(hi, stream_lo[stream] + width[stream])
    edge = None  # pages before those that all rows see in full, and that a window hides from some of them
    if grid.window is not None:
        positions = _first_positions(forest, grid, lo, hi, steps)
        hidden, edge = pages_behind(max_length[node], forest.start[node], grid.page_tokens, positions)
        skipped = np.clip(hidden - first, 0, count)
        first, count = first + skipped, count - skipped
        edge = np.where(everyone, np.clip(edge - first, 0, count), 0)
    begin = 0 if edge is None else edge
    whole = np.where(everyone, np.clip(whole - first, begin, count) - begin, 0)

    # An extent is all that is masked after the whole pages of a run, or those pages, or what is masked before them.
    counts = [whole, count - begin - whole] if edge is None else [whole, count - edge - whole, edge]
    order = np.argsort(np.stack([stream * 2, *[stream * 2 + 1] * (len(counts) - 1)]).reshape(-1), kind="stable")
    pages = np.concatenate(counts)[order]
    order, pages = order[pages > 0], pages[pages > 0]
    part, run = np.divmod(order, len(node)) if len(node) else (order, order)
    firsts = [first + begin, first + begin + whole, first]
    stream = stream[run]
    return Streams(
        tile0=tile0,
        tile1=tile1,
        stream=stream,
        masked=part > 0,
        node=node[run],
        first=np.concatenate(firsts)[order],
        pages=pages,
        row_lo=lo[run] - stream_lo[stream],
        row_hi=hi[run] - stream_lo[stream],
    )


def lay_out_blocks(
    forest: Forest,
    streams: Streams,
    grid: Grid,
    capacity: int,
    subset: PageSubset | None,
) -> Int[np.ndarray, "capacity pages_per_block 4"]:
    """Lay the pages of every stream out in blocks, columns of `Page`.

    One stream comes after the other; the last block of each is filled up with pages that nobody reads. Page ids are
    places in the arrays that the plan is of, if it is not of all pages.
    """
    per_page = forest.page_size // grid.page_tokens
    blocks = np.zeros((capacity, grid.pages_per_block, len(Page._fields)), np.int32)
    if not len(streams.stream):
        return blocks
    # The last extent of a stream goes on through what is left of its last block, which is cleared afterwards.
    last = np.append(np.flatnonzero(np.diff(streams.stream)), len(streams.stream) - 1)
    end = np.cumsum(streams.pages)
    used = np.diff(end[last], prepend=0)  # pages of each stream that has any
    spare = -used % grid.pages_per_block
    count = streams.pages.copy()
    count[last] += spare
    begin = np.cumsum(count) - count
    # Columns hold what each would be at the first page of all; pages count up from there.
    page = Page(
        page_id=forest.page_offset[streams.node] * per_page + streams.first - begin,
        node=streams.node,
        token=(streams.first - begin) * grid.page_tokens,
        readers=pack_readers(streams.row_lo, streams.row_hi),
    )
    total = int(begin[-1] + count[-1])
    flat = blocks.reshape(-1, len(Page._fields))[:total]
    flat[:] = np.repeat(np.stack(page, axis=1).astype(np.int32), count, axis=0)
    number = np.arange(total, dtype=np.int32)
    columns = Page(*flat.T)
    entry = columns.page_id + number
    if per_page > 1:
        entry, part = np.divmod(entry, per_page)
    found = forest.page_ids.take(entry, mode="clip")
    found = found if subset is None else subset.place.take(found, mode="clip")
    columns.page_id[:] = found * per_page + part if per_page > 1 else found
    columns.token[:] += number * np.int32(grid.page_tokens)
    group, nth = expand(spare)
    flat[(begin + count)[last][group] - 1 - nth] = 0
    return blocks


def count_uniform_blocks(streams: Streams, length: Int[np.ndarray, " nodes"], grid: Grid) -> int:
    """Count the blocks all of whose tokens are there and have the same readers, so that no mask by token is needed."""
    stream, first, pages, lo, hi = streams.stream, streams.first, streams.pages, streams.row_lo, streams.row_hi
    if not len(stream):
        return 0
    full = np.clip(length[streams.node] // grid.page_tokens - first, 0, pages)
    begin = np.cumsum(pages) - pages
    opens = np.flatnonzero(stream[1:] != stream[:-1]) + 1  # a stream, at a block of its own
    skipped = np.zeros_like(begin)
    skipped[opens] = begin[opens]
    begin -= np.maximum.accumulate(skipped)  # within the stream
    breaks = (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1]) | (full[:-1] != pages[:-1])
    breaks[opens - 1] = True
    last = np.append(np.flatnonzero(breaks), len(stream) - 1)
    head = np.append(0, last[:-1] + 1)
    return int(
        np.maximum((begin + full)[last] // grid.pages_per_block - -(-begin[head] // grid.pages_per_block), 0).sum()
    )


def _streams_of_runs(
    first_tile: Int[np.ndarray, " n"],
    last_tile: Int[np.ndarray, " n"],
    tokens: Int[np.ndarray, " n"],
    num_pairs: int,
    min_wide_tokens: float,
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """Assign each run, read by tiles first to last, to streams: returns (run, stream) for each assignment.

    Both tiles of a pair read a run through the pair's wide stream, provided that such runs have enough tokens.
    """
    # Pair p is tiles 2p and 2p + 1.
    first_pair, past_pair = -(-first_tile // 2), np.minimum((last_tile + 1) // 2, num_pairs)
    in_pairs, nth = expand(np.maximum(past_pair - first_pair, 0))
    pair = first_pair[in_pairs] + nth
    worthwhile = np.bincount(pair, tokens[in_pairs], minlength=num_pairs) >= min_wide_tokens
    wide = worthwhile[pair]
    in_pairs, pair = in_pairs[wide], pair[wide]

    singly, nth = expand(last_tile - first_tile + 1)
    tile = first_tile[singly] + nth
    if num_pairs:
        # A tile leaves the run to its pair if the pair is worthwhile and the other tile reads it too.
        of_tile = np.minimum(tile // 2, num_pairs - 1)
        other = tile ^ 1
        left = worthwhile[of_tile]
        left &= (other >= first_tile[singly]) & (other <= last_tile[singly])
        singly, tile = singly[~left], tile[~left]
    return np.concatenate([in_pairs, singly]), np.concatenate([pair, num_pairs + tile])


def _positions_of_streams(
    forest: Forest, grid: Grid, tile0: Int[np.ndarray, " streams"], tile1: Int[np.ndarray, " streams"]
) -> Int[np.ndarray, "2 streams"]:
    """Return the smallest position at which the query tokens of a request begin, and the greatest of any of them.

    Free request slots do not count.
    """
    used = np.repeat(forest.active[forest.request_of_row], grid.rows_per_request)
    position = forest.positions(grid.query_tokens)[forest.request_of_row]
    begin = np.repeat(position[:, 0], grid.rows_per_request)
    position = np.repeat(position.reshape(-1), grid.rows_per_request // grid.query_tokens)
    padding = grid.num_tiles * grid.tile_rows - len(position)
    shape = (grid.num_tiles, grid.tile_rows)
    huge = np.iinfo(np.int32).max // 2
    low = np.pad(np.where(used, begin, huge), (0, padding), constant_values=huge).reshape(shape).min(1)
    high = np.pad(np.where(used, position, -huge), (0, padding), constant_values=-huge).reshape(shape).max(1)
    return np.stack([np.minimum(low[tile0], low[tile1]), np.maximum(high[tile0], high[tile1])]).astype(np.int64)


def _first_positions(
    forest: Forest, grid: Grid, lo: Int[np.ndarray, " n"], hi: Int[np.ndarray, " n"], steps: int
) -> Int[np.ndarray, "2 n"]:
    """Return the smallest position that any of rows [lo, hi) sees by now, and the greatest first one within steps.

    For the smallest a request's query tokens count as its first one, which candidates of a draft tree may be beside.
    """
    assert grid.window is not None
    position = forest.positions(grid.query_tokens)[forest.request_of_row]
    group = grid.rows_per_request // grid.query_tokens
    begin, end = lo // group, -(-hi // group)  # query tokens of all requests
    by_now = np.repeat(grid.window.first_position(position[:, 0]), grid.query_tokens)
    at_most = grid.window.first_position(position.reshape(-1).astype(np.int64) + steps)
    return np.stack(
        [reduce_intervals(np.minimum, by_now, begin, end), reduce_intervals(np.maximum, at_most, begin, end)]
    )
