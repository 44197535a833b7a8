"""A gather over the devices of a group in one kernel: each gets what all have.

own words ─► every device's mailbox        mailbox ─► device 0's, device 1's, ...
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels.between_devices.mailbox import Box, Mailbox, kernel
from pallas_kernels.between_devices.numbers import Numbers, word
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.varying import NOWHERE, unvaried


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="sizes")
@jax.enable_x64(False)  # the kernel counts in int32
def collect(mailbox: Mailbox, x: jax.Array, sizes: Sizes) -> tuple[Mailbox, jax.Array]:
    """Return the mailbox for the next call, and what the devices have, [devices, ...]; 0.0 for -0.0.

    Args:
      mailbox: of `mailbox.empty`.
      x: bfloat16, float16 or float32, `sizes.words` words.
      sizes: of the mailbox.
    """
    refs = [jax.new_ref(unvaried(each)) for each in mailbox]

    def body(x: Any, slots: Any, counts: Any, out: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
        def gather(context: Any, x: Any, slots: Any, counts: Any, out: Any) -> None:
            box, numbers = Box(sizes, slots, counts), Numbers(x.type.element_type, sizes.width)
            own = numbers.to_words(numbers.load(x, box.first))
            for device, (words, _) in enumerate(box.exchange(context, lambda _: (own, []))):
                place = arith.addi(box.first, word(device * sizes.words))
                numbers.store(numbers.from_words(words), out, place)

        gather(x, slots, counts, out)

    out_type = jax.ShapeDtypeStruct((sizes.devices, *x.shape), x.dtype, manual_axis_type=NOWHERE)
    everyone = kernel("collect", body, out_type, sizes)(unvaried(x), *refs)
    return Mailbox(*(jax.freeze(ref) for ref in refs)), everyone
