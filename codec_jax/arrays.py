"""Arrays of the host or of a device, the capacities they are padded to, and the index arithmetic of ragged lists."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int

#: A list of integers in whatever form the caller has it.
Integers = Sequence[int] | np.ndarray

#: NumPy on the host; JAX arrays, or tracers, in a step.
if TYPE_CHECKING:
    # To a type checker the two have little in common beyond being indexable, and most code serves both.
    HostOrDevice = Any
else:
    HostOrDevice = jax.Array | np.ndarray


def bucket(size: int, minimum: int = 8) -> int:
    """Return the smallest of minimum x 2^i and 1.5 x minimum x 2^i that holds `size`: under 50% is padding."""
    power = max(minimum, 1)
    while power < size:
        if power + power // 2 >= size:
            return power + power // 2
        power *= 2
    return power


def to_int32(values: HostOrDevice, minimum: int) -> Int[HostOrDevice, "*shape"]:
    """Return integers of any width as int32, in [minimum, 2**31 - 1] instead of wrapped around."""
    if values.dtype.itemsize > 4 or values.dtype == np.uint32:
        values = values.clip(max(minimum, np.iinfo(values.dtype).min), 2**31 - 1)
    return values.astype(np.int32)


def padded(values: np.ndarray, capacity: int, fill: int) -> Int[np.ndarray, " capacity"]:
    """Return values as int32, filled up to a capacity."""
    out = np.full(capacity, fill, np.int32)
    out[: len(values)] = values
    return out


def expand(counts: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " total"], Int[np.ndarray, " total"]]:
    """Return, for each of sum(counts) items, the index of its group and its number within the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def reduce_intervals(
    operation: np.ufunc, values: Int[np.ndarray, " m"], begin: Int[np.ndarray, " n"], end: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Reduce values [begin, end) of each of n intervals, of which none is empty."""
    if not len(begin):
        return np.zeros(0, np.int64)
    bounds = np.stack([begin, end], axis=1).reshape(-1)
    return operation.reduceat(np.append(values, values[-1]), bounds)[::2]
