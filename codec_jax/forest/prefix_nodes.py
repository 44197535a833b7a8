"""The nodes of a prefix cache: their tokens, what is known of their pages, and what can be asked of them.

Everything that is known of a page is kept by its physical number, so splitting and merging nodes moves none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from jaxtyping import Bool, Int

from codec_jax import checks
from codec_jax.arrays import Integers, bucket, expand, padded
from codec_jax.forest import views
from codec_jax.forest.depth_first import Order, depth_first, readers
from codec_jax.forest.edits import merge_chains
from codec_jax.forest.forest import Forest
from codec_jax.forest.pages import PagePool
from codec_jax.forest.token_tree import Match, TokenTree
from codec_jax.forest.tree import FREE, NO_NODE, Tree, check_in_use, check_slots, first_pages, path_to
from codec_jax.forest.window_pages import Reach, WindowPages


@dataclass(frozen=True, eq=False, repr=False)
class PrefixNodes:
    """Nodes with tokens, their pages and the requests that read them; the part of `PrefixCache` that only looks."""

    tree: Tree  # all nodes, read or cached
    pool: PagePool
    tokens: Int[np.ndarray, "num_pages page_size"]  # what each page holds
    computed: Int[np.ndarray, " num_pages"]  # tokens of the page whose K and V are there
    last_used: Int[np.ndarray, " num_pages"]  # the clock when the page lost its last reader
    pins: Int[np.ndarray, " num_pages"]  # how often the page is pinned
    clock: int  # calls of `retire`
    invariant: bool = False
    windows: WindowPages | None = None  # the pages that layers with windows keep, if these are fewer

    @classmethod
    def create(
        cls,
        num_pages: int,
        page_size: int,
        request_capacity: int,
        *,
        devices: int = 1,
        invariant: bool = False,
        windows: WindowPages | None = None,
    ) -> Self:
        """Make an empty cache.

        Args:
          num_pages: pages of every layer's `KVPages`.
          page_size: tokens in a page, a multiple of 8.
          request_capacity: request slots (B).
          devices: that the pages are spread over, along the context axis of a mesh.
          invariant: share nothing but whole pages of what was given to `add`. Where a list's tokens stand in its pages,
            and whether they were computed as a prompt is, then does not depend on other lists.
          windows: places of this pool's pages, for layers with windows that have arrays of fewer pages.

        Raises ValueError for numbers that are not positive, more token slots than int32 numbers, a number of pages
        that `devices` does not divide, or places of another pool.

        >>> PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).available
        64
        """
        size = checks.page_size(page_size)
        check_slots(checks.integer("num_pages", num_pages), size)
        if windows is not None and len(windows.place) != num_pages:
            raise ValueError(f"windows: expected places of {num_pages} pages, got those of {len(windows.place)}")
        leaf = np.full(checks.integer("request_capacity", request_capacity), NO_NODE)
        nothing = np.zeros(2, np.int64)  # ROOT and FREE must be indices of nodes, whatever is looked up there
        tree = Tree(np.full(2, FREE), nothing, nothing, np.zeros(0, np.int64), leaf, size)
        of_pages = np.zeros(num_pages, np.int64)
        pool, tokens = PagePool.create(num_pages, devices=devices), np.zeros((num_pages, size), np.int32)
        return cls(tree, pool, tokens, of_pages, of_pages, of_pages, 0, invariant, windows)

    def emptied(self) -> Self:
        """Return an empty cache of the same sizes.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=1).add([range(100)])
        >>> cache.emptied().pool.num_free
        64
        """
        windows = None if self.windows is None else self.windows.emptied()
        return self.create(
            self.pool.num_pages, self.tree.page_size, len(self.tree.leaf),
            devices=self.pool.devices, invariant=self.invariant, windows=windows,
        )  # fmt: skip

    # ------------------------------------------------------------------ what there is

    @property
    def num_nodes(self) -> int:
        """Nodes, read or cached."""
        return int(np.count_nonzero(self.tree.parent != FREE))

    @property
    def num_cached(self) -> int:
        """Pages that `evict` can take: nobody reads them, and they are not pinned."""
        return int(np.count_nonzero(self._evictable))

    @property
    def available(self) -> int:
        """Pages that `add` and `reserve` can have: free ones, and cached ones that they may evict."""
        return self.pool.num_free + self.num_cached

    def context(self, request: int) -> Int[np.ndarray, " tokens"]:
        """Return the tokens of a request; of an invariant cache -1 for those of `append`.

        Args:
          request: the request slot.

        Raises ValueError if it is not in use.

        >>> cache, [request] = PrefixCache.create(num_pages=8, page_size=16, request_capacity=1).add([[5, 6]])
        >>> cache.context(request).tolist()
        [5, 6]
        """
        pages, _, held = self._pages_of(request)
        return self.tokens[pages][np.arange(self.tree.page_size) < held[:, None]]

    def computed_tokens(self, request: int) -> int:
        """Count the leading tokens of a request's context whose K and V are there.

        Args:
          request: the request slot.

        Raises ValueError if it is not in use.

        >>> cache, [request] = PrefixCache.create(num_pages=8, page_size=16, request_capacity=1).add([[5, 6]])
        >>> cache.computed_tokens(request), cache.mark_computed(request, 2).computed_tokens(request)
        (0, 2)
        """
        return int(self.computed[self._pages_of(request)[0]].sum())

    def chunks_missing(self, chunk_tokens: int) -> int:
        """Count the chunks that compute what requests read and is not there: those of each node, whoever shares it.

        Args:
          chunk_tokens: tokens of a chunk.

        Raises ValueError for a chunk without tokens.

        >>> cache, _ = PrefixCache.create(64, 16, 4).add([range(100), range(100), [*range(48), 7]])
        >>> cache.chunks_missing(32), cache.mark_computed(0, 48).chunks_missing(32)
        (5, 3)
        """
        missing = self.tree.length - self._computed_of_nodes
        return int((-(-missing // checks.integer("chunk_tokens", chunk_tokens))).sum())

    def node_ends(self, request: int) -> Int[np.ndarray, " nodes"]:
        """Return where the nodes of a request's context end, root first: positions of the tokens that follow.

        Args:
          request: the request slot.

        Raises ValueError if it is not in use.

        >>> cache, _ = PrefixCache.create(64, 16, 4).add([range(100), [*range(50), 7]])
        >>> cache.node_ends(1).tolist()
        [48, 51]
        """
        return np.cumsum(self.tree.length[self._path(request)])

    def node_at(self, request: int, position: int) -> int:
        """Return the node that holds a token of a request's context.

        Args:
          request: the request slot.
          position: of the token.

        Raises ValueError if the request is not in use, or its context is not so long.

        >>> cache, _ = PrefixCache.create(64, 16, 4).add([range(100), [*range(50), 7]])
        >>> [[cache.node_at(request, position) for position in (47, 48)] for request in (0, 1)]
        [[1, 0], [1, 2]]
        """
        path = self._path(request)
        ends = np.cumsum(self.tree.length[path])
        if not checks.is_integer(position) or not 0 <= position < ends[-1]:
            raise ValueError(f"position: expected one in [0, {ends[-1]}), the request's context, got {position!r:.100}")
        return int(path[np.searchsorted(ends, position, side="right")])

    def match(self, tokens: Integers, growing: Integers = (), most: int | None = None) -> Match:
        """Find the longest prefix of a list that `add` would share.

        Nodes are shared in whole pages, so that requests part without copying. What follows a node that matches in
        full may match further below; a match that ends elsewhere counts down to the last whole page of its node. One
        that ends at the end of a node counts in full if at most one token of the list is left: samples of one prompt
        share all of it, and who goes on with a finished request has nothing to compute again. Of an invariant cache
        whole pages count only. Tokens match whether their K and V are there or still to be computed. Where layers with
        windows keep some pages only, a match ends where they have all that the next token sees.

        Args:
          tokens: token ids.
          growing: requests that are being decoded; nobody may share a page in which they write.
          most: the longest match to look for; defaults to the whole list.

        Returns the node where the match ends, or -1, the tokens of the match in that node, and in all. Raises
        ValueError for what is no list of tokens, or requests that are not in use.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=1).add([range(100)])
        >>> cache.match([*range(50), 7]), cache.match([*range(100), 7])
        (Match(node=0, offset=48, length=48), Match(node=0, offset=100, length=100))
        """
        return self._content.match(token_ids("tokens", tokens), self._leaves(growing), most)

    def match_in_full_pages(self, tokens: Integers, growing: Integers = ()) -> int:
        """Count the tokens of a match up to its first page that is not full, but for the list's last one.

        Who shares no more than that takes, all in all, the pages that the list would take alone.

        Args:
          tokens, growing: as in `match`.

        Raises what `match` raises.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=2).add([range(20)])
        >>> cache, _ = cache.add([range(60)])  # in pages of its own from the 17th token on
        >>> cache.match_in_full_pages(range(20)), cache.match_in_full_pages(range(21))
        (20, 16)
        """
        wanted, size = token_ids("tokens", tokens), self.tree.page_size
        node, offset, length = self._content.match(wanted, self._leaves(growing))
        path = path_to(self.tree.parent, node)
        lengths = self.tree.length[path]
        lengths[-1:] = offset
        if length == len(wanted):
            lengths[-1:] += -offset % size  # the last page may have room
        partial = np.flatnonzero(lengths % size)
        return min(length, int(lengths[: partial[0] + 1].sum()) // size * size) if len(partial) else length

    def needed(self, tokens: Integers, growth: int = 0, growing: Integers = (), most: int | None = None) -> int:
        """Count the pages that a list would take from `available`, and what it generates too.

        That is: pages for what is not there yet and for the growth, cached pages that it would begin to read, and one
        for a request that now grows in a page that the list would share, and would have to leave it. It is an upper
        bound; up to two pages more than needed if the match ends inside a page.

        Args:
          tokens: what `add` would be given.
          growth: tokens that `reserve` would make room for afterwards.
          growing, most: as in `match`.

        Raises ValueError for what is no list of tokens, a negative growth, or requests that are not in use.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=1).add([range(100)])
        >>> cache.needed([*range(50), 7], growth=20)
        2
        """
        wanted, size = token_ids("tokens", tokens), self.tree.page_size
        node, offset, length = self._content.match(wanted, self._leaves(growing), most)
        new = -(-(len(wanted) - length + checks.integer("growth", growth, 0)) // size)
        path = path_to(self.tree.parent, node)
        entries = [np.arange(self.tree.page_count[above]) + self._first[above] for above in path]
        if node >= 0:
            entries[-1] = entries[-1][: -(-offset // size)]
            new += bool(offset % size and self._readers[node])
        return new + sum(int(np.count_nonzero(self._evictable[of_node])) for of_node in entries)

    def __repr__(self) -> str:
        """Say how large the cache is."""
        requests, nodes = int(np.count_nonzero(self.tree.leaf >= 0)), self.num_nodes
        return (
            f"PrefixCache({requests:,} request{'s' * (requests != 1)}, {nodes:,} node{'s' * (nodes != 1)}, "
            f"{int(self.tree.length.sum()):,} tokens in {len(self.tree.page_ids):,} pages of {self.tree.page_size}, "
            f"{self.num_cached:,} of them cached, {self.pool.num_free:,} free)"
        )

    def seen(self, request: int, begin: int, end: int | None = None) -> Int[np.ndarray, " pages"]:
        """Return the pages that layers with windows need while a request goes on.

        Args:
          request: the request slot.
          begin: the position of the next token.
          end: the position up to which tokens are stored; defaults to all that there is room for.

        Raises ValueError if it is not in use, or all layers keep every page.

        >>> from codec_jax import Window
        >>> from codec_jax.forest import WindowPages
        >>> windows = WindowPages.create(num_pages=64, capacity=16, windows=[Window(40)])
        >>> cache, _ = PrefixCache.create(64, 16, 4, windows=windows).add([range(100)])
        >>> cache.seen(0, 64).tolist(), cache.seen(0, 64, 80).tolist()
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4])
        """
        if self.windows is None:
            raise ValueError("windows: expected a cache with pages of layers with windows, got one without")
        tree, path, size = self.tree, self._path(request), self.tree.page_size
        length, first = tree.length[path], int(self.windows.first_positions([begin])[0])
        start = np.cumsum(length) - length
        low = np.clip(first - start, 0, None) // size
        high = tree.page_count[path]
        if end is not None:
            high = np.minimum(high, -(-np.clip(end - start, 0, None) // size))
        which, nth = expand(np.clip(high - low, 0, None))
        return tree.page_ids[self._first[path][which] + low[which] + nth]

    # ------------------------------------------------------------------ forests for the device

    def view(self, requests: Integers, *, node_capacity: int | None = None, page_capacity: int | None = None) -> Forest:
        """Return a forest of the nodes that some requests read, in the requests' slots; full nodes of chains merge.

        Args:
          requests: those to show.
          node_capacity, page_capacity: as in `Forest.from_nodes`; they grow when they must.

        Raises ValueError if a request is not in use.

        >>> cache, _ = PrefixCache.create(64, 16, 4).add([range(100), [*range(48), 7]])
        >>> cache.view([1])
        Forest(1 requests, 1 nodes, 49 tokens in 4 pages of 16, each read 1.00 times)
        """
        read = views.read_nodes(views.only(self.tree, requests))
        merged = merge_chains(read, np.full(len(read.parent), True))
        return _built(views.compact(merged), node_capacity, page_capacity)

    def chunks(
        self,
        pieces: Sequence[tuple[int, int]],
        rows: int,
        *,
        node_capacity: int | None = None,
        page_capacity: int | None = None,
    ) -> Forest:
        """Return a forest of beginnings of contexts, one request each: for prefill in chunks.

        Args:
          pieces: (request, end) for each row: the row's context is the first `end` tokens of the request's. A page of
            the node that holds the last of them ends there, or the node itself.
          rows: request slots of the forest; those after the pieces are free.
          node_capacity, page_capacity: as in `view`.

        Raises ValueError if a request is not in use, a piece ends elsewhere, or there are too few rows.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache.chunks([(0, 32), (0, 100)], rows=4).request_length.tolist()
        [32, 100, 0, 0]
        """
        if checks.integer("rows", rows) < len(pieces):
            raise ValueError(f"rows: expected at least one for each of the {len(pieces)} pieces, got {rows}")
        node = self.tree.leaf[check_in_use([request for request, _ in pieces], self.tree.leaf)]
        end = checks.int_vector("pieces", [end for _, end in pieces])
        start, parent = self._order.start, self.tree.parent
        total = start[node] + self.tree.length[node]
        while (below := (node >= 0) & (start[node] >= end)).any():
            node = np.where(below, parent[node], node)
        offset = end - start[node]
        fits = (end <= total) & ((offset % self.tree.page_size == 0) | (offset == self.tree.length[node])) & (node >= 0)
        checks.each("pieces", end, fits, "ends of pages or nodes of the request's context")
        tree, ends = views.cut(self.tree, node, offset)
        tree = tree._replace(leaf=padded(ends, rows, NO_NODE).astype(np.int64))
        return _built(views.compact(views.read_nodes(tree)), node_capacity, page_capacity)

    # ------------------------------------------------------------------ internals

    @cached_property
    def _content(self) -> TokenTree:
        return self._with()

    def _with(self, lists: Sequence[Int[np.ndarray, " tokens"]] = ()) -> TokenTree:
        reach = None if self.windows is None else Reach(self.windows, self.computed)
        return TokenTree(self.tree, self.tokens, lists, whole_pages=self.invariant, reach=reach)

    @cached_property
    def _order(self) -> Order:
        return depth_first(self.tree.parent, self.tree.length, self.tree.leaf)

    @cached_property
    def _readers(self) -> Int[np.ndarray, " nodes"]:
        return readers(self.tree.parent, self.tree.leaf)

    @cached_property
    def _first(self) -> Int[np.ndarray, " nodes"]:
        return first_pages(self.tree)

    @cached_property
    def _evictable(self) -> Bool[np.ndarray, " pages"]:
        """Return which of the tree's `page_ids` are cached and not pinned."""
        evictable = np.repeat(self._readers == 0, self.tree.page_count)
        evictable[evictable] = self.pins[self.tree.page_ids[evictable]] == 0
        return evictable

    @cached_property
    def _computed_of_nodes(self) -> Int[np.ndarray, " nodes"]:
        node, _ = expand(self.tree.page_count)
        computed = np.bincount(node, self.computed[self.tree.page_ids], minlength=len(self.tree.parent))
        return computed.astype(np.int64)

    def _leaves(self, requests: Integers) -> set[int]:
        return set(self.tree.leaf[check_in_use(requests, self.tree.leaf)].tolist())

    def _path(self, request: int) -> Int[np.ndarray, " nodes"]:
        [leaf] = self.tree.leaf[check_in_use([request], self.tree.leaf)]
        return np.asarray(path_to(self.tree.parent, int(leaf)))

    def _pages_of(
        self, request: int
    ) -> tuple[Int[np.ndarray, " pages"], Int[np.ndarray, " pages"], Int[np.ndarray, " pages"]]:
        """Return the pages of a request's path, the position where each begins, and the tokens it holds."""
        tree, path = self.tree, self._path(request)
        node, nth = expand(tree.page_count[path])
        pages = tree.page_ids[self._first[path][node] + nth]
        begin = nth * tree.page_size
        start = np.cumsum(tree.length[path]) - tree.length[path]
        return pages, start[node] + begin, np.clip(tree.length[path][node] - begin, 0, tree.page_size)


def token_ids(name: str, value: Integers) -> Int[np.ndarray, " tokens"]:
    """Return token ids as int32, or raise ValueError if there are others than that, or negative ones."""
    tokens = checks.int_vector(name, value).astype(np.int32)
    checks.each(name, tokens, tokens >= 0, "no negative tokens")
    return tokens


def _built(tree: Tree, node_capacity: int | None, page_capacity: int | None) -> Forest:
    """Build a forest with capacities that hold the tree."""

    def capacity(name: str, given: int | None, used: int) -> int | None:
        return None if given is None else bucket(used, minimum=checks.integer(name, given))

    nodes = capacity("node_capacity", node_capacity, len(tree.parent))
    return Forest.build(tree, None, nodes, capacity("page_capacity", page_capacity, len(tree.page_ids)))
