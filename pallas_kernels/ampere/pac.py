"""PAC on GPUs since Ampere: thread blocks of four warps work off their segments of KV blocks.

    cp.async       blocks i+1 ... ──► K ring, V ring ─┐     query rows of one tile or two ──► Q tiles
    by thread      masks of block i+1 ──► shared      │
    4 warps        block i:  S = Q Kᵀ ► mask ► online softmax ► O += P V;  at a segment's end a partial (O, m, l)

A warp has 16 of the 64 rows of a tile, or of each tile of a wide segment, and the whole softmax of theirs, so that
warps wait for each other only where blocks come and go: once a block, when it has arrived and all are done with the one
before, whose place the next copy takes. A warp none of whose rows sees a block leaves it out. All threads copy, 16
bytes at a time, from the page that each looks up. Copies run on across segments. All softmax state is float32 in units
of log2, since exp2 is what the hardware computes. The paper's PAC is in section 4 (doi 10.1145/3802028).
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import pac_arrays, plan_guard, query_rows
from pallas_kernels.ampere.instructions import TILED
from pallas_kernels.ampere.pac_compute import compute
from pallas_kernels.ampere.pac_load import Ahead, begin
from pallas_kernels.ampere.pac_work import Numbers, Sizes, Work
from pallas_kernels.ampere.tiling import columns_of, stages_of
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores
from pallas_kernels.packing import TILE_ROWS


def pac(call: Call, scores: Scores) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the partials of all segments.

    Args:
      call: query, keys and values are bfloat16 or float16, H, V and page_tokens multiples of 8.
      scores: what becomes of the products of query and keys.

    Returns float32 out [num_partials, 64, V and zeros], normalised, max and sum [num_partials, 64]; max in units of
    log2. Partials that no segment refers to are not written. Last, int32 [num_ctas, rounded up to a multiple of 128]: 1
    where a thread block found that the plan does not hold, else 0; what is past the last of them is not written.
    """
    query, plan = call.query, call.plan
    head_dim, value_head_dim = plan.heads.head_dim, plan.heads.value_head_dim
    sizes = Sizes.of(
        call,
        scores,
        stages_of(plan.heads, plan.block_tokens),
        key_columns=columns_of(head_dim),
        value_columns=columns_of(value_head_dim),
        num_q_heads=query.shape[2],
        num_kv_heads=plan.heads.num_kv_heads,
        lanes=plan.lanes,
    )
    assert call.value_pages is not None  # or `why_not` would have said so
    inputs = {
        "query": query.reshape(-1, head_dim),  # [B x T x N, H]
        "keys": call.key_pages.reshape(-1, head_dim),  # [num_pages x page_tokens x K, H]
        "values": call.value_pages.reshape(-1, value_head_dim),
        **pac_arrays.inputs_of(call, sizes),
    }
    if sizes.has_positions:  # [tiles x tile_rows + 64]
        inputs["row_position"] = jnp.pad(query_rows.by_row(call.query_position, call).reshape(-1), (0, TILE_ROWS))
    outputs = pac_arrays.outputs_of(call, sizes.value_columns)
    scratch = _scratch(sizes)

    def body(*refs: Any) -> None:
        work = Work(SimpleNamespace(**dict(zip([*inputs, *outputs, *scratch], refs, strict=True))), sizes)
        ahead = begin(work)
        plan_guard.look(work.refs)  # while the first blocks are on their way

        def step(number: jax.Array, carry: tuple) -> tuple:
            segment, ahead = carry
            following = work.segment(number + 1)
            return following, compute(work, segment, ahead)

        carry: tuple[Any, Ahead] = (work.first_segment, ahead)
        lax.fori_loop(work.first, work.last, step, carry)

    kernel = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(plan.cta_begin.shape[0],),
        grid_names=("cta",),
        # Rows are reduced within a warp, by registers.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return kernel(*inputs.values())


def _scratch(sizes: Sizes) -> dict[str, Any]:
    """Describe shared memory."""
    blocks = sizes.stages, sizes.block
    return {
        "query_tiles": plgpu.SMEM((sizes.lanes, TILE_ROWS, sizes.key_columns), sizes.dtype, transforms=TILED),
        "key_ring": plgpu.SMEM((*blocks, sizes.key_columns), sizes.dtype, transforms=TILED),
        "value_ring": plgpu.SMEM((*blocks, sizes.value_columns), sizes.dtype, transforms=TILED),
        "numbers": plgpu.SMEM((Numbers.count(), max(sizes.block, TILE_ROWS)), jnp.int32),  # `Numbers`
    }
