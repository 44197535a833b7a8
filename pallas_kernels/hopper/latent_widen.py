"""Latents of one byte a number, made into the float16 that products take: by the warpgroup that prepares.

    pac_load     narrow [block, 512] of 8 bits, scales [block, 4], rotated keys [block, 64] ─► shared memory, by TMA
    _widen       narrow ─► registers ─► times scale ─► left [block, 256], right [block, 256]
    score        weights, where the rotated keys were, when the scores are there

A block of 16 bits is 72 KiB with its rotated keys, so two of them and a tile of the query leave no room for what is yet
to be widened. So a narrow block lies where its own right half will be: 16 rows take 8 KiB in either form, the same, and
are one warp's. While it is on its way, the computing warpgroups have the other stage. The left half is widened first;
of the right one all numbers are in registers before any is stored.

A number of 8 bits times 2^-8 is one of float16's. Its scale times 2^8 is rounded to float16, and so is their product:
two roundings, less together than the one of bfloat16. Scales are bounded so that products are finite, for what no
request reads may be of any size. Weights are float16 as well; rotated keys, and their part of the query, stay bfloat16.

    barrier      one for each   arrives, how often                              waits
    narrow_full  stage          the copy of each page, for each of the three    preparer, before it widens
    left_full    stage          preparer: mask and left half are there          scorer
    right_full   stage          preparer: the right half is there               scorer, between its products
    left_free    stage          scorer, when it has added the values            preparer, before it fills mask and half
    right_free   stage          follower, as left_free                          loader, before it fills the stage

All other barriers are those of `latent_pipeline`.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.hopper import tensor_core
from pallas_kernels.hopper.latent_pipeline import HALF, LatentPipeline, LatentSizes
from pallas_kernels.hopper.pac_pipeline import Ring
from pallas_kernels.hopper.widen import WIDE
from pallas_kernels.plan_format import Segment
from pallas_kernels.shared_memory import swizzled

#: Numbers of a latent that have a scale of their own.
SCALED_TOGETHER = 128
#: What rotated keys are stored in, beside latents of one byte a number.
ROTATED = jnp.bfloat16
#: How threads hold the scales of a block: all of the rows whose numbers they convert, [64, 4].
_SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(2), plgpu.Replicated(2)),
    vector_dim=-1,
)
#: Of scales; 2^-8 of the largest number of 8 bits is 1.75.
_SHIFT = 2.0**8
_LARGEST_SCALE = 37_408.0  # a float16; 1.75 times this is one, too


def joined_query(query: jax.Array) -> jax.Array:
    """Return a query [..., 576] as the kernel reads it: float16, and in the last 64 of these the bits of bfloat16."""
    latent, rotated = jnp.split(query, [2 * HALF], axis=-1)
    return jnp.concatenate([latent.astype(WIDE), lax.bitcast_convert_type(rotated.astype(ROTATED), WIDE)], axis=-1)


def scratch(sizes: LatentSizes, tiled: tuple[Any, ...]) -> dict[str, Any]:
    """Describe shared memory and barriers in the place of the right ring."""

    def ring(columns: int, dtype: Any, transforms: tuple[Any, ...] = tiled) -> Any:
        return plgpu.SMEM((sizes.stages, sizes.block, columns), dtype, transforms=transforms)

    narrow = ring(2 * HALF, sizes.kv_dtype, swizzled(sizes.kv_dtype, 64))
    rotated = ring(sizes.head_dim - sizes.value_head_dim, ROTATED)
    return {
        "right_and_narrow": tensor_core.in_turn(ring(HALF, sizes.dtype), narrow),
        "rotated_and_weights": tensor_core.in_turn(rotated, ring(sizes.block, sizes.dtype)),
        "scale_ring": ring(2 * HALF // SCALED_TOGETHER, jnp.float32, ()),
        "narrow_full": plgpu.Barrier(num_arrivals=3 * sizes.pages_per_block, num_barriers=sizes.stages),
    }


class OneBytePipeline(LatentPipeline):
    """One thread block's view. `narrow_full` says that a block may be widened, barriers of halves that it has been."""

    def __init__(self, refs: Any, sizes: LatentSizes) -> None:
        """Name what has a place in turn."""
        refs.right_ring, refs.narrow_ring = refs.right_and_narrow
        refs.rotated_ring, refs.weight_ring = refs.rotated_and_weights
        super().__init__(refs, sizes)

    @property
    def rings(self) -> tuple[Ring, ...]:
        """What a block is copied as."""
        refs = self.refs
        narrow = Ring(refs.latents, refs.narrow_ring, refs.narrow_full, refs.right_free)
        scales = Ring(refs.scales, refs.scale_ring, refs.narrow_full, None)
        return narrow, scales, Ring(refs.rotated, refs.rotated_ring, refs.narrow_full, None)

    @property
    def mask_free(self) -> Any:
        """The barriers after which mask and left half of a stage may be written."""
        return self.refs.left_free

    def give_mask(self, segment: Segment, number: jax.Array) -> None:
        """Widen block `number`, whose mask is in place."""
        del segment
        _widen(self, self.stage(number))

    def keys(self, stage: jax.Array, part: int) -> Any:
        """Refer to columns 64 part to 64 part + 63 of a block's keys, [block, 64]; the last ones are the rotated."""
        last = self.sizes.query_parts - 1
        return self.columns(self.refs.rotated_ring, stage, 0) if part == last else super().keys(stage, part)

    def weights(self, stage: jax.Array) -> Any:
        """Refer to where a block's weights are passed on, [64, block]: where its rotated keys were."""
        return self.refs.weight_ring.at[stage]


