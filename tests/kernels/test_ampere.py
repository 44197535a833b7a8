"""The kernels for GPUs since Ampere on any machine: interpreted, lowered for CUDA, and what they refuse."""

import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, renumbered
from kernel_calls import SIX, TREE, Arrays, Heads, attend, check, plan_of
from plan_cases import num_wide

from codec_jax import Forest, PagePool, Plan, Window, make_plan
from codec_jax.attention import backends
from codec_jax.attention.xla import XLA
from codec_jax.planning import arrays_of
from pallas_kernels import AMPERE, Call, Scores
from pallas_kernels import Heads as AllHeads
from pallas_kernels.ampere.tiling import BLOCKS, SHARED_KIB, columns_of

if not hasattr(plgpu, "mma"):
    pytest.skip("before JAX 0.11 there are no warp-level products", allow_module_level=True)
from ampere_simulator import simulate
from interpreted import serving

from pallas_kernels.ampere import instructions, pac_compute, por

# Head size, and tokens of a block.
CONFIGS = sorted({(dim, block.tokens) for sizes in BLOCKS.values() for dim, block in sizes.items()})


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernels serve on this machine."""
    simulate(monkeypatch, plgpu.InterpretGPUParams(detect_races=True))
    with serving(monkeypatch, AMPERE):
        yield


def ampere_plan(forest: Forest, heads: Heads, **options: Any) -> Plan:
    """Plan with as many lanes as there may be, and blocks of one of the sizes above."""
    block = BLOCKS[99][columns_of(heads.dim)]
    sizes = {"lanes": block.lanes, "block_tokens": block.tokens, "num_ctas": 2, "block_capacity": 0}
    return plan_of(forest, heads, **(sizes | options))


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
    window: Window | int | None = None
    softcap: float | None = None
    sinks: Any = None
    many: bool = False  # streams, as POR takes it
    wide: bool = False


CASES = {
    "one segment after another, sinks": Case(
        TREE, Heads(2, 2, 64), requests=9, sinks=np.asarray([3, -1], jnp.bfloat16)
    ),
    "more blocks than a ring holds": Case(
        Tree([-1, 0, 0], [300, 9, 130], [2, 1]), Heads(1, 1, 128), num_ctas=1, block_tokens=32
    ),
    "parts of pages": Case(SIX, Heads(4, 1, 128), page_size=256, num_ctas=1, block_tokens=64, dtype=jnp.float16),
    "heads of 96": Case(SIX, Heads(4, 2, 96), block_tokens=64),
    "heads of 112, causal, a window": Case(TREE, Heads(3, 1, 112), query_tokens=2, block_tokens=32, window=90),
    "heads of 256": Case(SIX, Heads(2, 1, 256), page_size=8, block_tokens=32, dtype=jnp.float16),
    "more thread blocks than work": Case(Tree([-1], [5], [0]), Heads(4, 2, 64), num_ctas=5),
    "several tiles, causal, rows in any order": Case(
        Tree([-1, 0, 0, 1, -1], [150, 40, 0, 3, 2], [3, 2, 1, 3, 4, 0]), Heads(8, 1, 64), query_tokens=5,
        wide=True,
    ),
    "causal, pages of 24": Case(TREE, Heads(2, 1, 64), query_tokens=3, page_size=24),
    "seven q heads": Case(SIX, Heads(7, 1, 64), page_size=8),
    "a group in parts, sinks": Case(
        Tree([-1, 0], [30, 3], [1]), Heads(71, 1, 64), num_ctas=1, wide=True,
        sinks=np.linspace(-2, 4, 71, dtype=np.float32),
    ),
    "many streams, sinks of 16 bits": Case(
        TREE, Heads(8, 4, 64), num_ctas=3, many=True, sinks=np.linspace(-2, 4, 8).astype(jnp.float16)
    ),
    "a window": Case(Tree([-1, 0, 0], [400, 9, 30], [2, 1]), Heads(2, 1, 64), window=200),
    "a chunked window, a cap and sinks": Case(
        Tree([-1, *[0] * 6], [300, *range(6, 0, -1)], list(range(1, 7))), Heads(16, 1, 64),
        window=Window(130, chunked=True), softcap=3.0, sinks=np.linspace(-2, 2, 16, dtype=np.float32), wide=True,
    ),
    "a window, causal, a cap": Case(
        Tree([-1, 0, 0, 1, -1], [150, 40, 0, 3, 2], [3, 2, 1, 3, 4, 0]), Heads(8, 1, 64),
        query_tokens=5, window=37, softcap=0.5, wide=True,
    ),
    "pairs of tiles and a single one": Case(
        Tree([-1, *[0] * 18, 1], [290, *range(18), 3], [*range(2, 20), 0]), Heads(8, 1, 64), num_ctas=3, wide=True
    ),
    "pairs of tiles, some rows of the second one": Case(
        Tree([-1, *[0] * 9], [200, *range(9)], list(range(9, 0, -1))), Heads(16, 2, 128), block_tokens=32, requests=12,
        num_ctas=1, dtype=jnp.float16, wide=True,
    ),
    "pairs of tiles of which neither has all readers": Case(
        Tree([-1, 0, *[0] * 4, *[1] * 8, *[0] * 4], [50, 130, *range(16)], list(range(2, 18))), Heads(8, 1, 64),
        wide=True,
    ),
    "pairs of tiles of 63 rows, a window, a cap": Case(
        Tree([-1, *[0] * 12], [300, *range(12)], list(range(1, 13))), Heads(7, 1, 128), query_tokens=2, block_tokens=64,
        window=260, softcap=2.0, wide=True,
    ),
    "one request over pairs of tiles": Case(Tree([-1], [150], [0]), Heads(8, 1, 64), query_tokens=40, wide=True),
}  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_interpreted_kernels_equal_dense_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(por, "_MANY_GROUPS", 0 if case.many else 1000)
    forest = Forest.from_nodes(*case.tree, page_size=case.page_size, request_capacity=case.requests)
    plan = ampere_plan(
        forest,
        case.heads,
        query_tokens=case.query_tokens,
        num_ctas=case.num_ctas,
        block_tokens=case.block_tokens,
        window=case.window,
    )
    assert (num_wide(plan) > 0) == case.wide
    num_pages = len(forest.used_pages) + 1
    arrays = Arrays.random(forest, case.heads, case.dtype, 0, case.query_tokens, num_pages)
    check(arrays, forest, plan, implementation="ampere", softcap=case.softcap, sinks=case.sinks)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(192, 128), (40, 72)])
def test_values_may_have_another_size_than_keys(head_dim: int, value_head_dim: int) -> None:
    heads, forest = Heads(4, 2, head_dim, value_head_dim), Forest.from_nodes(*SIX)
    plan = ampere_plan(forest, heads, block_tokens=32 if head_dim == 192 else 64)
    check(Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=32), forest, plan, implementation="ampere")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("query_tokens", [1, 2])
def test_one_plan_serves_leaves_that_grow(query_tokens: int) -> None:
    heads, forest = Heads(2, 1, 64), Forest.from_nodes([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest, _ = forest.reserve(PagePool.create(32, forest.used_pages), 20)
    plan = ampere_plan(forest, heads, steps=20, query_tokens=query_tokens)
    for step in range(2):
        arrays = Arrays.random(forest, heads, jnp.bfloat16, step, query_tokens, num_pages=32)
        check(arrays, forest, plan, implementation="ampere")
        forest = forest.extend(np.asarray([17, 2, 9])) if step == 0 else forest


@pytest.mark.usefixtures("interpreted")
def test_a_nan_in_k_stays_with_its_reader() -> None:
    heads, forest = Heads(2, 1, 128), Forest.from_nodes([-1, 0, 0], [16, 150, 9], [1, 2])
    plan = ampere_plan(forest, heads, num_ctas=1)
    query, keys, values = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=16)
    page, place = divmod(int(forest.context_slots(0)[100]), forest.page_size)  # in a block of this request alone
    arrays = Arrays(query, keys.at[page, place].set(jnp.nan), values)
    check(arrays, forest, plan, requests=[1], implementation="ampere")
    assert np.isnan(np.asarray(attend(*arrays, forest, plan, implementation="ampere")[0], np.float32)).all()


# Depth first: a chain and a star, two roots, a tree of two levels; the last request has candidates of no tree.
FIVE = [[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, -1, 2, 2], [-1] * 5]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("heads", "lengths", "parent", "window"),
    [
        (Heads(4, 2, 64), [3, 12, 0, 30], FIVE, None),
        (Heads(4, 2, 64), [3, 12, 0, 30], FIVE, 3),
        (Heads(4, 1, 128), [7, 5], [renumbered([-1, -1, 1, 1, 0, 0, *range(5, 16), *range(2, 6)])] * 2, None),
    ],
    ids=["pages of several requests in a block", "a window that ends within the tree", "several tiles"],
)
def test_draft_trees_equal_dense_attention(
    heads: Heads, lengths: list[int], parent: list[list[int]], window: int | None
) -> None:
    requests, tokens = len(lengths), len(parent[0])
    forest = Forest.from_nodes([-1] + [0] * requests, [70, *lengths], [*range(requests, 0, -1)])
    forest = forest.reserve(PagePool.create(64, forest.used_pages), tokens)[0].extend(tokens)
    plan = ampere_plan(forest, heads, query_tokens=tokens, window=window)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, tokens, num_pages=64)
    check(arrays, forest, plan, parent=parent, implementation="ampere")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("length", "exact"), [(11, True), (12, False)])
def test_a_plan_gives_nan_past_its_steps(length: int, exact: bool) -> None:
    heads, now = Heads(2, 1, 64), Forest.from_nodes([-1, 0], [20, length], [1])
    plan = ampere_plan(Forest.from_nodes([-1, 0], [20, 9], [1]), heads, steps=2, num_ctas=1)
    arrays = Arrays.random(now, heads, jnp.bfloat16, 0, num_pages=4)
    now, plan = jax.device_put((now, plan))
    out = attend(*arrays, now, plan, implementation="ampere")
    assert np.isnan(np.asarray(out, np.float32)).all() == (not exact)


@pytest.mark.usefixtures("interpreted")
def test_a_missing_wait_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above say something about copies."""
    monkeypatch.setattr(pac_compute, "wait_for_block", lambda work, number: None)
    heads, forest = Heads(2, 1, 64), Forest.from_nodes([-1], [200], [0])
    plan = ampere_plan(forest, heads, num_ctas=1)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=16)
    assert np.isnan(np.asarray(attend(*arrays, forest, plan, implementation="ampere"), np.float32)).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_lie_where_products_read_them(head_dim: int) -> None:
    """In tiles of 8 rows and 64 columns, whose bytes 16 to 64 are exchanged by those of 128 to 512."""
    rows, chunks = np.divmod(np.arange(64 * head_dim // 8, dtype=np.int32), head_dim // 8)
    tiles = np.arange(64 * head_dim).reshape(8, head_dim // 64, 8, 64).transpose(0, 2, 1, 3).reshape(64, head_dim)
    byte = 2 * tiles[rows, chunks * 8]
    swizzled = byte ^ (byte >> 3 & 0b1110000)
    np.testing.assert_array_equal(2 * instructions.place_of_chunk(rows, chunks, head_dim), swizzled)


# --- What they lower to -------------------------------------------------------------------------------------------


def attend_ampere(query: Any, pages: Any, forest: Forest, plan: Plan, *planes: Any) -> Any:
    """The output of the kernels, without what `forest_attention` does around them."""
    forest = jax.tree.map(jnp.asarray, forest)
    position, window = forest.positions(query.shape[1]), plan.arrays.window
    call = Call(query, pages, pages, position, arrays_of(forest), plan.arrays, plan.guard, *planes)
    return AMPERE.attend(call, Scores(0.1, None if window is None else 30.0))[0]


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        *((Heads(32, 8, dim), {"block_tokens": block}) for dim, block in CONFIGS),
        (Heads(28, 4, 128), {"query_tokens": 2, "page_size": 8, "block_tokens": 32}),
        (Heads(32, 8, 96), {"query_tokens": 2}),
        (Heads(71, 1, 64), {"page_size": 64, "window": 100}),
        (Heads(8, 4, 256), {"query_tokens": 3, "page_size": 256, "window": Window(64, chunked=True)}),
        (Heads(32, 8, 128), {"query_tokens": 9, "drafts": True}),
        (Heads(32, 8, 64), {"query_tokens": 9, "drafts": True, "window": 100}),
    ],
    ids=str,
)
def test_a_call_lowers_for_cuda_as_two_kernels_and_nothing_that_moves_kv(heads: Heads, options: dict[str, Any]) -> None:
    options, dtype = dict(options), jnp.float16 if heads.kv == 4 else jnp.bfloat16
    page_size, drafts = options.pop("page_size", 16), options.pop("drafts", False)
    forest = Forest.from_nodes([-1, *[0] * 9], [200, *[40] * 9], range(1, 10), page_size=page_size)
    plan = ampere_plan(forest, heads, num_ctas=108, **options)
    query = jax.ShapeDtypeStruct((9, plan.arrays.query_tokens, heads.q, heads.dim), dtype)
    pages = jax.ShapeDtypeStruct((64, plan.arrays.page_tokens, heads.kv, heads.dim), dtype)
    plane = jax.ShapeDtypeStruct((plan.arrays.block_pages.shape[0], plan.arrays.block_tokens), jnp.int32)
    planes = [plane] * (drafts + (drafts and "window" in options))
    lowered = jax.jit(attend_ampere).trace(query, pages, forest, plan, *planes).lower(lowering_platforms=("cuda",))
    assert (lowered.out_info.shape, lowered.out_info.dtype) == (query.shape, dtype)
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    assert "stablehlo.transpose" not in text
    assert "cp.async.bulk" not in text
    assert "wgmma" not in text


# --- What is refused ----------------------------------------------------------------------------------------------


def device(capability: str = "8.0", platform: str = "gpu", kind: str = "a test's device") -> SimpleNamespace:
    return SimpleNamespace(platform=platform, compute_capability=capability, device_kind=kind, core_count=108)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"block_tokens": 32}, None),
        ({"device": device("8.6")}, None),
        ({"device": device("12.0"), "head_dim": 256}, None),
        ({"device": device("9.0"), "head_dim": 64}, None),
        (
            {"device": device("7.5")},
            r"it needs an NVIDIA GPU since Ampere \(sm_80, .*got|the default device is a test's",
        ),
        ({"device": device(platform="cpu")}, "it needs an NVIDIA GPU since Ampere"),
        ({"query": jnp.float32}, "it takes bfloat16 or float16, the same for all, got float32 and bfloat16"),
        (
            {"pages": jnp.float8_e4m3fn},
            "it takes bfloat16 or float16, the same for all, got bfloat16 and float8_e4m3fn",
        ),
        ({"head_dim": 96}, None),
        ({"value_head_dim": 64}, None),
        ({"head_dim": 264}, "head sizes of at most 256, multiples of 8, got 264 and 264 for values"),
        ({"value_head_dim": 60}, "head sizes of at most 256, multiples of 8, got 128 and 60 for values"),
        ({"lanes": 2}, "it takes plans of 64 rows a tile, 1 lane and blocks of 32 tokens .*, got .* 2 lanes"),
        ({"lanes": 2, "device": device("8.9")}, None),
        ({"tile_rows": 16}, "it takes plans of 64 rows a tile, .*, got 16 rows"),
        ({"block_tokens": 64}, "blocks of 32 tokens .*, got .* blocks of 64 tokens"),
    ],
    ids=str,
)
def test_why_not_names_what_the_kernels_do_not_take(changed: dict[str, Any], reason: str | None) -> None:
    options = dict(changed)
    head_dim, default_device = options.pop("head_dim", 128), options.pop("device", device())
    query = jax.ShapeDtypeStruct((1, 1, 8, head_dim), options.pop("query", jnp.bfloat16))
    pages = jax.ShapeDtypeStruct((64, 16, 2, head_dim), options.pop("pages", jnp.bfloat16))
    values = jax.ShapeDtypeStruct((*pages.shape[:3], options.pop("value_head_dim", head_dim)), pages.dtype)
    heads = AllHeads.of(query, pages, values)
    sizes = {"num_ctas": 4, "tile_rows": 64, "lanes": 1, "block_tokens": 32}
    if reason is None:
        sizes["block_tokens"] = AMPERE.tiling(heads, default_device).block_tokens[0]
    forest = Forest.from_nodes([-1], [40], [0])
    plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=head_dim, **(sizes | options))
    got = AMPERE.why_not(heads, default_device, None, plan.arrays)
    assert got is None if reason is None else re.search(reason, got)


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_thread_blocks_fit_the_shared_memory_of_every_device(capability: str) -> None:
    for head_dim in (64, 128, 256):
        heads = AllHeads(8, 2, head_dim, head_dim)
        tiling = AMPERE.tiling(heads, device(capability))
        (tokens, _), together = tiling.block_tokens, tiling.num_ctas // 108
        kib = SHARED_KIB[capability]
        block = BLOCKS[max(size for size in BLOCKS if size <= kib)][head_dim]
        assert block.tokens == tokens
        assert block.shared_bytes(head_dim) <= kib * 1024
        assert together * (block.shared_bytes(head_dim) + 1024) <= (kib + 1) * 1024  # the driver takes one for itself


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("scale", "softcap"), [(1e-9, None), (0.0, 1e-9), (0.125, 1e-9)])
def test_the_smallest_scores_are_masked_as_others(scale: float, softcap: float | None) -> None:
    forest, heads = Forest.from_nodes(*SIX), Heads(2, 1, 64)
    plan = ampere_plan(forest, heads, query_tokens=2, num_ctas=2, block_tokens=128)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, 2, len(forest.used_pages) + 1)
    check(arrays, forest, plan, implementation="ampere", scale=scale, softcap=softcap)


