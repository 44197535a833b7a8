"""Things that the warpgroups of PAC share: a thread block's segments, its references, and the barriers of its rings.

    barrier          one for each     arrives, how often                        waits
    query_together   query buffer     the copy of a tile in one piece,          both lanes, before the segment's scores;
                                      once for each part of its columns         the one of the two that the tile came by
    query_scattered  query buffer     the copies of a tile unit by unit,        as query_together
                                      once for each unit and part
    query_free       query buffer     each lane, when the segment is done       preparer, before it fills the buffer
    keys_full        stage, 3 sets    each copy of each page, the preparer      the lanes that work on the block
                                      once (the mask is in place)
    values_full      stage, 3 sets    each copy of each page                    the lanes that work on the block
    keys_free        stage            each lane; in a narrow segment the lane   loader, before it fills the stage
                                      of the block, twice
    values_free      stage            as keys_free                              loader; preparer, for the mask's stage
    state_full       lane that sends  that lane, for each part of its state     the lane that merges
    state_free       lane that sends  the other lane, once to begin with and    the lane that sends
                                      for each part that it has read

A warpgroup must see every completion of a barrier that it waits on. So the full barriers have a set for each lane and
one for both: blocks of one lane complete barriers that the other lane never looks at.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pac_arrays import PacSizes
from pallas_kernels.plan_format import Page, Segment
from pallas_kernels.softmax import MASK_VALUE

#: Computing warpgroups, and so row tiles of a wide segment.
LANES = 2
#: KV tokens of a block, at most: one for each thread of the warpgroup that makes the mask.
MAX_BLOCK_TOKENS = 128
#: Columns of query and keys that are multiplied at once, and of the query and padded heads that are copied at once.
COLUMNS = 64
#: Set in the readers of tokens where all that one warp makes the mask of, 32 of a block, have the same.
UNIFORM_READERS = -(1 << 31)

#: Of each row eight numbers for a thread, in rows such that those of 8 bits and of 16 meet no bank conflicts.
EIGHTS = plgpu.Layout.TILED(plgpu.Tiling(((32, 32), (8, 8))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


class Ring(NamedTuple):
    """A ring of blocks: where their pages are copied from, and its barriers."""

    tokens: Any  # [num_pages x page_tokens, K, columns]
    blocks: Any  # [stages, block, columns]; with padded heads [stages, columns / 64, block, 64], as copies write them
    full: Any
    free: Any  # None where another ring's says it too


class Query(NamedTuple):
    """Views of the query buffers, [buffers, H / 64, 64, 64]."""

    units: Any  # as copies write them
    tiles: Any  # as products read them
    other: Any = None  # the same bytes as numbers of another dtype: what rotated keys, or keys of one byte, need


class PaddedRing(NamedTuple):
    """Two views of a ring whose rows are longer than a head's, [stages, H / 64, block, 64]."""

    copies: Any  # as copies write them
    blocks: Any  # as products read them


@dataclass(frozen=True)
class Sizes(PacSizes):
    """All that is known when the kernel is compiled."""

    kv_dtype: Any  # of the rings
    is_padded: bool = False  # whether rows in shared memory, of H and V numbers, are longer than those of a head

    @property
    def acc_columns(self) -> int:
        """Columns of the values that one accumulator holds."""
        return min(self.value_head_dim, 64 if self.is_padded else 128)

    @property
    def state_columns(self) -> int:
        """Columns of the memory that a lane's state is handed over in, part by part, as far as there is room for it."""
        return self.value_head_dim if self.value_head_dim <= 128 and not self.is_padded else 64

    @property
    def by_reference(self) -> bool:
        """Which way the softmax goes, but in `pac_wide`: by reference, which is no faster where memory decides."""
        return False

    @property
    def mask_value(self) -> float:
        """The score of a token that a row does not see."""
        return MASK_VALUE

    @property
    def query_parts(self) -> int:
        """Arrays of `COLUMNS` that make up a tile of the query; each is copied by itself."""
        return self.head_dim // COLUMNS

    @property
    def copies_of_page(self) -> int:
        """Copies that bring a page to a ring: of padded heads one for each `COLUMNS`."""
        return self.head_dim // COLUMNS if self.is_padded else 1

    @property
    def query_buffers(self) -> int:
        """Tiles of the query in shared memory; small ones are copied while as many are in use."""
        return 2 * LANES if self.head_dim == 64 else LANES  # of 128 columns a third one fits, and gains nothing


