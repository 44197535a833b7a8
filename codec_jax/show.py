"""Views for people: a forest as a tree, and what each thread block of a plan has to do.

A forest of any size takes at most `MOST_LINES` lines. What has no line of its own is counted in one:

    chain        nodes without branches share a line
    like         siblings whose subtrees look the same follow the first of them in one line
    more below   children for which there is no room; what is near a root, or a first child, goes first
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from codec_jax.forest import Forest
from codec_jax.order import FREE, depths
from codec_jax.plan import Plan
from codec_jax.schedule import loads
from pallas_kernels.columns import Page, Segment

MOST_LINES = 60
_LEAST_CHAIN = 4  # nodes that share a line
_LEAST_ALIKE = 3  # siblings of which one stands for all
_MOST_RANGES = 4  # of request numbers in a line
_BARS, _BAR_WIDTH = 24, 30


def show(x: Forest | Plan) -> None:
    """Print a forest as a tree, or the load of the thread blocks of a plan; arrays on a device are fetched.

    A node's line has its tokens, its pages, how many requests read it, and which end there. Loads are the estimates by
    which the plan was balanced. Raises TypeError for anything else.
    """
    if isinstance(x, Forest):
        print("\n".join(_forest_lines(jax.device_get(x))))
    elif isinstance(x, Plan):
        print("\n".join(_plan_lines(jax.device_get(x))))
    else:
        raise TypeError(f"x: expected a Forest or a Plan, got {type(x).__name__}")


# ---------------------------------------------------------------------- forests


class _Item(NamedTuple):
    """What has a line: a chain of one node or more, and the siblings that it stands for."""

    chain: list[int]
    alike: list[int]  # the first node of each


class _Tree:
    """A forest in lists: children, what lies below each node, and which nodes look the same."""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        parent = forest.parent
        depth = depths(np.maximum(parent, -1))
        used = np.flatnonzero(parent != FREE)
        self.children: list[list[int]] = [[] for _ in parent]
        self.roots: list[int] = []
        # Readers in rows order, then nodes that nobody reads.
        for node in used[np.lexsort((used, forest.row_lo[used], forest.row_hi[used] == forest.row_lo[used]))].tolist():
            (self.children[parent[node]] if parent[node] >= 0 else self.roots).append(node)
        self.ending = np.bincount(forest.leaf[forest.leaf >= 0], minlength=len(parent)).tolist()
        self.below = np.stack([parent != FREE, forest.length, forest.page_count], 1).astype(np.int64)
        self.look, looks = [0] * len(parent), dict[tuple, int]()
        for node in used[np.argsort(-depth[used], kind="stable")].tolist():
            children = self.children[node]
            self.below[node] += self.below[children].sum(0)
            look = (forest.length[node], forest.page_count[node], self.ending[node])
            self.look[node] = looks.setdefault((*look, *sorted(self.look[child] for child in children)), len(looks))

    def items(self, siblings: list[int]) -> list[_Item]:
        """Return what stands for the siblings, each in the place of the first it stands for."""
        groups: dict[int, list[int]] = {}
        for node in siblings:
            groups.setdefault(self.look[node], []).append(node)
        items = []
        for node in siblings:
            first, *others = groups[self.look[node]]
            if len(others) + 1 < _LEAST_ALIKE:
                items.append(_Item(self._chain(node), []))
            elif node == first:
                items.append(_Item(self._chain(node), others))
        return items

    def _chain(self, node: int) -> list[int]:
        """Return the nodes from this one down to the first at which a request ends or the tree branches."""
        chain = [node]
        while len(self.children[chain[-1]]) == 1 and not self.ending[chain[-1]]:
            chain += self.children[chain[-1]]
        return chain if len(chain) >= _LEAST_CHAIN else [node]

    def text(self, item: _Item) -> str:
        """Say what the nodes of a line hold, who reads them and who ends there."""
        forest, chain = self.forest, item.chain
        readers = int(forest.row_hi[chain[0]] - forest.row_lo[chain[0]])
        ends = np.flatnonzero(forest.leaf == chain[-1])
        name = f"node {chain[0]}"
        if len(chain) > 1:
            name = f"nodes {chain[0]} to {chain[-1]}, a chain of {len(chain):,}"
        size = _size(forest.length[chain], forest.page_count[chain])
        parts = [f"{name}: {size}", _count(readers, "reader")]
        return ", ".join(parts) + (f"; {_requests(ends)} end{'s' * (len(ends) == 1)} here" if len(ends) else "")

    def text_of_alike(self, item: _Item) -> str:
        """Say what a line stands for beside its own."""
        inside = self.below[item.alike].sum(0)
        trees = f" with {_count(inside[0], 'node')}" if inside[0] > len(item.alike) else ""
        return f"⋮ {len(item.alike):,} like node {item.chain[0]}{trees}: {self._sum_below(item.alike)}"

    def text_of_hidden(self, items: Iterable[_Item]) -> str:
        """Say what has no line."""
        nodes = [node for item in items for node in (item.chain[0], *item.alike)]
        return f"⋮ {_count(self.below[nodes, 0].sum(), 'more node')} below: {self._sum_below(nodes)}"

    def _sum_below(self, nodes: list[int]) -> str:
        forest = self.forest
        _, tokens, pages = self.below[nodes].sum(0)
        rows = [np.arange(forest.row_lo[node], forest.row_hi[node]) for node in nodes]
        requests = forest.request_of_row[np.concatenate(rows)]
        return f"{_count(tokens, 'token')}, {_count(pages, 'page')}, {_requests(requests)}"


def _forest_lines(forest: Forest) -> list[str]:
    tree = _Tree(forest)
    nodes, tokens, pages = tree.below[tree.roots].sum(0)
    active, total = int(forest.active.sum()), int(forest.request_length.sum(dtype=np.int64))
    header = [
        f"forest: {_count(active, 'request')}, {_count(nodes, 'node')}; free slots: "
        f"{_count(forest.request_capacity - active, 'request')}, {_count(forest.node_capacity - nodes, 'node')}",
        f"{_count(tokens, 'token')} in {_count(pages, 'page')} of {forest.page_size}; "
        f"without sharing {total:,} tokens" + (f", {total / tokens:.2f}x" if tokens else ""),
    ]
    # Which children of a line are shown: a prefix of its items, chosen by depth plus number among siblings, so that a
    # few lines are left for every branch of what is shown.
    below = {-1: tree.items(tree.roots)}  # items under the line whose chain ends at a node
    shown = {-1: 0}
    room = MOST_LINES - len(header) - bool(below[-1])
    queue = [(0, 0, -1)]
    while queue:
        priority, order, node = heapq.heappop(queue)
        if shown[node] == len(below[node]):
            continue
        item = below[node][shown[node]]
        end = item.chain[-1]
        children = tree.items(tree.children[end])
        # A line for the item, one for those like it, one for what is hidden below it; the last item takes the line
        # of what is hidden beside it.
        lines = 1 + bool(item.alike) + bool(children) - (shown[node] + 1 == len(below[node]))
        if lines > room:
            continue
        room -= lines
        shown[node] += 1
        below[end], shown[end] = children, 0
        heapq.heappush(queue, (priority + 1, order, node))
        heapq.heappush(queue, (priority + 1, len(below), end))
    return header + _drawn(tree, below, shown)


def _drawn(tree: _Tree, below: dict[int, list[_Item]], shown: dict[int, int]) -> list[str]:
    """Draw the items that are shown, depth first, and count the others."""
    lines: list[str] = []
    todo: list[tuple[str, bool, str, int | None]] = [("", False, "", -1)]  # indent, last of its siblings, text, end
    while todo:
        indent, last, text, end = todo.pop()
        if text:
            lines.append(f"{indent}{'└─' if last else '├─'} {text}")
            indent += "   " if last else "│  "
        if end is None:
            continue
        items, count = below[end], shown[end]
        entries: list[tuple[str, int | None]] = []
        for item in items[:count]:
            entries.append((tree.text(item), item.chain[-1]))
            if item.alike:
                entries.append((tree.text_of_alike(item), None))
        if count < len(items):
            entries.append((tree.text_of_hidden(items[count:]), None))
        todo += [(indent, i == len(entries) - 1, *entry) for i, entry in enumerate(entries)][::-1]
    return lines


# ---------------------------------------------------------------------- plans


def _plan_lines(plan: Plan) -> list[str]:
    load, cta_ptr = loads(plan), plan.cta_ptr
    segments = plan.segments[: cta_ptr[-1]]
    segment = Segment(*segments.T)
    wide, blocks = segment.is_wide, segment.hi - segment.lo
    counts = np.stack([np.ones(len(blocks)), wide * blocks, ~wide * blocks, segment.hi - segment.masked], 1)
    counts = counts.astype(np.int64)
    by_cta = np.diff(np.pad(np.cumsum(counts, 0), ((1, 0), (0, 0)))[cta_ptr], axis=0)
    streams = np.unique(np.stack([segment.tile, segment.other_tile]), axis=1)
    wide_streams = int((streams[0] != streams[1]).sum())
    _, wide, narrow, with_mask = by_cta.sum(0)
    read, unique = _tokens_read(plan)
    mean = load.mean()
    lines = [
        f"plan: {plan.num_q_heads} q heads, {_count(plan.num_kv_heads, 'kv head')}, head size {plan.head_dim}, "
        f"{_count(plan.query_tokens, 'query token')}, {_count(plan.num_tiles, 'tile')} of {plan.tile_rows} rows, "
        f"blocks of {plan.block_tokens} tokens",
        f"for each kv head: {_count(wide_streams, 'wide stream')}, {streams.shape[1] - wide_streams:,} narrow; "
        f"{read:,} KV tokens read, {unique:,} unique" + (f", {read / unique:.2f}x" if unique else ""),
        f"in all: {_count(len(segments), 'segment')}, {_count(int(plan.merge_ptr[-1]), 'partial')}, "
        f"{wide:,} wide and {narrow:,} narrow blocks; {with_mask:,} of both are masked",
        f"load of {_count(len(load), 'thread block')}: mean {mean:.1f}, least {load.min():.1f}, most {load.max():.1f}"
        + (f", {load.max() / mean:.3f}x the mean" if mean else "")
        + ", in microseconds",
        "",
        f"{'thread blocks':<13}  {'mean █, most ░':<{_BAR_WIDTH}}  {'least':>7} {'mean':>7} {'most':>7}"
        f"  {'segments':>8} {'wide':>7} {'narrow':>7} {'masked':>7}",
    ]
    size = -(-len(load) // _BARS)
    for first in range(0, len(load), size):
        group, sums = load[first : first + size], by_cta[first : first + size].sum(0)
        full, most = (round(_BAR_WIDTH * value / max(load.max(), 1e-9)) for value in (group.mean(), group.max()))
        name = _ranges(np.arange(first, first + len(group)))
        lines.append(
            f"{name:<13}  {'█' * full + '░' * (most - full):<{_BAR_WIDTH}}  "
            f"{group.min():7.1f} {group.mean():7.1f} {group.max():7.1f}  "
            f"{sums[0]:8,} {sums[1]:7,} {sums[2]:7,} {sums[3]:7,}"
        )
    return lines


def _tokens_read(plan: Plan) -> tuple[int, int]:
    """Count the tokens of all streams, at the lengths planned for, and those of them that are different."""
    pages = Page(*plan.pages.reshape(-1, 4).T)
    page = np.stack([pages.node, pages.token], 1)[pages.readers > 0]

    def tokens(page: Int[np.ndarray, "pages 2"]) -> int:
        node, token = page.T
        return int(np.clip(plan.least_length[node] - token, 0, plan.slot_tokens).sum(dtype=np.int64))

    return tokens(page), tokens(np.unique(page, axis=0))


# ---------------------------------------------------------------------- words


def _count(number: int | np.integer, name: str) -> str:
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def _size(length: Int[np.ndarray, " nodes"], page_count: Int[np.ndarray, " nodes"]) -> str:
    return f"{_count(int(length.sum(dtype=np.int64)), 'token')}, {_count(int(page_count.sum()), 'page')}"


def _requests(requests: Int[np.ndarray, " n"]) -> str:
    """Name requests, or count them where they are many and scattered."""
    if not len(requests):
        return "no requests"
    ordered = np.sort(requests)
    if 1 + np.count_nonzero(np.diff(ordered) != 1) > _MOST_RANGES:
        return f"{len(requests):,} requests"
    return f"request{'s' * (len(requests) > 1)} {_ranges(ordered)}"


def _ranges(ordered: Int[np.ndarray, " n"]) -> str:
    """Write ascending numbers, consecutive ones as first-last."""
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
