"""Types of arguments: arrays of the host or of a device, and lists of integers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

#: A list of integers in whatever form the caller has it.
Integers = Sequence[int] | np.ndarray

#: NumPy on the host; JAX arrays, or tracers, in a step.
if TYPE_CHECKING:
    # To a type checker the two have little in common beyond being indexable, and most code below serves both.
    HostOrDevice = Any
else:
    HostOrDevice = jax.Array | np.ndarray
