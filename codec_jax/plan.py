"""The plan: which thread block computes attention between which query rows and which KV pages.

    rows     requests in depth-first order x query tokens x q heads of a kv head, cut into tiles of `tile_rows`
    streams  one per (tile, kv head): the pages of every node that some row of the tile reads, grouped into blocks;
             blocks whose every token every row sees come first and need no mask
    segments the streams laid end to end and cut into `num_ctas` runs of equal cost; a run is one or more segments
    merge    the segments of each stream, in order: POR combines their partials

Planning is host code on NumPy arrays. A plan is a pytree of int32 arrays with bucketed capacities that jitted steps
take as an argument. It refers to node lengths by node, so it stays exact while leaves grow by up to `steps` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from codec_jax import checks
from codec_jax.arrays import HostOrDevice, expand
from codec_jax.capacity import bucket
from codec_jax.errors import PlanError
from codec_jax.forest import Forest

# Costs in units of one unmasked block. Opening a segment loads a query tile and writes a partial that POR reads
# again; masks cost a few instructions per score. Estimates until costs are measured per device.
_SEGMENT_COST = 0.5
_MASKED_COST = 1.1


class Tiling(NamedTuple):
    """Sizes that the device decides."""

    num_ctas: int  # thread blocks
    tile_rows: int  # query rows of a tile
    block_tokens: int  # KV tokens of a block

    @classmethod
    def of_device(cls) -> Tiling:
        """Return the sizes for the default device: wgmma works on 64 rows; a CPU pays for every row of padding."""
        device = jax.devices()[0]
        if device.platform == "gpu":
            return cls(num_ctas=device.core_count, tile_rows=64, block_tokens=128)
        return cls(num_ctas=16, tile_rows=16, block_tokens=256)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Tiles, blocks, segments and merge lists for one forest and head layout; made by `make_plan`."""

    # Pages of the blocks. A slot that is not in use has an empty row interval.
    page_id: Int[HostOrDevice, "blocks slots"]  # physical page
    page_node: Int[HostOrDevice, "blocks slots"]  # the node that it belongs to
    page_token: Int[HostOrDevice, "blocks slots"]  # index within the node of its first token
    page_lo: Int[HostOrDevice, "blocks slots"]  # rows of the tile that read it: [page_lo, page_hi)
    page_hi: Int[HostOrDevice, "blocks slots"]
    # Segments in the order in which thread blocks run them: blocks [lo, hi), those from `masked` on need the mask.
    segment_tile: Int[HostOrDevice, " segments"]
    segment_head: Int[HostOrDevice, " segments"]
    segment_lo: Int[HostOrDevice, " segments"]
    segment_masked: Int[HostOrDevice, " segments"]
    segment_hi: Int[HostOrDevice, " segments"]
    cta_ptr: Int[HostOrDevice, " num_ctas+1"]  # thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])
    merge_ptr: Int[HostOrDevice, " streams+1"]  # stream u merges merge_segment[merge_ptr[u] : merge_ptr[u + 1]]
    merge_segment: Int[HostOrDevice, " segments"]
    # What the forest must look like for the plan to be exact.
    least_length: Int[HostOrDevice, " nodes"]
    most_length: Int[HostOrDevice, " nodes"]
    structure: Int[HostOrDevice, ""]

    page_size: int = field(metadata={"static": True})
    request_capacity: int = field(metadata={"static": True})
    query_tokens: int = field(metadata={"static": True})
    num_q_heads: int = field(metadata={"static": True})
    num_kv_heads: int = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})
    tile_rows: int = field(metadata={"static": True})

    @property
    def group(self) -> int:
        """Q heads per kv head (G)."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_tiles(self) -> int:
        """Row tiles, those of free request slots included."""
        return -(-self.request_capacity * self.query_tokens * self.group // self.tile_rows)

    def is_exact_for(self, forest: Forest) -> Bool[Array, ""]:
        """Whether the forest is the one planned for, with no more than `steps` tokens added to a leaf. Jittable."""
        same = forest.structure == self.structure
        return same & ((forest.length >= self.least_length) & (forest.length <= self.most_length)).all()

    def check(self, forest: Forest) -> None:
        """Raise PlanError if the plan cannot be used with the forest, as far as that shows without a device round trip.

        Capacities and page size always show; structure and lengths only while both are NumPy arrays.
        """
        for name, planned, got in (
            ("page_size", self.page_size, forest.page_size),
            ("request_capacity", self.request_capacity, forest.request_capacity),
            ("node_capacity", self.least_length.shape[0], forest.node_capacity),
        ):
            if planned != got:
                raise PlanError(
                    f"plan: expected a plan for {name} = {got}, which the forest has, got one for {planned}; "
                    "make a plan for this forest"
                )
        if not forest.is_host or not isinstance(self.structure, np.ndarray):
            return
        if forest.structure != self.structure:
            raise PlanError("plan: expected a plan for this forest, got one for another; make a plan for this forest")
        wrong = (forest.length < self.least_length) | (forest.length > self.most_length)
        if wrong.any():
            node = int(np.argmax(wrong))
            raise PlanError(
                f"plan: expected lengths within the plan's steps, got {forest.length[node]} tokens in node {node}, "
                f"which was planned for {self.least_length[node]} to {self.most_length[node]}; make a new plan"
            )


def make_plan(
    forest: Forest,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    steps: int = 1,
    query_tokens: int = 1,
    num_ctas: int | None = None,
    tile_rows: int | None = None,
    block_tokens: int | None = None,
    block_capacity: int = 0,
) -> Plan:
    """Plan attention over a forest on the host (paper, section 5: task division and scheduling).

    Args:
      forest: a forest with NumPy arrays.
      num_q_heads: N, a multiple of num_kv_heads (K).
      num_kv_heads: K.
      head_dim: H.
      steps: tokens that every leaf may grow by, as far as its pages have room, before a new plan is due.
      query_tokens: T, query tokens per request; they are the last T tokens of its context.
      num_ctas: thread blocks to spread the work over; defaults to the device's multiprocessors.
      tile_rows: query rows of a tile, a multiple of 8; defaults to what suits the device.
      block_tokens: KV tokens of a block, rounded down to whole pages (at least one).
      block_capacity: blocks to pad to, so that plans of changing size fit one compiled step; a plan that needs
        more is padded to the next bucket.

    Raises ValueError for numbers that do not fit together, TypeError for a forest that lives on a device.
    """
    if not forest.is_host:
        raise TypeError("forest: expected NumPy arrays, got arrays on a device; plan with the host's forest")
    tiling = Tiling.of_device()
    num_ctas = tiling.num_ctas if num_ctas is None else num_ctas
    tile_rows = tiling.tile_rows if tile_rows is None else tile_rows
    block_tokens = tiling.block_tokens if block_tokens is None else block_tokens
    for name, value in (
        ("num_q_heads", num_q_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("steps", steps),
        ("query_tokens", query_tokens),
        ("num_ctas", num_ctas),
        ("tile_rows", tile_rows),
        ("block_tokens", block_tokens),
    ):
        checks.positive(name, value)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_q_heads}")
    if tile_rows % 8:
        raise ValueError(f"tile_rows: expected a multiple of 8, got {tile_rows}")

    rows_per_request = query_tokens * (num_q_heads // num_kv_heads)
    num_tiles = -(-forest.request_capacity * rows_per_request // tile_rows)
    slots = max(1, block_tokens // forest.page_size)
    most_length = _most_length(forest, steps)
    pages = _pages_of_tiles(forest, most_length, rows_per_request, query_tokens, tile_rows, num_tiles, steps)

    # Blocks: each tile's pages in groups of `slots`; padding slots keep an empty row interval.
    tile_pages = np.bincount(pages["tile"], minlength=num_tiles)
    tile_blocks = -(-tile_pages // slots)
    tile_ptr = np.concatenate([[0], np.cumsum(tile_blocks)])
    num_blocks = int(tile_ptr[-1])
    capacity = block_capacity if 0 < block_capacity >= num_blocks else bucket(num_blocks)
    rank = np.arange(len(pages["tile"])) - (np.cumsum(tile_pages) - tile_pages)[pages["tile"]]
    place = tile_ptr[pages["tile"]] * slots + rank

    def blocks(values: np.ndarray) -> Int[np.ndarray, "blocks slots"]:
        out = np.zeros(capacity * slots, np.int32)
        out[place] = values
        return out.reshape(capacity, slots)

    unmasked = np.bincount(pages["tile"][~pages["masked"]], minlength=num_tiles) // slots
    return Plan(
        page_id=blocks(pages["page"]),
        page_node=blocks(pages["node"]),
        page_token=blocks(pages["token"]),
        page_lo=blocks(pages["lo"]),
        page_hi=blocks(pages["hi"]),
        **_segments(tile_ptr, unmasked, num_kv_heads, num_ctas),
        least_length=forest.length,
        most_length=most_length,
        structure=forest.structure,
        page_size=forest.page_size,
        request_capacity=forest.request_capacity,
        query_tokens=query_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tile_rows=tile_rows,
    )


def _most_length(forest: Forest, steps: int) -> Int[np.ndarray, " nodes"]:
    """Tokens that each node may come to hold: leaves with one reader grow, up to the end of their pages."""
    most = forest.length.copy()
    leaf = forest.leaf[forest.leaf >= 0]
    leaf = leaf[forest.row_hi[leaf] - forest.row_lo[leaf] == 1]
    most[leaf] = np.minimum(forest.length[leaf].astype(np.int64) + steps, forest.page_count[leaf] * forest.page_size)
    return most


def _pages_of_tiles(
    forest: Forest,
    most_length: Int[np.ndarray, " nodes"],
    rows_per_request: int,
    query_tokens: int,
    tile_rows: int,
    num_tiles: int,
    steps: int,
) -> dict[str, np.ndarray]:
    """List every (tile, page) such that some row of the tile reads the page, by tile, unmasked pages first."""
    page_size = forest.page_size
    node_pages = -(-most_length // page_size)
    node = np.flatnonzero((forest.row_hi > forest.row_lo) & (node_pages > 0))
    lo, hi = forest.row_lo[node] * rows_per_request, forest.row_hi[node] * rows_per_request
    first_tile = lo // tile_rows
    tiles_of_node = (hi - 1) // tile_rows - first_tile + 1

    # (tile, node) pairs, then (tile, page) pairs.
    pair, nth_tile = expand(tiles_of_node)
    tile = first_tile[pair] + nth_tile
    entry_pair, nth_page = expand(node_pages[node[pair]])
    tile, source = tile[entry_pair], pair[entry_pair]
    node, lo, hi = node[source], lo[source], hi[source]
    token = nth_page * page_size

    used_rows = int((forest.leaf >= 0).sum()) * rows_per_request
    tile_lo = tile * tile_rows
    tile_hi = np.minimum(tile_lo + tile_rows, used_rows)
    full = (token + page_size <= forest.length[node]) & (lo <= tile_lo) & (hi >= tile_hi)
    if query_tokens > 1:
        least, most = _query_positions(forest, query_tokens, rows_per_request, tile_rows, num_tiles)
        position = forest.start[node] + token
        full &= position + page_size - 1 <= least[tile]
        visible = position - most[tile] <= steps
    else:
        visible = np.ones(len(tile), bool)
    masked = ~full
    order = np.argsort(tile * 2 + masked, kind="stable")
    order = order[visible[order]]
    return {
        "tile": tile[order],
        "masked": masked[order],
        "page": forest.pages[forest.page_offset[node] + nth_page][order],
        "node": node[order],
        "token": token[order],
        "lo": np.maximum(lo - tile_lo, 0)[order],
        "hi": np.minimum(hi - tile_lo, tile_rows)[order],
    }


def _query_positions(
    forest: Forest, query_tokens: int, rows_per_request: int, tile_rows: int, num_tiles: int
) -> tuple[Int[np.ndarray, " tiles"], Int[np.ndarray, " tiles"]]:
    """Return the least and the greatest position of each tile's query tokens; free slots do not count."""
    used = (forest.leaf >= 0)[forest.request_of_row]
    position = forest.positions(query_tokens)[forest.request_of_row]
    rows = np.repeat(position.reshape(-1), rows_per_request // query_tokens)
    used = np.repeat(used, rows_per_request)
    padding = num_tiles * tile_rows - len(rows)
    huge = np.iinfo(np.int32).max // 2
    least = np.pad(np.where(used, rows, huge), (0, padding), constant_values=huge).reshape(num_tiles, tile_rows)
    most = np.pad(np.where(used, rows, -huge), (0, padding), constant_values=-huge).reshape(num_tiles, tile_rows)
    return least.min(1), most.max(1)


def _segments(
    tile_ptr: Int[np.ndarray, " tiles+1"],
    unmasked: Int[np.ndarray, " tiles"],
    num_kv_heads: int,
    num_ctas: int,
) -> dict[str, np.ndarray]:
    """Lay the streams end to end, cut them into `num_ctas` runs of equal cost, and list segments and merges."""
    num_tiles = len(unmasked)
    num_streams = num_tiles * num_kv_heads
    tile_blocks = np.diff(tile_ptr)
    tile_cost = unmasked + _MASKED_COST * (tile_blocks - unmasked) + _SEGMENT_COST * (tile_blocks > 0)
    stream_tile = np.repeat(np.arange(num_tiles), num_kv_heads)
    stream_cost = tile_cost[stream_tile]
    stream_end = np.cumsum(stream_cost)
    stream_base = np.concatenate([[0], np.cumsum(tile_blocks[stream_tile])])  # blocks before each stream

    # Where each cut falls: its stream, then the block within it; cuts are counted in blocks from here on.
    cuts = stream_end[-1] * np.arange(1, num_ctas) / num_ctas
    stream = np.minimum(np.searchsorted(stream_end, cuts, side="right"), num_streams - 1)
    inside = cuts - (stream_end - stream_cost)[stream] - _SEGMENT_COST
    flat = unmasked[stream_tile[stream]]
    block = np.where(inside <= flat, inside, flat + (inside - flat) / _MASKED_COST)
    cut = stream_base[stream] + np.clip(np.rint(block), 0, tile_blocks[stream_tile[stream]]).astype(np.int64)

    bounds = np.unique(np.concatenate([stream_base, cut]))
    begin, end = bounds[:-1], bounds[1:]
    stream = np.searchsorted(stream_base, begin, side="right") - 1
    shift = tile_ptr[stream_tile[stream]] - stream_base[stream]  # from blocks of streams to blocks of tiles
    count = len(begin)
    capacity = num_streams + num_ctas
    first_masked = tile_ptr[:-1] + unmasked

    def padded(values: np.ndarray, fill: int = 0) -> Int[np.ndarray, " segments"]:
        out = np.full(capacity, fill, np.int32)
        out[:count] = values
        return out

    lo, hi = begin + shift, end + shift
    merge_counts = np.bincount(stream, minlength=num_streams)
    return {
        "segment_tile": padded(stream_tile[stream], fill=num_tiles),
        "segment_head": padded(stream % num_kv_heads),
        "segment_lo": padded(lo),
        "segment_masked": padded(np.clip(first_masked[stream_tile[stream]], lo, hi)),
        "segment_hi": padded(hi),
        "cta_ptr": np.concatenate([[0], np.searchsorted(begin, cut), [count]]).astype(np.int32),
        "merge_ptr": np.concatenate([[0], np.cumsum(merge_counts)]).astype(np.int32),
        "merge_segment": padded(np.arange(count)),
    }
