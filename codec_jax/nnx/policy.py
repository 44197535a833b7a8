"""A decoder as Tunix calls models: dense attention with a cache of its own, and derivatives."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from codec_jax import checks
from codec_jax.forest import NO_SLOT, LatentPages, Pages
from codec_jax.nnx.batch import Scoring
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.dense_attention import dense_attention
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.parts import add_and_norm


class DenseCache(NamedTuple):
    """K and V of a policy that Tunix samples from itself: every request has one page, of the cache's whole size."""

    pages: tuple[Pages, ...]  # of each layer
    length: Int[Array, ""]  # tokens in each page


class Policy(Decoder):
    """A decoder as Tunix calls models: its trainers, its dense log-probabilities, and its own sampler.

    >>> from codec_jax.rollout import Policy
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> policy = Policy.of(Decoder(config, nnx.Rngs(0)))
    >>> causal = jnp.tril(jnp.ones((1, 3, 3), bool))
    >>> logits, _ = policy(jnp.asarray([[1, 2, 3]]), jnp.arange(3)[None], None, causal)
    >>> logits.shape
    (1, 3, 64)
    """

    @classmethod
    def of(cls, decoder: Decoder) -> Policy:
        """Make a policy that begins with a decoder's weights, which are not copied; training leaves the decoder alone.

        Args:
          decoder: such as one that `open_checkpoint` loads.

        >>> from codec_jax.rollout import Policy
        >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
        >>> Policy.of(Decoder(config, nnx.Rngs(0))).config.vocab_size
        64
        """
        checks.instance("decoder", decoder, Decoder)
        policy = nnx.eval_shape(lambda: cls(decoder.config, nnx.Rngs(0)))
        nnx.update(policy, nnx.state(decoder))
        return policy

    def init_cache(self, batch_size: int, cache_size: int, dtype: DTypeLike) -> DenseCache:
        """Return an empty cache.

        Args:
          batch_size: requests (B).
          cache_size: tokens of each.
          dtype: of K and V.

        >>> from codec_jax.rollout import Policy
        >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
        >>> Policy(config, nnx.Rngs(0)).init_cache(2, 100, jnp.float32).pages[0].key.shape
        (2, 100, 2, 16)
        """
        # Numbers of one byte would need their scales in dense attention, too.
        pages = replace(self.config, dtype=dtype, kv_dtype=None, kv_scales=None).new_cache(batch_size, cache_size)
        return DenseCache(pages, jnp.zeros((), jnp.int32))

    def __call__(  # type: ignore[override]
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: DenseCache | None,
        attention_mask: Bool[Array, "B T S"],
    ) -> tuple[Float[Array, "B T V"], DenseCache | None]:
        """Logits of every position by dense attention to what a mask allows.

        Args:
          tokens: [B, T], token ids.
          positions: [B, T], of the tokens; padding does not count.
          cache: of what came before; None if nothing did.
          attention_mask: [B, T, S], true for the tokens to attend to, of the T, or of the cache with them.

        Returns logits [B, T, V], float32, and the cache with the tokens. Tokens past the end of the cache are not
        stored, and their logits are NaN. Raises ValueError for shapes that do not belong together, more tokens than the
        whole cache holds, or a mask of another dtype.
        """
        batch, count = checks.shape("tokens", tokens, B=None, T=None).values()
        given = self.init_cache(batch, count, self.config.dtype) if cache is None else cache
        requests, room = given.pages[0].key.shape[:2]
        checks.shape("positions", positions, B=batch, T=count)
        if requests != batch or count > room:
            raise ValueError(
                f"cache: expected one of {batch} requests with room for {count} tokens or more, got one of {requests} "
                f"with {room}"
            )
        checks.shape("attention_mask", attention_mask, B=batch, T=count, S=room)
        if attention_mask.dtype != bool:
            raise ValueError(f"attention_mask: expected booleans, true for what is seen, got {attention_mask.dtype}")
        row, token = (jnp.arange(size, dtype=jnp.int32) for size in (batch, count))
        place = given.length + token[None]
        slots = jnp.where(place < room, row[:, None] * room + place, NO_SLOT)

        def attend(query: Array, pages: Pages, scoring: Scoring) -> Array:
            if isinstance(pages, LatentPages):
                key = value = pages.rows(slice(None)).astype(query.dtype)
            else:
                key, value = pages.key.astype(query.dtype), pages.value.astype(query.dtype)
            return dense_attention(query, key, value, positions, scoring, attention_mask)

        x, update, written, alone = self.embed(tokens), None, [], Parallel(differentiable=True)
        for block, pages in zip(self.blocks, given.pages, strict=True):
            x, update, pages = block.decode(x, update, positions, slots, pages, attend, alone)
            written.append(pages)
        _, hidden = add_and_norm(alone, x, update, self.norm)
        logits = self.logits(hidden)
        if cache is None:
            return logits, None
        fits = (place < room)[..., None]  # [1, T, 1]
        return jnp.where(fits, logits, jnp.nan), DenseCache(tuple(written), given.length + count)
