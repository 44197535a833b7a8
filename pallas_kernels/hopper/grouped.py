"""Products of rows with the weights of their experts, on Hopper GPUs.

    rows, in the order of their experts      weights [E, K, columns]
    tile ─ up to 128 rows of one expert        │ 256 columns, or 128 of gate and 128 of up
      └──────────────┬─────────────────────────┘
                   item ─► thread block item % num_ctas

    warpgroup 2   64 numbers of each row, 64 x 256 weights ─► ring of blocks
    warpgroup 0   rows 0 to 63 of the tile      ┐ acc [64, 256] += rows block ─► bias, gate ─► 64 columns at a time
    warpgroup 1   rows 64 to 127, if any        ┘ to shared memory, and to the output in groups of 8 rows

Which tiles there are is data (`expert_rows`), so the grid is one of thread blocks that stay. Experts without rows are
not read, and the weights of the others once, or by neighbours at about the same time. With few rows that is all that
counts, and the blocks in flight keep the memory busy: only the groups of 8 rows that a tile has are copied, and of 64
rows or fewer the second warpgroup computes nothing. With many rows products decide; an item has the size that large
matrix products have on these GPUs.

    barrier   one for each   arrives, how often                         waits
    full      block          copies of rows, and of each of 1 or 2      both computing warpgroups
                             parts of the weights
    free      block          each computing warpgroup                   loader, before it fills the place again

Grouped products for mixtures are from MegaBlocks (arXiv 2211.15841).
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.expert_rows import ROW_GROUP, Tiles
from pallas_kernels.gates import Activation, gated
from pallas_kernels.shared_memory import swizzled

_LANES, _LOADER = 2, 2  # warpgroups that compute, and the one that loads
_REGISTERS = {"compute": 232, "load": 40}  # of a thread; 3 x 128 threads share 65,536
_LANE_ROWS = 64  # of wgmma
TILE_ROWS = _LANES * _LANE_ROWS
_COPIED_ROWS = (0, 8, 16, 32, 64, 128)
_COLUMNS, _DEPTH, _STAGES = 256, 64, 4
_PIECE = 64  # columns that go to the output at a time


@dataclass(frozen=True)
class _Sizes:
    """All that is known when the kernel is compiled."""

    depth: int  # K, numbers of a row
    columns: int  # of the output
    activation: Activation | None
    has_bias: bool
    dtype: Any
    num_ctas: int

    @property
    def parts(self) -> int:
        """Runs of columns of the weights that an item has: of gate and of up, or one."""
        return 1 if self.activation is None else 2

    @property
    def width(self) -> int:
        """Columns of the output that an item has."""
        return _COLUMNS // self.parts

    @property
    def column_tiles(self) -> int:
        """Items of a tile of rows; of the last one, some columns may be past the end."""
        return -(-self.columns // self.width)

    @property
    def blocks(self) -> int:
        """Blocks of an item."""
        return self.depth // _DEPTH


class _Tile(NamedTuple):
    """Consecutive rows of one expert."""

    expert: jax.Array
    first: jax.Array  # row
    rows: jax.Array


class _Item(NamedTuple):
    """A tile of rows and some columns of the output."""

    tile: _Tile
    column: jax.Array  # the first one
    done: jax.Array  # blocks of the thread block before it


def grouped_product(
    rows: jax.Array,
    weights: jax.Array,
    bias: jax.Array | None,
    tiles: Tiles,
    *,
    activation: Activation | None = None,
    num_ctas: int,
) -> jax.Array:
    """Multiply each row with the weights of its expert.

    Args:
      rows: [R, K], bfloat16 or float16, K a multiple of 64; rows of an expert begin at multiples of 8.
      weights: [E, K, columns] in the same dtype, columns a multiple of 64.
      bias: [E, columns], or None.
      tiles: which rows each expert has.
      activation: if not None, the first half of the columns gates the second one.
      num_ctas: thread blocks.

    Returns [R, columns], half of the columns with an activation. Rows that no tile has are not written, but for those
    that fill an expert's last group of 8.
    """
    columns = weights.shape[2] if activation is None else weights.shape[2] // 2
    sizes = _Sizes(rows.shape[1], columns, activation, bias is not None, rows.dtype, num_ctas)
    of_tiles = {"tile_expert": tiles.expert, "tile_first": tiles.first, "tile_rows": tiles.rows, "tile_end": tiles.end}
    inputs = {"rows": rows, "weights": weights, **of_tiles}
    if bias is not None:
        inputs["bias"] = bias
    scratch = _scratch(sizes)

    def experts(*refs: Any) -> None:  # the name that profilers show
        named = SimpleNamespace(**dict(zip([*inputs, "out", *scratch], refs, strict=True)))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < _LANES)
        def _compute() -> None:
            plgpu.set_max_registers(_REGISTERS["compute"], action="increase")
            _compute_items(named, sizes, warpgroup)

        @pl.when(warpgroup == _LOADER)
        def _load() -> None:
            plgpu.set_max_registers(_REGISTERS["load"], action="decrease")
            _load_items(named, sizes)

    kernel = plgpu.kernel(
        experts,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], columns), rows.dtype),
        scratch_types=list(scratch.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=_LANES + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(*inputs.values())


def _scratch(sizes: _Sizes) -> dict[str, Any]:
    """Describe shared memory and barriers."""
    tiled = swizzled(sizes.dtype, _DEPTH)
    return {
        "row_ring": plgpu.SMEM((_STAGES, TILE_ROWS, _DEPTH), sizes.dtype, transforms=tiled),
        "weight_ring": plgpu.SMEM((_STAGES, sizes.parts, _DEPTH, sizes.width), sizes.dtype, transforms=tiled),
        "pieces": plgpu.SMEM((_LANES, 2, _LANE_ROWS, _PIECE), sizes.dtype, transforms=tiled),
        "full": plgpu.Barrier(num_arrivals=1 + sizes.parts, num_barriers=_STAGES),
        "free": plgpu.Barrier(num_arrivals=_LANES, num_barriers=_STAGES),
    }


def _each_item(refs: Any, sizes: _Sizes, work: Any) -> jax.Array:
    """Call work(item) for every item of the thread block; the next one's tile is looked up meanwhile.

    Returns how many blocks that were.
    """
    cta, num_ctas = lax.axis_index("cta"), jnp.int32(sizes.num_ctas)
    across = jnp.int32(sizes.column_tiles)

    def tile_of(number: jax.Array) -> _Tile:
        at = jnp.minimum(lax.div(number, across), refs.tile_rows.shape[0] - 1)
        return _Tile(refs.tile_expert[at], refs.tile_first[at], refs.tile_rows[at])

    def step(turn: jax.Array, tile: _Tile) -> _Tile:
        number = cta + turn * num_ctas
        following = tile_of(number + num_ctas)
        work(_Item(tile, lax.rem(number, across) * sizes.width, turn * sizes.blocks))
        return following

    first = tile_of(cta)
    turns = lax.div(jnp.maximum(refs.tile_end[refs.tile_end.shape[0] - 1] * across - cta + num_ctas - 1, 0), num_ctas)
    lax.fori_loop(0, turns, step, first)
    return turns * sizes.blocks


def _stage(number: jax.Array) -> jax.Array:
    """Where in the ring block `number` of the thread block lies."""
    return lax.rem(number, jnp.int32(_STAGES))


def _load_items(refs: Any, sizes: _Sizes) -> None:
    """Fill the ring, as far ahead as it allows."""

    def work(item: _Item) -> None:
        first = pl.multiple_of(item.tile.first, ROW_GROUP)

        def step(block: jax.Array, _: None) -> None:
            number = item.done + block
            stage, depth = _stage(number), pl.ds(block * _DEPTH, _DEPTH)

            @pl.when(number >= _STAGES)
            def _wait() -> None:
                plgpu.barrier_wait(refs.free.at[stage])

            for part in range(sizes.parts):
                begin = pl.multiple_of(part * sizes.columns + item.column, _PIECE)
                plgpu.copy_gmem_to_smem(
                    refs.weights.at[item.tile.expert, depth, pl.ds(begin, sizes.width)],
                    refs.weight_ring.at[stage, part],
                    refs.full.at[stage],
                )
            # One copy, of up to twice the tile's rows: of what follows, nobody reads the products.
            for fewer, count in itertools.pairwise(_COPIED_ROWS):

                @pl.when((fewer < item.tile.rows) & (item.tile.rows <= count))
                def _copy(count: int = count) -> None:
                    plgpu.copy_gmem_to_smem(
                        refs.rows.at[pl.ds(first, count), depth],
                        refs.row_ring.at[stage, pl.ds(0, count)],
                        refs.full.at[stage],
                    )

        lax.fori_loop(0, sizes.blocks, step, None)

    blocks = _each_item(refs, sizes, work)

    # Nobody needs the last places again; waiting for them leaves no barrier with completions that nobody saw.
    def wait(number: jax.Array, _: None) -> None:
        plgpu.barrier_wait(refs.free.at[_stage(number)])

    lax.fori_loop(jnp.maximum(blocks - _STAGES, 0), blocks, wait, None)


def _compute_items(refs: Any, sizes: _Sizes, lane: jax.Array) -> None:
    """Multiply the lane's rows of every tile, and write them."""

    def work(item: _Item) -> None:
        mine = jnp.clip(item.tile.rows - lane * _LANE_ROWS, 0, _LANE_ROWS)

        @pl.when(mine > 0)
        def _multiply() -> None:
            accs = _products(refs, sizes, item, lane)
            _write(refs, sizes, item, lane, mine, accs)

        @pl.when(mine == 0)
        def _pass() -> None:
            def step(block: jax.Array, _: None) -> None:
                stage = _stage(item.done + block)
                plgpu.barrier_wait(refs.full.at[stage])
                plgpu.barrier_arrive(refs.free.at[stage])

            lax.fori_loop(0, sizes.blocks, step, None)

    _each_item(refs, sizes, work)
    plgpu.wait_smem_to_gmem(0)


