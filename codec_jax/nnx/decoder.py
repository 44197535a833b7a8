"""A decoder of the Llama and Qwen3 family as Flax NNX modules.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP. Every module computes dense causal
attention when called, as training does, and attention over a forest in `decode`, as serving does; the weights are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from codec_jax import checks
from codec_jax.forest import DraftTrees, Forest, KVPages
from codec_jax.nnx.batch import Attend, Batch, attend, joined, parted
from codec_jax.nnx.norm import RMSNorm, reciprocal_root_mean_square
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.rope import Llama3Scaling, rotate
from codec_jax.planning import Plan


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder. Llama 3: no q/k norm, and from 3.1 on rope_scaling; Qwen3: q/k norm.

    Raises ValueError for sizes that cannot be.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> config.new_cache(num_pages=8, page_size=16)[0].key.shape
    (8, 16, 2, 16)
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    norm_epsilon: float = 1e-6
    qk_norm: bool = True
    tied_embeddings: bool = True
    dtype: DTypeLike = jnp.bfloat16  # of activations and of the KV cache
    param_dtype: DTypeLike = jnp.bfloat16

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that cannot be."""
        for name in (
            "vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim",
        ):  # fmt: skip
            checks.integer(name, getattr(self, name))
        for name in ("rope_theta", "norm_epsilon"):
            if not checks.number(name, value := getattr(self, name)) > 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        for name in ("dtype", "param_dtype"):
            checks.float_dtype(name, getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_q_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number for rotary positions, got {self.head_dim}")

    @property
    def query_key_value_sizes(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values, in this order, in the product that computes all three."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_q_heads * self.head_dim, kv, kv

    @property
    def gate_up_sizes(self) -> tuple[int, int]:
        """Columns of the MLP's gate and up projection, in this order, in the product that computes both."""
        return self.mlp_size, self.mlp_size

    def new_cache(self, num_pages: int, page_size: int) -> tuple[KVPages, ...]:
        """Return empty KV pages for every layer.

        Args:
          num_pages: pages of each layer.
          page_size: tokens in a page.
        """
        return tuple(
            KVPages.zeros(num_pages, page_size, self.num_kv_heads, self.head_dim, self.dtype)
            for _ in range(self.num_layers)
        )


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and optional q/k norm.

    >>> from codec_jax.nnx import Attention
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> attention = Attention(config, nnx.Rngs(0))
    >>> jax.jit(attention)(jnp.ones((1, 3, 32), jnp.bfloat16), jnp.arange(3)[None]).shape
    (1, 3, 32)
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        """Create the two projections and the norms.

        Args:
          config: sizes of the decoder.
          rngs: draw the weights.
        """
        self.config = config
        width, head = config.hidden_size, config.head_dim
        # One product instead of three: each has a launch of its own, and small ones do not fill a GPU.
        self.query_key_value = _linear(config, width, sum(config.query_key_value_sizes), rngs)
        self.out = _linear(config, config.num_q_heads * head, width, rngs)
        if config.qk_norm:
            self.query_norm = _norm(config, head)
            self.key_norm = _norm(config, head)

    def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Dense causal attention among the T tokens.

        Args:
          x: [B, T, D], hidden states.
          positions: [B, T], integers.

        Returns [B, T, D].
        """
        query, key, value = self._project(x, positions)
        return self._merge(jax.nn.dot_product_attention(query, key, value, is_causal=True))

    def decode(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"],
        pages: KVPages,
        attend: Attend,
        parallel: Parallel = ALONE,
    ) -> tuple[Float[Array, "B T D"], KVPages]:
        """Store K and V of the T tokens in their slots, then attend to each request's whole context. Jittable.

        Args:
          x: [B, T, D], hidden states of each request's last T tokens.
          positions: [B, T], from `Forest.positions`, or `DraftTrees.positions`.
          slots: [B, T], from `Forest.slots`; NO_SLOT for what is not to be stored.
          pages: K and V of this layer.
          attend: called with the queries [B, T, N, H] and the pages, and returns [B, T, N, H]; a call of
            `forest_attention`.
          parallel: the devices among which weights, heads and pages are divided; one by default.

        Returns [B, T, D], of several devices the part of a sum that this one has, and the pages.
        """
        query, key, value = self._project(x, positions, parallel)
        pages = pages.write(slots, key, value)
        return self._merge(attend(query, pages)), pages

    def _project(self, x: Array, positions: Array, parallel: Parallel = ALONE) -> tuple[Array, Array, Array]:
        config = self.config
        num_q_heads, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
        sizes = [count * config.head_dim for count in (num_q_heads, num_kv_heads, num_kv_heads)]
        columns = parallel.gather(self.query_key_value(x), sizes)
        heads = columns.reshape(*x.shape[:2], -1, config.head_dim)
        # Queries and keys together, and rounded once, so that XLA needs one reduction for the norms of all heads and
        # does the rest in the very kernels that store them.
        turning, value = jnp.split(heads, [num_q_heads + num_kv_heads], axis=2)
        exact = turning.astype(jnp.float32)
        if config.qk_norm:
            factor = reciprocal_root_mean_square(exact, config.norm_epsilon)
            exact *= factor * self._head_scales(num_q_heads, num_kv_heads)[None, None]
        turned = rotate(exact, positions, config.rope_theta, config.rope_scaling).astype(heads.dtype)
        query, key = jnp.split(turned, [num_q_heads], axis=2)
        return query, key, value

    def _head_scales(self, num_q_heads: int, num_kv_heads: int) -> Float[Array, "N+K H"]:
        """Return the factors of each head's norm, queries' first; float32."""
        norms = (self.query_norm, num_q_heads), (self.key_norm, num_kv_heads)
        scales = [jnp.broadcast_to(norm.scale[...], (heads, self.config.head_dim)) for norm, heads in norms]
        return jnp.concatenate(scales).astype(jnp.float32)

    def _merge(self, heads: Array) -> Array:
        return self.out(heads.reshape(*heads.shape[:2], -1))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        """Create the two projections."""
        self.gate_up = _linear(config, config.hidden_size, sum(config.gate_up_sizes), rngs)
        self.down = _linear(config, config.mlp_size, config.hidden_size, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Map each token by itself."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(nnx.silu(gate) * up)


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        """Create attention, MLP, and the norm before each."""
        self.attention_norm = _norm(config, config.hidden_size)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, config.hidden_size)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Dense causal attention, then the MLP."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))

    def decode(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"],
        pages: KVPages,
        attend: Attend,
        parallel: Parallel = ALONE,
    ) -> tuple[Float[Array, "B T D"], KVPages]:
        """Attention over a forest, then the MLP."""
        attended, pages = self.attention.decode(self.attention_norm(x), positions, slots, pages, attend, parallel)
        x = x + parallel.reduce(attended)
        return x + parallel.reduce(self.mlp(self.mlp_norm(x))), pages


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
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = _norm(config, config.hidden_size)
        if not config.tied_embeddings:
            self.head = _linear(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every position by dense causal attention: for training, and as the reference for decoding.

        Args:
          tokens: [B, T], token ids.

        Returns [B, T, V], float32.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.logits(self.norm(x))

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: tuple[KVPages, ...],
        forest: Forest,
        plan: Plan,
        *,
        drafts: DraftTrees | None = None,
        store: Bool[Array, "B T"] | bool = True,
        implementation: str | None = None,
        parallel: Parallel = ALONE,
    ) -> tuple[Float[Array, "B T D"], tuple[KVPages, ...]]:
        """Run each request's last T tokens, whose room in the forest is taken already (`Forest.extend`). Jittable.

        Args:
          tokens: [B, T], token ids; with drafts they are candidates, in depth-first order.
          cache: K and V of every layer.
          forest, plan, drafts, implementation: as in `forest_attention`.
          store: [B, T], false for tokens that are computed but not stored. Tokens that are not in the request's own
            leaf are not stored either.
          parallel: as in `decode_together`.

        Returns the final hidden states [B, T, D], for `logits`, and the cache with the tokens' K and V. Raises
        ValueError for tokens that do not fit the forest, and what `forest_attention` raises.
        """
        (hidden,), cache = self.decode_together(
            [Batch(tokens, forest, plan, store, drafts)], cache, implementation=implementation, parallel=parallel
        )
        return hidden, cache

    def decode_together(
        self,
        batches: Sequence[Batch],
        cache: tuple[KVPages, ...],
        *,
        implementation: str | None = None,
        parallel: Parallel = ALONE,
    ) -> tuple[list[Float[Array, "B T D"]], tuple[KVPages, ...]]:
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
        rows = joined(*batches)
        # Without the barrier XLA looks them up, from leaf to node to page, in every kernel that writes K or V.
        slots = lax.optimization_barrier(parallel.local_slots(rows.slots, cache[0]))
        run = partial(attend, batches, implementation, parallel)
        x, written = parallel.embed(self.embedding, rows.tokens, self.config.vocab_size), []
        for block, pages in zip(self.blocks, cache, strict=True):
            x, pages = block.decode(x, rows.positions, slots, pages, run, parallel)
            written.append(pages)
        return parted(self.norm(x), batches), tuple(written)

    def logits(self, hidden: Float[Array, "*batch D"], parallel: Parallel = ALONE) -> Float[Array, "*batch V"]:
        """Map final hidden states to logits, float32.

        Args:
          hidden: [..., D], from `decode`.
          parallel: as in `decode_together`.
        """
        weights = self.embedding.embedding[...].T if self.config.tied_embeddings else self.head.kernel[...]
        # Float32 as the product leaves it, rather than rounded and converted back in a pass over the vocabulary.
        return parallel.join(jnp.dot(hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32))

    def new_cache(self, num_pages: int, page_size: int) -> tuple[KVPages, ...]:
        """Return empty KV pages for every layer.

        Args:
          num_pages: pages of each layer.
          page_size: tokens in a page.
        """
        return self.config.new_cache(num_pages, page_size)


def _linear(config: DecoderConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)


def _norm(config: DecoderConfig, size: int) -> RMSNorm:
    return RMSNorm(size, config.norm_epsilon, config.param_dtype)
