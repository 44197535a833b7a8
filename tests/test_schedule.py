"""How streams of blocks are cut into segments and handed out to thread blocks, under every policy."""

import heapq
from typing import NamedTuple

import numpy as np
import pytest
from costs import cost_model
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from codec_jax import schedule
from codec_jax.cost import Estimate, Layout
from codec_jax.division import divide
from codec_jax.schedule import Schedule

POLICIES = ["cut", "mixed", "paper", 1, 2, 7]
MODEL = cost_model(Layout(8, 8, 128, 16), block_tokens=128)


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

    @property
    def planned(self) -> schedule.Work:
        unique_wide = float(max(self.wide, default=0))
        return schedule.Work(self.ptr, self.unmasked, self.is_wide, unique_wide, 128, self.num_kv_heads, self.num_ctas)

    def cut(self, policy="cut") -> Schedule:
        return divide(self.planned, self.planned.estimate(MODEL), policy)


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
@given(works(st.one_of(st.integers(0, 3), st.integers(0, 500))), st.sampled_from(POLICIES))
def test_every_block_of_every_stream_and_head_is_in_one_segment(work, policy):
    cut = work.cut(policy)
    assert len(cut.cta_ptr) == work.num_ctas + 1
    assert (cut.cta_ptr[0], cut.cta_ptr[-1]) == (0, len(cut.lo))
    assert (np.diff(cut.cta_ptr) >= 0).all()
    assert (cut.hi > cut.lo).all()
    got = [
        (stream, head, block)
        for stream, head, lo, hi in zip(cut.stream, cut.head, cut.lo, cut.hi, strict=True)
        for block in range(lo, hi)
    ]
    expected = [
        (stream, head, block)
        for stream in range(len(work.blocks))
        for head in range(work.num_kv_heads)
        for block in range(work.ptr[stream], work.ptr[stream + 1])
    ]
    # The default policy keeps their order, and a cut inside a stream is the end of a thread block's run.
    assert (got if policy == "cut" else sorted(got)) == expected
    if policy == "cut":
        inside = np.diff(cut.stream * work.num_kv_heads + cut.head) == 0
        assert set(np.flatnonzero(inside) + 1) <= set(cut.cta_ptr.tolist())


def waiting_of(work: Work) -> float:
    """How much of the wait for memory shows: what memory takes beyond the arithmetic, over what could be waited for."""
    blocks = np.stack([work.unmasked, work.blocks - work.unmasked])  # [unmasked or masked, streams]
    fast = (blocks * np.where(work.is_wide, 1.8, 1.0) * [[1.0], [1.25]]).sum()
    slow = (blocks * np.maximum(2.0, np.where(work.is_wide, 1.8, 1.0) * [[1.0], [1.25]])).sum()
    read = 2.0 * (max(work.wide, default=0) + sum(work.narrow))
    return float(np.clip((read - fast) / (slow - fast), 0, 1)) if slow > fast else 1.0


def loads(work: Work, cut: Schedule) -> np.ndarray:
    """The time of each thread block, with the numbers of `cost_model`."""
    middle = np.clip((work.ptr[:-1] + work.unmasked)[cut.stream], cut.lo, cut.hi)
    wide, blocks = work.is_wide[cut.stream], cut.hi - cut.lo
    cached = np.where(wide, 1.8, 1.0) * (blocks + 0.25 * (cut.hi - middle))
    cost = 3.0 + 0.5 * (1 + wide) + cached + waiting_of(work) * np.maximum(2.0 * blocks - cached, 0)
    return np.diff(np.pad(np.cumsum(cost), (1, 0))[cut.cta_ptr])


# 13 teams of 9.6 thread blocks, and what remains for the other 7: rounded to 10, they would leave 2.
TEAMS = Work(wide=[960] * 13, narrow=[91] * 8, masked=0, num_kv_heads=8, num_ctas=132)


@settings(max_examples=300)
@given(works(st.one_of(st.integers(0, 40), st.integers(0, 3000))))
@example(TEAMS)
def test_no_thread_block_has_much_more_to_do_than_others(work):
    load = loads(work, work.cut())
    assume(load.mean() > 60)
    # Every run is cut to whole blocks, and may open one segment more than its share.
    assert load.max() - 2 * 2.25 - 4.0 < 1.15 * load.mean()


def costs_of_segments(work: Work, cut: Schedule) -> np.ndarray:
    return loads(work, cut._replace(cta_ptr=np.arange(len(cut.lo) + 1)))


