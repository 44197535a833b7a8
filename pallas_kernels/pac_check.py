"""Whether the plan still holds: every thread block of PAC looks at a few nodes, and POR heeds what they all find.

Having time for it, they look at what POR begins with, too, so that it comes from the L2 cache then.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pac_pipeline import Pipeline

#: What thread blocks found comes in groups of this many: POR looks at one of them in each thread of a warpgroup.
FOUND_GROUP = 128

_AT_ONCE = 8  # loads in flight
_LINE = 32  # int32 in a line of the L2 cache


def check(pipeline: Pipeline) -> None:
    """Hold nodes c, c + num_ctas, ... to the lengths that the plan allows, and the forest's structure to the plan's."""
    inputs = pipeline.inputs
    nodes, num_ctas, cta = inputs.node_length.shape[0], inputs.runs.shape[0], lax.axis_index("cta")

    def some(i: jax.Array, broken: jax.Array) -> jax.Array:
        for j in range(_AT_ONCE):
            node = jnp.minimum(cta + (i * _AT_ONCE + j) * num_ctas, nodes - 1)
            length = inputs.node_length[node]
            broken |= (length < inputs.least_length[node]) | (length > inputs.most_length[node])
        return broken

    another = inputs.structure[0] != inputs.planned_structure[0]
    for ref in (inputs.merge_ptr, inputs.used_rows):
        another |= ref[jnp.minimum(cta * _LINE, ref.shape[0] - 1)] < 0  # no plan has that
    broken = lax.fori_loop(0, -(-nodes // (num_ctas * _AT_ONCE)), some, another)
    pipeline.outputs.broken[cta] = broken.astype(jnp.int32)
