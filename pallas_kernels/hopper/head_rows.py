"""Heads on their way from a product to attention, on Hopper GPUs: what the kernel takes, and its call."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.addends import Parts
from pallas_kernels.hopper.tiling import SIXTEEN_BITS, why_not_on
from pallas_kernels.varying import unvaried, vary_like

#: A lane loads 1, 2 or 4 numbers of half a head at once; heads of 192, with 3, were wrong on an H200.
HEAD_DIMS = (64, 128, 256)
#: Rows of a thread block.
BLOCK_ROWS = 4


class Norm(NamedTuple):
    """How a root mean square norm computes."""

    epsilon: float
    plus_one: bool  # it multiplies by 1 + its factors

    def factors(self, stored: Float[Array, "*any"]) -> Float[Array, "*any"]:
        """Return what is multiplied by, float32."""
        exact = stored.astype(jnp.float32)
        return exact + 1.0 if self.plus_one else exact


class HeadSizes(NamedTuple):
    """The columns of a product: heads of queries, of keys, of values."""

    num_q_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    norm: Norm | None  # of queries and keys

    @property
    def half(self) -> int:
        """Numbers of half a head."""
        return self.head_dim // 2

    @property
    def num_heads(self) -> int:
        """All heads."""
        return self.num_q_heads + 2 * self.num_kv_heads

    def share(self, devices: int) -> "HeadSizes":
        """Return the heads that each of some devices has, among which they are divided."""
        return self._replace(num_q_heads=self.num_q_heads // devices, num_kv_heads=self.num_kv_heads // devices)


#: Factors of the norm of queries, and of that of keys, [H] each; None without them.
Scales = tuple[Float[Array, " H"], Float[Array, " H"]] | None


class Places(NamedTuple):
    """What rotates keys and queries, and where K and V go."""

    cos: Float[Array, "rows half"]  # of each row's angles, H / 2 of them; float32
    sin: Float[Array, "rows half"]
    slots: Int[Array, " rows"]  # token slots; what is out of bounds is not stored
    key_pages: Float[Array, "num_pages page_size K H"]
    value_pages: Float[Array, "num_pages page_size K H"]


def why_not(sizes: HeadSizes, rows: int, dtype: Any, device: Any) -> str | None:
    """Say why the kernel cannot serve so many rows on a device; None if it can."""
    if reason := why_not_on(device):
        return reason
    if dtype not in SIXTEEN_BITS or sizes.head_dim not in HEAD_DIMS:
        return f"it takes heads of {HEAD_DIMS}, bfloat16 or float16, got {sizes.head_dim} and {dtype}"
    if rows < BLOCK_ROWS:
        return f"it takes at least {BLOCK_ROWS} rows, got {rows}"
    return None


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="sizes")
@jax.enable_x64(False)  # the kernel counts in int32
def split_heads(
    columns: Parts, scales: Scales, places: Places, sizes: HeadSizes
) -> tuple[Float[Array, "rows N H"], Float[Array, "num_pages page_size K H"], Float[Array, "num_pages page_size K H"]]:
    """Normalise and rotate queries and keys, and store K and V.

    Entries of V that are not finite are stored as 0, K as it is.

    Args:
      columns: [S, rows, (N + 2K) H], of all heads, in S parts; bfloat16, float16 or float32.
      scales: factors of the norms of queries, and of keys, if there are norms.
      places: positions and pages; bfloat16 or float16, and so is the query.
      sizes: the heads.

    Returns the query, and the pages.
    """
    # A JAX that was built without GPU support may not have their dialect.
    from pallas_kernels.hopper import split_heads

    given = columns, scales, places
    columns, scales, places = jax.tree.map(unvaried, given)
    query, key, value = split_heads.split_heads(columns, scales, places, sizes)
    return vary_like(query, given), vary_like(key, given), vary_like(value, given)
