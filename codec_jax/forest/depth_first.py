"""Depth-first order: the numbering of requests under which every node's readers are consecutive.

Everything is computed for all nodes at once by pointer doubling: after step i each node has summed up its nearest
2^i ancestors, so a forest of depth D takes log2(D) steps of NumPy, whatever its shape and however its nodes are
numbered.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Order(NamedTuple):
    """Rows and positions that `depth_first` finds; rows number the requests that are in use, depth first."""

    start: Int[np.ndarray, " nodes"]  # position of the node's first token in its readers' contexts
    row_lo: Int[np.ndarray, " nodes"]  # readers of the node are the request rows [row_lo, row_hi)
    row_hi: Int[np.ndarray, " nodes"]
    row_of_request: Int[np.ndarray, " B"]  # request -> row; free request slots get the last rows


def depth_first(
    parent: Int[np.ndarray, " nodes"], length: Int[np.ndarray, " nodes"], leaf: Int[np.ndarray, " B"]
) -> Order:
    """Order the requests of a forest; a negative parent ends a path and a negative leaf is a free request slot.

    Raises ValueError if following parents from some node never ends.
    """
    num_nodes, used = len(parent), leaf >= 0
    ending = np.bincount(leaf[used], minlength=num_nodes)
    jumps = _ancestors_at_powers(parent)
    count = _sum_below(jumps, ending)  # readers

    # Within a node, the requests that end there come first, then each child's readers; the child that the earliest
    # request reads goes first, so that rows follow the caller's order as far as the tree allows.
    earliest = np.full(num_nodes, len(leaf))
    np.minimum.at(earliest, leaf[used], np.flatnonzero(used))
    earliest = _min_below(jumps, earliest)
    by_parent = np.lexsort((earliest, np.maximum(parent, -1)))
    before = np.cumsum(count[by_parent]) - count[by_parent]
    sorted_parent = np.maximum(parent, -1)[by_parent]
    first_sibling = np.searchsorted(sorted_parent, sorted_parent)
    offset = np.empty(num_nodes, np.int64)
    offset[by_parent] = before - before[first_sibling] + np.where(sorted_parent >= 0, ending[sorted_parent], 0)
    roots = by_parent[: np.searchsorted(sorted_parent, 0)]
    offset[roots] = np.cumsum(count[roots]) - count[roots]

    row_lo = offset + _sum_above(jumps, offset)
    by_leaf = np.argsort(np.where(used, leaf, num_nodes), kind="stable")
    ordered_leaf = leaf[by_leaf]
    rank = np.arange(len(leaf)) - np.searchsorted(ordered_leaf[: used.sum()], ordered_leaf)
    row_of_request = np.empty(len(leaf), np.int64)
    row_of_request[by_leaf] = np.where(ordered_leaf >= 0, row_lo[ordered_leaf] + rank, np.arange(len(leaf)))
    return Order(_sum_above(jumps, length), row_lo, row_lo + count, row_of_request)


def readers(parent: Int[np.ndarray, " nodes"], leaf: Int[np.ndarray, " B"]) -> Int[np.ndarray, " nodes"]:
    """Count the requests that read each node."""
    return _sum_below(_ancestors_at_powers(parent), np.bincount(leaf[leaf >= 0], minlength=len(parent)))


def depths(parent: Int[np.ndarray, " nodes"]) -> Int[np.ndarray, " nodes"]:
    """Count each node's ancestors."""
    return sum_above(parent, np.ones(len(parent), np.int64))


def sum_above(parent: Int[np.ndarray, " nodes"], value: Int[np.ndarray, " nodes"]) -> Int[np.ndarray, " nodes"]:
    """Sum `value` over each node's ancestors, the node itself left out."""
    return _sum_above(_ancestors_at_powers(parent), value)


def _sum_above(jumps: list[np.ndarray], value: Int[np.ndarray, " nodes"]) -> Int[np.ndarray, " nodes"]:
    """Sum `value` over each node's ancestors, the node itself left out."""
    total = np.zeros(len(value), np.int64)
    if jumps:
        total = np.where(jumps[0] >= 0, value[jumps[0]], 0).astype(np.int64)
    for jump in jumps:
        total = total + np.where(jump >= 0, total[jump], 0)
    return total


def _sum_below(jumps: list[np.ndarray], value: Int[np.ndarray, " nodes"]) -> Int[np.ndarray, " nodes"]:
    """Sum `value` over each node's descendants and the node itself."""
    total = value.astype(np.int64)
    for jump in jumps:
        linked = jump >= 0
        total = total + np.bincount(jump[linked], total[linked], len(total)).astype(np.int64)
    return total


def _min_below(jumps: list[np.ndarray], value: Int[np.ndarray, " nodes"]) -> Int[np.ndarray, " nodes"]:
    """Return the smallest `value` among each node's descendants and the node itself."""
    smallest = value.copy()
    for jump in jumps:
        linked = np.flatnonzero(jump >= 0)
        np.minimum.at(smallest, jump[linked], smallest[linked])
    return smallest


def _ancestors_at_powers(parent: Int[np.ndarray, " nodes"]) -> list[Int[np.ndarray, " nodes"]]:
    """Return each node's 1st, 2nd, 4th, 8th ... ancestor (negative where there is none)."""
    jumps: list[np.ndarray] = []
    jump = parent
    while (jump >= 0).any():
        if len(jumps) > len(parent).bit_length():
            raise ValueError("parent: expected a forest, got a cycle: following parents from some node never ends")
        jumps.append(jump)
        jump = np.where(jump >= 0, jump[jump], -1)
    return jumps
