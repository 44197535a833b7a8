"""The Hopper kernels step by step on a CPU: results, races, and barriers that nobody waits for.

Copies, rings, barriers, masks and segments are those of the GPU; `simulator` says what is not.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, renumbered
from kernel_calls import H200, SIX, TREE, Arrays, Exact, Heads, attend, check, plan_of, token_scales
from plan_cases import num_wide

from codec_jax import Forest, PagePool, Window
from codec_jax.planning import invariant, planner
from pallas_kernels import HOPPER

if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(
        "before JAX 0.11 the interpreter knows neither layouts nor copies past an array's end", allow_module_level=True
    )
from interpreted import PARAMS, RACE, said_of, serving
from simulator import simulate

from pallas_kernels import por_grain, softmax
from pallas_kernels.hopper import pac, pac_compute


@pytest.fixture(autouse=True)
def _interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernels serve on this machine."""
    simulate(monkeypatch, PARAMS)
    with serving(monkeypatch, HOPPER):
        yield


class Case(NamedTuple):
    """A tree, its capacities, and the arguments of `make_plan`."""

    tree: Tree
    heads: Heads
    query_tokens: int = 1
    page_size: int = 16
    num_ctas: int = 2
    block_tokens: int = 128
    requests: int | None = None
    dtype: Any = jnp.bfloat16
    wide: bool = False
    grain: int = 1  # of POR, by the number of streams
    window: Window | int | None = None
    softcap: float | None = None
    sinks: Any = None


