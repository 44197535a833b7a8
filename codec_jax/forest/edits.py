"""Changes to a forest between decode steps, on the host: fork, reserve, retire; and views of the same pages.

Every function takes a `Tree` and returns a new one; the methods of `Forest` of the same names document them. `readers`
counts the requests that read each node.
"""

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers, expand
from codec_jax.errors import OutOfSlotsError
from codec_jax.forest.depth_first import depths
from codec_jax.forest.depth_first import readers as readers_of
from codec_jax.forest.pages import PagePool
from codec_jax.forest.tree import FREE, NO_NODE, ROOT, Tree, check_in_use


def fork(tree: Tree, requests: Integers) -> tuple[Tree, Int[np.ndarray, " forks"]]:
    """Add requests that end where the given ones end."""
    sources = check_in_use(requests, tree.leaf)
    free = np.flatnonzero(tree.leaf < 0)
    if len(sources) > len(free):
        raise OutOfSlotsError(
            f"requests: {len(sources)} forks need as many free request slots, got {len(free)} of {len(tree.leaf)}; "
            "retire requests or build the forest with a larger request_capacity"
        )
    leaf, new = tree.leaf.copy(), free[: len(sources)]
    leaf[new] = tree.leaf[sources]
    return tree._replace(leaf=leaf), new


def reserve(
    tree: Tree, readers: Int[np.ndarray, " nodes"], pool: PagePool, tokens: int | Integers, requests: Integers | None
) -> tuple[Tree, PagePool]:
    """Give each request a leaf of its own with room for `tokens` more tokens."""
    each = np.asarray(tokens)
    fits = np.issubdtype(each.dtype, np.integer) and each.shape in ((), tree.leaf.shape)
    if not fits or (each < 0).any():
        raise ValueError(
            f"tokens: expected a number of tokens to make room for, or one for each of the {len(tree.leaf)} request "
            f"slots, none negative, got {tokens}"
        )
    limit = min(np.iinfo(each.dtype).max, 2**40)  # more than any pool has
    each = np.broadcast_to(np.minimum(each, limit), tree.leaf.shape).astype(np.int64)
    checks.instance("pool", pool, PagePool)
    pool.check_taken(tree.page_ids)
    parent, length, page_count, leaf = tree.parent, tree.length, tree.page_count, tree.leaf
    growing = np.flatnonzero(leaf >= 0) if requests is None else np.unique(check_in_use(requests, leaf))
    parting = growing[readers[leaf[growing]] > 1]  # from a leaf that others read too
    inner = np.unique(leaf[parting])
    if len(parting):
        own = np.flatnonzero(parent == FREE)[: len(parting)]
        more = len(parting) - len(own)
        own = np.concatenate([own, len(parent) + np.arange(more)])
        parent = np.concatenate([parent, np.full(more, FREE)])
        length, page_count = (np.concatenate([x, np.zeros(more, x.dtype)]) for x in (length, page_count))
        leaf = leaf.copy()
        parent[own], leaf[parting] = leaf[parting], own
    owned = leaf[growing]
    wanted = page_count.astype(np.int64)
    # A node has no use for pages in reserve once it has children.
    wanted[inner] = -(-length[inner] // tree.page_size)
    wanted[owned] = np.maximum(page_count[owned], -(-(length[owned] + each[growing]) // tree.page_size))
    if not len(parting) and (wanted == page_count).all():
        return tree, pool
    node, nth = expand(page_count)
    keep = nth < wanted[node]
    added = np.maximum(wanted - page_count, 0)
    pool, fresh = pool.release(tree.page_ids[~keep]).allocate(int(added.sum()))
    # Old pages first, then the fresh ones; a stable sort by node puts both in their place.
    node = np.concatenate([node[keep], np.repeat(np.arange(len(parent)), added)])
    page_ids = np.concatenate([tree.page_ids[keep], fresh])[np.argsort(node, kind="stable")]
    return Tree(parent, length, wanted, page_ids, leaf, tree.page_size), pool


def retire(tree: Tree, readers: Int[np.ndarray, " nodes"], pool: PagePool, requests: Integers) -> tuple[Tree, PagePool]:
    """Remove requests and what only they read."""
    checks.instance("pool", pool, PagePool)
    gone = check_in_use(requests, tree.leaf)
    leaf = tree.leaf.copy()
    leaf[gone] = NO_NODE
    left = readers_of(tree.parent, leaf)
    # Only nodes that lost their last reader go: a tree given by hand may hold nodes that never had one.
    dead = (readers > 0) & (left == 0)
    keep = ~np.repeat(dead, tree.page_count)
    pool = pool.release(tree.page_ids[~keep])
    parent = np.where(dead, FREE, np.where((tree.parent >= 0) & dead[tree.parent], ROOT, tree.parent))
    length, page_count = (np.where(dead, 0, x) for x in (tree.length, tree.page_count))
    thinner = Tree(parent, length, page_count, tree.page_ids[keep], leaf, tree.page_size)
    return _merge_chains(thinner, left), pool


def _merge_chains(tree: Tree, readers: Int[np.ndarray, " nodes"]) -> Tree:
    """Merge each node that has one child and no request of its own into the child, where no page is split."""
    parent, length, page_count = tree.parent.copy(), tree.length.copy(), tree.page_count.copy()
    children = np.bincount(parent[parent >= 0], minlength=len(parent))
    ends = np.bincount(tree.leaf[tree.leaf >= 0], minlength=len(parent))
    full = length == page_count * tree.page_size
    mergeable = (parent != FREE) & (children == 1) & (ends == 0) & full & (readers > 0)
    if not mergeable.any():
        return tree
    only_child = np.full(len(parent), NO_NODE)
    linked = np.flatnonzero(parent >= 0)
    only_child[parent[linked]] = linked
    pages = tree.pages_of_nodes()
    for node in np.flatnonzero(mergeable).tolist():
        # The child keeps its number, so that requests keep their leaves; a chain merges link by link.
        child, above = int(only_child[node]), parent[node]
        pages[child], pages[node] = np.concatenate([pages[node], pages[child]]), pages[node][:0]
        if above >= 0:
            only_child[above] = child
        parent[child], parent[node] = above, FREE
        length[child] += length[node]
        page_count[child] += page_count[node]
        length[node] = page_count[node] = 0
    return Tree(parent, length, page_count, np.concatenate(pages), tree.leaf, tree.page_size)


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


def path_to(parent: Int[np.ndarray, " nodes"], node: int) -> list[int]:
    """Return the nodes from a root down to `node`; none for NO_NODE."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(parent[node])
    return path[::-1]
