"""A forest that is found by its tokens: lists come and go, and what was computed for one is found again by the next.

    add       a list shares what the nodes already hold, down to a page boundary; the rest becomes a node of its own
    reserve   pages for what a request is about to generate; then, when K and V are there, `append` says which tokens
    retire    the request goes, its nodes stay: cached, until somebody needs their pages

Everything that is known of a page is kept by its physical number, so splitting and merging nodes moves none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int

from codec_jax import checks
from codec_jax.arrays import Integers, bucket, expand, padded
from codec_jax.errors import OutOfPagesError, OutOfSlotsError
from codec_jax.forest import edits
from codec_jax.forest.depth_first import Order, depth_first
from codec_jax.forest.forest import Forest
from codec_jax.forest.pages import PagePool
from codec_jax.forest.token_tree import Match, TokenTree
from codec_jax.forest.tree import FREE, NO_NODE, Tree, check_in_use, check_slots
from codec_jax.forest.window_pages import Reach, WindowPages

#: In the place of a token that no list shares.
_UNSHARED = -1


@dataclass(frozen=True, eq=False, repr=False)
class PrefixCache:
    """The nodes of a living forest with their tokens: token lists come and go, and what was computed is found again.

    Host memory only, and immutable: every method returns a new value and leaves its input good. A node that nobody
    reads is cached; it holds only tokens whose K and V are there.

    >>> cache, [first] = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
    >>> cache = cache.mark_computed(first, 100).retire([first])
    >>> cache, [second] = cache.add([[*range(50), 7, 8, 9]])
    >>> cache.computed_tokens(second), cache
    (48, PrefixCache(1 request, 3 nodes, 105 tokens in 8 pages of 16, 4 of them cached, 56 free))
    """

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
    ) -> PrefixCache:
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

    def emptied(self) -> PrefixCache:
        """Return an empty cache of the same sizes.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=1).add([range(100)])
        >>> cache.emptied().pool.num_free
        64
        """
        windows = None if self.windows is None else self.windows.emptied()
        return PrefixCache.create(
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
        return self._content.match(_tokens("tokens", tokens), self._leaves(growing), most)

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
        wanted, size = _tokens("tokens", tokens), self.tree.page_size
        node, offset, length = self._content.match(wanted, self._leaves(growing), most)
        new = -(-(len(wanted) - length + checks.integer("growth", growth, 0)) // size)
        path = edits.path_to(self.tree.parent, node)
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

    # ------------------------------------------------------------------ requests come, grow and leave

    def add(
        self, token_lists: Sequence[Integers], growing: Integers = (), most: int | None = None
    ) -> tuple[PrefixCache, Int[np.ndarray, " lists"]]:
        """Add one request for each list; it shares what `match` finds, and a new node holds the rest.

        Lists share with those before them, too. Cached pages are evicted as needed, none that a list shares.

        Args:
          token_lists: token ids, none of them negative, for each request; an empty list has a node of its own.
          growing: requests that have room reserved in which a step writes now, to be given to `append` later. Nobody
            shares the page where they go on; a leaf of others may be shared, and then takes nothing before `reserve`.
          most: tokens that a list may share; defaults to all that match.

        Returns the cache and the request slots, lowest first. Raises ValueError for a negative token or
        growing requests that are not in use, OutOfSlotsError or OutOfPagesError if there is no room.

        >>> cache = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4)
        >>> cache, requests = cache.add([range(100), range(100), [*range(50), 7]])
        >>> requests.tolist(), cache.pool.num_free
        ([0, 1, 2], 56)
        """
        lists = [_tokens(f"token_lists[{i}]", given) for i, given in enumerate(token_lists)]
        requests = np.flatnonzero(self.tree.leaf < 0)[: len(lists)]
        if len(requests) < len(lists):
            raise OutOfSlotsError(
                f"token_lists: {len(lists)} lists need as many free request slots, got {len(requests)} of "
                f"{len(self.tree.leaf)}; retire requests or create the cache with a larger request_capacity"
            )
        grown, leaf = self._with(lists), self.tree.leaf.copy()
        closed = self._leaves(growing)
        leaf[requests] = [grown.add(given, closed, most) for given in lists]
        # What the lists share is read by now, so it is not evicted.
        cache = replace(self, tree=grown.tree(leaf))._with_free(grown.new_pages)
        pool, fresh = cache.pool.allocate_on(_homes_of_placeholders(cache.tree, cache.pool))
        tokens, new = np.split(grown.tokens, [self.pool.num_pages])
        if len(fresh):  # otherwise these are the tokens of this cache
            tokens[fresh] = new[: len(fresh)]
        page_ids = np.concatenate([np.arange(self.pool.num_pages), fresh])[cache.tree.page_ids]
        return replace(cache, tree=cache.tree._replace(page_ids=page_ids), pool=pool, tokens=tokens), requests

    def fork(self, requests: Integers) -> tuple[PrefixCache, Int[np.ndarray, " forks"]]:
        """Add requests that share everything that others have so far; see `Forest.fork`.

        Args:
          requests: the request to fork, for each new one; repeats allowed.

        Returns the cache and the new request slots. Raises ValueError if a request is not in use, OutOfSlotsError if
        the free request slots do not suffice.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache, forks = cache.fork([0, 0])
        >>> forks.tolist()
        [1, 2]
        """
        tree, new = edits.fork(self.tree, requests)
        return replace(self, tree=tree), new

    def reserve(self, tokens: int | Integers, requests: Integers) -> PrefixCache:
        """Make room for more tokens, each request's in a leaf of its own; cached pages are evicted as needed.

        Args:
          tokens: a number, or [B], one for each request slot.
          requests: those to make room for.

        Raises ValueError if a request is not in use; OutOfPagesError, with nothing changed, without enough pages.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100), range(100)])
        >>> cache.reserve(20, [0, 1]).pool.num_free
        53
        """
        # A node with children is nobody's own, even if they are only cached.
        grown, wanted = edits.own_leaves(self.tree, self._readers + edits.children(self.tree), tokens, requests)
        more = wanted - grown.page_count
        cache = replace(self, tree=grown)._with_free(int(more.sum()))
        return cache._resized(cache.tree, cache.tree.page_count + more)

    def append(self, new: Mapping[int, Integers]) -> PrefixCache:
        """Say which tokens were written to the room that `reserve` made; their K and V are in the pages already.

        Args:
          new: token ids, by request.

        Raises ValueError if a request is not in use, shares its leaf, has no room, or has a context whose K and V are
        not all there.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([[1, 2, 3]])
        >>> cache = cache.mark_computed(0, 3).reserve(4, [0]).append({0: [4, 5]})
        >>> cache.context(0).tolist()
        [1, 2, 3, 4, 5]
        """
        tree, size = self.tree, self.tree.page_size
        leaf = tree.leaf[check_in_use(list(new), tree.leaf)]
        texts = [_tokens(f"new[{request}]", given) for request, given in new.items()]
        counts = np.asarray([len(text) for text in texts], np.int64)
        owned = (self._readers[leaf] == 1) & (edits.children(tree)[leaf] == 0)
        room = tree.page_count[leaf] * size - tree.length[leaf]
        waiting = self._computed_of_nodes < tree.length
        for i, request in enumerate(new):
            if counts[i] and not (owned[i] and counts[i] <= room[i]):
                raise ValueError(
                    f"new: request {request} cannot take {counts[i]} more tokens, its leaf "
                    f"{f'has room for {room[i]}' if owned[i] else 'is shared'}; call reserve first"
                )
            if waiting.any() and waiting[edits.path_to(tree.parent, int(leaf[i]))].any():
                raise ValueError(
                    f"new: expected requests whose K and V are there, got request {request} with "
                    f"{self.computed_tokens(request)} computed tokens; call mark_computed first"
                )
        which, nth = expand(counts)
        offset = tree.length[leaf][which] + nth
        page = tree.page_ids[self._first[leaf][which] + offset // size]
        tokens, computed, length = self.tokens.copy(), self.computed.copy(), tree.length.copy()
        given = np.concatenate([*texts, np.zeros(0, np.int32)])
        tokens[page, offset % size] = _UNSHARED if self.invariant else given
        np.maximum.at(computed, page, offset % size + 1)
        length[leaf] += counts
        return replace(self, tree=tree._replace(length=length), tokens=tokens, computed=computed)

    def mark_computed(self, request: int, end: int) -> PrefixCache:
        """Say that K and V of a request's context are there, up to a position.

        Args:
          request: the request slot.
          end: the position of the first token that is not computed.

        Raises ValueError if the request is not in use, or its context does not reach so far.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache.mark_computed(0, 64).computed_tokens(0)
        64
        """
        pages, start, held = self._pages_of(request)
        if not 0 <= end <= held.sum():
            raise ValueError(f"end: expected a position in [0, {held.sum()}], the request's context, got {end}")
        computed = self.computed.copy()
        computed[pages] = np.maximum(computed[pages], np.clip(end - start, 0, held))
        return replace(self, computed=computed)

    def retire(self, requests: Integers) -> PrefixCache:
        """Remove requests; what is computed of their nodes stays, cached, once nobody reads it.

        Args:
          requests: those to remove.

        Raises ValueError if a request is not in use.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache.mark_computed(0, 64).retire([0])
        PrefixCache(0 requests, 1 node, 64 tokens in 4 pages of 16, 4 of them cached, 60 free)
        """
        tree, leaf = self.tree, self.tree.leaf.copy()
        leaf[check_in_use(requests, leaf)] = NO_NODE
        tree = tree._replace(leaf=leaf)
        unread = edits.readers_of(tree.parent, leaf) == 0
        last_used, computed = self.last_used.copy(), self.computed.copy()
        left = tree.page_ids[np.repeat(unread & (self._readers > 0), tree.page_count)]
        last_used[left] = self.clock + 1
        if self.invariant:  # nobody will share these
            computed[left[(self.tokens[left] == _UNSHARED).any(axis=1)]] = 0
        length = np.where(unread, replace(self, computed=computed)._computed_of_nodes, tree.length)
        page_count = np.where(edits.ended_at(tree), tree.page_count, -(-length // tree.page_size))
        cache = self._resized(tree._replace(length=length), page_count)
        merged = edits.merge_chains(cache.tree, np.full(len(length), True))
        return replace(cache, tree=merged, last_used=last_used, clock=self.clock + 1)

    # ------------------------------------------------------------------ what stays, and for how long

    def forget(self, requests: Integers) -> PrefixCache:
        """Say that what only these requests read is not to be used again: it goes when they retire.

        So does what is cached below it. Pinned pages stay.

        Args:
          requests: the request slots.

        Raises ValueError if one is not in use.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache.mark_computed(0, 100).forget([0]).retire([0]).num_cached
        0
        """
        tree, computed = self.tree, self.computed.copy()
        alone = edits.readers_of(tree.parent, edits.only(tree, requests).leaf)
        gone = (alone > 0) & (alone == self._readers)
        while (below := (tree.parent >= 0) & gone[tree.parent] & ~gone & (self._readers == 0)).any():
            gone |= below
        pages = tree.page_ids[np.repeat(gone, tree.page_count)]
        computed[pages[self.pins[pages] == 0]] = 0
        return replace(self, computed=computed)

    def evict(self, pages: int) -> PrefixCache:
        """Forget cached pages: of those that were read the longest ago, the last in their contexts first.

        Args:
          pages: how many.

        Raises OutOfPagesError, with nothing changed, if fewer are cached.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache.mark_computed(0, 64).retire([0]).evict(1).match(range(100)).length
        48
        """
        tree, entry = self.tree, np.flatnonzero(self._evictable)
        if checks.integer("pages", pages, 0, below=2**63) > len(entry):
            raise OutOfPagesError(
                f"the pool has {self.pool.num_free} free pages of {self.pool.num_pages} and {len(entry)} cached ones "
                f"that nobody reads, {self.pool.num_free + pages} are needed; retire requests, unpin pages, "
                "reserve fewer tokens at a time, or make the pool larger"
            )
        if not pages:
            return self
        node, nth = expand(tree.page_count)
        position = (self._order.start[node] + nth * tree.page_size)[entry]
        age = self.last_used[tree.page_ids[entry]] * 2**31 - position
        gone = entry[np.argpartition(age, pages - 1)[:pages]]
        # Who read a page has read all pages above it, later or just then: only ends of paths go.
        page_count = tree.page_count - np.bincount(node[gone], minlength=len(tree.parent))
        length = np.minimum(tree.length, page_count * tree.page_size)
        return self._resized(tree._replace(length=length), page_count)

    def drop(self) -> PrefixCache:
        """Forget everything that nobody reads, pinned or not, and all pins.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache.mark_computed(0, 100).retire([0]).drop().pool.num_free
        64
        """
        cache = replace(self, pins=np.zeros_like(self.pins))
        return cache.evict(cache.num_cached)

    def pin(self, request: int) -> tuple[PrefixCache, Int[np.ndarray, " pages"]]:
        """Keep the pages of a request's context, whoever reads them.

        Args:
          request: the request slot; its whole context is computed.

        Returns the cache, and the pages to `unpin` some time. Raises ValueError if the request is not in use, or K and
        V of its context are not all there.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache, pages = cache.mark_computed(0, 100).pin(0)
        >>> cache.retire([0]).num_cached, cache.retire([0]).unpin(pages).num_cached
        (0, 7)
        """
        pages, _, held = self._pages_of(request)
        pages, pins = pages[held > 0], self.pins.copy()
        if (computed := self.computed[pages].sum()) < held.sum():
            raise ValueError(
                f"request: expected one whose {held.sum()} tokens are computed, got {computed} of request {request}; "
                "call mark_computed first"
            )
        pins[pages] += 1
        return replace(self, pins=pins), pages

    def unpin(self, pages: Int[np.ndarray, " pages"]) -> PrefixCache:
        """Undo what `pin` did.

        Args:
          pages: all the pages that it returned.

        Raises ValueError if one of them is not pinned, or is not of this pool.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
        >>> cache, pages = cache.mark_computed(0, 100).pin(0)
        >>> int(cache.unpin(pages).pins.sum())
        0
        """
        ids = checks.int_vector("pages", pages)
        pins = np.bincount(ids[(ids >= 0) & (ids < len(self.pins))], minlength=len(self.pins))
        inside = (ids >= 0) & (ids < len(self.pins))
        checks.each("pages", ids, inside & (pins <= self.pins)[np.where(inside, ids, 0)], "pages that are pinned")
        return replace(self, pins=self.pins - pins)

    # ------------------------------------------------------------------ layers with windows

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

    def keep(self, pages: Int[np.ndarray, " seen"]) -> PrefixCache:
        """Give pages places in layers with windows; others leave as theirs are needed, pinned ones last.

        Args:
          pages: all that is seen in the next step, from `seen`.

        Raises OutOfPagesError if these layers have too few.

        >>> from codec_jax import Window
        >>> from codec_jax.forest import WindowPages
        >>> windows = WindowPages.create(num_pages=64, capacity=16, windows=[Window(40)])
        >>> cache, _ = PrefixCache.create(64, 16, 4, windows=windows).add([range(100)])
        >>> cache.keep(cache.seen(0, 64)).windows.place[:8].tolist()
        [-1, 0, 1, 2, 3, 4, 5, -1]
        """
        return self if self.windows is None else replace(self, windows=self.windows.keep(pages, self.pins > 0))

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
        read = edits.read_nodes(edits.only(self.tree, requests))
        merged = edits.merge_chains(read, np.full(len(read.parent), True))
        return _built(edits.compact(merged), node_capacity, page_capacity)

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
        tree, ends = edits.cut(self.tree, node, offset)
        tree = tree._replace(leaf=padded(ends, rows, NO_NODE).astype(np.int64))
        return _built(edits.compact(edits.read_nodes(tree)), node_capacity, page_capacity)

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
        return edits.readers_of(self.tree.parent, self.tree.leaf)

    @cached_property
    def _first(self) -> Int[np.ndarray, " nodes"]:
        return edits.first_pages(self.tree)

    @cached_property
    def _evictable(self) -> Bool[np.ndarray, " pages"]:
        """Return which of the tree's `page_ids` are cached and not pinned."""
        evictable = np.repeat(self._readers == 0, self.tree.page_count)
        evictable[evictable] = self.pins[self.tree.page_ids[evictable]] == 0
        return evictable

    @cached_property
    def _computed_of_nodes(self) -> Int[np.ndarray, " nodes"]:
        node, _ = expand(self.tree.page_count)
        computed = np.zeros(len(self.tree.parent), np.int64)
        np.add.at(computed, node, self.computed[self.tree.page_ids])
        return computed

    def _leaves(self, requests: Integers) -> set[int]:
        return set(self.tree.leaf[check_in_use(requests, self.tree.leaf)].tolist())

    def _path(self, request: int) -> Int[np.ndarray, " nodes"]:
        [leaf] = self.tree.leaf[check_in_use([request], self.tree.leaf)]
        return np.asarray(edits.path_to(self.tree.parent, int(leaf)))

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

    def _resized(self, tree: Tree, page_count: Int[np.ndarray, " nodes"]) -> PrefixCache:
        """Give the nodes of a changed tree so many pages, and free those that are empty."""
        tree, pool = edits.resized(tree, page_count, self.pool)
        computed = np.where(pool.owners > 0, self.computed, 0)
        windows = None if self.windows is None else self.windows.without(pool.owners == 0)
        return replace(self, tree=edits.without_empty(tree), pool=pool, computed=computed, windows=windows)

    def _with_free(self, pages: int) -> PrefixCache:
        """Evict until so many pages are free."""
        return self.evict(max(pages - self.pool.num_free, 0))


