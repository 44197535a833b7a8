"""Votes of a warp on registers of products, float32 [64, columns], whose layout wgmma and warp-level products share."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector


def any_above(numbers: jax.Array, limit: float) -> jax.Array:
    """Say of each warp whether one of its numbers, [64, columns], is above a limit, by 1 or 0; NaN is not."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_: Any, numbers: Any) -> Any:
        word, most = ir.IntegerType.get_signless(32), mgpu.c(limit, ir.F32Type.get())
        found = mgpu.c(0, ir.IntegerType.get_signless(1))
        for pair in numbers.registers.flat:
            for place in range(2):
                number = vector.extract(pair, [], [place])
                found = arith.ori(found, arith.cmpf(arith.CmpFPredicate.OGT, number, most))
        found = nvvm.vote_sync(mgpu.c(0xFFFFFFFF, word), found, "any")
        return mgpu.FragmentedArray.splat(arith.extui(word, found), (), is_signed=True)

    return vote(numbers)
