"""The plan by two kernels: its arrays go to PAC as they are, and what PAC leaves to POR."""

from collections.abc import Callable

import jax
from jax import Array

from pallas_kernels import query_rows
from pallas_kernels.family import Call
from pallas_kernels.varying import unvaried, vary_like


def run(
    call: Call, pac: Callable[[Call], tuple[Array, ...]], por: Callable[..., tuple[Array, ...]]
) -> tuple[Array, Array, Array]:
    """Run PAC and POR of a family, as `Family.attend` promises."""
    alone = jax.tree.map(unvaried, call)
    out, *softmax = (vary_like(x, call) for x in por(*pac(alone), alone))
    tiles = (call.plan.num_tiles, call.plan.heads.num_kv_heads, -1)
    row_max, row_sum = (
        query_rows.to_requests(rows.reshape(tiles)[..., : call.plan.tile_rows], call) for rows in softmax
    )
    return out, row_max, row_sum
