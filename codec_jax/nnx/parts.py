"""Sums that are left to the kernel that needs them: products in parts, and what experts made.

    x ─► product ─► S parts ─┬─► norm, if ─► + hidden states ─► norm, if   `add_and_norm`, one kernel, also over devices
    x ─► experts ─► rows   ──┘
    x ─► product ─► S parts ───► heads                                     `head_split`, one kernel
    x ─► router ──► S parts ───► experts                                   `Experts`, one kernel

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
from pallas_kernels.addends import Parts, Shares
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
#: Of a router, whose weights are next to nothing: depth of a part, numbers of all parts of a row, and of all rows.
_ROUTER_DEPTH, _ROUTER_NUMBERS, _ROUTER_ALL = 64, 4096, 1 << 18
#: Thread blocks that read as fast as a GPU can, of so many columns each; and the depth from which on XLA divides
#: it further.
_BLOCKS, _COLUMNS, _TOO_DEEP = 256, 64, 4096


class Update(NamedTuple):
    """What a part of a layer adds to the hidden states, which nobody has done yet."""

    value: Float[Array, "*rows D"] | Parts | Shares  # of several devices the share of this one
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


def adds_up_experts(config: DecoderConfig, parallel: Parallel, chosen: int) -> bool:
    """Whether the kernel that `serves` a decoder also adds up what so many experts made of a token.

    Args:
      config, parallel: as in `serves`.
      chosen: experts of a token.
    """
    return serves(config, parallel) and chosen * config.hidden_size <= _NUMBERS


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
    if type(linear) is not nnx.Linear or not serves(config, parallel):
        return linear(x)
    depth, columns = linear.kernel[...].shape
    count = number_of_parts(depth, columns, x.size // depth)
    return linear(x) if count == 1 else _in_parts(linear, x, count)


def router_scores(router: nnx.Linear, rows: Float[Array, "tokens D"]) -> Parts:
    """Return the scores that a router gives each expert, for the kernel that chooses.

    Args:
      router: the product.
      rows: tokens.
    """
    if type(router) is not nnx.Linear:
        return Parts(router(rows)[None])
    depth, num_experts = router.kernel[...].shape
    count = min(depth // _ROUTER_DEPTH, _ROUTER_NUMBERS // num_experts, _ROUTER_ALL // (num_experts * len(rows)))
    while count > 1 and depth % count:
        count -= 1
    return _in_parts(router, rows, count) if count > 1 else Parts(router(rows)[None])


def _in_parts(linear: nnx.Linear, x: Float[Array, "*rows depth"], count: int) -> Parts:
    weights = linear.kernel[...].astype(linear.dtype)
    depth, columns = weights.shape
    by_part = x.astype(linear.dtype).reshape(-1, count, depth // count)
    dimensions = ((2,), (1,)), ((1,), (0,))
    parts = lax.dot_general(
        by_part, weights.reshape(count, -1, columns), dimensions, preferred_element_type=jnp.float32
    )
    bias = None if linear.bias is None else linear.bias[...].astype(linear.dtype)
    return Parts(parts.reshape(count, *x.shape[:-1], columns), bias)


def with_bias(value: Float[Array, "*rows N"] | Parts, bias: Float[Array, " N"]) -> Float[Array, "*rows N"] | Parts:
    """Add a bias to a product that has none; of one in parts whoever adds them up does."""
    if isinstance(value, Parts):
        return value._replace(bias=bias)
    return value + jnp.expand_dims(bias, range(value.ndim - 1))


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
    if not isinstance(value, Parts | Shares):
        if sums is None:
            x = x + _normed(parallel.reduce(value), update.norm)
            return x, _normed(x, norm)
        value = Parts(value[None])
    width = x.shape[-1]
    if isinstance(value, Parts):
        value = value._replace(parts=value.parts.reshape(len(value.parts), -1, width))
    norms = [update.norm, norm]
    factors = Factors(*(None if each is None else each.scale[...] for each in norms))
    [how] = {Norm(each.epsilon, each.plus_one) for each in norms if each is not None}
    run = add_norm.add_and_norm if sums is None else sums.add_up_and_norm
    total, normed = run(x.reshape(-1, width), value, factors, how)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _normed(x: Float[Array, "*rows D"], norm: RMSNorm | None) -> Float[Array, "*rows D"]:
    return x if norm is None else norm(x)
