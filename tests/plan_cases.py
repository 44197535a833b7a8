"""Forests with plans for them, and what such a plan computes, row by row and token by token."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from forests import ancestry, first_seen, page_sizes, trees
from hypothesis import strategies as st

from codec_jax import Forest, PagePool, Plan, Window, make_plan

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
#: Pairs of tiles share even the little that small forests have for both.
TILING = {"num_ctas": 3, "tile_rows": 8, "block_tokens": 32, "min_wide_tokens": 24}


WINDOWS = [None, None, None, 1, 7, 16, 30, 1000, Window(8, chunked=True), Window(25, chunked=True)]


class Case(NamedTuple):
    """A forest, its pool, the arguments of `make_plan` for it, and what makes a wide stream worth its costs."""

    forest: Forest
    pool: PagePool
    options: dict
    min_wide_tokens: int

    def plan(self, **options) -> Plan:
        return make_plan(self.forest, **{**self.options, "min_wide_tokens": self.min_wide_tokens, **options})


@st.composite
def cases(draw):
    """Forests fresh from `from_nodes`, and forests whose nodes and requests are numbered anyhow after edits."""
    tree = draw(trees(max_nodes=8, max_length=40, max_requests=6))
    page_size = draw(page_sizes)
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=len(tree.leaf) + draw(st.integers(0, 3)))
    pool = PagePool.create(len(forest.used_pages) + 96, taken=forest.used_pages)
    steps = draw(st.sampled_from([1, 2, 9]))
    if draw(st.booleans()):
        requests = st.lists(st.integers(0, len(tree.leaf) - 1), min_size=1, max_size=2)
        forest, pool = forest.retire(pool, draw(requests))
        if forest.active.any():
            free = int((~forest.active).sum())
            sources = draw(st.lists(st.sampled_from(np.flatnonzero(forest.active).tolist()), max_size=free))
            forest, pool = forest.fork(sources)[0].reserve(pool, 3)
            forest = forest.extend(3)
    if draw(st.booleans()):
        forest, pool = forest.reserve(pool, steps)
    group, num_kv_heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (4, 1), (3, 2)]))
    options = {
        "num_q_heads": group * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 8,
        "steps": steps,
        "query_tokens": draw(st.sampled_from([1, 1, 2, 3, 5])),
        "window": draw(st.sampled_from(WINDOWS)),
        "num_ctas": draw(st.sampled_from([1, 2, 7, 16])),
        "tile_rows": draw(st.sampled_from([5, 8, 16, 24, 63])),
        "block_tokens": draw(st.sampled_from([1, 16, 32, 48, 128])),
        "lanes": draw(st.sampled_from([1, 2, 2])),
        "policy": draw(st.sampled_from(["aligned", "aligned", "paper", 1, 3, "invariant"])),
    }
    return Case(forest, pool, options, draw(st.sampled_from([1, 1, 60])))


def room(forest, steps):
    """Tokens that each request may append, `steps` at most: those of its own leaf's pages."""
    count = np.zeros(forest.request_capacity, int)
    for request in np.flatnonzero(forest.active):
        leaf = forest.leaf[request]
        reads = [leaf in ancestry(forest.parent, int(end)) for end in forest.leaf]
        if sum(reads) == 1:
            count[request] = min(steps, forest.page_count[leaf] * forest.page_size - forest.length[leaf])
    return count


class Segment(NamedTuple):
    tile0: int
    tile1: int
    head: int
    begin: int
    first_masked: int
    end: int
    partial0: int
    partial1: int
    query_start0: int
    query_start1: int

    @property
    def partial_of_tile(self) -> dict[int, int]:
        """The partial that the segment leaves for its tile, or for each of its two."""
        return {self.tile1: self.partial1, self.tile0: self.partial0}

    def rows(self, plan: Plan) -> np.ndarray:
        """The packed rows of its tiles, one tile after the other."""
        return np.concatenate(
            [np.arange(plan.arrays.tile_rows) + t * plan.arrays.tile_rows for t in sorted(self.partial_of_tile)]
        )


