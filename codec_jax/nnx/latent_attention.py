"""Multi-head latent attention as a module: dense as training computes it, over a forest as serving does."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from codec_jax.attention.latent import absorbed, expanded, of_heads, reconstruct
from codec_jax.forest import LatentPages
from codec_jax.nnx.batch import Attend, ByHeads, Scoring
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.dense_attention import dense_attention
from codec_jax.nnx.mlp import linear
from codec_jax.nnx.norm import RMSNorm
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.rope import rotate

#: Of the norms of latents, whatever the others have: as published.
_EPSILON = 1e-6


class MultiHeadLatentAttention(nnx.Module):
    """Attention whose pages hold one latent vector per token for all heads, as in DeepSeek-V3.

    Over a forest up_key is applied to the query and up_value to the output, so that the latents themselves are read
    (`codec_jax.latent.latent_attention`); the dense form computes K and V of every head.

    >>> from codec_jax.nnx import Latent, MultiHeadLatentAttention
    >>> latent = Latent(size=24, nope_dim=16, rope_dim=8, value_dim=16)
    >>> config = DecoderConfig(64, 32, 64, 1, num_q_heads=4, num_kv_heads=1, head_dim=32, qk_norm=False, latent=latent)
    >>> attention = MultiHeadLatentAttention(config, nnx.Rngs(0))
    >>> jax.jit(attention)(jnp.ones((1, 3, 32), jnp.bfloat16), jnp.arange(3)[None]).shape
    (1, 3, 32)

    Source: DeepSeek-V2, section 2.1 (arXiv 2405.04434).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, layer: int = 0) -> None:
        """Create the projections and the norms of the latents.

        Args:
          config: sizes and variants of the decoder, `latent` among them.
          rngs: draw the weights.
          layer: its number, from 0, as windows and rotary positions may differ.

        Raises ValueError for a config without `latent`.
        """
        if config.latent is None:
            raise ValueError("config: expected one with latent, the sizes of latent attention, got None; use Attention")
        self.config, self.latent, self.layer = config, config.latent, layer
        width, heads, latent = config.hidden_size, config.num_q_heads, config.latent
        of_latents = replace(config, norm_epsilon=_EPSILON)
        if latent.query_size is not None:
            self.query_down = linear(config, width, latent.query_size, rngs)
            self.query_norm = RMSNorm(latent.query_size, of_latents)
        self.query = linear(config, latent.query_size or width, heads * latent.query_dim, rngs)
        self.down = linear(config, width, latent.page_dim, rngs)
        self.latent_norm = RMSNorm(latent.size, of_latents)
        draw = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        self.up_key = nnx.Param(draw(rngs.params(), (latent.size, heads, latent.nope_dim), config.param_dtype))
        self.up_value = nnx.Param(draw(rngs.params(), (latent.size, heads, latent.value_dim), config.param_dtype))
        self.out = linear(config, heads * latent.value_dim, width, rngs)

    def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Dense causal attention among the T tokens.

        Args:
          x: [B, T, D], hidden states.
          positions: [B, T], integers: those of the tokens of each sequence, from 0.

        Returns [B, T, D].
        """
        query_nope, query_rope, rows = self._project(x, positions)
        heads = reconstruct(rows, self.up_key[...], self.up_value[...], rows.dtype)  # a sequence is one page
        query, value_dim = jnp.concatenate([query_nope, query_rope], axis=-1), self.latent.value_dim
        columns = max(query.shape[3], value_dim)  # of all, as `jax.nn.dot_product_attention` wants it
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, columns - x.shape[3]))) for x in (query, heads.key, heads.value)
        )
        attended = dense_attention(query, key, value, positions, self._scoring())
        return self._merge(attended[..., :value_dim])

    def decode(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"],
        pages: LatentPages,
        attend: Attend,
        parallel: Parallel = ALONE,
    ) -> tuple[Float[Array, "B T D"], LatentPages]:
        """Store the latents of the T tokens in their slots, then attend to each request's whole context. Jittable.

        Args:
          x: [B, T, D], hidden states of each request's last T tokens.
          positions: [B, T], from `Forest.positions`, or `DraftTrees.positions`.
          slots: [B, T], from `Forest.slots`; NO_SLOT for what is not to be stored.
          pages: latents of this layer.
          attend: called with queries of the latents [B, T, N, L + rope], float32, the pages, and how the layer scores,
            and returns [B, T, N, L] or more, of which the first L numbers are taken; a call of `forest_attention`. With
            K and V beside the latents it is also told how these are attended, and returns values.
          parallel: the devices among which heads and pages are divided; one by default.

        Returns [B, T, D], of several devices the part of a sum that this one has, and the pages.
        """
        query_nope, query_rope, rows = self._project(x, positions)
        pages = pages.write(slots, rows, rope=self.latent.rope_dim)
        query = absorbed(query_nope, query_rope, self.up_key[...])
        num_q_heads, _ = parallel.heads(self.config.num_q_heads, 1)
        columns = parallel.gather(query.reshape(*x.shape[:2], -1), [num_q_heads * self.latent.page_dim])
        query, kept = columns.reshape(*x.shape[:2], num_q_heads, -1), pages.reconstructed
        if kept is None:
            values = self._values(attend(query, pages, self._scoring()))
        else:
            by_heads = ByHeads(of_heads(query_nope, query_rope, kept.key.dtype), kept, self._values)
            values = attend(query, pages, self._scoring(), by_heads)
        return self._merge(values.astype(x.dtype)), pages

    def reconstruct(
        self, pages: LatentPages, page_ids: Int[Array, " pages"], places: Int[Array, " pages"]
    ) -> LatentPages:
        """Compute K and V of every head for some pages, and keep them beside the latents. Jittable.

        Args:
          pages: latents of this layer, with room for K and V (`DecoderConfig.new_cache`).
          page_ids: those to compute them for.
          places: the page of `pages.reconstructed` for each; what is out of bounds is dropped.
        """
        assert pages.reconstructed is not None
        kept = pages.reconstructed
        new = reconstruct(pages.rows(page_ids), self.up_key[...], self.up_value[...], kept.key.dtype)
        kept = jax.tree.map(lambda x, rows: x.at[places].set(rows, mode="drop"), kept, new)
        return replace(pages, reconstructed=kept)

    def _scoring(self) -> Scoring:
        """Return how the layer makes weights of queries and keys."""
        config, scale = self.config, self.config.scale
        scale = self.latent.query_dim**-0.5 if scale is None else scale
        return Scoring(config.window_of(self.layer), scale, config.softcap, None)

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Return both parts of the queries, and the rows of the pages, [B, T, 1, L + rope]."""
        config, latent = self.config, self.latent
        source = x if latent.query_size is None else self.query_norm(self.query_down(x))
        query = self.query(source).reshape(*x.shape[:2], -1, latent.query_dim)
        query_nope, query_rope = jnp.split(query, [latent.nope_dim], axis=-1)
        rows, key_rope = jnp.split(self.down(x)[:, :, None], [latent.size], axis=-1)
        query_rope, key_rope = (
            rotate(_halved(part), positions, *config.rope_of(self.layer)) for part in (query_rope, key_rope)
        )
        return query_nope, query_rope, jnp.concatenate([self.latent_norm(rows), key_rope], axis=-1)

    def _values(self, attended: Float[Array, "B T N L"]) -> Float[Array, "B T N V"]:
        """Return the values of what attention to latents gives."""
        return expanded(attended, self.up_value[...])

    def _merge(self, heads: Array) -> Array:
        return self.out(heads.reshape(*heads.shape[:2], -1))


def _halved(x: Float[Array, "B T N rope"]) -> Float[Array, "B T N rope"]:
    """Return neighbours, which are turned together here, as pairs (x[i], x[i + rope/2])."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
