"""Registers of products, float32 [64, columns], as threads and warps have them: wgmma and warp-level products alike.

A thread has two rows, and of each two columns of every eight.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.row_registers import broadcast_rows


def any_above(numbers: jax.Array, limit: float) -> jax.Array:
    """Say of each warp whether one of its numbers, [64, columns], is above a limit, by 1 or 0; NaN is not."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_: Any, numbers: Any) -> Any:
        word, most = ir.IntegerType.get_signless(32), mgpu.c(limit, ir.F32Type.get())
        found = mgpu.c(0, ir.IntegerType.get_signless(1))
        for pair in numbers.registers.flat:
            for place in range(2):
                number = vector.extract(pair, [], [place])
                found = arith.ori(found, arith.cmpf(arith.CmpFPredicate.OGT, number, most))
        found = nvvm.vote_sync(mgpu.c(0xFFFFFFFF, word), found, "any")
        return mgpu.FragmentedArray.splat(arith.extui(word, found), (), is_signed=True)

    return vote(numbers)


def any_row(rows: jax.Array) -> jax.Array:
    """Say of each warp whether one of its rows is, of flags [64], by 1 or 0."""
    return any_above(broadcast_rows(jnp.where(rows, 1.0, 0.0), 8), 0.5)


def fold_columns(combine: Callable[[Any, Any], Any], numbers: jax.Array) -> jax.Array:
    """Combine columns 8 apart of numbers [64, columns], which one thread has, by an operation of MLIR: [64, 8].

    One operation for all of them: the time to find layouts grows with the number of operations.
    """
    folded = plgpu.ShapeDtypeStruct((numbers.shape[0], 8), numbers.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=folded)
    def fold(_: Any, numbers: Any) -> Any:
        registers = numbers.registers
        eights = [registers[:, i : i + 1] for i in range(registers.shape[1])]
        both = np.vectorize(combine, otypes=[object])
        return mgpu.FragmentedArray(
            _registers=functools.reduce(both, eights), _layout=numbers.layout, _is_signed=numbers.is_signed
        )

    return fold(numbers)


def reciprocals(numbers: jax.Array, *, apart: bool) -> jax.Array:
    """Return 1 over each of numbers [64, columns], all between 1 and 2**31.

    The hardware takes as long for a reciprocal as for eight products, so four numbers of a row have one together, that
    of their product. NaN makes the other three NaN, too, unless numbers are kept apart.
    """

    def of_each(_: Any, numbers: Any) -> Any:
        registers, out = numbers.registers, np.empty_like(numbers.registers)
        if apart:
            out = _inverse(registers)
        else:
            a, b, c, d = (registers[:, i::4] for i in range(4))
            ab, cd = _times(a, b), _times(c, d)
            inverse = _inverse(_times(ab, cd))
            of_ab, of_cd = _times(inverse, cd), _times(inverse, ab)
            for i, each in enumerate((_times(of_ab, b), _times(of_ab, a), _times(of_cd, d), _times(of_cd, c))):
                out[:, i::4] = each
        return mgpu.FragmentedArray(_registers=out, _layout=numbers.layout, _is_signed=numbers.is_signed)

    layout = plgpu.Layout.WGMMA
    like = plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=like)(of_each)(numbers)


def _inverse_of_pair(pair: Any) -> Any:
    """Return 1 over both numbers of a register, by the instruction that has no cases for very large and small ones."""
    number = ir.F32Type.get()
    for place in range(2):
        one = vector.extract(pair, [], [place])
        inverse: Any = llvm.inline_asm(number, [one], "rcp.approx.ftz.f32 $0, $1;", "=f,f")
        pair = vector.insert(inverse, pair, [], [place])
    return pair


_times, _inverse = (np.vectorize(each, otypes=[object]) for each in (arith.mulf, _inverse_of_pair))