class Page(NamedTuple):
    """A page of a block: its readers are rows [lo, hi) of the segment."""

    number: int
    node: int
    token: int
    lo: int
    hi: int


def num_wide(plan: Plan) -> int:
    """Count the segments of two tiles."""
    segments = plan.arrays.segments[: plan.arrays.cta_ptr[-1]]
    return int((segments[:, 0] != segments[:, 1]).sum())


def used_segments(plan):
    return [Segment(*fields) for fields in plan.arrays.segments[: plan.arrays.cta_ptr[-1]].tolist()]


def pages_of(plan, lo, hi) -> Iterator[Page]:
    """The pages in the slots of blocks [lo, hi) that are in use."""
    for number, node, token, readers in plan.arrays.block_pages[lo:hi].reshape(-1, 4).tolist():
        if readers:
            yield Page(number, node, token, readers % 2**16, readers // 2**16)


def rows_of(plan, forest):
    """(request, query token) of every packed row; None where no request in use has the row."""
    rows = [None] * (plan.arrays.num_tiles * plan.arrays.tile_rows)
    for request in np.flatnonzero(forest.active).tolist():
        first = int(forest.row_of_request[request]) * plan.arrays.query_tokens * plan.heads.group
        for token in range(plan.arrays.query_tokens):
            for member in range(plan.heads.group):
                rows[first + token * plan.heads.group + member] = (request, token)
    return rows


def visible(plan, case, forest):
    """Which packed row must see which token slot, from the contexts: bool [rows, token slots]."""
    out = np.zeros((plan.arrays.num_tiles * plan.arrays.tile_rows, case.pool.num_pages * forest.page_size), bool)
    for row, of in enumerate(rows_of(plan, forest)):
        if of is not None:
            request, token = of
            context = forest.context_slots(request)
            position = len(context) - plan.arrays.query_tokens + token
            out[row, context[first_seen(plan.arrays.window, position) : max(0, position + 1)]] = True
    return out


def visits(plan, case, forest):
    """How often the plan computes each (packed row, kv head, token slot), thread block by thread block."""
    rows = rows_of(plan, forest)
    positions = np.full(len(rows), -1)
    for row, of in enumerate(rows):
        if of is not None:
            positions[row] = len(forest.context_slots(of[0])) - plan.arrays.query_tokens + of[1]
    above = {
        node: sum(int(forest.length[n]) for n in ancestry(forest.parent, int(forest.parent[node])))
        for node in np.unique(plan.arrays.block_pages[..., 1])
    }
    segments = used_segments(plan)
    out = np.zeros((len(rows), plan.heads.num_kv_heads, case.pool.num_pages * forest.page_size), int)
    for cta in range(len(plan.arrays.cta_ptr) - 1):
        for segment in segments[plan.arrays.cta_ptr[cta] : plan.arrays.cta_ptr[cta + 1]]:
            of_segment = segment.rows(plan)
            for page in pages_of(plan, segment.begin, segment.end):
                assert 0 <= page.lo < page.hi <= len(of_segment)
                tokens = np.arange(max(0, min(plan.arrays.page_tokens, int(forest.length[page.node]) - page.token)))
                readers = of_segment[page.lo : page.hi]
                seen = np.ones((len(readers), len(tokens)), bool)
                at, of = above[page.node] + page.token + tokens, positions[readers]
                if plan.arrays.query_tokens > 1:
                    seen &= at <= of[:, None]
                if plan.arrays.window is not None:
                    seen &= at >= np.asarray([first_seen(plan.arrays.window, position) for position in of])[:, None]
                out[readers[:, None], segment.head, page.number * plan.arrays.page_tokens + tokens] += seen
    return out


def assert_computes_everything_once(plan, case, forest):
    expected = visible(plan, case, forest)
    np.testing.assert_array_equal(visits(plan, case, forest), np.repeat(expected[:, None], plan.heads.num_kv_heads, 1))
