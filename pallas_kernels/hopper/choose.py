"""The experts of each token on Hopper GPUs, in one launch from scores to shares.

    one thread block for four tokens, each warp has the scores of one, [4, E] in registers:

        parts [S, 4, E], bias [E] ─► scores, rounded
        scores ─► the greatest, and the first expert with it ─► the greatest of the others ─► ...  as many as chosen
               ─► e to the power of how far each is below the greatest ─► over their sum: shares

XLA takes a softmax, a sort of all experts, which is most of it, and another sum.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.addends import Parts
from pallas_kernels.compat import load, store
from pallas_kernels.hopper.tiling import SIXTEEN_BITS, why_not_on
from pallas_kernels.varying import unvaried, vary_like
from pallas_kernels.warp_rows import WARPS, broadcast, layout

#: Tokens of a thread block, one for each warp.
_TOKENS = WARPS
#: Experts of which a lane has 1, 2, or a multiple of 4.
_EXPERTS = (32, 64, 128, 256, 512)


def why_not(num_experts: int, dtype: Any, device: Any) -> str | None:
    """Say why the kernel cannot serve scores of so many experts on a device; None if it can."""
    if reason := why_not_on(device):
        return reason
    if dtype not in SIXTEEN_BITS or num_experts not in _EXPERTS:
        return f"it takes {_EXPERTS} experts, bfloat16 or float16, got {num_experts} and {jnp.dtype(dtype)}"
    return None


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("dtype", "chosen", "normalised"))
@jax.enable_x64(False)  # the kernel counts in int32
def choose(
    scores: Parts, dtype: Any, *, chosen: int, normalised: bool
) -> tuple[Int[Array, "T chosen"], Float[Array, "T chosen"]]:
    """Return the experts of each token, those with the greatest scores, and their shares by a softmax, float32.

    Of equal scores the first counts as greater. Where scores are not numbers, shares are none either, and experts may
    be E, which is out of bounds.

    Args:
      scores: [S, T, E].
      dtype: bfloat16 or float16, to which their sums are rounded.
      chosen: experts of a token, E at most.
      normalised: whether shares are of what is chosen, and not of all experts.
    """
    parts, bias = jax.tree.map(unvaried, scores)
    tokens = parts.shape[1]
    padded = jnp.pad(parts, ((0, 0), (0, max(_TOKENS - tokens, 0)), (0, 0)))
    shape, given = (padded.shape[1], chosen), jax.tree.leaves(Parts(padded, bias))

    def choose_experts(*refs: Any) -> None:  # the name that profilers show
        _choose(Parts(*refs[: len(given)]), *refs[len(given) :], dtype=dtype, normalised=normalised)

    kernel = plgpu.kernel(
        choose_experts,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(-(-shape[0] // _TOKENS),),
        grid_names=("tokens",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    expert, share = (vary_like(each[:tokens], scores) for each in kernel(*given))
    return expert, share


def _choose(scores: Parts, experts: Any, shares: Any, *, dtype: Any, normalised: bool) -> None:
    """Do the tokens of one thread block."""
    (tokens, chosen), (num_parts, _, count) = experts.shape, scores.parts.shape
    # The last thread block has tokens of the one before it, too: both write the same.
    own = pl.ds(jnp.minimum(lax.axis_index("tokens") * _TOKENS, tokens - _TOKENS), _TOKENS)
    parts = [load(scores.parts.at[i, own], layout(count)).astype(jnp.float32) for i in range(num_parts)]  # [4, E]
    if scores.bias is not None:
        parts.append(broadcast(load(scores.bias, layout(count).reduce(0)).astype(jnp.float32), 1, count))
    left = reduce(jnp.add, parts).astype(dtype).astype(jnp.float32)
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
