"""make_plan: from a forest to the arrays of a plan, on the host, in NumPy (paper, section 5; doi 10.1145/3802028).

forest ─► tiles and blocks  how large they are, by the device and the amount of work     _grid
       ─► runs              the pages that are read, of each device, or of a subset      streams.list_runs
       ─► streams           which pages every tile, or pair of tiles, reads              streams.list_streams
                            or, each page in a place of its own, policy "invariant"      invariant
       ─► blocks            pages in groups, those without a mask first                  streams.lay_out_blocks
       ─► thread blocks     a few may be left out, unless arithmetic decides             even_runs.thread_blocks
       ─► cuts              streams divided among thread blocks, by cost                 division.divide
       ─► segments, merges  the cuts as rows, and which partials POR merges              segments.list_segments

All from the runs on is done for each device that pages live on. Forest, tiles and rows are the same everywhere.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import bucket
from codec_jax.forest import ONE_BYTE, Forest
from codec_jax.forest.homes import Homes
from codec_jax.forest.page_subset import PageSubset
from codec_jax.planning.cost import CostModel, HeadLayout
from codec_jax.planning.division import ALIGNED, INVARIANT, Policy, divide
from codec_jax.planning.estimate import Estimate
from codec_jax.planning.even_runs import thread_blocks
from codec_jax.planning.invariant import list_invariant_streams
from codec_jax.planning.plan import Plan, PlanHost, begin_of_ctas, max_lengths
from codec_jax.planning.segments import list_segments, query_starts
from codec_jax.planning.streams import (
    MIN_WIDE_TOKENS,
    Grid,
    Runs,
    Streams,
    count_kv_tokens,
    count_uniform_blocks,
    lay_out_blocks,
    list_runs,
    list_streams,
)
from codec_jax.planning.tiling import default_tiling, values_in_keys
from codec_jax.planning.work import Work
from pallas_kernels.family import Tiling
from pallas_kernels.heads import Heads, Window
from pallas_kernels.plan_format import PlanArrays, PlanGuard
from pallas_kernels.token_mask import MAX_ROWS

#: A plan of so many pages has room for the worst that its forest can become: what that costs, a megabyte, is nothing.
_ROOMY_PAGES = 1 << 16
#: Of thread blocks, and of tokens of a block: a plan has arrays as large as that.
_MOST_OF_A_SIZE = 1 << 21


def make_plan(
    forest: Forest,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    kv_dtype: DTypeLike | None = None,
    steps: int = 1,
    query_tokens: int = 1,
    window: Window | int | None = None,
    num_ctas: int | None = None,
    tile_rows: int | None = None,
    block_tokens: int | None = None,
    lanes: int | None = None,
    min_wide_tokens: int | None = None,
    block_capacity: int | None = None,
    segment_capacity: int = 0,
    cost_model: CostModel | None = None,
    policy: Policy = "aligned",
    homes: Homes | None = None,
    subset: PageSubset | None = None,
) -> Plan:
    """Plan attention over a forest on the host.

    Args:
      forest: a forest with NumPy arrays.
      num_q_heads: N, a multiple of num_kv_heads (K).
      num_kv_heads: K, kv heads.
      head_dim: H, of query and keys.
      value_head_dim: H of the values; defaults to head_dim.
      kv_dtype: dtype of the pages that the plan is cut for; defaults to one of 16 bits. It serves pages of any dtype.
      steps: tokens that every leaf may grow by, as far as its pages have room, before a new plan is due.
      query_tokens: T, query tokens per request; they are the last T tokens of its context.
      window: how far back query tokens see: a `Window`, the tokens of one that slides, or None for the whole context.
      num_ctas: thread blocks to spread the work over. Defaults to the device's multiprocessors, or a few less
        where that is faster, by who reads what, so that a forest that changes much may get another number.
      tile_rows: query rows of a tile; defaults to what suits the device.
      block_tokens: KV tokens of a block: whole pages, or parts of pages that do not divide it. Defaults to what suits
        the device and the amount of work, so that a forest that grows much may get other blocks, once.
      lanes: row tiles that may share a segment, 1 or 2; defaults to what suits the device. With the policy
        "invariant" no tiles do, and it is how many sums a row has in a segment, whose blocks go to them in turn.
      min_wide_tokens: KV tokens that two tiles must both read to share segments for them; defaults to what suits the
        device, where two tiles never do if all tiles have little to read.
      block_capacity: blocks to pad to, so that plans of changing size fit one compiled step; defaults to room for what
        the forest has capacities for. A plan that needs more is padded to the next bucket.
      segment_capacity: segments to pad to, likewise, if that is more than the policy "aligned" needs; plans of the
        policy "invariant" change size as streams grow, and fit one compiled step if this has room for the longest.
      cost_model: what thread blocks take for their work, for heads of this size; defaults to what was measured on the
        device (`CostModel.default`).
      policy: how streams are divided: "aligned" between kv heads, as the "paper" does, or into that many equal slices
        each (see `codec_jax.planning.division`). With "invariant" no request's attention depends, to the last bit, on
        who is beside it (see `codec_jax.planning.invariant`).
      homes: where pages live if they are spread over the devices of a mesh axis, `PagePool.homes`. The plan then has a
        part for each device, and `forest_attention` takes it with that mesh.
      subset: pages that the plan is of, and where the arrays that it is for have them; defaults to all pages.
        `forest_attention` then gives a partial, with return_residuals=True, to be merged with that of the rest.

    Raises ValueError for numbers that do not fit together, a dtype that pages cannot have, pages of several devices or
    a subset under the policy "invariant", or a cost model for another head size or GPU; TypeError for a forest that
    lives on a device.

    >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[1000, 20, 5], leaf=[1, 2])
    >>> make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64).heads.group
    4

    Source: CoDec, section 5.
    """
    checks.instance("forest", forest, Forest)
    if not forest.is_host:
        raise TypeError("forest: expected NumPy arrays, got arrays on a device; plan with the host's forest")
    heads = _heads(num_q_heads, num_kv_heads, head_dim, value_head_dim, kv_dtype)
    tiling = default_tiling(heads)
    steps = checks.integer("steps", steps, below=2**62)
    query_tokens = checks.integer("query_tokens", query_tokens, below=2**20)  # times heads it is counted in int32
    segment_capacity = checks.integer("segment_capacity", segment_capacity, 0)
    window = window if isinstance(window, Window | None) else Window(window)
    if homes is not None:
        checks.instance("homes", homes, Homes)
        last = int(forest.used_pages.max(initial=-1))
        if last >= homes.devices * homes.pages:
            raise ValueError(f"homes: expected at least the {last + 1} pages of the forest, got {homes}")
        homes = homes if homes.devices > 1 else None
    if subset is not None:
        checks.instance("subset", subset, PageSubset)
        last = int(forest.used_pages.max(initial=-1))
        if last >= len(subset.place) or homes is not None:
            got = f"one of a pool of {len(subset.place)}" if homes is None else f"{homes} as well"
            raise ValueError(f"subset: expected one of a pool of {last + 1} pages or more, on one device, got {got}")
    if policy == INVARIANT:
        if homes is not None or subset is not None:
            raise ValueError(
                "policy: expected another one for pages on several devices or in a subset, got 'invariant': which of "
                "them a request's pages are on depends on the others"
            )
        block_tokens = tiling.block_tokens[-1] if block_tokens is None else block_tokens
        if lanes is not None and checks.integer("lanes", lanes) > tiling.sums:
            raise ValueError(
                f"lanes: expected at most {tiling.sums} with the policy 'invariant', as many sums as a row has in a "
                f"segment on this device, got {lanes}"
            )
        lanes = tiling.sums if lanes is None else lanes
    given = {"num_ctas": num_ctas, "tile_rows": tile_rows, "block_tokens": block_tokens, "lanes": lanes}
    chosen = {name: x for name, x in given.items() if x is not None}
    hidden = forest.hidden_by(window, query_tokens)
    if ((forest.forgotten > hidden) & (forest.readers > 0)).any():
        raise ValueError(f"window: expected one that hides what `Forest.forget` gave back, got {window}")
    if min_wide_tokens is not None:
        min_wide_tokens = chosen["min_wide_tokens"] = checks.integer("min_wide_tokens", min_wide_tokens)
    grid = _grid(forest, heads, tiling, query_tokens, window, hidden, chosen, homes.devices if homes else 1)
    layout = HeadLayout(heads.num_q_heads, heads.num_kv_heads, heads.head_dim, forest.page_size)
    in_keys = values_in_keys(heads)
    model = CostModel.default(layout, values_in_keys=in_keys) if cost_model is None else cost_model
    checks.instance("cost_model", model, CostModel)
    model.check_layout(layout)

    longest = max_lengths(forest, steps)
    parts, subsets = [], [subset] if homes is None else [homes.subset(device) for device in range(homes.devices)]
    for pages in subsets:
        runs = list_runs(forest, longest, grid.page_tokens, pages, hidden)
        if policy == INVARIANT:
            streams = list_invariant_streams(forest, longest, runs, grid, steps=steps)
        else:
            streams = list_streams(forest, longest, runs, grid, steps=steps)
        parts.append((runs, streams, _work(forest, streams, runs, grid)))
    estimates = [work.estimate(model) for _, _, work in parts]
    reads_again = grid.min_wide_tokens == math.inf  # tiles that may not share segments
    if num_ctas is None and policy == ALIGNED and (tiling.in_step or reads_again):
        # By costs of 16 bits for pages of one byte, too: so it was measured.
        grid = grid._replace(num_ctas=thread_blocks(grid.num_ctas, grid.num_kv_heads, estimates))
    if heads.kv_dtype.itemsize == 1 and not in_keys:
        estimates = [work.estimate(model.of_one_byte()) for _, _, work in parts]
    num_blocks = max(int(work.block_ptr[-1]) for _, _, work in parts)
    if block_capacity is None:
        capacity = max(_block_capacity(forest, *part, grid, subsets[0]) for part in parts)
    else:
        capacity = bucket(num_blocks, minimum=max(checks.integer("block_capacity", block_capacity, 0), 8))
    starts, capacities = query_starts(forest, grid), (capacity, segment_capacity)
    devices = [
        _device(forest, streams, work, grid, estimate, policy, capacities, starts, pages)
        for pages, (_, streams, work), estimate in zip(subsets, parts, estimates, strict=True)
    ]
    used_rows = np.asarray([forest.active.sum() * grid.rows_per_request], np.int32)
    return Plan(
        arrays=PlanArrays(
            **_stacked([device.arrays | {"used_rows": used_rows} for device in devices], spread=homes is not None),
            heads=heads,
            request_capacity=forest.request_capacity,
            query_tokens=query_tokens,
            window=window,
            tile_rows=grid.tile_rows,
            lanes=grid.lanes,
            page_tokens=grid.page_tokens,
            num_partials=max(device.num_partials for device in devices),
            invariant=policy == INVARIANT,
        ),
        guard=PlanGuard(forest.length, longest, forest.structure_hash),
        page_size=forest.page_size,
        host=PlanHost(tuple(estimates), policy, min_wide_tokens),
        homes=homes,
        subset_pages=None if subset is None else subset.capacity,
    )


def _heads(
    num_q_heads: int, num_kv_heads: int, head_dim: int, value_head_dim: int | None, kv_dtype: DTypeLike | None
) -> Heads:
    """Describe the heads of a plan. Raises ValueError for what they cannot be."""
    if kv_dtype is not None:
        checks.float_dtype("kv_dtype", kv_dtype, *ONE_BYTE)
    heads = Heads(
        num_q_heads=checks.integer("num_q_heads", num_q_heads),
        num_kv_heads=checks.integer("num_kv_heads", num_kv_heads),
        head_dim=checks.integer("head_dim", head_dim),
        value_head_dim=checks.integer("value_head_dim", head_dim if value_head_dim is None else value_head_dim),
        kv_dtype=Heads.kv_dtype if kv_dtype is None else np.dtype(kv_dtype),
    )
    if heads.num_q_heads % heads.num_kv_heads or heads.num_q_heads > MAX_ROWS:
        raise ValueError(
            f"num_q_heads: expected a multiple of num_kv_heads = {num_kv_heads}, at most {MAX_ROWS}, got {num_q_heads}"
        )
    return heads


class _Device(NamedTuple):
    """A plan's part for one device."""

    arrays: dict[str, np.ndarray]
    num_partials: int


