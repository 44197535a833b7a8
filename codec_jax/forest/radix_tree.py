"""Find what is shared: turn token lists, or the rows of a block table, into the nodes of a forest.

Both inputs are lists of symbols per request: tokens in one case, pages in the other. Their radix tree has one node for
each unbranched run of symbols. A list is compared with what is there node by node, from the root down, so finding a
long document that all share costs one comparison for each of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.forest.tree import NO_NODE, ROOT, Tree


class _RadixTree:
    """Nodes as runs of symbols, lists or arrays; node 0 is the root above all, which has none.

    Lists share so many symbols, or a multiple: whole units.
    """

    def __init__(self, unit: int = 1) -> None:
        self.unit = unit
        self.runs: list[Any] = [()]
        self.parent = [NO_NODE]
        self.begin = [-1]  # where the run begins in the lists that pass through it
        self.children: list[dict[Any, int]] = [{}]  # by first unit

    def insert(self, symbols: Any) -> int:
        """Return the node at which a list ends."""
        node = at = 0
        while at < len(symbols):
            whole = len(symbols) - at >= self.unit  # less is not shared
            child = self.children[node].get(self._first(symbols, at)) if whole else None
            if child is None:
                return self._append(node, symbols[at:], at)
            common = common_prefix(self.runs[child], symbols, at) // self.unit * self.unit
            node = child if common == len(self.runs[child]) else self._split(child, common)
            at += common
        return node

    def _append(self, parent: int, run: Any, begin: int) -> int:
        self.runs.append(run)
        self.parent.append(parent)
        self.begin.append(begin)
        self.children.append({})
        self.children[parent][self._first(run, 0)] = len(self.runs) - 1
        return len(self.runs) - 1

    def _split(self, lower: int, at: int) -> int:
        """Cut a node: a new one takes the first `at` symbols and becomes its parent."""
        run, begin = self.runs[lower], self.begin[lower]
        upper = self._append(self.parent[lower], run[:at], begin)
        self.runs[lower], self.begin[lower], self.parent[lower] = run[at:], begin + at, upper
        self.children[upper][self._first(run, at)] = lower
        return upper

    def _first(self, symbols: Any, at: int) -> Any:
        return symbols[at] if self.unit == 1 else tuple(symbols[at : at + self.unit])

    def numbered(self) -> tuple[Int[np.ndarray, " nodes"], Int[np.ndarray, " nodes+1"]]:
        """Number the nodes below the root such that parents come first; returns old by new numbers, and new by old."""
        order = np.argsort(np.asarray(self.begin[1:]), kind="stable") + 1  # a child begins after its parent does
        number = np.full(len(self.runs), ROOT)
        number[order] = np.arange(len(order))
        return order, number


def common_prefix(run: Any, symbols: Any, at: int = 0) -> int:
    """Count the first symbols of `run` that `symbols` has from `at` on."""
    size = min(len(run), len(symbols) - at)
    if isinstance(run, np.ndarray):
        different = run[:size] != symbols[at : at + size]
        first = int(different.argmax())
        return first if different[first] else size
    if run[:size] == symbols[at : at + size]:
        return size
    low, high = 0, size  # the first `low` are the same, and not all of those before `high`
    while high - low > 1:
        middle = (low + high) // 2
        same = run[low:middle] == symbols[at + low : at + middle]
        low, high = (middle, high) if same else (low, middle)
    return low


def shared_tokens(token_lists: Sequence[Integers], page_size: int, *, whole_pages: bool = False) -> Tree:
    """Return the radix tree of token lists; equal lists end at the same node. Errors are those of `from_sequences`."""
    if not hasattr(token_lists, "__len__") or not len(token_lists):
        got = "none" if hasattr(token_lists, "__len__") else repr(token_lists)
        raise ValueError(f"token_lists: expected at least one list of tokens, got {got}")
    tree, ends = _RadixTree(page_size if whole_pages else 1), []
    # Lists of Python are compared as they are: to make arrays of them would take longer than all else.
    as_lists = all(isinstance(tokens, list) for tokens in token_lists)
    for i, tokens in enumerate(token_lists):
        name = f"token_lists[{i}]"
        symbols = tokens if as_lists else checks.int_array(name, tokens)
        if not len(symbols):
            raise ValueError(f"{name}: expected at least one token, none negative, got an empty list")
        try:
            known, end = len(tree.runs), tree.insert(symbols)
        except TypeError:  # what cannot be a key
            raise ValueError(f"{name}: expected integers, got {symbols!r:.80}") from None
        # Tokens that earlier lists have were looked at there.
        if end >= known and (smallest := checks.int_vector(name, tree.runs[end]).min()) < 0:
            raise ValueError(f"{name}: expected at least one token, none negative, got token {smallest}")
        ends.append(end)
    order, number = tree.numbered()
    length = np.asarray([len(run) for run in tree.runs])[order]
    return Tree.laid_out(number[np.asarray(tree.parent)[order]], length, number[ends], page_size)


def shared_pages(table: Int[np.ndarray, "B max_pages"], lens: Int[np.ndarray, " B"], page_size: int) -> Tree:
    """Return the radix tree of the rows of a block table, of which row r has lens[r] tokens."""
    table = checks.host_array("block_table", table)
    _check_block_table(table, lens, page_size)
    used = np.flatnonzero(lens)
    counts = -(-lens[used] // page_size)
    # A page's symbol is its id together with its tokens, so a row that ends inside a page parts from one that goes
    # on through it. Only a row's last page may hold fewer than page_size.
    symbols = table[used, : counts.max()].astype(np.int64) * (page_size + 1) + page_size
    symbols[np.arange(len(used)), counts - 1] -= counts * page_size - lens[used]
    tree = _RadixTree()
    ends = [tree.insert(row[:count]) for row, count in zip(symbols, counts, strict=True)]
    order, number = tree.numbered()
    runs = [tree.runs[node] for node in order]
    parent, page_count = number[np.asarray(tree.parent)[order]], np.asarray([len(run) for run in runs])
    length = np.asarray([(run % (page_size + 1)).sum() for run in runs])
    pages = np.concatenate(runs) // (page_size + 1)
    leaf = np.full(len(lens), NO_NODE)
    leaf[used] = number[ends]

    # A row must not append to a page that another node reads as well: it gets an empty node to append to.
    unfilled = np.flatnonzero(length < page_count * page_size)
    last_page = pages[np.cumsum(page_count)[unfilled] - 1]
    ids, owners = np.unique(pages[np.isin(pages, last_page)], return_counts=True)
    aliased = unfilled[owners[np.searchsorted(ids, last_page)] > 1]
    below = np.full(len(parent), NO_NODE)
    below[aliased] = len(parent) + np.arange(len(aliased))
    leaf[used] = np.where(below[leaf[used]] >= 0, below[leaf[used]], leaf[used])
    empty = np.zeros(len(aliased), np.int64)
    return Tree(
        parent=np.concatenate([parent, aliased]),
        length=np.concatenate([length, empty]),
        page_count=np.concatenate([page_count, empty]),
        page_ids=pages,
        leaf=leaf,
        page_size=page_size,
    )


def _check_block_table(table: np.ndarray, lens: Int[np.ndarray, " B"], page_size: int) -> None:
    """Raise ValueError unless every row of the table holds the pages that its length needs."""
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or len(table) != len(lens):
        raise ValueError(
            f"block_table: expected integers of shape [{len(lens)}, max_pages] to go with context_lens, "
            f"got {table.dtype} of shape {table.shape}"
        )
    if not lens.any():
        raise ValueError("context_lens: expected at least one row with a context, got lengths that are all 0")
    room = table.shape[1] * page_size
    held = f"lengths in [0, {room}], which is what {table.shape[1]} pages of {page_size} tokens hold"
    checks.each("context_lens", lens, (lens >= 0) & (lens <= room), held)
    needed = np.arange(table.shape[1]) < -(-lens // page_size)[:, None]
    last = (2**31 - 1) // page_size - 1  # token slots (page * page_size + offset) are int32 too
    checks.each("block_table", table, ~needed | ((table >= 0) & (table <= last)), f"page ids in [0, {last}]")
