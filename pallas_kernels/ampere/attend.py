"""The plan on GPUs since Ampere: its arrays go to the Pallas kernels as they are, two launches a call."""

from functools import partial

import jax
from jax import Array

from pallas_kernels import two_launches
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores


# Lowering the kernels takes seconds, and a step calls them in every layer. A jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("scores",))
@jax.enable_x64(False)  # the kernels count in int32
def attend(call: Call, scores: Scores) -> tuple[Array, Array, Array]:
    """Run PAC and POR, as `Family.attend` promises."""
    # A JAX that was built without GPU support may not have their dialect, and one before 0.11 not their products.
    from pallas_kernels.ampere.pac import pac
    from pallas_kernels.ampere.por import por

    return two_launches.run(call, partial(pac, scores=scores), por)
