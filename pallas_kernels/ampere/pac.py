"""PAC on GPUs since Ampere: thread blocks of four warps work off their segments of KV blocks.

    cp.async       blocks i+1 ... ──► K ring, V ring ─┐     query rows of the tile ──► Q tile
    by thread      masks of block i+1 ──► shared      │
    4 warps        block i:  S = Q Kᵀ ► mask ► online softmax ► O += P V;  at a segment's end a partial (O, m, l)

A warp has 16 of the 64 rows of a tile, and the whole softmax of theirs, so that warps wait for each other only where
blocks come and go: once a block, when it has arrived and all are done with the one before, whose place the next copy
takes. All threads copy, 16 bytes at a time, from the page that each looks up. Copies run on across segments. All
softmax state is float32 in units of log2, since exp2 is what the hardware computes. The paper's PAC is in section 4
(doi 10.1145/3802028).
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import query_rows
from pallas_kernels.ampere.instructions import TILED
from pallas_kernels.ampere.pac_compute import compute
from pallas_kernels.ampere.pac_load import Ahead, begin
from pallas_kernels.ampere.pac_work import Numbers, Sizes, Work
from pallas_kernels.ampere.tiling import stages_of
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores
from pallas_kernels.hopper import plan_guard
from pallas_kernels.hopper.packing import TILE_ROWS, Packing

_LOG2E = math.log2(math.e)


def pac(call: Call, scores: Scores) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the partials of all segments.

    Args:
      call: query, keys and values are bfloat16 or float16, H a multiple of 64, page_tokens a multiple of 8.
      scores: what becomes of the products of query and keys.

    Returns float32 out [num_partials, 64, H], normalised, max and sum [num_partials, 64]; max in units of log2.
    Partials that no segment refers to are not written. Last, int32 [num_ctas, rounded up to a multiple of 128]: 1
    where a thread block found that the plan does not hold, else 0; what is past the last of them is not written.
    """
    query, forest, plan = call.query, call.forest, call.plan
    batch, tokens, num_q_heads, head_dim = query.shape
    sizes = Sizes(
        packing=Packing.of(plan.heads.group),
        batch=batch,
        query_tokens=tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=plan.heads.num_kv_heads,
        head_dim=head_dim,
        page_tokens=plan.page_tokens,
        pages_per_block=plan.block_pages.shape[1],
        num_blocks=plan.block_pages.shape[0],
        stages=stages_of(head_dim, plan.block_tokens),
        cap_factor=None if scores.softcap is None else scores.scale / scores.softcap,
        factor=(scores.scale if scores.softcap is None else scores.softcap) * _LOG2E,
        causal=tokens > 1 and call.readers_of_tokens is None,
        windowed=call.first_position is not None,
        token_planes=tuple(
            name for name in ("readers_of_tokens", "positions_of_tokens") if getattr(call, name) is not None
        ),
        dtype=query.dtype,
    )
    num_ctas, partials = plan.cta_begin.shape[0], plan.num_partials
    inputs = {
        "query": query.reshape(-1, head_dim),  # [B x T x N, H]
        "keys": call.key_pages.reshape(-1, head_dim),  # [num_pages x page_tokens x K, H]
        "values": call.value_pages.reshape(-1, head_dim),
        "request_of_row": forest.request_of_row,
        "node_length": forest.length,
        "block_pages": plan.block_pages.reshape(-1),
        "segments": plan.segments,
        "cta_begin": plan.cta_begin,
        "min_length": call.guard.min_length,
        "max_length": call.guard.max_length,
        "structure_hash": forest.structure_hash.reshape(1),
        "planned_hash": call.guard.structure_hash.reshape(1),
        "merge_ptr": plan.merge_ptr,
        "used_rows": plan.used_rows,
    }
    if sizes.has_positions and not sizes.token_planes:
        inputs["node_start"] = forest.start
    bounds = {"query_position": call.query_position} if sizes.causal else {}
    bounds |= {} if call.first_position is None else {"first_position": call.first_position}
    for name, position in bounds.items():  # [tiles x tile_rows + 64] each
        inputs[name] = jnp.pad(query_rows.by_row(position, call).reshape(-1), (0, TILE_ROWS))
    for name in sizes.token_planes:
        inputs[name] = getattr(call, name).reshape(-1)  # [blocks x block]
    outputs = {
        "out": jax.ShapeDtypeStruct((partials, TILE_ROWS, head_dim), jnp.float32),
        "max": jax.ShapeDtypeStruct((partials, TILE_ROWS), jnp.float32),
        "sum": jax.ShapeDtypeStruct((partials, TILE_ROWS), jnp.float32),
        "violations": jax.ShapeDtypeStruct((-(-num_ctas // plan_guard.GROUP) * plan_guard.GROUP,), jnp.int32),
    }
    scratch = _scratch(sizes)

    def body(*refs: Any) -> None:
        work = Work(SimpleNamespace(**dict(zip([*inputs, *outputs, *scratch], refs, strict=True))), sizes)
        ahead = begin(work)
        guarded: Any = work
        plan_guard.look(guarded)  # while the first blocks are on their way

        def step(number: jax.Array, carry: tuple) -> tuple:
            segment, done, ahead = carry
            following = work.segment(number + 1)
            ahead = compute(work, segment, done, ahead)
            return following, done + segment.end - segment.begin, ahead

        carry: tuple[Any, jax.Array, Ahead] = (work.first_segment, jnp.int32(0), ahead)
        lax.fori_loop(work.first, work.last, step, carry)

    kernel = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(num_ctas,),
        grid_names=("cta",),
        # Rows are reduced within a warp, by registers.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return kernel(*inputs.values())


def _scratch(sizes: Sizes) -> dict[str, Any]:
    """Describe shared memory."""
    ring = plgpu.SMEM((sizes.stages, sizes.block, sizes.head_dim), sizes.dtype, transforms=TILED)
    return {
        "query_tile": plgpu.SMEM((TILE_ROWS, sizes.head_dim), sizes.dtype, transforms=TILED),
        "key_ring": ring,
        "value_ring": ring,
        "numbers": plgpu.SMEM((Numbers.count(), max(sizes.block, TILE_ROWS)), jnp.int32),  # `Numbers`
    }
