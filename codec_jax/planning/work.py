"""Input and output of division: the blocks of all streams, and the segments that thread blocks run."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax.planning.cost import CostModel
from codec_jax.planning.estimate import Estimate


class Work(NamedTuple):
    """The blocks of all streams, and who works on them."""

    block_ptr: Int[np.ndarray, " streams+1"]  # stream s has blocks [block_ptr[s], block_ptr[s + 1]), in each kv head
    unmasked: Int[np.ndarray, " streams"]  # how many of its first blocks need no mask
    wide: Bool[np.ndarray, " streams"]  # wide streams come first
    unique: float  # blocks of all streams, what several streams read counted once
    block_tokens: int
    num_kv_heads: int
    token_masked: float = 1.0  # share of the masked blocks that are masked by token

    @property
    def blocks(self) -> Int[np.ndarray, " streams"]:
        """Blocks of each stream."""
        return np.diff(self.block_ptr)

    @property
    def first_masked(self) -> Int[np.ndarray, " streams"]:
        """The first block of each stream that needs a mask."""
        return self.block_ptr[:-1] + self.unmasked

    def estimate(self, model: CostModel) -> Estimate:
        """Return what blocks and segments cost beside each other."""
        kinds = (self.unmasked, self.blocks - self.unmasked)
        blocks = np.array([[kind[which].sum() for kind in kinds] for which in (~self.wide, self.wide)], float)
        # With one byte a number arithmetic decides, and masks by row cost something, too.
        share = 1.0 if model.is_one_byte else self.token_masked
        return Estimate.of(model, self.block_tokens, blocks, self.unique, share)


class Schedule(NamedTuple):
    """Segments in the order in which thread blocks run them."""

    stream: Int[np.ndarray, " segments"]
    head: Int[np.ndarray, " segments"]
    begin: Int[np.ndarray, " segments"]  # blocks [begin, end) of all streams' blocks
    end: Int[np.ndarray, " segments"]
    cta_ptr: Int[np.ndarray, " num_ctas+1"]  # thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])
