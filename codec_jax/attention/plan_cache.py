"""Plans for block tables, found again by what the tables list.

Planning costs milliseconds on the host, and a decode step calls attention once per layer with the same table. So the
last few plans are kept, with their arrays on the device, and compared with what comes next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

from codec_jax import checks
from codec_jax.forest import Forest
from codec_jax.planning import Plan, make_plan
from pallas_kernels import Window

#: Tokens that each row may grow by under one plan, as far as the table lists pages for them.
STEPS = 16

_T = TypeVar("_T")


class CallLayout(NamedTuple):
    """All that a plan depends on beside the table and the lengths."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_tokens: int
    page_size: int
    num_pages: int
    window: Window | None = None
    kv_dtype: DTypeLike | None = None  # of the cache


class CacheInfo(NamedTuple):
    """How often `PlanCache.find` had a plan, and how often it made one; how many it holds, and at most."""

    hits: int
    misses: int
    size: int
    max_size: int


class PlanCache:
    """Forests and plans of the block tables used last, found by content; the least recently used goes first.

    A plan serves a table that lists the same pages for lengths that each grew by up to `STEPS` tokens, so it lasts
    longest where tables list pages ahead. Entries past a row's length are taken on trust when the plan is made (they
    are read, and masked), and compared once the row has grown into them.

    >>> from codec_jax.attention.plan_cache import CallLayout, PlanCache
    >>> plans, table = PlanCache(), np.array([[0, 1, 2], [0, 1, 3]])
    >>> layout = CallLayout(8, 2, 64, query_tokens=1, page_size=16, num_pages=8)
    >>> forest, plan = plans.find(table, np.array([40, 45]), layout)
    >>> forest, plan = plans.find(table, np.array([41, 46]), layout)  # a token later
    >>> plans.info()
    CacheInfo(hits=1, misses=1, size=1, max_size=4)
    >>> plans.clear()
    """

    def __init__(self, max_size: int = 4) -> None:
        """Make an empty cache of at most `max_size` plans."""
        checks.integer("max_size", max_size)
        self.max_size = max_size
        self.clear()

    def clear(self) -> None:
        """Forget all plans and counts."""
        self._planned: list[_Planned] = []
        self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        """Return counts and sizes."""
        return CacheInfo(self._hits, self._misses, len(self._planned), self.max_size)

    def find(
        self, table: Int[np.ndarray, "B max_blocks"], lens: Int[np.ndarray, " B"], layout: CallLayout
    ) -> tuple[Forest, Plan]:
        """Return a forest of these lengths over the table's pages, and its plan, on the device.

        Args:
          table: [B, max_blocks], pages of each row, integers on the host.
          lens: [B], tokens of each row.
          layout: what the plan is for beside them.

        Raises ValueError if a row's page is not one of the layout's num_pages.
        """
        found = next((entry for entry in self._planned if entry.serves(table, lens, layout)), None)
        planned = _Planned.of(table, lens, layout) if found is None else found.grown_to(lens)
        self._hits, self._misses = self._hits + (found is not None), self._misses + (found is None)
        self._planned = [planned, *(entry for entry in self._planned if entry is not found)][: self.max_size]
        return planned.forest, planned.plan


class _Planned(NamedTuple):
    """One entry of a plan cache."""

    layout: CallLayout
    table: Int[np.ndarray, "B max_blocks"]
    lens: Int[np.ndarray, " B"]  # planned for
    room: Int[np.ndarray, " B"]  # by how much each row may grow
    base: Forest  # of the lengths planned for, on the host
    grown: Int[np.ndarray, " B"]  # the lengths of `forest`
    forest: Forest  # on the device
    plan: Plan  # on the device

    @classmethod
    def of(cls, table: Int[np.ndarray, "B max_blocks"], lens: Int[np.ndarray, " B"], layout: CallLayout) -> _Planned:
        forest = Forest.from_block_table(table, lens, layout.page_size)
        if forest.used_pages.max() >= layout.num_pages:
            raise ValueError(
                f"block_table: expected block ids below {layout.num_pages}, which is what k_cache has, "
                f"got {forest.used_pages.max()}"
            )
        forest = _with_pages_ahead(forest, table, layout.num_pages)
        names = ("num_q_heads", "num_kv_heads", "head_dim", "kv_dtype", "query_tokens", "window")
        plan = make_plan(forest, steps=STEPS, **{name: getattr(layout, name) for name in names})
        room = np.where(forest.leaf >= 0, (plan.guard.max_length - plan.guard.min_length)[forest.leaf], 0)
        # The caller may change the table in place.
        return cls(layout, table.copy(), lens, room, forest, lens, _on_device(forest), _on_device(plan))

    def serves(self, table: Int[np.ndarray, "B max_blocks"], lens: Int[np.ndarray, " B"], layout: CallLayout) -> bool:
        if layout != self.layout or len(lens) != len(self.lens):
            return False
        if (lens < self.lens).any() or (lens > self.lens + self.room).any():
            return False
        needed = -(-lens // layout.page_size)
        width = needed.max()
        different = table[:, :width] != self.table[:, :width]
        return not (different.any() and (different & (np.arange(width) < needed[:, None])).any())

    def grown_to(self, lens: Int[np.ndarray, " B"]) -> _Planned:
        if (lens == self.grown).all():
            return self
        length = _on_device(self.base.extend(lens - self.lens).length)
        return self._replace(grown=lens, forest=replace(self.forest, length=length))


def _with_pages_ahead(forest: Forest, table: Int[np.ndarray, "B max_blocks"], num_pages: int) -> Forest:
    """Give rows that own the node they end at the pages that the table lists for their next `STEPS` tokens."""
    row = np.flatnonzero(forest.leaf >= 0)
    leaf = forest.leaf[row]
    # A row that ends inside a page which another row reads too ends at an empty node, which does not begin where a
    # page does.
    own = (forest.readers[leaf] == 1) & (forest.page_count[leaf] > 0)
    row, leaf = row[own], leaf[own]
    lens = forest.request_length[row]
    column = -(-lens // forest.page_size)[:, None] + np.arange(-(-STEPS // forest.page_size))
    page = table[row[:, None], np.minimum(column, table.shape[1] - 1)]
    listed = column < np.minimum(-(-(lens + STEPS) // forest.page_size), table.shape[1])[:, None]
    ahead = np.logical_and.accumulate(listed & (page >= 0) & (page < num_pages), axis=1)
    if not ahead.any():
        return forest
    tree = forest.tree
    page_count = tree.page_count.copy()
    page_count[leaf] += ahead.sum(1, dtype=np.int32)
    node = np.concatenate([np.repeat(np.arange(len(tree.parent)), tree.page_count), np.repeat(leaf, ahead.sum(1))])
    page_ids = np.concatenate([tree.page_ids, page[ahead]])[np.argsort(node, kind="stable")]
    return Forest.build(tree._replace(page_count=page_count, page_ids=page_ids))


def _on_device(tree: _T) -> _T:
    """Copy NumPy arrays to the device; to arrays that outlive the trace, where there is one."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(tree)
