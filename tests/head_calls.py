"""Random calls of the kernel that splits heads, and what it should give, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from norm_calls import listed

from codec_jax.forest import NO_SLOT
from pallas_kernels.addends import Parts
from pallas_kernels.hopper.head_rows import HeadSizes, Norm, Places, Scales

_PAGE_SIZE = 8


def sizes_of(q_heads: int, kv_heads: int, norm: Norm | None, head_dim: int = 128) -> HeadSizes:
    return HeadSizes(q_heads, kv_heads, head_dim, norm)


def random_call(
    rows: int, sizes: HeadSizes, dtype: Any = jnp.bfloat16, parts: int = 1, bias: bool = False
) -> tuple[Parts, Scales, Places]:
    """Rows go to slots in any order, some of them nowhere; the last value is not finite. Several parts are float32."""
    rng = np.random.default_rng(rows)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    scales = tuple(jnp.asarray(rng.uniform(0.5, 1.5, sizes.head_dim), dtype) for _ in range(2)) if sizes.norm else None
    angle = rng.integers(0, 100_000, (rows, 1)) * 10_000.0 ** (-np.arange(sizes.half) / sizes.half)
    cos, sin = (jnp.asarray(of(angle), jnp.float32) for of in (np.cos, np.sin))
    num_slots = (rows // _PAGE_SIZE + 2) * _PAGE_SIZE
    slots = rng.permutation(num_slots)[:rows].astype(np.int32)
    slots[:3] = NO_SLOT, -1, num_slots
    pages = num_slots // _PAGE_SIZE, _PAGE_SIZE, sizes.num_kv_heads, sizes.head_dim
    columns = draw(parts, rows, sizes.num_heads * sizes.head_dim)
    columns = columns.at[-1, -1, -2:].set(jnp.asarray([jnp.nan, jnp.inf], dtype))
    columns = columns if parts == 1 else columns.astype(jnp.float32) + 0.001
    left = Parts(columns, draw(columns.shape[2]) if bias else None)
    return left, scales, Places(cos, sin, jnp.asarray(slots), draw(*pages), draw(*pages))


def check_heads(made: Any, columns: Parts, scales: Scales, places: Places, sizes: HeadSizes) -> None:
    """Hold the query, and K and V of all token slots, to those in float64."""
    total = listed(columns).sum(0)
    heads = total.reshape(len(total), -1, sizes.head_dim)
    cos, sin = (np.asarray(x, np.float64) for x in (places.cos[:, None], places.sin[:, None]))
    first_key, first_value = sizes.num_q_heads, sizes.num_q_heads + sizes.num_kv_heads
    parts = [heads[:, :first_key], heads[:, first_key:first_value]]

    def turned(x: np.ndarray, stored: Any) -> np.ndarray:
        if sizes.norm is not None:
            factors = np.asarray(stored, np.float64) + sizes.norm.plus_one
            x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + sizes.norm.epsilon) * factors
        left, right = np.split(x, 2, axis=2)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=2)

    query, key = (turned(*each) for each in zip(parts, scales or (None, None), strict=True))
    value = np.where(np.isfinite(heads[:, first_value:]), heads[:, first_value:], 0)
    pages = [np.asarray(x, np.float64).reshape(-1, *x.shape[2:]) for x in (places.key_pages, places.value_pages)]
    for row, slot in enumerate(np.asarray(places.slots)):
        if 0 <= slot < len(pages[0]):
            pages[0][slot], pages[1][slot] = key[row], value[row]
    for array, expected in zip(made, (query, *pages), strict=True):
        got = np.asarray(array, np.float64).reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=0.01, atol=0.02)
