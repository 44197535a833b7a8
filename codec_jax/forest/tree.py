"""A forest as building and editing see it: which node is below which, its pages, and where requests end.

Arrays of a `Tree` are NumPy arrays of any length; `Forest.build` derives the rest and pads to capacities.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax import checks
from codec_jax.arrays import Integers, expand

ROOT = -1  # parent of a node that has none
FREE = -2  # parent of a node that is not in use
NO_NODE = -1  # leaf of a request slot that is not in use
GONE = -1  # in the place of a page that was given back: no request sees its tokens any more


class Tree(NamedTuple):
    """Nodes and requests; node i owns the next page_count[i] of `page_ids`."""

    parent: Int[np.ndarray, " nodes"]  # ROOT, FREE or a node
    length: Int[np.ndarray, " nodes"]  # tokens
    page_count: Int[np.ndarray, " nodes"]
    page_ids: Int[np.ndarray, " pages"]  # or GONE
    leaf: Int[np.ndarray, " B"]  # the node at which each request ends, or NO_NODE
    page_size: int

    @classmethod
    def laid_out(
        cls, parent: Int[np.ndarray, " n"], length: Int[np.ndarray, " n"], leaf: Int[np.ndarray, " B"], page_size: int
    ) -> "Tree":
        """Give every node the pages that its tokens take, node after node from page 0 on."""
        page_count = -(-length // page_size)
        check_slots(int(page_count.sum()), page_size)
        return cls(parent, length, page_count, np.arange(page_count.sum()), leaf, page_size)

    @property
    def pages_there(self) -> Int[np.ndarray, " there"]:
        """The pages that were not given back."""
        return self.page_ids[self.page_ids != GONE]

    def pages_of_nodes(self) -> list[Int[np.ndarray, " pages"]]:
        """Return the pages of each node, in order."""
        return np.split(self.page_ids, np.cumsum(self.page_count)[:-1])


def check_tree(parent: Int[np.ndarray, " n"], length: Int[np.ndarray, " n"], leaf: Int[np.ndarray, " B"]) -> None:
    """Raise ValueError unless parents come before children, lengths fit them, and every leaf is a node."""
    if len(parent) != len(length):
        raise ValueError(
            f"length: expected one number for each of the {len(parent)} nodes in parent, got {len(length)}"
        )
    before = "every parent before its child (number the nodes from the roots down)"
    checks.each("parent", parent, parent < np.arange(len(parent)), before)
    checks.each("parent", parent, parent >= ROOT, "-1 for a root or the index of a node")
    checks.each("length", length, length >= 0, "no negative lengths")
    if not leaf.size:
        raise ValueError("leaf: expected at least one request, got none")
    checks.each("leaf", leaf, (leaf >= 0) & (leaf < len(parent)), f"nodes in [0, {len(parent)})")


def check_in_use(requests: Integers, leaf: Int[np.ndarray, " B"]) -> Int[np.ndarray, " n"]:
    """Return `requests` as a vector, or raise ValueError if one of them is not a request in use."""
    wanted = checks.int_vector("requests", requests)
    inside = (wanted >= 0) & (wanted < len(leaf))
    in_use = inside & (leaf[np.where(inside, wanted, 0)] >= 0)
    if not in_use.all():
        raise ValueError(
            f"requests: expected requests in use, {np.flatnonzero(leaf >= 0).tolist()}, got {wanted[~in_use].tolist()}"
        )
    return wanted


def check_slots(num_pages: int, page_size: int) -> None:
    """Raise ValueError unless int32 numbers all token slots of so many pages."""
    if num_pages * page_size >= 2**31:
        raise ValueError(
            f"pages: expected less than 2**31 token slots, got {num_pages} pages of {page_size} tokens; divide the "
            "requests among several forests"
        )


def children(tree: Tree) -> Int[np.ndarray, " nodes"]:
    """Count each node's children."""
    return np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.parent))


def ended_at(tree: Tree) -> Bool[np.ndarray, " nodes"]:
    """Return at which nodes requests end."""
    ends = np.zeros(len(tree.parent), bool)
    ends[tree.leaf[tree.leaf >= 0]] = True
    return ends


def first_pages(tree: Tree) -> Int[np.ndarray, " nodes"]:
    """Return where each node's pages begin in `page_ids`."""
    return np.cumsum(tree.page_count) - tree.page_count


def pages_of_runs(
    page_ids: Int[np.ndarray, " entries"], first: Int[np.ndarray, " runs"], count: Int[np.ndarray, " runs"]
) -> Int[np.ndarray, " pages"]:
    """Return runs of `page_ids`, one after the other."""
    run, nth = expand(count)
    return page_ids[first[run] + nth]


def path_to(parent: Int[np.ndarray, " nodes"], node: int) -> list[int]:
    """Return the nodes from a root down to `node`; none for NO_NODE."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(parent[node])
    return path[::-1]
