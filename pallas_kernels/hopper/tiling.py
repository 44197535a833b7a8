"""Which calls the Hopper kernels take, and how plans for them cut the work, by head size."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import refusals
from pallas_kernels.compat import MIXES_EIGHT_BITS
from pallas_kernels.family import Tiling
from pallas_kernels.heads import Heads, Scores
from pallas_kernels.packing import Packing
from pallas_kernels.plan_format import PlanArrays


class Block(NamedTuple):
    """The fastest sizes among those that fit the shared memory of a multiprocessor, 227 KiB."""

    tokens: int  # KV tokens
    stages: int  # blocks in flight


#: By the head size of keys, and of values. Where thread blocks have little to do, short blocks, which can be dealt out
#: more evenly and are done sooner after the last load; where they have much, long ones, which keep the tensor cores
#: busy. `python -m benchmarks.tune` measures the alternatives.
BLOCKS = {
    (64, 64): (Block(128, 3), Block(128, 3)),
    (128, 128): (Block(64, 2), Block(128, 2)),
    (192, 128): (Block(64, 3), Block(64, 3)),
    (256, 256): (Block(64, 2), Block(64, 2)),
}
#: Heads of these sizes, keys and values alike, have rows of 128 columns in shared memory, of which the last ones are 0.
#: Copies of rows begin at multiples of 16 bytes.
PADDED = tuple((size, size) for size in range(72, 128, 8))
#: As `BLOCKS`, where K and V have one byte a number: blocks in flight are half as large, and values have buffers for 16
#: bits, fewer than there are stages.
_ONE_BYTE = {
    (64, 64): (Block(128, 4), Block(128, 4)),
    (128, 128): (Block(64, 4), Block(128, 3)),
    (256, 256): (Block(64, 3), Block(64, 3)),
}
#: Heads whose output takes the registers of two warpgroups, so that a segment has one tile: see `long_heads`.
LONG = {(512, 512): Block(64, 1)}
#: What is much, in KV tokens for each thread block. Tokens that another tile reads again wait for no memory, so that
#: arithmetic decides sooner; and so it does with one byte a number.
_MUCH, _MUCH_ONE_BYTE = (4096, 512), (1536, 512)
#: Two tiles that share segments read less, but begin more segments, for more rows: with less to read than this, by all
#: tiles of a thread block, each is faster alone. What is read again counts less: it comes from the L2 cache.
_WIDE, _AGAIN = 2200, 0.8
#: With one byte a number, of which sharing saves half as much; by the columns of a row. Where all thread blocks are
#: worth more than kv heads that are read in step, unless narrow streams read the same: so it was measured with 128.
_WIDE_ONE_BYTE = {64: 10_000, 128: 10_000, 256: 20_000}
_OUT_OF_STEP = (64, 128)
_LANES = 2
#: Of queries and hidden states; pages may have one byte a number.
SIXTEEN_BITS = (jnp.bfloat16, jnp.float16)
#: What a query is made into where K and V have one byte: of the two kinds the one with more bits for a number.
TERM = jnp.float8_e4m3fn
_ONE_BYTE_DTYPES = (TERM, jnp.float8_e5m2)


def tiling(heads: Heads, device: jax.Device) -> Tiling:
    """Return how plans are to be cut."""
    tile_rows, sizes = Packing.of(heads.group).tile_rows, (heads.head_dim, heads.value_head_dim)
    if sizes in LONG:
        return Tiling(device.core_count, tile_rows, 1, (LONG[sizes].tokens,) * 2)
    columns = columns_of(sizes)
    (little, much), is_one_byte = BLOCKS[columns], heads.kv_dtype.itemsize == 1
    return Tiling(
        device.core_count,
        tile_rows,
        _LANES,
        (little.tokens, much.tokens),
        _MUCH_ONE_BYTE if is_one_byte else _MUCH,
        wide=_WIDE_ONE_BYTE[columns[0]] if is_one_byte else _WIDE,
        again=_AGAIN,
        in_step=not (is_one_byte and columns[0] in _OUT_OF_STEP),
        sums=_LANES,
    )


def columns_of(head_dims: tuple[int, int]) -> tuple[int, int]:
    """Return the columns that rows of keys, and of values, of these sizes have in shared memory."""
    return (128, 128) if head_dims in PADDED else head_dims


def stages_of(columns: tuple[int, int], block_tokens: int, kv_dtype: Any) -> int | None:
    """Return how many blocks are in flight, of keys and values of so many columns; None for one that is not taken."""
    blocks = _ONE_BYTE if jnp.dtype(kv_dtype).itemsize == 1 else BLOCKS
    return next((block.stages for block in blocks[columns] if block.tokens == block_tokens), None)


def why_not_on(device: Any) -> str | None:
    """Say why not, for a device that is no Hopper GPU."""
    if device.platform == "gpu" and str(device.compute_capability).startswith("9."):
        return None
    return f"it needs a Hopper GPU (sm_90), the default device is {device.device_kind}"


def why_not(heads: Heads, device: Any, scores: Scores | None = None, plan: PlanArrays | None = None) -> str | None:
    """Say why the kernels cannot serve a call on a device; None if they can."""
    if reason := why_not_on(device):
        return reason
    is_sixteen_bits = heads.query_dtype in SIXTEEN_BITS and heads.kv_dtype == heads.query_dtype
    if not is_sixteen_bits and heads.kv_dtype not in _ONE_BYTE_DTYPES:
        return (
            "it takes bfloat16 or float16, the same for all, or float8_e4m3fn or float8_e5m2 for keys and values, "
            f"got {heads.query_dtype} and {heads.kv_dtype}"
        )
    if not MIXES_EIGHT_BITS and not is_sixteen_bits and heads.kv_dtype != TERM:
        return f"with {heads.kv_dtype} it takes JAX 0.11 or later, got {jax.__version__}"
    sizes = (*BLOCKS, *PADDED, *LONG) if is_sixteen_bits else _ONE_BYTE
    if reason := refusals.of_head_sizes(heads, sizes) or refusals.of_scores(scores):
        return reason
    return refusals.of_plan(plan, tiling(heads, device))
