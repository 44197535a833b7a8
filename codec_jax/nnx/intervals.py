"""Intervals of decoding: pages and a plan for the tokens until the host looks at the device again."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax.errors import OutOfPagesError
from codec_jax.forest import Forest, PageCopies, PagePool, PageSubset
from codec_jax.forest.homes import Homes
from codec_jax.nnx.batch import Plans, all_plans, plans_for
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.kept import forms_of
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.planning import Plan, default_tiling, make_plan, pages_of_block
from codec_jax.planning.division import INVARIANT, Policy
from codec_jax.planning.even_runs import lasting_thread_blocks
from codec_jax.planning.invariant import parts_of, room_for_more
from codec_jax.planning.latent_forms import pay_together
from codec_jax.planning.plan import growing_pages
from codec_jax.traffic import Traffic, count_decode
from pallas_kernels import Heads, Tiling, Window

#: Nodes that a path may have before the decode step is compiled anew for longer block lists.
EXPECTED_DEPTH = 8
_NO_PAGES = np.zeros(0, np.int64)


class Planned(NamedTuple):
    """A plan of requests that decode, and of latent attention what is to be done before it runs."""

    plan: Plans
    copies: PageCopies  # K and V that are kept beside latents then
    pages: Int[np.ndarray, " new"]  # of which K and V are computed first
    places: Int[np.ndarray, " new"]  # where these are kept


class Interval(NamedTuple):
    """Room and a plan for the requests that have tokens remaining."""

    source: Forest  # that it was prepared from, for so many tokens of each request
    remaining: Int[np.ndarray, " B"]
    forest: Forest  # with room for the tokens
    pool: PagePool
    growers: Forest  # with nobody else in it
    plan: Plans  # of `growers`, and so on as in `Planned`
    copies: PageCopies
    pages: Int[np.ndarray, " new"]
    places: Int[np.ndarray, " new"]

    @property
    def block_capacity(self) -> int:
        """The blocks that plans of all pages, or of latents, have room for."""
        windows = {plan.arrays.window for plan in all_plans(self.plan)}
        return max(plans_for(self.plan, window)[0].block_capacity for window in windows)

    def traffic(self, counts: Int[np.ndarray, " B"]) -> Traffic:
        """Count what was read for so many tokens, in whatever form, in layers of the first window."""
        first, *others = plans_for(self.plan, all_plans(self.plan)[0].arrays.window)
        read = [count_decode(self.growers, plan, counts).kv_tokens_read for plan in others]
        return count_decode(self.growers, first, counts) + Traffic(kv_tokens_read=sum(read))


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
        reconstructed_pages: int = 0,
        *,
        max_context: int | None = None,
        invariant: bool = False,
    ) -> None:
        """Choose the sizes: for the heads and the pages of one device."""
        self._steps, self._page_size, self._num_pages = steps, page_size, num_pages
        self._max_context = num_pages * page_size if max_context is None else max_context
        self._policy: Policy = INVARIANT if invariant else "aligned"
        self._homes = Homes(parallel.context, num_pages // parallel.context)
        self._windows, self._reconstructed_pages = config.windows_used, reconstructed_pages
        num_q_heads, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
        latent = config.latent
        values = latent.size if latent else config.head_dim
        kv_dtype = Heads.kv_dtype if latent else config.cache_dtype  # plans of latents are alike for all dtypes
        heads = Heads(num_q_heads, num_kv_heads, config.head_dim, values, kv_dtype=kv_dtype)
        self._cut = _Cut.of(heads, self._homes.pages, page_size)
        if invariant:
            tiling = self._cut.tiling
            # Blocks of one length, whatever the amount of work is.
            self._cut = self._cut._replace(block_tokens=tiling.block_tokens[-1])
            self._more = room_for_more(tiling.num_ctas, num_kv_heads, self._cut.block_tokens)
        if latent and reconstructed_pages:
            self._forms = forms_of(config, parallel)
            heads = Heads(num_q_heads, num_q_heads, latent.query_dim, latent.value_dim)
            self._cut_by_heads = _Cut.of(heads, reconstructed_pages, page_size)

    @property
    def no_copies(self) -> PageCopies:
        """What there is of K and V beside latents to begin with."""
        return PageCopies.none(self._num_pages, self._reconstructed_pages)

    def prepare(
        self,
        forest: Forest,
        pool: PagePool,
        remaining: Int[np.ndarray, " B"],
        block_capacity: int,
        copies: PageCopies,
    ) -> Interval:
        """Take pages for the next interval, and plan it. Raises OutOfPagesError."""
        growing = np.flatnonzero(remaining)
        roomy, pool_left = forest.reserve(pool, int(min(self._steps, remaining.max())), growing)
        growers = roomy if len(growing) == roomy.active.sum() else roomy.only(growing)
        planned = self.plan_decoding(growers, block_capacity, copies)
        return Interval(forest, remaining, roomy, pool_left, growers, *planned)

    def prepare_ahead(
        self,
        forest: Forest,
        pool: PagePool,
        remaining: Int[np.ndarray, " B"],
        block_capacity: int,
        copies: PageCopies,
    ) -> Interval | None:
        """Prepare an interval that may not come; None if there is nothing left to do, or no room for it yet."""
        try:
            return self.prepare(forest, pool, remaining, block_capacity, copies) if remaining.any() else None
        except OutOfPagesError:
            return None

    def plan_decoding(
        self,
        forest: Forest,
        block_capacity: int,
        copies: PageCopies,
        written: Int[np.ndarray, " pages"] = _NO_PAGES,
        kept: PageSubset | None = None,
    ) -> Planned:
        """Plan one-token steps, and which K and V are read in the place of latents; beside them pages are written."""
        if not self._reconstructed_pages:
            return Planned(self.plan(forest, 1, block_capacity, kept=kept), copies, _NO_PAGES, _NO_PAGES)
        written = np.concatenate([growing_pages(forest), written])
        worth = self._forms.worth_reconstructing(forest)
        copies, subset, pages, places = copies.follow([node.pages for node in worth], written)
        read = subset if pay_together([node for node in worth if node.is_in(subset)]) else None
        return Planned(self.plan(forest, 1, block_capacity, read), copies, pages, places)

    def plan(
        self,
        forest: Forest,
        query_tokens: int,
        block_capacity: int | None,
        by_heads: PageSubset | None = None,
        kept: PageSubset | None = None,
    ) -> Plans:
        """Plan attention of the model's heads over a forest: a plan for each of its windows.

        Of some pages K and V of every head may be read in the place of their latents, by further plans. Layers with
        windows may have the pages that are seen only, `kept`.
        """
        rest = None if by_heads is None else by_heads.rest
        plans = self._plans(self._cut, forest, query_tokens, block_capacity, rest, kept)
        if by_heads is not None:
            most = self._cut_by_heads.blocks(forest.request_capacity, by_heads.capacity, self._page_size)
            plans += self._plans(self._cut_by_heads, forest, query_tokens, most, by_heads, None)
        return plans if len(plans) > 1 else plans[0]

    def _plans(
        self,
        cut: _Cut,
        forest: Forest,
        query_tokens: int,
        block_capacity: int | None,
        subset: PageSubset | None,
        kept: PageSubset | None,
    ) -> tuple[Plan, ...]:
        requests = forest.request_capacity

        def num_ctas(window: Window | None) -> int | None:
            if self._policy == INVARIANT:
                return None
            return lasting_thread_blocks(cut.tiling, cut.heads, requests, query_tokens, window)

        return tuple(
            make_plan(
                forest,
                num_q_heads=cut.heads.num_q_heads,
                num_kv_heads=cut.heads.num_kv_heads,
                head_dim=cut.heads.head_dim,
                value_head_dim=cut.heads.value_head_dim,
                kv_dtype=cut.heads.kv_dtype,
                steps=self._steps,
                query_tokens=query_tokens,
                window=window,
                num_ctas=num_ctas(window),
                block_tokens=cut.block_tokens,
                block_capacity=block_capacity,
                segment_capacity=self._segment_capacity(requests, query_tokens),
                policy=self._policy,
                homes=self._homes,
                subset=subset if window is None or kept is None else kept,
            )
            for window in self._windows
        )

    def block_capacity(self, max_requests: int, max_context: int) -> int:
        """Bound the blocks of any interval: every tile reads every page, or every request its longest path."""
        paths = max_requests * (-(-max_context // self._page_size) + EXPECTED_DEPTH)
        blocks = self._cut.blocks(max_requests, self._homes.pages, self._page_size, paths)
        if self._policy == INVARIANT:
            # A request has blocks of its own where nodes begin and end, beside which another lane may have none.
            blocks += 4 * (EXPECTED_DEPTH + 1) * max_requests + self._more[1]
        return blocks

    def _segment_capacity(self, requests: int, query_tokens: int) -> int:
        """Bound the segments of plans whose streams end where contexts say, not where a thread block has enough."""
        if self._policy != INVARIANT:
            return 0
        cut = self._cut
        rows, blocks = query_tokens * cut.heads.group, -(-self._max_context // cut.block_tokens) + EXPECTED_DEPTH
        parts = int(parts_of(blocks, cut.block_tokens, -(-rows // cut.tiling.tile_rows))[-1]) + 1
        tiles = -(-requests * rows // cut.tiling.tile_rows)
        return (tiles * parts + self._more[0]) * cut.heads.num_kv_heads

    def blocks_of_chunks(self, ends: Int[np.ndarray, " chunks"], chunk: int) -> int:
        """Bound the blocks of prefill: every tile reads what the longest of its requests has before it, at most."""
        tiles = 1 + chunk * self._cut.heads.group // self._cut.tiling.tile_rows
        return int((tiles * (2 + ends // self._cut.block_tokens)).sum())


class _Cut(NamedTuple):
    """How plans cut attention of some heads."""

    heads: Heads
    tiling: Tiling
    block_tokens: int

    @classmethod
    def of(cls, heads: Heads, pages: int, page_size: int) -> _Cut:
        """Choose what suits a pool of so many pages."""
        tiling = default_tiling(heads)
        block_tokens = tiling.block_for(heads.num_kv_heads, pages * page_size, 0)
        return cls(heads, tiling, block_tokens)

    def blocks(self, requests: int, pages: int, page_size: int, most: float = math.inf) -> int:
        """Bound the blocks of one-token steps: every tile reads every page, or so many pages at most are read."""
        page_tokens, pages_per_block = pages_of_block(page_size, self.block_tokens)
        tiles = -(-requests * self.heads.group // self.tiling.tile_rows)
        parts = int(min(tiles * pages, most)) * (page_size // page_tokens)
        return -(-parts // pages_per_block) + 2 * tiles
