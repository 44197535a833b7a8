"""How streams of blocks are cut into segments and handed out to thread blocks, under every policy."""

import heapq
import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from costs import cost_model
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from codec_jax.planning import even_runs
from codec_jax.planning import work as planned_work
from codec_jax.planning.cost import HeadLayout
from codec_jax.planning.division import divide
from codec_jax.planning.estimate import Estimate
from codec_jax.planning.work import Schedule
from pallas_kernels import Heads, Tiling, Window

POLICIES = ["aligned", "paper", 1, 2, 7]
MODEL = cost_model(HeadLayout(8, 8, 128, 16), block_tokens=128)
H200 = Tiling(num_ctas=132, tile_rows=64, lanes=2, block_tokens=(64, 128))


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
    def planned(self) -> planned_work.Work:
        unique = float(max(self.wide, default=0) + sum(self.narrow))
        return planned_work.Work(self.ptr, self.unmasked, self.is_wide, unique, 128, self.num_kv_heads)

    def cut(self, policy="aligned") -> Schedule:
        return divide(self.planned, self.num_ctas, self.planned.estimate(MODEL), policy)


# What is left of a wide stream fills a run but for the last digit of its cost.
LEFTOVERS = Work(wide=[2176] * 6, narrow=[1787, 1444, 40, 2819, 23, 335, 1256], masked=0, num_kv_heads=1, num_ctas=7)


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
@example(Work([], [39], masked=30, num_kv_heads=2, num_ctas=132), "aligned")  # runs end in the middle of blocks
@example(LEFTOVERS, "aligned")
def test_every_block_of_every_stream_and_head_is_in_one_segment(work, policy):
    cut = work.cut(policy)
    assert len(cut.cta_ptr) - 1 == work.num_ctas
    assert (cut.cta_ptr[0], cut.cta_ptr[-1]) == (0, len(cut.begin))
    assert (np.diff(cut.cta_ptr) >= 0).all()
    assert (cut.end > cut.begin).all()
    got = [
        (stream, head, block)
        for stream, head, lo, hi in zip(cut.stream, cut.head, cut.begin, cut.end, strict=True)
        for block in range(lo, hi)
    ]
    assert sorted(got) == [
        (stream, head, block)
        for stream in range(len(work.blocks))
        for head in range(work.num_kv_heads)
        for block in range(work.ptr[stream], work.ptr[stream + 1])
    ]


@settings(max_examples=1500)
@given(works(st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 200_000))))
def test_segments_follow_each_other_however_costs_are_rounded(work):
    cut = work.cut()
    assert cut.cta_ptr[-1] == len(cut.begin)
    order = np.lexsort((cut.begin, cut.head, cut.stream))
    stream, head, lo, hi = (x[order] for x in (cut.stream, cut.head, cut.begin, cut.end))
    begins = np.append(True, (stream[1:] != stream[:-1]) | (head[1:] != head[:-1]))[: len(lo)]
    filled = np.flatnonzero(work.blocks)
    assert stream[begins].tolist() == np.repeat(filled, work.num_kv_heads).tolist()
    np.testing.assert_array_equal(lo, np.where(begins, work.ptr[stream], np.roll(hi, 1)))
    np.testing.assert_array_equal(hi[np.roll(begins, -1)], work.ptr[stream + 1][np.roll(begins, -1)])


def waiting_of(work: Work) -> float:
    """How much of the wait shows: what memory takes beyond the arithmetic, over what could be waited for."""
    blocks = np.stack([work.unmasked, work.blocks - work.unmasked])  # [unmasked or masked, streams]
    fast = (blocks * np.where(work.is_wide, [[1.8], [2.25]], [[1.0], [1.25]])).sum()
    slow = (blocks * np.where(work.is_wide, 2.5, 2.0)).sum()
    read = 2.0 * (max(work.wide, default=0) + sum(work.narrow))
    return float(np.clip((read - fast) / (slow - fast), 0.5, 1)) if slow > fast else 1.0


def loads(work: Work, cut: Schedule) -> np.ndarray:
    """The time of each thread block, with the numbers of `cost_model`."""
    middle = np.clip((work.ptr[:-1] + work.unmasked)[cut.stream], cut.begin, cut.end)
    wide, blocks = work.is_wide[cut.stream], cut.end - cut.begin
    cached = np.where(wide, 1.8, 1.0) * (blocks + 0.25 * (cut.end - middle))
    cost = 3.0 + 0.5 * (1 + wide) + cached
    cost += waiting_of(work) * np.maximum(np.where(wide, 2.5, 2.0) * blocks - cached, 0)
    return np.diff(np.pad(np.cumsum(cost), (1, 0))[cut.cta_ptr])


