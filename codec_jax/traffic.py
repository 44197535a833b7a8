"""How many KV tokens decoding reads, shared and unshared; counted from forest and plan, per layer and kv head."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

import numpy as np
from jaxtyping import Int

from codec_jax.forest import Forest
from codec_jax.planning import Plan
from pallas_kernels.plan_format import Page


@dataclass(frozen=True)
class Traffic:
    """Tokens generated, and the KV tokens that attention read for them."""

    generated_tokens: int = 0
    kv_tokens_read: int = 0  # each node once per stream: per row tile, or pair of tiles, that reads it
    kv_tokens_unshared: int = 0  # each request its own context, as far as its window reaches

    def __add__(self, other: Traffic) -> Traffic:
        """Add up two spans of decoding."""
        return Traffic(*map(operator.add, astuple(self), astuple(other)))


def count_decode(forest: Forest, plan: Plan, new_tokens: Int[np.ndarray, " B"]) -> Traffic:
    """Count what one-token steps read while request r appends new_tokens[r] tokens, from the first step on.

    A request that has stopped reads nothing in the unshared count; its nodes stay in the plan, and so in the shared
    one, until the last request has stopped.
    """
    steps = int(new_tokens.max(initial=0))
    node, token = pages_of_streams(plan)
    # Every stream that reads a leaf reads the page that it grows in; a window may hide the first ones.
    last = np.maximum(forest.length[node] - 1, 0) // plan.arrays.page_tokens * plan.arrays.page_tokens
    streams = np.bincount(node[token == last], minlength=forest.node_capacity)
    active = forest.active
    leaf, count = forest.leaf[active], new_tokens[active].astype(np.int64)
    # In step i = 1 .. steps, a leaf has grown by min(i, count) tokens.
    ramp = count * (count + 1) // 2
    grown = ramp + (steps - count) * count
    step = np.arange(steps)
    seen = _count_seen(plan, forest.request_length[active, None] + step)
    return Traffic(
        generated_tokens=int(count.sum()),
        kv_tokens_read=steps * _count_listed(forest, plan) + int((streams[leaf] * grown).sum()),
        kv_tokens_unshared=int(seen[step < count[:, None]].sum(dtype=np.int64)),
    )


def count_pass(forest: Forest, plan: Plan) -> Traffic:
    """Count what one pass over the forest as it is reads; it generates nothing.

    Pages that no query token of a tile may see, yet or any more, are not in the tile's stream.
    """
    tokens = plan.arrays.query_tokens
    seen = _count_seen(plan, forest.positions(tokens)[:, 0]) + tokens - 1
    return Traffic(
        kv_tokens_read=_count_listed(forest, plan),
        kv_tokens_unshared=int(np.minimum(seen, forest.request_length).sum(dtype=np.int64)),
    )


def _count_listed(forest: Forest, plan: Plan) -> int:
    """Count the tokens of the pages of all streams."""
    node, token = pages_of_streams(plan)
    return int(np.clip(forest.length[node] - token, 0, plan.arrays.page_tokens).sum(dtype=np.int64))


def _count_seen(plan: Plan, position: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Count the tokens that a query token at a position sees, itself among them."""
    window = plan.arrays.window
    return position + 1 - (0 if window is None else np.maximum(window.first_position(position), 0))


def pages_of_streams(plan: Plan) -> tuple[Int[np.ndarray, " pages"], Int[np.ndarray, " pages"]]:
    """Return the node of each page of each stream, and the index within the node of its first token."""
    page = Page(*plan.arrays.block_pages.reshape(-1, len(Page._fields)).T)
    return page.node[page.readers > 0], page.token[page.readers > 0]