def _device(
    forest: Forest,
    streams: Streams,
    work: Work,
    grid: Grid,
    estimate: Estimate,
    policy: Policy,
    capacities: tuple[int, int],
    starts: Int[np.ndarray, " tiles"],
    subset: PageSubset | None,
) -> _Device:
    """Lay out the blocks of a device, divide them among its thread blocks, and list what they merge."""
    block_pages = lay_out_blocks(forest, streams, grid, capacities[0], subset)
    schedule = divide(work, grid.num_ctas, estimate, policy)
    segments, merge_ptr, num_partials = list_segments(schedule, work, streams, grid, starts, capacities[1])
    cta_begin = begin_of_ctas(schedule.cta_ptr, segments, block_pages)
    arrays = {"block_pages": block_pages, "segments": segments, "cta_begin": cta_begin, "merge_ptr": merge_ptr}
    return _Device(arrays, num_partials)


def _stacked(devices: list[dict[str, Any]], *, spread: bool) -> dict[str, Any]:
    """Return the arrays of all devices with a leading axis, if there are several, filled up to the longest."""
    if not spread:
        return devices[0]

    def stack(name: str) -> np.ndarray:
        arrays = [device[name] for device in devices]
        out = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        for row, array in zip(out, arrays, strict=True):
            row[: len(array)] = array
        return out

    return {name: stack(name) for name in devices[0]}


