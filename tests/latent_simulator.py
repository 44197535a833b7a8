"""What stands in for `latent_products` where the GPU interpreter of Pallas runs the Hopper kernels for latents."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax
from simulator import (
    any_above,
    fold_columns,
    gather,
    in_turn,
    multiply,
    multiply_values,
    query_scratch,
    query_tile,
    query_views,
    read,
    reciprocals,
    same_in_warp,
    see_completions,
    view_units,
)

from pallas_kernels import by_thread, by_warp
from pallas_kernels.hopper import latent, latent_products, tensor_core
from pallas_kernels.hopper.latent_pipeline import LatentPipeline
from pallas_kernels.hopper.long_heads import LongPipeline


def simulate_latents(monkeypatch: pytest.MonkeyPatch, params: Any) -> None:
    """Let the kernels run in the interpreter."""
    monkeypatch.setattr(plgpu, "kernel", partial(plgpu.kernel, interpret=params))
    for function in (query_scratch, query_views, in_turn, view_units, multiply_values):
        monkeypatch.setattr(tensor_core, function.__name__, function)
    monkeypatch.setattr(latent_products, "multiply_latents", multiply_latents)
    for of_threads in (gather, same_in_warp):
        monkeypatch.setattr(by_thread, of_threads.__name__, of_threads)
    for of_warps in (any_above, fold_columns, reciprocals):
        monkeypatch.setattr(by_warp, of_warps.__name__, of_warps)

    def then_see(role: str, see: Callable[[LatentPipeline, Any], None]) -> None:
        work = getattr(latent, role)

        def whole(pipeline: LatentPipeline) -> None:
            work(pipeline)
            see(pipeline, pipeline.refs)

        monkeypatch.setattr(latent, role, whole)

    def see_rings(pipeline: LatentPipeline, _: Any) -> None:
        see_completions(pipeline, [ring.free for ring in pipeline.rings if ring.free is not None], ())

    then_see("load_blocks", see_rings)
    then_see("prepare", lambda pipeline, refs: see_completions(pipeline, [pipeline.mask_free], [refs.query_free.at[0]]))
    then_see("score", lambda pipeline, refs: see_completions(pipeline, (), [refs.end_free.at[0]]))


def multiply_latents(pipeline: LatentPipeline, stage: jax.Array, buffer: jax.Array) -> jax.Array:
    """Return the products of the tile of the query and a block, [64, block]."""
    refs = pipeline.refs
    if isinstance(pipeline, LongPipeline):
        return multiply(query_tile(pipeline, buffer), read(refs.key_ring.at[stage]).T)
    query, left = query_tile(pipeline, buffer), read(refs.left_ring.at[stage])
    plgpu.barrier_wait(refs.right_full.at[stage])
    keys = jnp.concatenate([left, read(refs.right_ring.at[stage])], axis=1)  # [block, 576 or 512]
    products = multiply(query[:, : keys.shape[1]], keys.T)
    if pipeline.sizes.is_one_byte:
        rotated = read(refs.rotated_ring.at[stage])
        bits = lax.bitcast_convert_type(query[:, keys.shape[1] :], rotated.dtype)
        products += multiply(bits, rotated.T)
    return products