@pytest.mark.parametrize("wide", [200, 700, 1500])
def test_thread_blocks_with_wide_and_narrow_streams_alternate(wide):
    work = Work(wide=[wide] * 2, narrow=[16] * 64, masked=0, num_kv_heads=8, num_ctas=128)
    cut = work.cut()
    first = cut.cta_ptr[:32:2]  # of each run in the first head of a pair
    kinds = work.is_wide[cut.stream[first]]
    assert len(cut.cta_ptr) - 1 == 8 * 16
    share = max(kinds.mean(), 1 - kinds.mean())
    streaks = [len(list(streak)) for _, streak in itertools.groupby(kinds)]
    assert 0.5 <= share < 1
    assert max(streaks) <= np.ceil(2 * share / (1 - share))


@pytest.mark.parametrize("wide", [0, 20])
def test_thread_blocks_begin_short_streams_together_half_of_them_wide(wide):
    work = Work(wide=[30] * wide, narrow=[*range(40, 56), *[50] * 48], masked=0, num_kv_heads=8, num_ctas=128)
    cut = work.cut()
    first = cut.cta_ptr[:32:2, None] + np.arange(3)  # segments of each run in the first head of a pair
    waves = [set(streams) for streams in cut.stream[first].T.tolist()]
    np.testing.assert_array_equal(cut.begin[first], work.ptr[cut.stream[first]])
    np.testing.assert_array_equal(cut.end[first], work.ptr[cut.stream[first] + 1])
    if wide:
        narrow = [range(wide + 8 * turn, wide + 8 * turn + 8) for turn in range(2)]
        assert waves[:2] == [{*range(8 * turn, 8 * turn + 8), *narrow[turn]} for turn in range(2)]
        kinds = work.is_wide[cut.stream[first[:, :2]]]
        assert (kinds[:, 0] != kinds[:, 1]).all()
    else:
        assert waves == [set(range(16 * turn, 16 * turn + 16)) for turn in range(3)]


# 13 streams that fill 9.6 thread blocks each.
TEAMS = Work(wide=[960] * 13, narrow=[91] * 8, masked=0, num_kv_heads=8, num_ctas=128)


@settings(max_examples=300)
@given(works(st.one_of(st.integers(0, 40), st.integers(0, 3000))))
@example(TEAMS)
def test_no_thread_block_has_much_more_to_do_than_others(work):
    load = loads(work, work.cut())
    assume(load.mean() > 60)
    # Every run is cut to whole blocks, and may open one segment more than its share.
    assert load.max() - 2 * 2.25 - 4.0 < 1.15 * load.mean()


def costs_of_runs(left: list[float], opening: list[float], base: list[float], cuts: list[float]) -> list[float]:
    """What each run costs: what it has, its parts of the stretches between cuts, and a segment for each of them."""
    runs, ends = list(base), [0.0, *cuts, sum(left) + sum(opening)]
    for run, (begin, end) in enumerate(itertools.pairwise(ends)):
        cost, first = 0.0, 0.0
        for whole, opens in zip(left, opening, strict=True):
            part = min(end, first + opens + whole) - max(begin, first + opens)
            cost += opens + part if part > 1e-9 else 0.0
            first += opens + whole
        runs[run] += cost
    return runs


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.floats(0.1, 200.0), st.sampled_from([3.5, 4.0])), min_size=1, max_size=12),
    st.lists(st.one_of(st.just(0.0), st.floats(0.0, 100.0)), min_size=1, max_size=20),
)
def test_runs_that_several_stretches_share_cost_little_more_than_the_mean(stretches, base):
    left, opening = map(list, zip(*stretches, strict=True))
    base = sorted(base, reverse=True)
    cuts, load = even_runs._even_cuts(left, opening, base)
    assert len(cuts) < len(base)
    assert cuts == sorted(cuts)
    runs = costs_of_runs(left, opening, base, cuts)
    assert sum(runs) >= sum(left) + sum(opening) + sum(base) - 1e-6
    # The mean with one more segment for every run, and a piece that is not worth one.
    mean = (sum(left) + sum(opening) + sum(base)) / len(base)
    most = max(mean, base[0], base[-1] + max(opening)) + 2 * max(opening)
    assert max(runs) <= most + 1e-6
    assert max(runs) <= load + 1e-6


