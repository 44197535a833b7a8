"""Rotary position embedding, in the half-split form of Llama and Qwen3."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(x: Float[Array, "B T N H"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T N H"]:
    """Turn each pair (x[i], x[i + H/2]) by position * theta^(-2i/H); angles and products are float32."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
