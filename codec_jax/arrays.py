"""Arrays of the host or of a device, lists of integers, and the index arithmetic of ragged lists."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int

#: A list of integers in whatever form the caller has it.
Integers = Sequence[int] | np.ndarray

#: NumPy on the host; JAX arrays, or tracers, in a step.
if TYPE_CHECKING:
    # To a type checker the two have little in common beyond being indexable, and most code below serves both.
    HostOrDevice = Any
else:
    HostOrDevice = jax.Array | np.ndarray


def expand(counts: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " total"], Int[np.ndarray, " total"]]:
    """Return, for each of sum(counts) items, the index of its group and its number within the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]
