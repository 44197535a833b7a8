"""Products of a tile of 64 query rows with a block of K and of V, by four warps.

Either a warp has 16 rows and all tokens of a block, or two warps share 32 rows, and each has half of the tokens:

    split 1, slab 0          split 2, slab 0             slab 1
    warp 0   rows  0 to 15   rows  0 to 15, tokens < S/2    rows 32 to 47, tokens < S/2
    warp 1   rows 16 to 31   rows 16 to 31, tokens < S/2    rows 48 to 63, tokens < S/2
    warp 2   rows 32 to 47   rows  0 to 15, the others      rows 32 to 47, the others
    warp 3   rows 48 to 63   rows 16 to 31, the others      rows 48 to 63, the others

With split 2 what a warp loads of K and V is of use to both of its slabs, so that shared memory is read half as often. A
slab is registers [64, columns], of which warp w has rows 16w to 16w + 15: those are the tile's with split 1, and with
split 2 rows r and r + 32 of slab s are row 32s + r of the tile with either half of the tokens.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.ampere.instructions import TILED, at_index
from pallas_kernels.compat import load
from pallas_kernels.packing import TILE_ROWS

_PALLAS: Any = plgpu  # before 0.11 it has fewer names

#: Products in float32, [64, columns]; None before JAX 0.11, which has no such products.
PRODUCTS: Any = _PALLAS.Layout.MMA_ACC(jnp.float32) if hasattr(plgpu.Layout, "MMA_ACC") else None
ROWS: Any = PRODUCTS and PRODUCTS.reduce(1)

_HALF = TILE_ROWS // 2
_SLAB = 16  # rows of a slab that a warp has
_STEP = 16  # tokens of one product with V
_LANES = 32


def _of_half(tiles: tuple[tuple[int, ...], ...]) -> Any:
    """Give warps 0 and 1 16 rows each of 32, and warps 2 and 3 the same ones."""
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (plgpu.Replicated(2), -7), (-3, -2), -1)


_QUERY_OF_HALF = _of_half(((32, 16), (16, 8), (8, 8), (2,)))
_ROWS_OF_HALF = _of_half(((32, 8), (16, 8), (8, 8), (2,))).reduce(1)


def warp() -> jax.Array:
    """Return the number of each warp, a scalar that differs from warp to warp."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())))
    def number(_: Any) -> Any:
        return mgpu.FragmentedArray.splat(mgpu.utils.warp_idx(), (), is_signed=True)

    return number()


