"""Intervals of decoding: pages and a plan for the tokens until the host looks at the device again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax.errors import OutOfPagesError
from codec_jax.forest import Forest, PagePool
from codec_jax.forest.homes import Homes
from codec_jax.nnx.batch import Plans
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.planning import default_tiling, make_plan, pages_of_block
from codec_jax.planning.division import INVARIANT, Policy
from codec_jax.planning.invariant import parts_of, room_for_more
from pallas_kernels import Heads

#: Nodes that a path may have before the decode step is compiled anew for longer block lists.
EXPECTED_DEPTH = 8


class Interval(NamedTuple):
    """Room and a plan for the requests that have tokens remaining."""

    source: Forest  # that it was prepared from, for so many tokens of each request
    remaining: Int[np.ndarray, " B"]
    forest: Forest  # with room for the tokens
    pool: PagePool
    growers: Forest  # with nobody else in it
    plan: Plans  # of `growers`


class Intervals:
    """Prepares intervals of up to `steps` tokens.

    Plans have the sizes that suit a full pool, so that they never change.
    """

    def __init__(
        self,
        config: DecoderConfig,
        steps: int,
        num_pages: int,
        page_size: int,
        parallel: Parallel = ALONE,
        *,
        max_context: int | None = None,
        invariant: bool = False,
    ) -> None:
        """Choose the sizes: for the heads and the pages of one device."""
        self._steps, self._page_size = steps, page_size
        self._max_context = num_pages * page_size if max_context is None else max_context
        self._policy: Policy = INVARIANT if invariant else "aligned"
        self._homes = Homes(parallel.context, num_pages // parallel.context)
        self._windows = config.windows_used
        heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
        values = config.latent.size if config.latent else config.head_dim
        self._heads = Heads(*heads, config.head_dim, values)
        tiling = default_tiling(self._heads)
        self._tile_rows = tiling.tile_rows
        self._block_tokens = tiling.block_for(self._heads.num_kv_heads, self._homes.pages * page_size, 0)
        if invariant:
            self._block_tokens = tiling.block_tokens[-1]  # whatever the amount of work is
        self._more = room_for_more(tiling.num_ctas, self._heads.num_kv_heads, self._block_tokens)

    def prepare(
        self, forest: Forest, pool: PagePool, remaining: Int[np.ndarray, " B"], block_capacity: int
    ) -> Interval:
        """Take pages for the next interval, and plan it. Raises OutOfPagesError."""
        growing = np.flatnonzero(remaining)
        roomy, pool_left = forest.reserve(pool, int(min(self._steps, remaining.max())), growing)
        growers = roomy if len(growing) == roomy.active.sum() else roomy.only(growing)
        return Interval(forest, remaining, roomy, pool_left, growers, self.plan(growers, 1, block_capacity))

    def prepare_ahead(
        self, forest: Forest, pool: PagePool, remaining: Int[np.ndarray, " B"], block_capacity: int
    ) -> Interval | None:
        """Prepare an interval that may not come; None if there is nothing left to do, or no room for it yet."""
        try:
            return self.prepare(forest, pool, remaining, block_capacity) if remaining.any() else None
        except OutOfPagesError:
            return None

    def plan(self, forest: Forest, query_tokens: int, block_capacity: int | None) -> Plans:
        """Plan attention of the model's heads over a forest: a plan for each of its windows."""
        plans = tuple(
            make_plan(
                forest,
                num_q_heads=self._heads.num_q_heads,
                num_kv_heads=self._heads.num_kv_heads,
                head_dim=self._heads.head_dim,
                value_head_dim=self._heads.value_head_dim,
                steps=self._steps,
                query_tokens=query_tokens,
                window=window,
                block_tokens=self._block_tokens,
                block_capacity=block_capacity,
                segment_capacity=self._segment_capacity(forest.request_capacity, query_tokens),
                policy=self._policy,
                homes=self._homes,
            )
            for window in self._windows
        )
        return plans if len(plans) > 1 else plans[0]

    def block_capacity(self, max_requests: int, max_context: int) -> int:
        """Bound the blocks of any interval: every tile reads every page, or every request its longest path."""
        page_tokens, pages_per_block = pages_of_block(self._page_size, self._block_tokens)
        tiles = -(-max_requests * self._heads.group // self._tile_rows)
        paths = max_requests * (-(-max_context // self._page_size) + EXPECTED_DEPTH)
        parts = min(tiles * self._homes.pages, paths) * (self._page_size // page_tokens)
        blocks = -(-parts // pages_per_block) + 2 * tiles
        if self._policy == INVARIANT:
            # A request has blocks of its own where nodes begin and end, beside which another lane may have none.
            blocks += 4 * (EXPECTED_DEPTH + 1) * max_requests + self._more[1]
        return blocks

    def _segment_capacity(self, requests: int, query_tokens: int) -> int:
        """Bound the segments of plans whose streams end where contexts say, not where a thread block has enough."""
        if self._policy != INVARIANT:
            return 0
        rows, blocks = query_tokens * self._heads.group, -(-self._max_context // self._block_tokens) + EXPECTED_DEPTH
        parts = int(parts_of(blocks, self._block_tokens, -(-rows // self._tile_rows))[-1]) + 1
        tiles = -(-requests * rows // self._tile_rows)
        return (tiles * parts + self._more[0]) * self._heads.num_kv_heads

    def blocks_of_chunks(self, ends: Int[np.ndarray, " chunks"], chunk: int) -> int:
        """Bound the blocks of prefill: every tile reads what the longest of its requests has before it, at most."""
        tiles = 1 + chunk * self._heads.group // self._tile_rows
        return int((tiles * (2 + ends // self._block_tokens)).sum())
