"""Facts of a call that are known when a step is compiled: its heads, what becomes of scores, and the window."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

_TWO_BYTES = np.dtype(jnp.bfloat16)
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Heads:
    """The heads of query, keys and values."""

    num_q_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H of query and keys
    value_head_dim: int
    query_dtype: np.dtype = _TWO_BYTES
    kv_dtype: np.dtype = _TWO_BYTES
    values_in_keys: bool = False  # the values are the first numbers of the keys, and are not stored again
    rotated_beside: int = 0  # numbers of a key that have pages of their own, beside latents of one byte with scales

    @classmethod
    def of(cls, query: Any, key_pages: Any, value_pages: Any) -> "Heads":
        """Describe the heads of a call.

        Args:
          query: [B, T, N, H].
          key_pages: [num_pages, page_size, K, H].
          value_pages: [num_pages, page_size, K, V].

        >>> from pallas_kernels import Heads
        >>> Heads.of(jnp.ones((2, 1, 8, 64)), jnp.ones((4, 16, 2, 64)), jnp.ones((4, 16, 2, 64))).shape
        (8, 2, 64, 64)
        """
        (n, h), k, v = query.shape[2:], key_pages.shape[2], value_pages.shape[3]
        return cls(n, k, h, v, np.dtype(query.dtype), np.dtype(key_pages.dtype))

    @property
    def group(self) -> int:
        """Q heads of a kv head (G)."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Everything but the dtypes: what a call must have in common with its plan."""
        return self.num_q_heads, self.num_kv_heads, self.head_dim, self.value_head_dim


@dataclass(frozen=True)
class Scores:
    """Treatment of the products of query and keys before the softmax, beside the mask."""

    scale: float  # factor
    softcap: float | None = None  # the scaled scores s become softcap * tanh(s / softcap)

    @property
    def cap_factor(self) -> float | None:
        """Factor from products to what tanh caps; None without a cap."""
        return None if self.softcap is None else self.scale / self.softcap

    @property
    def log2_factor(self) -> float:
        """Factor from products, or from what tanh gives, to units of log2."""
        return (self.scale if self.softcap is None else self.softcap) * _LOG2E


@dataclass(frozen=True)
class Window:
    """How far back a query token sees. Raises ValueError for a number of tokens that is none.

    A window that slides holds the `tokens` last tokens, the query token among them, as `sliding_window` of Hugging
    Face's configs says. A chunked one begins at the last multiple of `tokens`, as in Llama 4.

    >>> Window(4).first_position(9), Window(4, chunked=True).first_position(9)
    (6, 8)
    """

    tokens: int
    chunked: bool = False

    def __post_init__(self) -> None:
        """Check both."""
        whole = isinstance(self.tokens, int | np.integer) and not isinstance(self.tokens, bool)
        if not whole or not 0 < self.tokens < 2**30:
            raise ValueError(f"window: expected a positive number of tokens, below 2**30, got {self.tokens!r}")
        if not isinstance(self.chunked, bool | np.bool_):
            raise ValueError(f"chunked: expected True or False, got {self.chunked!r}")
        object.__setattr__(self, "chunked", bool(self.chunked))
        object.__setattr__(self, "tokens", int(self.tokens))  # those of NumPy take others' arithmetic to floats

    def first_position(self, position: Any) -> Any:
        """Return the first position that a query token sees; it may be negative. Jittable.

        Args:
          position: that of the query token, or an array of them, int32.

        >>> Window(4).first_position(np.arange(5)).tolist()
        [-3, -2, -1, 0, 1]
        """
        return position // self.tokens * self.tokens if self.chunked else position - (self.tokens - 1)
