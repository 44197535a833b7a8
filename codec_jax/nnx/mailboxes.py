"""Sums, gathers and merges over the GPUs of one process, by kernels that write to each other's memory.

    sums     of hidden states, over all devices, perhaps with the norms before and after they are added
    gathers  of queries, keys and values, over the devices of a group that compute parts of them; of whole heads perhaps
             with norm, rotation, and the way to their pages
    merges   of attention, over the devices of a group that have parts of the pages; POR itself exchanges them

What the kernels do not take, or what is too large to send to every device, is left to XLA's collectives.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from codec_jax.mesh import CONTEXT, TENSOR, axis_size
from pallas_kernels import Call, Family, Scores
from pallas_kernels.addends import Parts, Shares
from pallas_kernels.between_devices.sizes import Sizes, of_arrays, of_columns, of_heads, of_merges, of_rows
from pallas_kernels.compat import REACHES_OTHER_DEVICES
from pallas_kernels.hopper.add_norm import Factors
from pallas_kernels.hopper.head_rows import HeadSizes, Norm, Places, Scales
from pallas_kernels.hopper.tiling import columns_of, why_not_on


def why_not(mesh: Mesh) -> str | None:
    """Say why kernels on the devices of a mesh cannot write to each other's memory; None if they can."""
    devices = list(mesh.devices.flat)
    for device in devices:
        if reason := why_not_on(device):
            return reason
    if not REACHES_OTHER_DEVICES:
        return f"it takes JAX 0.11 or later, got {jax.__version__}"
    if jax.process_count() > 1:
        return f"it takes GPUs of one process, got {jax.process_count()} processes"
    if (numbers := [device.id for device in devices]) != list(range(len(devices))):
        return f"it takes a process's first GPUs in their order, got {numbers}; start one whose first these are"
    return None


def stride_of(mesh: Mesh) -> int | None:
    """Return the way from one device of the axis "context" to the next, in the order of all; None without mailboxes.

    Warns, once, of GPUs that have none.
    """
    if mesh.size == 1:
        return None
    if reason := why_not(mesh):
        if mesh.devices.flat[0].platform == "gpu":
            # The registry of `warnings` shows a text once per process and line.
            warnings.warn(
                f"mesh: devices exchange by XLA's collectives, with which a step takes longer; {reason}", stacklevel=1
            )
        return None
    return 1 if mesh.axis_names[-1] == CONTEXT else axis_size(mesh, TENSOR)


