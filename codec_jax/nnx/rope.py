"""Rotary position embedding, in the half-split form of Llama and Qwen3, and how models stretch it."""

from __future__ import annotations

import math
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
        _check_positive(factor=self.factor)
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                "high_frequency_factor: expected more than low_frequency_factor, and both positive, "
                f"got {self.high_frequency_factor} and {self.low_frequency_factor}"
            )

    def _scaled(self, frequency: Float[np.ndarray, " half"], theta: float) -> Float[np.ndarray, " half"]:
        """Return the frequencies of the longer context."""
        turns = self.original_context * frequency / (2 * np.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        return _slowed(frequency, self.factor, np.clip((turns - low) / (high - low), 0.0, 1.0))


@dataclass(frozen=True)
class LinearScaling:
    """All pairs turn slower by `factor`, as in the global layers of Gemma 3. Raises ValueError if it is not positive.

    >>> from codec_jax.nnx import LinearScaling
    >>> LinearScaling(factor=8.0).factor
    8.0
    """

    factor: float

    def __post_init__(self) -> None:
        """Check the factor."""
        _check_positive(factor=self.factor)

    def _scaled(self, frequency: Float[np.ndarray, " half"], theta: float) -> Float[np.ndarray, " half"]:
        """Return the frequencies of the longer context."""
        return frequency / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: fast pairs keep their frequency, slow ones are slowed down by `factor`, with a ramp between.

    The ramp goes, over the numbers of the pairs, from the one that turns `beta_fast` times within `original_context`
    tokens to the one that turns `beta_slow` times. Queries and keys are multiplied by `attention_factor`, so scores by
    its square. Raises ValueError for factors that cannot be.

    >>> from codec_jax.nnx import YarnScaling
    >>> YarnScaling(factor=32.0, original_context=4096, attention_factor=1.35, truncate=False).beta_fast
    32.0

    Source: Peng et al., "YaRN", section 3 (arXiv 2309.00071).
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # both ends of the ramp are whole numbers

    def __post_init__(self) -> None:
        """Check the factors."""
        checks.integer("original_context", self.original_context)
        _check_positive(factor=self.factor, attention_factor=self.attention_factor)
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_fast: expected at least beta_slow, and both positive, got {self.beta_fast} and {self.beta_slow}"
            )

    def _scaled(self, frequency: Float[np.ndarray, " half"], theta: float) -> Float[np.ndarray, " half"]:
        """Return the frequencies of the longer context."""
        half = len(frequency)
        low, high = (
            half * math.log(self.original_context / (2 * np.pi * turns)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)  # of the head's size, not of its pairs: as published
        # A ramp without a width is a step.
        ramp = (np.arange(half) - low) / (high - low if high != low else 1e-3)
        return _slowed(frequency, self.factor, 1.0 - np.clip(ramp, 0.0, 1.0))


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling


def frequencies(half: int, theta: float, scaling: RopeScaling | None) -> Float[np.ndarray, " half"]:
    """Return the angle per position of each of the H/2 pairs: theta^(-2i/H), scaled. float64."""
    frequency = theta ** (-np.arange(half) / half)
    return frequency if scaling is None else scaling._scaled(frequency, theta)


def turns(
    positions: Int[Array, "*batch"], half: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Return what `rotate` multiplies each pair of a token with: cosine and sine of position * `frequencies`[i]."""
    # Rounded once, on the host: at position 100,000 an ulp of a frequency is already a visible angle.
    frequency = jnp.asarray(frequencies(half, theta, scaling), jnp.float32)
    angle = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequency, range(positions.ndim))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(scaling, YarnScaling):
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], theta: float, scaling: RopeScaling | None = None
) -> Float[Array, "B T N H"]:
    """Turn each pair (x[i], x[i + H/2]) by position * `frequencies`[i]; angles and products are float32."""
    cos, sin = (each[:, :, None] for each in turns(positions, x.shape[-1] // 2, theta, scaling))  # [B, T, 1, H/2]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def _slowed(
    frequency: Float[np.ndarray, " half"], factor: float, kept: Float[np.ndarray, " half"]
) -> Float[np.ndarray, " half"]:
    """Return frequencies of which a part is kept, and the rest divided by the factor."""
    return frequency * (kept + (1.0 - kept) / factor)


def _check_positive(**factors: float) -> None:
    for name, factor in factors.items():
        if not factor > 0:
            raise ValueError(f"{name}: expected a positive number, got {factor}")
