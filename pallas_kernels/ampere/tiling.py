"""Which calls the Ampere kernels take, and how plans for them cut the work, by head size and shared memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import refusals
from pallas_kernels.family import Tiling
from pallas_kernels.heads import Heads, Scores
from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.plan_format import PlanArrays

#: KiB of shared memory that a thread block may have, by compute capability.
SHARED_KIB = {
    "8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "9.0": 227, "10.0": 227, "10.3": 227, "11.0": 227, "12.0": 99,
    "12.1": 99,
}  # fmt: skip


class Block(NamedTuple):
    """How a thread block works."""

    tokens: int  # KV tokens of a block
    stages: int  # blocks in shared memory: the one that is worked on, and those on their way
    together: int  # thread blocks that share a multiprocessor, on most of these GPUs
    lanes: int  # row tiles that a segment may serve

    def shared_bytes(self, columns: int) -> int:
        """Shared memory of a thread block: tiles of the query, rings of K and V, and eight numbers of each token."""
        rows = self.lanes * TILE_ROWS + 2 * self.stages * self.tokens
        return 2 * columns * rows + 4 * 8 * max(self.tokens, TILE_ROWS)


#: By shared memory of a multiprocessor in KiB, at least, and by columns of a row: everything fits, and copies are on
#: their way while a block is worked on. Of those that fit, 64 tokens by two for heads of 128 took least on an H200.
#: Accumulators of two tiles with 256 columns would be all registers that there are; with 163 KiB, the second tile of
#: the query would take the place of a block.
BLOCKS = {
    99: {64: Block(128, 2, 1, 2), 128: Block(64, 2, 1, 2), 256: Block(32, 2, 1, 1)},
    163: {64: Block(128, 2, 2, 1), 128: Block(32, 3, 2, 1), 256: Block(32, 2, 1, 1)},
    227: {64: Block(128, 2, 2, 2), 128: Block(64, 2, 2, 2), 256: Block(32, 2, 1, 1)},
}
#: GPUs for which the compiler finds no registers for a second tile: up to 110 of a thread would be in memory.
_ONE_LANE = ("10.0", "10.3", "11.0")
#: KV tokens that tiles of a multiprocessor read, from which on two of them share segments. On an H200 each is faster
#: alone with 1,241 and slower with 3,227.
_WIDE = 2560
_CHUNK = 8  # numbers that are copied at a time
_DTYPES = (jnp.bfloat16, jnp.float16)
_JAX = (0, 11)  # the first version with warp-level products


def columns_of(head_dim: int) -> int:
    """Return the columns that a row of so many numbers has in shared memory; those past its end are 0."""
    return next(columns for columns in BLOCKS[min(BLOCKS)] if columns >= head_dim)


def stages_of(heads: Heads, block_tokens: int) -> int:
    """Return how many blocks are in shared memory."""
    fitting = [sizes[_columns(heads)] for sizes in BLOCKS.values()]
    return next(block.stages for block in fitting if block.tokens == block_tokens)


def tiling(heads: Heads, device: Any) -> Tiling:
    """Return how plans are to be cut."""
    capability = str(device.compute_capability)
    kib = SHARED_KIB[capability]
    block = BLOCKS[max(size for size in BLOCKS if size <= kib)][_columns(heads)]
    lanes = 1 if capability in _ONE_LANE else block.lanes
    tile_rows = Packing.of(heads.group).tile_rows
    num_ctas, wide = device.core_count * block.together, _WIDE // block.together
    return Tiling(num_ctas, tile_rows, lanes, (block.tokens, block.tokens), wide=wide)


def why_not(heads: Heads, device: Any, scores: Scores | None = None, plan: PlanArrays | None = None) -> str | None:
    """Say why the kernels cannot serve a call on a device; None if they can."""
    if device.platform != "gpu" or str(device.compute_capability) not in SHARED_KIB:
        known = ", ".join(f"sm_{name.replace('.', '')}" for name in SHARED_KIB)
        return f"it needs an NVIDIA GPU since Ampere ({known}), the default device is {device.device_kind}"
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < _JAX:
        return f"it needs JAX {'.'.join(map(str, _JAX))} or later, got {jax.__version__}"
    if heads.query_dtype not in _DTYPES or heads.kv_dtype != heads.query_dtype:
        return f"it takes bfloat16 or float16, the same for all, got {heads.query_dtype} and {heads.kv_dtype}"
    if reason := refusals.of_values_in_keys(heads) or refusals.of_scores(scores):
        return reason
    sizes, most = (heads.head_dim, heads.value_head_dim), max(BLOCKS[min(BLOCKS)])
    if max(sizes) > most or any(size % _CHUNK for size in sizes):
        return f"it takes head sizes of at most {most}, multiples of {_CHUNK}, got {sizes[0]} and {sizes[1]} for values"
    return refusals.of_plan(plan, tiling(heads, device), " (make_plan with tile_rows, lanes and block_tokens)")


def _columns(heads: Heads) -> int:
    """Return the columns of the wider ones of keys and values."""
    return columns_of(max(heads.head_dim, heads.value_head_dim))
