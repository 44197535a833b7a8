"""Grouped-query attention as a module: dense as training computes it, over a forest as serving does."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from codec_jax.forest import KVPages
from codec_jax.nnx import head_split
from codec_jax.nnx.batch import Attend, Scoring
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.dense_attention import dense_attention
from codec_jax.nnx.mlp import linear
from codec_jax.nnx.norm import RMSNorm, reciprocal_root_mean_square
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.parts import multiply, with_bias
from codec_jax.nnx.rope import rotate
from pallas_kernels.addends import Parts


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, and of a config's variants those that concern it.

    >>> from codec_jax.nnx import Attention
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> attention = Attention(config, nnx.Rngs(0))
    >>> jax.jit(attention)(jnp.ones((1, 3, 32), jnp.bfloat16), jnp.arange(3)[None]).shape
    (1, 3, 32)
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, layer: int = 0) -> None:
        """Create the two projections, the norms and the sinks.

        Args:
          config: sizes and variants of the decoder.
          rngs: draw the weights.
          layer: its number, from 0, as windows and rotary positions may differ.
        """
        self.config, self.layer = config, layer
        width, head = config.hidden_size, config.head_dim
        # One product instead of three: each has a launch of its own, and small ones do not fill a GPU.
        self.query_key_value = linear(config, width, sum(config.query_key_value_sizes), rngs, bias=config.qkv_bias)
        self.out = linear(config, config.num_q_heads * head, width, rngs)
        if config.out_bias:
            self.out_bias = nnx.Param(jnp.zeros(width, config.param_dtype))
        if config.qk_norm:
            query, key, _ = config.query_key_value_sizes if config.qk_norm_over == "projection" else (head,) * 3
            self.query_norm = RMSNorm(query, config)
            self.key_norm = RMSNorm(key, config)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(config.num_q_heads, config.param_dtype))

    def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Dense causal attention among the T tokens.

        Args:
          x: [B, T, D], hidden states.
          positions: [B, T], integers: those of the tokens of each sequence, from 0.

        Returns [B, T, D].
        """
        query, key, value = self._project(x, positions)
        heads = dense_attention(query, key, value, positions, self._scoring())
        return self._with_bias(self.out(heads.reshape(*heads.shape[:2], -1)))

    def decode(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"],
        pages: KVPages,
        attend: Attend,
        parallel: Parallel = ALONE,
    ) -> tuple[Float[Array, "B T D"] | Parts, KVPages]:
        """Store K and V of the T tokens in their slots, then attend to each request's whole context. Jittable.

        Args:
          x: [B, T, D], hidden states of each request's last T tokens.
          positions: [B, T], from `Forest.positions`, or `DraftTrees.positions`.
          slots: [B, T], from `Forest.slots`; NO_SLOT for what is not to be stored.
          pages: K and V of this layer.
          attend: called with the queries [B, T, N, H], the pages, and how the layer scores, and returns [B, T, N, H];
            a call of `forest_attention`.
          parallel: the devices among which weights, heads and pages are divided; one by default.

        Returns [B, T, D], of several devices the part of a sum that this one has, of one perhaps all parts; and the
        pages.
        """
        config = self.config
        if head_split.serves(config, parallel, slots.size):
            scales = (self.query_norm.scale[...], self.key_norm.scale[...]) if config.qk_norm else None
            product = self.query_key_value
            is_whole = product.kernel[...].shape[1] == sum(parallel.columns(config))  # so that nothing is to be joined
            as_it_is = is_whole or parallel.collects_heads
            columns = multiply(config, parallel, product, x) if as_it_is else self._columns(x, parallel)
            places = positions, slots, pages
            query, pages = head_split.split_heads(config, parallel, self.layer, columns, scales, *places)
        else:
            query, key, value = self._project(x, positions, parallel)
            pages = pages.write(slots, key, value)
        heads = attend(query, pages, self._scoring())
        merged = multiply(config, parallel, self.out, heads.reshape(*heads.shape[:2], -1))
        return self._with_bias(merged, parallel), pages

    def _scoring(self) -> Scoring:
        """Return how the layer makes weights of queries and keys."""
        config = self.config
        sinks = self.sinks[...] if config.sinks else None
        return Scoring(config.window_of(self.layer), config.scale, config.softcap, sinks)

    def _columns(self, x: Array, parallel: Parallel) -> Array:
        """Return queries, keys and values of the heads that this device attends with."""
        return parallel.gather(self.query_key_value(x), parallel.columns(self.config))

    def _project(self, x: Array, positions: Array, parallel: Parallel = ALONE) -> tuple[Array, Array, Array]:
        config = self.config
        num_q_heads, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
        heads = self._columns(x, parallel).reshape(*x.shape[:2], -1, config.head_dim)
        # Queries and keys together, and rounded once, so that XLA needs one reduction for the norms of all heads and
        # does the rest in the very kernels that store them.
        turning, value = jnp.split(heads, [num_q_heads + num_kv_heads], axis=2)
        exact = turning.astype(jnp.float32)
        if config.qk_norm and config.qk_norm_over == "projection":
            parts = zip(jnp.split(exact, [num_q_heads], axis=2), (self.query_norm, self.key_norm), strict=True)
            exact = jnp.concatenate(
                [norm(part.reshape(*x.shape[:2], -1)).reshape(part.shape) for part, norm in parts], 2
            )
        elif config.qk_norm:
            factor = reciprocal_root_mean_square(exact, config.norm_epsilon)
            exact *= factor * self._head_scales(num_q_heads, num_kv_heads)[None, None]
        turned = rotate(exact, positions, *config.rope_of(self.layer)).astype(heads.dtype)
        query, key = jnp.split(turned, [num_q_heads], axis=2)
        return query, key, value

    def _head_scales(self, num_q_heads: int, num_kv_heads: int) -> Float[Array, "N+K H"]:
        """Return the factors of each head's norm, queries' first; float32."""
        norms = (self.query_norm, num_q_heads), (self.key_norm, num_kv_heads)
        return jnp.concatenate([
            jnp.broadcast_to(norm.factors, (heads, self.config.head_dim)) for norm, heads in norms
        ])  # fmt: skip

    def _with_bias(self, merged: Any, parallel: Parallel = ALONE) -> Any:
        if not self.config.out_bias:
            return merged
        return with_bias(merged, parallel.once(self.out_bias[...].astype(self.config.dtype)))
