"""Products of tiles of 64 query rows with a block of K and of V, by four warps, and which blocks a warp leaves out.

Warp w has rows 16 w to 16 w + 15 of each tile, and all tokens of a block, which it reads from shared memory once for
all tiles. Where none of its rows sees any of them, the block would change nothing, and would be read all the same.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.by_thread import at_index
from pallas_kernels.packing import TILE_ROWS

_PALLAS: Any = plgpu  # before 0.11 it has fewer names

#: Products in float32, [64, columns]; None before JAX 0.11, which has no such products.
PRODUCTS: Any = _PALLAS.Layout.MMA_ACC(jnp.float32) if hasattr(plgpu.Layout, "MMA_ACC") else None
ROWS: Any = PRODUCTS and PRODUCTS.reduce(1)

_WARP_ROWS = 16  # of a tile
_STEP = 16  # tokens of one product with V
_LANES = 32


def warp() -> jax.Array:
    """Return the number of each warp, a scalar that differs from warp to warp."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())))
    def number(_: Any) -> Any:
        return mgpu.FragmentedArray.splat(mgpu.utils.warp_idx(), (), is_signed=True)

    return number()


def has_rows(rows: Any, warp: jax.Array) -> jax.Array:
    """Say of each warp whether it has some of the first `rows` rows of the tile, by 1 or 0."""
    return (warp * _WARP_ROWS < rows).astype(jnp.int32)


def seen(readers: Any, tokens: int, warp: jax.Array, first_row: int) -> jax.Array:
    """Say of each warp what its rows of a tile see of a block: 0 nothing, 2 all tokens have the same readers, or 1.

    Args:
      readers: int32 [tokens or more] in shared memory, as `unpack_readers` takes them.
      tokens: of the block.
      warp: `warp()`.
      first_row: of the tile, as readers are counted.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    )
    def vote(_: Any, readers: Any, warp: Any) -> Any:
        word, bit, warp = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(1), warp.registers.item()
        memory, lane = mgpu.utils.memref_ptr(readers), arith.andi(mgpu.utils.thread_idx(), mgpu.c(_LANES - 1, word))
        row = arith.addi(arith.muli(warp, mgpu.c(_WARP_ROWS, word)), mgpu.c(first_row, word))
        past, some, alike = arith.addi(row, mgpu.c(_WARP_ROWS, word)), mgpu.c(0, bit), mgpu.c(1, bit)
        of_first = llvm.load(word, memory)
        for begin in range(0, tokens, _LANES):
            # Where a block has fewer tokens than a warp has lanes, lanes look at a token twice.
            token = arith.andi(lane, mgpu.c(min(tokens, _LANES) - 1, word))
            token = arith.addi(token, mgpu.c(begin, word))
            interval = llvm.load(word, at_index(memory, [token], word))
            first, end = arith.andi(interval, mgpu.c(0xFFFF, word)), arith.shrui(interval, mgpu.c(16, word))
            begins = arith.cmpi(arith.CmpIPredicate.ult, first, past)
            some = arith.ori(some, arith.andi(begins, arith.cmpi(arith.CmpIPredicate.ugt, end, row)))
            alike = arith.andi(alike, arith.cmpi(arith.CmpIPredicate.eq, interval, of_first))
        some, alike = (
            arith.extui(word, nvvm.vote_sync(mgpu.c(0xFFFFFFFF, word), what, which))
            for what, which in ((some, "any"), (alike, "all"))
        )
        code = arith.shli(some, alike)  # 0, 1 or 2
        return mgpu.FragmentedArray.splat(code, (), is_signed=True)

    return vote(readers, warp)


def multiply_keys(queries: list[Any], keys: Any) -> list[jax.Array]:
    """Return the products of tiles of the query and a block of keys, [64, block] each, all in `TILED` shared memory."""
    dtype = keys.dtype
    scores = [plgpu.layout_cast(jnp.full((TILE_ROWS, keys.shape[0]), 0, jnp.float32), PRODUCTS)] * len(queries)
    for begin in range(0, keys.shape[1], 64):
        columns = pl.ds(begin, 64)
        right = _load(keys.at[:, columns].transpose((1, 0)), _PALLAS.Layout.MMA_RHS(dtype))
        left = [_load(query.at[:, columns], _PALLAS.Layout.MMA_LHS(dtype)) for query in queries]
        scores = [_PALLAS.mma(products, operand, right) for products, operand in zip(scores, left, strict=True)]
    return scores


def multiply_values(accs: list[list[jax.Array]], weights: list[list[jax.Array]], values: Any) -> list[list[jax.Array]]:
    """Add the products of tiles' weights, as `as_operands` has them, and a block of values to their accumulators.

    These are [64, 64] each, for consecutive columns; the values are in `TILED` shared memory.
    """
    layout = _PALLAS.Layout.MMA_RHS(values.dtype)
    for step, operands in enumerate(zip(*weights, strict=True)):
        tokens = pl.ds(step * _STEP, _STEP)
        right = [_load(values.at[tokens, pl.ds(begin, 64)], layout) for begin in range(0, values.shape[1], 64)]
        accs = [
            [_PALLAS.mma(acc, operand, part) for acc, part in zip(of_tile, right, strict=True)]
            for of_tile, operand in zip(accs, operands, strict=True)
        ]
    return accs


def as_operands(weights: jax.Array, dtype: Any) -> list[jax.Array]:
    """Round weights, float32 [64, block], to what products with values take on their left, [64, 16] each.

    All threads have the right ones.
    """
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
