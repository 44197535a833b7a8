"""What the planner writes and the kernels read: the columns of a plan's arrays, free of any dialect.

A row's fields make a value of these types, and so do whole columns: `Segment(*segments.T)`.
"""

from typing import Any, NamedTuple


class Segment(NamedTuple):
    """Blocks [lo, hi) of one kv head for two lanes; those from `masked` on need the mask. Columns of `segments`."""

    tile: Any  # of lane 0
    other_tile: Any  # of lane 1; the same in a narrow segment
    head: Any
    lo: Any
    masked: Any
    hi: Any
    partial: Any  # where lane 0 writes
    other_partial: Any
    unit: Any  # entry of the query that the tile begins with, or -1 if its units are not consecutive there
    other_unit: Any

    @property
    def is_wide(self) -> Any:
        """Whether the lanes hold a tile each, and both work on every block."""
        return self.tile != self.other_tile


class Page(NamedTuple):
    """One page of a block. Columns of `pages`."""

    page_id: Any
    node: Any  # entry of `node_length` that bounds its tokens
    token: Any  # index of its first token within the node
    #: Rows that see it, counted over both tiles of a wide segment: first + (last + 1 << 16), or 0 if there are none.
    readers: Any
