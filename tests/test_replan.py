"""Plans that are extended where only leaves grew: exact, balanced, deterministic, and made anew where more changed."""

from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import Case, assert_computes_everything_once, cases, pages_of, room, used_segments, visible

from codec_jax import Forest, OutOfPagesError, PagePool, make_plan
from codec_jax import replan as replanning
from codec_jax.replan import replan
from codec_jax.schedule import loads


def grown(forest, pool, counts, steps):
    """Append to the requests, then make room for more."""
    return forest.extend(counts).reserve(pool, steps)


def test_an_extended_plan_computes_everything_once_for_its_steps():
    kinds = Counter()

    @settings(max_examples=250)
    @given(cases(), st.data())
    def check(case, data):
        with pytest.MonkeyPatch.context() as monkeypatch:
            # However unbalanced it is.
            monkeypatch.setattr(replanning, "_MOST_IMBALANCE", data.draw(st.sampled_from([1.08, 1e9, 1e9])))
            steps = case.options["steps"]
            forest, pool = case.forest, case.pool
            plan = case.plan()
            for _ in range(data.draw(st.integers(1, 3))):
                counts = [data.draw(st.integers(0, int(n))) for n in room(forest, steps)]
                try:
                    after, pool = grown(forest, pool, counts, steps)
                except OutOfPagesError:
                    break
                extended = replanning._extended(plan, forest, after, steps)
                kinds["extended" if extended is not None else "made anew"] += 1
                if extended is not None:
                    kinds["with new blocks"] += extended.segments[:, 5].max() > plan.segments[:, 5].max()
                plan, forest = replan(plan, forest, after, steps=steps), after
                now = case._replace(forest=forest, pool=pool)
                plan.check(forest)
                assert_computes_everything_once(plan, now, forest)
                full = forest.extend(room(forest, steps))
                plan.check(full)
                assert_computes_everything_once(plan, now, full)

    check()
    assert min(kinds.values()) > 2, kinds
    assert len(kinds) == 3


@pytest.mark.parametrize("seed", range(12))
def test_streams_move_up_where_earlier_ones_open_blocks(seed, monkeypatch):
    monkeypatch.setattr(replanning, "_MOST_IMBALANCE", 1e9)
    draw = np.random.default_rng(seed)
    requests = int(draw.integers(9, 30))
    length = [int(draw.integers(1, 80)), *draw.integers(0, 60, requests).tolist()]
    forest = Forest.from_nodes([-1] + [0] * requests, length, list(range(1, requests + 1)), page_size=8)
    pool = PagePool.create(600, forest.used_pages)
    options = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "steps": 12, "num_ctas": int(draw.integers(1, 9))}
    options |= {"tile_rows": 8, "block_tokens": 16, "lanes": int(draw.integers(1, 3)), "block_capacity": 400}
    case = Case(forest.reserve(pool, 12)[0], forest.reserve(pool, 12)[1], options, 60)
    plan, moved = case.plan(policy=["aligned", "paper", 3][seed % 3]), 0
    for _ in range(4):
        counts = draw.integers(0, 13, requests)
        forest, pool = grown(case.forest, case.pool, counts, 12)
        following = replan(plan, case.forest, forest, steps=12)
        np.testing.assert_array_equal(following.merge_ptr, plan.merge_ptr)
        moved += np.count_nonzero(following.segments[:, 3] != plan.segments[:, 3])
        plan, case = following, case._replace(forest=forest, pool=pool)
        assert_computes_everything_once(plan, case, forest)
        assert_computes_everything_once(plan, case, forest.extend(room(forest, 12)))
        # A block that needs no mask is seen in full by all used rows.
        seen, used = visible(plan, case, forest), np.arange(plan.num_tiles * 8) < plan.used_rows[0]
        for segment in used_segments(plan):
            rows = segment.rows(plan)
            tokens = [p.number * 8 + i for p in pages_of(plan, segment.lo, segment.masked) for i in range(8)]
            assert len(tokens) == 16 * (segment.masked - segment.lo)
            assert seen[rows[used[rows]]][:, tokens].all()
    assert moved > 0


HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SIZES = {"num_ctas": 132, "tile_rows": 64, "block_tokens": 128, "lanes": 2, "steps": 16}


def interval(requests=16, own=200, root=20_000):
    forest = Forest.from_nodes(
        [-1] + [0] * requests, [root] + [own] * requests, list(range(1, requests + 1)), request_capacity=requests + 1
    )
    forest, pool = forest.reserve(PagePool.create(8000, forest.used_pages), 16)
    return forest, *grown(forest, pool, 16, 16)


def same(left, right):
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def test_an_extended_plan_keeps_its_shapes_and_depends_on_its_arguments_alone():
    before, after, _ = interval(requests=64, root=60_000)
    plan = make_plan(before, **HEADS, **SIZES)
    copies = [np.copy(leaf) for leaf in jax.tree.leaves((plan, before, after))]
    first = replan(plan, before, after, steps=16)
    assert same(first, replan(plan, before, after, steps=16))
    assert jax.tree.structure(first) == jax.tree.structure(plan)
    assert [leaf.shape for leaf in jax.tree.leaves(first)] == [leaf.shape for leaf in jax.tree.leaves(plan)]
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(first))
    # It was extended: cuts and merge lists are those of the plan.
    np.testing.assert_array_equal(first.merge_ptr, plan.merge_ptr)
    assert not same(first, make_plan(after, **HEADS, **SIZES))
    for copy, leaf in zip(copies, jax.tree.leaves((plan, before, after)), strict=True):
        np.testing.assert_array_equal(copy, leaf)


def test_plans_are_made_anew_before_they_are_out_of_balance():
    forest, _, pool = interval(requests=64, root=60_000)
    plan = make_plan(forest, **HEADS, **SIZES)
    anew, counts = 0, np.where(np.arange(65) < 16, 16, 0)  # the leaves of one tile grow
    for _ in range(24):
        after, pool = grown(forest, pool, counts, 16)
        following = replan(plan, forest, after, steps=16)
        anew += same(following, make_plan(after, **HEADS, **SIZES, block_capacity=len(plan.pages)))
        forest, plan = after, following
        load = loads(plan)
        assert load.max() < 1.1 * load.mean()
    assert 1 <= anew <= 16


@pytest.mark.parametrize(
    "change",
    [
        lambda forest, pool: forest.fork([0])[0].reserve(pool, 16)[0],
        lambda forest, pool: forest.retire(pool, [3])[0],
        lambda forest, pool: forest.rebuild(entries=forest.used_pages[::-1]),
        lambda forest, pool: forest.rebuild(length=np.where(np.arange(len(forest.length)) == 0, 19_999, forest.length)),
        lambda forest, pool: Forest.from_nodes([-1], [40], [0]),
    ],
    ids=["forked", "retired", "other pages", "a shorter root", "another forest"],
)
def test_where_more_than_leaves_changed_the_plan_is_made_anew(change):
    before, after, pool = interval()
    plan = make_plan(before, **HEADS, **SIZES)
    other = change(after, pool)
    assert same(
        replan(plan, before, other, steps=16), make_plan(other, **HEADS, **SIZES, block_capacity=len(plan.pages))
    )


def test_a_plan_of_another_forest_is_not_extended():
    before, after, _ = interval()
    stranger = make_plan(Forest.from_nodes([-1, 0], [300, 20], [1]), **HEADS, **SIZES)
    anew = make_plan(after, **HEADS, **SIZES, block_capacity=len(stranger.pages))
    assert same(replan(stranger, before, after, steps=16), anew)


def test_a_forest_on_a_device_is_refused():
    before, after, _ = interval()
    plan = make_plan(before, **HEADS, **SIZES)
    with pytest.raises(TypeError, match=r"forest: expected NumPy arrays"):
        replan(plan, before, jax.device_put(after))
    with pytest.raises(ValueError, match=r"steps: expected a positive number, got 0"):
        replan(plan, before, after, steps=0)
