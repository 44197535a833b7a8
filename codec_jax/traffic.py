"""How many KV tokens decoding reads, shared and unshared; counted from the forest, per layer and kv head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from codec_jax.forest import Forest
from codec_jax.plan import Plan


@dataclass(frozen=True)
class Traffic:
    """Tokens generated, and the KV tokens that attention read for them."""

    generated_tokens: int = 0
    kv_tokens_read: int = 0  # each node once per row tile
    kv_tokens_unshared: int = 0  # each request its own context

    def __add__(self, other: Traffic) -> Traffic:
        """Add up two stretches of decoding."""
        return Traffic(
            self.generated_tokens + other.generated_tokens,
            self.kv_tokens_read + other.kv_tokens_read,
            self.kv_tokens_unshared + other.kv_tokens_unshared,
        )


def count_decode(forest: Forest, plan: Plan, new_tokens: Int[np.ndarray, " B"]) -> Traffic:
    """Count what one-token steps read while request r appends new_tokens[r] tokens, from the first step on.

    A request that has stopped reads nothing in the unshared count; its nodes stay in the plan, and so in the shared
    one, until the last request has stopped.
    """
    steps = int(new_tokens.max(initial=0))
    tiles, active = _tiles_of_nodes(forest, plan), forest.active
    leaf, count = forest.leaf[active], new_tokens[active].astype(np.int64)
    # In step i = 1 .. steps, a leaf has grown by min(i, count) tokens.
    ramp = count * (count + 1) // 2
    grown = ramp + (steps - count) * count
    return Traffic(
        generated_tokens=int(count.sum()),
        kv_tokens_read=int(steps * (tiles * forest.length).sum() + (tiles[leaf] * grown).sum()),
        kv_tokens_unshared=int((count * forest.request_length[active] + ramp).sum()),
    )


def count_pass(forest: Forest, plan: Plan) -> Traffic:
    """Count what one pass over the forest as it is reads; it generates nothing."""
    return Traffic(
        kv_tokens_read=int((_tiles_of_nodes(forest, plan) * forest.length).sum()),
        kv_tokens_unshared=int(forest.request_length.sum(dtype=np.int64)),
    )


def _tiles_of_nodes(forest: Forest, plan: Plan) -> Int[np.ndarray, " nodes"]:
    """Count the row tiles that read each node."""
    rows = plan.query_tokens * plan.group
    lo, hi = forest.row_lo * rows, forest.row_hi * rows
    return np.where(hi > lo, (hi - 1) // plan.tile_rows - lo // plan.tile_rows + 1, 0).astype(np.int64)
