"""Device axes that values vary along inside of `jax.shard_map`, which loops and kernels have to be told."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def vary_like(value: jax.Array, tree: Any) -> jax.Array:
    """Return a value that varies along every device axis along which some array of a tree does.

    Under `jax.shard_map` a loop may not change along which axes its carry varies. The selection is folded away.
    """
    for array in jax.tree.leaves(tree):
        value = jnp.where(True, value, jnp.ravel(array)[0].astype(value.dtype))
    return value


def type_like(value: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Return the type of a kernel's output that varies along the device axes of `value`."""
    return jax.typeof(value).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)
