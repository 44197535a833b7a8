"""PAC over latents: one kv head of 576 numbers a token, of which the first 512 are the values as well.

    warpgroup 2 (pac_load)      pages of block i+1 ─────────► ring of blocks ┬ left   columns 0 to 255
                                                                            └ right  columns 256 to 575
    warpgroup 3 (pac_prepare)   query rows ─► Q tile;  lengths of the nodes ─► masks
    warpgroup 0, the scorer     S = Q Lᵀ ► mask ► online softmax ► P ┬► O[:, :256] += P left
                                                                     ▼ right[:, 256:], with the factor of O
    warpgroup 1, the follower                                        └► O[:, 256:] += P right[:, :256]

Latents of one byte a number are what `latent_widen` makes of them, in shared memory, and all else is the same. So it is
with heads of 512 numbers, whose values have pages of their own: see `long_heads`.

A block is in shared memory once, for both products: 72 KiB for 64 tokens. With two of them and the query, 216 of 227
KiB are taken, so there is no room for a second tile, and segments are narrow. The output of a tile, [64, 512] in
float32, takes the registers of two warpgroups; scores are computed by one of them only, and while it is at the softmax
and its own half, the other adds up its half. The last 64 columns of a block are in keys only, so when the scores are
there, the weights take their place. Everything but the scores is split by columns, so nothing is merged at a segment's
end. A half goes back to the loader as soon as its values are added.

All else is as in `pac`: segments, masks, the guard of the plan, softmax in units of log2. `latent_pipeline` has a table
of the barriers. Absorbed latent attention is from DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import pac_arrays
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores
from pallas_kernels.hopper import latent_widen, long_heads, roles, row_positions, tensor_core
from pallas_kernels.hopper.latent_compute import follow, score
from pallas_kernels.hopper.latent_pipeline import HALF, LatentPipeline, LatentSizes
from pallas_kernels.hopper.latent_widen import ROTATED, OneBytePipeline
from pallas_kernels.hopper.long_heads import LongPipeline
from pallas_kernels.hopper.pac_load import load_blocks
from pallas_kernels.hopper.pac_pipeline import MAX_BLOCK_TOKENS
from pallas_kernels.hopper.pac_prepare import prepare
from pallas_kernels.hopper.roles import Role
from pallas_kernels.hopper.tiling import LONG
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.shared_memory import swizzled

_STAGES = 2


def latent_pac(call: Call, scores: Scores) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the partials of all segments.

    Args:
      call: query and keys are bfloat16 or float16, of 576 numbers; value pages are None, for the values are the first
        512 numbers of the keys. Or keys are the 512 numbers of float8_e4m3fn that are values as well, with their scales
        and rotated keys in the call, and the query is `latent_widen.joined_query`. Or query, keys and values are all
        bfloat16 or float16, of 512 numbers, of any number of kv heads. The plan has one lane, blocks of 64 tokens, and
        page_tokens a multiple of 8.
      scores: what becomes of the products of query and keys.

    Returns what `pac` returns: out [num_partials, 64, 512], max, sum and violations.
    """
    query, beside = call.query, {"scales": call.latent_scale, "rotated": call.rotated_keys}
    if call.value_pages is None:
        stages = _STAGES
        pages = {"latents": call.key_pages} | {name: x for name, x in beside.items() if x is not None}
    else:
        stages = LONG[call.plan.heads.head_dim, call.plan.heads.value_head_dim].stages
        pages = {"keys": call.key_pages, "values": call.value_pages}
    sizes: LatentSizes = LatentSizes.of(call, scores, stages, kv_dtype=call.key_pages.dtype)
    inputs = {
        "query": query.reshape(-1, *query.shape[2:]),  # [B x T, N, 576]
        # [num_pages x page_tokens, 1, 576] or, of one byte a number, 512, 4 and 64; or [.., K, 512] twice
        **{name: x.reshape(-1, *x.shape[2:]) for name, x in pages.items()},
        **pac_arrays.inputs_of(call, sizes),
        **row_positions.inputs_of(call, sizes),
    }
    outputs = pac_arrays.outputs_of(call, call.plan.heads.value_head_dim)
    pipeline_class: type[LatentPipeline] = LongPipeline if sizes.has_values_apart else LatentPipeline
    pipeline_class = OneBytePipeline if sizes.is_one_byte else pipeline_class
    scratch, of_warpgroups = _scratch(sizes), _roles(sizes.is_one_byte)

    def body(*refs: Any) -> None:
        named = SimpleNamespace(**dict(zip([*inputs, *outputs, *scratch], refs, strict=True)))
        named.query_buffers = tensor_core.query_views(named.query_buffers)
        roles.take(of_warpgroups, lambda: pipeline_class(named, sizes))

    kernel = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(call.plan.cta_begin.shape[0],),
        grid_names=("cta",),
        num_threads=len(of_warpgroups),
        thread_name="warpgroup",
        # Rows are reduced within a warp, by registers.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return kernel(*inputs.values())


def _roles(is_one_byte: bool) -> tuple[Role, ...]:
    """List what the warpgroups do; who prepares also widens numbers of one byte."""
    of_follow, of_load, of_prepare = (160, 32, 88) if is_one_byte else (168, 40, 72)
    return Role(score, 232), Role(follow, of_follow), Role(load_blocks, of_load), Role(prepare, of_prepare)


def _scratch(sizes: LatentSizes) -> dict[str, Any]:
    """Describe shared memory and barriers."""
    tiled = swizzled(sizes.dtype, 64)
    stages, block, is_one_byte = sizes.stages, sizes.block, sizes.is_one_byte
    right = plgpu.SMEM((stages, block, sizes.head_dim - HALF), sizes.dtype, transforms=tiled)
    # What is widened has no copies that arrive by themselves. The mask comes with what scores begin with.
    copies, with_mask = sizes.pages_per_block, not sizes.has_values_apart
    left_arrivals, right_arrivals = (1, 1) if is_one_byte else (copies + with_mask, copies)
    return {
        "query_buffers": tensor_core.query_scratch(sizes, ROTATED if is_one_byte else None),  # `Query`
        "left_ring": plgpu.SMEM((stages, block, HALF), sizes.dtype, transforms=tiled),
        **(latent_widen.scratch(sizes, tiled) if is_one_byte else {"right_ring": right}),
        **(long_heads.scratch(sizes, tiled) if sizes.has_values_apart else {}),
        # Readers, and positions with causal masks and windows, of each token.
        "mask": plgpu.SMEM((stages, 2 if sizes.has_positions else 1, MAX_BLOCK_TOKENS), jnp.int32),
        **row_positions.scratch(sizes),
        "factor": plgpu.SMEM((stages + 1, TILE_ROWS), jnp.float32),  # of the output so far, and of all in the end
        "query_scattered": plgpu.Barrier(num_arrivals=sizes.packing.units * sizes.query_parts, num_barriers=1),
        "query_together": plgpu.Barrier(num_arrivals=sizes.query_parts, num_barriers=1),
        "query_free": plgpu.Barrier(num_barriers=1),
        "left_full": plgpu.Barrier(num_arrivals=left_arrivals, num_barriers=stages),
        "right_full": plgpu.Barrier(num_arrivals=right_arrivals, num_barriers=stages),
        "left_free": plgpu.Barrier(num_barriers=stages),
        "right_free": plgpu.Barrier(num_barriers=stages),
        "weights_full": plgpu.Barrier(num_barriers=stages),
        "end_full": plgpu.Barrier(num_barriers=1),
        "end_free": plgpu.Barrier(num_barriers=1),
    }
