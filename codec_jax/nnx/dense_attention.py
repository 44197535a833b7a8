"""Attention that keeps nothing apart: what training computes, and what decoding is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from codec_jax.nnx.batch import Scoring


def dense_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    scoring: Scoring,
    mask: Bool[Array, "B T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to the tokens that a mask allows and the layer's window reaches; the softmax is float32.

    The mask allows those of positions 0 to the query token's own, in their order; None if they are the T tokens.
    """
    if scoring.window is None and scoring.softcap is None and scoring.sinks is None:
        heads_mask = None if mask is None else mask[:, None]
        return jax.nn.dot_product_attention(
            query, key, value, mask=heads_mask, is_causal=mask is None, scale=scoring.scale
        )
    seen = jnp.tril(jnp.ones((1, query.shape[1], key.shape[1]), bool)) if mask is None else mask
    if scoring.window is not None:
        at = positions[..., None]
        after = seen.sum(axis=-1, keepdims=True, dtype=jnp.int32) - jnp.cumsum(seen, axis=-1, dtype=jnp.int32)
        seen = seen & (at - after >= scoring.window.first_position(at))
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scale = query.shape[3] ** -0.5 if scoring.scale is None else scoring.scale
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    # Not -inf: rows of padding, which see nothing, must not become NaN.
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if scoring.sinks is not None:
        sinks = scoring.sinks.astype(jnp.float32).reshape(1, key.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)
