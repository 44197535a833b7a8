"""Rotary position embedding, in the half-split form of Llama and Qwen3."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from codec_jax import checks


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch rotary positions beyond the context they were first trained on.

    Pairs that turn more than `high_frequency_factor` times within `original_context` tokens keep their frequency,
    those that turn less than `low_frequency_factor` times are slowed down by `factor`, and those between are
    interpolated. Raises ValueError for factors that cannot be.

    >>> from codec_jax.nnx import Llama3Scaling
    >>> Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192).factor
    8.0
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def __post_init__(self) -> None:
        """Check the factors."""
        checks.integer("original_context", self.original_context)
        if not self.factor > 0:
            raise ValueError(f"factor: expected a positive number, got {self.factor}")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                "high_frequency_factor: expected more than low_frequency_factor, and both positive, "
                f"got {self.high_frequency_factor} and {self.low_frequency_factor}"
            )


def frequencies(half: int, theta: float, scaling: Llama3Scaling | None) -> Float[np.ndarray, " half"]:
    """Return the angle per position of each of the H/2 pairs: theta^(-2i/H), scaled. float64."""
    frequency = theta ** (-np.arange(half) / half)
    if scaling is None:
        return frequency
    turns = scaling.original_context * frequency / (2 * np.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor)


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], theta: float, scaling: Llama3Scaling | None = None
) -> Float[Array, "B T N H"]:
    """Turn each pair (x[i], x[i + H/2]) by position * `frequencies`[i]; angles and products are float32."""
    # Rounded once, on the host: at position 100,000 an ulp of a frequency is already a visible angle.
    frequency = jnp.asarray(frequencies(x.shape[-1] // 2, theta, scaling), jnp.float32)[None, None, None]
    angle = positions[..., None, None].astype(jnp.float32) * frequency  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
