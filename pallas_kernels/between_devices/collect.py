"""A gather over the devices of a group in one kernel: each gets what all have.

own words ─► every device's mailbox        mailbox ─► device 0's, device 1's, ...
"""

from functools import partial
from typing import Any

import jax
from jaxlib.mlir.dialects import arith

from pallas_kernels.between_devices.mailbox import Box, Memory, run
from pallas_kernels.between_devices.numbers import word
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.varying import NOWHERE


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="sizes")
@jax.enable_x64(False)  # the kernel counts in int32
def collect(mailbox: Memory, x: jax.Array, sizes: Sizes) -> tuple[Memory, jax.Array]:
    """Return the mailbox for the next call, and what the devices have, [devices, ...]; 0.0 for -0.0.

    Args:
      mailbox: of `mailbox.empty`.
      x: bfloat16, float16 or float32, `sizes.words` words.
      sizes: of the mailbox.
    """

    def thread(context: Any, box: Box, x: Any, out: Any) -> None:
        numbers, parts = box.everyone(context, x)
        for device, part in enumerate(parts):
            numbers.store(part, out, arith.addi(box.first, word(device * sizes.words)))

    out_type = jax.ShapeDtypeStruct((sizes.devices, *x.shape), x.dtype, manual_axis_type=NOWHERE)
    return run("collect", thread, mailbox, [x], out_type, sizes)
