"""Input and output of division: the blocks of all streams, and the segments that thread blocks run."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax.planning.cost import CostModel
from codec_jax.planning.estimate import Estimate

#: With one byte a number rows take a while to begin with a node: for each, so many blocks with a mask by row count as
#: masked by token. Beside wide segments, with which less is read at a time, it does not show: so it was measured.
_BLOCKS_OF_NODE = 7.0


class Work(NamedTuple):
    """The blocks of all streams, and who works on them."""

    block_ptr: Int[np.ndarray, " streams+1"]  # stream s has blocks [block_ptr[s], block_ptr[s + 1]), in each kv head
    unmasked: Int[np.ndarray, " streams"]  # how many of its first blocks need no mask
    wide: Bool[np.ndarray, " streams"]  # wide streams come first
    unique: float  # blocks of all streams, what several streams read counted once
    block_tokens: int
    num_kv_heads: int
    token_masked: float = 1.0  # share of the masked blocks that are masked by token
    masked_nodes: float = 0.0  # nodes in the masked blocks, for each of these; counted in each stream

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
        share = self.token_masked
        if model.is_one_byte and not self.wide.any():
            share = max(share, min(_BLOCKS_OF_NODE * self.masked_nodes, 1.0))
        return Estimate.of(model, self.block_tokens, blocks, self.unique, share)


class Schedule(NamedTuple):
    """Segments in the order in which thread blocks run them."""

    stream: Int[np.ndarray, " segments"]
    head: Int[np.ndarray, " segments"]
    begin: Int[np.ndarray, " segments"]  # blocks [begin, end) of all streams' blocks
    end: Int[np.ndarray, " segments"]
    cta_ptr: Int[np.ndarray, " num_ctas+1"]  # thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])
