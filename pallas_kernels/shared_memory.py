"""How rows lie in shared memory for products, in the kernels of every family."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def swizzled(dtype: Any, columns: int) -> tuple[Any, ...]:
    """Return the transforms that lay rows out in tiles of 8, and of so many columns, swizzled."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)
