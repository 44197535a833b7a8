"""Things that the warpgroups of PAC over latents share: the halves of a block, its sizes, and the barriers.

    barrier          one for each   arrives, how often                         waits
    query_together   query buffer   the copy of a tile in one piece,           scorer, before the segment's scores;
                                    once for each 64 columns                   the one of the two that the tile came by
    query_scattered  query buffer   the copies of a tile unit by unit,         as query_together
                                    once for each unit and 64 columns
    query_free       query buffer   scorer, when the segment is done           preparer, before it fills the buffer
    left_full        stage          the copy of each page, the preparer once   scorer
                                    (the mask is in place)
    right_full       stage          the copy of each page                      scorer, between its products
    left_free        stage          scorer, when it has added the values       loader, before it fills the stage
    right_free       stage          follower, as left_free                     loader; preparer, for the mask's stage
    weights_full     stage          scorer: weights and factor of the block    follower
    end_full         1              scorer: the factor of a segment's end      follower
    end_free         1              follower, once to begin with, and when     scorer, before it writes it
                                    it has read it

The follower never waits for `right_full`: the scorer has, before it passes on the weights of the block. Weights and
factor of a block are free with the stage.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper.pac_pipeline import Pipeline, Ring, Sizes
from pallas_kernels.plan_format import Segment

#: Columns of the left half of a block, and of the values in either half.
HALF = 256


@dataclass(frozen=True)
class LatentSizes(Sizes):
    """All that is known when the kernel is compiled. `head_dim` counts rotated keys, wherever their pages are."""

    @property
    def is_one_byte(self) -> bool:
        """Whether latents have one byte a number, which products do not take."""
        return jnp.dtype(self.kv_dtype).itemsize == 1

    @property
    def has_values_apart(self) -> bool:
        """Whether values have pages of their own, as in `long_heads`; of latents they are shorter than keys."""
        return self.value_head_dim == self.head_dim

    @property
    def acc_columns(self) -> int:
        """Columns of one accumulator: no instruction gets more than the 128 registers that threads begin with."""
        return 128

    @property
    def query_buffers(self) -> int:
        """Tiles of the query in shared memory: there is room for one."""
        return 1


class LatentPipeline(Pipeline):
    """One thread block's view, as of any PAC. Segments are narrow, so that every block has one set of barriers."""

    sizes: LatentSizes

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The halves of blocks."""
        return self.halves(self.refs.latents)

    def halves(self, tokens: Any) -> tuple[Ring, Ring]:
        """Return the rings of columns 0 to 255 of some pages, and of all others."""
        refs, columns = self.refs, self.sizes.head_dim
        left = Ring(tokens.at[:, :, pl.ds(0, HALF)], refs.left_ring, refs.left_full, refs.left_free)
        right = tokens.at[:, :, pl.ds(HALF, columns - HALF)]
        return left, Ring(right, refs.right_ring, refs.right_full, refs.right_free)

    def full(self, barrier: Any, segment: Segment, number: jax.Array) -> Any:
        """Pick the full barrier of block `number`."""
        del segment
        return barrier.at[self.stage(number)]

    @property
    def keys_full(self) -> Any:
        """The barriers after which products of a block's keys may begin."""
        return self.refs.left_full

    def keys(self, stage: jax.Array, part: int) -> Any:
        """Refer to columns 64 part to 64 part + 63 of a block's keys, [block, 64].

        The left half of the block is there. The right half is waited for while products of the left one go on.
        """
        left_parts = HALF // 64
        if part == left_parts:
            plgpu.barrier_wait(self.refs.right_full.at[stage])
        ring, at = (self.refs.left_ring, part) if part < left_parts else (self.refs.right_ring, part - left_parts)
        return self.columns(ring, stage, at)

    def columns(self, ring: Any, stage: jax.Array, part: int) -> Any:
        """Refer to 64 columns of a block, [block, 64]."""
        return ring.at[stage].at[:, pl.ds(part * 64, 64)]

    def release_keys(self, stage: jax.Array) -> None:
        """Nothing goes back when a block's scores are there: its keys are values as well."""

    def left_values(self, stage: jax.Array) -> Any:
        """Refer to columns 0 to 255 of a block's values, [block, 256]."""
        return self.refs.left_ring.at[stage]

    def right_values(self, stage: jax.Array) -> Any:
        """Refer to columns 256 to 511 of a block's values, [block, 256]."""
        return self.refs.right_ring.at[stage, :, pl.ds(0, HALF)]

    def weights(self, stage: jax.Array) -> Any:
        """Refer to where a block's weights are passed on, [64, block]: its last columns, which only the scores need."""
        return self.refs.right_ring.at[stage, :, pl.ds(HALF, self.sizes.block)]
