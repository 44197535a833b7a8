"""A gather over the devices of a group in one kernel: each gets the columns of all, part by part.

own words ─► every device's mailbox        mailbox ─► rows of device 0's queries, device 1's queries, ...,
                                                      device 0's keys, device 1's keys, ...
"""

from functools import partial
from itertools import accumulate
from typing import Any

import jax
from jaxlib.mlir.dialects import arith

from pallas_kernels.between_devices.mailbox import Box, Memory, run
from pallas_kernels.between_devices.numbers import word
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.varying import NOWHERE


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("parts", "sizes"))
@jax.enable_x64(False)  # the kernel counts in int32
def collect(mailbox: Memory, x: jax.Array, parts: tuple[int, ...], sizes: Sizes) -> tuple[Memory, jax.Array]:
    """Return the mailbox for the next call, and the columns of all devices; 0.0 for -0.0.

    Args:
      mailbox: of `mailbox.empty`.
      x: [..., columns], bfloat16, float16 or float32.
      parts: columns of each part; of a part come those of all devices, then the next part.
      sizes: of `sizes.of_columns`, with these parts.
    """
    words = [part * x.dtype.itemsize // 4 for part in parts]
    *begins, all_words = 0, *accumulate(words)

    def thread(context: Any, box: Box, x: Any, out: Any) -> None:
        numbers, come = box.everyone(context, x)
        for first, of_devices in zip(box.firsts, come, strict=True):
            row, column = arith.divui(first, word(all_words)), arith.remui(first, word(all_words))
            begin, size = word(0), word(words[0])  # of the part that the words of this chunk are in
            for later, of_part in zip(begins[1:], words[1:], strict=True):
                is_later = arith.cmpi(arith.CmpIPredicate.uge, column, word(later))
                begin, size = (arith.select(is_later, word(n), old) for n, old in ((later, begin), (of_part, size)))
            of_row = arith.addi(arith.muli(begin, word(sizes.devices - 1)), column)
            place = arith.addi(arith.muli(row, word(sizes.devices * all_words)), of_row)
            for part in of_devices:
                numbers.store(part, out, place)
                place = arith.addi(place, size)

    shape = *x.shape[:-1], sizes.devices * x.shape[-1]
    out_type = jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=NOWHERE)
    return run("collect", thread, mailbox, [x], out_type, sizes)
