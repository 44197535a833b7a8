"""Forests: built from token lists, trees and block tables, changed between decode steps, and viewed otherwise.

A forest is immutable. All of this is the host's work, on NumPy arrays, and returns new forests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers, bucket, expand
from codec_jax.forest import edits, views
from codec_jax.forest.forest_arrays import ForestArrays
from codec_jax.forest.hidden import hidden_from_readers
from codec_jax.forest.pages import PagePool
from codec_jax.forest.radix_tree import shared_pages, shared_tokens
from codec_jax.forest.tree import GONE, Tree, check_tree
from pallas_kernels.heads import Window


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Forest(ForestArrays):
    """Nodes, their pages and their readers, as int32 arrays of fixed capacity. Build one with a `from_` method."""

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
        page_capacity: int | None = None,
    ) -> Forest:
        """Build a forest from an explicit tree; node i takes ceil(length[i] / page_size) pages, from page 0 on.

        Args:
          parent: node above each node, -1 for a root; parents come before their children.
          length: tokens in each node, 0 allowed.
          leaf: for each request the node where it ends; inner nodes and shared ends are allowed.
          page_size: tokens in a page, a multiple of 8.
          request_capacity: request slots (B); defaults to one per request. Free ones are what `fork` uses.
          node_capacity: nodes that there is room for; defaults to 8 more for each request slot.
          page_capacity: pages that there is room for; defaults to 1024 tokens more for each request slot. Capacities
            grow when they must, and a step that is jitted for the old ones compiles once more: give numbers that
            hold for the whole run, such as the pages of the pool.

        Raises ValueError for a child that is not after its parent, a leaf that is no node, a negative length, more
        token slots than int32 numbers, or a capacity that is too small.

        >>> Forest.from_nodes(parent=[-1, 0, 0], length=[1000, 20, 5], leaf=[1, 2])
        Forest(2 requests, 3 nodes, 1,025 tokens in 66 pages of 16, each read 1.98 times)
        """
        parents, lengths, leaves = (
            checks.int_vector(name, value) for name, value in (("parent", parent), ("length", length), ("leaf", leaf))
        )
        check_tree(parents, lengths, leaves)
        tree = Tree.laid_out(parents, lengths, leaves, checks.page_size(page_size))
        return cls.build(tree, request_capacity, node_capacity, page_capacity)

    @classmethod
    def from_sequences(
        cls,
        token_lists: Sequence[Integers],
        *,
        whole_pages: bool = False,
        page_size: int = 16,
        request_capacity: int | None = None,
        node_capacity: int | None = None,
        page_capacity: int | None = None,
    ) -> Forest:
        """Build a forest whose nodes are the longest prefixes that the token lists share; one request per list.

        Equal lists end at the same node, and a list that is a prefix of another one ends at an inner node. Pages are
        laid out as in `from_nodes`.

        Args:
          token_lists: token ids of each request, none of them negative; NumPy arrays of int32 are the fastest.
          whole_pages: share whole pages only, so that a list has its tokens in the same places of its pages whatever
            the others are, which plans of the policy "invariant" rely on.
          page_size, request_capacity, node_capacity, page_capacity: as in `from_nodes`.

        Raises ValueError for an empty list or a negative token.

        >>> document = list(range(1000))
        >>> Forest.from_sequences([document + [1, 2], document + [3], document])
        Forest(3 requests, 3 nodes, 1,003 tokens in 65 pages of 16, each read 2.99 times)
        """
        tree = shared_tokens(token_lists, checks.page_size(page_size), whole_pages=whole_pages)
        return cls.build(tree, request_capacity, node_capacity, page_capacity)

    @classmethod
    def from_block_table(
        cls,
        block_table: Int[np.ndarray, "B max_pages"],
        context_lens: Int[np.ndarray, " B"],
        page_size: int,
        *,
        node_capacity: int | None = None,
        page_capacity: int | None = None,
    ) -> Forest:
        """Build a forest over the pages of a vLLM or FlashDecoding block table; rows that share pages share nodes.

        Two rows share a node as far as they list the same pages holding the same number of tokens. A page that one
        row uses only in part is a node of its own, and if another row uses it too, what the first appends goes to a
        fresh page: it has no slots until `reserve`.

        Args:
          block_table: [B, max_pages], the page ids of each row; those past a row's context are not looked at.
          context_lens: [B], tokens in each row's context; a row of length 0 is a free request slot.
          page_size: tokens in a page, a multiple of 8.
          node_capacity, page_capacity: as in `from_nodes`.

        Raises ValueError if a length needs more pages than a row has, or a page id in use is negative.

        >>> Forest.from_block_table(np.array([[0, 1, 2], [0, 1, 3]]), np.array([40, 45]), 16)
        Forest(2 requests, 3 nodes, 53 tokens in 4 pages of 16, each read 1.60 times)
        """
        tree = shared_pages(block_table, checks.int_vector("context_lens", context_lens), checks.page_size(page_size))
        return cls.build(tree, None, node_capacity, page_capacity)

    # ------------------------------------------------------------------ between steps, on the host

    def fork(self, requests: Integers) -> tuple[Forest, Int[np.ndarray, " forks"]]:
        """Add requests that share everything that others have so far.

        Copies nothing and takes no pages: who shares a leaf gets a node of its own from `reserve`, when there is
        something to write.

        Args:
          requests: the request to fork, for each new one; repeats allowed.

        Returns the forest and the new request slots, in the order of `requests`. Raises ValueError if a request is not
        in use, OutOfSlotsError if the free request slots do not suffice.

        >>> forest, new = Forest.from_nodes([-1], [30], [0], request_capacity=3).fork([0, 0])
        >>> new.tolist()
        [1, 2]
        """
        tree, new = edits.fork(self.tree, requests)
        return self._rebuilt(tree), new

    def reserve(
        self, pool: PagePool, tokens: int | Integers, requests: Integers | None = None
    ) -> tuple[Forest, PagePool]:
        """Make room for more tokens, so that steps need not allocate.

        A request that shares its leaf, or ends at an inner node, gets an empty node of its own.

        Args:
          pool: the newest pool, in which all pages of this forest are taken.
          tokens: a number, or [B], one for each request slot.
          requests: those to make room for; all by default.

        Returns the forest and the pool. Raises OutOfPagesError, with nothing changed, if the pool cannot serve all.

        >>> forest, _ = Forest.from_nodes([-1], [30], [0], request_capacity=2).fork([0])
        >>> forest, pool = forest.reserve(PagePool.create(8, forest.used_pages), 4)
        >>> forest.path(0), forest.path(1), pool.num_free
        ([0, 1], [0, 2], 4)
        """
        before = self.tree
        tree, pool = edits.reserve(before, self.readers[: len(before.parent)], pool, tokens, requests)
        return (self if tree is before else self._rebuilt(tree)), pool

    def retire(self, pool: PagePool, requests: Integers) -> tuple[Forest, PagePool]:
        """Remove requests; nodes that nobody reads any more go, and their pages return to the pool.

        A node with one child left and no request ending at it merges with that child if its last page is full.

        Args:
          pool: the newest pool, in which all pages of this forest are taken.
          requests: those to remove.

        Returns the forest and the pool. Raises ValueError if a request is not in use.

        >>> forest = Forest.from_nodes([-1, 0, 0], [30, 20, 5], [1, 2])
        >>> forest, pool = forest.retire(PagePool.create(8, forest.used_pages), [0])
        >>> forest.active.tolist(), pool.num_free
        ([False, True], 5)
        """
        before = self.tree
        tree, pool = edits.retire(before, self.readers[: len(before.parent)], pool, requests)
        return self._rebuilt(tree), pool

    def forget(self, pool: PagePool, window: Window, *, query_tokens: int = 1) -> tuple[Forest, PagePool]:
        """Give back the pages that no request sees any more, of a model all of whose layers have a window.

        Lengths and positions stay as they are, and so do places for the pages in the forest's arrays: of those have
        `page_capacity` for the longest contexts. The forest takes a new plan, with this window or one of its kind that
        is no longer. Chunked ones may hide what shorter ones that slide show, and the other way round.

        Args:
          pool: the newest pool, in which all pages of this forest are taken.
          window: the longest of the model's layers, all of which slide, or are chunked.
          query_tokens: T, of the calls to come.

        Returns the forest and the pool.

        >>> forest = Forest.from_nodes([-1, 0, 0], [1000, 20, 5], [1, 2])
        >>> forest, pool = forest.forget(PagePool.create(80, forest.used_pages), Window(100))
        >>> len(forest.used_pages), pool.num_free
        (10, 70)
        """
        checks.instance("window", window, Window)
        tree = self.tree
        hidden = self.hidden_by(window, checks.integer("query_tokens", query_tokens))
        tree, pool = edits.forget(tree, hidden[: len(tree.parent)], pool)
        return self._rebuilt(tree), pool

    def hidden_by(self, window: Window | None, query_tokens: int = 1) -> Int[np.ndarray, " nodes"]:
        """Count the tokens of each node, from its first on, that no request sees through a window; on the host.

        Args:
          window: None for none, which hides nothing.
          query_tokens: T, the last tokens of each request.

        >>> Forest.from_nodes([-1, 0], [1000, 20], [1]).hidden_by(Window(100))[:2].tolist()
        [920, 0]
        """
        if window is None:
            return np.zeros(self.node_capacity, np.int64)
        checks.instance("window", window, Window)
        checks.integer("query_tokens", query_tokens)
        first = window.first_position(self.positions(query_tokens)[self.request_of_row, 0])
        return hidden_from_readers(first, self.start, self.row_lo, self.row_hi)

    @property
    def forgotten(self) -> Int[np.ndarray, " nodes"]:
        """Tokens of each node up to the end of the last page that was given back; on the host.

        Where nodes have become one, pages that are still there may lie before that.
        """
        gone, pages = np.flatnonzero(self.page_ids == GONE), np.zeros(self.node_capacity, np.int64)
        if not len(gone):
            return pages
        node, number = expand(self.page_count)
        gone = gone[gone < len(node)]
        np.maximum.at(pages, node[gone], number[gone] + 1)
        return pages * self.page_size

    def spread(self, num_pages: int, devices: int) -> tuple[Forest, PagePool]:
        """Lay the pages of a new forest out over several devices, so that all have about as many to read.

        For a forest fresh from a builder, before anything is computed: K and V that are there are not moved. Long nodes
        are cut into runs, one for each device; short ones live on one.

        Args:
          num_pages: pages of the pool, on all devices together.
          devices: that the pages are spread over, along the context axis of a mesh.

        Returns the forest and its pool, which spreads also what requests are given later. Raises ValueError if
        `devices` does not divide `num_pages`, or several nodes own one page; OutOfPagesError if the pool is too small.

        >>> forest, pool = Forest.from_nodes([-1, 0, 0], [1600, 20, 5], [1, 2]).spread(200, devices=2)
        >>> forest.pages_of(0)[[0, 49, 50, 99]].tolist(), forest.pages_of(1).tolist(), forest.pages_of(2).tolist()
        ([0, 49, 100, 149], [50, 51], [150])
        """
        tree, pool = edits.spread(self.tree, PagePool.create(num_pages, devices=devices))
        return self._rebuilt(tree), pool

    # ------------------------------------------------------------------ views of the same pages

    def only(self, requests: Integers) -> Forest:
        """View the forest with some of its requests in their places, and nobody else.

        Args:
          requests: those to keep.

        Raises ValueError if a request is not in use.

        >>> Forest.from_nodes([-1, 0, 0], [30, 20, 5], [1, 2]).only([1]).active.tolist()
        [False, True]
        """
        return self._rebuilt(views.only(self.tree, requests))

    def chunks(self, chunk: int) -> tuple[Forest, Int[np.ndarray, " chunks"]]:
        """View the same pages as a forest with one request for every chunk of every node: for prefill.

        A query of T = `chunk` tokens over this view computes each node's own tokens, once, whoever shares them.

        Args:
          chunk: tokens of a chunk, a multiple of page_size; a node's last one may be shorter.

        Returns the view, and the node that each chunk comes from, ancestors first.

        >>> view, node = Forest.from_nodes([-1, 0, 0], [30, 20, 5], [1, 2]).chunks(16)
        >>> node.tolist(), view.request_length.tolist()
        ([0, 0, 1, 1, 2], [16, 30, 46, 50, 35])
        """
        tree = self.tree
        view, node = views.chunks(tree, self.readers[: len(tree.parent)], chunk)
        return self.build(view), node

    def unshared(self) -> Forest:
        """View the same pages as a forest in which every request reads a path of its own: decoding without sharing.

        For comparisons. It is safe to append to where every request owns its leaf, as after `reserve`.

        >>> Forest.from_nodes([-1, 0, 0], [30, 20, 5], [1, 2]).unshared()
        Forest(2 requests, 4 nodes, 85 tokens in 7 pages of 16, each read 1.00 times)
        """
        return self._rebuilt(views.unshared(self.tree))

    def _rebuilt(self, tree: Tree) -> Forest:
        """Build a changed tree with these capacities, or larger ones if they must grow."""
        return self.build(
            tree,
            node_capacity=bucket(len(tree.parent), minimum=self.node_capacity),
            page_capacity=bucket(len(tree.page_ids), minimum=self.page_capacity),
        )
