"""Find what is shared: turn token lists, or the rows of a block table, into the nodes of a forest.

Both inputs are lists of symbols per request (tokens in one case, pages in the other). Sorted, the requests that
share a prefix are neighbours, and the length of what neighbours share tells where nodes begin and end. The result
is the radix tree of the lists with one node per unbranched run of symbols.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Runs(NamedTuple):
    """Nodes as runs of symbols: node i is symbols [begin, end) of list `source`, below node `parent` (-1: none).

    Parents come before their children; `leaf[r]` is the node at which list r ends.
    """

    parent: list[int]
    source: list[int]
    begin: list[int]
    end: list[int]
    leaf: list[int]


def shared_runs(lists: Sequence[np.ndarray]) -> Runs:
    """Return the radix tree of integer lists, none of them empty; equal lists end at the same node."""
    # Big-endian bytes of non-negative integers compare as the integers do, so that one memcmp orders two lists.
    keys = [np.ascontiguousarray(symbols, ">u8").tobytes() for symbols in lists]
    order = sorted(range(len(lists)), key=keys.__getitem__)
    runs = Runs([], [], [], [], [-1] * len(lists))
    path: list[int] = []  # nodes from the root to the end of the list looked at last
    previous = None
    for current in order:
        symbols = lists[current]
        common = 0 if previous is None else _common_prefix(lists[previous], symbols)
        while path and runs.begin[path[-1]] >= common:
            path.pop()
        if path and runs.end[path[-1]] > common:
            _split(runs, path, common)
        begin = runs.end[path[-1]] if path else 0
        if begin < len(symbols):
            path.append(_append(runs, path[-1] if path else -1, current, begin, len(symbols)))
        runs.leaf[current] = path[-1]
        previous = current
    return _parents_first(runs)


class PageNodes(NamedTuple):
    """Nodes over physical pages: node i owns the next page_count[i] of `pages` and has length[i] tokens in them."""

    parent: np.ndarray
    length: np.ndarray
    leaf: np.ndarray  # the node at which each row ends, -1 for a row of length 0
    page_count: np.ndarray
    pages: np.ndarray


def shared_pages(table: Int[np.ndarray, "B max_pages"], lens: Int[np.ndarray, " B"], page_size: int) -> PageNodes:
    """Return the radix tree of the rows of a block table, of which row r has lens[r] tokens."""
    used = np.flatnonzero(lens)
    counts = -(-lens[used] // page_size)
    # A page's symbol is its id together with its tokens, so a row that ends inside a page parts from one that goes
    # on through it. Only a row's last page may hold fewer than page_size.
    symbols = table[used, : counts.max()].astype(np.int64) * (page_size + 1) + page_size
    symbols[np.arange(len(used)), counts - 1] -= counts * page_size - lens[used]
    rows = [row[:count] for row, count in zip(symbols, counts, strict=True)]
    runs = shared_runs(rows)
    parent, page_count = np.asarray(runs.parent), np.subtract(runs.end, runs.begin)
    entries = [rows[source][begin:end] for source, begin, end in zip(*runs[1:4], strict=True)]
    length = np.asarray([(run % (page_size + 1)).sum() for run in entries])
    pages = np.concatenate(entries) // (page_size + 1)
    leaf = np.full(len(lens), -1)
    leaf[used] = runs.leaf

    # A row must not append to a page that another node reads as well: it gets an empty node to append to.
    unfilled = np.flatnonzero(length < page_count * page_size)
    last_page = pages[np.cumsum(page_count)[unfilled] - 1]
    ids, owners = np.unique(pages[np.isin(pages, last_page)], return_counts=True)
    aliased = unfilled[owners[np.searchsorted(ids, last_page)] > 1]
    below = np.full(len(parent), -1)
    below[aliased] = len(parent) + np.arange(len(aliased))
    leaf[used] = np.where(below[leaf[used]] >= 0, below[leaf[used]], leaf[used])
    empty = np.zeros(len(aliased), np.int64)
    return PageNodes(
        np.concatenate([parent, aliased]),
        np.concatenate([length, empty]),
        leaf,
        np.concatenate([page_count, empty]),
        pages,
    )


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    first = int(different.argmax())
    return first if different[first] else size


def _append(runs: Runs, parent: int, source: int, begin: int, end: int) -> int:
    runs.parent.append(parent)
    runs.source.append(source)
    runs.begin.append(begin)
    runs.end.append(end)
    return len(runs.parent) - 1


def _split(runs: Runs, path: list[int], at: int) -> None:
    """Cut the last node of the path at symbol `at`: a new node takes its head and becomes its parent."""
    lower = path.pop()
    upper = _append(runs, runs.parent[lower], runs.source[lower], runs.begin[lower], at)
    runs.parent[lower], runs.begin[lower] = upper, at
    path.append(upper)


def _parents_first(runs: Runs) -> Runs:
    """Renumber the nodes so that parents come before children: a child begins after its parent does."""
    order = np.argsort(runs.begin, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    parent = np.asarray(runs.parent)[order]
    return Runs(
        parent=np.where(parent >= 0, rank[parent], -1).tolist(),
        source=np.asarray(runs.source)[order].tolist(),
        begin=np.asarray(runs.begin)[order].tolist(),
        end=np.asarray(runs.end)[order].tolist(),
        leaf=rank[np.asarray(runs.leaf)].tolist(),
    )
