"""A gather of heads over the devices of a group, in the kernel that norms and rotates them, and stores K and V.

    one thread block for each (4 rows, head that this device computed):

        parts ─► sum ─► norm ─► rotation ─► 16 bits ─► every device's mailbox

        mailbox ─► device 0's head, device 1's head, ... ─► query, or pages of each of the kv heads

What `split_heads` does on one device, which has all heads itself. Whoever computed a head norms and rotates it, so no
device does that again; and what is sent is what is stored.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir.dialects import vector

from pallas_kernels.addends import Parts
from pallas_kernels.between_devices.mailbox import SCALAR, Box, Memory, begin, only
from pallas_kernels.between_devices.numbers import Numbers
from pallas_kernels.between_devices.sizes import Sizes
from pallas_kernels.hopper.head_rows import HeadSizes, Places, Scales
from pallas_kernels.hopper.split_heads import Halves, split_heads
from pallas_kernels.varying import unvaried, vary_like


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("heads", "sizes"))
@jax.enable_x64(False)  # the kernel counts in int32
def collect_heads(
    mailbox: Memory, columns: Parts, scales: Scales, places: Places, heads: HeadSizes, sizes: Sizes
) -> tuple[Memory, tuple[jax.Array, jax.Array, jax.Array]]:
    """Return the mailbox for the next call, and what `head_rows.split_heads` returns of the heads of all devices.

    Args:
      mailbox: of `mailbox.empty`.
      columns: [S, rows, columns], of the heads that this device computed: of its share of the queries, of the keys, of
        the values.
      scales: factors of the norms of queries, and of keys, if there are norms.
      places: positions and pages, those of this device, of all kv heads.
      heads: those of all devices.
      sizes: of `sizes.of_heads`.
    """
    given = columns, scales, places
    columns, scales, places = jax.tree.map(unvaried, given)
    group = _Group(Memory(*map(unvaried, mailbox)), sizes, places.key_pages.dtype)
    query, key, value, *memory = split_heads(columns, scales, places, heads, group)
    return Memory(*memory), (vary_like(query, given), vary_like(key, given), vary_like(value, given))


class _Group(NamedTuple):
    """The devices of a group as the kernel sees them: what `split_heads.Alone` is of one."""

    memory: Memory
    sizes: Sizes
    dtype: Any  # of what is sent, of 16 bits

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.sizes.devices

    def begin(self, memory: Any, block: jax.Array) -> list[jax.Array]:
        """Do in the thread block of this number what an exchange does before there is something to send."""
        slots, counts = memory
        return begin(slots, counts, block, self.sizes)

    def collect(
        self, memory: Any, block: jax.Array, begun: list[jax.Array], halves: Halves, spread: Any
    ) -> list[Halves]:
        """Send the halves of a head; return those that each device sent, rounded.

        Args:
          memory, block: as in `begin`.
          begun: what `begin` returned.
          halves: [4, H / 2] each, float32.
          spread: their layout, in which a lane has numbers of one row, side by side.
        """
        kept = plgpu.ShapeDtypeStruct(halves[0].shape, self.dtype, layout=spread)

        @plgpu.inline_mgpu(
            arg_types=((spread, spread), plgpu.RefType(), plgpu.RefType(), SCALAR, [SCALAR] * len(begun)),
            return_type=[(kept, kept)] * self.devices,
        )
        def exchange(context: Any, halves: Any, slots: Any, counts: Any, block: Any, begun: Any) -> Any:
            box = Box(self.sizes, slots, counts, only(block))
            numbers = Numbers(mgpu.utils.dtype_to_ir_type(kept.dtype), self.sizes.width)
            words = numbers.to_words(_joined(*(only(half) for half in halves)))
            come = box.exchange(context, words, begun=list(map(only, begun)))
            return [
                tuple(_like(halves[0], half) for half in _halved(numbers.stored_from_words(words))) for words, _ in come
            ]

        return exchange(halves, *memory, block, begun)


def _like(array: Any, register: Any) -> Any:
    """Return an array with one register, laid out like another."""
    registers = np.full(array.registers.shape, register, object)
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)


def _joined(left: Any, right: Any) -> Any:
    """Return the numbers of two registers in one."""
    return vector.shuffle(left, right, list(range(2 * left.type.shape[0])))


def _halved(numbers: Any) -> list[Any]:
    """Return a register in two."""
    half = numbers.type.shape[0] // 2
    return [vector.shuffle(numbers, numbers, list(range(i * half, (i + 1) * half))) for i in range(2)]
