"""Plans for block tables, found again by what the tables list.

Planning costs milliseconds on the host, and a decode step calls attention once per layer with the same table. So the
last few plans are kept, with their arrays on the device, and compared with what comes next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.forest import Forest
from codec_jax.plan import Plan, make_plan

#: Tokens that each row may grow by under one plan, as far as the table lists pages for them.
STEPS = 16

_T = TypeVar("_T")


class Layout(NamedTuple):
    """What a plan depends on beside the table and the lengths."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_tokens: int
    page_size: int
    num_pages: int


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
    """

    def __init__(self, max_size: int = 4) -> None:
        """Make an empty cache of at most `max_size` plans."""
        checks.positive("max_size", max_size)
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
        self, table: Int[np.ndarray, "B max_blocks"], lens: Int[np.ndarray, " B"], layout: Layout
    ) -> tuple[Forest, Plan]:
        """Return a forest of these lengths over the table's pages, and its plan, on the device.

        Raises ValueError if a row's page is not one of the layout's num_pages.
        """
        planned = next((entry for entry in self._planned if entry.serves(table, lens, layout)), None)
        others = [entry for entry in self._planned if entry is not planned]
        if planned is None:
            planned = _Planned.of(table, lens, layout)
            self._misses += 1
        else:
            planned = planned.grown_to(lens)
            self._hits += 1
        self._planned = [planned, *others][: self.max_size]
        return planned.forest, planned.plan


class _Planned(NamedTuple):
    """One entry of a plan cache."""

    layout: Layout
    table: Int[np.ndarray, "B max_blocks"]
    least: Int[np.ndarray, " B"]  # the lengths planned for
    most: Int[np.ndarray, " B"]  # what each row may grow to
    base: Forest  # of the lengths planned for, on the host
    lens: Int[np.ndarray, " B"]  # the lengths of `forest`
    forest: Forest  # on the device
    plan: Plan  # on the device

    @classmethod
    def of(cls, table: Int[np.ndarray, "B max_blocks"], lens: Int[np.ndarray, " B"], layout: Layout) -> _Planned:
        forest = Forest.from_block_table(table, lens, layout.page_size)
        if forest.used_pages.max() >= layout.num_pages:
            raise ValueError(
                f"block_table: expected block ids below {layout.num_pages}, which is what k_cache has, "
                f"got {forest.used_pages.max()}"
            )
        forest = _with_pages_ahead(forest, table, layout.num_pages)
        plan = make_plan(
            forest,
            num_q_heads=layout.num_q_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            query_tokens=layout.query_tokens,
            steps=STEPS,
        )
        room = np.where(forest.leaf >= 0, (plan.most_length - plan.least_length)[forest.leaf], 0)
        # The caller may change the table in place.
        return cls(layout, table.copy(), lens, lens + room, forest, lens, _on_device(forest), _on_device(plan))

    def serves(self, table: Int[np.ndarray, "B max_blocks"], lens: Int[np.ndarray, " B"], layout: Layout) -> bool:
        if layout != self.layout or len(lens) != len(self.lens):
            return False
        if (lens < self.least).any() or (lens > self.most).any():
            return False
        needed = -(-lens // layout.page_size)
        width = needed.max()
        different = table[:, :width] != self.table[:, :width]
        return not (different.any() and (different & (np.arange(width) < needed[:, None])).any())

    def grown_to(self, lens: Int[np.ndarray, " B"]) -> _Planned:
        if (lens == self.lens).all():
            return self
        length = self.base.extend(lens - self.least).length
        return self._replace(lens=lens, forest=replace(self.forest, length=_on_device(length)))


def _with_pages_ahead(forest: Forest, table: Int[np.ndarray, "B max_blocks"], num_pages: int) -> Forest:
    """Give rows that own the node they end at the pages that the table lists for their next `STEPS` tokens."""
    row = np.flatnonzero(forest.leaf >= 0)
    leaf = forest.leaf[row]
    # A row that ends inside a page which another row reads too ends at an empty node, which does not begin where a
    # page does.
    own = (forest.row_hi[leaf] - forest.row_lo[leaf] == 1) & (forest.page_count[leaf] > 0)
    row, leaf = row[own], leaf[own]
    lens = forest.request_length[row]
    column = -(-lens // forest.page_size)[:, None] + np.arange(-(-STEPS // forest.page_size))
    page = table[row[:, None], np.minimum(column, table.shape[1] - 1)]
    listed = column < np.minimum(-(-(lens + STEPS) // forest.page_size), table.shape[1])[:, None]
    ahead = np.logical_and.accumulate(listed & (page >= 0) & (page < num_pages), axis=1)
    if not ahead.any():
        return forest
    page_count = forest.page_count.copy()
    page_count[leaf] += ahead.sum(1, dtype=np.int32)
    owner = np.concatenate(
        [np.repeat(np.arange(forest.node_capacity), forest.page_count), np.repeat(leaf, ahead.sum(1))]
    )
    entries = np.concatenate([forest.used_pages, page[ahead]])[np.argsort(owner, kind="stable")]
    return forest.rebuild(page_count=page_count, entries=entries)


def _on_device(tree: _T) -> _T:
    """Copy NumPy arrays to the device; to arrays that outlive the trace, where there is one."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(tree)
