"""The differences between the JAX versions that the kernels run on, 0.10.2 to the newest."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
_BEFORE_0_11, _BEFORE_0_12 = _VERSION < (0, 11), _VERSION < (0, 12)


def transposed(ref: Any) -> Any:
    """View a two-dimensional reference with its dimensions swapped."""
    return plgpu.transpose_ref(ref, (1, 0)) if _BEFORE_0_11 else ref.transpose((1, 0))


def load(ref: Any, layout: Any, *, optimized: bool = False) -> jax.Array:
    """Load a whole reference into registers of the given layout; `optimized` refuses to be slow."""
    if _BEFORE_0_11:
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    load_ref: Any = plgpu.load  # the versions differ in its signature
    return load_ref(ref, layout=layout, optimized=optimized)


def store(ref: Any, value: jax.Array) -> None:
    """Store registers, even if bank conflicts or parts of a memory sector make it slow."""
    if _BEFORE_0_12:
        ref[...] = value
    else:
        store_ref: Any = vars(plgpu)["store"]  # the older versions have none
        store_ref(ref, value, optimized=False)
