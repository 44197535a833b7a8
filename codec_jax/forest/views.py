"""Views of a tree's pages as another one: some of its requests, beginnings of contexts, chunks, paths without sharing.

Every function takes a `Tree` and returns a new one; the methods of `Forest` of the same names document them.
"""

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers, expand
from codec_jax.forest.depth_first import depths
from codec_jax.forest.depth_first import readers as readers_of
from codec_jax.forest.tree import FREE, NO_NODE, ROOT, Tree, check_in_use, first_pages, pages_of_runs, path_to


def only(tree: Tree, requests: Integers) -> Tree:
    """Leave some requests in place, and nobody else."""
    kept = check_in_use(requests, tree.leaf)
    leaf = np.full_like(tree.leaf, NO_NODE)
    leaf[kept] = tree.leaf[kept]
    return tree._replace(leaf=leaf)


def chunks(tree: Tree, readers: Int[np.ndarray, " nodes"], chunk: int) -> tuple[Tree, Int[np.ndarray, " chunks"]]:
    """Cut every node that is read into a chain of `chunk`-token nodes and let a request end at each."""
    if checks.integer("chunk", chunk) % tree.page_size:
        raise ValueError(f"chunk: expected a positive multiple of page_size = {tree.page_size}, got {chunk}")
    node = np.flatnonzero(readers > 0)
    node = node[np.argsort(depths(tree.parent)[node], kind="stable")]
    source, nth = expand(-(-tree.length[node] // chunk))
    source = node[source]
    number = np.arange(len(source))
    last = np.full(len(tree.parent), ROOT)  # the last chunk of each node, or of the nearest one above that has any
    last[source] = number
    for empty in node[tree.length[node] == 0].tolist():
        last[empty] = last[tree.parent[empty]] if tree.parent[empty] >= 0 else ROOT
    above = tree.parent[source]
    parent = np.where(nth > 0, number - 1, np.where(above >= 0, last[above], ROOT))
    length = np.minimum(chunk, tree.length[source] - nth * chunk)
    page_count = -(-length // tree.page_size)
    chunk_of_page, page = expand(page_count)
    offset = np.cumsum(tree.page_count) - tree.page_count
    page_ids = tree.page_ids[offset[source[chunk_of_page]] + (nth * chunk // tree.page_size)[chunk_of_page] + page]
    return Tree(parent, length, page_count, page_ids, number, tree.page_size), source


def unshared(tree: Tree) -> Tree:
    """Give every request copies of the nodes of its path, from a root of its own."""
    pages = tree.pages_of_nodes()
    source: list[int] = []
    parent: list[int] = []
    leaf = np.full_like(tree.leaf, NO_NODE)
    for request in np.flatnonzero(tree.leaf >= 0).tolist():
        path = path_to(tree.parent, int(tree.leaf[request]))
        parent += [ROOT, *range(len(source), len(source) + len(path) - 1)]
        source += path
        leaf[request] = len(source) - 1
    return Tree(
        np.asarray(parent, np.int64),
        tree.length[source],
        tree.page_count[source],
        np.concatenate([*(pages[node] for node in source), tree.page_ids[:0]]),
        leaf,
        tree.page_size,
    )


def read_nodes(tree: Tree) -> Tree:
    """Leave only the nodes that are read, in their places."""
    unread = readers_of(tree.parent, tree.leaf) == 0
    page_ids = tree.page_ids[~np.repeat(unread, tree.page_count)]
    length, page_count = (np.where(unread, 0, x) for x in (tree.length, tree.page_count))
    return tree._replace(
        parent=np.where(unread, FREE, tree.parent), length=length, page_count=page_count, page_ids=page_ids
    )


def compact(tree: Tree) -> Tree:
    """Number the nodes in use from 0 on."""
    used = tree.parent != FREE
    number = np.cumsum(used) - 1
    parent = np.where(tree.parent >= 0, number[np.maximum(tree.parent, 0)], tree.parent)[used]
    leaf = np.where(tree.leaf >= 0, number[tree.leaf], NO_NODE)
    return tree._replace(parent=parent, length=tree.length[used], page_count=tree.page_count[used], leaf=leaf)


def cut(
    tree: Tree, node: Int[np.ndarray, " cuts"], offset: Int[np.ndarray, " cuts"]
) -> tuple[Tree, Int[np.ndarray, " cuts"]]:
    """Cut nodes after so many tokens, each a number of whole pages or all of the node; return the part that ends there.

    The lowest part of a node keeps its number.
    """
    inside = offset < tree.length[node]
    cuts, which = np.unique(node[inside] * 2**31 + offset[inside], return_inverse=True)
    source, end = np.divmod(cuts, 2**31)
    new = len(tree.parent) + np.arange(len(cuts))
    again = np.diff(source, prepend=-1) == 0  # below another new node
    begin = np.where(again, np.roll(end, 1), 0)
    last = np.append(~again[1:], True)[: len(cuts)]
    lowest, rest = source[last], end[last]

    parent = np.concatenate([tree.parent, np.where(again, new - 1, tree.parent[source])])
    length = np.concatenate([tree.length, end - begin])
    page_count = np.concatenate([tree.page_count, (end - begin) // tree.page_size])
    first = first_pages(tree)
    first = np.concatenate([first, first[source] + begin // tree.page_size])
    parent[lowest] = new[last]
    length[lowest] -= rest
    page_count[lowest] -= rest // tree.page_size
    first[lowest] += rest // tree.page_size
    part = node.copy()
    part[inside] = new[which]
    page_ids = pages_of_runs(tree.page_ids, first, page_count)
    return Tree(parent, length, page_count, page_ids, tree.leaf, tree.page_size), part
