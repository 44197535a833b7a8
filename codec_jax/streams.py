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

from codec_jax.arrays import expand
from codec_jax.forest import Forest
from pallas_kernels.columns import Page

#: Pages for fewer KV tokens than this stay in the narrow streams of the two tiles: a stream has fixed costs.
LEAST_WIDE_TOKENS = 8192
#: By how much less is enough where there are as many streams as thread blocks: those of two tiles are then read at
#: different times, and the second time from memory once more.
_LESS_OF_MANY = 4


class Rows(NamedTuple):
    """How query rows make up tiles."""

    per_request: int  # T x G
    query_tokens: int  # T
    of_tile: int
    num_tiles: int


class Streams(NamedTuple):
    """Extents, consecutive pages of one node in one stream: stream by stream, those without a mask first.

    Wide streams come before narrow ones. A page here holds `slot_tokens` tokens: a page of the pool, or a part of one.
    """

    tile: Int[np.ndarray, " streams"]  # the first tile
    other_tile: Int[np.ndarray, " streams"]  # the second tile of a wide stream, else the first again
    stream: Int[np.ndarray, " extents"]
    masked: Bool[np.ndarray, " extents"]  # whether some row of the stream does not see all of its tokens
    node: Int[np.ndarray, " extents"]
    first: Int[np.ndarray, " extents"]  # index within the node of its first page
    pages: Int[np.ndarray, " extents"]  # at least 1
    lo: Int[np.ndarray, " extents"]  # rows that read it, counted from the first row of the stream's first tile
    hi: Int[np.ndarray, " extents"]

    @property
    def wide(self) -> Bool[np.ndarray, " streams"]:
        """Which streams serve two tiles."""
        return self.tile != self.other_tile


def tokens_of_tiles(forest: Forest, rows_per_request: int, tile_rows: int) -> tuple[int, int]:
    """Count the KV tokens that any row tile reads, and how often they are read again, by another tile."""
    first, end = forest.row_lo * rows_per_request // tile_rows, -(-forest.row_hi * rows_per_request // tile_rows)
    tiles = np.where(forest.row_hi > forest.row_lo, end - first, 0).astype(np.int64)
    once = int(forest.length[tiles > 0].sum(dtype=np.int64))
    return once, int(tiles @ forest.length) - once


def least_wide(num_streams: int, num_ctas: int) -> int:
    """Return the KV tokens that make a wide stream worth having on a GPU, by the streams of all tiles and kv heads."""
    return LEAST_WIDE_TOKENS // (_LESS_OF_MANY if num_streams >= num_ctas else 1)