def _widen(pipeline: OneBytePipeline, stage: jax.Array) -> None:
    """Widen the block of a stage, and say when each half is there."""
    refs = pipeline.refs
    plgpu.barrier_wait(refs.narrow_full.at[stage])
    scales = _scales(pipeline, stage)
    of_half = HALF // SCALED_TOGETHER
    for part in range(of_half):
        _store(refs.left_ring.at[stage], part, _widened(_narrow(pipeline, stage, part), scales[part]))
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.left_full.at[stage])
    narrow = [_narrow(pipeline, stage, of_half + part) for part in range(of_half)]
    plgpu.commit_smem()  # every warp has what lies where it will be
    for part in range(of_half):
        _store(refs.right_ring.at[stage], part, _widened(narrow[part], scales[of_half + part]))
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.right_full.at[stage])


def _store(half: Any, part: int, wide: jax.Array) -> None:
    """Store a part, [block, 128]; all warps wait for each other before and after it."""
    half.at[:, pl.ds(part * SCALED_TOGETHER, SCALED_TOGETHER)][...] = wide


def _narrow(pipeline: OneBytePipeline, stage: jax.Array, part: int) -> jax.Array:
    """Load a part of the block as it is stored, [block, 128]."""
    ref = pipeline.refs.narrow_ring.at[stage, :, pl.ds(part * SCALED_TOGETHER, SCALED_TOGETHER)]
    return load(ref, plgpu.Layout.WGMMA_UPCAST_2X, optimized=True)


def _scales(pipeline: OneBytePipeline, stage: jax.Array) -> list[jax.Array]:
    """Return the scales of each part of the block's numbers, as factors of float16, [block]."""
    scales = jnp.minimum(load(pipeline.refs.scale_ring.at[stage], _SCALES) * _SHIFT, _LARGEST_SCALE)  # [block, 4]
    part = plgpu.broadcasted_iota(jnp.int32, scales.shape, 1, layout=_SCALES)
    of_parts = (jnp.where(part == i, scales, 0.0).sum(axis=1) for i in range(scales.shape[1]))
    return [plgpu.layout_cast(each, plgpu.Layout.WGMMA_UPCAST_2X.reduce(1)).astype(WIDE) for each in of_parts]


def _widened(narrow: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the numbers that are meant, [block, 128]; a scale is one row's."""
    scales = plgpu.layout_cast(lax.broadcast_in_dim(scale, narrow.shape, [0]), plgpu.Layout.WGMMA_UPCAST_2X)
    return narrow.astype(WIDE) * jnp.asarray(1 / _SHIFT, WIDE) * scales
