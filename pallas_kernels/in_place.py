"""Kernels that change some of their arrays where these are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax


def run_in_place(
    kernel: Callable[..., Any], inputs: Sequence[Array], changed: Sequence[Array]
) -> tuple[Any, list[Array]]:
    """Call a kernel with arrays, and with references to those that it changes; return its results, and these.

    XLA makes slices that a kernel takes or gives part of its call ("dynamic-slice-fusion"), and forgets that some of
    what it gives is where some of what it takes was: it would return arrays that nobody wrote to, and a slice would be
    changed in the array that it is of. Not across a barrier.
    """
    inputs, changed = lax.optimization_barrier((list(inputs), list(changed)))
    refs = [jax.new_ref(each) for each in changed]
    results = kernel(*inputs, *refs)
    return lax.optimization_barrier((results, [jax.freeze(ref) for ref in refs]))