class LaneWork(NamedTuple):
    """The part of a segment that a lane does."""

    segment: Segment
    tile: jax.Array  # whose rows: 0 or 1
    buffer: jax.Array  # of the query
    done: jax.Array  # blocks of earlier segments
    stride: jax.Array  # the lane works on blocks first, first + stride, ...
    first: jax.Array
    row_scale: jax.Array | None = None  # [64], factors on the scores of each row

    def number(self, j: jax.Array) -> jax.Array:
        """Return which of the thread block's blocks the lane's block j is."""
        return self.done + j * self.stride + self.first

    def blocks_before(self, end: jax.Array) -> jax.Array:
        """Count the lane's blocks before block `end` of the segment."""
        return lax.div(jnp.maximum(end - self.first + self.stride - 1, 0), self.stride)


class Pipeline:
    """One thread block's view: every warpgroup walks the same segments and blocks, each in its role."""

    def __init__(self, refs: Any, sizes: Sizes) -> None:
        """Load what the thread block needs to begin with, in one round trip to memory.

        `refs` has the inputs, outputs, shared memory and barriers that `pac` lists, by name.
        """
        self.refs, self.sizes = refs, sizes
        self.warpgroup = lax.axis_index("warpgroup")
        cta, columns = lax.axis_index("cta"), refs.cta_begin.shape[1]
        self._first, self._last, *rest = (refs.cta_begin[cta, column] for column in range(columns))
        self._first_segment = Segment(*rest[: len(Segment._fields)])
        self.first_pages = tuple(rest[len(Segment._fields) :])

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The rings that the loader fills."""
        refs = self.refs
        keys, values = refs.key_ring, refs.value_ring
        if self.sizes.is_padded:
            keys, values = keys.copies, values.copies
        first = Ring(refs.keys, keys, refs.keys_full, refs.keys_free)
        return first, Ring(refs.values, values, refs.values_full, refs.values_free)

    @property
    def mask_free(self) -> Any:
        """The barriers, one for each stage, after which a block's mask is not needed any more."""
        return self.rings[-1].free

    def give_query(self, query_start: jax.Array, head: jax.Array, buffer: jax.Array) -> None:
        """Nothing is to be done with a tile that is on its way: lanes wait for the copies themselves."""

    def wait_for_query(self, query_start: jax.Array, buffer: jax.Array) -> None:
        """Wait for the rows of a tile, which come together or unit by unit."""

        @pl.when(query_start >= 0)
        def _together() -> None:
            plgpu.barrier_wait(self.refs.query_together.at[buffer])

        @pl.when(query_start < 0)
        def _unit_by_unit() -> None:
            plgpu.barrier_wait(self.refs.query_scattered.at[buffer])

    def query(self, buffer: jax.Array) -> Any:
        """Refer to a tile of the query, as products with keys take it, [parts, 64, 64]."""
        return self.refs.query_buffers.tiles.at[buffer]

    def row_scale(self, buffer: jax.Array) -> jax.Array | None:
        """Load factors on the scores of the rows in a query buffer, [64]; None where there are none."""
        del buffer
        return None

    def page_ids(self, block: jax.Array) -> tuple[jax.Array, ...]:
        """Load the pages of a block of the plan."""
        of_block, page_id = range(self.sizes.pages_per_block), Page._fields.index("page_id")
        return tuple(self.refs.block_pages[block, j, page_id] for j in of_block)

    def first_scales(self, segment: Segment) -> Any:
        """Ask for the scales of the first tokens of a segment, if tokens have any."""
        del segment

    def put_scales(self, segment: Segment, block: jax.Array, stage: jax.Array, ahead: Any) -> Any:
        """Put the scales of a block's tokens beside its mask, and ask for later ones, if tokens have any."""

    def key_scale(self, stage: jax.Array) -> jax.Array | None:
        """Load factors on the scores of a block's tokens, [block]; None where there are none."""
        del stage
        return None

    def value_scale(self, stage: jax.Array) -> jax.Array | None:
        """Load factors on the values of a block's tokens, [block]; None where there are none."""
        del stage
        return None

    def block_of(self, ring: Any, stage: jax.Array) -> Any:
        """Refer to a block of keys or values, [block, H or V], or if padded [H / 64, block, 64]."""
        return (ring.blocks if self.sizes.is_padded else ring).at[stage]

    def values(self, number: jax.Array, stage: jax.Array) -> Any:
        """Refer to the values of block `number`, of this stage, as products take them."""
        del number
        return self.block_of(self.refs.value_ring, stage)

    def values_full(self, segment: Segment, number: jax.Array) -> Any:
        """Pick the barrier after which products of a block's values may begin."""
        return self.full(self.refs.values_full, segment, number)

    def values_free(self, number: jax.Array, stage: jax.Array) -> Any:
        """Pick the barrier that says that a block's values are not needed any more."""
        del number
        return self.refs.values_free.at[stage]

    def wait_for_mask(self, number: jax.Array, stage: jax.Array) -> None:
        """Wait until the mask of block `number` may be written."""

        @pl.when(number >= self.sizes.stages)
        def _wait() -> None:
            plgpu.barrier_wait(self.mask_free.at[stage])

    def give_mask(self, segment: Segment, number: jax.Array) -> None:
        """Say that the mask of block `number` is in place: the first ring's block is full with it."""
        plgpu.barrier_arrive(self.full(self.rings[0].full, segment, number))

    def each_segment(self, work: Callable[..., Any], carried: Any = None) -> Any:
        """Call carried = work(segment, the next one, blocks done before it, buffer, carried) for every segment.

        The next segment's fields are loaded meanwhile. `buffer` is the query buffer of tile0; tile1 of a wide segment
        has the one after it. Returns what the last segment carried.
        """
        ref = self.refs.segments

        def step(s: jax.Array, carry: tuple) -> tuple:
            segment, done, buffer, carried = carry
            at = jnp.minimum(s + 1, ref.shape[0] - 1)
            following = Segment(*(ref[at, field] for field in range(len(Segment._fields))))
            carried = work(segment, following, done, buffer, carried)
            tiles = jnp.where(segment.is_wide, LANES, 1)
            return following, done + segment.end - segment.begin, self.query_buffer(buffer + tiles), carried

        begin = (self._first_segment, jnp.int32(0), jnp.int32(0), carried)
        return lax.fori_loop(self._first, self._last, step, begin)[3]

    def query_buffer(self, number: jax.Array) -> jax.Array:
        """Return the query buffer of a number: they are filled in turn."""
        return lax.rem(number, jnp.int32(self.sizes.query_buffers))

    def stage(self, number: jax.Array) -> jax.Array:
        """Where in the rings block `number` of this thread block lies."""
        return lax.rem(number, jnp.int32(self.sizes.stages))

    def full(self, barrier: Any, segment: Segment, number: jax.Array) -> Any:
        """Pick the full barrier of block `number`: of the set of lane 0, of lane 1, or of both."""
        return barrier.at[self.set_of(segment, number) * self.sizes.stages + self.stage(number)]

    def set_of(self, segment: Segment, number: jax.Array) -> jax.Array:
        """Return whose barriers say that block `number` is there: 0 and 1 of a lane, 2 of both."""
        return jnp.where(segment.is_wide, LANES, lax.rem(number, jnp.int32(LANES)))


def past_the_end(start: int, size: int, any_number: jax.Array) -> Any:
    """Return a slice of `size` that may pass the end of an array in memory: what a copy finds there is 0.

    So does hardware have it. Pallas refuses slices of which it knows that they do, so it is not told: the start is that
    of `any_number`, times 0.
    """
    return pl.ds(any_number * 0 + start, size)