@settings(max_examples=150)
@given(works(st.one_of(st.integers(0, 40), st.integers(0, 3000)), least_ctas=2))
def test_the_papers_slices_are_bounded_by_the_mean_load_and_assigned_greedily(work):
    cut, whole = work.cut("paper"), work.cut(1)
    assume(len(cut.lo))
    load, least = loads(work, cut), loads(work, whole).mean()
    assert load.max() <= (load.mean() + costs_of_segments(work, cut).max()) * 1.001
    # b_k <= ceil(C_est / cost_l), and cost_l is at least the mean load without any division.
    for stream, head, cost in zip(whole.stream, whole.head, costs_of_segments(work, whole), strict=True):
        slices = np.count_nonzero((cut.stream == stream) & (cut.head == head))
        assert 1 <= slices <= np.ceil(cost / least * 1.002)


def test_the_papers_division_keeps_all_thread_blocks_busy():
    work = Work(wide=[960] * 4, narrow=[91] * 8, masked=5, num_kv_heads=8, num_ctas=132)
    load = loads(work, work.cut("paper"))
    assert load.max() < 1.2 * load.mean()
    assert load.max() < loads(work, work.cut(1)).max() / 3


@settings(max_examples=150)
@given(works(st.one_of(st.integers(0, 40), st.integers(0, 3000))), st.sampled_from([1, 2, 7]))
def test_fixed_slices_are_equal_and_the_longest_go_first_to_whoever_is_free(work, slices):
    cut = work.cut(slices)
    count = {(s, h): 0 for s, h in zip(cut.stream.tolist(), cut.head.tolist(), strict=True)}
    for stream, head, blocks in zip(cut.stream.tolist(), cut.head.tolist(), cut.hi - cut.lo, strict=True):
        count[stream, head] += 1
        assert abs(blocks - work.blocks[stream] / min(slices, work.blocks[stream])) < 1
    assert all(n == min(slices, work.blocks[stream]) for (stream, _), n in count.items())
    heap = [0.0] * work.num_ctas
    for cost in sorted(costs_of_segments(work, cut), reverse=True):
        heapq.heapreplace(heap, heap[0] + cost)
    np.testing.assert_allclose(np.sort(loads(work, cut)), np.sort(heap), rtol=2e-3)


def test_mixed_thread_blocks_have_both_kinds_and_take_turns_to_begin_with_them():
    work = Work(wide=[900, 900], narrow=[500] * 6, masked=0, num_kv_heads=8, num_ctas=132)
    cut = work.cut("mixed")
    wide = work.is_wide[cut.stream]
    begins = []
    for cta, (lo, hi) in enumerate(zip(cut.cta_ptr[:-1], cut.cta_ptr[1:], strict=True)):
        kinds = wide[lo:hi].tolist()
        assert kinds == sorted(kinds, reverse=cta % 2 == 0)
        begins.append((cta % 2, kinds[0], True in kinds and False in kinds))
    assert sum(both for _, _, both in begins) >= 120
    load = loads(work, cut)
    assert load.max() < 1.05 * load.mean()


@pytest.mark.parametrize("policy", ["best", 0, -1, True, 1.5, None])
def test_another_policy_raises(policy):
    with pytest.raises(
        ValueError, match=r"policy: expected 'cut', 'mixed', 'paper' or a positive number of slices, got"
    ):
        Work([3], [4], 0, 1, 2).cut(policy)


@pytest.mark.parametrize(
    ("narrow", "wide", "unique_wide", "waiting"),
    [
        # All read their own: 100 blocks of 2 us, and each waits for all of it.
        ((100, 0), (0, 0), 0, 1000),
        # 80 wide blocks of 40 unique ones: 144 us of arithmetic, 80 us of memory.
        ((0, 0), (80, 0), 40, 0),
        # 50 narrow and 80 wide ones: 194 us of arithmetic, 180 of memory.
        ((50, 0), (80, 0), 40, 0),
        # 100 narrow: 244 us of arithmetic, 280 of memory; 116 us could be waited for.
        ((100, 0), (80, 0), 40, round(1000 * 36 / 116)),
        # With masks: 144 + 125 us of arithmetic, 91 to be waited for.
        ((0, 100), (80, 0), 40, round(1000 * 11 / 91)),
        ((0, 0), (0, 0), 0, 1000),
    ],
)
def test_what_memory_takes_beyond_the_arithmetic_is_waited_for(narrow, wide, unique_wide, waiting):
    estimate = Estimate.of(MODEL, 128, narrow, wide, unique_wide)
    assert estimate.waiting == waiting
    block = [[1 + waiting / 1000, 1.25 + 0.75 * waiting / 1000], [1.8 + 0.2 * waiting / 1000, 2.25]]
    np.testing.assert_allclose(estimate.block_us, block)


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
    works = Work([], [], 0, 2, 3), Work([0, 0], [0], 1, 2, 3)
    for cut in (work.cut(policy) for work in works for policy in POLICIES):
        assert cut.cta_ptr.tolist() == [0] * 4
        assert not cut.lo.size
