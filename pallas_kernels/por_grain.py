"""How finely POR on Hopper cuts its work: rows of a tile for a thread block, and what a thread has of them."""

import math
from typing import NamedTuple

_WARPS, _LANES = 4, 32  # of a warpgroup, and of a warp
#: Columns that the warps of a row have at a time, at most.
_COLUMNS = 128


class Grain(NamedTuple):
    """The work of a thread block, in which a warp or two have each row."""

    rows: int  # of a tile
    warps: int  # for a row
    many: int  # partials in flight
    few: int  # and in the last turns

    @property
    def together(self) -> int:
        """Rows that all warps have at a time."""
        return _WARPS // self.warps

    @property
    def threads(self) -> int:
        """Threads that have a row."""
        return self.warps * _LANES

    def columns(self, head_dim: int) -> int:
        """Columns of a row that the threads have at a time."""
        return min(head_dim, _COLUMNS)

    def numbers(self, head_dim: int) -> int:
        """Numbers next to each other that a thread has at a time."""
        return self.columns(head_dim) // self.threads

    def chunks(self, head_dim: int) -> int:
        """How many times a thread has so many."""
        return self.rows // self.together * (head_dim // self.columns(head_dim))


#: The grain by the number of merge groups, at most. The fewer there are, the more partials each has: much is in flight
#: then, in as many thread blocks as there can be. Where there are many groups, most have one partial or two.
_GRAINS = {
    4: Grain(2, warps=2, many=32, few=4),
    16: Grain(4, warps=1, many=16, few=4),
    32: Grain(4, warps=1, many=8, few=4),
    64: Grain(4, warps=1, many=4, few=2),
    math.inf: Grain(16, warps=1, many=2, few=1),
}


def grain_of(groups: int, head_dim: int, least: int = 1) -> Grain:
    """Choose the grain.

    Args:
      groups: row tiles, each for every kv head.
      head_dim: V, columns of a row.
      least: numbers that a thread has at a time.
    """
    return next(grain for most, grain in _GRAINS.items() if groups <= most and grain.numbers(head_dim) >= least)
