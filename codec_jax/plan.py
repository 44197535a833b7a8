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

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from codec_jax import checks
from codec_jax.arrays import HostOrDevice
from codec_jax.capacity import bucket
from codec_jax.cost import CostModel, Estimate, Layout
from codec_jax.division import Policy, divide
from codec_jax.errors import PlanError
from codec_jax.forest import Forest
from codec_jax.schedule import Work
from codec_jax.streams import Rows, blocks_alike, blocks_of_streams, extents_of_streams, least_wide, tokens_of_tiles
from pallas_kernels.columns import Page, Segment
from pallas_kernels.config import config_for
from pallas_kernels.packing import Packing


class Tiling(NamedTuple):
    """Sizes that the device decides."""

    num_ctas: int  # thread blocks
    tile_rows: int  # query rows of a tile
    block_tokens: int  # KV tokens of a block
    lanes: int  # row tiles of a segment

    @classmethod
    def of_device(cls, num_tokens: int, again: int, group: int, num_kv_heads: int, head_dim: int) -> Tiling:
        """Return the sizes for the default device and a forest, by what `tokens_of_tiles` counts.

        The tensor cores of a GPU work on 64 rows; a CPU pays for every row of padding.
        """
        device = jax.devices()[0]
        if device.platform == "gpu":
            config = config_for(head_dim, num_tokens, again, num_kv_heads / device.core_count)
            tile_rows = Packing.of(group).tile_rows
            return cls(device.core_count, tile_rows, block_tokens=config.block_tokens if config else 128, lanes=2)
        return cls(num_ctas=16, tile_rows=16, block_tokens=256, lanes=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Blocks, segments and merge lists for one forest and head layout; made by `make_plan`."""

    # The pages of the blocks, columns of `Page`; 0 rows read it where unused.
    pages: Int[HostOrDevice, "blocks slots 4"]
    # Segments in the order in which thread blocks run them, columns of `Segment`: blocks [lo, masked) are seen in full
    # by all rows, [masked, hi) need a mask.
    segments: Int[HostOrDevice, "segments 10"]
    # What each thread block runs: its first segment, the one after its last, and, to save it round trips to memory,
    # the fields of the first and the page ids of its first block.
    runs: Int[HostOrDevice, "num_ctas 12+slots"]
    merge_ptr: Int[HostOrDevice, " tiles*K+1"]  # partials [merge_ptr[u], merge_ptr[u + 1]) are tile u // K, head u % K
    used_rows: Int[HostOrDevice, " 1"]  # query rows from there on belong to free request slots
    # What the forest must look like for the plan to be exact.
    least_length: Int[HostOrDevice, " nodes"]
    most_length: Int[HostOrDevice, " nodes"]
    structure: Int[HostOrDevice, ""]
    shares: Int[HostOrDevice, " 2"]  # waiting and by_token of `estimate`, for what thread blocks were expected to take

    page_size: int = field(metadata={"static": True})
    slot_tokens: int = field(metadata={"static": True})  # of a page of `pages`: long pages are cut to fit a block
    request_capacity: int = field(metadata={"static": True})
    query_tokens: int = field(metadata={"static": True})
    num_q_heads: int = field(metadata={"static": True})
    num_kv_heads: int = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})
    tile_rows: int = field(metadata={"static": True})
    lanes: int = field(metadata={"static": True})
    num_partials: int = field(metadata={"static": True})  # that segments have room for
    cost_model: CostModel = field(metadata={"static": True})

    @property
    def group(self) -> int:
        """Q heads per kv head (G)."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def block_tokens(self) -> int:
        """KV tokens of a block."""
        return self.pages.shape[1] * self.slot_tokens

    @property
    def estimate(self) -> Estimate:
        """What blocks and segments were expected to cost; of a plan on the host."""
        return Estimate(self.cost_model, self.block_tokens, *map(int, self.shares))

    @property
    def cta_ptr(self) -> Int[HostOrDevice, " num_ctas+1"]:
        """Thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])."""
        xp = np if isinstance(self.runs, np.ndarray) else jnp
        return xp.concatenate([self.runs[:, 0], self.runs[-1:, 1]])

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
    lanes: int | None = None,
    least_wide_tokens: int | None = None,
    block_capacity: int = 0,
    cost_model: CostModel | None = None,
    policy: Policy = "aligned",
) -> Plan:
    """Plan attention over a forest on the host (paper, section 5: task division and scheduling).

    Args:
      forest: a forest with NumPy arrays.
      num_q_heads: N, a multiple of num_kv_heads (K).
      num_kv_heads: K.
      head_dim: H.
      steps: tokens that every leaf may grow by, as far as its pages have room, before a new plan is due.
      query_tokens: T, query tokens per request; they are the last T tokens of its context.
      num_ctas: thread blocks to spread the work over, at most; defaults to the device's multiprocessors.
      tile_rows: query rows of a tile; defaults to what suits the device.
      block_tokens: KV tokens of a block: whole pages, or parts of pages that do not divide it. Defaults to what suits
        the device and the number of tokens; give it where plans of a growing forest must fit one compiled step.
      lanes: row tiles that may share a segment, 1 or 2; defaults to what suits the device.
      least_wide_tokens: KV tokens that two tiles must both read to share segments for them; defaults to what suits a
        GPU.
      block_capacity: blocks to pad to, so that plans of changing size fit one compiled step; a plan that needs
        more is padded to the next bucket.
      cost_model: what thread blocks take for their work, for this head layout and page size; defaults to what was
        measured on the device (`CostModel.default`).
      policy: how streams are divided: "aligned" between kv heads, as the "paper" does, or into that many equal slices
        each (see `codec_jax.division`).

    Raises ValueError for numbers that do not fit together, or a cost model for another layout or GPU; TypeError for a
    forest that lives on a device.
    """
    if not forest.is_host:
        raise TypeError("forest: expected NumPy arrays, got arrays on a device; plan with the host's forest")
    for name, value in (
        ("num_q_heads", num_q_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("steps", steps),
        ("query_tokens", query_tokens),
    ):
        checks.positive(name, value)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_q_heads}")
    given = {"num_ctas": num_ctas, "tile_rows": tile_rows, "block_tokens": block_tokens, "lanes": lanes}
    group = num_q_heads // num_kv_heads
    rows_per_request = query_tokens * group
    num_tokens, again = tokens_of_tiles(forest, rows_per_request, Packing.of(group).tile_rows)
    tiling = Tiling.of_device(num_tokens, again, group, num_kv_heads, head_dim)
    tiling = tiling._replace(**{name: value for name, value in given.items() if value is not None})
    for name, value in tiling._asdict().items():
        checks.positive(name, value)
    if least_wide_tokens is not None:
        checks.positive("least_wide_tokens", least_wide_tokens)
    if tiling.lanes > 2:
        raise ValueError(f"lanes: expected 1 or 2, got {lanes}")
    if tiling.lanes * tiling.tile_rows >= 1 << 15:  # two row numbers share an int32
        raise ValueError(f"tile_rows: expected at most {(1 << 15) // tiling.lanes - 1}, got {tile_rows}")

    rows = Rows(
        per_request=rows_per_request,
        query_tokens=query_tokens,
        of_tile=tiling.tile_rows,
        num_tiles=-(-forest.request_capacity * rows_per_request // tiling.tile_rows),
    )
    layout = Layout(num_q_heads, num_kv_heads, head_dim, forest.page_size)
    model = CostModel.default(layout) if cost_model is None else cost_model
    model.check_layout(layout)
    if least_wide_tokens is None:
        least_wide_tokens = least_wide(rows.num_tiles * num_kv_heads, tiling.num_ctas)
    slot_tokens, slots = block_slots(forest.page_size, tiling.block_tokens)
    most = most_length(forest, steps)
    streams = extents_of_streams(
        forest,
        most,
        rows,
        slot_tokens=slot_tokens,
        steps=steps,
        pairs=tiling.lanes == 2,
        least_wide_tokens=least_wide_tokens,
    )

    # Blocks: each stream's pages in groups of `slots`.
    wide, num_streams = streams.wide, len(streams.tile)
    stream_pages = np.bincount(streams.stream, streams.pages, num_streams).astype(np.int64)
    stream_ptr = np.concatenate([[0], np.cumsum(-(-stream_pages // slots))])
    num_blocks = int(stream_ptr[-1])
    capacity = block_capacity if 0 < block_capacity >= num_blocks else bucket(num_blocks)
    pages = blocks_of_streams(forest, streams, stream_ptr, slots=slots, slot_tokens=slot_tokens, capacity=capacity)

    full_pages = np.bincount(streams.stream, np.where(streams.masked, 0, streams.pages), num_streams)
    unmasked = full_pages.astype(np.int64) // slots
    # With T > 1 tokens of a block differ in who sees them whatever their readers.
    masked = num_blocks - int(unmasked.sum())
    by_row = blocks_alike(streams, forest.length, slots=slots, slot_tokens=slot_tokens) if query_tokens == 1 else 0
    again = int(stream_pages.sum() - (-(-most[forest.row_hi > forest.row_lo] // slot_tokens)).sum())  # read before
    work = Work(
        stream_ptr=stream_ptr,
        unmasked=unmasked,
        wide=wide,
        unique=num_blocks - max(again, 0) / slots,
        block_tokens=slots * slot_tokens,
        num_kv_heads=num_kv_heads,
        num_ctas=tiling.num_ctas,
        by_token=min((num_blocks - by_row) / masked, 1.0) if masked else 1.0,
    )
    estimate = work.estimate(model)
    cut = divide(work, estimate, policy)
    tile_unit = _tile_units(forest, rows)
    # Every segment leaves one partial for each of its tiles. Contiguous cuts keep within bounds, others may not.
    num_merges, wide_stretches = rows.num_tiles * num_kv_heads, int(wide.sum()) * num_kv_heads
    num_segments, needed = len(cut.lo), len(cut.lo) + int(np.count_nonzero(wide[cut.stream]))
    num_ctas = len(cut.cta_ptr) - 1
    capacity_of_cuts = num_merges + wide_stretches + num_ctas
    num_partials = capacity_of_cuts + (wide_stretches + num_ctas) * (tiling.lanes - 1)
    capacity_of_cuts = capacity_of_cuts if num_segments <= capacity_of_cuts else bucket(num_segments)
    num_partials = num_partials if needed <= num_partials else bucket(needed)
    tile, other_tile = streams.tile[cut.stream], streams.other_tile[cut.stream]
    partials, merge_ptr = _partials(np.stack([tile, other_tile], 1), cut.head, num_kv_heads, num_merges, num_partials)
    columns = Segment(
        tile=tile,
        other_tile=other_tile,
        head=cut.head,
        lo=cut.lo,
        masked=np.clip((stream_ptr[:-1] + unmasked)[cut.stream], cut.lo, cut.hi),
        hi=cut.hi,
        partial=partials[:, 0],
        other_partial=partials[:, 1],
        unit=tile_unit[tile],
        other_unit=tile_unit[other_tile],
    )
    segments = np.zeros((capacity_of_cuts, len(Segment._fields)), np.int32)
    segments[:num_segments] = np.stack(columns, axis=1)
    return Plan(
        pages=pages,
        segments=segments,
        runs=list_runs(cut.cta_ptr, segments, pages),
        merge_ptr=merge_ptr.astype(np.int32),
        used_rows=np.asarray([forest.active.sum() * rows_per_request], np.int32),
        least_length=forest.length,
        most_length=most,
        structure=forest.structure,
        shares=np.asarray([estimate.waiting, estimate.by_token], np.int32),
        page_size=forest.page_size,
        slot_tokens=slot_tokens,
        request_capacity=forest.request_capacity,
        query_tokens=query_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tile_rows=tiling.tile_rows,
        lanes=tiling.lanes,
        num_partials=num_partials,
        cost_model=model,
    )


def list_runs(
    cta_ptr: Int[np.ndarray, " num_ctas+1"],
    segments: Int[np.ndarray, "segments 10"],
    pages: Int[np.ndarray, "blocks slots 4"],
) -> Int[np.ndarray, "num_ctas 12+slots"]:
    """List what each thread block begins with."""
    first = segments[np.minimum(cta_ptr[:-1], len(segments) - 1)]
    page_ids = pages[Segment(*first.T).lo, :, Page._fields.index("page_id")]
    return np.concatenate([cta_ptr[:-1, None], cta_ptr[1:, None], first, page_ids], axis=1, dtype=np.int32)


def _tile_units(forest: Forest, rows: Rows) -> Int[np.ndarray, " tiles"]:
    """Find the tiles whose query rows are consecutive in the caller's order."""
    group = rows.per_request // rows.query_tokens
    if rows.of_tile % group:
        return np.full(rows.num_tiles, -1)
    units = rows.of_tile // group
    first = np.arange(rows.num_tiles) * units
    order = forest.request_of_row
    # Rows of requests that directly follow each other in both orders have the same value here.
    run = np.cumsum(np.diff(order, prepend=order[0]) != 1)
    begin, end = first // rows.query_tokens, np.minimum((first + units - 1) // rows.query_tokens, len(order) - 1)
    unit = order[begin].astype(np.int64) * rows.query_tokens + first % rows.query_tokens
    # What a tile writes past the last request must fall past the end of the query.
    total = len(order) * rows.query_tokens
    inside = (first + units <= total) | (unit + total - first == total)
    return np.where((run[begin] == run[end]) & inside, unit, -1)


def block_slots(page_size: int, block_tokens: int) -> tuple[int, int]:
    """Return the tokens of a slot and the slots of a block: pages, or equal parts of pages that would not fill it.

    Where no part of 8 tokens or more fits, a slot is a page, and a block at least one page.
    """
    part = math.gcd(page_size, block_tokens)
    part = part if part >= 8 else page_size
    return part, max(1, block_tokens // part)


def _partials(
    tiles: Int[np.ndarray, "segments 2"],
    head: Int[np.ndarray, " segments"],
    num_kv_heads: int,
    num_streams: int,
    num_partials: int,
) -> tuple[Int[np.ndarray, "segments 2"], Int[np.ndarray, " streams+1"]]:
    """Number the partials such that those of one (tile, head) are consecutive, in the order of the segments.

    A narrow segment has one; in place of the other it gets num_partials.
    """
    stream = tiles * num_kv_heads + head[:, None]
    stream[tiles[:, 0] == tiles[:, 1], 1] = num_streams
    stream = stream.reshape(-1)
    number = np.empty(len(stream), np.int64)
    number[np.argsort(stream, kind="stable")] = np.arange(len(stream))
    number[stream == num_streams] = num_partials
    merge_ptr = np.cumsum(np.bincount(stream + 1, minlength=num_streams + 2)[: num_streams + 1])
    return number.reshape(-1, 2), merge_ptr


def most_length(forest: Forest, steps: int) -> Int[np.ndarray, " nodes"]:
    """Tokens that each node may come to hold: leaves with one reader grow, up to the end of their pages."""
    most = forest.length.copy()
    leaf = forest.leaf[forest.leaf >= 0]
    leaf = leaf[forest.row_hi[leaf] - forest.row_lo[leaf] == 1]
    most[leaf] = np.minimum(forest.length[leaf].astype(np.int64) + steps, forest.page_count[leaf] * forest.page_size)
    return most