def extents_of_streams(
    forest: Forest,
    most_length: Int[np.ndarray, " nodes"],
    rows: Rows,
    *,
    slot_tokens: int,
    steps: int,
    pairs: bool,
    least_wide_tokens: int,
) -> Streams:
    """List every (stream, page) such that some row of the stream reads the page while leaves grow by `steps`.

    `pairs` allows wide streams, of at least `least_wide_tokens` KV tokens.
    """
    node = np.flatnonzero((forest.row_hi > forest.row_lo) & (most_length > 0))
    lo, hi = forest.row_lo[node] * rows.per_request, forest.row_hi[node] * rows.per_request
    node_pages = -(-most_length[node] // slot_tokens)
    num_pairs = rows.num_tiles // 2 if pairs else 0
    source, stream = _streams_of_nodes(
        lo // rows.of_tile, (hi - 1) // rows.of_tile, node_pages * slot_tokens, num_pairs, least_wide_tokens
    )

    pair, single = np.arange(num_pairs), np.arange(rows.num_tiles)
    tile, other_tile = np.concatenate([pair * 2, single]), np.concatenate([pair * 2 + 1, single])
    stream_lo, width = tile * rows.of_tile, (1 + other_tile - tile) * rows.of_tile
    used_rows = int(forest.active.sum()) * rows.per_request
    stream_hi = np.minimum((other_tile + 1) * rows.of_tile, used_rows)

    # The pages that all rows see in full are the first of a node, and so are those that some row may see at all.
    node, lo, hi = node[source], lo[source], hi[source]
    count, full = node_pages[source], forest.length[node] // slot_tokens
    if rows.query_tokens > 1:
        least, most = _positions_of_tiles(forest, rows)
        start = forest.start[node]
        full = np.minimum(full, (np.minimum(least[tile], least[other_tile])[stream] - start) // slot_tokens)
        last = np.maximum(most[tile], most[other_tile])[stream].astype(np.int64) + steps  # which may be any number
        count = np.clip((last - start) // slot_tokens + 1, 0, count).astype(count.dtype)
    full = np.where((lo <= stream_lo[stream]) & (hi >= stream_hi[stream]), np.clip(full, 0, count), 0)

    counts = np.stack([full, count - full])
    order = np.argsort(np.stack([stream * 2, stream * 2 + 1]).reshape(-1), kind="stable")
    order = order[counts.reshape(-1)[order] > 0]
    masked, extent = np.divmod(order, len(node)) if len(node) else (order, order)
    stream = stream[extent]
    return Streams(
        tile=tile,
        other_tile=other_tile,
        stream=stream,
        masked=masked.astype(bool),
        node=node[extent],
        first=np.where(masked, full[extent], 0),
        pages=counts.reshape(-1)[order],
        lo=np.maximum(lo[extent] - stream_lo[stream], 0),
        hi=np.minimum(hi[extent] - stream_lo[stream], width[stream]),
    )


def blocks_of_streams(
    forest: Forest,
    streams: Streams,
    stream_ptr: Int[np.ndarray, " streams+1"],
    *,
    slots: int,
    slot_tokens: int,
    capacity: int,
) -> Int[np.ndarray, "capacity slots 4"]:
    """Lay the pages of every stream out in blocks of `slots` pages, columns of `Page`.

    Stream s gets blocks [stream_ptr[s], stream_ptr[s + 1]); the last of them is filled up with pages of 0 rows.
    """
    per_page = forest.page_size // slot_tokens
    blocks = np.zeros((capacity, slots, len(Page._fields)), np.int32)
    if not len(streams.stream):
        return blocks
    # The last extent of a stream goes on through what is left of its last block, which is cleared afterwards.
    last = np.append(np.flatnonzero(np.diff(streams.stream)), len(streams.stream) - 1)
    end = np.cumsum(streams.pages)
    used = np.diff(end[last], prepend=0)  # pages of each stream that has any
    spare = -used % slots
    count = streams.pages.copy()
    count[last] += spare
    begin = np.cumsum(count) - count
    # Columns hold what each would be at slot 0 of all; pages count up from there.
    page = Page(
        page_id=forest.page_offset[streams.node] * per_page + streams.first - begin,
        node=streams.node,
        token=(streams.first - begin) * slot_tokens,
        readers=streams.lo + (streams.hi << 16),
    )
    total = int(begin[-1] + count[-1])
    flat = blocks.reshape(-1, len(Page._fields))[:total]
    flat[:] = np.repeat(np.stack(page, axis=1).astype(np.int32), count, axis=0)
    number = np.arange(total, dtype=np.int32)
    columns = Page(*flat.T)
    entry = columns.page_id + number
    if per_page > 1:
        entry, part = np.divmod(entry, per_page)
    found = forest.pages.take(entry, mode="clip")
    columns.page_id[:] = found * per_page + part if per_page > 1 else found
    columns.token[:] += number * np.int32(slot_tokens)
    group, nth = expand(spare)
    flat[(begin + count)[last][group] - 1 - nth] = 0
    return blocks


def blocks_alike(streams: Streams, length: Int[np.ndarray, " nodes"], *, slots: int, slot_tokens: int) -> int:
    """Count the blocks all of whose tokens are there and have the same readers, so that no mask by token is needed."""
    stream, first, pages, lo, hi = streams.stream, streams.first, streams.pages, streams.lo, streams.hi
    if not len(stream):
        return 0
    full = np.clip(length[streams.node] // slot_tokens - first, 0, pages)
    begin = np.cumsum(pages) - pages
    opens = np.flatnonzero(stream[1:] != stream[:-1]) + 1  # a stream, at a block of its own
    skipped = np.zeros_like(begin)
    skipped[opens] = begin[opens]
    begin -= np.maximum.accumulate(skipped)  # within the stream
    breaks = (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1]) | (full[:-1] != pages[:-1])
    breaks[opens - 1] = True
    last = np.append(np.flatnonzero(breaks), len(stream) - 1)
    head = np.append(0, last[:-1] + 1)
    return int(np.maximum((begin + full)[last] // slots - -(-begin[head] // slots), 0).sum())


def _streams_of_nodes(
    first_tile: Int[np.ndarray, " n"],
    last_tile: Int[np.ndarray, " n"],
    tokens: Int[np.ndarray, " n"],
    num_pairs: int,
    least_wide_tokens: int,
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """Assign each node, read by tiles first to last, to streams: returns (node, stream) for each assignment.

    Both tiles of a pair read a node through the pair's wide stream, provided that such nodes have enough tokens.
    """
    # Pair p is tiles 2p and 2p + 1.
    first_pair, past_pair = -(-first_tile // 2), np.minimum((last_tile + 1) // 2, num_pairs)
    in_pairs, nth = expand(np.maximum(past_pair - first_pair, 0))
    pair = first_pair[in_pairs] + nth
    worthwhile = np.bincount(pair, tokens[in_pairs], minlength=num_pairs) >= least_wide_tokens
    wide = worthwhile[pair]
    in_pairs, pair = in_pairs[wide], pair[wide]

    singly, nth = expand(last_tile - first_tile + 1)
    tile = first_tile[singly] + nth
    if num_pairs:
        # A tile leaves the node to its pair if the pair is worthwhile and the other tile reads the node too.
        of_tile = np.minimum(tile // 2, num_pairs - 1)
        other = tile ^ 1
        left = worthwhile[of_tile]
        left &= (other >= first_tile[singly]) & (other <= last_tile[singly])
        singly, tile = singly[~left], tile[~left]
    return np.concatenate([in_pairs, singly]), np.concatenate([pair, num_pairs + tile])


def _positions_of_tiles(forest: Forest, rows: Rows) -> tuple[Int[np.ndarray, " tiles"], Int[np.ndarray, " tiles"]]:
    """Return where the query tokens of each tile's requests begin at least, and the tile's greatest position.

    Nothing says that a query token sees those before it: they may be a draft tree. Free slots do not count.
    """
    used = np.repeat(forest.active[forest.request_of_row], rows.per_request)
    position = forest.positions(rows.query_tokens)[forest.request_of_row]
    begin = np.repeat(position[:, 0], rows.per_request)
    position = np.repeat(position.reshape(-1), rows.per_request // rows.query_tokens)
    padding = rows.num_tiles * rows.of_tile - len(position)
    shape = (rows.num_tiles, rows.of_tile)
    huge = np.iinfo(np.int32).max // 2
    least = np.pad(np.where(used, begin, huge), (0, padding), constant_values=huge).reshape(shape)
    most = np.pad(np.where(used, position, -huge), (0, padding), constant_values=-huge).reshape(shape)
    return least.min(1), most.max(1)
