"""Heads of 512 numbers, keys and values, by the kernel for latents: values have pages, and shared memory, of their own.

    pages of block i+1 ─► keys [64, 512]                                 S = Q Kᵀ, by the scorer
                       ─► left [64, 256], right [64, 256] of the values  O += P V, by both
    weights of block i ─► [64, 64]                                       from the scorer to the follower

A tile of the query, keys and values of a block take 64 KiB each, so there is one stage of either: while a block's
scores are multiplied its values arrive, and during its softmax and values the next one's keys. As each ring has 64 KiB
on their way, memory has enough to do. There are several kv heads; a segment has one of them, as in `pac`.

    barrier     arrives, how often                               waits
    keys_full   the copy of each page, the preparer once         scorer
    keys_free   scorer, when it has the scores                   loader, before it fills the ring
    left_full   the copy of each page                            scorer, before it adds the values
    right_full  the copy of each page                            follower, as left_full

All other barriers are those of `latent_pipeline`. `keys_full` comes after `right_free` of the block before, which the
preparer waits for; so weights, mask and factor of a block may be written then.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.hopper.latent_pipeline import LatentPipeline, LatentSizes
from pallas_kernels.hopper.pac_pipeline import Ring
from pallas_kernels.packing import TILE_ROWS


def scratch(sizes: LatentSizes, tiled: tuple[Any, ...]) -> dict[str, Any]:
    """Describe shared memory and barriers beside those of the values."""
    return {
        "key_ring": plgpu.SMEM((sizes.stages, sizes.block, sizes.head_dim), sizes.dtype, transforms=tiled),
        "weight_ring": plgpu.SMEM((sizes.stages, TILE_ROWS, sizes.block), sizes.dtype, transforms=tiled),
        "keys_full": plgpu.Barrier(num_arrivals=sizes.pages_per_block + 1, num_barriers=sizes.stages),
        "keys_free": plgpu.Barrier(num_barriers=sizes.stages),
    }


class LongPipeline(LatentPipeline):
    """One thread block's view: halves are those of the values."""

    @property
    def rings(self) -> tuple[Ring, ...]:
        """Keys, and the halves of values."""
        refs = self.refs
        left, right = self.halves(refs.values)
        return Ring(refs.keys, refs.key_ring, refs.keys_full, refs.keys_free), left, right

    def stage(self, number: jax.Array) -> jax.Array:
        """Where in the rings block `number` of this thread block lies."""
        # At 0. Were that a constant, the compiler would keep the addresses of all parts of a block in registers.
        return number >> 31

    @property
    def keys_full(self) -> Any:
        """The barriers after which products of a block's keys may begin."""
        return self.refs.keys_full

    def keys(self, stage: jax.Array, part: int) -> Any:
        """Refer to columns 64 part to 64 part + 63 of a block's keys, [block, 64]."""
        return self.columns(self.refs.key_ring, stage, part)

    def release_keys(self, stage: jax.Array) -> None:
        """Give the keys of a block back to the loader."""
        plgpu.barrier_arrive(self.refs.keys_free.at[stage])

    def left_values(self, stage: jax.Array) -> Any:
        """Wait for columns 0 to 255 of a block's values, and refer to them, [block, 256]."""
        plgpu.barrier_wait(self.refs.left_full.at[stage])
        return super().left_values(stage)

    def right_values(self, stage: jax.Array) -> Any:
        """Wait for columns 256 to 511 of a block's values, and refer to them, [block, 256]."""
        plgpu.barrier_wait(self.refs.right_full.at[stage])
        return super().right_values(stage)

    def weights(self, stage: jax.Array) -> Any:
        """Refer to where a block's weights are passed on, [64, block]."""
        return self.refs.weight_ring.at[stage]
