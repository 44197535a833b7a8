"""Tokens that a window hides from everybody: no plan lists them, and their pages can be given back."""

import numpy as np
from jaxtyping import Int

from codec_jax.arrays import reduce_intervals


def hidden_from_readers(
    first_position: Int[np.ndarray, " rows"],
    start: Int[np.ndarray, " nodes"],
    row_lo: Int[np.ndarray, " nodes"],
    row_hi: Int[np.ndarray, " nodes"],
) -> Int[np.ndarray, " nodes"]:
    """Count the tokens of each node, from its first on, that come before the first position that any reader sees."""
    read = np.flatnonzero(row_hi > row_lo)
    hidden = np.zeros(len(start), np.int64)
    smallest = reduce_intervals(np.minimum, first_position, row_lo[read], row_hi[read])
    hidden[read] = np.maximum(smallest - start[read], 0)
    return hidden
