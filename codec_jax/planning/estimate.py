"""What blocks and segments cost in one plan: between the two times of the cost model, by all that thread blocks do.

A plan has one number for how much of the wait for memory shows, `Estimate.stall`. Source: CoDec, section 5, C_est (doi
10.1145/3802028).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from codec_jax.planning.cost import CostModel

#: Share of the wait for memory that shows however much bandwidth others leave: a thread block has two blocks in flight,
#: too few to hide all of it. This and the next one are those with which calls took least; less of both would predict
#: better what a call takes where arithmetic decides.
_MIN_STALL = 0.5
#: Time of a wide block from memory over that of the table. There all thread blocks read alike; beside some that have
#: narrow blocks, those with wide ones get less: they keep what they have read for longer, and ask for less.
_WIDE_WAIT = 1.25
#: How far that goes, over the time of a narrow block. Both have the same bytes, so that what the table has beyond is
#: arithmetic, as with heads of 64 numbers, and does not grow.
_MOST_WAIT = 1.3

_BOTH = np.asarray([False, True])  # narrow, wide


class Estimate(NamedTuple):
    """Costs of the blocks and segments of one plan."""

    model: CostModel
    block_tokens: int
    stall: float = 1.0  # share of the wait for memory that shows: at 1 each thread block reads its own
    token_masked: float = 1.0  # share of the masked blocks that cost what a mask by token does; other masks are free
    arithmetic: float = 0.0  # time of the arithmetic of all blocks over that of reading them

    @classmethod
    def of(
        cls, model: CostModel, block_tokens: int, blocks: Float[np.ndarray, "2 2"], unique: float, token_masked: float
    ) -> Estimate:
        """Estimate how long blocks stall when so many are worked off together: [narrow or wide, unmasked or masked].

        All of them take as long as memory or as arithmetic, whichever takes longer, so what memory needs beyond the
        arithmetic is waiting. `unique` of the blocks come from memory, the others from the L2 cache.
        """
        fast, slow = (cls(model, block_tokens, stall, token_masked).block_us for stall in (0.0, 1.0))
        reading = unique * slow[0, 0]
        computing = float((blocks * fast).sum())
        longest = float((blocks * (slow - fast)).sum())
        stall = min(max((reading - computing) / longest, _MIN_STALL), 1.0) if longest > 0 else 1.0
        return cls(model, block_tokens, stall, token_masked, computing / reading if reading > 0 else 0.0)

    @property
    def mask_slowdown(self) -> float:
        """Time of a cached masked block over that of another."""
        return 1.0 + (self.model.masked - 1.0) * self.token_masked

    @property
    def block_us(self) -> Float[np.ndarray, "2 2"]:
        """Time of one of many blocks: [narrow or wide, unmasked or masked]."""
        memory, cached = self.model.token_us.T[:, :, None] * self.block_tokens  # [narrow or wide, 1]
        return self._waiting(_BOTH[:, None], memory[0], memory, cached * np.asarray([1.0, self.mask_slowdown]))

    def _waiting(self, wide: Any, narrow: Any, memory: Any, cached: Any) -> Any:
        """Return what tokens take by their times from memory, of one tile and of theirs, and from the L2 cache."""
        slowed = np.maximum(memory, np.minimum(_WIDE_WAIT * memory, _MOST_WAIT * narrow))
        memory = np.where(wide, slowed, memory)
        return cached + self.stall * np.maximum(memory - cached, 0.0)

    def segment_us(self, wide: Any) -> Any:
        """Return what a segment costs beyond its blocks."""
        return np.asarray(self.model.segment_us)[np.asarray(wide, int)]

    @property
    def opening_us(self) -> Float[np.ndarray, " 2"]:
        """Cost of a segment, narrow or wide, beyond blocks that cost what one of many does: the first take longer."""
        model, shortest = self.model, self.model.tokens[0]
        memory, cached = (model.kv_us(_BOTH, shortest, cached=cached) for cached in (False, True))
        first = self._waiting(_BOTH, memory[0], memory, cached)
        memory, cached = model.token_us.T * shortest
        later = self._waiting(_BOTH, memory[0], memory, cached)
        return self.segment_us(_BOTH) + np.maximum(first - later, 0.0)

    def segments(
        self, wide: Bool[np.ndarray, " n"], unmasked: Int[np.ndarray, " n"], masked: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """Return the cost of each segment from its kind and its blocks, in microseconds."""
        blocks, model = unmasked + masked, self.model
        tokens = blocks * self.block_tokens
        narrow, memory = (model.kv_us(tiles, tokens, cached=False) for tiles in (False, wide))
        cached = model.kv_us(wide, tokens, cached=True)
        cached = cached * (1 + (self.mask_slowdown - 1) * masked / np.maximum(blocks, 1))
        return self.segment_us(wide) + self._waiting(wide, narrow, memory, cached)
