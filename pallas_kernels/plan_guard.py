"""Whether the plan still holds: every thread block of PAC looks at a few nodes, and POR heeds what they all find.

Also prefetches merge_ptr and used_rows into the L2 cache for POR.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

#: What thread blocks found comes in groups of this many: POR looks at one of them in each thread of a warpgroup.
GROUP = 128

_AT_ONCE = 8  # loads in flight
_LINE = 32  # int32 in a line of the L2 cache


def look(refs: Any) -> None:
    """Hold nodes c, c + num_ctas, ... to the lengths that the plan allows, and the forest's structure to the plan's.

    `refs` has the arrays of `pac_arrays` by name; c is the thread block.
    """
    nodes, num_ctas, cta = refs.node_length.shape[0], refs.cta_begin.shape[0], lax.axis_index("cta")

    def some(i: jax.Array, violated: jax.Array) -> jax.Array:
        for j in range(_AT_ONCE):
            node = jnp.minimum(cta + (i * _AT_ONCE + j) * num_ctas, nodes - 1)
            length = refs.node_length[node]
            violated |= (length < refs.min_length[node]) | (length > refs.max_length[node])
        return violated

    another = refs.structure_hash[0] != refs.planned_hash[0]
    for ref in (refs.merge_ptr, refs.used_rows):
        another |= ref[jnp.minimum(cta * _LINE, ref.shape[0] - 1)] < 0  # no plan has that
    violated = lax.fori_loop(0, -(-nodes // (num_ctas * _AT_ONCE)), some, another)
    refs.violations[cta] = violated.astype(jnp.int32)
