"""Changes to a forest between decode steps, on the host: fork, reserve, retire; and views of the same pages.

Each function takes a forest and returns a new one; the methods of `Forest` of the same names document them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers, expand
from codec_jax.errors import OutOfSlotsError
from codec_jax.order import FREE, NO_NODE, ROOT, depth_first, depths
from codec_jax.pages import PagePool

if TYPE_CHECKING:
    from codec_jax.forest import Forest


def fork(forest: Forest, requests: Integers) -> tuple[Forest, Int[np.ndarray, " forks"]]:
    """Add requests that end where the given ones end."""
    sources = checks.requests_in_use(requests, forest.leaf)
    free = np.flatnonzero(forest.leaf < 0)
    if len(sources) > len(free):
        raise OutOfSlotsError(
            f"requests: {len(sources)} forks need as many free request slots, got {len(free)} of "
            f"{forest.request_capacity}; retire requests or build the forest with a larger request_capacity"
        )
    leaf, new = forest.leaf.copy(), free[: len(sources)]
    leaf[new] = forest.leaf[sources]
    return forest.rebuild(leaf=leaf), new


def reserve(
    forest: Forest, pool: PagePool, tokens: int | Integers, requests: Integers | None
) -> tuple[Forest, PagePool]:
    """Give each request a leaf of its own with room for `tokens` more tokens."""
    each = np.asarray(tokens)
    most = np.iinfo(np.int64).max
    fits = np.issubdtype(each.dtype, np.integer) and each.shape in ((), forest.leaf.shape)
    if not fits or (each < 0).any() or (each > most).any():
        raise ValueError(
            f"tokens: expected a number of tokens to make room for, or one for each of the "
            f"{forest.request_capacity} request slots, got {tokens}"
        )
    each = np.broadcast_to(each, forest.leaf.shape).astype(np.int64)
    pool.check_taken(forest.used_pages)
    parent, length, leaf = forest.parent, forest.length, forest.leaf
    page_count = forest.page_count
    growing = np.flatnonzero(leaf >= 0) if requests is None else np.unique(checks.requests_in_use(requests, leaf))
    shares = growing[forest.row_hi[leaf[growing]] - forest.row_lo[leaf[growing]] > 1]
    inner = np.unique(leaf[shares])
    if len(shares):
        free = np.flatnonzero(parent == FREE)
        missing = len(shares) - len(free)
        if missing > 0:
            free = np.concatenate([free, len(parent) + np.arange(missing)])
            parent = np.concatenate([parent, np.full(missing, FREE, np.int32)])
            length, page_count = (np.concatenate([x, np.zeros(missing, np.int32)]) for x in (length, page_count))
        own = free[: len(shares)]
        parent, leaf = parent.copy(), leaf.copy()
        parent[own], leaf[shares] = leaf[shares], own
    owned = leaf[growing]
    wanted = page_count.astype(np.int64)
    # What a node had in reserve is of no use to it once it has children.
    wanted[inner] = -(-length[inner] // forest.page_size)
    wanted[owned] = np.maximum(page_count[owned], -(-(length[owned] + each[growing]) // forest.page_size))
    if not len(shares) and (wanted == page_count).all():
        return forest, pool
    nodes = np.arange(len(parent))
    owner, nth = expand(page_count)
    keep = nth < wanted[owner]
    added = np.maximum(wanted - page_count, 0)
    pool, fresh = pool.release(forest.used_pages[~keep]).allocate(int(added.sum()))
    # Old pages first, then the fresh ones; a stable sort by node puts both in their place.
    owner = np.concatenate([owner[keep], np.repeat(nodes, added)])
    entries = np.concatenate([forest.used_pages[keep], fresh])[np.argsort(owner, kind="stable")]
    return forest.rebuild(parent=parent, length=length, leaf=leaf, page_count=wanted, entries=entries), pool


def retire(forest: Forest, pool: PagePool, requests: Integers) -> tuple[Forest, PagePool]:
    """Remove requests and what only they read."""
    gone = checks.requests_in_use(requests, forest.leaf)
    leaf = forest.leaf.copy()
    leaf[gone] = NO_NODE
    # Only nodes that lost their last reader go: a tree given by hand may hold nodes that never had one.
    read = forest.row_hi > forest.row_lo
    order = depth_first(forest.parent, forest.length, leaf)
    dead = read & (order.row_hi == order.row_lo)
    keep = ~np.repeat(dead, forest.page_count)
    pool = pool.release(forest.used_pages[~keep])
    parent = np.where(dead, FREE, np.where((forest.parent >= 0) & dead[forest.parent], ROOT, forest.parent))
    thinner = forest.rebuild(
        parent=parent,
        length=np.where(dead, 0, forest.length),
        leaf=leaf,
        page_count=np.where(dead, 0, forest.page_count),
        entries=forest.used_pages[keep],
    )
    return _merge_chains(thinner), pool


def _merge_chains(forest: Forest) -> Forest:
    """Merge each node that has one child and no request of its own into the child, where no page is split."""
    parent, length, page_count = forest.parent.copy(), forest.length.copy(), forest.page_count.copy()
    children = np.bincount(parent[parent >= 0], minlength=len(parent))
    ends = np.bincount(forest.leaf[forest.leaf >= 0], minlength=len(parent))
    full = length == page_count * forest.page_size
    mergeable = (parent != FREE) & (children == 1) & (ends == 0) & full & (forest.row_hi > forest.row_lo)
    if not mergeable.any():
        return forest
    only_child = np.full(len(parent), NO_NODE)
    linked = np.flatnonzero(parent >= 0)
    only_child[parent[linked]] = linked
    pages: dict[int, np.ndarray] = {}
    for node in np.flatnonzero(mergeable).tolist():
        # The child keeps its number, so that requests keep their leaves; a chain merges link by link.
        child = int(only_child[node])
        for member in (node, child):
            pages.setdefault(member, forest.pages_of(member))
        pages[child] = np.concatenate([pages.pop(node), pages[child]])
        above = parent[node]
        if above >= 0:
            only_child[above] = child
        parent[child], parent[node] = above, FREE
        length[child] += length[node]
        page_count[child] += page_count[node]
        length[node] = page_count[node] = 0
    entries = [pages.get(node, forest.pages_of(node)) for node in np.flatnonzero(page_count).tolist()]
    return forest.rebuild(
        parent=parent,
        length=length,
        page_count=page_count,
        entries=np.concatenate([*entries, np.zeros(0, np.int32)]),
    )


def chunks(forest: Forest, chunk: int) -> tuple[Forest, Int[np.ndarray, " chunks"]]:
    """Cut every node that is read into a chain of `chunk`-token nodes and let a request end at each."""
    if chunk <= 0 or chunk % forest.page_size:
        raise ValueError(f"chunk: expected a positive multiple of page_size = {forest.page_size}, got {chunk}")
    parent: list[int] = []
    length: list[int] = []
    pages: list[np.ndarray] = []
    source: list[int] = []
    last = np.full(forest.node_capacity, ROOT)
    read = np.flatnonzero(forest.row_hi > forest.row_lo)
    for node in read[np.argsort(depths(forest.parent)[read], kind="stable")]:
        above = int(last[forest.parent[node]]) if forest.parent[node] >= 0 else ROOT
        entries = forest.pages_of(node)
        for begin in range(0, int(forest.length[node]), chunk):
            size, first = min(chunk, int(forest.length[node]) - begin), begin // forest.page_size
            parent.append(above)
            length.append(size)
            pages.append(entries[first : first + -(-size // forest.page_size)])
            source.append(node)
            above = len(parent) - 1
        last[node] = above
    view = type(forest).build(
        np.asarray(parent),
        np.asarray(length),
        np.arange(len(parent)),
        np.asarray([len(entries) for entries in pages]),
        np.concatenate([*pages, np.zeros(0, np.int32)]),
        page_size=forest.page_size,
    )
    return view, np.asarray(source)


def unshared(forest: Forest) -> Forest:
    """Give every request copies of the nodes of its path, from a root of its own."""
    requests = np.flatnonzero(forest.leaf >= 0)
    paths = [forest.path(request) for request in requests.tolist()]
    sizes = np.asarray([len(path) for path in paths], np.int64)
    source = np.concatenate([*paths, np.zeros(0, np.int64)]).astype(np.int64)
    end = np.cumsum(sizes)
    parent = np.arange(len(source)) - 1
    parent[end - sizes] = ROOT
    leaf = np.full(forest.request_capacity, NO_NODE)
    leaf[requests] = end - 1
    return forest.rebuild(
        parent=parent,
        length=forest.length[source],
        leaf=leaf,
        page_count=forest.page_count[source],
        entries=np.concatenate([*(forest.pages_of(node) for node in source), np.zeros(0, np.int32)]),
    )
