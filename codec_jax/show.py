"""Views for people: a forest as a tree, and what each thread block of a plan has to do.

A forest of any size takes at most `MAX_LINES` lines: what is near a root, or a first child, goes first, and children
for which there is no room are counted in one line.
"""

from __future__ import annotations

import heapq

import jax
import numpy as np
from jaxtyping import Int

from codec_jax.forest import FREE, Forest
from codec_jax.forest.depth_first import depths
from codec_jax.planning import Plan
from codec_jax.planning.predict import exchange_bytes, loads
from codec_jax.traffic import pages_of_streams

MAX_LINES = 60
_MAX_RANGES = 4  # of request numbers in a line
_BARS, _BAR_WIDTH = 24, 30


def show(x: Forest | Plan) -> None:
    """Print a forest as a tree, or the load of the thread blocks of a plan; arrays on a device are fetched.

    A node's line has its tokens, its pages, how many requests read it, and which end there. Loads are the estimates by
    which the plan was balanced.

    Args:
      x: the forest or the plan.

    Raises TypeError for anything else.

    >>> show(Forest.from_sequences([[1, 2, 3], [1, 2, 4, 5]]))
    forest: 2 requests, 3 nodes; free slots: 0 requests, 21 nodes
    5 tokens in 3 pages of 16; without sharing 7 tokens, 1.40x
    └─ node 0: 2 tokens, 1 page, 2 readers
       ├─ node 1: 1 token, 1 page, 1 reader; request 0 ends here
       └─ node 2: 2 tokens, 1 page, 1 reader; request 1 ends here
    """
    if isinstance(x, Forest):
        print("\n".join(_forest_lines(jax.device_get(x))))
    elif isinstance(x, Plan):
        print("\n".join(_plan_lines(jax.device_get(x))))
    else:
        raise TypeError(f"x: expected a Forest or a Plan, got {type(x).__name__}")


# ---------------------------------------------------------------------- forests


def _forest_lines(forest: Forest) -> list[str]:
    parent, used = forest.parent, np.flatnonzero(forest.parent != FREE)
    # Readers in the order of rows, then nodes that nobody reads; roots are the children of node -1, which is the last.
    children: list[list[int]] = [[] for _ in range(len(parent) + 1)]
    for node in used[np.lexsort((used, forest.row_lo[used], forest.readers[used] == 0))].tolist():
        children[parent[node]].append(node)
    below = np.stack([parent != FREE, forest.length, forest.page_count], 1).astype(np.int64)
    for node in used[np.argsort(-depths(np.maximum(parent, -1))[used], kind="stable")].tolist():
        below[node] += below[children[node]].sum(0)

    nodes, tokens, pages = below[children[-1]].sum(0)
    active, total = int(forest.active.sum()), int(forest.request_length.sum(dtype=np.int64))
    lines = [
        f"forest: {_count(active, 'request')}, {_count(nodes, 'node')}; free slots: "
        f"{_count(forest.request_capacity - active, 'request')}, {_count(forest.node_capacity - nodes, 'node')}",
        f"{_count(tokens, 'token')} in {_count(pages, 'page')} of {forest.page_size}; "
        f"without sharing {total:,} tokens" + (f", {total / tokens:.2f}x" if tokens else ""),
    ]
    shown = _choose(children, MAX_LINES - len(lines))
    todo: list[tuple[str, bool, int, list[int]]] = []  # indent, last of its siblings, node, or -1 and what it hides

    def add_children(indent: str, node: int) -> None:
        of_node, count = children[node], shown[node]
        entries = [(child, list[int]()) for child in of_node[:count]]
        entries += [(-1, of_node[count:])] if count < len(of_node) else []
        todo.extend((indent, i == len(entries) - 1, *entry) for i, entry in reversed(list(enumerate(entries))))

    add_children("", -1)
    while todo:
        indent, last, node, hidden = todo.pop()
        text = _hidden_text(forest, hidden, below) if hidden else _node_text(forest, node)
        lines.append(f"{indent}{'└─' if last else '├─'} {text}")
        if not hidden:
            add_children(indent + ("   " if last else "│  "), node)
    return lines


def _choose(children: list[list[int]], room: int) -> dict[int, int]:
    """Choose how many children of each node are shown, by depth plus number among siblings: every branch gets lines."""
    shown = {-1: 0}
    room -= bool(children[-1])
    queue = [(0, 0, -1)]
    while queue:
        priority, order, node = heapq.heappop(queue)
        if shown[node] == len(children[node]):
            continue
        child = children[node][shown[node]]
        # A line for the child, and one for what is hidden below it; the last child takes the line of what is hidden
        # beside it.
        lines = 1 + bool(children[child]) - (shown[node] + 1 == len(children[node]))
        if lines > room:
            continue
        room -= lines
        shown[node] += 1
        shown[child] = 0
        heapq.heappush(queue, (priority + 1, order, node))
        heapq.heappush(queue, (priority + 1, len(shown), child))
    return shown


def _node_text(forest: Forest, node: int) -> str:
    """Say what a node holds, who reads it and who ends there."""
    ends = np.flatnonzero(forest.leaf == node)
    size = f"{_count(forest.length[node], 'token')}, {_count(forest.page_count[node], 'page')}"
    ending = f"; {_requests(ends)} end{'s' * (len(ends) == 1)} here" if len(ends) else ""
    return f"node {node}: {size}, {_count(forest.readers[node], 'reader')}{ending}"