@pytest.mark.parametrize(
    ("left", "num_runs", "most"),
    [
        ([100.0, 100.0], 4, 54.0),  # two cuts open two more segments
        ([50.0, 50.0, 50.0], 3, 54.0),  # cuts fall between stretches
        ([300.0, 1.0], 3, 105.6),  # both cuts fall into the first
        ([10.0], 8, 5.25),  # a segment costs 4
    ],
)
def test_where_the_least_load_is_known_runs_come_close_to_it(left, num_runs, most):
    opening = [4.0] * len(left)
    base = [0.0] * num_runs
    cuts, _ = even_runs._even_cuts(left, opening, base)
    runs = costs_of_runs(left, opening, base, cuts)
    assert max(runs) == pytest.approx(most, rel=0.01)


def costs_of_segments(work: Work, cut: Schedule) -> np.ndarray:
    return loads(work, cut._replace(cta_ptr=np.arange(len(cut.begin) + 1)))


@settings(max_examples=150)
@given(works(st.one_of(st.integers(0, 40), st.integers(0, 3000)), least_ctas=2))
def test_the_papers_slices_are_bounded_by_the_mean_load_and_assigned_greedily(work):
    cut, whole = work.cut("paper"), work.cut(1)
    assume(len(cut.begin))
    load, least = loads(work, cut), loads(work, whole).mean()
    assert load.max() <= (load.mean() + costs_of_segments(work, cut).max()) * 1.001
    # b_k <= ceil(C_est / cost_l), and cost_l is at least the mean load without any division.
    for stream, head, cost in zip(whole.stream, whole.head, costs_of_segments(work, whole), strict=True):
        slices = np.count_nonzero((cut.stream == stream) & (cut.head == head))
        assert 1 <= slices <= np.ceil(cost / least * 1.002)


def test_streams_that_nearly_fill_their_last_run_have_it_to_themselves():
    # Nearly 6 runs each if filled to the brim: what is left would share runs with others, and reload what those read.
    work = Work(wide=[936] * 2, narrow=[220] * 4, masked=0, num_kv_heads=8, num_ctas=128)
    cut = work.cut()
    assert (np.diff(cut.cta_ptr) == 1).all()
    assert set((cut.end - cut.begin)[work.is_wide[cut.stream]]) == {156}
    # A stream that fills a third of a run more shares it.
    shared = Work(wide=[1000] * 3, narrow=[], masked=0, num_kv_heads=1, num_ctas=10).cut()
    assert np.diff(shared.cta_ptr).max() == 3