def test_a_negative_scale_is_refused() -> None:
    got = AMPERE.why_not(AllHeads(8, 2, 64, 64), device(), Scores(-0.5))
    assert got == "it takes a scale of 0 or more, got -0.5"


def test_scores_so_small_that_a_mask_would_not_show_are_refused() -> None:
    got = AMPERE.why_not(AllHeads(8, 2, 64, 64), device(), Scores(0.0))
    assert got == "it takes a scale of 1e-09 or more, got 0.0"
    assert AMPERE.why_not(AllHeads(8, 2, 64, 64), device(), Scores(0.0, 1e-9)) is None


@pytest.mark.parametrize(
    ("device", "changed", "expected"),
    [
        (device("8.0"), {}, "ampere"),
        (device("8.9"), {}, "ampere"),
        (device("10.0"), {}, "ampere"),
        (device("9.0"), {"tile_rows": 64, "lanes": 2, "block_tokens": 128}, "mosaic"),
        (device("9.0"), {"lanes": 1}, "ampere"),  # the other kernels take plans of two lanes
    ],
    ids=str,
)
def test_none_takes_the_family_of_the_device_and_the_plan(
    monkeypatch: pytest.MonkeyPatch, device: Any, changed: dict[str, int], expected: str
) -> None:
    tiling = AMPERE.tiling(AllHeads(8, 2, 128, 128), device)
    sizes = {"tile_rows": tiling.tile_rows, "lanes": tiling.lanes, "block_tokens": tiling.block_tokens[0]}
    forest = Forest.from_nodes([-1], [40], [0])
    plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=128, num_ctas=4, **(sizes | changed))
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert backends.choose(None, AllHeads(8, 2, 128, 128), Scores(1.0), plan.arrays).name == expected


