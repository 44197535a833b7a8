"""How `schedule` cuts streams of blocks into segments and hands them out to thread blocks."""

from typing import NamedTuple

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from codec_jax import schedule as costs
from codec_jax.schedule import Schedule, schedule


class Work(NamedTuple):
    """Streams, wide ones first, and who works on them."""

    wide: list[int]  # blocks of each wide stream
    narrow: list[int]
    masked: int  # of the blocks of a stream, at most
    num_kv_heads: int
    num_ctas: int

    @property
    def blocks(self) -> np.ndarray:
        return np.asarray(self.wide + self.narrow, np.int64)

    @property
    def is_wide(self) -> np.ndarray:
        return np.arange(len(self.blocks)) < len(self.wide)

    @property
    def ptr(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.blocks)])

    @property
    def unmasked(self) -> np.ndarray:
        return np.maximum(self.blocks - self.masked, 0)

    def cut(self) -> Schedule:
        return schedule(
            self.ptr,
            self.unmasked,
            self.is_wide,
            float(max(self.wide, default=0)),
            num_kv_heads=self.num_kv_heads,
            num_ctas=self.num_ctas,
        )


def works(blocks: st.SearchStrategy[int], least_ctas: int = 1) -> st.SearchStrategy[Work]:
    """Few streams or many, of numbers of blocks that are drawn for each or are equal for all wide ones."""
    some = st.lists(blocks, max_size=20)
    equal = st.tuples(blocks, st.integers(0, 16)).map(lambda drawn: [drawn[0]] * drawn[1])
    return st.builds(
        Work,
        wide=st.one_of(some, equal),
        narrow=some,
        masked=st.sampled_from([0, 1, 30]),
        num_kv_heads=st.sampled_from([1, 2, 8]),
        num_ctas=st.sampled_from([n for n in (1, 2, 7, 16, 66, 132) if n >= least_ctas]),
    )


@settings(max_examples=300)
@given(works(st.one_of(st.integers(0, 3), st.integers(0, 500))))
def test_every_block_of_every_stream_and_head_is_in_one_segment_in_order(work):
    cut = work.cut()
    assert len(cut.cta_ptr) == work.num_ctas + 1
    assert (cut.cta_ptr[0], cut.cta_ptr[-1]) == (0, len(cut.lo))
    assert (np.diff(cut.cta_ptr) >= 0).all()
    got = [
        (stream, head, block)
        for stream, head, lo, hi in zip(cut.stream, cut.head, cut.lo, cut.hi, strict=True)
        for block in range(lo, hi)
    ]
    assert got == [
        (stream, head, block)
        for stream in range(len(work.blocks))
        for head in range(work.num_kv_heads)
        for block in range(work.ptr[stream], work.ptr[stream + 1])
    ]
    assert (cut.hi > cut.lo).all()
    # A cut inside a stream is the end of a thread block's run.
    inside = np.diff(cut.stream * work.num_kv_heads + cut.head) == 0
    assert set(np.flatnonzero(inside) + 1) <= set(cut.cta_ptr.tolist())


def loads(work: Work, narrow_cost: np.ndarray) -> np.ndarray:
    """The cost of each thread block's run, for each cost that a narrow block might have: [costs, num_ctas]."""
    cut = work.cut()
    middle = np.clip((work.ptr[:-1] + work.unmasked)[cut.stream], cut.lo, cut.hi)
    blocks = middle - cut.lo + costs._MASKED_FACTOR * (cut.hi - middle)
    cost = blocks * np.where(work.is_wide[cut.stream], costs._WIDE_COST, narrow_cost[:, None]) + costs._SEGMENT_COST
    return np.diff(np.pad(np.cumsum(cost, axis=1), ((0, 0), (1, 0)))[:, cut.cta_ptr])


# 13 teams of 9.6 thread blocks, and what remains for the other 7: rounded to 10, they would leave 2.
TEAMS = Work(wide=[960] * 13, narrow=[91] * 8, masked=0, num_kv_heads=8, num_ctas=132)


@settings(max_examples=300)
@given(works(st.one_of(st.integers(0, 40), st.integers(0, 3000))))
@example(TEAMS)
def test_no_thread_block_has_much_more_to_do_than_others(work):
    # What a narrow block costs depends on how much of the time the wide ones leave the memory idle.
    load = loads(work, np.linspace(costs._NARROW_COST, 1.0, 91))
    mean = load.mean(axis=1)
    assume(mean[0] > 40)
    # Every run is cut to whole blocks, and may open one segment more than its share.
    assert ((load.max(axis=1) - 2 - costs._SEGMENT_COST) / mean).min() < 1.15


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.just(1000), st.integers(800, 1200)), min_size=1, max_size=9),
    st.lists(st.integers(1, 80), max_size=10),
    st.sampled_from([0, 5]),
    st.sampled_from([1, 8]),
)
def test_thread_blocks_of_a_large_wide_stream_have_nothing_else_and_stand_where_those_of_its_equals_do(
    wide, narrow, masked, num_kv_heads
):
    work = Work(wide, narrow, masked, num_kv_heads, num_ctas=132)
    cut = work.cut()
    runs = [cut.stream[lo:hi].tolist() for lo, hi in zip(cut.cta_ptr[:-1], cut.cta_ptr[1:], strict=True)]
    for stream in range(len(wide)):
        assert all(set(run) == {stream} for run in runs if stream in run)
    # Where equal streams are cut, counted from their first block, up to rounding.
    pieces = {}
    for stream, blocks in enumerate(wide):
        mine = cut.stream == stream
        piece = np.stack([cut.head[mine] * blocks, cut.lo[mine] - work.ptr[stream]])
        np.testing.assert_allclose(piece, pieces.setdefault(blocks, piece), rtol=0, atol=1)


def test_a_wide_stream_that_keeps_few_thread_blocks_busy_shares_its_last_one():
    cut = Work(wide=[75], narrow=[825], masked=0, num_kv_heads=1, num_ctas=16).cut()
    runs = [set(cut.stream[lo:hi].tolist()) for lo, hi in zip(cut.cta_ptr[:-1], cut.cta_ptr[1:], strict=True)]
    assert {0, 1} in runs


def test_without_blocks_no_thread_block_has_a_segment():
    for work in (Work([], [], 0, 2, 3), Work([0, 0], [0], 1, 2, 3)):
        cut = work.cut()
        assert cut.cta_ptr.tolist() == [0] * 4
        assert not cut.lo.size
