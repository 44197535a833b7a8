"""The forest: which KV nodes there are, where their pages lie, and which requests read them.

    requests  r0   r1   r2   r3        rows in depth-first order: a node's readers are one interval
                \\  |   /     |         node 1 <- rows [0, 3), node 2 <- rows [0, 2), node 4 <- rows [3, 4)
    nodes        2  3         4
                  \\/          |        a node's tokens fill its pages from the front; a child starts a page of its
                   1          |        own, so forking in the middle of a page copies nothing
                    \\________/
                        0

A forest is immutable. Host code (building, `fork`, `reserve`, `retire`) works on NumPy arrays and returns new
forests; what a decode step needs (`extend`, `positions`, `slots`) is jittable as well. All arrays have fixed
capacities, so that a changed forest does not recompile a step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from codec_jax import checks, edits
from codec_jax.arrays import HostOrDevice, Integers
from codec_jax.capacity import bucket
from codec_jax.order import FREE, NO_NODE, depth_first
from codec_jax.pages import NO_SLOT, PagePool
from codec_jax.prefixes import shared_pages, shared_runs

#: The length of a leaf whose `extend` could not be honoured: no plan allows it, so attention returns NaN.
_IMPOSSIBLE = np.int32(1 << 28)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forest:
    """Nodes, their pages and their readers, as int32 arrays of fixed capacity. Build one with a `from_` method."""

    parent: Int[HostOrDevice, " nodes"]  # ROOT, FREE or a node
    length: Int[HostOrDevice, " nodes"]  # tokens in the node
    start: Int[HostOrDevice, " nodes"]  # position of the node's first token in its readers' contexts
    page_offset: Int[HostOrDevice, " nodes"]  # the node's pages are pages[page_offset : page_offset + page_count]
    page_count: Int[HostOrDevice, " nodes"]
    row_lo: Int[HostOrDevice, " nodes"]  # the node's readers are the request rows [row_lo, row_hi)
    row_hi: Int[HostOrDevice, " nodes"]
    pages: Int[HostOrDevice, " entries"]  # physical page ids, node after node
    leaf: Int[HostOrDevice, " B"]  # the node at which the request ends, or NO_NODE
    query_order: Int[HostOrDevice, " B"]  # request -> row
    request_of_row: Int[HostOrDevice, " B"]  # row -> request
    structure: Int[HostOrDevice, ""]  # checksum of everything above that a plan relies on, lengths left out
    page_size: int = field(metadata={"static": True})

    # ------------------------------------------------------------------ building

    @classmethod
    def from_nodes(
        cls,
        parent: Integers,
        length: Integers,
        leaf: Integers,
        *,
        page_size: int = 16,
        request_capacity: int | None = None,
        node_capacity: int | None = None,
    ) -> Forest:
        """Build a forest from an explicit tree; node i takes ceil(length[i] / page_size) pages, from page 0 on.

        Args:
          parent: node above each node, -1 for a root; parents come before their children.
          length: tokens in each node, 0 allowed.
          leaf: for each request the node where it ends; inner nodes and shared ends are allowed.
          page_size: tokens in a page, a multiple of 8.
          request_capacity: request slots (B); defaults to one per request. Free slots are what `fork` uses.
          node_capacity: node slots; defaults to room for a few generations of forks. Grows when it must.

        Raises ValueError for a child that is not after its parent, a leaf that is no node, a negative length, more
        token slots than int32 numbers, or a capacity that is too small.
        """
        parents, lengths, leaves = (
            checks.int_vector(name, value) for name, value in (("parent", parent), ("length", length), ("leaf", leaf))
        )
        checks.tree(parents, lengths, leaves)
        checks.page_size(page_size)
        page_count = -(-lengths // page_size)
        slots = int(page_count.sum()) * int(page_size)
        if slots >= 2**31:
            raise ValueError(
                f"length: expected less than 2**31 tokens in whole pages of {page_size}, got {slots}; "
                "divide the requests among several forests"
            )
        return cls.build(
            parents,
            lengths,
            leaves,
            page_count,
            np.arange(page_count.sum()),
            page_size=page_size,
            request_capacity=request_capacity,
            node_capacity=node_capacity,
        )

    @classmethod
    def from_sequences(
        cls,
        token_lists: Sequence[Integers],
        *,
        page_size: int = 16,
        request_capacity: int | None = None,
        node_capacity: int | None = None,
    ) -> Forest:
        """Build a forest whose nodes are the longest prefixes that the token lists share; one request per list.

        Equal lists end at the same node, and a list that is a prefix of another one ends at an inner node. Pages are
        laid out as in `from_nodes`. Raises ValueError for an empty list or a negative token.
        """
        if not len(token_lists):
            raise ValueError("token_lists: expected at least one list of tokens, got none")
        lists = [checks.int_vector(f"token_lists[{i}]", tokens) for i, tokens in enumerate(token_lists)]
        for i, tokens in enumerate(lists):
            if not tokens.size or tokens.min() < 0:
                got = f"token {tokens.min()}" if tokens.size else "an empty list"
                raise ValueError(f"token_lists[{i}]: expected at least one token, none negative, got {got}")
        runs = shared_runs(lists)
        return cls.from_nodes(
            runs.parent,
            np.subtract(runs.end, runs.begin),
            runs.leaf,
            page_size=page_size,
            request_capacity=request_capacity,
            node_capacity=node_capacity,
        )

    @classmethod
    def from_block_table(
        cls,
        block_table: Int[np.ndarray, "B max_pages"],
        context_lens: Int[np.ndarray, " B"],
        page_size: int,
    ) -> Forest:
        """Build a forest over the pages of a vLLM or FlashDecoding block table; rows that share pages share nodes.

        Row r's context is the first context_lens[r] tokens of the pages block_table[r, :]; entries after that are
        not looked at, and a row of length 0 is a free request slot. Two rows share a node as far as they list the
        same pages holding the same number of tokens; a page that one row uses only in part is a node of its own, and
        if another row uses it too, what the first appends goes to a fresh page: it has no slots until `reserve`.

        Raises ValueError if a length needs more pages than a row has, or a page id in use is negative.
        """
        table, lens = np.asarray(block_table), checks.int_vector("context_lens", context_lens)
        checks.page_size(page_size)
        checks.block_table(table, lens, page_size)
        nodes = shared_pages(table, lens, page_size)
        return cls.build(nodes.parent, nodes.length, nodes.leaf, nodes.page_count, nodes.pages, page_size=page_size)

    @classmethod
    def build(
        cls,
        parent: Int[np.ndarray, " n"],
        length: Int[np.ndarray, " n"],
        leaf: Int[np.ndarray, " requests"],
        page_count: Int[np.ndarray, " n"],
        entries: Int[np.ndarray, " pages"],
        *,
        page_size: int,
        request_capacity: int | None = None,
        node_capacity: int | None = None,
        entry_capacity: int | None = None,
    ) -> Forest:
        """Derive the order, the intervals and the checksum from a tree, and pad everything to its capacity.

        Node i owns the next page_count[i] physical pages of `entries`. This is what every other builder and every
        edit ends in; it trusts its arguments. Raises ValueError if a capacity is too small.
        """
        requests, nodes = len(leaf), len(parent)
        request_capacity = requests if request_capacity is None else request_capacity
        # Room for each request to fork and grow a few times before the arrays (and so the compiled step) change.
        node_capacity = bucket(nodes + 2 * request_capacity) if node_capacity is None else node_capacity
        entry_capacity = bucket(len(entries) + 2 * request_capacity) if entry_capacity is None else entry_capacity
        for name, capacity, needed in (
            ("request_capacity", request_capacity, requests),
            ("node_capacity", node_capacity, nodes),
        ):
            if capacity < needed:
                raise ValueError(f"{name}: expected at least the {needed} in use, got {capacity}")

        def padded(values: np.ndarray, capacity: int, fill: int) -> np.ndarray:
            out = np.full(capacity, fill, np.int32)
            out[: len(values)] = values
            return out

        parent, length = padded(parent, node_capacity, FREE), padded(length, node_capacity, 0)
        page_count = padded(page_count, node_capacity, 0)
        page_offset = (np.cumsum(page_count) - page_count).astype(np.int32)
        pages, leaf = padded(entries, entry_capacity, 0), padded(leaf, request_capacity, NO_NODE)
        order = depth_first(parent, length, leaf)
        checksum = page_size
        for array in (parent, page_count, pages, leaf):
            checksum = zlib.crc32(array.data, checksum)
        return cls(
            parent=parent,
            length=length,
            start=order.start.astype(np.int32),
            page_offset=page_offset,
            page_count=page_count,
            row_lo=order.row_lo.astype(np.int32),
            row_hi=order.row_hi.astype(np.int32),
            pages=pages,
            leaf=leaf,
            query_order=order.query_order.astype(np.int32),
            request_of_row=np.argsort(order.query_order).astype(np.int32),
            structure=np.asarray(checksum, np.uint32).view(np.int32),
            page_size=page_size,
        )

    def rebuild(
        self,
        *,
        parent: Int[np.ndarray, " n"] | None = None,
        length: Int[np.ndarray, " n"] | None = None,
        leaf: Int[np.ndarray, " requests"] | None = None,
        page_count: Int[np.ndarray, " n"] | None = None,
        entries: Int[np.ndarray, " pages"] | None = None,
        node_capacity: int = 0,
        entry_capacity: int = 0,
    ) -> Forest:
        """Build this forest anew with some of its arrays replaced; capacities grow if they must or are told to."""
        self._require_host()
        parent = self.parent if parent is None else parent
        leaf = self.leaf if leaf is None else leaf
        entries = self.used_pages if entries is None else entries
        return type(self).build(
            parent,
            self.length if length is None else length,
            leaf,
            self.page_count if page_count is None else page_count,
            entries,
            page_size=self.page_size,
            request_capacity=len(leaf),
            node_capacity=bucket(len(parent), least=max(self.node_capacity, node_capacity)),
            entry_capacity=bucket(len(entries), least=max(len(self.pages), entry_capacity)),
        )

    @property
    def node_capacity(self) -> int:
        """Node slots, used or free."""
        return self.parent.shape[0]

    @property
    def request_capacity(self) -> int:
        """Request slots (B), used or free."""
        return self.leaf.shape[0]

    @property
    def active(self) -> HostOrDevice:
        """Which request slots are in use, bool [B]."""
        return self.leaf >= 0

    @property
    def request_length(self) -> HostOrDevice:
        """Tokens in each request's context, int32 [B]; 0 for a free slot. Jittable."""
        return self._xp.where(self.leaf >= 0, self.start[self.leaf] + self.length[self.leaf], 0)

    @property
    def is_host(self) -> bool:
        """Whether the arrays are NumPy arrays, as building and editing need and make them."""
        return isinstance(self.length, np.ndarray)

    def _require_host(self) -> None:
        if not self.is_host:
            raise TypeError(
                "forest: expected NumPy arrays, got arrays on a device; edit the forest on the host and pass it to "
                "the jitted step as an argument"
            )

    @property
    def _xp(self) -> ModuleType:
        return np if self.is_host else jnp

    # ------------------------------------------------------------------ in a decode step

    def extend(self, count: HostOrDevice = 1) -> Forest:
        """Append `count` tokens to each request in use (a scalar, or one number for each request [B]). Jittable.

        Every request that grows must own its leaf and have pages for the tokens: call `reserve` first. On the host
        a request that cannot grow raises ValueError; under `jax.jit`, where nothing can be raised, the forest is
        marked so that attention over it returns NaN.
        """
        xp, leaf = self._xp, self.leaf
        count = xp.asarray(count)
        if not jnp.issubdtype(count.dtype, jnp.integer) or count.shape not in ((), leaf.shape):
            raise ValueError(
                f"count: expected an integer, or one for each of the {leaf.shape[0]} request slots, "
                f"got {count.dtype} of shape {count.shape}"
            )
        if count.dtype.itemsize > 4:  # past int32 is past any leaf
            count = xp.clip(count, -1, np.iinfo(np.int32).max)
        growth = xp.where(leaf >= 0, count.astype(np.int32), 0)
        owned = self.row_hi[leaf] - self.row_lo[leaf] == 1
        fits = growth <= self.page_count[leaf] * self.page_size - self.length[leaf]
        allowed = (growth == 0) | ((growth > 0) & owned & fits)
        if self.is_host:
            if not allowed.all():
                request = int(np.argmin(allowed))
                raise ValueError(
                    f"count: request {request} cannot take {int(growth[request])} more tokens, its leaf "
                    f"{'has no room' if owned[request] else 'is read by other requests'}; call Forest.reserve first"
                )
            length = self.length.copy()
            np.add.at(length, leaf, growth)
        else:
            target = jnp.where(leaf >= 0, leaf, self.node_capacity)
            length = jnp.asarray(self.length).at[target].add(jnp.where(allowed, growth, 0), mode="drop")
            length = length.at[target].max(jnp.where(allowed, 0, _IMPOSSIBLE), mode="drop")
        return replace(self, length=length)

    def positions(self, count: int = 1) -> Int[HostOrDevice, "B T"]:
        """Positions of each request's last `count` tokens; negative where it has fewer or is free. Jittable."""
        return (self.request_length - count)[:, None] + self._xp.arange(count, dtype=np.int32)

    def slots(self, count: int = 1) -> Int[HostOrDevice, "B T"]:
        """Token slots (page * page_size + offset) of each request's last `count` tokens. Jittable.

        Tokens that are not in the request's own leaf get `pages.NO_SLOT`, so that writing K and V there is dropped.
        """
        xp, leaf = self._xp, self.leaf[:, None]
        offset = self.positions(count) - self.start[leaf]
        entry = self.page_offset[leaf] + offset // self.page_size
        inside = (leaf >= 0) & (offset >= 0) & (offset < self.page_count[leaf] * self.page_size)
        page = self.pages[xp.where(inside, entry, 0)]
        return xp.where(inside, page * self.page_size + offset % self.page_size, NO_SLOT).astype(np.int32)

    # ------------------------------------------------------------------ between steps, on the host

    def fork(self, requests: Integers) -> tuple[Forest, Int[np.ndarray, " forks"]]:
        """Add one request for each entry of `requests`, sharing everything that the named request has so far.

        Returns the forest and the new request slots, in the order of `requests`. Copies nothing and takes no pages:
        who shares a leaf gets a node of its own from `reserve`, when there is something to write.

        Raises ValueError if a request is not in use, OutOfSlotsError if the free request slots do not suffice.
        """
        self._require_host()
        return edits.fork(self, requests)

    def reserve(
        self, pool: PagePool, tokens: int | Integers, requests: Integers | None = None
    ) -> tuple[Forest, PagePool]:
        """Make room for more tokens on each of `requests` (default: all), so that steps need not allocate.

        `tokens` is a number, or one for each request slot [B]. A request that shares its leaf, or ends at an inner
        node, gets an empty node of its own. Raises OutOfPagesError, with nothing changed, if the pool cannot serve all.
        """
        self._require_host()
        return edits.reserve(self, pool, tokens, requests)

    def retire(self, pool: PagePool, requests: Integers) -> tuple[Forest, PagePool]:
        """Remove requests; nodes that nobody reads any more go, and their pages return to the pool.

        A node with one child left and no request ending at it merges with that child if its last page is full.
        Raises ValueError if a request is not in use.
        """
        self._require_host()
        return edits.retire(self, pool, requests)

    def chunks(self, chunk: int) -> tuple[Forest, Int[np.ndarray, " chunks"]]:
        """View the same pages as a forest with one request for every `chunk` tokens of every node: for prefill.

        A query of T = `chunk` tokens over this view computes each node's own tokens, once, whoever shares them. Also
        returns the node that each chunk comes from, ancestors first; a node's last chunk may be shorter. Raises
        ValueError if `chunk` is not a multiple of page_size.
        """
        self._require_host()
        return edits.chunks(self, chunk)

    def unshared(self) -> Forest:
        """View the same pages as a forest in which every request reads a path of its own: decoding without sharing.

        For comparisons. It is safe to append to where every request owns its leaf, as after `reserve`.
        """
        self._require_host()
        return edits.unshared(self)

    def path(self, request: int) -> list[int]:
        """Return the nodes of a request's context, root first; none for a free slot."""
        nodes: list[int] = []
        if not 0 <= request < self.request_capacity:
            raise ValueError(f"request: expected a slot in [0, {self.request_capacity}), got {request}")
        node = int(self.leaf[request])
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def context_slots(self, request: int) -> Int[np.ndarray, " tokens"]:
        """Return the token slots of a request's whole context, in order: what decoding it alone would read."""
        offsets = [
            np.repeat(self.pages_of(node) * self.page_size, self.page_size)[: self.length[node]]
            + np.arange(self.length[node]) % self.page_size
            for node in self.path(request)
        ]
        return np.concatenate(offsets) if offsets else np.zeros(0, np.int64)

    def pages_of(self, node: int) -> Int[np.ndarray, " pages"]:
        """Return the physical pages of a node, in order."""
        offset = int(self.page_offset[node])
        return np.asarray(self.pages[offset : offset + int(self.page_count[node])])

    @property
    def used_pages(self) -> Int[np.ndarray, " pages"]:
        """Physical pages of all nodes, for `PagePool.create(num_pages, taken=forest.used_pages)`."""
        return np.asarray(self.pages[: int(self.page_count.sum())])
