"""Facts of a call that are known when a step is compiled: its heads, and the scale of their scores."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

_TWO_BYTES = np.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Heads:
    """The heads of query, keys and values."""

    num_q_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H of query and keys
    value_head_dim: int
    query_dtype: np.dtype = _TWO_BYTES
    kv_dtype: np.dtype = _TWO_BYTES

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
        """Everything but the dtypes, which is what a plan is made for."""
        return self.num_q_heads, self.num_kv_heads, self.head_dim, self.value_head_dim


@dataclass(frozen=True)
class Scores:
    """Treatment of the products of query and keys before the softmax, beside the mask."""

    scale: float  # factor
