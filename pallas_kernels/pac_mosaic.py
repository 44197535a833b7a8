"""PAC on Hopper: one persistent thread block per multiprocessor works off its segments of KV blocks.

    warpgroup 2 (loads)     page ids of block i+1 ─┐   TMA, one copy per page    ┌─ K ring ─┐
                            pages of block i ──────┴────────────────────────────►│  stages  │
                                                                                 └─ V ring ─┘
    warpgroups 0, 1         alternate blocks:  S = Q Kᵀ ► mask ► online softmax ► O += P V
                            at a segment's end each writes its own partial (O, m, l); POR merges the two

The rings run on across segments, so loading never stops. Unmasked blocks come first in every segment and have a loop
of their own. All softmax state is float32 in units of log2, since exp2 is what the hardware computes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transposed

#: Query rows of a tile: what one warpgroup's wgmma takes.
TILE_ROWS = 64
#: Partials of a segment: one of each computing warpgroup.
PARTIALS = 2
#: Rows are packed into columns as first reader + LAST_READER * (last reader + 1).
LAST_READER = 1 << 16

_LOADER = PARTIALS  # the warpgroup that loads
_LOG2E = math.log2(math.e)
_HIDDEN = -1e30  # the score of a token that a row does not see
_LOWEST = -1e20  # the least maximum of a row: exp2(_HIDDEN - _LOWEST) is 0, not 1


class Segments(NamedTuple):
    """Segment s of thread block c: blocks [lo, hi) of one (tile, head), those from `masked` on need the mask."""

    tile: jax.Array  # [segments]
    head: jax.Array
    lo: jax.Array
    masked: jax.Array
    hi: jax.Array
    cta_ptr: jax.Array  # [num_ctas + 1]


def pac(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_id: jax.Array,
    columns: jax.Array,
    segments: Segments,
    *,
    scale: float,
    stages: int = 2,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the partials of all segments.

    Args:
      query: [K, tiles * 64, H], bfloat16 or float16, H a multiple of 64.
      key_pages: [num_pages, page_size, K, H], page_size a multiple of 8.
      value_pages: like key_pages.
      page_id: int32 [blocks, slots]; slots * page_size tokens are a block, a multiple of 8 up to 256.
      columns: int32 [blocks * slots * page_size], the tile's rows that see each token: first + LAST_READER * end.
      segments: int32 arrays.
      scale: factor on the scores.
      stages: blocks in flight, an even number, so that a block's slot is tied to its warpgroup.

    Returns float32 out [segments * 2, 64, H], normalised, max and sum [segments * 2, 64]; max in units of log2.
    Partials of segments that are not in use are not written.
    """
    head_dim = query.shape[-1]
    page_size = key_pages.shape[1]
    num_blocks, slots = page_id.shape
    block = slots * page_size
    num_partials = segments.tile.shape[0] * PARTIALS
    dtype, factor = query.dtype, scale * _LOG2E

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, page_ref, column_ref, tile_ref, head_ref, lo_ref, masked_ref, hi_ref, cta_ref = refs[:11]
        out_ref, max_ref, sum_ref, q_smem, k_smem, v_smem, out_smem, row_smem = refs[11:19]
        q_full, q_free, k_full, v_full, k_free, v_free = refs[19:]
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        first, last = cta_ref[cta], cta_ref[cta + 1]

        @pl.when(warpgroup < PARTIALS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            rows, columns_of = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

            def over_rows(x: jax.Array, width: int) -> jax.Array:
                return lax.broadcast_in_dim(x, (TILE_ROWS, width), [0])

            def segment(s: jax.Array, done: jax.Array) -> jax.Array:
                lo, count = lo_ref[s], hi_ref[s] - lo_ref[s]
                # Blocks alternate over segments too: this warpgroup's first block is `mine`.
                mine = lax.rem(warpgroup + done, jnp.int32(PARTIALS))
                plgpu.barrier_wait(q_full)

                def step(j: jax.Array, carry: tuple, masked: bool) -> tuple:
                    acc, row_max, row_sum = carry
                    i = j * PARTIALS + mine
                    slot = lax.rem(done + i, jnp.int32(stages))
                    plgpu.barrier_wait(k_full.at[slot])

                    def scores_of(acc_ref: Any) -> jax.Array:
                        plgpu.wgmma(acc_ref, q_smem, transposed(k_smem.at[slot]))
                        return acc_ref[...]

                    scores = pl.run_scoped(scores_of, plgpu.ACC((TILE_ROWS, block), jnp.float32))  # [64, block]
                    plgpu.barrier_arrive(k_free.at[slot])
                    if masked:
                        start = pl.multiple_of((lo + i) * block, 8)
                        packed = load(column_ref.at[pl.ds(start, block)], columns_of)  # [block]
                        seen_from = lax.broadcast_in_dim(packed & (LAST_READER - 1), scores.shape, [1])
                        seen_to = lax.broadcast_in_dim(lax.shift_right_logical(packed, 16), scores.shape, [1])
                        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
                        scores = jnp.where((row >= seen_from) & (row < seen_to), scores, _HIDDEN)
                    new_max = jnp.maximum(jnp.maximum(row_max, scores.max(axis=1) * factor), _LOWEST)  # [64]
                    fade = jnp.exp2(row_max - new_max)
                    weights = jnp.exp2(scores * factor - over_rows(new_max, block))  # [64, block]
                    acc *= over_rows(fade, head_dim)
                    narrow = weights.astype(dtype)
                    row_sum = row_sum * fade + weights.sum(axis=1)
                    plgpu.barrier_wait(v_full.at[slot])

                    def add_values(acc_ref: Any) -> None:
                        plgpu.wgmma(acc_ref, narrow, v_smem.at[slot])

                    acc = pl.run_state(add_values)(plgpu.ACC.init(acc))  # [64, H]
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, new_max, row_sum

                def mine_before(blocks: jax.Array) -> jax.Array:
                    """Count this warpgroup's blocks among the segment's first ones."""
                    return lax.div(jnp.maximum(blocks - mine + PARTIALS - 1, 0), jnp.int32(PARTIALS))

                zeros = jnp.full((TILE_ROWS, head_dim), 0, jnp.float32)
                carry = (
                    plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
                    plgpu.layout_cast(jnp.full((TILE_ROWS,), _HIDDEN, jnp.float32), rows),
                    plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), rows),
                )
                middle = mine_before(masked_ref[s] - lo)
                carry = lax.fori_loop(0, middle, functools.partial(step, masked=False), carry)
                acc, row_max, row_sum = lax.fori_loop(
                    middle, mine_before(count), functools.partial(step, masked=True), carry
                )
                plgpu.barrier_arrive(q_free)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem.at[warpgroup][...] = acc / over_rows(jnp.maximum(row_sum, 1e-30), head_dim)
                row_smem.at[warpgroup, 0][...] = row_max
                row_smem.at[warpgroup, 1][...] = row_sum
                plgpu.commit_smem()
                partial = s * PARTIALS + warpgroup
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_ref.at[partial])
                plgpu.copy_smem_to_gmem(row_smem.at[warpgroup, 0], max_ref.at[partial])
                plgpu.copy_smem_to_gmem(row_smem.at[warpgroup, 1], sum_ref.at[partial])
                return done + count

            lax.fori_loop(first, last, segment, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == _LOADER)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def pages_of(b: jax.Array) -> tuple[jax.Array, ...]:
                return tuple(page_ref[b, j] for j in range(slots))

            def segment(s: jax.Array, done: jax.Array) -> jax.Array:
                head, lo, hi = head_ref[s], lo_ref[s], hi_ref[s]

                @pl.when(s > first)
                def _() -> None:
                    plgpu.barrier_wait(q_free)

                start = pl.multiple_of(tile_ref[s] * TILE_ROWS, TILE_ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(start, TILE_ROWS)], q_smem, q_full)

                def step(i: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    slot = lax.rem(done + i, jnp.int32(stages))
                    # A load from global memory takes longer than a block: ask for the next block's pages now.
                    following = pages_of(jnp.minimum(lo + i + 1, num_blocks - 1))
                    for ref, smem, full, free in ((k_ref, k_smem, k_full, k_free), (v_ref, v_smem, v_full, v_free)):

                        @pl.when(done + i >= stages)
                        def _(free: Any = free) -> None:
                            plgpu.barrier_wait(free.at[slot])

                        for j, page in enumerate(pages):
                            target = smem.at[slot, pl.ds(j * page_size, page_size)]
                            plgpu.copy_gmem_to_smem(ref.at[page, :, head], target, full.at[slot])
                    return following

                lax.fori_loop(0, hi - lo, step, pages_of(lo))
                return done + hi - lo

            lax.fori_loop(first, last, segment, jnp.int32(0))

    halves = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    words = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_partials, TILE_ROWS, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_partials, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((num_partials, TILE_ROWS), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((TILE_ROWS, head_dim), dtype, transforms=halves),
            plgpu.SMEM((stages, block, head_dim), dtype, transforms=halves),
            plgpu.SMEM((stages, block, head_dim), dtype, transforms=halves),
            plgpu.SMEM((PARTIALS, TILE_ROWS, head_dim), jnp.float32, transforms=words),
            plgpu.SMEM((PARTIALS, 2, TILE_ROWS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=PARTIALS),
            plgpu.Barrier(num_arrivals=slots, num_barriers=stages),
            plgpu.Barrier(num_arrivals=slots, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(segments.cta_ptr.shape[0] - 1,),
        grid_names=("cta",),
        num_threads=PARTIALS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(query, key_pages, value_pages, page_id, columns, *segments)
