"""Keys and values of one byte a number: keys are multiplied as they are, values are made into 16 bits first.

    query     tile [64, H] of 16 bits ─► two terms of 8 bits, in its place, and a factor of each row (`terms`)
    keys      ring [block, H] of 8 bits ─► wgmma with either term of the query ─► one sum of both
    values    ring [block, V] of 8 bits ─► registers of the preparing warpgroup ─► buffer of 16 bits ─► wgmma

Wgmma takes no values of 8 bits as they are stored. What they become is float16: every number of 8 bits is one of its
numbers, and the hardware converts two of them at a time.

    barrier       one for each            arrives, how often                       waits
    values_full   stage, 3 sets           each copy of each page                   preparer, before it widens
    values_free   stage                   preparer, when it has widened            loader
    widened_full  buffer, 3 sets          preparer, once                           the lanes that work on the block
    widened_free  buffer                  each lane; in a narrow segment the lane  preparer, before it fills the buffer
                                          of the block, twice

All other barriers are those of `pac_pipeline`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread
from pallas_kernels.compat import load
from pallas_kernels.hopper import tensor_core, terms, token_scales
from pallas_kernels.hopper.pac_pipeline import EIGHTS, LANES, Pipeline, Sizes
from pallas_kernels.hopper.terms import TERM
from pallas_kernels.plan_format import Segment
from pallas_kernels.shared_memory import swizzled

#: What numbers of 8 bits are made into.
WIDE = jnp.float16


@dataclass(frozen=True)
class OneByteSizes(Sizes):
    """All that is known when the kernel is compiled."""

    scale_page_tokens: int = 0  # of pages whose tokens have scales of their own; 0 where they have none

    @property
    def dtype(self) -> Any:
        """That of products with values."""
        return WIDE

    @property
    def by_reference(self) -> bool:
        """Which way the softmax goes: by reference, but where registers would run out."""
        return self.value_head_dim <= 128 and not self.scale_page_tokens

    @property
    def mask_value(self) -> float:
        """The score of a token that a row does not see, below all others even times the factor of its row."""
        return -1e36

    @property
    def state_columns(self) -> int:
        """Columns of the memory that a lane's state is handed over in, which is scarce."""
        return 64

    @property
    def buffers(self) -> int:
        """Blocks of values in 16 bits. There are more stages, so that their barriers and masks are free in time."""
        return 1 if self.value_head_dim > 128 else 2  # what shared memory has room for


class OneBytePipeline(Pipeline):
    """One thread block's view: values come by way of the preparing warpgroup."""

    sizes: OneByteSizes

    def give_query(self, query_start: jax.Array, head: jax.Array, buffer: jax.Array) -> None:
        """Make terms of a tile when it is there."""
        super().wait_for_query(query_start, buffer)
        key_scale = getattr(self.refs, "key_scale", None)
        tensor_core.make_terms(self, buffer, jnp.float32(1) if key_scale is None else key_scale[head])
        by_thread.publish()
        plgpu.barrier_arrive(self.refs.query_ready.at[buffer])

    def wait_for_query(self, query_start: jax.Array, buffer: jax.Array) -> None:
        """Wait for the terms of a tile."""
        del query_start
        plgpu.barrier_wait(self.refs.query_ready.at[buffer])

    def query(self, buffer: jax.Array) -> Any:
        """Refer to the terms of a tile, one after the other, [parts, 64, 64]."""
        return self.refs.query_buffers.other.at[buffer]

    def row_scale(self, buffer: jax.Array) -> jax.Array:
        """Load what takes back the factors of a tile's rows, times the scale of their keys, [64]."""
        return load(self.refs.row_scale.at[buffer], plgpu.Layout.WGMMA.reduce(1))

    def first_scales(self, segment: Segment) -> Any:
        """Ask for the scales of the first tokens of a segment, if tokens have any."""
        return token_scales.first(self, segment) if self.sizes.scale_page_tokens else None

    def put_scales(self, segment: Segment, block: jax.Array, stage: jax.Array, ahead: Any) -> Any:
        """Put the scales of a block's tokens beside its mask, and ask for later ones, if tokens have any."""
        return ahead and token_scales.put(self, segment, block, stage, ahead)

    def key_scale(self, stage: jax.Array) -> jax.Array | None:
        """Load factors on the scores of a block's tokens, [block]; None where there are none."""
        return token_scales.of_block(self, stage, token_scales.KEY) if self.sizes.scale_page_tokens else None

    def value_scale(self, stage: jax.Array) -> jax.Array | None:
        """Load factors on the values of a block's tokens, [block]; None where there are none."""
        return token_scales.of_block(self, stage, token_scales.VALUE) if self.sizes.scale_page_tokens else None

    def values(self, number: jax.Array, stage: jax.Array) -> Any:
        """Refer to the values of block `number` in 16 bits, [block, V]."""
        del stage
        return self.refs.widened.at[self._buffer(number)]

    def values_full(self, segment: Segment, number: jax.Array) -> Any:
        """Pick the barrier after which products of a block's values may begin."""
        return self.refs.widened_full.at[self.set_of(segment, number) * self.sizes.buffers + self._buffer(number)]

    def values_free(self, number: jax.Array, stage: jax.Array) -> Any:
        """Pick the barrier that says that a block's values are not needed any more."""
        del stage
        return self.refs.widened_free.at[self._buffer(number)]

    def wait_for_mask(self, number: jax.Array, stage: jax.Array) -> None:
        """Nothing is to be waited for: whoever had the stage gave back its values before those of a later block."""

    def give_mask(self, segment: Segment, number: jax.Array) -> None:
        """Say that the mask of block `number` is in place, and widen its values."""
        super().give_mask(segment, number)
        refs, stage = self.refs, self.stage(number)
        plgpu.barrier_wait(self.full(refs.values_full, segment, number))
        narrow = load(refs.value_ring.at[stage], EIGHTS, optimized=True)  # [block, V]: 32 registers at most

        @pl.when(number >= self.sizes.buffers)
        def _wait() -> None:
            plgpu.barrier_wait(self.values_free(number, stage))

        self.values(number, stage)[...] = narrow.astype(WIDE)
        by_thread.publish()
        plgpu.barrier_arrive(refs.values_free.at[stage])
        plgpu.barrier_arrive(self.values_full(segment, number))

    def _buffer(self, number: jax.Array) -> jax.Array:
        return lax.rem(number, jnp.int32(self.sizes.buffers))


def scratch(sizes: OneByteSizes) -> dict[str, Any]:
    """Describe shared memory and barriers beside those of numbers of 16 bits, or in their place."""
    shape = sizes.buffers, sizes.block, sizes.value_head_dim
    return {
        "query_buffers": tensor_core.query_scratch(sizes, TERM),
        "widened": plgpu.SMEM(shape, WIDE, transforms=swizzled(WIDE, 64)),
        "values_free": plgpu.Barrier(num_barriers=sizes.stages),
        "widened_full": plgpu.Barrier(num_barriers=(LANES + 1) * sizes.buffers),
        "widened_free": plgpu.Barrier(num_arrivals=LANES, num_barriers=sizes.buffers),
        **terms.scratch(sizes),
        **(token_scales.scratch(sizes) if sizes.scale_page_tokens else {}),
    }
