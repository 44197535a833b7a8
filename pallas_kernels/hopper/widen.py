"""Keys and values of one byte a number: keys are multiplied as they are, values are made into 16 bits first.

    query     16 bits ─► XLA: times 2^n of the row ─► two terms of 8 bits, one after the other, [rows, 2 x H]
    keys      ring [block, H] of 8 bits ─► wgmma with either term of the query ─► one sum of both
    values    ring [block, V] of 8 bits ─► registers of the preparing warpgroup ─► buffer of 16 bits ─► wgmma

Products of 8 bits take half the time of others, so that two terms cost what one query of 16 bits does, and no key is
converted. The first term has the 4 leading bits of a number, the second one those of what is left: together the 8 bits
of bfloat16. The row's power of two brings its largest number to the upper end of what 8 bits hold; the scores' factor
takes it back, and the scale of the keys with it. Wgmma takes no values of 8 bits as they are stored. What they become
is float16: every number of 8 bits is one of its numbers, and the hardware converts two of them at a time.

    barrier       one for each            arrives, how often                       waits
    values_full   stage, 3 sets           each copy of each page                   preparer, before it widens
    values_free   stage                   preparer, when it has widened            loader
    widened_full  buffer, 3 sets          preparer, once                           the lanes that work on the block
    widened_free  buffer                  each lane; in a narrow segment the lane  preparer, before it fills the buffer
                                          of the block, twice

All other barriers are those of `pac_pipeline`.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import query_rows
from pallas_kernels.compat import load
from pallas_kernels.family import Call
from pallas_kernels.hopper.pac_pipeline import LANES, Pipeline, Sizes, tiles_of
from pallas_kernels.hopper.tiling import TERM
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.plan_format import Segment

#: What numbers of 8 bits are made into.
WIDE = jnp.float16
#: Terms that have the 8 bits of bfloat16.
_TERMS = 2
#: The largest number of a row is brought to 2^6 or more, and below 2^7.
_LARGEST_EXPONENT = 7


@dataclass(frozen=True)
class OneByteSizes(Sizes):
    """All that is known when the kernel is compiled; `dtype` is that of products with values."""

    @property
    def query_dtype(self) -> Any:
        """What products with keys take."""
        return TERM

    @property
    def query_columns(self) -> int:
        """Columns that are copied at once: rows of 128 bytes, or of what a head has."""
        return min(self.head_dim, 128)

    @property
    def query_parts(self) -> int:
        """Arrays of `query_columns` that make up a tile of the query: term after term."""
        return _TERMS * self.parts_of_keys

    @property
    def mask_value(self) -> float:
        """The score of a token that a row does not see, below all others even times the factor of its row."""
        return -1e36

    @property
    def acc_columns(self) -> int:
        """Columns of one accumulator, and of the memory that a lane's state is handed over in, which is scarce."""
        return 64

    @property
    def buffers(self) -> int:
        """Blocks of values in 16 bits. There are more stages, so that their barriers and masks are free in time."""
        return 1 if self.value_head_dim > 128 else 2  # what shared memory has room for


class OneBytePipeline(Pipeline):
    """One thread block's view: values come by way of the preparing warpgroup."""

    sizes: OneByteSizes

    def row_scale(self, head: jax.Array, tile: jax.Array) -> jax.Array:
        """Load what takes back the factors of a tile's rows, times the scale of their keys, [64]."""
        at = pl.ds(tile * self.sizes.packing.tile_rows, TILE_ROWS)
        return load(self.refs.row_scale.at[head, at], plgpu.Layout.WGMMA.reduce(1))

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

        @pl.when(number >= self.sizes.buffers)
        def _wait() -> None:
            plgpu.barrier_wait(self.values_free(number, stage))

        plgpu.barrier_wait(self.full(refs.values_full, segment, number))
        _widen(refs.value_ring.at[stage], self.values(number, stage))
        plgpu.barrier_arrive(refs.values_free.at[stage])
        plgpu.barrier_arrive(self.values_full(segment, number))

    def _buffer(self, number: jax.Array) -> jax.Array:
        return lax.rem(number, jnp.int32(self.sizes.buffers))


def inputs_of(call: Call) -> dict[str, jax.Array]:
    """Return the query as terms of 8 bits, and the factors on the scores of each row, [K, tiles x tile_rows + 64]."""
    scale, terms = in_terms(call.query)
    of_rows = query_rows.to_tiles(call._replace(query=scale))[..., 0]  # [tiles, K, R]
    of_rows = jnp.moveaxis(of_rows, 1, 0).reshape(of_rows.shape[1], -1)
    of_rows = of_rows if call.key_scale is None else of_rows * call.key_scale[:, None]
    return {
        "query": terms.reshape(-1, *terms.shape[2:]),  # [B x T, N, 2 x H]
        "row_scale": jnp.pad(of_rows, ((0, 0), (0, TILE_ROWS)), constant_values=1),
    }


def in_terms(query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return powers of two [..., 1], and terms [..., 2 x H]: their sum times the power is the query, in 8 bits."""
    query = query.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.abs(query).max(axis=-1, keepdims=True))
    query, limits = query * jnp.ldexp(jnp.float32(1), _LARGEST_EXPONENT - exponent), jnp.finfo(TERM)
    first = lax.reduce_precision(query, limits.nexp, limits.nmant)  # XLA may leave out conversions there and back
    terms = first.astype(TERM), (query - first).astype(TERM)
    return jnp.ldexp(jnp.float32(1), exponent - _LARGEST_EXPONENT), jnp.concatenate(terms, axis=-1)


def scratch(sizes: OneByteSizes) -> dict[str, Any]:
    """Describe shared memory and barriers of what is widened."""
    shape = sizes.buffers, sizes.block, sizes.value_head_dim
    return {
        "widened": plgpu.SMEM(shape, WIDE, transforms=tiles_of(WIDE, 64)),
        "values_free": plgpu.Barrier(num_barriers=sizes.stages),
        "widened_full": plgpu.Barrier(num_barriers=(LANES + 1) * sizes.buffers),
        "widened_free": plgpu.Barrier(num_arrivals=LANES, num_barriers=sizes.buffers),
    }


def _widen(narrow: Any, wide: Any) -> None:
    """Convert a block of values, part by part: all of it would not fit the registers."""
    block, columns = wide.shape
    width = min(columns, 128)
    for row, column in itertools.product(range(0, block, 64), range(0, columns, width)):
        part = pl.ds(row, 64), pl.ds(column, width)
        wide.at[part][...] = load(narrow.at[part], plgpu.Layout.WGMMA_UPCAST_2X, optimized=True).astype(WIDE)
    plgpu.commit_smem()
