"""What goes through a mailbox, and how it is divided among threads. Plain numbers, for planning and for kernels."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.head_rows import BLOCK_ROWS, HEAD_DIMS
from pallas_kernels.packing import TILE_ROWS, Packing
from pallas_kernels.por_grain import grain_of

THREADS = 128  # of a thread block, as in `by_thread`, which not every JAX can import
#: Words that threads share.
SHARED = 2
#: A device sends its part to each of the others; XLA's sums send less, and by benchmarks.scaling_model what they take
#: longer to begin is made up for where this is about as much, on 8 devices.
_MOST_BYTES = 4 << 20
#: A thread block waits for the same one of every other device. Where all run at once nobody waits for one to begin;
#: they begin in order, so that more would come to an end, too.
_MOST_BLOCKS = 1024
#: The same where one has a row: two of them run on a multiprocessor at once, as threads have up to 255 registers.
_MOST_ROWS = 2 * 132
#: The same for heads, times the numbers of one: threads of larger heads have more registers, 70 to 84 of heads of 128.
_MOST_OF_HEADS = 896 * 128
#: Words of a row that fit the registers of a thread.
_MOST_WORDS = 32
#: Columns of POR are divided among the lanes of a warp or two.
_COLUMNS = 64
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class Sizes(NamedTuple):
    """Whom a mailbox is for, and how much."""

    devices: int  # of a group, which send to each other
    words: int  # that a device sends, of 32 bits
    width: int  # words that a thread sends at once
    chunks: int = 1  # times that a thread does
    sharing: int = 0  # threads that share two words beside a chunk each; 0 if none do
    stride: int = 1  # from one of the devices to the next, in the numbers of all
    to_one: bool = False  # each chunk goes to one of the devices, in place of all

    @property
    def blocks(self) -> int:
        """Thread blocks, each of which sends `chunks` times `width` words a thread."""
        return self.words // (THREADS * self.width * self.chunks)

    @property
    def slot(self) -> int:
        """Words of a slot, those that are shared last; a multiple of 16 bytes."""
        shared = SHARED * self.words // (self.width * self.sharing) if self.sharing else 0
        return -(-(self.words + shared) // 4) * 4

    @property
    def sent_bytes(self) -> int:
        """What a device sends to others."""
        return 4 * self.slot * (self.devices - 1) // (self.devices if self.to_one else 1)


def of_arrays(x: Any, devices: int, stride: int = 1) -> Sizes | None:
    """Return the sizes for sums of arrays like x; None if they are not for the kernel.

    Args:
      x: anything with a shape and a dtype.
      devices, stride: as in `Sizes`.
    """
    words = math.prod(x.shape) * x.dtype.itemsize // 4
    sizes = Sizes(devices, words, math.gcd(words // THREADS, 4), stride=stride)
    while sizes.blocks > _MOST_BLOCKS and sizes.blocks % 2 == 0:
        sizes = sizes._replace(chunks=2 * sizes.chunks)
    return _checked(x, sizes)


def of_rows(x: Any, devices: int, stride: int = 1) -> Sizes | None:
    """Return the sizes for sums of arrays like x, [..., D], by rows; None if they are not for the kernel.

    Args:
      x: anything with a shape and a dtype, bfloat16 or float16.
      devices, stride: as in `Sizes`.
    """
    rows, row = math.prod(x.shape[:-1]), x.shape[-1] // 2
    if x.dtype.itemsize != 2 or x.shape[-1] % (2 * THREADS) or row > _MOST_WORDS * THREADS or rows > _MOST_ROWS:
        return None
    width = math.gcd(row // THREADS, 4)
    return _checked(x, Sizes(devices, rows * row, width, chunks=row // (THREADS * width), stride=stride))


def of_columns(x: Any, parts: Sequence[int], devices: int, stride: int = 1) -> Sizes | None:
    """Return the sizes for gathers of arrays like x, [..., columns]; None if they are not for the kernel.

    Args:
      x: anything with a shape and a dtype.
      parts: columns of each part, as many as x has; a thread has words of one part only.
      devices, stride: as in `Sizes`.
    """
    sizes = of_arrays(x, devices, stride)
    return None if sizes is None or any(part * x.dtype.itemsize % (4 * sizes.width) for part in parts) else sizes


def of_heads(rows: int, num_own_heads: int, head_dim: int, dtype: Any, devices: int, stride: int = 1) -> Sizes | None:
    """Return the sizes for gathers of heads by the kernel that splits them; None if they are not for the kernel.

    Args:
      rows: tokens of a step, of all batches.
      num_own_heads: of queries, keys and values, that each device computes.
      head_dim: of a head; a lane has as many numbers of either half.
      dtype: of the numbers that are sent, bfloat16 or float16.
      devices, stride: as in `Sizes`.
    """
    row, blocks = BLOCK_ROWS * head_dim // 2, -(-rows // BLOCK_ROWS) * num_own_heads
    if rows < BLOCK_ROWS or head_dim not in HEAD_DIMS or jnp.dtype(dtype).itemsize != 2:
        return None
    if blocks * head_dim > _MOST_OF_HEADS:
        return None
    like = jax.ShapeDtypeStruct((rows, num_own_heads, head_dim), dtype)
    return _checked(like, Sizes(devices, blocks * row, width=row // THREADS, stride=stride))


def of_merges(query: Any, num_kv_heads: int, value_dim: int, devices: int, stride: int = 1) -> Sizes | None:
    """Return the sizes for merges of attention of a query [B, T, N, H]; None if they are not for the kernel.

    Args:
      query: anything with a shape and a dtype, which the output has, too.
      num_kv_heads: K, as a device attends with them.
      value_dim: V, of the output as POR has it, a multiple of 64.
      devices, stride: as in `Sizes`; each device gets its part of the N heads.
    """
    batch, tokens, num_q_heads, _ = query.shape
    if num_q_heads % devices or value_dim % _COLUMNS or query.dtype not in _DTYPES:
        return None
    group, of_word = num_q_heads // num_kv_heads, 4 // query.dtype.itemsize
    groups = num_kv_heads * -(-batch * tokens * group // Packing.of(group).tile_rows)
    grain = grain_of(groups, value_dim, least=of_word)
    sizes = Sizes(
        devices,
        words=groups * TILE_ROWS * value_dim // of_word,
        width=grain.numbers(value_dim) // of_word,
        chunks=grain.chunks(value_dim),
        sharing=grain.threads,
        stride=stride,
        to_one=True,
    )
    return _checked(query, sizes)


def _checked(x: Any, sizes: Sizes) -> Sizes | None:
    is_whole_words = x.dtype in _DTYPES and x.shape[-1] * x.dtype.itemsize % 4 == 0
    is_whole_blocks = sizes.words > 0 and sizes.words % THREADS == 0
    fits = is_whole_words and is_whole_blocks and sizes.blocks <= _MOST_BLOCKS and sizes.sent_bytes <= _MOST_BYTES
    return sizes if fits else None
