"""Sizes and variants of a decoder: all that tells one family of models from another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from codec_jax import checks
from codec_jax.forest import KVPages, LatentPages, Pages, Quantisation
from codec_jax.forest.kv_pages import LEAST_SCALE, MOST_SCALE
from codec_jax.forest.latent_pages import SCALED_TOGETHER, reconstructed_dtype
from codec_jax.nnx.rope import RopeScaling
from pallas_kernels import Window
from pallas_kernels.gates import Activation

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
    first_layer: int = 0  # all layers before it have an MLP
    shared_size: int | None = None  # mlp_size of what every token goes through beside its experts; None: nothing
    sigmoid: bool = False  # weights are sigmoids, and a bias of each expert has a say in the choice only; else softmax
    groups: int = 1  # of experts next to each other
    groups_per_token: int = 1  # those whose two best experts have the largest sum; only their experts are chosen
    weight_scale: float = 1.0  # factor on the weights of a token's experts, after they are normalised

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that cannot be."""
        for name in ("normalised", "bias", "sigmoid"):
            checks.boolean(name, getattr(self, name))
        if not isinstance(self.dense_layers, tuple):
            raise ValueError(f"dense_layers: expected a tuple of layers, got {self.dense_layers!r}")
        for layer in self.dense_layers:
            checks.integer("dense_layers", layer, 0)
        for name in ("num_experts", "experts_per_token", "expert_size", "every", "groups", "groups_per_token"):
            checks.integer(name, getattr(self, name))
        checks.integer("first_layer", self.first_layer, 0)
        if self.shared_size is not None:
            checks.integer("shared_size", self.shared_size)
        if not checks.number("weight_scale", self.weight_scale) > 0:
            raise ValueError(f"weight_scale: expected a positive number, got {self.weight_scale}")
        if self.sigmoid and self.bias:
            raise ValueError("bias: expected False with sigmoid, whose router and experts have none, got True")
        if self.num_experts % self.groups or (self.groups > 1 and self.num_experts < 2 * self.groups):
            raise ValueError(
                f"groups: expected a divisor of num_experts = {self.num_experts} that leaves each at least 2, "
                f"got {self.groups}"
            )
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token: expected at most groups = {self.groups}, got {self.groups_per_token}")
        most = self.num_experts // self.groups * self.groups_per_token
        if self.experts_per_token > most:
            of = "num_experts" if self.groups == 1 else f"the experts of {self.groups_per_token} groups"
            raise ValueError(f"experts_per_token: expected at most {of} = {most}, got {self.experts_per_token}")


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention, which keeps one latent vector per token in the place of K and V.

    Raises ValueError for sizes that cannot be.

    >>> from codec_jax.nnx import Latent
    >>> Latent(size=512, nope_dim=128, rope_dim=64, value_dim=128).page_dim
    576
    """

    size: int  # L, numbers of a latent
    nope_dim: int  # of a head's queries and keys: those that have no position
    rope_dim: int  # of a head's queries, and of the one key that all heads share: those that are rotated
    value_dim: int  # of a head's values
    query_size: int | None = None  # numbers of the latent that queries are made of; None: of the hidden state itself

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that cannot be."""
        for name in ("size", "nope_dim", "rope_dim", "value_dim"):
            checks.integer(name, getattr(self, name))
        if self.query_size is not None:
            checks.integer("query_size", self.query_size)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim: expected an even number for rotary positions, got {self.rope_dim}")
        if self.value_dim > self.query_dim:
            raise ValueError(
                f"value_dim: expected at most nope_dim + rope_dim = {self.query_dim}, got {self.value_dim}"
            )

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query before up_key is applied to it."""
        return self.nope_dim + self.rope_dim

    @property
    def page_dim(self) -> int:
        """Numbers of a token in the pages, and of a head's query that reads them."""
        return self.size + self.rope_dim


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder; the defaults are those of Qwen3.

    Raises ValueError for sizes that cannot be, and choices that are none; TypeError for parts of other types.

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
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim), with latents 1 / sqrt(query_dim)
    sinks: bool = False  # each q head has a logit that takes part in the softmax, and no value
    qk_norm_over: Literal["head", "projection"] = "head"  # each head by itself, or all of queries and all of keys
    norm_placement: Literal["before", "after", "both"] = "before"  # of attention and of the MLP
    norm_plus_one: bool = False  # norms multiply by 1 + their factors
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    kv_dtype: DTypeLike | None = None  # of the KV cache; float8_e4m3fn takes one byte a number
    # For one byte: of keys and of values, of each layer, or by token, found when it is written; None: 1.
    kv_scales: tuple[tuple[float, float], ...] | Literal["token"] | None = None
    latent: Latent | None = None  # of latent attention, with which num_kv_heads is 1 and head_dim its page_dim

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that cannot be, TypeError for parts of other types."""
        kinds: dict[str, Any] = {"rope_scaling": RopeScaling, "mixture": Mixture, "latent": Latent}
        for name, kind in kinds.items():
            if (part := getattr(self, name)) is not None:
                checks.instance(name, part, kind)
        for name in ("qk_norm", "tied_embeddings", "qkv_bias", "out_bias", "sinks", "norm_plus_one"):
            checks.boolean(name, getattr(self, name))
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
        if self.kv_dtype is not None:
            checks.float_dtype("kv_dtype", self.kv_dtype, jnp.dtype(jnp.float8_e4m3fn))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_q_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number for rotary positions, got {self.head_dim}")
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.kv_scales is not None:
            self._check_scales(self.kv_scales)
        windows = self.windows if isinstance(self.windows, tuple) else ()
        if not windows or not all(window is None or isinstance(window, Window) for window in windows):
            raise ValueError(
                "windows: expected a tuple of Window, or None, for each layer or as a pattern, such as (Window(8),), "
                f"got {self.windows!r}"
            )

    def _check_scales(self, scales: Any) -> None:
        """Raise ValueError for what are no scales of this cache."""
        pairs = scales if isinstance(scales, tuple) else ()
        is_by_token = isinstance(scales, str) and scales == "token"
        if not (is_by_token or len(pairs) == self.num_layers) or self.cache_dtype.itemsize > 1:
            got = len(pairs) if pairs else repr(scales)
            raise ValueError(
                f"kv_scales: expected a tuple of a pair for each of {self.num_layers} layers, or 'token', with a "
                f"kv_dtype of one byte, got {got} with {self.cache_dtype}"
            )
        for layer, pair in enumerate(pairs):
            name = f"kv_scales[{layer}]"
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"{name}: expected a tuple of two numbers, for keys and for values, got {pair!r}")
            if not all(LEAST_SCALE <= checks.number(name, scale) <= MOST_SCALE for scale in pair):
                raise ValueError(f"{name}: expected positive numbers from 2**-100 to 2**100, got {pair}")

    def _check_latent(self, latent: Latent) -> None:
        """Raise ValueError for what latent attention does not go with."""
        if (self.num_kv_heads, self.head_dim) != (1, latent.page_dim):
            raise ValueError(
                f"latent: expected num_kv_heads = 1 and head_dim = {latent.page_dim}, which its pages have, got "
                f"{self.num_kv_heads} and {self.head_dim}"
            )
        given = [name for name in ("qk_norm", "qkv_bias", "out_bias", "sinks") if getattr(self, name)]
        if given:
            raise ValueError(f"latent: expected no {' and no '.join(given)} with latent attention; set them to False")
        if self.kv_scales is not None and not (isinstance(self.kv_scales, str) and self.kv_scales == "token"):
            raise ValueError("kv_scales: expected None or 'token' with latents, whose pages have scales by token")
        if self.cache_dtype.itemsize == 1 and latent.size % SCALED_TOGETHER:
            raise ValueError(
                f"kv_dtype: expected no {self.cache_dtype} for latents of {latent.size} numbers, for each "
                f"{SCALED_TOGETHER} have a scale; leave kv_dtype out"
            )

    @property
    def cache_dtype(self) -> jnp.dtype:
        """The dtype of the KV cache."""
        return jnp.dtype(self.dtype if self.kv_dtype is None else self.kv_dtype)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token in the KV cache of all layers."""
        if self.latent is not None and self.cache_dtype.itemsize == 1:
            # Latents, their scales in float32, rotated keys in bfloat16.
            scales = self.latent.size // SCALED_TOGETHER
            return self.num_layers * (self.latent.size + 4 * scales + 2 * self.latent.rope_dim)
        arrays, scale_bytes = 2 if self.latent is None else 1, 4 * (self.kv_scales == "token")
        head = self.head_dim * self.cache_dtype.itemsize + scale_bytes
        return arrays * self.num_layers * self.num_kv_heads * head

    @property
    def reconstructed_token_bytes(self) -> int:
        """Bytes of K and V of every head of one token, in all layers, where they are kept beside its latents."""
        assert self.latent is not None
        head = self.latent.query_dim + self.latent.value_dim
        return self.num_layers * self.num_q_heads * head * self.reconstructed_dtype.itemsize

    @property
    def reconstructed_dtype(self) -> jnp.dtype:
        """The dtype of K and V that are kept beside latents."""
        return reconstructed_dtype(self.cache_dtype if self.cache_dtype.itemsize > 1 else self.dtype)

    @property
    def query_key_value_sizes(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values, in this order, in the product that computes all three."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_q_heads * self.head_dim, kv, kv

    @property
    def value_dim(self) -> int:
        """Numbers of a head in the product after attention."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def gate_up_sizes(self) -> tuple[int, int]:
        """Columns of the MLP's gate and up projection, in this order, in the product that computes both."""
        return self.mlp_size, self.mlp_size

    @property
    def windows_used(self) -> tuple[Window | None, ...]:
        """The different windows of all layers, None first if some layer has none: a step has a plan for each."""
        used = dict.fromkeys(self.window_of(layer) for layer in range(min(self.num_layers, len(self.windows))))
        return tuple(sorted(used, key=lambda window: window is not None))

    @property
    def windowed_layers(self) -> int:
        """How many layers have a window."""
        return sum(self.window_of(layer) is not None for layer in range(self.num_layers))

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
        if mixture is None or layer < mixture.first_layer or layer in mixture.dense_layers:
            return None
        return None if (layer + 1) % mixture.every else mixture

    def new_cache(
        self, num_pages: int, page_size: int, reconstructed_pages: int = 0, windowed_pages: int | None = None
    ) -> tuple[Pages, ...]:
        """Return empty KV pages for every layer, or latent pages.

        Args:
          num_pages: pages of each layer.
          page_size: tokens in a page.
          reconstructed_pages: pages of K and V of every head beside those of latents.
          windowed_pages: pages of each layer with a window; defaults to `num_pages`.
        """
        few = num_pages if windowed_pages is None else windowed_pages
        pages = [num_pages if self.window_of(layer) is None else few for layer in range(self.num_layers)]
        return tuple(self._new_pages(n, page_size, reconstructed_pages, layer) for layer, n in enumerate(pages))

    def _new_pages(self, num_pages: int, page_size: int, reconstructed_pages: int, layer: int) -> Pages:
        if self.latent is not None:
            sizes = num_pages, page_size, self.latent.page_dim
            pages = LatentPages.zeros(*sizes, self.cache_dtype, rope=self.latent.rope_dim)
            if not reconstructed_pages:
                return pages
            key, value = (
                jnp.zeros((reconstructed_pages, page_size, self.num_q_heads, size), self.reconstructed_dtype)
                for size in (self.latent.query_dim, self.latent.value_dim)
            )
            return replace(pages, reconstructed=KVPages(key, value))
        scales = None
        if self.kv_scales == "token":
            scales = Quantisation.by_token(num_pages, page_size, self.num_kv_heads)
        elif self.kv_scales is not None:
            scales = Quantisation.of(self.num_kv_heads, *self.kv_scales[layer])
        return KVPages.zeros(
            num_pages, page_size, self.num_kv_heads, self.head_dim, self.cache_dtype, quantisation=scales
        )
