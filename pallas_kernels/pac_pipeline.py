"""What the warpgroups of PAC share: a thread block's segments, its references, and the barriers of its rings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.columns import Segment
from pallas_kernels.packing import Packing

#: Computing warpgroups, and so row tiles of a wide segment.
LANES = 2
#: Most KV tokens of a block: one for each thread of the warpgroup that makes the mask.
BLOCK_TOKENS = 128
#: Set in the readers of every token of a block where all tokens have the same, and none is past its node's end.
ALIKE = -(1 << 31)


class Inputs(NamedTuple):
    """References in global memory, in the order of the kernel's arguments."""

    query: Any  # [B x T, N, H]
    keys: Any  # [num_pages x page_size, K, H]
    values: Any
    request_of_row: Any
    node_length: Any
    pages: Any
    segments: Any
    runs: Any
    least_length: Any
    most_length: Any
    structure: Any
    planned_structure: Any
    merge_ptr: Any
    used_rows: Any
    node_start: Any = None  # with causal masks only
    query_position: Any = None
    readers_of_tokens: Any = None  # with masks by token only: [blocks, BLOCK_TOKENS]


class Outputs(NamedTuple):
    """References in global memory."""

    out: Any  # [partials, 64, H]
    max: Any  # [partials, 64]
    sum: Any
    broken: Any  # [thread blocks and more], whether one of the nodes that it looked at breaks the plan


class Query(NamedTuple):
    """Two views of the query buffers, [buffers, H / 64, 64, 64] each."""

    rows: Any  # as copies write them; [buffers, H / 64, units, rows, 64] in the interpreter
    tiled: Any  # as wgmma reads them


class Scratch(NamedTuple):
    """Shared memory and barriers."""

    query: Any  # its views, `Query`
    keys: Any  # [stages, block, H]
    values: Any
    columns: Any  # [stages, 1 or 2, BLOCK_TOKENS]: readers, and positions, of each token
    half: Any  # [64, columns]: what one lane of a narrow segment hands to the other
    half_rows: Any  # [2, 64]
    query_scattered: Any
    query_together: Any
    query_free: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any
    half_full: Any
    half_free: Any


@dataclass(frozen=True)
class Sizes:
    """What is known when the kernel is compiled."""

    packing: Packing
    batch: int
    query_tokens: int
    head_dim: int
    page_size: int
    slots: int
    stages: int
    factor: float  # from scores to units of log2
    causal: bool
    by_token: bool  # whether the rows that see a token are given, not those that see a page
    dtype: Any
    interpreted: bool  # simulated on a CPU

    @property
    def block(self) -> int:
        """KV tokens of a block."""
        return self.slots * self.page_size

    @property
    def columns(self) -> int:
        """Columns of the head that one accumulator holds."""
        return self.head_dim if self.head_dim <= 128 else 64

    @property
    def query_parts(self) -> int:
        """Arrays of 64 columns that make up a tile of the query; each is copied by itself."""
        return self.head_dim // 64

    @property
    def query_buffers(self) -> int:
        """Tiles of the query in shared memory; small ones are copied while as many are in use."""
        return 2 * LANES if self.head_dim == 64 else LANES  # of 128 columns a third one fits, and gains nothing

    @property
    def most_units(self) -> int:
        """Units of a tile that the query has at all."""
        return min(self.packing.units, self.batch * self.query_tokens)


class Pipeline:
    """One thread block's view: every warpgroup walks the same segments and blocks, each in its role."""

    def __init__(self, inputs: Inputs, outputs: Outputs, scratch: Scratch, sizes: Sizes) -> None:
        """Load what the thread block needs to begin with, in one round trip to memory."""
        self.inputs, self.outputs, self.scratch, self.sizes = inputs, outputs, scratch, sizes
        self.warpgroup = lax.axis_index("warpgroup")
        cta, columns = lax.axis_index("cta"), inputs.runs.shape[1]
        self.first, self._last, *rest = (inputs.runs[cta, column] for column in range(columns))
        self._first_segment = Segment(*rest[: len(Segment._fields)])
        self.first_pages = tuple(rest[len(Segment._fields) :])

    def each_segment(self, work: Callable[..., Any], carried: Any = None) -> jax.Array:
        """Call carried = work(segment, the next one, blocks done before it, turn, carried) for every segment.

        The next segment's fields are loaded meanwhile. `turn` is the query buffer of the segment's tile; a wide
        segment's other tile has the one after it. Returns the blocks of all segments.
        """
        ref = self.inputs.segments

        def step(s: jax.Array, carry: tuple) -> tuple:
            segment, done, turn, carried = carry
            at = jnp.minimum(s + 1, ref.shape[0] - 1)
            following = Segment(*(ref[at, field] for field in range(len(Segment._fields))))
            carried = work(segment, following, done, turn, carried)
            tiles = jnp.where(segment.is_wide, LANES, 1)
            return following, done + segment.hi - segment.lo, self.query_buffer(turn + tiles), carried

        begin = (self._first_segment, jnp.int32(0), jnp.int32(0), carried)
        return lax.fori_loop(self.first, self._last, step, begin)[1]

    def query_buffer(self, number: jax.Array) -> jax.Array:
        """Return the query buffer of a number: they are filled in turn."""
        return lax.rem(number, jnp.int32(self.sizes.query_buffers))

    def slot(self, number: jax.Array) -> jax.Array:
        """Where in the rings block `number` of this thread block lies."""
        return lax.rem(number, jnp.int32(self.sizes.stages))

    def full(self, barrier: Any, segment: Segment, number: jax.Array) -> Any:
        """Pick the barrier of block `number`; there is one set each for lane 0, lane 1 and both.

        A warpgroup must see every completion of a barrier that it waits on, so blocks of one lane have a set that the
        other lane never looks at.
        """
        lanes = jnp.where(segment.is_wide, LANES, lax.rem(number, jnp.int32(LANES)))
        return barrier.at[lanes * self.sizes.stages + self.slot(number)]
