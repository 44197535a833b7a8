"""A decoder as Flax NNX modules: blocks of attention and an MLP or a mixture of experts, as the config says.

Every module computes dense causal attention when called, as training does, and attention over a forest in `decode`,
as serving does; the weights are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from codec_jax import checks
from codec_jax.forest import DraftTrees, Forest, Pages
from codec_jax.nnx.batch import Attend, Batch, Plans, attend, check_plans, in_places, joined, parted
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.experts import Experts
from codec_jax.nnx.latent_attention import MultiHeadLatentAttention
from codec_jax.nnx.mlp import MLP, linear
from codec_jax.nnx.norm import RMSNorm
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.parts import Update, add_and_norm
from codec_jax.nnx.self_attention import Attention
from pallas_kernels.addends import Parts, Shares


class Block(nnx.Module):
    """One transformer layer: attention, then an MLP or a mixture of experts, with norms before or after each."""

    def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs) -> None:
        """Create attention, MLP, and the norms around each."""
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        mixture = config.mixture_of(layer)
        if before:
            self.attention_norm = RMSNorm(config.hidden_size, config)
            self.mlp_norm = RMSNorm(config.hidden_size, config)
        kind: Any = Attention if config.latent is None else MultiHeadLatentAttention
        self.attention = kind(config, rngs, layer)
        self.mlp = MLP(config, rngs) if mixture is None else Experts(config, mixture, rngs)
        if after:
            self.attention_out_norm = RMSNorm(config.hidden_size, config)
            self.mlp_out_norm = RMSNorm(config.hidden_size, config)
        self.placement = config.norm_placement

    def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Dense causal attention, then the MLP."""
        x = x + self._after("attention", self.attention(self._before("attention", x), positions))
        return x + self._after("mlp", self.mlp(self._before("mlp", x)))

    def decode(
        self,
        x: Float[Array, "B T D"],
        update: Update | None,
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"],
        pages: Pages,
        attend: Attend,
        parallel: Parallel = ALONE,
    ) -> tuple[Float[Array, "B T D"], Update, Pages]:
        """Attention over a forest, then the MLP; x comes with what the layer before adds to it, and returns so."""
        x, normed = self._entering("attention", x, update, parallel)
        attended, pages = self.attention.decode(normed, positions, slots, pages, attend, parallel)
        x, normed = self._entering("mlp", x, self._leaving("attention", attended), parallel)
        return x, self._leaving("mlp", self.mlp.decode(normed, parallel)), pages

    def _entering(self, part: str, x: Array, update: Update | None, parallel: Parallel) -> tuple[Array, Array]:
        """Return x with what is to be added to it, and what a part of the layer is given of it."""
        return add_and_norm(parallel, x, update, None if self.placement == "after" else getattr(self, f"{part}_norm"))

    def _leaving(self, part: str, value: Array | Parts | Shares) -> Update:
        """Return what a part of the layer gives, which waits for the next one to be added."""
        return Update(value, None if self.placement == "before" else getattr(self, f"{part}_out_norm"))

    def _before(self, part: str, x: Array) -> Array:
        return x if self.placement == "after" else getattr(self, f"{part}_norm")(x)

    def _after(self, part: str, x: Array) -> Array:
        return x if self.placement == "before" else getattr(self, f"{part}_out_norm")(x)


