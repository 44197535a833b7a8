"""PAC on Hopper: one persistent thread block per multiprocessor works off its segments of KV blocks.

    warpgroup 2 (pac_load)      page ids of block i+1 ─┐  TMA, by page or by block  ┌─ K ring ─┐
                                pages of block i ──────┴───────────────────────────►│  stages  │
                                                                                    └─ V ring ─┘
    warpgroup 3 (pac_prepare)   requests of the tile ─► query rows ─► Q tiles, and positions (row_positions)
                                lengths of the nodes ─► masks
         (plan_guard)           lengths of all nodes, shared out ─► does the plan still hold?
    warpgroups 0, 1             S = Q Kᵀ ► mask ► online softmax ► O += P V;  at a segment's end a partial (O, m, l)
      (pac_compute, pac_wide)

A segment is narrow or wide. Narrow: both computing warpgroups hold the same row tile and alternate blocks, and the lane
of the last block merges their states at the end. Wide: each holds a row tile of its own and both work on every block,
which is loaded once for 128 rows. The rings run on across segments, so loading never stops. Unmasked blocks come first
in every segment and have a loop of their own; a masked block whose tokens all have the same readers is masked by row,
others by token. All softmax state is float32 in units of log2, since exp2 is what the hardware computes. What becomes
of keys and values of one byte is in `widen`. `pac_pipeline` has a table of the barriers. The paper's PAC is in section
4 (doi 10.1145/3802028).
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import pac_arrays
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores
from pallas_kernels.hopper import roles, row_positions, tensor_core, terms, token_scales, widen
from pallas_kernels.hopper.pac_compute import compute
from pallas_kernels.hopper.pac_load import load_blocks
from pallas_kernels.hopper.pac_pipeline import COLUMNS, LANES, MAX_BLOCK_TOKENS, Pipeline, Sizes
from pallas_kernels.hopper.pac_prepare import prepare
from pallas_kernels.hopper.roles import Role
from pallas_kernels.hopper.tiling import stages_of
from pallas_kernels.hopper.widen import OneBytePipeline, OneByteSizes
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.shared_memory import swizzled


def pac(call: Call, scores: Scores) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the partials of all segments.

    Args:
      call: the query is bfloat16 or float16, and so are keys and values, or these have one byte a number. H and V, of
        the query and the plan, are those of `tiling.BLOCKS`; rows of pages may be shorter, and are as if zeros
        followed. page_tokens is a multiple of 8.
      scores: what becomes of the products of query and keys.

    Returns float32 out [num_partials, 64, V], normalised, max and sum [num_partials, 64]; max in units of log2.
    Partials that no segment refers to are not written. Last, int32 [num_ctas, rounded up to a multiple of 128]: 1
    where a thread block found that the plan does not hold, else 0; what is past the last of them is not written.
    """
    query, plan = call.query, call.plan
    batch, tokens, num_q_heads, head_dim = query.shape
    assert call.value_pages is not None
    kv_dtype = call.key_pages.dtype
    stages = stages_of((head_dim, plan.heads.value_head_dim), plan.block_tokens, kv_dtype)
    assert stages is not None  # or `why_not` would have said so
    is_one_byte, is_padded = kv_dtype.itemsize == 1, call.key_pages.shape[3] < head_dim
    kind, pipeline_of = (OneByteSizes, OneBytePipeline) if is_one_byte else (Sizes, Pipeline)
    others = {"kv_dtype": kv_dtype, "is_padded": is_padded}
    if call.key_scale_of_tokens is not None:
        others |= {"scale_page_tokens": call.key_scale_of_tokens.shape[2]}
    sizes = kind.of(call, scores, stages, **others)
    inputs = {
        "query": query.reshape(batch * tokens, num_q_heads, head_dim),
        "keys": call.key_pages.reshape(-1, *call.key_pages.shape[2:]),  # [num_pages x page_tokens, K, H]
        "values": call.value_pages.reshape(-1, *call.value_pages.shape[2:]),
        **pac_arrays.inputs_of(call, sizes),
        **row_positions.inputs_of(call, sizes),
        **(terms.inputs_of(call) | token_scales.inputs_of(call) if is_one_byte else {}),
    }
    outputs = pac_arrays.outputs_of(call, sizes.value_head_dim)
    scratch, of_warpgroups = _scratch(sizes), _roles(is_one_byte)

    def body(*refs: Any) -> None:
        named = SimpleNamespace(**dict(zip([*inputs, *outputs, *scratch], refs, strict=True)))
        named.query_buffers = tensor_core.query_views(named.query_buffers)
        if sizes.is_padded:
            named.key_ring, named.value_ring = map(tensor_core.ring_views, (named.key_ring, named.value_ring))
        roles.take(of_warpgroups, lambda: pipeline_of(named, sizes))

    kernel = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(plan.cta_begin.shape[0],),
        grid_names=("cta",),
        num_threads=sum(role.warpgroups for role in of_warpgroups),
        thread_name="warpgroup",
        # What warpgroups hand to each other passes barriers on which every thread arrives, once it is done.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    return kernel(*inputs.values())


