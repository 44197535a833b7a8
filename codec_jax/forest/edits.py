"""Changes to a forest between decode steps, on the host: fork, reserve, retire, forget, spread.

Every function takes a `Tree` and returns a new one; the methods of `Forest` of the same names document them. `readers`
counts the requests that read each node.
"""

import numpy as np
from jaxtyping import Bool, Int

from codec_jax import checks
from codec_jax.arrays import Integers, expand
from codec_jax.errors import OutOfSlotsError
from codec_jax.forest.depth_first import depths
from codec_jax.forest.depth_first import readers as readers_of
from codec_jax.forest.homes import choose_homes
from codec_jax.forest.pages import PagePool
from codec_jax.forest.tree import (
    FREE,
    GONE,
    NO_NODE,
    ROOT,
    Tree,
    check_in_use,
    children,
    ended_at,
    first_pages,
    pages_of_runs,
)


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
    grown, page_count = own_leaves(tree, readers, tokens, requests)
    checks.instance("pool", pool, PagePool)
    pool.check_taken(tree.pages_there)
    if grown is tree and (page_count == tree.page_count).all():
        return tree, pool
    return resized(grown, page_count, pool)


def own_leaves(
    tree: Tree, readers: Int[np.ndarray, " nodes"], tokens: int | Integers, requests: Integers | None
) -> tuple[Tree, Int[np.ndarray, " nodes"]]:
    """Give each request that shares its leaf an empty one; return also the pages that every node is to have."""
    each = np.asarray(tokens)
    fits = np.issubdtype(each.dtype, np.integer) and each.shape in ((), tree.leaf.shape)
    if not fits or (each < 0).any():
        raise ValueError(
            f"tokens: expected a number of tokens to make room for, or one for each of the {len(tree.leaf)} request "
            f"slots, none negative, got {tokens}"
        )
    limit = min(np.iinfo(each.dtype).max, 2**40)  # more than any pool has
    each = np.broadcast_to(np.minimum(each, limit), tree.leaf.shape).astype(np.int64)
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
        tree = Tree(parent, length, page_count, tree.page_ids, leaf, tree.page_size)
    owned = leaf[growing]
    wanted = page_count.astype(np.int64)
    # A node has no use for pages in reserve once it has children.
    wanted[inner] = -(-length[inner] // tree.page_size)
    wanted[owned] = np.maximum(page_count[owned], -(-(length[owned] + each[growing]) // tree.page_size))
    return tree, wanted


def resized(tree: Tree, page_count: Int[np.ndarray, " nodes"], pool: PagePool) -> tuple[Tree, PagePool]:
    """Give every node so many pages: its last ones go, or fresh ones follow."""
    node, nth = expand(tree.page_count)
    keep = nth < page_count[node]
    added = np.maximum(page_count - tree.page_count, 0)
    kept = tree._replace(page_count=page_count - added, page_ids=tree.page_ids[keep])
    pool = pool.release(tree.page_ids[~keep & (tree.page_ids != GONE)])
    pool, fresh = pool.allocate_on(new_homes(kept, added, pool))
    # Old pages first, then the fresh ones; a stable sort by node puts both in their place.
    node = np.concatenate([node[keep], np.repeat(np.arange(len(added)), added)])
    page_ids = np.concatenate([kept.page_ids, fresh])[np.argsort(node, kind="stable")]
    return tree._replace(page_count=page_count, page_ids=page_ids), pool


def new_homes(tree: Tree, added: Int[np.ndarray, " nodes"], pool: PagePool) -> Int[np.ndarray, " added"]:
    """Return the device of every page that nodes are to have more, node after node; OutOfPagesError if none is left."""
    pool.check_free(count := int(added.sum()))
    if pool.devices == 1 or not count:
        return np.zeros(count, np.int64)
    return choose_homes(pool.homes, tree, added, pool.free_of_devices)


def spread(tree: Tree, pool: PagePool) -> tuple[Tree, PagePool]:
    """Give every node other pages, of a pool that does not know it, in place of those that it was laid out in."""
    if (tree.page_ids == GONE).any():
        raise ValueError("forest: expected one that no page was given back of, got one after forget; spread it before")
    if len(np.unique(tree.page_ids)) < len(tree.page_ids):
        raise ValueError(
            "forest: expected one in which each page belongs to one node, got one with pages that several nodes own, "
            "where K and V may be there already; build it with from_nodes or from_sequences"
        )
    empty = tree._replace(page_count=np.zeros_like(tree.page_count), page_ids=tree.page_ids[:0])
    return resized(empty, tree.page_count, pool)


def retire(tree: Tree, readers: Int[np.ndarray, " nodes"], pool: PagePool, requests: Integers) -> tuple[Tree, PagePool]:
    """Remove requests and what only they read."""
    checks.instance("pool", pool, PagePool)
    pool.check_taken(tree.pages_there)
    gone = check_in_use(requests, tree.leaf)
    leaf = tree.leaf.copy()
    leaf[gone] = NO_NODE
    left = readers_of(tree.parent, leaf)
    # Only nodes that lost their last reader go: a tree given by hand may hold nodes that never had one.
    dead = (readers > 0) & (left == 0)
    parent = np.where(dead, FREE, np.where((tree.parent >= 0) & dead[np.maximum(tree.parent, 0)], ROOT, tree.parent))
    thinner = tree._replace(parent=parent, length=np.where(dead, 0, tree.length), leaf=leaf)
    thinner, pool = resized(thinner, np.where(dead, 0, tree.page_count), pool)
    return merge_chains(thinner, left > 0), pool


def forget(tree: Tree, hidden: Int[np.ndarray, " nodes"], pool: PagePool) -> tuple[Tree, PagePool]:
    """Give back the first pages of nodes, so many that they hold no more than the hidden tokens."""
    checks.instance("pool", pool, PagePool)
    pool.check_taken(tree.pages_there)
    node, nth = expand(tree.page_count)
    gone = (nth < hidden[node] // tree.page_size) & (tree.page_ids != GONE)
    return tree._replace(page_ids=np.where(gone, GONE, tree.page_ids)), pool.release(tree.page_ids[gone])


def merge_chains(tree: Tree, allowed: Bool[np.ndarray, " nodes"]) -> Tree:
    """Merge each node that has one child and no request of its own into the child, where no page is split."""
    parent, nodes = tree.parent, np.arange(len(tree.parent))
    full = tree.length == tree.page_count * tree.page_size
    mergeable = allowed & (parent != FREE) & (children(tree) == 1) & ~ended_at(tree) & full
    if not mergeable.any():
        return tree
    # The lowest node of a chain keeps its number, so that requests keep their leaves.
    merged = (parent >= 0) & mergeable[parent]
    into = nodes.copy()
    into[parent[merged]] = nodes[merged]
    while ((further := into[into]) != into).any():
        into = further
    top = (parent != FREE) & ~merged
    above = np.full(len(parent), FREE)
    above[into[top]] = parent[top]
    length, page_count = np.zeros((2, len(parent)), np.int64)
    np.add.at(length, into, tree.length)
    np.add.at(page_count, into, tree.page_count)
    order = np.lexsort((depths(parent), into))
    page_ids = pages_of_runs(tree.page_ids, first_pages(tree)[order], tree.page_count[order])
    return Tree(above, length, page_count, page_ids, tree.leaf, tree.page_size)


def without_empty(tree: Tree) -> Tree:
    """Free the nodes that have no tokens and no request of their own; their children move up."""
    parent = tree.parent
    empty = (parent != FREE) & (tree.length == 0) & ~ended_at(tree)
    while (below := (parent >= 0) & empty[parent] & ~empty).any():
        parent = np.where(below, parent[parent], parent)
    return tree._replace(parent=np.where(empty, FREE, parent))
