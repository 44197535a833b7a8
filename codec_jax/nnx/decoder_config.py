"""Sizes and variants of a decoder: all that tells one family of models from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from codec_jax import checks
from codec_jax.forest import KVPages
from codec_jax.nnx.rope import RopeScaling
from pallas_kernels import Window

#: What becomes of gate and up: silu(gate) up, or with the tanh form of gelu; or both clamped, as in gpt-oss.
Activation = Literal["silu", "gelu_tanh", "clamped"]
_CHOICES = {
    "activation": ("silu", "gelu_tanh", "clamped"),
    "norm_placement": ("before", "after", "both"),
    "qk_norm_over": ("head", "projection"),
}


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in the place of an MLP: each token goes through those that its router likes most.

    Raises ValueError for sizes that cannot be.

    >>> from codec_jax.nnx import Mixture
    >>> Mixture(num_experts=8, experts_per_token=2, expert_size=64).normalised
    True
    """

    num_experts: int
    experts_per_token: int
    expert_size: int  # mlp_size of one expert
    normalised: bool = True  # the weights of a token's experts sum to 1, not those of all experts
    bias: bool = False  # of router and experts
    every: int = 1  # only every n-th layer has a mixture, and the others an MLP
    dense_layers: tuple[int, ...] = ()  # further layers that have an MLP

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that cannot be."""
        for name in ("num_experts", "experts_per_token", "expert_size", "every"):
            checks.integer(name, getattr(self, name))
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token: expected at most num_experts = {self.num_experts}, got {self.experts_per_token}"
            )


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder; the defaults are those of Qwen3.

    Raises ValueError for sizes that cannot be, and choices that are none.

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
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    qk_norm: bool = True
    tied_embeddings: bool = True
    dtype: DTypeLike = jnp.bfloat16  # of activations, and of the KV cache if it has none of its own
    param_dtype: DTypeLike = jnp.bfloat16
    qkv_bias: bool = False
    out_bias: bool = False  # of the product after attention
    mixture: Mixture | None = None
    windows: tuple[Window | None, ...] = (None,)  # of each layer, or a pattern that repeats; None: all that is before
    window_rope_theta: float | None = None  # of layers with a window, which are not scaled then; None: as the others
    softcap: float | None = None  # on scores: softcap tanh(score / softcap)
    logit_softcap: float | None = None
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    sinks: bool = False  # each q head has a logit that takes part in the softmax, and no value
    qk_norm_over: Literal["head", "projection"] = "head"  # each head by itself, or all of queries and all of keys
    norm_placement: Literal["before", "after", "both"] = "before"  # of attention and of the MLP
    norm_plus_one: bool = False  # norms multiply by 1 + their factors
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    kv_dtype: DTypeLike | None = None  # of the KV cache; float8_e4m3fn takes one byte a number

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that cannot be."""
        for name in (
            "vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim",
        ):  # fmt: skip
            checks.integer(name, getattr(self, name))
        optional = ("window_rope_theta", "softcap", "logit_softcap", "scale")
        given = [name for name in optional if getattr(self, name) is not None]
        for name in ("rope_theta", "norm_epsilon", "embedding_scale", *given):
            if not checks.number(name, value := getattr(self, name)) > 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        for name in ("dtype", "param_dtype"):
            checks.float_dtype(name, getattr(self, name))
        checks.float_dtype("kv_dtype", self.cache_dtype, jnp.dtype(jnp.float8_e4m3fn))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_q_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number for rotary positions, got {self.head_dim}")
        if not self.windows or not all(window is None or isinstance(window, Window) for window in self.windows):
            raise ValueError(
                f"windows: expected a tuple of Window, or None, for each layer or as a pattern, got {self.windows!r}"
            )

    @property
    def cache_dtype(self) -> jnp.dtype:
        """The dtype of the KV cache."""
        return jnp.dtype(self.dtype if self.kv_dtype is None else self.kv_dtype)

    @property
    def query_key_value_sizes(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values, in this order, in the product that computes all three."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_q_heads * self.head_dim, kv, kv

    @property
    def gate_up_sizes(self) -> tuple[int, int]:
        """Columns of the MLP's gate and up projection, in this order, in the product that computes both."""
        return self.mlp_size, self.mlp_size

    @property
    def windows_used(self) -> tuple[Window | None, ...]:
        """The different windows of all layers, None first if some layer has none: a step has a plan for each."""
        used = dict.fromkeys(self.window_of(layer) for layer in range(min(self.num_layers, len(self.windows))))
        return tuple(sorted(used, key=lambda window: window is not None))

    def window_of(self, layer: int) -> Window | None:
        """Return how far back a layer sees.

        Args:
          layer: from 0.

        >>> from codec_jax import Window
        >>> config = DecoderConfig(64, 32, 64, 4, 4, 2, 16, windows=(Window(8), None))
        >>> [config.window_of(layer) for layer in (1, 2)]
        [None, Window(tokens=8, chunked=False)]
        """
        return self.windows[layer % len(self.windows)]

    def rope_of(self, layer: int) -> tuple[float, RopeScaling | None]:
        """Return base and scaling of a layer's rotary positions.

        Args:
          layer: from 0.

        >>> DecoderConfig(64, 32, 64, 4, 4, 2, 16, rope_theta=1e6).rope_of(3)
        (1000000.0, None)
        """
        if self.window_rope_theta is not None and self.window_of(layer) is not None:
            return self.window_rope_theta, None
        return self.rope_theta, self.rope_scaling

    def mixture_of(self, layer: int) -> Mixture | None:
        """Return the mixture of experts of a layer, None where it has an MLP.

        Args:
          layer: from 0.

        >>> DecoderConfig(64, 32, 64, 4, 4, 2, 16).mixture_of(0) is None
        True
        """
        mixture = self.mixture
        is_dense = mixture is None or (layer + 1) % mixture.every or layer in mixture.dense_layers
        return None if is_dense else mixture

    def new_cache(self, num_pages: int, page_size: int) -> tuple[KVPages, ...]:
        """Return empty KV pages for every layer.

        Args:
          num_pages: pages of each layer.
          page_size: tokens in a page.
        """
        return tuple(
            KVPages.zeros(num_pages, page_size, self.num_kv_heads, self.head_dim, self.cache_dtype)
            for _ in range(self.num_layers)
        )
