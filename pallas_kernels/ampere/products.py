"""Products of a tile of 64 query rows with a block of K and of V, by four warps, and which blocks a warp leaves out.

Warp w has rows 16 w to 16 w + 15 of the tile, and all tokens of a block. Where none of its rows sees any of them, the
block would change nothing, and K and V would be read from shared memory for it all the same.
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


def has_readers(readers: Any, tokens: int, warp: jax.Array) -> jax.Array:
    """Say of each warp whether it has rows that see some of a block's tokens, by 1 or 0.

    Args:
      readers: int32 [tokens or more] in shared memory, as `unpack_readers` takes them.
      tokens: of a block.
      warp: `warp()`.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    )
    def vote(_: Any, readers: Any, warp: Any) -> Any:
        word, warp = ir.IntegerType.get_signless(32), warp.registers.item()
        memory, lane = mgpu.utils.memref_ptr(readers), arith.andi(mgpu.utils.thread_idx(), mgpu.c(_LANES - 1, word))
        row = arith.muli(warp, mgpu.c(_WARP_ROWS, word))
        past, seen = arith.addi(row, mgpu.c(_WARP_ROWS, word)), mgpu.c(0, ir.IntegerType.get_signless(1))
        for begin in range(0, tokens, _LANES):
            # Where a block has fewer tokens than a warp has lanes, lanes look at a token twice.
            token = arith.andi(lane, mgpu.c(min(tokens, _LANES) - 1, word))
            token = arith.addi(token, mgpu.c(begin, word))
            interval = llvm.load(word, at_index(memory, [token], word))
            first, end = arith.andi(interval, mgpu.c(0xFFFF, word)), arith.shrui(interval, mgpu.c(16, word))
            begins = arith.cmpi(arith.CmpIPredicate.ult, first, past)
            both = arith.andi(begins, arith.cmpi(arith.CmpIPredicate.ugt, end, row))
            seen = arith.ori(seen, both)
        seen = nvvm.vote_sync(mgpu.c(0xFFFFFFFF, word), seen, "any")
        return mgpu.FragmentedArray.splat(arith.extui(word, seen), (), is_signed=True)

    return vote(readers, warp)


def multiply_keys(query: Any, keys: Any) -> jax.Array:
    """Return the products of a tile of the query and a block of keys, [64, block], both in `TILED` shared memory."""
    dtype = query.dtype
    scores = plgpu.layout_cast(jnp.full((TILE_ROWS, keys.shape[0]), 0, jnp.float32), PRODUCTS)
    for begin in range(0, query.shape[1], 64):
        columns = pl.ds(begin, 64)
        right = _load(keys.at[:, columns].transpose((1, 0)), _PALLAS.Layout.MMA_RHS(dtype))
        scores = _PALLAS.mma(scores, _load(query.at[:, columns], _PALLAS.Layout.MMA_LHS(dtype)), right)
    return scores


def multiply_values(accs: list[jax.Array], weights: jax.Array, values: Any) -> list[jax.Array]:
    """Add the products of weights, float32 [64, block], and a block of values to accumulators, [64, 64] each.

    The weights are rounded to the dtype of the values, which are in `TILED` shared memory.
    """
    left, layout = _as_operands(weights, values.dtype), _PALLAS.Layout.MMA_RHS(values.dtype)
    for step, operand in enumerate(left):
        tokens = pl.ds(step * _STEP, _STEP)
        accs = [
            _PALLAS.mma(acc, operand, _load(values.at[tokens, pl.ds(i * 64, 64)], layout)) for i, acc in enumerate(accs)
        ]
    return accs


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