def _products(refs: Any, sizes: _Sizes, item: _Item, lane: jax.Array) -> list[jax.Array]:
    """Return the products of the lane's rows with all blocks, float32 [64, width] for each part."""

    def products(acc_refs: list[Any]) -> list[jax.Array]:
        def step(block: jax.Array, _: None) -> None:
            number = item.done + block
            stage = _stage(number)
            plgpu.barrier_wait(refs.full.at[stage])
            mine = refs.row_ring.at[stage, pl.ds(lane * _LANE_ROWS, _LANE_ROWS)]  # [64, 64]
            for part, acc_ref in enumerate(acc_refs):
                plgpu.wgmma(acc_ref, mine, refs.weight_ring.at[stage, part])
            plgpu.wgmma_wait(sizes.parts)  # those of the block before are done

            @pl.when(block > 0)
            def _release() -> None:
                plgpu.barrier_arrive(refs.free.at[_stage(number - 1)])

        lax.fori_loop(0, sizes.blocks, step, None)
        return [acc_ref[...] for acc_ref in acc_refs]

    accs = pl.run_scoped(products, [plgpu.ACC((_LANE_ROWS, sizes.width), jnp.float32)] * sizes.parts)
    plgpu.barrier_arrive(refs.free.at[_stage(item.done + sizes.blocks - 1)])
    return accs