def _tokens(name: str, value: Integers) -> Int[np.ndarray, " tokens"]:
    """Return token ids as int32, or raise ValueError if there are others than that, or negative ones."""
    tokens = checks.int_vector(name, value).astype(np.int32)
    checks.each(name, tokens, tokens >= 0, "no negative tokens")
    return tokens


def _homes_of_placeholders(tree: Tree, pool: PagePool) -> Int[np.ndarray, " pages"]:
    """Choose the devices of pages that nobody has allocated yet: those numbered from the end of the pool on."""
    new = tree.page_ids >= pool.num_pages
    if pool.devices == 1:
        return np.zeros(np.count_nonzero(new), np.int64)
    node, _ = expand(tree.page_count)
    added = np.bincount(node[new], minlength=len(tree.parent))
    there = tree._replace(page_count=tree.page_count - added, page_ids=tree.page_ids[~new])
    homes = np.empty(np.count_nonzero(new), np.int64)
    homes[tree.page_ids[new] - pool.num_pages] = edits.new_homes(there, added, pool)
    return homes


def _built(tree: Tree, node_capacity: int | None, page_capacity: int | None) -> Forest:
    """Build a forest with capacities that hold the tree."""

    def capacity(name: str, given: int | None, used: int) -> int | None:
        return None if given is None else bucket(used, minimum=checks.integer(name, given))

    nodes = capacity("node_capacity", node_capacity, len(tree.parent))
    return Forest.build(tree, None, nodes, capacity("page_capacity", page_capacity, len(tree.page_ids)))
