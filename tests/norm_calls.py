"""What kernels do that add a sum to hidden states, with the norms around that, by plain operations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from codec_jax.nnx import Decoder
from codec_jax.nnx.expert_products import added_up
from codec_jax.nnx.norm import RMSNorm
from pallas_kernels.addends import Parts, Shares
from pallas_kernels.hopper.add_norm import Factors
from pallas_kernels.hopper.head_rows import Norm

#: Where a layer has norms: of what it adds to the hidden states, and of these.
PLACEMENTS = {"before": (False, True), "both": (True, True), "after": (True, False)}


def factors_of(placement: str, update: Any, total: Any) -> Factors:
    """Those of the norms that there are."""
    return Factors(
        *(each if there else None for each, there in zip((update, total), PLACEMENTS[placement], strict=True))
    )


def listed(update: Parts | Shares) -> np.ndarray:
    """What is added up for each row, [S, rows, D], float64; nothing of an expert that is elsewhere."""
    if isinstance(update, Parts):
        parts = np.asarray(update.parts, np.float64)
        if update.bias is None:
            return parts
        return np.concatenate([parts, np.broadcast_to(np.asarray(update.bias, np.float64), (1, *parts.shape[1:]))])
    made, place, share = (np.asarray(each) for each in update)
    rows = np.concatenate([made.astype(np.float64), np.zeros((1, made.shape[1]))])[place]  # [rows, chosen, D]
    return (rows * share[..., None]).swapaxes(0, 1)


def summed(update: Parts | Shares) -> Any:
    """The sum of that, [rows, D], by operations of JAX."""
    if isinstance(update, Shares):
        return added_up(update, jnp.float32)
    return update.parts.sum(0) + (0.0 if update.bias is None else update.bias[None])


def normed(x: Any, factors: Any, norm: Norm) -> Any:
    """The root mean square norm; factors may have an axis for each of x."""
    return x * ((x * x).mean(-1, keepdims=True) + norm.epsilon) ** -0.5 * (factors + float(norm.plus_one))


def add_and_norm(x: Any, update: Any, factors: Factors, norm: Norm) -> Any:
    """What a kernel does to [rows, D] with what is added to it, by operations of JAX."""
    factors = jax.tree.map(lambda each: each.astype(jnp.float32)[None], factors)
    if factors.update is not None:
        update = normed(update.astype(jnp.float32), factors.update, norm)
    total = (x.astype(jnp.float32) + update).astype(x.dtype)
    if factors.total is None:
        return total, total
    return total, normed(total.astype(jnp.float32), factors.total, norm).astype(x.dtype)


def with_random_norms(model: Decoder) -> Decoder:
    """The same, whose norms multiply by different numbers."""
    rng = np.random.default_rng(0)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, RMSNorm):
            module.scale[...] += jnp.asarray(rng.uniform(-0.5, 0.5, module.scale.shape), module.scale.dtype)
    return model


def with_random_biases(model: Decoder) -> Decoder:
    """The same, with biases that make a difference."""
    draw = iter(jax.random.split(jax.random.key(1), 100))
    state = nnx.state(model, nnx.Param)

    def drawn(path: Any, value: Any) -> Any:
        is_bias = "bias" in str(path[-2:])
        return jax.random.normal(next(draw), value.shape, value.dtype) if is_bias else value

    nnx.update(model, jax.tree_util.tree_map_with_path(drawn, state))
    return model


def check(made: Any, x: Any, parts: Any, factors: Factors, norm: Norm, sent: bool = False) -> None:
    """Hold both results to float64; the norm is that of the rounded sum, as the next layer's hidden states are.

    Args:
      made: hidden states [..., D], and their norm.
      x: the hidden states before.
      parts: [S, devices, ..., D] of the sum.
      factors: [..., D], with an axis for each of x.
      norm: how both norms compute.
      sent: whether what each device has is rounded to the dtype of x.
    """
    eps, smallest = float(jnp.finfo(x.dtype).eps), float(jnp.finfo(x.dtype).smallest_subnormal)
    total, result = (np.asarray(each, np.float64) for each in made)
    before, parts = np.asarray(x, np.float64), np.asarray(parts, np.float64)
    shares = parts.sum(0)
    update, error = shares.sum(0), 1e-6 * np.abs(parts).sum((0, 1))
    if sent:
        error += (eps * np.abs(shares) + smallest).sum(0) / 2
    if factors.update is not None:
        of_update = np.asarray(factors.update, np.float64)
        scale = 1 / np.sqrt((update**2).mean(-1, keepdims=True) + norm.epsilon)
        off = np.sqrt((error**2).mean(-1, keepdims=True)) * scale + 1e-6  # of the scale, in relation to it
        error = np.abs(of_update + float(norm.plus_one)) * scale * (error + off * (np.abs(update) + error))
        update = normed(update, of_update, norm)
    exact = before + update
    error += 1e-6 * (np.abs(before) + np.abs(update))
    bound = error + (eps * (np.abs(exact) + error) + smallest) / 2
    assert (np.abs(total - exact) <= bound).all()
    if factors.total is None:
        np.testing.assert_array_equal(result, total)
    else:
        expected = normed(total, np.asarray(factors.total, np.float64), norm)
        np.testing.assert_allclose(result, expected, rtol=0.5 * eps + 1e-5, atol=smallest)
