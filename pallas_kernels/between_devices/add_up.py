"""A sum over devices, in one kernel of one thread block for every 2 KB, inside of the CUDA graph of what is around it.

    own numbers ─► every device's mailbox        mailbox ─► device 0's + device 1's + ... ─► sum
                                                            float32, in this order on all devices

All devices compute the very same sum. XLA's all-reduce has a CUDA graph end before it and another one begin after it,
and this takes as long as the exchange. What is sent is S - 1 times the numbers, so this is for few of them: a step's
hidden states.
"""

from functools import partial, reduce
from typing import Any

import jax
from jaxlib.mlir.dialects import arith

from pallas_kernels.between_devices.mailbox import Box, Memory, run
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.varying import NOWHERE


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="sizes")
@jax.enable_x64(False)  # the kernel counts in int32
def add_up(mailbox: Memory, x: jax.Array, sizes: Sizes) -> tuple[Memory, jax.Array]:
    """Return the mailbox for the next call, and the sum of what the devices have.

    Args:
      mailbox: of `mailbox.empty`.
      x: bfloat16, float16 or float32, `sizes.words` words.
      sizes: of the mailbox.
    """

    def thread(context: Any, box: Box, x: Any, out: Any) -> None:
        numbers, come = box.everyone(context, x)
        for first, of_devices in zip(box.firsts, come, strict=True):
            numbers.store(reduce(arith.addf, of_devices), out, first)

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=NOWHERE)
    return run("add_up", thread, mailbox, [x], out_type, sizes)
