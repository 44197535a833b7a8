"""PAC on Hopper: one persistent thread block per multiprocessor works off its segments of KV blocks.

    warpgroup 2 (pac_load)      page ids of block i+1 ─┐  TMA, by page or by block  ┌─ K ring ─┐
                                pages of block i ──────┴───────────────────────────►│  stages  │
                                                                                    └─ V ring ─┘
    warpgroup 3 (pac_prepare)   requests of the tile ─► query rows ─► Q tiles;  lengths of the nodes ─► mask columns
         (pac_check)            lengths of all nodes, shared out ─► does the plan still hold?
    warpgroups 0, 1             S = Q Kᵀ ► mask ► online softmax ► O += P V;  at a segment's end a partial (O, m, l)
          (pac_compute)

A segment is narrow or wide. Narrow: both computing warpgroups hold the same row tile and alternate blocks, and the lane
of the last block merges their halves at the end. Wide: each holds a row tile of its own and both work on every block,
which is loaded once for 128 rows. The rings run on across segments, so loading never stops. Unmasked blocks come first
in every segment and have a loop of their own; a masked block whose tokens all have the same readers is masked by row,
others by token. All softmax state is float32 in units of log2, since exp2 is what the hardware computes.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.interpret import tile_shape
from pallas_kernels.pac_check import FOUND_GROUP, check
from pallas_kernels.pac_compute import compute
from pallas_kernels.pac_load import load_blocks
from pallas_kernels.pac_pipeline import BLOCK_TOKENS, LANES, Inputs, Outputs, Pipeline, Query, Scratch, Sizes
from pallas_kernels.pac_prepare import prepare
from pallas_kernels.packing import TILE_ROWS, Packing

_LOADER, _PREPARER = LANES, LANES + 1
_REGISTERS = {"compute": 208, "load": 40, "prepare": 56}  # of a thread; 4 x 128 threads share 65,536
_LOG2E = math.log2(math.e)


class Exactness(NamedTuple):
    """What must hold for the plan to be exact: `least <= length <= most` for every node, and equal structures."""

    least: jax.Array  # int32 [nodes]
    most: jax.Array
    structure: jax.Array  # int32 [1]
    planned_structure: jax.Array


class Merges(NamedTuple):
    """What POR begins with, as `por_mosaic.por` takes it; 0 or more."""

    merge_ptr: jax.Array  # int32 [streams + 1]
    used_rows: jax.Array  # int32 [1]


class Causal(NamedTuple):
    """What masks among the last T tokens of each request need."""

    node_start: jax.Array  # int32 [nodes], position of each node's first token
    query_position: jax.Array  # int32 [tiles * tile_rows + 64], position of each query row


def pac(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    request_of_row: jax.Array,
    node_length: jax.Array,
    pages: jax.Array,
    segments: jax.Array,
    runs: jax.Array,
    exactness: Exactness,
    merges: Merges,
    *,
    causal: Causal | None,
    readers_of_tokens: jax.Array | None = None,
    packing: Packing,
    num_partials: int,
    stages: int,
    scale: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the partials of all segments.

    Args:
      query: [B, T, N, H], bfloat16 or float16, H a multiple of 64.
      key_pages: [num_pages, page_size, K, H], page_size a multiple of 8.
      value_pages: like key_pages.
      request_of_row: int32 [B], the request of each request row.
      node_length: int32 [nodes], valid tokens of each node.
      pages: int32 [blocks, slots, 4], the fields of `Page`; slots * page_size tokens are a block, a multiple of 64.
      segments: int32 [segments, 10], the fields of `Segment`.
      runs: int32 [num_ctas, 12 + slots]: first segment and the one after the last of each thread block, the fields
        of the first, and the page ids of its first block.
      exactness: what the plan relies on.
      merges: what is brought to the L2 cache for POR.
      causal: for T > 1 tokens that are causal among themselves; None otherwise.
      readers_of_tokens: int32 [blocks, slots * page_size], the rows that see each token, as in `Page.readers`; None if
        all tokens of a page are seen by the same rows, up to causality.
      packing: how query rows make up a tile.
      num_partials: partials that segments refer to.
      stages: blocks in flight.
      scale: factor on the scores.
      interpret: parameters of the GPU interpreter, to simulate the kernel on a CPU.

    Returns float32 out [num_partials, 64, H], normalised, max and sum [num_partials, 64]; max in units of log2.
    Partials that no segment refers to are not written. Last, int32 [num_ctas, rounded up to a multiple of FOUND_GROUP]:
    1 where a thread block found that the plan does not hold, else 0; what is past the last of them is not written.
    """
    batch, tokens, num_q_heads, head_dim = query.shape
    sizes = Sizes(
        packing=packing,
        batch=batch,
        query_tokens=tokens,
        head_dim=head_dim,
        page_size=key_pages.shape[1],
        slots=pages.shape[1],
        stages=stages,
        factor=scale * _LOG2E,
        causal=causal is not None,
        by_token=readers_of_tokens is not None,
        dtype=query.dtype,
        interpreted=interpret is not None,
    )
    inputs = [query.reshape(batch * tokens, num_q_heads, head_dim)]
    inputs += [x.reshape(-1, *x.shape[2:]) for x in (key_pages, value_pages)]
    inputs += [request_of_row, node_length, pages, segments, runs, *exactness, *merges]
    masks = {} if causal is None else causal._asdict()
    if readers_of_tokens is not None:
        # One token for each thread of the warpgroup that prepares the mask.
        masks["readers_of_tokens"] = jnp.pad(readers_of_tokens, ((0, 0), (0, BLOCK_TOKENS - sizes.block)))
    references = (*Inputs._fields[: len(inputs)], *masks)
    inputs += masks.values()

    def body(*refs: Any) -> None:
        outputs = len(inputs) + len(Outputs._fields)
        query, *others = refs[outputs:]
        pipeline = Pipeline(
            Inputs(**dict(zip(references, refs, strict=False))),
            Outputs(*refs[len(inputs) : outputs]),
            Scratch(Query(query, query) if sizes.interpreted else Query(*query), *others),
            sizes,
        )

        @pl.when(pipeline.warpgroup < LANES)
        def _compute() -> None:
            plgpu.set_max_registers(_REGISTERS["compute"], action="increase")
            compute(pipeline)

        @pl.when(pipeline.warpgroup == _LOADER)
        def _load() -> None:
            plgpu.set_max_registers(_REGISTERS["load"], action="decrease")
            load_blocks(pipeline)

        @pl.when(pipeline.warpgroup == _PREPARER)
        def _prepare() -> None:
            plgpu.set_max_registers(_REGISTERS["prepare"], action="decrease")
            prepare(pipeline)
            check(pipeline)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_partials, TILE_ROWS, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_partials, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((num_partials, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct((-(-runs.shape[0] // FOUND_GROUP) * FOUND_GROUP,), jnp.int32),
        ],
        scratch_types=list(_scratch(sizes)),
        grid=(runs.shape[0],),
        grid_names=("cta",),
        num_threads=LANES + 2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(*inputs)


def _scratch(sizes: Sizes) -> Scratch:
    swizzle = plgpu.SwizzleTransform(128)
    tiled = (plgpu.TilingTransform((8, 64)), swizzle)
    ring = plgpu.SMEM((sizes.stages, sizes.block, sizes.head_dim), sizes.dtype, transforms=tiled)
    rings, buffers = (LANES + 1) * sizes.stages, sizes.query_buffers
    query = (buffers, sizes.query_parts, *tile_shape(sizes.packing, sizes.interpreted))
    # Of 64 columns, rows follow each other in the same places with and without tiles of 8 rows. Both views begin where
    # their memory begins; Pallas does not promise that of unions, so it rests on the tests that run on a GPU.
    views = [plgpu.SMEM(query, sizes.dtype, transforms=transforms) for transforms in ((swizzle,), tiled)]
    return Scratch(
        query=views[0] if sizes.interpreted else plgpu.RefUnion(*views),
        keys=ring,
        values=ring,
        columns=plgpu.SMEM((sizes.stages, 2 if sizes.causal else 1, BLOCK_TOKENS), jnp.int32),
        half=plgpu.SMEM((TILE_ROWS, sizes.columns), jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), swizzle)),
        half_rows=plgpu.SMEM((2, TILE_ROWS), jnp.float32),
        query_scattered=plgpu.Barrier(num_arrivals=sizes.packing.units * sizes.query_parts, num_barriers=buffers),
        query_together=plgpu.Barrier(num_arrivals=sizes.query_parts, num_barriers=buffers),
        query_free=plgpu.Barrier(num_arrivals=LANES, num_barriers=buffers),
        keys_full=plgpu.Barrier(num_arrivals=sizes.slots + 1, num_barriers=rings),  # pages, and the mask
        values_full=plgpu.Barrier(num_arrivals=sizes.slots, num_barriers=rings),
        keys_free=plgpu.Barrier(num_arrivals=LANES, num_barriers=sizes.stages),
        values_free=plgpu.Barrier(num_arrivals=LANES, num_barriers=sizes.stages),
        half_full=plgpu.Barrier(num_barriers=LANES),  # by the lane that gives
        half_free=plgpu.Barrier(num_barriers=LANES),
    )
