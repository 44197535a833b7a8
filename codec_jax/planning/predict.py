"""Times that a plan's own cost model expects of it."""

import numpy as np
from jaxtyping import Float

from codec_jax.planning.plan import Plan


def loads(plan: Plan) -> Float[np.ndarray, " num_ctas"]:
    """Estimate how long each thread block of the plan of one device takes, in microseconds."""
    segment, cta_ptr = plan.arrays.used_segments, np.asarray(plan.arrays.cta_ptr)
    unmasked, masked = segment.first_masked - segment.begin, segment.end - segment.first_masked
    cost = plan.host.estimates[0].segments(segment.is_wide, unmasked, masked)
    until = np.zeros(len(cost) + 1)
    np.cumsum(cost, out=until[1:])
    return np.diff(until[cta_ptr])


def call_us(plan: Plan) -> float:
    """Estimate how long the kernels of a call take, in microseconds: on several devices, on the slowest."""
    model, heads = plan.cost_model, plan.heads.num_kv_heads
    slowest = max(float(loads(plan.local(device)).max()) for device in range(plan.devices))
    return slowest + model.launch_us + model.stream_us * (plan.arrays.num_tiles - 1) * heads


def exchange_bytes(plan: Plan, itemsize: int = 2) -> int:
    """Count the bytes that a device sends when partials are merged: output, maximum and sum of the others' heads."""
    rows = plan.arrays.request_capacity * plan.arrays.query_tokens * plan.heads.num_q_heads
    return rows * (plan.heads.value_head_dim * itemsize + 8) * (plan.devices - 1) // plan.devices
