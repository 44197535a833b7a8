"""Windows, capped scores and sinks, and all of them together, against float64 attention and other definitions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import PAGES, SOME_TREES, Layout, assert_close, forest_of
from forests import Tree, candidate_parents, renumbered, seeds, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import Arrays, Heads, attend, check

from codec_jax import Forest, PagePool, Plan, Window, make_plan
from codec_jax.attention import forest_attention
from codec_jax.forest.homes import Homes
from codec_jax.partial import Partial, add_sinks, pac, por

SINKS = np.asarray([0.5, -2.0, 3.0, 0.0], np.float32)
HEADS = Heads(4, 2, 64)


class Case(NamedTuple):
    """What a step is compiled for."""

    window: Window | int | None = None
    softcap: float | None = None
    sinks: Any = None
    query_tokens: int = 1
    lanes: int = 1
    page_size: int = 16

    def plan(self, forest: Forest, steps: int = 1) -> Plan:
        rows = forest.request_capacity * self.query_tokens * HEADS.q // HEADS.kv
        sizes = {"num_ctas": 5, "tile_rows": 8, "block_tokens": 32, "lanes": self.lanes, "min_wide_tokens": 24}
        return make_plan(
            forest,
            num_q_heads=HEADS.q,
            num_kv_heads=HEADS.kv,
            head_dim=HEADS.dim,
            query_tokens=self.query_tokens,
            steps=steps,
            window=self.window,
            block_capacity=-(-rows // 8) * PAGES,
            **sizes,
        )

    def check(self, forest: Forest, plan: Plan, seed: int, parent: Any = None) -> None:
        arrays = Arrays.random(forest, HEADS, jnp.float32, seed, self.query_tokens, PAGES)
        check(arrays, forest, plan, implementation="xla", softcap=self.softcap, sinks=self.sinks, parent=parent)


CASES = {
    "a window": Case(24),
    "a window of one token": Case(1, lanes=2),
    "a chunked window and sinks": Case(Window(20, chunked=True), sinks=SINKS, page_size=8),
    "a cap": Case(softcap=0.7, lanes=2),
    "sinks in half precision": Case(sinks=SINKS.astype(jnp.bfloat16), query_tokens=3),
    "a window, a cap and sinks, several tokens": Case(30, 1.5, SINKS, query_tokens=3, lanes=2),
    "a chunked window, a cap, several tokens": Case(Window(9, chunked=True), 2.0, query_tokens=5, page_size=8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_is_that_of_each_request_alone(case: Case) -> None:
    """Any forest, on scattered pages, with free request slots, and with requests shorter than the query."""

    @settings(max_examples=12)
    @given(SOME_TREES, seeds)
    def check_one(tree: Tree, seed: int) -> None:
        forest = forest_of(tree, case.page_size, np.random.default_rng(seed).permutation(PAGES))
        if forest.request_length.any():
            case.check(forest, case.plan(forest), seed)

    check_one()


@pytest.mark.parametrize(
    "case",
    [Case(14, lanes=2, page_size=8), Case(Window(11, chunked=True), 2.0, SINKS), Case(6, query_tokens=3, page_size=8)],
    ids=["sliding", "chunked", "several tokens"],
)
def test_one_plan_serves_leaves_that_grow_under_their_window(case: Case) -> None:
    @settings(max_examples=6)
    @given(trees(max_nodes=6, max_length=40, max_requests=6), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        rng = np.random.default_rng(seed)
        forest = forest_of(tree, case.page_size)
        forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), 12)
        plan = case.plan(forest, steps=12)
        own = (forest.leaf >= 0) & (forest.readers[forest.leaf] == 1)
        for _ in range(4):
            if forest.request_length.any():
                case.check(forest, plan, seed)
            forest = forest.extend(np.where(own, rng.integers(0, 5, len(own)), 0))

    check_one()


@pytest.mark.parametrize("window", [3, 30, Window(4, chunked=True)], ids=str)
def test_candidates_see_their_ancestors_as_far_back_as_their_depth_says(window: Window | int) -> None:
    """Positions of candidates are those of their depths, not those of their slots, also for the context."""
    tokens, case = 7, Case(window, query_tokens=7, page_size=8, lanes=2)
    parents = st.lists(candidate_parents(tokens).map(renumbered), min_size=6, max_size=6)

    @settings(max_examples=12)
    @given(trees(max_nodes=6, max_length=40, max_requests=6), parents, seeds)
    def check_one(tree: Tree, parent: list[list[int]], seed: int) -> None:
        forest = Forest.from_nodes(*tree, page_size=8, request_capacity=6)
        forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), tokens)
        forest = Forest.build(forest.tree, page_capacity=PAGES, node_capacity=64).extend(tokens)
        case.check(forest, case.plan(forest), seed, parent)

    check_one()


def test_a_window_is_the_local_window_of_jax_nn() -> None:
    tokens, window = 45, 7
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 48, heads, 64)).astype(np.float32) for heads in (4, 2, 2))
    forest = Forest.from_nodes([-1], [tokens], [0])
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=64, query_tokens=tokens, window=window)
    pages = (x.reshape(3, 16, 2, 64) for x in (key, value))
    out = attend(query[:, :tokens], *pages, forest, plan)
    whole = (x[:, :tokens] for x in (query, key, value))
    want = jax.nn.dot_product_attention(*whole, is_causal=True, local_window_size=(window - 1, 0))
    assert_close(out, np.asarray(want, np.float64))


@pytest.mark.parametrize("chunked", [False, True], ids=["sliding", "chunked"])
def test_a_window_is_that_of_hugging_face(chunked: bool) -> None:
    torch, masking = pytest.importorskip("torch"), pytest.importorskip("transformers.masking_utils")
    query, token = np.meshgrid(np.arange(50), np.arange(50), indexing="ij")
    sees = token >= Window(8, chunked=chunked).first_position(query)
    overlay = masking.chunked_overlay(8, torch.zeros(1)) if chunked else masking.sliding_window_overlay(8)
    theirs = overlay(0, 0, torch.as_tensor(query), torch.as_tensor(token)).numpy()
    np.testing.assert_array_equal(sees & (token <= query), theirs & (token <= query))


# --- Sinks ------------------------------------------------------------------------------------------------------


def test_partials_that_are_merged_later_leave_the_sink_as_it_is() -> None:
    layout, tree = Layout(), Tree([-1, 0, 0], [40, 20, 9], [1, 2])
    forest, rng = forest_of(tree), np.random.default_rng(0)
    query, key, value = layout.arrays(rng)
    more = [rng.normal(size=(5, 64)).astype(np.float32) for _ in range(2)]
    further = pac(query, *more, np.ones((1, 5), bool), 0.125)
    plan = layout.plan(forest)
    with_sinks = attend(query, key, value, forest, plan, sinks=SINKS, return_residuals=True)
    without = attend(query, key, value, forest, plan, return_residuals=True)
    late = por(Partial(with_sinks[0], *with_sinks[1]), further)
    merged = por(Partial(without[0], *without[1]), further)
    out, (row_max, row_sum) = add_sinks(merged.out, (merged.max, merged.sum), jnp.asarray(SINKS))
    for got, want in ((late.out, out), (late.max, row_max), (late.sum, row_sum)):
        assert_close(got, np.asarray(want, np.float64))


def test_a_sink_of_minus_infinity_is_none_and_nan_stays() -> None:
    out, row_max, row_sum = np.ones((1, 1, 3, 8)), np.asarray([[[2.0, -np.inf, np.nan]]]), np.asarray([[[1.5, 0, 1]]])
    out *= np.asarray([1.0, 0.0, np.nan])[:, None]
    out, row_max, row_sum = (x.astype(np.float32) for x in (out, row_max, row_sum))
    got = add_sinks(jnp.asarray(out), (jnp.asarray(row_max), jnp.asarray(row_sum)), jnp.full(3, -jnp.inf))
    np.testing.assert_array_equal(got[0], out)
    np.testing.assert_array_equal(got[1][0], row_max)
    np.testing.assert_array_equal(got[1][1][..., :2], row_sum[..., :2])


def test_a_plan_that_does_not_hold_gives_nan_with_everything() -> None:
    case = Case(8, 2.0, SINKS)
    forest = forest_of(Tree([-1, 0], [16, 9], [1]))
    longer = forest_of(Tree([-1, 0], [16, 12], [1]))
    arrays = Arrays.random(longer, HEADS, jnp.float32, 0, 1, PAGES)
    options = {"softcap": 2.0, "sinks": SINKS, "return_residuals": True, "implementation": "xla"}
    for x in jax.tree.leaves(attend(*arrays, *jax.device_put((longer, case.plan(forest))), **options)):
        assert np.isnan(x).all()


# --- Arguments --------------------------------------------------------------------------------------------------

FOREST = Forest.from_nodes([-1], [20], [0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"softcap": 0.0}, r"softcap: expected a positive number or None, got 0\.0"),
        ({"softcap": np.inf}, "softcap: expected a finite number, got inf"),
        ({"sinks": np.zeros(2, np.float32)}, r"sinks: expected shape \[N = 4\], got \(2,\)"),
        ({"sinks": np.zeros(4, np.int32)}, "sinks: expected float32, bfloat16 or float16, got int32"),
    ],
    ids=str,
)
def test_caps_and_sinks_that_do_not_fit_are_refused(options: dict, problem: str) -> None:
    plan = make_plan(FOREST, num_q_heads=4, num_kv_heads=2, head_dim=64)
    arrays = Arrays.random(FOREST, HEADS, jnp.float32, 0, num_pages=2)
    with pytest.raises(ValueError, match=problem):
        forest_attention(*arrays, FOREST, plan, **options)


@pytest.mark.parametrize("window", [0, -3, 2**30, 1.5, True, "all"], ids=str)
def test_windows_that_are_none_are_refused(window: Any) -> None:
    with pytest.raises(ValueError, match=r"window: expected a positive number of tokens, below 2\*\*30, got "):
        make_plan(FOREST, num_q_heads=4, num_kv_heads=2, head_dim=64, window=window)


def test_sinks_are_refused_where_partials_of_other_devices_are_still_to_come() -> None:
    forest, pool = Forest.from_nodes([-1], [20], [0]).spread(8, devices=2)
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=64, homes=Homes(2, pool.homes.pages)).local()
    arrays = Arrays.random(FOREST, HEADS, jnp.float32, 0, num_pages=pool.homes.pages)
    with pytest.raises(ValueError, match=r"sinks: expected None, for the plan is of .* codec_jax\.partial\.add_sinks"):
        forest_attention(*arrays, forest, plan, sinks=SINKS, return_residuals=True)


def test_a_window_is_named_by_the_plan_and_its_own_compilation() -> None:
    with_window = make_plan(FOREST, num_q_heads=4, num_kv_heads=2, head_dim=64, window=1024)
    assert "Window(tokens=1024, chunked=False)" in repr(with_window)
    without = make_plan(FOREST, num_q_heads=4, num_kv_heads=2, head_dim=64)
    assert jax.tree.structure(with_window) != jax.tree.structure(without)