def pages_of_block(page_size: int, block_tokens: int) -> tuple[int, int]:
    """Return the tokens of a block's page, and its pages: whole ones, or equal parts of pages that would not fill it.

    Where no part of 8 tokens or more fits, a page stays whole, and a block has at least one.
    """
    part = math.gcd(page_size, block_tokens)
    part = part if part >= 8 else page_size
    return part, max(1, block_tokens // part)


def _grid(
    forest: Forest,
    heads: Heads,
    tiling: Tiling,
    query_tokens: int,
    window: Window | None,
    hidden: Int[np.ndarray, " nodes"],
    given: dict[str, int],
    devices: int,
) -> Grid:
    """Choose what is not given by the kind of device and the amount of work of each."""
    most = {"num_ctas": _MOST_OF_A_SIZE, "block_tokens": _MOST_OF_A_SIZE}
    given = {name: checks.integer(name, value, below=most.get(name, 2**31)) for name, value in given.items()}
    tile_rows, lanes = given.get("tile_rows", tiling.tile_rows), given.get("lanes", tiling.lanes)
    if lanes > 2:
        raise ValueError(f"lanes: expected 1 or 2, got {lanes}")
    if lanes * tile_rows > MAX_ROWS:
        raise ValueError(f"tile_rows: expected at most {MAX_ROWS // lanes}, got {tile_rows}")
    rows_per_request = query_tokens * heads.group
    tokens, reread = count_kv_tokens(forest, rows_per_request, tile_rows, hidden)
    blocks = tiling.block_for(heads.num_kv_heads, tokens // devices, reread // devices)
    block_tokens = given.get("block_tokens", blocks)
    page_tokens, pages_per_block = pages_of_block(forest.page_size, block_tokens)
    num_ctas = given.get("num_ctas", tiling.num_ctas)
    pairs_pay = tiling.pairs_pay(heads.num_kv_heads, tokens // devices, reread // devices, num_ctas) or not reread
    return Grid(
        rows_per_request=rows_per_request,
        query_tokens=query_tokens,
        window=window,
        tile_rows=tile_rows,
        num_tiles=-(-forest.request_capacity * rows_per_request // tile_rows),
        lanes=lanes,
        page_tokens=page_tokens,
        pages_per_block=pages_per_block,
        num_kv_heads=heads.num_kv_heads,
        num_ctas=num_ctas,
        min_wide_tokens=given.get("min_wide_tokens", MIN_WIDE_TOKENS if pairs_pay else math.inf),
    )


def _work(forest: Forest, streams: Streams, runs: Runs, grid: Grid) -> Work:
    """Count blocks: each stream's pages in groups, those without a mask first."""
    pages, whole = streams.sum_pages(streams.pages), streams.sum_pages(np.where(streams.masked, 0, streams.pages))
    unmasked = whole // grid.pages_per_block
    block_ptr = np.concatenate([[0], np.cumsum(-(-pages // grid.pages_per_block))])
    num_blocks = int(block_ptr[-1])
    masked = num_blocks - int(unmasked.sum())
    # With T > 1 and with windows, tokens of a block differ in who sees them whatever their readers.
    by_position = grid.query_tokens > 1 or grid.window is not None
    uniform = 0 if by_position else count_uniform_blocks(streams, forest.length, grid)
    reread = int(pages.sum() - runs.pages.sum())
    return Work(
        block_ptr=block_ptr,
        unmasked=unmasked,
        wide=streams.wide,
        unique=num_blocks - max(reread, 0) / grid.pages_per_block,
        block_tokens=grid.pages_per_block * grid.page_tokens,
        num_kv_heads=grid.num_kv_heads,
        token_masked=min((num_blocks - uniform) / masked, 1.0) if masked else 1.0,
        masked_nodes=int(streams.masked.sum()) / masked if masked else 0.0,
    )


def _block_capacity(
    forest: Forest, runs: Runs, streams: Streams, work: Work, grid: Grid, subset: PageSubset | None
) -> int:
    """Return the blocks that plans need while the forest changes within its capacities.

    At worst every stream reads every page. Where that is too much to hand to a device with every plan, it is room for
    all pages to be read once, and for what tiles read again by now, in proportion, with all request slots in use.
    """
    parts = forest.page_size // grid.page_tokens
    once = min(forest.page_capacity, subset.capacity if subset else forest.page_capacity) * parts
    listed = int(streams.pages.sum())
    again = max(listed - int(runs.pages.sum()), 0)
    active_tiles = -(-int(forest.active.sum()) * grid.rows_per_request // grid.tile_rows)
    likely = once + again * grid.num_tiles // max(active_tiles, 1)
    worst = once * (-(-grid.num_tiles // grid.lanes) if grid.lanes > 1 else grid.num_tiles)
    pages = max(likely, min(worst, _ROOMY_PAGES), listed)
    # Each stream has a last block that may be hardly filled.
    return bucket(max(-(-pages // grid.pages_per_block) + 2 * grid.num_tiles, int(work.block_ptr[-1])))
