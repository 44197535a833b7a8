"""POR across devices in one kernel: each has partials of all heads, and gets the merged rows of its own.

    out [rows, C, n, V]        ─► part c to the mailbox of device c
    max, sum [rows, C, n]      ─► with it, two words for each row of a head

    mailbox ─► out_0, max_0, sum_0, out_1, ... ─► merged out [rows, n, V], max and sum [rows, n]

A thread has 16 bytes of a row of a head; the threads of one row share its maximum and sum. The merge is the paper's POR
(section 4; doi 10.1145/3802028), in the order of the devices.
"""

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.between_devices.mailbox import Box, Memory, run
from pallas_kernels.between_devices.numbers import Numbers, instruct, word, word_type
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.by_thread import at_index, global_memory
from pallas_kernels.varying import NOWHERE, vary_like


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="sizes")
@jax.enable_x64(False)  # the kernel counts in int32
def merge_parts(
    mailbox: Memory, out: jax.Array, row_max: jax.Array, row_sum: jax.Array, sizes: Sizes
) -> tuple[Memory, tuple[jax.Array, ...]]:
    """Return the mailbox for the next call, and merged output, maximum and sum of the heads of this device.

    Args:
      mailbox: of `mailbox.empty`.
      out: [..., heads, V], bfloat16, float16 or float32; normalised by its own sum.
      row_max: [..., heads], greatest scaled score, float32; -inf for rows that see no token here.
      row_sum: [..., heads], sum of the exponentials, float32.
      sizes: of `sizes.of_merges`.
    """
    given = out, row_max, row_sum
    heads = out.shape[-2] // sizes.devices
    shapes = (*out.shape[:-2], heads, out.shape[-1]), (*out.shape[:-2], heads), (*out.shape[:-2], heads)
    dtypes = out.dtype, jnp.float32, jnp.float32
    out_type = [jax.ShapeDtypeStruct(*each, manual_axis_type=NOWHERE) for each in zip(shapes, dtypes, strict=True)]
    mailbox, merged = run("merge_parts", _merge, mailbox, given, out_type, sizes)
    return mailbox, tuple(vary_like(each, given) for each in merged)


def _merge(context: Any, box: Box, out: Any, row_max: Any, row_sum: Any, *merged: Any) -> None:
    """Merge the numbers of one thread."""
    sizes, numbers = box.sizes, Numbers(out.type.element_type, box.sizes.width)
    one, heads = Numbers(ir.F32Type.get(), 1), merged[1].type.shape[-1]
    row_of_head, chunk = (
        arith.divui(box.chunks[0], word(sizes.sharing)),
        arith.remui(box.chunks[0], word(sizes.sharing)),
    )
    row, head = arith.divui(row_of_head, word(heads)), arith.remui(row_of_head, word(heads))

    def words_for(device: Any) -> tuple[list[Any], list[Any]]:
        part = arith.addi(arith.muli(row, word(sizes.devices)), device)
        source = arith.addi(arith.muli(part, word(heads)), head)
        thread = arith.addi(arith.muli(source, word(sizes.sharing)), chunk)
        words = numbers.to_words(numbers.load(out, arith.muli(thread, word(sizes.width))))
        return words, [each for ref in (row_max, row_sum) for each in one.to_words(one.load(ref, source))]

    come = list(box.exchange(context, words_for))
    outs = [numbers.from_words(words) for words, _ in come]
    maxima, sums = ([llvm.bitcast(ir.F32Type.get(), shared[i]) for _, shared in come] for i in range(2))
    greatest = reduce(arith.maximumf, maxima)
    weights = [arith.mulf(each, _exponential(own, greatest)) for own, each in zip(maxima, sums, strict=True)]
    total = reduce(arith.addf, weights)
    # Shares first: of a partial beside rows that see nothing it is 1, so that not a bit of it changes.
    is_nothing, nothing = arith.cmpf(arith.CmpFPredicate.OEQ, total, _float(0.0)), _float(0.0)
    shares = [arith.select(is_nothing, nothing, arith.divf(weight, total)) for weight in weights]
    parts = [numbers.times(part, share) for part, share in zip(outs, shares, strict=True)]
    numbers.store(reduce(arith.addf, parts), merged[0], box.first)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, chunk, word(0))):
        for ref, number in zip(merged[1:], (greatest, total), strict=True):
            llvm.store(number, at_index(global_memory(ref), [row_of_head], ir.F32Type.get()))


def _exponential(number: Any, greatest: Any) -> Any:
    """Return exp(number - greatest), 0 where both are -inf."""
    sees_nothing = arith.cmpf(arith.CmpFPredicate.OEQ, greatest, _float(-math.inf))
    difference = arith.subf(number, arith.select(sees_nothing, _float(0.0), greatest))
    power = arith.mulf(difference, _float(1 / math.log(2)))
    [bits] = instruct("ex2.approx.ftz.f32 $0, $1;", llvm.bitcast(word_type(), power), results=1)
    return llvm.bitcast(ir.F32Type.get(), bits)


def _float(number: float) -> Any:
    return mgpu.c(number, ir.F32Type.get())
