"""A tree whose tokens are known: the longest prefix of a list that it holds, and lists that are added to it."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax.arrays import expand
from codec_jax.forest.radix_tree import common_prefix
from codec_jax.forest.tree import FREE, ROOT, Tree, first_pages, pages_of_runs, path_to
from codec_jax.forest.window_pages import Reach


class Match(NamedTuple):
    """How much of a token list a tree holds."""

    node: int  # where the match ends, or ROOT
    offset: int  # tokens of the match in that node
    length: int  # tokens of the match


class TokenTree:
    """A tree and the tokens of its pages, with room for lists to come.

    The pages of what is added are numbered from the end of `tokens` on, until somebody allocates them.
    """

    def __init__(
        self,
        tree: Tree,
        tokens: Int[np.ndarray, "num_pages page_size"],
        token_lists: Sequence[Int[np.ndarray, " tokens"]] = (),
        *,
        whole_pages: bool = False,
        reach: Reach | None = None,
    ) -> None:
        """Make room for the token lists, of which no more than whole pages are shared if so wished.

        With layers that keep some pages only, `reach` says where lists may go on.
        """
        pages = sum(-(-len(given) // tree.page_size) for given in token_lists)
        free = np.flatnonzero(tree.parent == FREE)
        more = max(2 * len(token_lists) - len(free), 0)
        self.page_size, self.num_pages, self.new_pages = tree.page_size, len(tokens), 0
        self._whole_pages, self._reach = whole_pages, reach
        self.tokens, self._room = tokens, pages  # copied for the first list of which something is new
        self._page_ids = np.concatenate([tree.page_ids, len(tokens) + np.arange(pages)])
        self._parent = np.concatenate([tree.parent, np.full(more, FREE)])
        self._length, self._page_count, self._first = (
            np.concatenate([x, np.zeros(more, np.int64)]) for x in (tree.length, tree.page_count, first_pages(tree))
        )
        self._free = iter([*free.tolist(), *range(len(tree.parent), len(tree.parent) + more)])
        self._next_page = len(tree.page_ids)
        self._by_parent = np.argsort(tree.parent, kind="stable")
        self._sorted_parent = tree.parent[self._by_parent]
        self._changed: dict[int, np.ndarray] = {}  # children of nodes that have changed

    def match(
        self, tokens: Int[np.ndarray, " tokens"], growing: Collection[int] = (), most: int | None = None
    ) -> Match:
        """Return the longest usable prefix; `PrefixCache.match` says which are usable beside leaves that grow."""
        found, matches = [(ROOT, 0)], []
        while found:
            node, at = found.pop()
            for child, common in self._common(node, tokens, at):
                whole = common == self._length[child] and not (self._whole_pages and common % self.page_size)
                if whole:
                    found.append((child, at + common))
                at_end = whole and len(tokens) - at - common <= 1 and child not in growing
                offset = common if at_end else common // self.page_size * self.page_size
                if offset:
                    matches.append(Match(child, offset, at + offset))
        best = Match(ROOT, 0, 0)
        for match in sorted(matches, key=lambda each: each.length, reverse=True):
            if match.length <= best.length:
                break
            best = max(best, self._shortened(match, most), key=lambda each: each.length)
        return best

    def add(self, tokens: Int[np.ndarray, " tokens"], growing: Collection[int], most: int | None = None) -> int:
        """Return the node at which a list ends, now that it is in the tree."""
        node, offset, length = self.match(tokens, growing, most)
        # Pages in reserve go with the lower part, so that who writes to them may go on.
        if offset % self.page_size == 0 and offset < self._page_count[node] * self.page_size and node != ROOT:
            node = self._split(node, offset)
        return self._append(node, tokens[length:]) if length < len(tokens) or node == ROOT else node

    def tree(self, leaf: Int[np.ndarray, " B"]) -> Tree:
        """Return the tree, with requests that end at these nodes."""
        page_ids = pages_of_runs(self._page_ids, self._first, self._page_count)
        return Tree(self._parent, self._length, self._page_count, page_ids, leaf, self.page_size)

    def _shortened(self, match: Match, most: int | None) -> Match:
        """Return the longest part of a match that is no longer than `most`, and after which a list may go on."""
        if self._reach is None and (most is None or match.length <= most):
            return match
        path = np.asarray(path_to(self._parent, match.node))
        length = self._length[path]
        length[-1] = match.offset
        start = np.cumsum(length) - length
        which, nth = expand(-(-length // self.page_size))
        pages = self._page_ids[self._first[path][which] + nth]
        offset = np.minimum((nth + 1) * self.page_size, length[which])
        ends = start[which] + offset
        fits = (offset % self.page_size == 0) | (ends == match.length)
        if most is not None:
            fits &= ends <= most
        if self._reach is not None:
            fits &= self._reach.goes_on(pages, ends)
        if not fits.any():
            return Match(ROOT, 0, 0)
        last = int(np.flatnonzero(fits)[-1])
        return Match(int(path[which[last]]), int(offset[last]), int(ends[last]))

    def _common(self, node: int, tokens: Int[np.ndarray, " tokens"], at: int) -> Iterator[tuple[int, int]]:
        """Yield the children whose first page the list has from `at` on, and how many tokens of the child it has."""
        children = self._children(node)
        length = self._length[children]
        size = np.minimum(length, self.page_size)
        fits = size <= len(tokens) - at
        children, size = children[fits], size[fits]
        yield from ((child, 0) for child in children[size == 0].tolist())
        children, size = children[size > 0], size[size > 0]
        if not len(children):
            return
        begin = tokens[at : at + self.page_size]
        same = self.tokens[self._page_ids[self._first[children]], : len(begin)] == begin
        same |= np.arange(len(begin)) >= size[:, None]
        for child in children[same.all(axis=1)].tolist():
            first, length = self._first[child], self._length[child]
            pages = self._page_ids[first : first - (-length // self.page_size)]
            yield child, common_prefix(self.tokens[pages].reshape(-1)[:length], tokens, at)

    def _children(self, node: int) -> Int[np.ndarray, " children"]:
        """Return the children of a node, or the roots."""
        if node in self._changed:
            return self._changed[node]
        low, high = np.searchsorted(self._sorted_parent, [node, node + 1])
        return self._by_parent[low:high]

    def _split(self, lower: int, offset: int) -> int:
        """Cut a node at a page boundary: a new one takes the tokens above and becomes its parent."""
        upper, above, pages = next(self._free), int(self._parent[lower]), offset // self.page_size
        self._parent[upper], self._parent[lower] = above, upper
        self._length[upper], self._page_count[upper], self._first[upper] = offset, pages, self._first[lower]
        self._length[lower] -= offset
        self._page_count[lower] -= pages
        self._first[lower] += pages
        siblings = self._children(above)
        self._changed[above] = np.where(siblings == lower, upper, siblings)
        self._changed[upper] = np.array([lower])
        return upper

    def _append(self, parent: int, run: Int[np.ndarray, " tokens"]) -> int:
        """Add a node with these tokens."""
        node, pages = next(self._free), -(-len(run) // self.page_size)
        if pages and not self.new_pages:
            self.tokens = np.concatenate([self.tokens, np.empty((self._room, self.page_size), self.tokens.dtype)])
        self._parent[node], self._length[node], self._page_count[node] = parent, len(run), pages
        self._first[node] = self._next_page + self.new_pages
        page = self.num_pages + self.new_pages
        self.tokens[page : page + pages].reshape(-1)[: len(run)] = run
        self.new_pages += pages
        self._changed[parent] = np.append(self._children(parent), node)
        return node