CASES = {
    "one segment after another, sinks": Case(
        TREE, Heads(2, 2, 64), requests=9, sinks=np.asarray([3, -1], jnp.bfloat16)
    ),
    "more blocks than a ring holds": Case(Tree([-1, 0, 0], [700, 9, 130], [2, 1]), Heads(1, 1, 128), num_ctas=1),
    "short blocks, parts of pages": Case(SIX, Heads(4, 1, 128), page_size=256, num_ctas=1, block_tokens=64),
    "two accumulators a row": Case(SIX, Heads(2, 1, 256), block_tokens=64, dtype=jnp.float16),
    "values of another size": Case(SIX, Heads(4, 2, 192, 128), block_tokens=64, num_ctas=1),
    "values of another size, wide, causal": Case(
        Tree([-1, 0, 0, 1, -1], [150, 40, 0, 3, 2], [3, 2, 1, 3, 4, 0]), Heads(8, 1, 192, 128),
        query_tokens=5, block_tokens=64, wide=True,
    ),
    # The last of their 128 columns in shared memory are copied from past the end of the arrays.
    "heads of 96, row by row": Case(SIX, Heads(2, 2, 96), block_tokens=64, page_size=8),
    "heads of 112, wide, causal": Case(
        Tree([-1, 0, 0, 1, -1], [150, 40, 0, 3, 2], [3, 2, 1, 3, 4, 0]), Heads(8, 1, 112), query_tokens=5, wide=True
    ),
    "more thread blocks than work": Case(Tree([-1], [5], [0]), Heads(4, 2, 64), num_ctas=5),
    # In the wide segment too there are blocks that some rows see in full and the others not at all.
    "a wide segment and narrow ones": Case(
        Tree([-1, 0, 0, *[1] * 6, 0, 0], [150, 240, *range(9)], list(range(10, 1, -1))), Heads(16, 1, 64), wide=True
    ),
    "wide, causal, rows in any order": Case(
        Tree([-1, 0, 0, 1, -1], [150, 40, 0, 3, 2], [3, 2, 1, 3, 4, 0]), Heads(8, 1, 64), query_tokens=5, wide=True
    ),
    "causal and narrow": Case(TREE, Heads(2, 1, 64), query_tokens=3, page_size=24),
    # The first block is seen in full by all rows of the last tile that are a request's; the others are of free slots.
    "causal, free request slots": Case(
        Tree([-1, 0, 0, 0], [150, 3, 20, 0], [3, 1, 2]), Heads(8, 1, 64), query_tokens=3, requests=4, wide=True, grain=4
    ),
    "seven q heads, row by row": Case(SIX, Heads(7, 1, 64), page_size=8, grain=4),
    # Tokens 0 and 32 of its masked block have the same readers, and others behind them have none.
    "a chain of nodes that end within pages": Case(
        Tree([-1, 0, 1, 2, 0], [64, 5, 21, 20, 9], [3, 4]), Heads(2, 1, 128), num_ctas=1, block_tokens=64
    ),
    "a stream for many thread blocks": Case(SIX, Heads(4, 1, 128), num_ctas=4, grain=0),
    "some streams": Case(SIX, Heads(4, 2, 128), num_ctas=4, grain=2),
    "more streams": Case(TREE, Heads(3, 1, 64), num_ctas=3, grain=3),
    "many streams, sinks of 16 bits": Case(
        TREE, Heads(8, 2, 64), num_ctas=3, grain=4, sinks=np.linspace(-2, 4, 8).astype(jnp.bfloat16)
    ),
    "a group in parts, sinks": Case(
        Tree([-1, 0], [30, 3], [1]), Heads(71, 1, 64), num_ctas=1, wide=True,
        sinks=np.linspace(-2, 4, 71, dtype=np.float32),
    ),
    # Blocks that all rows see in full lie between blocks that the window and those that the end of a node cuts.
    "a window": Case(Tree([-1, 0, 0], [700, 9, 30], [2, 1]), Heads(2, 1, 64), num_ctas=3, window=500),
    "a chunked window, wide, a cap and sinks": Case(
        Tree([-1, *[0] * 6], [300, *range(6, 0, -1)], list(range(1, 7))), Heads(16, 1, 64),
        wide=True, window=Window(130, chunked=True), softcap=3.0, sinks=np.linspace(-2, 2, 16, dtype=np.float32),
    ),
    "a window, causal, rows in any order, a cap": Case(
        Tree([-1, 0, 0, 1, -1], [150, 40, 0, 3, 2], [3, 2, 1, 3, 4, 0]), Heads(8, 1, 64),
        query_tokens=5, wide=True, window=37, softcap=0.5,
    ),
    "a window, causal, a group in parts": Case(
        Tree([-1, 0], [30, 3], [1]), Heads(71, 1, 64), query_tokens=3, num_ctas=1, wide=True, window=20
    ),
    "a chunked window, more query tokens than a request has, a free slot": Case(
        Tree([-1, 0, -1], [40, 3, 2], [1, 2]), Heads(7, 1, 64),
        query_tokens=5, requests=3, window=Window(3, chunked=True),
    ),
    "a cap": Case(SIX, Heads(2, 1, 128), block_tokens=64, softcap=30.0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_interpreted_kernels_equal_dense_attention_without_races(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(por_grain, "_GRAINS", {math.inf: list(por_grain._GRAINS.values())[case.grain]})
    forest = Forest.from_nodes(*case.tree, page_size=case.page_size, request_capacity=case.requests)
    plan = plan_of(
        forest,
        case.heads,
        query_tokens=case.query_tokens,
        num_ctas=case.num_ctas,
        block_tokens=case.block_tokens,
        block_capacity=0,
        window=case.window,
    )
    assert (num_wide(plan) > 0) == case.wide
    num_pages = len(forest.used_pages) + 1
    arrays = Arrays.random(forest, case.heads, case.dtype, 0, case.query_tokens, num_pages)
    check(arrays, forest, plan, softcap=case.softcap, sinks=case.sinks)
    assert RACE not in capsys.readouterr().out


ONE_BYTE = {
    "narrow, a block of each lane": (Case(SIX, Heads(4, 2, 128), num_ctas=1), jnp.float8_e4m3fn),
    "wide, rows of 64 bytes": (
        Case(
            Tree([-1, 0, 0, 1, -1], [150, 40, 0, 3, 2], [3, 2, 1, 3, 4, 0]), Heads(8, 1, 64), query_tokens=5, wide=True
        ),
        jnp.float8_e5m2,
    ),
    "two accumulators a row": (Case(SIX, Heads(2, 1, 256), block_tokens=64), jnp.float8_e4m3fn),
    "parts of pages": (Case(SIX, Heads(2, 2, 64), page_size=256), jnp.float8_e4m3fn),
}


@pytest.mark.parametrize(("case", "kv_dtype"), ONE_BYTE.values(), ids=ONE_BYTE.keys())
def test_pages_of_one_byte_are_attended_as_what_they_mean(
    case: Case, kv_dtype: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    forest, heads = Forest.from_nodes(*case.tree, page_size=case.page_size), case.heads
    plan = plan_of(
        forest, heads, query_tokens=case.query_tokens, num_ctas=case.num_ctas, block_tokens=case.block_tokens,
        block_capacity=0,
    )  # fmt: skip
    assert (num_wide(plan) > 0) == case.wide
    num_pages = len(forest.used_pages) + 1
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, case.query_tokens, num_pages, kv_dtype).with_small_rows()
    scales = jnp.linspace(0.3, 2.0, heads.kv), jnp.linspace(1.7, 0.01, heads.kv)
    check(arrays, forest, plan, scales=scales)
    check(arrays, forest, plan, scales=token_scales(arrays))
    assert RACE not in capsys.readouterr().out


def test_rows_have_no_reference_of_keys_that_they_do_not_see(capsys: pytest.CaptureFixture[str]) -> None:
    """The first block of either lane is another request's, and the second one's query is made for its keys."""
    heads, forest = Heads(2, 1, 128), Forest.from_nodes([-1, -1], [256, 300], [0, 1])
    plan = plan_of(forest, heads, num_ctas=1, block_capacity=0)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=40, kv_dtype=jnp.float8_e4m3fn)
    page, place = np.divmod(forest.context_slots(0), forest.page_size)
    away = 4.0 * arrays.query[1, 0, 0].astype(jnp.float32)  # scores of 45: weights of its own keys would be 0
    arrays = arrays._replace(key_pages=arrays.key_pages.at[page, place, 0].set(away.astype(jnp.float8_e4m3fn)))
    check(arrays, forest, plan)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kv_dtype", "most", "requests", "softcap"),
    [(jnp.bfloat16, 600.0, 10, None), (jnp.bfloat16, 30.0, 10, 20.0), (jnp.float8_e4m3fn, 16.0, 10, None),
     (jnp.float8_e4m3fn, 16.0, 2, None), (jnp.float8_e4m3fn, 16.0, 10, 12.0)],
)  # fmt: skip
def test_scores_may_rise_and_fall_along_a_context(
    kv_dtype: Any, most: float, requests: int, softcap: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """By more than float32 has exponents for where there are 16 bits. Of ten requests the root is wide."""
    heads, leaves = Heads(12, 1, 64), list(range(1, requests + 1))
    forest = Forest.from_nodes([-1] + [0] * requests, [800, *range(3, 3 + requests)], leaves, request_capacity=12)
    plan = plan_of(forest, heads, num_ctas=1, block_capacity=0)
    assert (num_wide(plan) > 0) == (requests > 2)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=70, kv_dtype=kv_dtype).with_slopes(forest, most)
    check(arrays, forest, plan, softcap=softcap)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize(("query_tokens", "window"), [(1, None), (2, None), (1, 60)])
def test_one_plan_serves_leaves_that_grow_without_races(
    query_tokens: int, window: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, forest = Heads(2, 1, 64), Forest.from_nodes([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest, _ = forest.reserve(PagePool.create(32, forest.used_pages), 20)
    sizes = {"query_tokens": query_tokens, "num_ctas": 2, "block_capacity": 0, "window": window}
    plan = plan_of(forest, heads, steps=20, **sizes)
    for step in range(2):
        check(Arrays.random(forest, heads, jnp.bfloat16, step, query_tokens, num_pages=32), forest, plan)
        forest = forest.extend(np.asarray([17, 2, 9])) if step == 0 else forest
    assert RACE not in capsys.readouterr().out


def test_a_nan_in_k_stays_with_its_reader_where_its_neighbours_are_masked_by_row() -> None:
    heads, forest = Heads(2, 1, 128), Forest.from_nodes([-1, 0, 0], [16, 150, 9], [1, 2])
    plan = plan_of(forest, heads, num_ctas=1, block_tokens=64, block_capacity=0)
    query, keys, values = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=16)
    page, place = divmod(int(forest.context_slots(0)[100]), forest.page_size)  # in a block of this request alone
    arrays = Arrays(query, keys.at[page, place].set(jnp.nan), values)
    check(arrays, forest, plan, requests=[1])


@pytest.mark.parametrize(("scale", "softcap"), [(1e-9, None), (0.0, 20.0), (0.0, 1e-9), (0.125, 1e-9)])
def test_the_smallest_scores_are_masked_as_others(scale: float, softcap: float | None) -> None:
    forest, heads = Forest.from_nodes([-1, 0, 0], [200, 150, 9], [1, 2]), Heads(2, 1, 128)
    plan = plan_of(forest, heads, num_ctas=1, block_tokens=64, block_capacity=0)
    check(Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=30), forest, plan, scale=scale, softcap=softcap)


def test_a_nan_in_k_stays_with_its_reader_where_scores_are_capped_together() -> None:
    heads, forest = Heads(2, 1, 128), Forest.from_nodes([-1, 0, 0, 0, 0], [16, 9, 12, 14, 5], [1, 2, 3, 4])
    plan = plan_of(forest, heads, num_ctas=1, block_tokens=64, block_capacity=0)
    query, keys, values = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=16)
    page, place = divmod(int(forest.context_slots(1)[19]), forest.page_size)  # a block has pages of several leaves
    arrays = Arrays(query, keys.at[page, place].set(jnp.nan), values)
    check(arrays, forest, plan, requests=[0, 2, 3], softcap=20.0)


def test_tanh_is_exact_but_for_a_millionth_and_keeps_what_is_not_finite() -> None:
    x = np.concatenate([np.linspace(-30, 30, 4001), 10.0 ** np.arange(-30, 38), [np.inf, -np.inf]]).astype(np.float32)
    np.testing.assert_allclose(softmax.tanh(jnp.asarray(x)), np.tanh(x.astype(np.float64)), rtol=0, atol=1e-6)
    assert np.isnan(softmax.tanh(jnp.float32(np.nan)))


@pytest.mark.parametrize("polynomial", [softmax.FEW_TERMS, softmax.MORE_TERMS], ids=["few terms", "more terms"])
@pytest.mark.parametrize("factor", [1.77e-3, 1.0, 3e-7, 3e6])
def test_tanh_by_a_polynomial_is_exact_but_for_3_millionths(factor: float, polynomial: softmax.TanhTerms) -> None:
    x = np.concatenate([np.linspace(-polynomial.bound, polynomial.bound, 4001), [1e-20, -1e-30]])
    products = (x / factor).astype(np.float32)
    got = products * softmax.tanh_over(jnp.asarray(products), factor, polynomial, 72.0)
    np.testing.assert_allclose(got, 72.0 * np.tanh(products.astype(np.float64) * factor), rtol=0, atol=72.0 * 3.2e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_request_has_the_same_bits_in_any_company_under_policy_invariant(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In parts of two blocks, one for each lane; the rows' places in the tile differ, and so do the streams."""
    monkeypatch.setattr(invariant, "_SHORTEST", 7)
    monkeypatch.setattr(planner, "default_tiling", lambda heads: HOPPER.tiling(heads, H200))
    heads, forest = Heads(1, 1, 128), Forest.from_nodes([-1, 0, 0, 1, 1], [128, 64, 9, 70, 7], [2, 4, 3], page_size=64)
    arrays, outs = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=9), []
    for view in (forest, forest.only([2])):
        plan = plan_of(view, heads, policy="invariant", num_ctas=1, block_tokens=64, block_capacity=8)
        options = {"softcap": softcap, "implementation": "mosaic", "return_residuals": True}
        out, residuals = attend(*arrays, view, plan, **options)
        outs.append([np.asarray(x, np.float32) for x in (out, *residuals)])
    for request in range(3):
        exact = Exact.of(arrays, forest, request, softcap=softcap)
        assert (np.abs(outs[0][0][request] - exact.out) <= exact.error).all()
    for together, alone in zip(*outs, strict=True):
        np.testing.assert_array_equal(alone[2], together[2])
    assert RACE not in capsys.readouterr().out


class Drafts(NamedTuple):
    """Leaves that end in candidates, their trees, and the sizes that matter."""

    lengths: list[int]
    parent: list[list[int]]
    heads: Heads
    page_size: int = 16
    block_tokens: int = 128
    dtype: Any = jnp.bfloat16
    wide: bool = False
    root: int = 70
    window: int | None = None


# Depth first: a chain and a star, two roots, trees of two levels; the last requests have candidates of no tree.
FIVE = [[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, -1, 2, 2], [-1, 0, 1, 1, 0], [-1] * 5, [-1, 0, 1, -1, -1]]
DRAFTS = {
    "narrow, pages of several requests in a block": Drafts([3, 12, 0, 30, 16, 1], FIVE, Heads(4, 2, 64)),
    "wide": Drafts([3, 12, 0, 30, 16, 1], FIVE, Heads(16, 1, 64), wide=True),
    "a request over several tiles": Drafts(
        # The root and a page that ends with a request's first candidate would fill two blocks, were that page unmasked.
        [7, 5], [renumbered([-1, -1, 1, 1, 0, 0, *range(5, 16), *range(2, 17)])] * 2, Heads(4, 1, 128),
        page_size=8, block_tokens=64, dtype=jnp.float16, wide=True, root=120,
    ),
    "a window that ends within the tree": Drafts([3, 12, 0, 30, 16, 1], FIVE, Heads(4, 2, 64), window=3),
    "a window, wide": Drafts([3, 12, 0, 30, 16, 1], FIVE, Heads(16, 1, 64), wide=True, window=6),
}  # fmt: skip


@pytest.mark.parametrize("case", DRAFTS.values(), ids=DRAFTS.keys())
def test_draft_trees_equal_dense_attention_without_races(case: Drafts, capsys: pytest.CaptureFixture[str]) -> None:
    requests, tokens = len(case.lengths), len(case.parent[0])
    tree = Tree([-1] + [0] * requests, [case.root, *case.lengths], [*range(requests, 0, -1)])
    forest = Forest.from_nodes(*tree, page_size=case.page_size)
    forest, _ = forest.reserve(PagePool.create(64, forest.used_pages), tokens)
    forest = forest.extend(tokens)
    plan = plan_of(
        forest,
        case.heads,
        query_tokens=tokens,
        num_ctas=2,
        block_tokens=case.block_tokens,
        block_capacity=0,
        window=case.window,
    )
    assert (num_wide(plan) > 0) == case.wide
    arrays = Arrays.random(forest, case.heads, case.dtype, 0, tokens, num_pages=64)
    check(arrays, forest, plan, parent=case.parent)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize(("length", "exact"), [(11, True), (12, False)])
def test_a_plan_gives_nan_past_its_steps(length: int, exact: bool) -> None:
    heads, now = Heads(2, 1, 64), Forest.from_nodes([-1, 0], [20, length], [1])
    plan = plan_of(Forest.from_nodes([-1, 0], [20, 9], [1]), heads, steps=2, num_ctas=1, block_capacity=0)
    arrays = Arrays.random(now, heads, jnp.bfloat16, 0, num_pages=4)
    now, plan = jax.device_put((now, plan))
    out = attend(*arrays, now, plan, implementation="mosaic")
    assert np.isnan(np.asarray(out, np.float32)).all() == (not exact)


@pytest.mark.parametrize("barrier", ["keys_full", "values_full"])
def test_a_missing_wait_is_a_race(
    barrier: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class WithoutOneWait:
        def __getattr__(self, name: str) -> Any:
            return getattr(plgpu, name)

        def barrier_wait(self, ref: Any) -> None:
            if getattr(ref, "ref", ref) is not self.skipped:
                plgpu.barrier_wait(ref)

    broken, compute = WithoutOneWait(), pac.compute

    def compute_without_it(pipeline: Any) -> None:
        broken.skipped = getattr(pipeline.refs, barrier)
        compute(pipeline)

    monkeypatch.setattr(pac_compute, "plgpu", broken)
    monkeypatch.setattr(pac, "compute", compute_without_it)
    heads, forest = Heads(2, 1, 64), Forest.from_nodes([-1], [200], [0])
    plan = plan_of(forest, heads, num_ctas=1, block_capacity=0)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=16)
    assert RACE in said_of(lambda: attend(*arrays, forest, plan, implementation="mosaic"), capsys)