def slabs_in_use(rows: Any, split: int, warp: jax.Array) -> jax.Array:
    """Return which slabs of each warp have some of the first `rows` rows of the tile: bit s for slab s."""
    first = lax.rem(warp, jnp.int32(4 // split)) * _SLAB
    return sum((first + slab * _HALF < rows).astype(jnp.int32) << slab for slab in range(split))


def slabs_of_readers(readers: Any, tokens: int, split: int, warp: jax.Array) -> jax.Array:
    """Return which slabs of each warp have rows that see some of the warp's tokens: bit s for slab s.

    Args:
      readers: int32 [tokens or more] in shared memory, as `unpack_readers` takes them.
      tokens: of a block.
      split: warps that share rows.
      warp: `warp()`.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    )
    def vote(_: Any, readers: Any, warp: Any) -> Any:
        word, warp = ir.IntegerType.get_signless(32), warp.registers.item()
        memory, lane = mgpu.utils.memref_ptr(readers), arith.andi(mgpu.utils.thread_idx(), mgpu.c(_LANES - 1, word))
        own, warps = tokens // split, mgpu.c(4 // split, word)
        part, first_row = arith.divui(warp, warps), arith.muli(arith.remui(warp, warps), mgpu.c(_SLAB, word))
        found = [mgpu.c(0, ir.IntegerType.get_signless(1))] * split
        for begin in range(0, own, _LANES):
            # Where a warp has fewer tokens than lanes, lanes look at a token twice.
            token = arith.andi(lane, mgpu.c(min(own, _LANES) - 1, word))
            token = arith.addi(arith.muli(part, mgpu.c(own, word)), arith.addi(token, mgpu.c(begin, word)))
            interval = llvm.load(word, at_index(memory, [token], word))
            first, end = arith.andi(interval, mgpu.c(0xFFFF, word)), arith.shrui(interval, mgpu.c(16, word))
            for slab in range(split):
                row = arith.addi(first_row, mgpu.c(slab * _HALF, word))
                past = arith.addi(row, mgpu.c(_SLAB, word))
                begins = arith.cmpi(arith.CmpIPredicate.ult, first, past)
                both = arith.andi(begins, arith.cmpi(arith.CmpIPredicate.ugt, end, row))
                found[slab] = arith.ori(found[slab], both)
        bits = mgpu.c(0, word)
        for slab, seen in enumerate(found):
            seen = nvvm.vote_sync(mgpu.c(0xFFFFFFFF, word), seen, "any")
            bits = arith.ori(bits, arith.shli(arith.extui(word, seen), mgpu.c(slab, word)))
        return mgpu.FragmentedArray.splat(bits, (), is_signed=True)

    return vote(readers, warp)


def row_of_tile(slab: int, split: int, columns: int) -> jax.Array:
    """Return which row of the tile each row of a slab is, int32 [64, columns]."""
    row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, columns), 0, layout=PRODUCTS)
    return row if split == 1 else (row & (_HALF - 1)) + slab * _HALF


def load_rows(ref: Any, first: jax.Array, slab: int, split: int) -> jax.Array:
    """Load a number for each row of a slab, [64], from those of all rows, of which the tile's begin at `first`."""
    if split == 1:
        return load(ref.at[pl.ds(first, TILE_ROWS)], ROWS)
    return _twice(load(ref.at[pl.ds(first + slab * _HALF, _HALF)], _ROWS_OF_HALF), _ROWS_OF_HALF, ROWS)


def load_tokens(ref: Any, split: int, warp: jax.Array) -> jax.Array:
    """Load a number for each token of a block, [S], from shared memory, and repeat it along rows, [64, S / split]."""
    tokens = _own_tokens(ref.shape[0], split, warp)
    return lax.broadcast_in_dim(_load(ref.at[tokens], PRODUCTS.reduce(0)), (TILE_ROWS, ref.shape[0] // split), [1])


def multiply_keys(query: Any, keys: Any, slabs: Sequence[int], split: int, warp: jax.Array) -> list[jax.Array]:
    """Return the products of a tile of the query and a block of keys, both in `TILED` shared memory.

    They are [64, S / split] for each of the slabs.
    """
    dtype, tokens = query.dtype, _own_tokens(keys.shape[0], split, warp)
    zeros = plgpu.layout_cast(jnp.full((TILE_ROWS, keys.shape[0] // split), 0, jnp.float32), PRODUCTS)
    scores = [zeros for _ in slabs]
    for begin in range(0, query.shape[1], 64):
        columns = pl.ds(begin, 64)
        right = _load(keys.at[tokens, columns].transpose((1, 0)), _PALLAS.Layout.MMA_RHS(dtype))
        for i, slab in enumerate(slabs):
            scores[i] = _PALLAS.mma(scores[i], _load_query(query.at[:, columns], slab, split), right)
    return scores


def multiply_values(
    accs: list[list[jax.Array]], weights: list[jax.Array], values: Any, split: int, warp: jax.Array
) -> list[list[jax.Array]]:
    """Add the products of weights, float32 [64, S / split] for each of some slabs, and a block of values.

    Accumulators are [64, 64] each, some for each of the slabs. The weights are rounded to the dtype of the values,
    which are in `TILED` shared memory.
    """
    dtype, accs = values.dtype, [list(of_slab) for of_slab in accs]
    lefts, own = [_as_operands(of_slab, dtype) for of_slab in weights], _own_tokens(values.shape[0], split, warp)
    for step in range(own.size // _STEP):
        tokens = pl.ds(own.start + step * _STEP, _STEP)
        for i in range(values.shape[1] // 64):
            right = _load(values.at[tokens, pl.ds(i * 64, 64)], _PALLAS.Layout.MMA_RHS(dtype))
            for of_slab, left in zip(accs, lefts, strict=True):
                of_slab[i] = _PALLAS.mma(of_slab[i], left[step], right)
    return accs


def swap_halves(memory: Any, numbers: jax.Array, layout: Any) -> jax.Array:
    """Exchange rows 0 to 31 and rows 32 to 63 of registers.

    Args:
      memory: `TILED` shared memory, a multiple of 1024 bytes, that nobody reads any more when all threads are here.
      numbers: float32 [64] or [64, columns].
      layout: `ROWS` or `PRODUCTS`.
    """
    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED), layout), return_type=result)
    def swap(_: Any, memory: Any, numbers: Any) -> Any:
        word, thread = ir.IntegerType.get_signless(32), mgpu.utils.thread_idx()
        registers, to = numbers.registers.copy(), mgpu.utils.memref_ptr(memory)
        kind, threads = registers.flat[0].type, 4 * _LANES
        size = 4 * threads * ir.VectorType(kind).shape[0]
        at_once = mgpu.utils.bytewidth(ir.MemRefType(memory.type).element_type) * memory_size(memory) // size
        other = arith.xori(thread, mgpu.c(threads // 2, word))
        for begin in range(0, registers.size, at_once):
            chunk = range(begin, min(begin + at_once, registers.size))
            mgpu.utils.warpgroup_barrier()
            for i in chunk:
                place = arith.addi(thread, mgpu.c((i - begin) * threads, word))
                llvm.store(registers.flat[i], at_index(to, [place], kind))
            mgpu.utils.warpgroup_barrier()
            for i in chunk:
                place = arith.addi(other, mgpu.c((i - begin) * threads, word))
                registers.flat[i] = llvm.load(kind, at_index(to, [place], kind))
        return mgpu.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=None)

    return swap(memory, numbers)


def memory_size(memory: Any) -> int:
    """Count the numbers of a reference."""
    size = 1
    for length in ir.MemRefType(memory.type).shape:
        size *= length
    return size


def _own_tokens(tokens: int, split: int, warp: jax.Array) -> Any:
    """Return the tokens of a block that each warp works on."""
    own = tokens // split
    return pl.ds(lax.div(warp, jnp.int32(4 // split)) * own if split > 1 else 0, own)


def _load_query(query: Any, slab: int, split: int) -> jax.Array:
    """Load some columns of a slab of the query's tile, [64, columns], as the left operand of products."""
    layout = _PALLAS.Layout.MMA_LHS(query.dtype)
    if split == 1:
        return _load(query, layout)
    return _twice(_load(query.at[pl.ds(slab * _HALF, _HALF)], _QUERY_OF_HALF), _QUERY_OF_HALF, layout)


def _twice(rows: jax.Array, layout: Any, result: Any) -> jax.Array:
    """Take 32 rows, which two pairs of warps have, for rows 0 to 31 and for rows 32 to 63 of another layout."""
    shape = (TILE_ROWS, *rows.shape[1:])

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, rows.dtype, layout=result))
    def rename(_: Any, rows: Any) -> Any:
        of_result = result.to_mgpu()
        registers = rows.registers.reshape(of_result.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=of_result, _is_signed=rows.is_signed)

    return rename(rows)


def _as_operands(weights: jax.Array, dtype: Any) -> list[jax.Array]:
    """Round products to what the next products take on their left, [64, 16] each: all threads have the right ones."""
    layout, steps = _PALLAS.Layout.MMA_LHS(dtype), weights.shape[1] // _STEP
    operand = plgpu.ShapeDtypeStruct((TILE_ROWS, _STEP), dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(PRODUCTS,), return_type=[operand] * steps)
    def round_(_: Any, weights: Any) -> Any:
        rounded, of_operand = weights.astype(mgpu.utils.dtype_to_ir_type(dtype)), layout.to_mgpu()
        registers = rounded.registers.reshape(steps, *of_operand.registers_shape(operand.shape))
        return [mgpu.FragmentedArray(_registers=part, _layout=of_operand, _is_signed=None) for part in registers]

    return round_(weights)


def _load(ref: Any, layout: Any) -> jax.Array:
    return _PALLAS.load(ref, layout=layout)
