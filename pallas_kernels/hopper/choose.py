"""The experts of each token on Hopper GPUs, in one launch from scores to shares.

    one thread block for four tokens, each warp has the scores of one, [4, E] in registers:

        scores ─► the greatest, and the first expert with it ─► the greatest of the others ─► ...  as many as chosen
               ─► e to the power of how far each is below the greatest ─► over their sum: shares

XLA takes a softmax, a sort of all experts, which is most of it, and another sum.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.compat import load, store
from pallas_kernels.hopper.tiling import SIXTEEN_BITS, why_not_on
from pallas_kernels.varying import unvaried, vary_like
from pallas_kernels.warp_rows import WARPS, broadcast, layout

#: Tokens of a thread block, one for each warp.
_TOKENS = WARPS
#: Experts of which a lane has 1, 2, or a multiple of 4.
_EXPERTS = (32, 64, 128, 256, 512)


def why_not(scores: Any, device: Any) -> str | None:
    """Say why the kernel cannot serve scores [T, E] on a device; None if it can."""
    if reason := why_not_on(device):
        return reason
    if scores.dtype not in SIXTEEN_BITS or scores.shape[1] not in _EXPERTS:
        return f"it takes {_EXPERTS} experts, bfloat16 or float16, got {scores.shape[1]} and {scores.dtype}"
    return None


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("chosen", "normalised"))
@jax.enable_x64(False)  # the kernel counts in int32
def choose(
    scores: Float[Array, "T E"], *, chosen: int, normalised: bool
) -> tuple[Int[Array, "T chosen"], Float[Array, "T chosen"]]:
    """Return the experts of each token, those with the greatest scores, and their shares by a softmax, float32.

    Of equal scores the first counts as greater. Where scores are not numbers, shares are none either, and experts may
    be E, which is out of bounds.

    Args:
      scores: bfloat16 or float16.
      chosen: experts of a token, E at most.
      normalised: whether shares are of what is chosen, and not of all experts.
    """
    padded = jnp.pad(unvaried(scores), ((0, max(_TOKENS - len(scores), 0)), (0, 0)))
    shape = len(padded), chosen

    def choose_experts(*refs: Any) -> None:  # the name that profilers show
        _choose(*refs, normalised=normalised)

    kernel = plgpu.kernel(
        choose_experts,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(-(-shape[0] // _TOKENS),),
        grid_names=("tokens",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    expert, share = (vary_like(each[: len(scores)], scores) for each in kernel(padded))
    return expert, share


def _choose(scores: Any, experts: Any, shares: Any, *, normalised: bool) -> None:
    """Do the tokens of one thread block."""
    (tokens, chosen), count = experts.shape, scores.shape[1]
    # The last thread block has tokens of the one before it, too: both write the same.
    own = pl.ds(jnp.minimum(lax.axis_index("tokens") * _TOKENS, tokens - _TOKENS), _TOKENS)
    left = load(scores.at[own], layout(count)).astype(jnp.float32)  # [4, E]
    number = plgpu.broadcasted_iota(jnp.int32, left.shape, 1, layout=layout(count))
    greatest = left.max(axis=1)  # [4]
    powers, everyone = [], jnp.exp(left - broadcast(greatest, 0, count))
    for i in range(chosen):
        best = left.max(axis=1)
        expert = jnp.where(left == broadcast(best, 0, count), number, count).min(axis=1)
        store(experts.at[own, i], expert)
        powers.append(jnp.exp(best - greatest))
        left = jnp.where(number == broadcast(expert, 0, count), -jnp.inf, left)
    total = sum(powers) if normalised else everyone.sum(axis=1)
    for i, power in enumerate(powers):
        store(shares.at[own, i], power / total)
