"""Random forests, and what plain Python lists say about them; nothing here calls the library."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

page_sizes = st.sampled_from([8, 16, 24, 32])
seeds = st.integers(0, 2**32 - 1)


class Tree(NamedTuple):
    """The arguments of `Forest.from_nodes`."""

    parent: list[int]
    length: list[int]
    leaf: list[int]


# A document with two sections; four requests, one of them twice in the same place, in an order that is not depth first.
SECTIONS = Tree(parent=[-1, 0, 0, 1], length=[70, 20, 33, 5], leaf=[3, 2, 1, 3])


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, max_length: int = 50, max_requests: int = 8) -> Tree:
    """Draw chains, stars, bushes and groves; nodes may be empty or unread, requests may end anywhere and together."""
    nodes = draw(st.integers(1, max_nodes))
    shape = draw(st.sampled_from(["chain", "star", "bush", "grove", "roots"]))
    lowest = {
        "chain": lambda node: node - 1,
        "star": lambda node: 0,
        "bush": lambda node: draw(st.integers(0, node - 1)),
        "grove": lambda node: draw(st.integers(-1, node - 1)),
        "roots": lambda node: -1,
    }[shape]
    parent = [-1] + [lowest(node) for node in range(1, nodes)]
    lengths = st.one_of(
        st.just(0),
        st.integers(1, max_length),
        # Full pages of every page size, where max_length has room for one.
        st.sampled_from([n for n in (8, 16, 24, 32, 48, 96) if n <= max_length] or [max_length]),
    )
    length = draw(st.lists(lengths, min_size=nodes, max_size=nodes))
    childless = [node for node in range(nodes) if node not in parent]
    ends = st.one_of(st.sampled_from(childless), st.integers(0, nodes - 1))
    leaf = draw(st.lists(ends, min_size=1, max_size=max_requests))
    return Tree(parent, length, leaf)


def ancestry(parent: Sequence[int], node: int) -> list[int]:
    """Return the path from the root down to `node`; a negative parent ends it."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(parent[node])
    return path


def readers(tree: Tree) -> list[list[int]]:
    """Return the requests that read each node."""
    paths = [ancestry(tree.parent, end) for end in tree.leaf]
    return [[r for r, path in enumerate(paths) if node in path] for node in range(len(tree.parent))]


def node_slots(tree: Tree, page_size: int) -> list[list[int]]:
    """Return the token slots of each node: node after node, each from the start of a page on."""
    slots, next_page = [], 0
    for length in tree.length:
        slots.append([next_page * page_size + token for token in range(length)])
        while next_page * page_size < (slots[-1][-1] + 1 if length else 0):
            next_page += 1
    return slots


def contexts(tree: Tree, page_size: int) -> list[list[int]]:
    """Return the token slots that each request reads, in order, under the layout of `Forest.from_nodes`."""
    slots = node_slots(tree, page_size)
    return [[slot for node in ancestry(tree.parent, end) for slot in slots[node]] for end in tree.leaf]


def num_pages(tree: Tree, page_size: int) -> int:
    """Return how many pages `Forest.from_nodes` lays out."""
    return sum(len(range(0, length, page_size)) for length in tree.length)


def prefixes(lists: Sequence[Sequence[object]]) -> set[tuple]:
    """Return every non-empty prefix of every list: the nodes of their trie."""
    return {tuple(items[: end + 1]) for items in lists for end in range(len(items))}


def candidate_parents(count: int) -> st.SearchStrategy[list[int]]:
    """Draw the parents of `count` candidates of a draft tree, in any order in which they come before their children."""
    return st.tuples(*(st.integers(-1, t - 1) for t in range(count))).map(list)


def depth_first(parent: Sequence[int]) -> list[int]:
    """Return the candidates of a draft tree in depth-first order, siblings in the order in which they are given."""

    def below(node: int) -> list[int]:
        return [c for child in range(len(parent)) if parent[child] == node for c in (child, *below(child))]

    return below(-1)


def renumbered(parent: Sequence[int]) -> list[int]:
    """Return the parents of the same draft tree with its candidates in depth-first order."""
    order = depth_first(parent)
    return [-1 if parent[candidate] < 0 else order.index(parent[candidate]) for candidate in order]


def first_seen(window, position: int) -> int:
    """Return the first position that a query token sees by a `Window`, an int for one that slides, or None."""
    if window is None:
        return 0
    tokens, chunked = (window, False) if isinstance(window, int) else (window.tokens, window.chunked)
    return max(position - position % tokens, 0) if chunked else max(position + 1 - tokens, 0)


def active_requests(forest) -> list[int]:
    """Return the request slots that are in use."""
    return [request for request, leaf in enumerate(forest.leaf) if leaf >= 0]
