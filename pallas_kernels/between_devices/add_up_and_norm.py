"""A sum over devices, added to the hidden states, with the norms before and after that, in one kernel.

    one thread block for each row:

        what this device has to add up ─► its share ─► every device's mailbox

        mailbox ─► device 0's + device 1's + ... ─► norm, if there is one ─┬─► rounded ─┬─► hidden states
                                                             hidden states ┘            └─► norm, if ─► normed

What `add_norm` does on one device. All devices compute the very same rows. A thread block has all of a row, as norms
need its squares.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_kernels.addends import Parts, Shares
from pallas_kernels.between_devices.mailbox import Box, Memory, call
from pallas_kernels.between_devices.numbers import Numbers
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.hopper.add_norm import Factors, Piece, do_row, out_types
from pallas_kernels.hopper.head_rows import Norm


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("norm", "sizes"))
@jax.enable_x64(False)  # the kernel counts in int32
def add_up_and_norm(
    mailbox: Memory, x: jax.Array, update: Parts | Shares, factors: Factors, norm: Norm, sizes: Sizes
) -> tuple[Memory, tuple[jax.Array, jax.Array]]:
    """Return the mailbox for the next call, and what `add_norm` does, with the sum of what the devices have.

    Args:
      mailbox: of `mailbox.empty`.
      x: [rows, D], bfloat16 or float16, the same on all devices.
      update: what this device has, as in `add_norm.add_and_norm`.
      factors, norm: as in `add_norm.add_and_norm`.
      sizes: of `sizes.of_rows`.
    """
    whole = Piece(0, x.shape[1], plgpu.Layout.WG_STRIDED((x.shape[1],), 2 * sizes.width))
    given, structure = jax.tree.flatten((x, update, factors))

    def body(*refs: Any) -> None:
        x, update, factors = jax.tree.unflatten(structure, refs[: len(given)])
        slots, counts, *outs = refs[len(given) :]

        def over_devices(share: jax.Array) -> jax.Array:
            return _sum_over_devices(share, slots, counts, x.dtype, sizes)

        do_row(lax.axis_index("blocks"), x, update, factors, tuple(outs), norm, (whole,), over_devices)

    mailbox, results = call("add_up_and_norm", body, mailbox, given, out_types(x, factors), sizes)
    return mailbox, (results[0], results[-1])


def _sum_over_devices(share: jax.Array, slots: Any, counts: Any, dtype: Any, sizes: Sizes) -> jax.Array:
    """Send the numbers of a row [D], rounded to a dtype, and add up those of all devices in their order; float32."""
    spread = plgpu.Layout.WG_STRIDED(share.shape, 2 * sizes.width)

    @plgpu.inline_mgpu(
        arg_types=(spread, plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(share.shape, jnp.float32, layout=spread),
    )
    def exchange(context: Any, share: Any, slots: Any, counts: Any) -> Any:
        box, numbers = Box(sizes, slots, counts), Numbers(mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)), sizes.width)
        words = [each for chunk in share.registers.flat for each in numbers.to_words(chunk)]
        registers, width = np.full(share.registers.shape, None, object), sizes.width
        for come, _ in box.exchange(context, words):
            for i in range(sizes.chunks):
                chunk, so_far = numbers.from_words(come[i * width : (i + 1) * width]), registers.flat[i]
                registers.flat[i] = chunk if so_far is None else arith.addf(so_far, chunk)
        return mgpu.FragmentedArray(_registers=registers, _layout=share.layout, _is_signed=None)

    return exchange(share, slots, counts)