class Decoder(nnx.Module):
    """Token embedding, blocks, final norm and output head.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> model = Decoder(config, nnx.Rngs(0))
    >>> jax.jit(model)(np.asarray([[1, 2, 3]])).shape  # logits [B, T, V]
    (1, 3, 64)
    >>> forest, pool = Forest.from_nodes([-1], [30], [0]).reserve(PagePool.create(8, np.arange(2)), 1)
    >>> plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> hidden, cache = jax.jit(model.decode)(np.asarray([[1]]), model.new_cache(8, 16), forest.extend(), plan)
    >>> model.logits(hidden).shape
    (1, 1, 64)
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        """Create all layers with random weights.

        Args:
          config: sizes and variants.
          rngs: draw the weights.
        """
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, layer, rngs) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config)
        if not config.tied_embeddings:
            self.head = linear(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every position by dense causal attention: for training, and as the reference for decoding.

        Args:
          tokens: [B, T], token ids.

        Returns [B, T, V], float32.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.logits(self.norm(x))

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: tuple[Pages, ...],
        forest: Forest,
        plan: Plans,
        *,
        drafts: DraftTrees | None = None,
        store: Bool[Array, "B T"] | bool = True,
        implementation: str | None = None,
        parallel: Parallel = ALONE,
    ) -> tuple[Float[Array, "B T D"], tuple[Pages, ...]]:
        """Run each request's last T tokens, whose room in the forest is taken already (`Forest.extend`). Jittable.

        Args:
          tokens: [B, T], token ids; with drafts they are candidates, in depth-first order.
          cache: K and V of every layer.
          forest, drafts, implementation: as in `forest_attention`.
          plan: of the forest, as in `forest_attention`; for a model whose layers have different windows a tuple of
            plans, one for each of `config.windows_used`. Where K and V of some pages are kept beside latents, a tuple
            of plans of the rest, then as many of these pages.
          store: [B, T], false for tokens that are computed but not stored. Tokens that are not in the request's own
            leaf are not stored either.
          parallel: as in `decode_together`.

        Returns the final hidden states [B, T, D], for `logits`, and the cache with the tokens' K and V. Raises
        ValueError for tokens that do not fit the forest, or plans that are not those of the model's windows, and what
        `forest_attention` raises.
        """
        (hidden,), cache = self.decode_together(
            [Batch(tokens, forest, plan, store, drafts)], cache, implementation=implementation, parallel=parallel
        )
        return hidden, cache

    def decode_together(
        self,
        batches: Sequence[Batch],
        cache: tuple[Pages, ...],
        *,
        implementation: str | None = None,
        parallel: Parallel = ALONE,
    ) -> tuple[list[Float[Array, "B T D"]], tuple[Pages, ...]]:
        """Run several batches in one pass over the weights: chunks of prompts beside requests that decode. Jittable.

        Every layer stores K and V of all batches before one of them attends, so they may build on each other.

        Args:
          batches: tokens, forests over the same pages, and plans.
          cache: K and V of every layer.
          implementation: as in `forest_attention`.
          parallel: inside of `jax.shard_map`, the devices among which weights, cache and plans are divided; a plan is
            for the heads of one of them.

        Returns the final hidden states of each batch, and the cache. Raises what `decode` raises.

        >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
        >>> model, heads = Decoder(config, nnx.Rngs(0)), {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        >>> forest, _ = Forest.from_nodes([-1, -1], [3, 30], [0, 1]).reserve(PagePool.create(8, np.arange(3)), 1)
        >>> chunk, decoding = forest.only([0]), forest.only([1])
        >>> batches = [
        ...     Batch(np.ones((2, 3), int), chunk, make_plan(chunk, query_tokens=3, **heads)),
        ...     Batch(np.ones((2, 1), int), decoding.extend(), make_plan(decoding, **heads)),
        ... ]
        >>> hidden, cache = model.decode_together(batches, model.new_cache(8, 16))
        >>> [rows.shape for rows in hidden]
        [(2, 3, 32), (2, 1, 32)]
        """
        for batch in batches:
            checks.shape("tokens", batch.tokens, B=batch.forest.request_capacity, T=None)
            check_plans(batch, self.config.windows_used, cache[0])
        rows, places = joined(*batches), batches[0].places
        # Without the barrier XLA looks them up, from leaf to node to page, in every kernel that writes K or V.
        slots = in_window = lax.optimization_barrier(parallel.local_slots(rows.slots, cache[0]))
        if places is not None:
            in_window = lax.optimization_barrier(in_places(slots, places, cache[0].key.shape[1]))
        x, parallel = parallel.embed(self.embed, rows.tokens, self.config, [batch.tokens.shape for batch in batches])
        run, written = partial(attend, batches, implementation, parallel), []
        update: Update | None = None
        for layer, (block, pages) in enumerate(zip(self.blocks, cache, strict=True)):
            here = slots if self.config.window_of(layer) is None else in_window
            x, update, pages = block.decode(x, update, rows.positions, here, pages, run, parallel)
            written.append(pages)
        _, hidden = add_and_norm(parallel, x, update, self.norm)
        return parted(hidden, batches), tuple(written)

    def logits(self, hidden: Float[Array, "*batch D"], parallel: Parallel = ALONE) -> Float[Array, "*batch V"]:
        """Map final hidden states to logits, float32.

        Args:
          hidden: [..., D], from `decode`.
          parallel: as in `decode_together`.
        """
        return self._capped(parallel.join(self._head(hidden)))

    def own_logits(self, hidden: Float[Array, "B D"], parallel: Parallel = ALONE) -> Float[Array, "b V"]:
        """Map final hidden states to the logits of the rows that a device draws for (`Parallel.own`), float32.

        Args:
          hidden: [B, D], of all rows.
          parallel: as in `decode_together`; by default a device that draws for all of them.

        >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
        >>> Decoder(config, nnx.Rngs(0)).own_logits(jnp.ones((3, 32))).shape
        (3, 64)
        """
        return self._capped(parallel.deal(self._head, hidden))

    def _head(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch columns"]:
        """Return the logits of a device's part of the vocabulary, before they are capped."""
        weights = self.embedding.embedding[...].T if self.config.tied_embeddings else self.head.kernel[...]
        # Float32 as the product leaves it, rather than rounded and converted back in a pass over the vocabulary.
        return jnp.dot(hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def _capped(self, logits: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def new_cache(self, num_pages: int, page_size: int) -> tuple[Pages, ...]:
        """Return empty KV pages for every layer, or latent pages.

        Args:
          num_pages: pages of each layer.
          page_size: tokens in a page.
        """
        return self.config.new_cache(num_pages, page_size)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the hidden states that the first block gets.

        Args:
          tokens: [B, T], token ids.

        >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
        >>> Decoder(config, nnx.Rngs(0)).embed(np.asarray([[1, 2, 3]])).shape
        (1, 3, 32)
        """
        x, scale = self.embedding(tokens), self.config.embedding_scale
        # The factor is rounded to the dtype, as those who trained with it did.
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