@dataclass(frozen=True)
class Mailbox:
    """The memory of a device for exchanges of one kind, one after another."""

    like: tuple[tuple[int, ...], Any]  # shape and dtype of what is exchanged
    sizes: Sizes
    memory: tuple[Any, ...]  # references
    is_by_rows: bool = False  # whether a thread block has whole rows: of sums and norms in one kernel, or of heads

    @classmethod
    def for_arrays(cls, seed: Any, x: Any, devices: int, stride: int = 1) -> Mailbox | None:
        """Make one for sums of arrays like x; None if they are not for the kernel.

        Args:
          seed: int32, a number that only this mailbox depends on, and that a loop computes in every turn.
          x: anything with a shape and a dtype.
          devices: of a group.
          stride: from one of them to the next, in the order of all devices.
        """
        return cls._open(seed, x, of_arrays(x, devices, stride))

    @classmethod
    def for_rows(cls, seed: Any, x: Any, devices: int, stride: int = 1) -> Mailbox | None:
        """Make one for sums of arrays like x, [..., D], and their norms; None if they are not for the kernel.

        Args:
          seed, x, devices, stride: as in `for_arrays`.
        """
        return cls._open(seed, x, of_rows(x, devices, stride), is_by_rows=True)

    @classmethod
    def for_columns(cls, seed: Any, x: Any, parts: Sequence[int], devices: int, stride: int = 1) -> Mailbox | None:
        """Make one for gathers of arrays like x, [..., columns]; None if they are not for the kernel.

        Args:
          seed, x, devices, stride: as in `for_arrays`.
          parts: columns of each part, as many as x has.
        """
        return cls._open(seed, x, of_columns(x, parts, devices, stride))

    @classmethod
    def for_heads(cls, seed: Any, heads: Any, devices: int, stride: int = 1) -> Mailbox | None:
        """Make one for gathers of heads by the kernel that splits them; None if they are not for the kernel.

        Args:
          seed, devices, stride: as in `for_arrays`.
          heads: anything with a shape [B, T, heads, H], those that a device computes of queries, keys and values, and
            the dtype in which they are stored.
        """
        *rows, num_own_heads, head_dim = heads.shape
        sizes = of_heads(math.prod(rows), num_own_heads, head_dim, heads.dtype, devices, stride)
        return cls._open(seed, heads, sizes, is_by_rows=True)

    @classmethod
    def for_merges(cls, seed: Any, query: Any, num_kv_heads: int, devices: int, stride: int = 1) -> Mailbox | None:
        """Make one for merges of attention of queries like this, [B, T, N, H]; None if they are not for the kernel.

        Args:
          seed, query, devices, stride: as in `for_arrays`; each device gets its part of the N heads.
          num_kv_heads: K, of those that a device attends with.
        """
        _, columns = columns_of((query.shape[-1],) * 2)
        return cls._open(seed, query, of_merges(query, num_kv_heads, columns, devices, stride))

    @classmethod
    def _open(cls, seed: Any, like: Any, sizes: Sizes | None, *, is_by_rows: bool = False) -> Mailbox | None:
        if sizes is None:
            return None
        # A JAX that was built without GPU support may not have the kernels' dialect.
        from pallas_kernels.between_devices.mailbox import empty

        memory = empty(seed.reshape(1), sizes=sizes)
        return cls((like.shape, like.dtype), sizes, tuple(jax.new_ref(each) for each in memory), is_by_rows)

    @property
    def opened(self) -> Int[Array, ""]:
        """Return 0, which there is not before there is the mailbox: who has that of all devices may send."""
        return self.memory[1][...][0]

    def takes(self, x: Float[Array, "*shape"]) -> bool:
        """Whether it is for arrays like x."""
        return (x.shape, x.dtype) == self.like

    def add_up(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return the sum of what the devices have."""
        from pallas_kernels.between_devices.add_up import add_up

        return self._run(add_up, x)

    def add_up_and_norm(
        self, x: Float[Array, "rows D"], update: Parts | Shares, factors: Factors, norm: Norm
    ) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
        """Do what `add_norm.add_and_norm` does, with the sum of what the devices have; of a mailbox for rows."""
        from pallas_kernels.between_devices.add_up_and_norm import add_up_and_norm

        return self._run(partial(add_up_and_norm, norm=norm), x, update, factors)

    def collect(self, x: Float[Array, "*rows columns"], parts: Sequence[int]) -> Float[Array, "*rows all"]:
        """Return the columns of all devices of a group: of each part all of theirs, then of the next one."""
        from pallas_kernels.between_devices.collect import collect

        return self._run(partial(collect, parts=tuple(parts)), x)

    def split_heads(
        self, columns: Parts, scales: Scales, places: Places, heads: HeadSizes
    ) -> tuple[Array, Array, Array]:
        """Do what `head_rows.split_heads` does, of the heads of all devices; of a mailbox for heads.

        Args:
          columns: [S, rows, columns], of the heads that this device computed.
          scales, places: as in `head_rows.split_heads`.
          heads: those of all devices of the group.
        """
        from pallas_kernels.between_devices.collect_heads import collect_heads

        return self._run(partial(collect_heads, heads=heads), columns, scales, places)

    def attend(self, family: Family, call: Call, scores: Scores) -> tuple[Array, Array, Array]:
        """Attend over the pages of all devices of a group, by `Family.attend_and_merge`; each gets its heads."""
        merging = family.attend_and_merge
        assert merging is not None
        return self._run(lambda memory, sizes: merging(call, scores, memory, sizes))

    def _run(self, kernel: Callable[..., tuple[Any, Any]], *arrays: Any) -> Any:
        from pallas_kernels.between_devices.mailbox import Memory

        memory, result = kernel(Memory(*(ref[...] for ref in self.memory)), *arrays, sizes=self.sizes)
        for ref, new in zip(self.memory, memory, strict=True):
            ref[...] = new
        return result
