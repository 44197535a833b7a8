"""Device axes that values vary along inside of `jax.shard_map`: loops have to be told, and kernels need not know."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

#: The axes along which a number of this program varies.
NOWHERE = jax.typeof(np.int32(0)).manual_axis_type


def vary_like(value: jax.Array, tree: Any) -> jax.Array:
    """Return a value that varies along every device axis along which some array of a tree does.

    Under `jax.shard_map` a loop may not change along which axes its carry varies. The selection is folded away.
    """
    for array in jax.tree.leaves(tree):
        if jax.typeof(array).manual_axis_type == NOWHERE:
            continue
        value = jnp.where(True, value, jnp.ravel(array)[0].astype(value.dtype))
    return value


def unvaried(value: jax.Array) -> jax.Array:
    """Return a value that is taken for the same on all devices; nothing is computed.

    A kernel is the program of one device, and what its loops carry comes from arrays that vary and from numbers that do
    not. Apply `vary_like` to its results.
    """
    return _unvaried_p.bind(value)


_unvaried_p = Primitive("unvaried")
_unvaried_p.def_impl(lambda value: value)
_unvaried_p.def_abstract_eval(lambda aval: aval.update(manual_axis_type=NOWHERE))
batching.defvectorized(_unvaried_p)
mlir.register_lowering(_unvaried_p, lambda _, value: [value])
