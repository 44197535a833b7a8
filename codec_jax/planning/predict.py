"""Times that a plan's own cost model expects of it."""

import numpy as np
from jaxtyping import Float

from codec_jax.planning.plan import Plan


def loads(plan: Plan) -> Float[np.ndarray, " num_ctas"]:
    """Estimate how long each thread block of a plan takes, in microseconds."""
    segment, cta_ptr = plan.arrays.used_segments, np.asarray(plan.arrays.cta_ptr)
    unmasked, masked = segment.first_masked - segment.begin, segment.end - segment.first_masked
    cost = plan.host.estimate.segments(segment.is_wide, unmasked, masked)
    until = np.zeros(len(cost) + 1)
    np.cumsum(cost, out=until[1:])
    return np.diff(until[cta_ptr])


def call_us(plan: Plan) -> float:
    """Estimate how long the kernels of a call take, in microseconds."""
    model, heads = plan.host.estimate.model, plan.heads.num_kv_heads
    return float(loads(plan).max()) + model.launch_us + model.stream_us * (plan.arrays.num_tiles - 1) * heads