def _write(refs: Any, sizes: _Sizes, item: _Item, lane: jax.Array, mine: jax.Array, accs: list[jax.Array]) -> None:
    """Write the lane's rows, in the groups of 8 that the tile has."""
    groups = lax.div(mine + ROW_GROUP - 1, jnp.int32(ROW_GROUP))
    begin = item.tile.first + lane * _LANE_ROWS
    for piece in range(sizes.width // _PIECE):
        column = pl.multiple_of(item.column + piece * _PIECE, _PIECE)
        staged = refs.pieces.at[lane, piece % 2]
        values = _values(refs, sizes, item.tile.expert, column, accs, piece * _PIECE)  # [64, 64]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the piece before the last one has been read
        staged[...] = values.astype(sizes.dtype)
        plgpu.commit_smem()

        @pl.when(column < sizes.columns)
        def _copy(column: Any = column, staged: Any = staged) -> None:
            done, count = jnp.int32(0), _LANE_ROWS // ROW_GROUP
            while count:

                @pl.when((groups & count) != 0)
                def _some(done: Any = done, count: int = count) -> None:
                    own = pl.multiple_of(done * ROW_GROUP, ROW_GROUP)
                    plgpu.copy_smem_to_gmem(
                        staged.at[pl.ds(own, count * ROW_GROUP)],
                        refs.out.at[
                            pl.ds(pl.multiple_of(begin + own, ROW_GROUP), count * ROW_GROUP), pl.ds(column, _PIECE)
                        ],
                        commit_group=False,
                    )

                done, count = done + (groups & count), count // 2

        plgpu.commit_smem_to_gmem_group()


def _values(refs: Any, sizes: _Sizes, expert: jax.Array, column: Any, accs: list[jax.Array], at: int) -> jax.Array:
    """Return 64 columns of the output from one on, which are those of the accumulator from `at` on; [64, 64]."""
    column = jnp.minimum(column, sizes.columns - _PIECE)  # past the end nothing is written

    def part(number: int) -> jax.Array:
        values = accs[number][:, at : at + _PIECE]
        if not sizes.has_bias:
            return values
        bias = refs.bias.at[expert, pl.ds(number * sizes.columns + column, _PIECE)]
        bias = load(bias, plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)  # [64]
        return values + lax.broadcast_in_dim(bias, (_LANE_ROWS, _PIECE), (1,))

    return part(0) if sizes.activation is None else gated(sizes.activation, part(0), part(1))