@pytest.mark.parametrize(
    ("count", "blocks"), [(128, 172), (64, 172), (128, 175), (64, 112), (131, 346), (128, 115), (120, 25), (40, 64)]
)
def test_a_few_blocks_of_many_streams_alike_are_not_put_together_where_whole_streams_take_less(count, blocks):
    # A segment for every stream is what the last few of 132 runs would have.
    work = Work(wide=[], narrow=[blocks] * count, masked=0, num_kv_heads=1, num_ctas=132)
    whole = work._replace(num_ctas=132 // count * count)
    assert loads(work, work.cut()).max() <= loads(whole, whole.cut()).max() * 1.001


def test_a_stream_for_each_run_is_cut_only_if_that_saves_more_than_a_segment():
    # Two streams for each of 128 runs leave 4 runs idle: 3% of short streams is less than a segment, of long ones more.
    few, many = (Work([], [blocks] * 256, masked=0, num_kv_heads=1, num_ctas=132) for blocks in (40, 4000))
    assert np.diff(few.cut().cta_ptr).max() == 2
    assert loads(few, few.cut()).max() == pytest.approx(2 * (40 * 2 + 4), rel=0.1)
    assert loads(many, many.cut()).max() < 0.98 * loads(many, many._replace(num_ctas=128).cut()).max()


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
    for stream, head, blocks in zip(cut.stream.tolist(), cut.head.tolist(), cut.end - cut.begin, strict=True):
        count[stream, head] += 1
        assert abs(blocks - work.blocks[stream] / min(slices, work.blocks[stream])) < 1
    assert all(n == min(slices, work.blocks[stream]) for (stream, _), n in count.items())
    heap = [0.0] * work.num_ctas
    for cost in sorted(costs_of_segments(work, cut), reverse=True):
        heapq.heapreplace(heap, heap[0] + cost)
    np.testing.assert_allclose(np.sort(loads(work, cut)), np.sort(heap), rtol=2e-3)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ctas", "heads_of_group"),
    [(8, 128, 1), (1, 132, 1), (32, 128, 1), (28, 126, 2), (32, 16, 2), (8, 132, 2), (7, 132, 7)],
)
def test_all_groups_of_heads_are_cut_alike_and_read_the_same_at_the_same_time(num_kv_heads, num_ctas, heads_of_group):
    work = Work([500, 500], [300, 90, 8, 1], masked=1, num_kv_heads=num_kv_heads, num_ctas=num_ctas)
    cut, groups = work.cut(), num_kv_heads // heads_of_group
    runs = [
        list(zip(cut.stream[lo:hi], cut.head[lo:hi] % heads_of_group, cut.begin[lo:hi], cut.end[lo:hi], strict=True))
        for lo, hi in zip(cut.cta_ptr[:-1], cut.cta_ptr[1:], strict=True)
    ]
    groups_of_runs = [set(cut.head[lo:hi] // heads_of_group) for lo, hi in itertools.pairwise(cut.cta_ptr)]
    assert len(runs) == num_ctas
    together = 1 if groups % 2 else 2
    for number, run in enumerate(runs):
        pair, place = divmod(number, num_ctas // groups * together)
        nth = place % together
        assert run == runs[place - nth]
        assert not run or groups_of_runs[number] == {pair * together + nth}


@pytest.mark.parametrize(
    ("num_kv_heads", "in_step", "all_of_them"),
    [(8, 128, 132), (1, 132, 132), (32, 128, 132), (28, 126, 132), (4, 132, 132), (131, 131, 132), (1000, 125, 132)],
)
def test_few_thread_blocks_are_left_out_where_reading_decides(num_kv_heads, in_step, all_of_them):
    reads, computes = (Estimate(MODEL, 128, arithmetic=ratio) for ratio in (1.1, 1.3))
    for estimates, expected in (
        ([reads], in_step), ([computes], all_of_them), ([computes, reads], in_step), ([computes] * 2, all_of_them)
    ):  # fmt: skip
        assert even_runs.thread_blocks(132, num_kv_heads, estimates) == expected


def test_plans_that_must_not_change_have_all_thread_blocks_where_requests_have_many_rows():
    for rows, requests, expected in ((8, 64, 132), (8, 63, 128), (7, 1000, 128), (512, 1, 132)):
        for heads, tokens in ((Heads(8 * rows, 8, 128, 128), 1), (Heads(8, 8, 128, 128), rows)):
            assert even_runs.lasting_thread_blocks(H200, heads, requests, tokens) == expected
            assert even_runs.lasting_thread_blocks(H200, heads, requests, tokens, Window(128)) == 128
            always = H200._replace(in_step=False)
            assert even_runs.lasting_thread_blocks(always, heads, requests, tokens) == 132
            assert even_runs.lasting_thread_blocks(always, heads, requests, tokens, Window(128)) == 128


@given(st.integers(1, 300), st.integers(1, 200))
def test_a_tenth_of_the_thread_blocks_is_left_out_at_most_and_heads_are_cut_alike(most, num_kv_heads):
    count = even_runs.thread_blocks(most, num_kv_heads, [Estimate(MODEL, 128)])
    assert 0.9 * most <= count <= most
    groups = math.gcd(num_kv_heads, count)
    alone = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and most // n * n >= 0.9 * most]
    assert groups == max(alone)


@given(st.integers(100, 2000), st.integers(2, 6), works(st.integers(0, 50), least_ctas=66))
def test_large_streams_are_cut_alike_from_their_last_block_on(blocks, count, work):
    work = work._replace(wide=[], narrow=[blocks] * count + work.narrow, masked=0, num_kv_heads=1)
    cut = work.cut()
    lone = np.repeat(np.diff(cut.cta_ptr) == 1, np.diff(cut.cta_ptr))
    bounds = [np.unique(work.ptr[stream + 1] - cut.begin[lone & (cut.stream == stream)]) for stream in range(count)]
    fewest = min(map(len, bounds))
    # What is left of a stream may fill a run as well.
    assert all((each[: fewest - 1] == bounds[0][: fewest - 1]).all() and len(each) <= fewest + 1 for each in bounds)


def test_a_number_of_slices_may_be_one_of_numpy():
    work = Work([9], [4], 0, 1, 2)
    np.testing.assert_array_equal(work.cut(np.int64(3)).begin, work.cut(3).begin)


@pytest.mark.parametrize("policy", ["best", 0, -1, True, 1.5, None])
def test_another_policy_raises(policy):
    with pytest.raises(ValueError, match=r"policy: expected 'aligned', 'paper', 'invariant' or a positive number of s"):
        Work([3], [4], 0, 1, 2).cut(policy)


@pytest.mark.parametrize(
    ("narrow", "wide", "unique", "waiting"),
    [
        # All read their own: 100 blocks of 2 us, and each waits for all of it.
        ((100, 0), (0, 0), 100, 1000),
        # Some are the same ones for several tiles: 100 us of arithmetic, 80 or 180 of memory.
        ((100, 0), (0, 0), 40, 500),
        ((100, 0), (0, 0), 90, 800),
        # 50 narrow blocks, and 80 wide ones of 40 unique ones: 194 us of arithmetic, 180 of memory.
        ((50, 0), (80, 0), 90, 500),
        # 150 narrow: 294 us of arithmetic, 460 of memory; 150 us could be waited for, and 80 of 2.5 - 1.8.
        ((150, 0), (80, 0), 230, round(1000 * 166 / 206)),
        # With masks: 144 + 187.5 us of arithmetic, 112.5 + 56 to be waited for.
        ((0, 150), (80, 0), 225, round(1000 * 118.5 / 168.5)),
        ((0, 0), (80, 0), 40, 500),
        ((0, 0), (0, 0), 0, 1000),
    ],
)
def test_what_memory_takes_beyond_the_arithmetic_is_waited_for(narrow, wide, unique, waiting):
    estimate = Estimate.of(MODEL, 128, np.array([narrow, wide]), unique, 1.0)
    assert estimate.stall == pytest.approx(waiting / 1000, abs=5e-4)
    stall = estimate.stall
    block = [[1 + stall, 1.25 + 0.75 * stall], [1.8 + 0.7 * stall, 2.25 + 0.25 * stall]]
    np.testing.assert_allclose(estimate.block_us, block)


def test_a_wide_block_that_waits_for_arithmetic_does_not_wait_longer_beside_narrow_ones():
    # Heads of 64 numbers on an H200: memory brings a block in 0.93 us, and arithmetic of two tiles takes 1.16.
    rates = {"memory_us": ((0.93, 1.86), (1.23, 2.46)), "cached_us": ((0.68, 1.36), (1.16, 2.32))}
    model = replace(MODEL, tokens=(128, 256), segment_us=(3.5, 4.0), **rates)
    estimate = Estimate(model, 128, stall=0.5)
    np.testing.assert_allclose(estimate.block_us[:, 0], [0.805, 1.195])
    segments = estimate.segments(np.array([False, True]), np.array([2, 2]), np.array([0, 0]))
    np.testing.assert_allclose(segments, [3.5 + 1.61, 4.0 + 2.39])
    # Where memory takes longer, a wide block gets a quarter less of it.
    slower = replace(model, memory_us=((1.8, 3.6), (1.8, 3.6)))
    np.testing.assert_allclose(Estimate(slower, 128).block_us[:, 0], [1.8, 2.25])


def test_a_wide_stream_that_keeps_few_thread_blocks_busy_shares_its_last_one():
    cut = Work(wide=[75], narrow=[825], masked=0, num_kv_heads=1, num_ctas=16).cut()
    runs = [set(cut.stream[lo:hi].tolist()) for lo, hi in zip(cut.cta_ptr[:-1], cut.cta_ptr[1:], strict=True)]
    assert {0, 1} in runs


def test_without_blocks_no_thread_block_has_a_segment():
    works = Work([], [], 0, 2, 3), Work([0, 0], [0], 1, 2, 3)
    for cut in (work.cut(policy) for work in works for policy in POLICIES):
        assert cut.cta_ptr.tolist() == [0] * 4
        assert not cut.begin.size