def _roles(is_one_byte: bool) -> tuple[Role, ...]:
    """List what the warpgroups do; who prepares also widens numbers of one byte."""
    of_compute, of_load, of_prepare = (200, 32, 80) if is_one_byte else (208, 40, 56)
    return Role(compute, of_compute, LANES), Role(load_blocks, of_load), Role(prepare, of_prepare)


def _scratch(sizes: Sizes) -> dict[str, Any]:
    """Describe shared memory and barriers."""

    def ring(columns: int) -> Any:
        if sizes.is_padded:
            return tensor_core.ring_scratch(sizes, columns)
        tiled = swizzled(sizes.kv_dtype, COLUMNS)
        return plgpu.SMEM((sizes.stages, sizes.block, columns), sizes.kv_dtype, transforms=tiled)

    copies, buffers, rings = sizes.query_parts, sizes.query_buffers, (LANES + 1) * sizes.stages
    of_block = sizes.pages_per_block * sizes.copies_of_page
    return {
        "query_buffers": tensor_core.query_scratch(sizes),  # `Query`
        "key_ring": ring(sizes.head_dim),
        "value_ring": ring(sizes.value_head_dim),
        # Readers, and positions with causal masks and windows, of each token.
        "mask": plgpu.SMEM((sizes.stages, 2 if sizes.has_positions else 1, MAX_BLOCK_TOKENS), jnp.int32),
        **row_positions.scratch(sizes),
        # The state that one lane of a narrow segment hands to the other.
        "state": plgpu.SMEM((TILE_ROWS, sizes.state_columns), jnp.float32, transforms=swizzled(jnp.float32, 32)),
        "state_rows": plgpu.SMEM((2, TILE_ROWS), jnp.float32),
        "query_scattered": plgpu.Barrier(num_arrivals=sizes.packing.units * copies, num_barriers=buffers),
        "query_together": plgpu.Barrier(num_arrivals=copies, num_barriers=buffers),
        "query_free": plgpu.Barrier(num_arrivals=LANES, num_barriers=buffers),
        "keys_full": plgpu.Barrier(num_arrivals=of_block + 1, num_barriers=rings),
        "values_full": plgpu.Barrier(num_arrivals=of_block, num_barriers=rings),
        "keys_free": plgpu.Barrier(num_arrivals=LANES, num_barriers=sizes.stages),
        "values_free": plgpu.Barrier(num_arrivals=LANES, num_barriers=sizes.stages),
        "state_full": plgpu.Barrier(num_barriers=LANES),
        "state_free": plgpu.Barrier(num_barriers=LANES),
        # `query_buffers` among them, and `values_free`, since who widens gives values back.
        **(widen.scratch(sizes) if isinstance(sizes, OneByteSizes) else {}),
    }