def _hidden_text(forest: Forest, hidden: list[int], below: Int[np.ndarray, "nodes 3"]) -> str:
    """Say what nodes without a line hold, and all that is below them."""
    nodes, tokens, pages = below[hidden].sum(0)
    rows = [np.arange(forest.row_lo[node], forest.row_hi[node]) for node in hidden]
    requests = _requests(forest.request_of_row[np.concatenate(rows)])
    return f"⋮ {_count(nodes, 'more node')} below: {_count(tokens, 'token')}, {_count(pages, 'page')}, {requests}"


# ---------------------------------------------------------------------- plans


def _plan_lines(plan: Plan) -> list[str]:
    if plan.is_spread:
        most = [loads(plan.local(device)).max() for device in range(plan.devices)]
        slowest = int(np.argmax(most))
        return [
            f"plan for {plan.devices} devices: the longest load of each is {', '.join(f'{load:.1f}' for load in most)} "
            "microseconds",
            f"each sends {exchange_bytes(plan):,} bytes a call, of 2 bytes a number; device {slowest} is the slowest:",
            *_plan_lines(plan.local(slowest)),
        ]
    load, arrays, heads = loads(plan), plan.arrays, plan.heads
    segment = arrays.used_segments
    wide, blocks = segment.is_wide, segment.end - segment.begin
    counts = np.stack([np.ones(len(blocks)), wide * blocks, ~wide * blocks, segment.end - segment.first_masked], 1)
    counts = counts.astype(np.int64)
    by_cta = np.diff(np.pad(np.cumsum(counts, 0), ((1, 0), (0, 0)))[arrays.cta_ptr], axis=0)
    streams = np.unique(np.stack([segment.tile0, segment.tile1]), axis=1)
    wide_streams = int((streams[0] != streams[1]).sum())
    _, wide, narrow, with_mask = by_cta.sum(0)
    read, unique = _tokens_read(plan)
    mean = load.mean()
    lines = [
        f"plan: {heads.num_q_heads} q heads, {_count(heads.num_kv_heads, 'kv head')}, head size {heads.head_dim}, "
        f"{_count(arrays.query_tokens, 'query token')}, {_count(arrays.num_tiles, 'tile')} of {arrays.tile_rows} rows, "
        f"blocks of {arrays.block_tokens} tokens" + _window_text(plan),
        f"for each kv head: {_count(wide_streams, 'wide stream')}, {streams.shape[1] - wide_streams:,} narrow; "
        f"{read:,} KV tokens read, {unique:,} unique" + (f", {read / unique:.2f}x" if unique else ""),
        f"in all: {_count(len(blocks), 'segment')}, {_count(int(arrays.merge_ptr[-1]), 'partial')}, "
        f"{wide:,} wide and {narrow:,} narrow blocks; {with_mask:,} of both are masked",
        f"load of {_count(len(load), 'thread block')}: mean {mean:.1f}, min {load.min():.1f}, max {load.max():.1f}"
        + (f", {load.max() / mean:.3f}x the mean" if mean else "")
        + ", in microseconds",
        "",
        f"{'thread blocks':<13}  {'mean █, max ░':<{_BAR_WIDTH}}  {'min':>7} {'mean':>7} {'max':>7}"
        f"  {'segments':>8} {'wide':>7} {'narrow':>7} {'masked':>7}",
    ]
    size = -(-len(load) // _BARS)
    for first in range(0, len(load), size):
        group, sums = load[first : first + size], by_cta[first : first + size].sum(0)
        full, longest = (round(_BAR_WIDTH * value / max(load.max(), 1e-9)) for value in (group.mean(), group.max()))
        name = _ranges(np.arange(first, first + len(group)))
        lines.append(
            f"{name:<13}  {'█' * full + '░' * (longest - full):<{_BAR_WIDTH}}  "
            f"{group.min():7.1f} {group.mean():7.1f} {group.max():7.1f}  "
            f"{sums[0]:8,} {sums[1]:7,} {sums[2]:7,} {sums[3]:7,}"
        )
    return lines


def _window_text(plan: Plan) -> str:
    window = plan.arrays.window
    return "" if window is None else f", a{' chunked' * window.chunked} window of {_count(window.tokens, 'token')}"


def _tokens_read(plan: Plan) -> tuple[int, int]:
    """Count the tokens of all streams, at the lengths planned for, and those of them that are different."""
    page = np.stack(pages_of_streams(plan), 1)

    def tokens(page: Int[np.ndarray, "pages 2"]) -> int:
        node, token = page.T
        return int(np.clip(plan.guard.min_length[node] - token, 0, plan.arrays.page_tokens).sum(dtype=np.int64))

    return tokens(page), tokens(np.unique(page, axis=0))


# ---------------------------------------------------------------------- words


def _count(number: int | np.integer, name: str) -> str:
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def _requests(requests: Int[np.ndarray, " n"]) -> str:
    """Name requests, or count them where they are many and scattered."""
    if not len(requests):
        return "no requests"
    ordered = np.sort(requests)
    if 1 + np.count_nonzero(np.diff(ordered) != 1) > _MAX_RANGES:
        return f"{len(requests):,} requests"
    return f"request{'s' * (len(requests) > 1)} {_ranges(ordered)}"


def _ranges(ordered: Int[np.ndarray, " n"]) -> str:
    """Write ascending numbers, consecutive ones as first-last."""
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
