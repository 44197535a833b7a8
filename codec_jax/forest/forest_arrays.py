"""The arrays of a forest: which KV nodes there are, where their pages lie, and which requests read them.

    requests  r0   r1   r2   r3        rows in depth-first order: a node's readers are one interval
                \\  |   /     |         node 1 <- rows [0, 3), node 2 <- rows [0, 2), node 4 <- rows [3, 4)
    nodes        2  3         4
                  \\/          |        a node's tokens fill its pages from the front; a child starts a page of its
                   1          |        own, so forking in the middle of a page copies nothing
                    \\________/
                        0

Both the host and a jitted step have them, as NumPy arrays or JAX's; what a step needs (`extend`, `positions`, `slots`)
is jittable. All arrays have fixed capacities, so that a changed forest does not recompile a step.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from codec_jax import checks, drawing
from codec_jax.arrays import HostOrDevice, bucket, padded, to_int32
from codec_jax.forest.depth_first import depth_first
from codec_jax.forest.token_slots import NO_SLOT
from codec_jax.forest.tree import FREE, GONE, NO_NODE, Tree, check_slots, path_to

#: The length of a leaf whose `extend` could not be honoured: no plan allows it, so attention returns NaN.
_BROKEN = -1
#: What each request may add before arrays, and so the compiled step, change: nodes by forking, tokens by growing.
_SPARE_NODES, _SPARE_TOKENS = 8, 1024


@dataclass(frozen=True, eq=False, repr=False)
class ForestArrays:
    """Nodes, their pages and their readers, as int32 arrays of fixed capacity; of `Forest` what a jitted step has."""

    parent: Int[HostOrDevice, " nodes"]  # ROOT, FREE or a node
    length: Int[HostOrDevice, " nodes"]  # tokens in the node
    start: Int[HostOrDevice, " nodes"]  # position of the node's first token in its readers' contexts
    page_offset: Int[HostOrDevice, " nodes"]  # the node's pages are page_ids[page_offset : page_offset + page_count]
    page_count: Int[HostOrDevice, " nodes"]
    row_lo: Int[HostOrDevice, " nodes"]  # the node's readers are the request rows [row_lo, row_hi)
    row_hi: Int[HostOrDevice, " nodes"]
    page_ids: Int[HostOrDevice, " pages"]  # node after node; GONE for those that `forget` gave back
    leaf: Int[HostOrDevice, " B"]  # the node at which the request ends, or NO_NODE
    row_of_request: Int[HostOrDevice, " B"]
    request_of_row: Int[HostOrDevice, " B"]
    structure_hash: Int[HostOrDevice, ""]  # of everything above that a plan relies on, lengths left out
    page_size: int = field(metadata={"static": True})

    @classmethod
    def build(
        cls,
        tree: Tree,
        request_capacity: int | None = None,
        node_capacity: int | None = None,
        page_capacity: int | None = None,
    ) -> Self:
        """Derive the order, the intervals and the checksum of a tree, and pad everything to its capacity.

        This is what every other builder and every edit ends in.

        Args:
          tree: nodes, pages and requests, as `Forest.tree` gives them; it is trusted.
          request_capacity, node_capacity, page_capacity: as in `from_nodes`.

        >>> tree = Forest.from_nodes([-1], [30], [0]).tree
        >>> Forest.build(tree._replace(page_ids=tree.page_ids + 5)).pages_of(0).tolist()
        [5, 6]
        """
        spare = len(tree.leaf) if request_capacity is None else checks.integer("request_capacity", request_capacity, 0)

        def capacity(name: str, given: int | None, used: int, default: int) -> int:
            size = default if given is None else checks.integer(name, given, 0)
            if size < used:
                raise ValueError(f"{name}: expected at least the {used} in use, got {given}")
            return size

        requests, nodes, pages = len(tree.leaf), len(tree.parent), len(tree.page_ids)
        spare_pages = -(-_SPARE_TOKENS // tree.page_size)
        request_capacity = capacity("request_capacity", request_capacity, requests, requests)
        node_capacity = capacity("node_capacity", node_capacity, nodes, bucket(nodes + _SPARE_NODES * spare))
        page_capacity = capacity("page_capacity", page_capacity, pages, bucket(pages + spare_pages * spare))
        check_slots(int(tree.page_ids.max(initial=-1)) + 1, tree.page_size)
        checksum = tree.page_size
        for array in (tree.parent, tree.page_count, tree.page_ids, tree.leaf):
            checksum = zlib.crc32(np.ascontiguousarray(array, np.int32).data, checksum)
        leaf = padded(tree.leaf, request_capacity, NO_NODE)
        order = depth_first(padded(tree.parent, max(nodes, 1), FREE), padded(tree.length, max(nodes, 1), 0), leaf)
        page_count = padded(tree.page_count, node_capacity, 0)
        return cls(
            parent=padded(tree.parent, node_capacity, FREE),
            length=padded(tree.length, node_capacity, 0),
            start=padded(order.start, node_capacity, 0),
            page_offset=(np.cumsum(page_count) - page_count).astype(np.int32),
            page_count=page_count,
            row_lo=padded(order.row_lo, node_capacity, 0),
            row_hi=padded(order.row_hi, node_capacity, 0),
            page_ids=padded(tree.page_ids, page_capacity, 0),
            leaf=leaf,
            row_of_request=order.row_of_request.astype(np.int32),
            request_of_row=np.argsort(order.row_of_request).astype(np.int32),
            structure_hash=np.asarray(checksum, np.uint32).view(np.int32),
            page_size=tree.page_size,
        )

    @property
    def tree(self) -> Tree:
        """The forest without what follows from it and without free nodes past the last one, on the host."""
        if not self.is_host:
            raise TypeError(
                "forest: expected NumPy arrays, got arrays on a device; edit the forest on the host and pass it to "
                "the jitted step as an argument"
            )
        nodes = int(np.flatnonzero(self.parent != FREE).max(initial=0)) + 1
        parent, length, page_count = (x[:nodes] for x in (self.parent, self.length, self.page_count))
        page_ids = self.page_ids[: int(page_count.sum())]
        return Tree(parent, length, page_count, page_ids, self.leaf, self.page_size)

    # ------------------------------------------------------------------ what there is

    @property
    def request_capacity(self) -> int:
        """Request slots (B), used or free."""
        return self.leaf.shape[0]

    @property
    def node_capacity(self) -> int:
        """Nodes that there is room for."""
        return self.parent.shape[0]

    @property
    def page_capacity(self) -> int:
        """Pages of nodes that there is room for."""
        return self.page_ids.shape[0]

    @property
    def active(self) -> Bool[HostOrDevice, " B"]:
        """Which request slots are in use."""
        return self.leaf >= 0

    @property
    def readers(self) -> Int[HostOrDevice, " nodes"]:
        """How many requests read each node."""
        return self.row_hi - self.row_lo

    @property
    def request_length(self) -> Int[HostOrDevice, " B"]:
        """Tokens in each request's context; 0 for a free slot. Jittable."""
        return self._xp.where(self.leaf >= 0, self.start[self.leaf] + self.length[self.leaf], 0)

    @property
    def used_pages(self) -> Int[np.ndarray, " pages"]:
        """Physical pages of all nodes, for `PagePool.create(num_pages, taken=forest.used_pages)`."""
        pages = np.asarray(self.page_ids[: int(self.page_count.sum())])
        return pages[pages != GONE]

    @property
    def is_host(self) -> bool:
        """Whether the arrays are NumPy arrays, as building and editing need and make them."""
        return isinstance(self.length, np.ndarray)

    @property
    def _xp(self) -> ModuleType:
        return np if self.is_host else jnp

    def path(self, request: int) -> list[int]:
        """Return the nodes of a request's context, root first; none for a free slot.

        Args:
          request: the request slot.

        Raises ValueError for what is no request slot.

        >>> Forest.from_nodes([-1, 0, 0], [1000, 20, 5], [1, 2]).path(1)
        [0, 2]
        """
        if not (checks.is_integer(request) and 0 <= request < self.request_capacity):
            raise ValueError(f"request: expected a slot in [0, {self.request_capacity}), got {request}")
        return path_to(self.parent, int(self.leaf[request]))

    def pages_of(self, node: int) -> Int[np.ndarray, " pages"]:
        """Return the physical pages of a node, in order.

        Args:
          node: the node.

        Raises ValueError for a node that the forest has no room for.

        >>> Forest.from_nodes([-1, 0, 0], [40, 20, 5], [1, 2]).pages_of(1).tolist()
        [3, 4]
        """
        if not (checks.is_integer(node) and 0 <= node < self.node_capacity):
            raise ValueError(f"node: expected a node in [0, {self.node_capacity}), got {node}")
        offset = int(self.page_offset[node])
        return np.asarray(self.page_ids[offset : offset + int(self.page_count[node])])

    def context_slots(self, request: int) -> Int[np.ndarray, " tokens"]:
        """Return the token slots of a request's whole context, in order: what decoding it alone would read.

        Args:
          request: the request slot.

        Returns negative numbers for tokens whose pages `forget` gave back: whoever reads K and V leaves them out.
        Raises ValueError for what is no request slot.

        >>> Forest.from_nodes([-1, 0], [2, 3], [1]).context_slots(0).tolist()
        [0, 1, 16, 17, 18]
        """
        slots = [
            (self.pages_of(node)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)[: self.length[node]]
            for node in self.path(request)
        ]
        return np.concatenate([*slots, np.zeros(0, np.int64)])

    def __repr__(self) -> str:
        """Say how large the forest is, and what it saves."""
        if not isinstance(self.leaf, np.ndarray | jax.Array):  # specs, shardings, or what else a tree may be mapped to
            return f"Forest(of {self.leaf!r}, pages of {self.page_size})"
        if not self.is_host:
            return (
                f"Forest(on a device, up to {self.request_capacity:,} requests, {self.node_capacity:,} nodes and "
                f"{self.page_capacity:,} pages of {self.page_size})"
            )
        nodes, tokens = int((self.parent != FREE).sum()), int(self.length.sum(dtype=np.int64))
        read = int(self.request_length.sum(dtype=np.int64)) / max(tokens, 1)
        return (
            f"Forest({int(self.active.sum()):,} requests, {nodes:,} nodes, {tokens:,} tokens in "
            f"{len(self.used_pages):,} pages of {self.page_size}, each read {read:.2f} times)"
        )

    def svg(self) -> str:
        """Draw the forest: a rectangle for each node, as wide as its tokens and as high as its readers.

        The area of all rectangles is what decoding without sharing reads; their widths are what is read once.
        Write it to a file, or leave the forest at the end of a notebook's cell.

        >>> Forest.from_nodes([-1, 0, 0], [1000, 20, 5], [1, 2]).svg()[:4]
        '<svg'
        """
        return drawing.draw(self.length, self.start, self.row_lo, self.row_hi, title=repr(self))

    def _repr_html_(self) -> str | None:
        return self.svg() if self.is_host else None

    # ------------------------------------------------------------------ in a decode step

    def extend(self, count: HostOrDevice | int = 1) -> Self:
        """Append tokens to each request in use. Jittable.

        Every request that grows must own its leaf and have pages for the tokens: call `reserve` first.

        Args:
          count: tokens of every request, or [B], one number for each.

        Raises ValueError on the host for a request that cannot grow. Under `jax.jit`, where nothing can be raised, the
        forest is marked so that attention over it returns NaN, and `Plan.check` says why.

        >>> forest, pool = Forest.from_nodes([-1], [30], [0]).reserve(PagePool.create(8, np.arange(2)), 4)
        >>> forest.extend(3).request_length.tolist()
        [33]
        """
        count = count if isinstance(count, jax.Array) else np.asarray(count)
        on_host = self.is_host and not isinstance(count, jax.core.Tracer)
        xp, leaf = np if on_host else jnp, self.leaf
        if not jnp.issubdtype(count.dtype, jnp.integer) or count.shape not in ((), leaf.shape):
            raise ValueError(
                f"count: expected an integer, or one for each of the {leaf.shape[0]} request slots, "
                f"got {count.dtype} of shape {count.shape}"
            )
        growth = xp.where(leaf >= 0, to_int32(count, minimum=-1), 0)
        before, owned = self.length[leaf], self.readers[leaf] == 1
        fits = (before >= 0) & (growth <= self.page_count[leaf] * self.page_size - before)
        allowed = (growth == 0) | ((growth > 0) & owned & fits)
        if on_host:
            if not allowed.all():
                request = int(np.argmin(allowed))
                if growth[request] < 0:
                    given = np.broadcast_to(count, leaf.shape)[request]
                    raise ValueError(f"count: expected at least 0 tokens for request {request}, got {given}")
                raise ValueError(
                    f"count: request {request} cannot take {int(growth[request])} more tokens, its leaf "
                    f"{'has no room' if owned[request] else 'is read by other requests'}; call Forest.reserve first"
                )
            length = self.length.copy()
            np.add.at(length, leaf, growth)
        else:
            target = jnp.where(leaf >= 0, leaf, self.node_capacity)
            length = jnp.asarray(self.length).at[target].add(jnp.where(allowed, growth, 0), mode="drop")
            length = length.at[target].min(jnp.where(allowed, NO_SLOT, _BROKEN), mode="drop")
        return replace(self, length=length)

    def positions(self, count: int = 1) -> Int[HostOrDevice, "B T"]:
        """Positions of each request's last `count` tokens; negative where it has fewer or is free. Jittable.

        Args:
          count: T, tokens of each request.

        >>> Forest.from_nodes([-1, 0, 0], [30, 2, 5], [1, 2]).positions(2).tolist()
        [[30, 31], [33, 34]]
        """
        count = checks.integer("count", count, 0)
        return (self.request_length - count)[:, None] + self._xp.arange(count, dtype=np.int32)[None]

    def slots(self, count: int = 1) -> Int[HostOrDevice, "B T"]:
        """Token slots (page * page_size + offset) of each request's last `count` tokens. Jittable.

        Tokens that are not in the request's own leaf get NO_SLOT, so that writing K and V there is dropped.

        Args:
          count: T, tokens of each request.

        >>> Forest.from_nodes([-1, 0, 0], [30, 2, 5], [1, 2]).slots(2).tolist()
        [[32, 33], [51, 52]]
        """
        xp, leaf = self._xp, self.leaf[:, None]
        offset = self.positions(count) - self.start[leaf]
        entry = self.page_offset[leaf] + offset // self.page_size
        inside = (leaf >= 0) & (offset >= 0) & (offset < self.page_count[leaf] * self.page_size)
        page = self.page_ids[xp.where(inside, entry, 0)]
        return xp.where(inside, page * self.page_size + offset % self.page_size, NO_SLOT).astype(np.int32)
