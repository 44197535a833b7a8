"""The loading warpgroup of PAC: one copy per page and ring, or one per block, as far ahead as the rings allow."""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.pac_pipeline import COLUMNS, Pipeline, past_the_end
from pallas_kernels.plan_format import Segment

_Ids = tuple[jax.Array, ...]


def load_blocks(pipeline: Pipeline) -> None:
    """Fill the rings of K and V, block after block of every segment."""
    sizes = pipeline.sizes

    def work(segment: Segment, next_segment: Segment, done: jax.Array, _: jax.Array, ids: _Ids) -> _Ids:
        count = segment.end - segment.begin

        def step(i: jax.Array, ids: _Ids) -> _Ids:
            number = done + i
            stage = pipeline.stage(number)
            # A load from global memory takes longer than a block: ask for the next block's pages now.
            following = pipeline.page_ids(jnp.where(i + 1 < count, segment.begin + i + 1, next_segment.begin))
            # Copies are issued one after another, so pages that follow each other in memory share one.
            together = functools.reduce(operator.and_, (page == ids[0] + j for j, page in enumerate(ids)))
            for tokens, ring, full, free in pipeline.rings:
                arrived = pipeline.full(full, segment, number)

                def copy(j: int, count: int, tokens: Any = tokens, ring: Any = ring, arrived: Any = arrived) -> None:
                    """Copy `count` pages from the block's page j on."""
                    first = pl.ds(ids[j] * sizes.page_tokens, count * sizes.page_tokens)
                    rows = pl.ds(j * sizes.page_tokens, count * sizes.page_tokens)
                    if sizes.is_padded:
                        for part in range(sizes.copies_of_page):
                            columns = past_the_end(part * COLUMNS, COLUMNS, segment.head)
                            source = tokens.at[first, segment.head, columns]  # [count * page_tokens, 64]
                            plgpu.copy_gmem_to_smem(source, ring.at[stage, part, rows], arrived)
                        return
                    plgpu.copy_gmem_to_smem(
                        tokens.at[first, segment.head],  # [count * page_tokens, H]
                        ring.at[stage, rows],
                        arrived,
                    )

                if free is not None:

                    @pl.when(number >= sizes.stages)
                    def _wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[stage])

                @pl.when(together)
                def _one_copy(copy: Any = copy, arrived: Any = arrived) -> None:
                    copy(0, sizes.pages_per_block)
                    # The barrier expects the arrivals of each page.
                    for _ in range((sizes.pages_per_block - 1) * sizes.copies_of_page):
                        plgpu.barrier_arrive(arrived)

                @pl.when(jnp.logical_not(together))
                def _page_by_page(copy: Any = copy) -> None:
                    for j in range(sizes.pages_per_block):
                        copy(j, 1)

            return following

        return lax.fori_loop(0, count, step, ids)

    pipeline.each_segment(work, pipeline.first_pages)