def test_a_plan_is_cut_for_the_device_that_it_is_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [device("8.0", kind="NVIDIA A100-SXM4-80GB")])
    forest = Forest.from_nodes([-1], [40], [0])
    with pytest.warns(UserWarning, match="no measured costs for NVIDIA A100-SXM4-80GB"):
        plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=128)
    assert backends.choose(None, AllHeads(8, 2, 128, 128), Scores(1.0), plan.arrays) is AMPERE
    assert plan.arrays.lanes == 1
    invariant = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=128, policy="invariant")
    assert invariant.arrays.lanes == 1
    assert backends.choose(None, AllHeads(8, 2, 128, 128), Scores(1.0), invariant.arrays) is AMPERE
    narrow = plan.cost_model.kv_us(False, 1000, cached=False)
    assert narrow == pytest.approx(4 * 128 * 1000 * 108 / (0.94 * 2.039e6))


@pytest.mark.parametrize("links", [True, False])
def test_a_jax_that_makes_kernels_slow_is_warned_of(monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    gpu = device("8.0")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(backends, "LINKS_KERNELS", links)
    tiling, forest = AMPERE.tiling(AllHeads(8, 2, 128, 128), gpu), Forest.from_nodes([-1], [40], [0])
    sizes = {"tile_rows": tiling.tile_rows, "lanes": tiling.lanes, "block_tokens": tiling.block_tokens[0]}
    plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=128, num_ctas=4, **sizes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert backends.choose(None, AllHeads(8, 2, 128, 128), Scores(1.0), plan.arrays) is AMPERE
        xla = backends.choose("xla", AllHeads(8, 2, 128, 128), Scores(1.0), plan.arrays)
    assert xla is XLA
    assert [str(each.message).startswith("jax: expected a version before 0.12") for each in caught] == [True] * links


def test_without_kernels_the_xla_path_serves_and_a_warning_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [device("8.0")])
    plan = plan_of(Forest.from_nodes([-1], [40], [0]), Heads(8, 2, 320))
    with pytest.warns(UserWarning, match=r"the xla path, .*; not on 'mosaic': .*; not on 'ampere': .*head sizes"):
        assert backends.choose(None, AllHeads(8, 2, 320, 320), Scores(1.0), plan.arrays) is XLA
