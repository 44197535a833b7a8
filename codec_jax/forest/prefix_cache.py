"""A forest that is found by its tokens: lists come and go, and what was computed for one is found again by the next.

add       a list shares what the nodes already hold, down to a page boundary; the rest becomes a node of its own
reserve   pages for what a request is about to generate; then, when K and V are there, `append` says which tokens
retire    the request goes, its nodes stay: cached, until somebody needs their pages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers, expand
from codec_jax.errors import OutOfPagesError, OutOfSlotsError
from codec_jax.forest import edits
from codec_jax.forest.depth_first import readers
from codec_jax.forest.pages import PagePool
from codec_jax.forest.prefix_nodes import PrefixNodes, token_ids
from codec_jax.forest.tree import NO_NODE, Tree, check_in_use, children, ended_at, path_to
from codec_jax.forest.views import only

#: In the place of a token that no list shares.
_UNSHARED = -1


@dataclass(frozen=True, eq=False, repr=False)
class PrefixCache(PrefixNodes):
    """The nodes of a living forest with their tokens: token lists come and go, and what was computed is found again.

    Host memory only, and immutable: every method returns a new value and leaves its input good. A node that nobody
    reads is cached; it holds only tokens whose K and V are there.

    >>> cache, [first] = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([range(100)])
    >>> cache = cache.mark_computed(first, 100).retire([first])
    >>> cache, [second] = cache.add([[*range(50), 7, 8, 9]])
    >>> cache.computed_tokens(second), cache
    (48, PrefixCache(1 request, 3 nodes, 105 tokens in 8 pages of 16, 4 of them cached, 56 free))
    """

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
        lists = [token_ids(f"token_lists[{i}]", given) for i, given in enumerate(token_lists)]
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
        if not grown.new_pages:
            return cache, requests
        pool, fresh = cache.pool.allocate_on(_homes_of_placeholders(cache.tree, cache.pool))
        tokens, new = np.split(grown.tokens, [self.pool.num_pages])
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
        grown, wanted = edits.own_leaves(self.tree, self._readers + children(self.tree), tokens, requests)
        more = wanted - grown.page_count
        cache = replace(self, tree=grown)._with_free(int(more.sum()))
        return cache._resized(cache.tree, cache.tree.page_count + more)

    def append(self, new: Mapping[int, Integers]) -> PrefixCache:
        """Say which tokens were written to the room that `reserve` made; their K and V are in the pages already.

        Args:
          new: token ids, by request.

        Raises ValueError if a request is not in use, shares its leaf, has no room, or has a context whose K and V are
        not all there; TypeError for what is no mapping.

        >>> cache, _ = PrefixCache.create(num_pages=64, page_size=16, request_capacity=4).add([[1, 2, 3]])
        >>> cache = cache.mark_computed(0, 3).reserve(4, [0]).append({0: [4, 5]})
        >>> cache.context(0).tolist()
        [1, 2, 3, 4, 5]
        """
        checks.instance("new", new, Mapping)
        tree, size = self.tree, self.tree.page_size
        leaf = tree.leaf[check_in_use(list(new), tree.leaf)]
        texts = [token_ids(f"new[{request}]", given) for request, given in new.items()]
        counts = np.asarray([len(text) for text in texts], np.int64)
        owned = (self._readers[leaf] == 1) & (children(tree)[leaf] == 0)
        room = tree.page_count[leaf] * size - tree.length[leaf]
        waiting = self._computed_of_nodes < tree.length
        for i, request in enumerate(new):
            if counts[i] and not (owned[i] and counts[i] <= room[i]):
                raise ValueError(
                    f"new: request {request} cannot take {counts[i]} more tokens, its leaf "
                    f"{f'has room for {room[i]}' if owned[i] else 'is shared'}; call reserve first"
                )
            if waiting.any() and waiting[path_to(tree.parent, int(leaf[i]))].any():
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
        if not (checks.is_integer(end) and 0 <= end <= held.sum()):
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
        unread = readers(tree.parent, leaf) == 0
        last_used, computed = self.last_used.copy(), self.computed.copy()
        node, nth = expand(np.where(unread & (self._readers > 0), tree.page_count, 0))
        left = tree.page_ids[self._first[node] + nth]
        last_used[left] = self.clock + 1
        if self.invariant:  # nobody will share what was drawn; what is pinned stays all the same
            held = np.arange(tree.page_size) < (tree.length[node] - nth * tree.page_size)[:, None]
            drawn = ((self.tokens[left] == _UNSHARED) & held).any(axis=1)
            computed[left[drawn & (self.pins[left] == 0)]] = 0
        length = np.where(unread, replace(self, computed=computed)._computed_of_nodes, tree.length)
        page_count = np.where(ended_at(tree), tree.page_count, -(-length // tree.page_size))
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
        alone = readers(tree.parent, only(tree, requests).leaf)
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

    # ------------------------------------------------------------------ internals

    def _resized(self, tree: Tree, page_count: Int[np.ndarray, " nodes"]) -> PrefixCache:
        """Give the nodes of a changed tree so many pages, and free those that are empty."""
        tree, pool = edits.resized(tree, page_count, self.pool)
        computed = np.where(pool.owners > 0, self.computed, 0)
        windows = None if self.windows is None else self.windows.without(pool.owners == 0)
        return replace(self, tree=edits.without_empty(tree), pool=pool, computed=computed, windows=windows)

    def _with_free(self, pages: int) -> PrefixCache:
        """Evict until so many pages are free."""
        return self.evict(max(pages - self.pool.num_free, 0))


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
