"""Products that leave their sums in parts, for the kernel that needs them to add up.

    x ─► product ─► S parts ─► norm, if ─► + hidden states ─► norm, if    `add_and_norm`, one kernel, also over devices
                            ─► heads                                      `head_split`, one kernel

With few rows a product takes as long as reading its weights. If these are few, too few thread blocks read them, so the
depth of the sum is divided. XLA does so by itself, and then has one more kernel add the parts up.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.norm import RMSNorm
from codec_jax.nnx.parallel import Parallel
from pallas_kernels.hopper import add_norm
from pallas_kernels.hopper.add_norm import Factors
from pallas_kernels.hopper.head_rows import Norm

#: Rows with which parts were measured to be faster.
_MOST_ROWS = 64
#: Parts at most, and numbers of the depth that each has at least: as many for every row, so that what is written, and
#: read again, is a quarter of what the weights are.
_MOST, _DEPTH, _DEPTH_OF_ROW = 8, 512, 16
#: Numbers of all parts of a row that a thread block adds up: more do not fit its registers.
_NUMBERS = 40_960
#: Thread blocks that read as fast as a GPU can, of so many columns each; and the depth from which on XLA divides
#: it further.
_BLOCKS, _COLUMNS, _TOO_DEEP = 256, 64, 4096


class Parts(NamedTuple):
    """A sum that nobody has added up yet; `Attention.decode` may return one on a Hopper GPU.

    >>> from codec_jax.nnx import Parts
    >>> Parts(jnp.ones((2, 3, 1, 4))).parts.sum(axis=0).shape
    (3, 1, 4)
    """

    parts: Float[Array, "S *rows N"]  # float32


class Update(NamedTuple):
    """What a part of a layer adds to the hidden states, which nobody has done yet."""

    value: Float[Array, "*rows D"] | Parts  # of several devices the share of this one
    norm: RMSNorm | None  # of the value, before it is added


def serves(config: DecoderConfig, parallel: Parallel) -> bool:
    """Whether kernels of the default device add up what the layers of a decoder leave in parts.

    Args:
      config: of the decoder.
      parallel: the devices among which it is divided, as they are within a step.
    """
    if not parallel.has_kernels:
        return False
    if parallel.axes:
        return parallel.sums is not None and parallel.sums.is_by_rows
    return add_norm.why_not(config.hidden_size, config.dtype, jax.devices()[0]) is None


def multiply(
    config: DecoderConfig, parallel: Parallel, linear: nnx.Linear, x: Float[Array, "*rows depth"]
) -> Float[Array, "*rows columns"] | Parts:
    """Apply a product, and leave it in parts if that is faster.

    Args:
      config: of the decoder.
      parallel: the devices among which it is divided.
      linear: the product.
      x: what is multiplied.
    """
    # Of another kind, such as one with LoRA, the weights are not all.
    if type(linear) is not nnx.Linear or linear.use_bias or not serves(config, parallel):
        return linear(x)
    depth, columns = linear.kernel[...].shape
    rows = x.size // depth
    count = number_of_parts(depth, columns, rows)
    if count == 1:
        return linear(x)
    by_part = x.astype(linear.dtype).reshape(rows, count, -1)
    weights = linear.kernel[...].astype(linear.dtype).reshape(count, -1, columns)
    dimensions = ((2,), (1,)), ((1,), (0,))
    parts = lax.dot_general(by_part, weights, dimensions, preferred_element_type=jnp.float32)
    return Parts(parts.reshape(count, *x.shape[:-1], columns))


def number_of_parts(depth: int, columns: int, rows: int) -> int:
    """Choose how many parts a product is left in, a power of 2 that divides its depth.

    Args:
      depth: numbers of a row that are multiplied and added up.
      columns: of the weights.
      rows: that are multiplied with them.

    >>> from codec_jax.nnx.parts import number_of_parts
    >>> number_of_parts(9728, 2560, rows=16), number_of_parts(2560, 19456, rows=16), number_of_parts(2560, 6144, 512)
    (8, 1, 1)
    """
    if rows > _MOST_ROWS:
        return 1
    most = min(_MOST, depth // max(_DEPTH, _DEPTH_OF_ROW * rows), _NUMBERS // columns)
    wanted = max(_BLOCKS * _COLUMNS / columns, depth / _TOO_DEEP)
    count = 1
    while count < wanted and 2 * count <= most and depth % (2 * count) == 0:
        count *= 2
    return count


def add_and_norm(
    parallel: Parallel, x: Float[Array, "*rows D"], update: Update | None, norm: RMSNorm | None
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Return hidden states with what a layer adds to them, and the norm of that.

    Args:
      parallel: the devices among which the layer is divided.
      x: hidden states.
      update: what is added; None for nothing.
      norm: the norm of what comes next; None if it gets the hidden states as they are.
    """
    if update is None:
        return x, _normed(x, norm)
    value, sums = update.value, parallel.sums if parallel.sums is not None and parallel.sums.is_by_rows else None
    if sums is None and not isinstance(value, Parts):
        x = x + _normed(parallel.reduce(value), update.norm)
        return x, _normed(x, norm)
    parts, width = value.parts if isinstance(value, Parts) else value[None], x.shape[-1]
    norms = [update.norm, norm]
    factors = Factors(*(None if each is None else each.scale[...] for each in norms))
    [how] = {Norm(each.epsilon, each.plus_one) for each in norms if each is not None}
    run = add_norm.add_and_norm if sums is None else sums.add_up_and_norm
    total, normed = run(x.reshape(-1, width), parts.reshape(len(parts), -1, width), factors, how)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _normed(x: Float[Array, "*rows D"], norm: RMSNorm | None) -> Float[Array, "*rows D"]:
    return x if norm is None else norm(x)
