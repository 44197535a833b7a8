"""Things that the parts of PAC share: sizes, references, and the thread block's segments."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread
from pallas_kernels.ampere import products
from pallas_kernels.pac_arrays import PacSizes
from pallas_kernels.plan_format import Segment


class Numbers(IntEnum):
    """Numbers that a thread block keeps in shared memory, one by each thread, for two blocks in a row or two tiles."""

    ROWS = 0  # where the tokens of a block are
    READERS = 2  # of the tokens of a masked block
    POSITIONS = 4
    QUERY_ROWS = 6  # where the query rows of a tile are

    @classmethod
    def count(cls) -> int:
        """Count them, two of each."""
        return cls.QUERY_ROWS + 2


@dataclass(frozen=True)
class Sizes(PacSizes):
    """All that is known when the kernel is compiled."""

    key_columns: int  # of a row in shared memory: H, and zeros
    value_columns: int
    num_q_heads: int
    num_kv_heads: int
    lanes: int  # tiles that a segment may serve


class Tile(NamedTuple):
    """A row tile of a segment."""

    place: int  # in the segment: 0 or 1
    number: jax.Array
    partial: jax.Array  # where its result goes


class Work:
    """One thread block's view of the plan."""

    def __init__(self, refs: Any, sizes: Sizes) -> None:
        """Load what the thread block needs to begin with. `refs` has what `pac` lists, by name."""
        self.refs, self.sizes, self.warp = refs, sizes, products.warp()
        cta = lax.axis_index("cta")
        fields = len(Segment._fields)
        self.first, self.last, *rest = (refs.cta_begin[cta, column] for column in range(2 + fields))
        self.first_segment = Segment(*rest)

    def segment(self, number: jax.Array) -> Segment:
        """Load a segment; any one for a number past the plan's end."""
        at = jnp.minimum(number, self.refs.segments.shape[0] - 1)
        return Segment(*(self.refs.segments[at, field] for field in range(len(Segment._fields))))

    def thread(self) -> jax.Array:
        """Return the number of each thread, int32 [128]."""
        return plgpu.broadcasted_iota(jnp.int32, (by_thread.THREADS,), 0, layout=by_thread.THREAD)

    def numbers(self, which: Numbers, number: Any) -> Any:
        """View what is kept of block `number` of this thread block, or of tile `number` of a segment."""
        return self.refs.numbers.at[which + lax.rem(jnp.int32(number), jnp.int32(2))]

    def first_row(self, tile: int) -> int:
        """Count the rows of a segment before tile 0 or 1 of it, as readers are counted."""
        return tile * self.sizes.packing.tile_rows

    def stage(self, number: jax.Array) -> jax.Array:
        """Where in the rings block `number` of this thread block lies."""
        return lax.rem(number, jnp.int32(self.sizes.stages))
