"""The Hopper kernels: lowered for CUDA on any machine, and held to float64 attention where there is such a GPU."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, ancestry, renumbered, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import DraftTrees, Forest, KVPages, PagePool, Plan, make_plan, mosaic, streams
from codec_jax.attention import forest_attention
from codec_jax.pages import NO_SLOT
from pallas_kernels.config import LARGE, SMALL
from pallas_kernels.packing import TILE_ROWS, Packing

PAGES = 192
NODES = 128
attend = jax.jit(forest_attention, static_argnames=("scale", "implementation", "return_residuals"))
attend_mosaic = partial(attend, implementation="mosaic")
seeds = st.integers(0, 2**32 - 1)


class Heads(NamedTuple):
    q: int
    kv: int
    dim: int


def plan_of(forest: Forest, heads: Heads, **options: int) -> Plan:
    """Plan as for an H200, on any machine; forests of up to PAGES pages and one tile or a few share a compilation."""
    sizes = {
        "num_ctas": 132,
        "tile_rows": Packing.of(heads.q // heads.kv).tile_rows,
        "block_tokens": LARGE.get(heads.dim, LARGE[128]).block_tokens,
        "lanes": 2,
        "block_capacity": 256,
    }
    return make_plan(forest, num_q_heads=heads.q, num_kv_heads=heads.kv, head_dim=heads.dim, **(sizes | options))


def num_wide(plan: Plan) -> int:
    """Count the segments of two tiles."""
    segments = plan.segments[: plan.cta_ptr[-1]]
    return int((segments[:, 0] != segments[:, 1]).sum())


# --- On any machine: what is lowered ----------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of the kernels: shapes, and the block that the planner is told to use."""

    heads: Heads
    block_tokens: int
    page_size: int = 16
    requests: int = 9
    query_tokens: int = 1


CONFIGS = sorted({(dim, config.block_tokens) for table in (LARGE, SMALL) for dim, config in table.items()})
ONE_TILE = [Call(Heads(32, 8, dim), block, requests=3) for dim, block in CONFIGS]
SEVERAL_TILES = [Call(Heads(32, 8, dim), block, requests=21, query_tokens=4) for dim, block in CONFIGS]
LAYOUTS = [
    Call(Heads(32, 32, 128), 128, page_size=256, requests=100),
    Call(Heads(32, 16, 128), 64, page_size=8, query_tokens=33),
    Call(Heads(6, 2, 64), 128, page_size=24, requests=1),
    Call(Heads(28, 4, 128), 64, page_size=48, query_tokens=2),
    Call(Heads(16, 1, 128), 128, page_size=128, requests=1),
    Call(Heads(71, 1, 64), 128, page_size=32, requests=2),
    Call(Heads(71, 1, 64), 128, page_size=64, query_tokens=3),
    Call(Heads(8, 4, 256), 64, page_size=256, query_tokens=2),
    Call(Heads(8, 8, 256), 64, page_size=8, requests=70),
    Call(Heads(32, 8, 128), 128, requests=1024),
]


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        *((call, jnp.bfloat16) for call in ONE_TILE),
        *((call, jnp.float16) for call in SEVERAL_TILES),
        *((call, (jnp.bfloat16, jnp.float16)[i % 2]) for i, call in enumerate(LAYOUTS)),
    ],
    ids=str,
)
def test_a_call_lowers_for_cuda_as_two_kernels_and_nothing_that_moves_kv(call: Call, dtype: Any) -> None:
    heads, tokens = call.heads, call.query_tokens
    forest = Forest.from_nodes([-1, 0], [200, 40], [1] * call.requests, page_size=call.page_size)
    plan = plan_of(forest, heads, query_tokens=tokens, block_tokens=call.block_tokens)
    query = jax.ShapeDtypeStruct((call.requests, tokens, heads.q, heads.dim), dtype)
    pages = jax.ShapeDtypeStruct((64, plan.slot_tokens, heads.kv, heads.dim), dtype)

    def attend(*arguments: Any) -> jax.Array:
        return mosaic.attend(*arguments, scale=0.1)[0]

    lowered = jax.jit(attend).trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",))
    assert (lowered.out_info.shape, lowered.out_info.dtype) == (query.shape, dtype)
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    assert "stablehlo.transpose" not in text
    assert tokens > 1 or "stablehlo.gather" not in text


def test_calls_of_a_step_that_differ_only_in_their_arrays_are_lowered_once() -> None:
    heads, forest = Heads(8, 2, 128), Forest.from_nodes([-1, 0], [200, 40], [1])
    plan = plan_of(forest, heads, block_tokens=128)
    query = jax.ShapeDtypeStruct((1, 1, heads.q, heads.dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((64, plan.slot_tokens, heads.kv, heads.dim), jnp.bfloat16)

    def layers(query: jax.Array, *arguments: Any) -> jax.Array:
        for _ in range(3):
            query = mosaic.attend(query, *arguments, scale=0.1)[0]
        return query

    lowered = jax.jit(layers).trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


def test_draft_trees_lower_for_cuda_as_two_kernels_with_one_column_of_masks() -> None:
    heads, tokens, requests = Heads(32, 8, 128), 9, 5
    forest = Forest.from_nodes([-1, *[0] * requests], [200, *[40] * requests], range(1, requests + 1))
    query = jax.ShapeDtypeStruct((requests, tokens, heads.q, heads.dim), jnp.bfloat16)
    for block_tokens in (64, 128):
        plan = plan_of(forest, heads, query_tokens=tokens, block_tokens=block_tokens)
        pages = jax.ShapeDtypeStruct((64, plan.slot_tokens, heads.kv, heads.dim), jnp.bfloat16)
        readers = jax.ShapeDtypeStruct((plan.pages.shape[0], block_tokens), jnp.int32)

        def attend(*arguments: Any) -> jax.Array:
            *inputs, readers = arguments
            return mosaic.attend(*inputs, 0.1, readers)[0]

        traced = jax.jit(attend).trace(query, pages, pages, forest, plan, readers)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


# --- On any machine: what is refused ----------------------------------------------------------------------------


def device(platform: str = "gpu", capability: str = "9.0") -> SimpleNamespace:
    return SimpleNamespace(platform=platform, compute_capability=capability, device_kind="a test's device")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"head_dim": 64}, None),
        ({"block_tokens": 64}, None),
        ({"page_size": 256}, None),
        (
            {"device": device(capability="8.0")},
            r"it needs a Hopper GPU \(sm_90\), the default device is a test's device",
        ),
        ({"device": device(capability="10.0")}, "it needs a Hopper GPU"),
        ({"device": device("cpu")}, "it needs a Hopper GPU"),
        ({"query": jnp.float32}, "it takes bfloat16 or float16, the same for all, got float32 and bfloat16"),
        ({"pages": jnp.float16}, "it takes bfloat16 or float16, the same for all, got bfloat16 and float16"),
        ({"head_dim": 96}, "it takes head sizes 64, 128, 256, got 96"),
        ({"lanes": 1}, "it takes plans of 64 rows a tile, 2 lanes and blocks of 64 or 128 tokens, got .* 1 lanes"),
        ({"tile_rows": 16}, "it takes plans of 64 rows a tile, .*, got 16 rows"),
        ({"block_tokens": 256}, "blocks of 64 or 128 tokens, got .* blocks of 256 tokens"),
        ({"head_dim": 256, "block_tokens": 128}, "blocks of 64 tokens, got .* blocks of 128 tokens"),
    ],
    ids=str,
)
def test_why_not_names_what_the_kernels_do_not_take(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str | None
) -> None:
    options = dict(changed)
    head_dim, page_size = options.pop("head_dim", 128), options.pop("page_size", 16)
    default_device = options.pop("device", device())
    query = jax.ShapeDtypeStruct((1, 1, 8, head_dim), options.pop("query", jnp.bfloat16))
    pages = jax.ShapeDtypeStruct((64, page_size, 2, head_dim), options.pop("pages", jnp.bfloat16))
    forest = Forest.from_nodes([-1], [40], [0], page_size=page_size)
    plan = plan_of(forest, Heads(8, 2, head_dim), **options)
    monkeypatch.setattr(jax, "devices", lambda: [default_device])
    got = mosaic.why_not(query, pages, plan)
    assert got is None if reason is None else re.search(reason, got)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says why there is no Hopper GPU; here may be one")
def test_without_a_hopper_gpu_the_reason_is_the_device() -> None:
    forest = Forest.from_nodes([-1], [20], [0])
    query, pages = jnp.zeros((1, 1, 8, 64), jnp.bfloat16), jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    plan = plan_of(forest, Heads(8, 2, 64))
    assert "Hopper" in mosaic.why_not(query, pages, plan)
    with pytest.raises(ValueError, match=r"implementation: 'mosaic' cannot serve: .*Hopper.*'xla'"):
        forest_attention(query, pages, pages, forest, plan, implementation="mosaic")


# --- On a Hopper GPU: float64 attention of each request alone ----------------------------------------------------


class Arrays(NamedTuple):
    """A query and pages. What no request reads is as large as the dtype allows; a free request slot's query is NaN."""

    query: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array

    @classmethod
    def random(
        cls, forest: Forest, heads: Heads, dtype: Any, seed: int, query_tokens: int = 1, num_pages: int = PAGES
    ) -> "Arrays":
        rng = np.random.default_rng(seed)
        query = rng.normal(size=(forest.request_capacity, query_tokens, heads.q, heads.dim))
        query[~forest.active] = np.nan
        shape = (num_pages * forest.page_size, heads.kv, heads.dim)
        read = [forest.context_slots(request) for request in np.flatnonzero(forest.active)]
        slots = np.unique(np.concatenate(read))
        pages = []
        for sign in (1, -1):
            tokens = np.full(shape, sign * float(jnp.finfo(dtype).max), np.float32)
            tokens[slots] = rng.standard_normal(size=(len(slots), *shape[1:]), dtype=np.float32)
            pages.append(jnp.asarray(tokens, dtype).reshape(num_pages, forest.page_size, *shape[1:]))
        return cls(jnp.asarray(query, dtype), *pages)


class Exact(NamedTuple):
    """Attention of one request's T tokens in float64: [T, N, H], [T, N] and [T, N, H]."""

    out: np.ndarray
    logsumexp: np.ndarray  # -inf where a token sees nothing
    error: np.ndarray  # what rounding the weights and the result to the dtype may cost

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        forest: Forest,
        request: int,
        scale: float | None = None,
        parent: list[int] | None = None,
    ) -> "Exact":
        eps = float(jnp.finfo(arrays.query.dtype).eps)
        query = np.asarray(arrays.query[request], np.float64)
        tokens, q_heads, head_dim = query.shape
        slots = forest.context_slots(request)
        kv_heads = arrays.key_pages.shape[2]
        key, value = (
            np.asarray(np.asarray(pages).reshape(-1, kv_heads, head_dim)[slots], np.float64).transpose(1, 0, 2)
            for pages in arrays[1:]
        )
        rows = query.reshape(tokens, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)  # [K, G, T, H]
        scores = rows @ key[:, None].swapaxes(2, 3) * (head_dim**-0.5 if scale is None else scale)
        visible = np.arange(len(slots)) <= len(slots) - tokens + np.arange(tokens)[:, None]
        if parent is not None:
            visible[:, len(slots) - tokens :] = [
                [t in ancestry(parent, i) for t in range(tokens)] for i in range(tokens)
            ]
        scores = np.where(visible, scores, -np.inf)
        most = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), -1e300)
        weights = np.exp(scores - most)
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / np.where(total, total, 1.0)
        out, size = (
            (weights @ v[:, None]).transpose(2, 0, 1, 3).reshape(tokens, q_heads, head_dim)
            for v in (value, np.abs(value))
        )
        with np.errstate(divide="ignore"):
            logsumexp = (np.where(total, most, 0.0) + np.log(total))[..., 0]
        # Half of eps each for weights and result, and a little for float32 sums and exp2.
        return cls(out, logsumexp.transpose(2, 0, 1).reshape(tokens, q_heads), 1.05 * eps * size + 1e-5)


def check(
    arrays: Arrays,
    forest: Forest,
    plan: Plan,
    *,
    requests: Any = None,
    scale: float | None = None,
    implementation: str = "mosaic",
    parent: list[list[int]] | None = None,
) -> None:
    """Compare output and residuals of some requests, or of all, with float64 attention; free request slots give 0.

    `parent` gives each request's candidates the candidate above them, in depth-first order.
    """
    drafts = None if parent is None else DraftTrees.from_parents(np.asarray(parent))
    out, residuals = attend(
        *arrays, forest, plan, drafts=drafts, scale=scale, implementation=implementation, return_residuals=True
    )
    assert out.dtype == arrays.query.dtype
    out, row_max, row_sum = (np.asarray(x, np.float64) for x in (out, *residuals))
    free = ~np.asarray(forest.active)
    assert (out[free] == 0).all()
    assert (row_max[free] == -np.inf).all()
    assert (row_sum[free] == 0).all()
    for request in np.flatnonzero(forest.active) if requests is None else requests:
        exact = Exact.of(arrays, forest, request, scale, None if parent is None else parent[request])
        excess = np.abs(out[request] - exact.out) - exact.error
        assert excess.max() <= 0, f"request {request}: error is {excess.max()} more than {exact.error.max()}"
        with np.errstate(divide="ignore"):
            logsumexp = row_max[request] + np.log(row_sum[request])
        np.testing.assert_allclose(logsumexp, exact.logsumexp, atol=1e-4, rtol=1e-6)


def grown(tree: Tree, page_size: int = 16, seed: int | None = None, **capacities: int) -> Forest:
    """The tree as a forest of fixed capacities, on scattered pages if there is a seed."""
    forest = Forest.from_nodes(*tree, page_size=page_size, node_capacity=NODES, **capacities)
    pages = np.arange(PAGES) if seed is None else np.random.default_rng(seed).permutation(PAGES)
    return forest.rebuild(entries=pages[forest.used_pages].astype(np.int32), entry_capacity=PAGES)


@pytest.fixture
def small_wide_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pairs of tiles share even the little that small forests have for both."""
    monkeypatch.setattr(streams, "LEAST_WIDE_TOKENS", 24)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "query_tokens", "page_size", "block_tokens"),
    [
        (Heads(32, 8, 128), 1, 16, 128),
        (Heads(32, 8, 128), 1, 16, 64),
        (Heads(16, 1, 128), 1, 8, 128),
        (Heads(6, 3, 64), 33, 24, 128),
        (Heads(28, 4, 128), 5, 48, 128),
        (Heads(28, 4, 128), 5, 48, 64),
        (Heads(8, 4, 256), 16, 32, 64),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_wide_streams")
def test_random_forests_equal_dense_attention(
    heads: Heads, query_tokens: int, page_size: int, block_tokens: int
) -> None:
    """On scattered pages, with free request slots, and with requests shorter than the query."""
    wide = 0

    @settings(max_examples=25)
    @given(trees(max_nodes=10, max_length=150, max_requests=8), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        nonlocal wide
        forest = grown(tree, page_size, seed, request_capacity=10)
        if not forest.request_length.any():
            return
        plan = plan_of(forest, heads, query_tokens=query_tokens, block_tokens=block_tokens)
        wide += num_wide(plan)
        check(Arrays.random(forest, heads, jnp.bfloat16, seed, query_tokens), forest, plan)

    check_one()
    several_tiles = 10 * query_tokens * heads.q // heads.kv > 2 * TILE_ROWS
    assert (wide > 0) == several_tiles


# One request ends at an inner node, two at the same leaf; nodes without tokens, of one token, and of full blocks.
TREE = Tree([-1, 0, 0, 1, -1, 4], [300, 40, 0, 129, 1, 64], [3, 2, 1, 3, 5, 4, 0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        *((Heads(32, 8, 128), page_size) for page_size in (8, 16, 24, 32, 48, 64, 128, 256)),
        *((Heads(8, 8, 64), page_size) for page_size in (8, 64, 256)),
        *((Heads(8, 4, 256), page_size) for page_size in (16, 48, 128)),
        *((Heads(32, 32, 128), page_size) for page_size in (16, 256)),
        *((Heads(16, 8, 128), page_size) for page_size in (32, 64)),
        *((Heads(64, 8, 128), page_size) for page_size in (8, 128)),
        *((Heads(16, 1, 128), page_size) for page_size in (16, 64)),
        *((Heads(28, 4, 128), page_size) for page_size in (24, 64)),
        *((Heads(6, 3, 64), page_size) for page_size in (16, 32)),
        *((Heads(71, 1, 64), page_size) for page_size in (16, 48)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_layouts_equal_dense_attention(heads: Heads, page_size: int, dtype: Any) -> None:
    forest = grown(TREE, page_size, seed=0, request_capacity=9)
    check(Arrays.random(forest, heads, dtype, seed=1), forest, plan_of(forest, heads))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize(("head_dim", "block_tokens"), CONFIGS)
@pytest.mark.parametrize("query_tokens", [1, 3])
def test_every_config_and_the_same_plan_on_xla_equal_dense_attention(
    head_dim: int, block_tokens: int, query_tokens: int, implementation: str
) -> None:
    heads, forest = Heads(32, 8, head_dim), grown(TREE, request_capacity=9)
    plan = plan_of(forest, heads, query_tokens=query_tokens, block_tokens=block_tokens)
    check(Arrays.random(forest, heads, jnp.bfloat16, 1, query_tokens), forest, plan, implementation=implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("heads", [Heads(16, 2, 64), Heads(9, 3, 128), Heads(71, 1, 64)], ids=str)
@pytest.mark.parametrize("num_ctas", [1, 3, 132])
def test_many_requests_in_any_order_on_any_number_of_thread_blocks(heads: Heads, num_ctas: int, order: str) -> None:
    leaf = list(range(1, 101))
    if order == "scattered":
        np.random.default_rng(0).shuffle(leaf)
    forest = Forest.from_nodes([-1] + [0] * 50 + [1] * 50, [200, *range(100)], leaf)
    plan = plan_of(forest, heads, num_ctas=num_ctas)
    if heads.q < 71:  # whose units are parts of a group
        assert (plan.tile_unit >= 0).any() == (order == "consecutive")
    check(Arrays.random(forest, heads, jnp.bfloat16, 2, num_pages=512), forest, plan, requests=range(0, 100, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 2, 5, 33])
@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("leaf_length", [4, 150])
def test_wide_segments_equal_dense_attention(query_tokens: int, order: str, leaf_length: int) -> None:
    """A root that many tiles share; the last tokens of requests with short leaves lie in the root, too."""
    heads, requests, rng = Heads(32, 8, 128), 45, np.random.default_rng(0)
    leaf = rng.permutation(requests) + 1 if order == "scattered" else np.arange(requests) + 1
    lengths = rng.integers(0, leaf_length, requests)
    forest = Forest.from_nodes([-1] + [0] * requests, [9000, *lengths], leaf, request_capacity=48)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    assert 0 < num_wide(plan) < plan.cta_ptr[-1]
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages=1100)
    check(arrays, forest, plan, requests=(0, 1, 15, 16, 31, 44))


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [2, 5, 33])
def test_leaves_shorter_than_the_query_and_requests_shorter_than_it(query_tokens: int) -> None:
    tree = Tree([-1, 0, 0, 1, -1, 4], [60, 1, 40, 2, 3, 129], [3, 2, 1, 3, 5, 4, 0])
    heads, forest = Heads(32, 8, 128), grown(tree, request_capacity=9)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    check(Arrays.random(forest, heads, jnp.float16, 3, query_tokens), forest, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.usefixtures("small_wide_streams")
def test_one_plan_serves_leaves_that_grow(query_tokens: int) -> None:
    heads = Heads(32, 8, 128)
    forest = Forest.from_nodes([-1] + [0] * 20, [100, *range(20)], list(range(1, 21)), request_capacity=22)
    forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), 40)
    plan = plan_of(forest, heads, steps=40, query_tokens=query_tokens)
    assert num_wide(plan) or query_tokens == 1
    for step in range(4):
        check(Arrays.random(forest, heads, jnp.bfloat16, step, query_tokens), forest, plan)
        forest = forest.extend(np.random.default_rng(step).integers(0, 14, 22)) if step < 3 else forest


def random_drafts(rng: np.random.Generator, requests: int, tokens: int) -> list[list[int]]:
    """Random trees for each request; every other one is as narrow as to be nearly a chain."""
    lowest = [0 if request % 2 else -1 for request in range(requests)]
    return [
        renumbered([-1, *(int(rng.integers(max(low, t - 2) if low == 0 else low, t)) for t in range(1, tokens))])
        for low in lowest
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "tokens", "page_size", "dtype"),
    [
        (Heads(32, 8, 128), 1, 16, jnp.bfloat16),
        (Heads(32, 8, 128), 16, 16, jnp.bfloat16),
        (Heads(32, 8, 128), 64, 16, jnp.float16),
        (Heads(16, 1, 64), 33, 8, jnp.bfloat16),
        (Heads(28, 4, 128), 5, 48, jnp.float16),
        (Heads(71, 1, 64), 3, 24, jnp.bfloat16),
        (Heads(8, 4, 256), 24, 32, jnp.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("root", [300, 9000])
def test_draft_trees_equal_dense_attention(heads: Heads, tokens: int, page_size: int, dtype: Any, root: int) -> None:
    requests, rng = 20, np.random.default_rng(0)
    leaf = rng.permutation(requests) + 1
    tree = Tree([-1] + [0] * requests, [root, *rng.integers(0, 200, requests)], leaf.tolist())
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=22)
    num_pages = len(forest.used_pages) + 21 * (-(-tokens // page_size) + 2)
    forest, _ = forest.reserve(PagePool.create(num_pages, forest.used_pages), tokens + 3)
    forest = forest.extend(tokens)
    plan = plan_of(forest, heads, query_tokens=tokens, steps=3)
    for step in range(2):
        arrays = Arrays.random(forest, heads, dtype, step, tokens, num_pages)
        parent = random_drafts(rng, 22, tokens)
        check(arrays, forest, plan, requests=range(0, requests, 3), parent=parent)
        forest = forest.extend(3) if step == 0 else forest


@pytest.mark.gpu
def test_draft_trees_in_a_leaf_that_others_read_give_nan() -> None:
    heads, forest = Heads(32, 8, 128), Forest.from_nodes([-1, 0], [50, 20], [1, 1])
    drafts = DraftTrees.from_parents(np.zeros((2, 4), np.int64) - 1)
    arrays, plan = Arrays.random(forest, heads, jnp.bfloat16, 0, 4), plan_of(forest, heads, query_tokens=4)
    forest, plan = jax.device_put((forest, plan))
    assert np.isnan(np.asarray(attend_mosaic(*arrays, forest, plan, drafts=drafts), np.float32)).all()


@pytest.mark.gpu
def test_a_stale_plan_gives_nan_everywhere() -> None:
    heads, tree = Heads(32, 8, 128), Tree([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest = grown(tree, request_capacity=5)
    plan = plan_of(forest, heads)
    longer = tree._replace(length=[100, 15, 33])
    other_pages = grown(tree, request_capacity=5, seed=1)
    other_leaves = grown(tree._replace(leaf=[2, 1, 0]), request_capacity=5)
    for other in (grown(longer, request_capacity=5), other_pages, other_leaves):
        arrays = Arrays.random(other, heads, jnp.bfloat16, 0)
        out, residuals = attend_mosaic(*arrays, other, plan, return_residuals=True)
        assert all(np.isnan(np.asarray(x, np.float32)).all() for x in (out, *residuals))


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 5])
def test_results_are_the_same_from_run_to_run(query_tokens: int) -> None:
    heads = Heads(32, 8, 128)
    forest = Forest.from_nodes([-1, *[0] * 40], [9000, *[50] * 40], list(range(40, 0, -1)))
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages=800)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    assert num_wide(plan)
    forest, plan = jax.device_put((forest, plan))
    first, *others = (np.asarray(attend_mosaic(*arrays, forest, plan), np.float32) for _ in range(6))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_logits_far_from_0_are_exact(level: float, dtype: Any) -> None:
    """Scores are whole numbers about the level, so that float32 holds them exactly."""
    heads, forest = Heads(32, 8, 128), grown(TREE, request_capacity=9)
    arrays = Arrays.random(forest, heads, dtype, seed=1)
    rng = np.random.default_rng(0)
    query = jnp.zeros_like(arrays.query).at[..., :2].set(jnp.asarray([level / 100, 1.0], dtype))
    read = np.unique(np.concatenate([forest.context_slots(request) for request in range(7)]))
    keys = np.asarray(arrays.key_pages, np.float32).reshape(-1, 8, 128)
    keys[read] = 0.0
    keys[read, :, 0] = 100.0
    keys[read, :, 1] = rng.integers(-9, 4, (len(read), 8))
    keys = jnp.asarray(keys, dtype).reshape(arrays.key_pages.shape)
    check(Arrays(query, keys, arrays.value_pages), forest, plan_of(forest, heads), scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_one_token_far_above_all_others_gives_its_value(dtype: Any) -> None:
    heads, forest = Heads(32, 8, 128), grown(TREE, request_capacity=9)
    arrays = Arrays.random(forest, heads, dtype, seed=1)
    slot = forest.context_slots(0)[-1]  # also read by request 3
    keys = arrays.key_pages.reshape(-1, 8, 128).at[slot].set(jnp.asarray(100.0, dtype))
    arrays = Arrays(jnp.ones_like(arrays.query), keys.reshape(arrays.key_pages.shape), arrays.value_pages)
    plan = plan_of(forest, heads)
    check(arrays, forest, plan, scale=0.78125)  # 1e4 against a few tens
    out = attend_mosaic(*arrays, forest, plan, scale=0.78125)
    value = jnp.repeat(arrays.value_pages.reshape(-1, 8, 128)[slot], 4, axis=0)
    for request in (0, 3):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out[request, 0], value)), rtol=1e-3)


# Six requests whose leaves lie side by side in one tile, so that each row passes over the pages of the others.
SIX = Tree([-1, *[0] * 6], [100, 5, 17, 30, 128, 1, 64], list(range(1, 7)))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("request_slot", range(6))
def test_a_number_that_is_not_finite_never_reaches_another_request(request_slot: int, bad: float) -> None:
    # One leaf fills a block, which is masked by row; the others share theirs.
    heads, forest = Heads(32, 8, 128), grown(SIX._replace(length=[100, 5, 17, 30, 300, 1, 64]))
    arrays, plan = Arrays.random(forest, heads, jnp.bfloat16, 0), plan_of(forest, heads)
    clean = np.asarray(attend_mosaic(*arrays, forest, plan), np.float32)
    slots = np.full((6, 1), NO_SLOT, np.int32)
    own = forest.context_slots(request_slot)[100:]
    slots[request_slot] = own[len(own) // 2]
    row = jnp.full((6, 1, heads.kv, heads.dim), bad, jnp.bfloat16)
    pages = KVPages(*arrays[1:]).write(slots, row, row)
    others = np.arange(6) != request_slot
    for key, value in ((pages.key, pages.value), (pages.key, arrays.value_pages)):
        out = np.asarray(attend_mosaic(arrays.query, key, value, forest, plan), np.float32)
        np.testing.assert_array_equal(out[others], clean[others])
        assert np.isnan(out[request_slot]).all()
    only_value = np.asarray(attend_mosaic(arrays.query, arrays.key_pages, pages.value, forest, plan), np.float32)
    np.testing.assert_array_equal(only_value[others], clean[others])
    assert np.isfinite(only_value).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(32, 32, 128), Heads(16, 8, 64)], ids=str)
@pytest.mark.parametrize("root", [4000, 9000])
def test_the_error_is_no_greater_than_that_of_cudnn(root: int, heads: Heads, dtype: Any) -> None:
    requests = 40
    forest = Forest.from_nodes([-1, *[0] * requests], [root, *[200] * requests], list(range(1, requests + 1)))
    arrays = Arrays.random(forest, heads, dtype, 0, num_pages=root // 16 + 14 * requests)
    plan = plan_of(forest, heads)
    assert (num_wide(plan) > 0) == (root == 9000 and heads.q > heads.kv)
    sample = np.arange(0, requests, 5)
    slots = np.stack([forest.context_slots(request) for request in sample])
    dense = [pages.reshape(-1, heads.kv, heads.dim)[slots] for pages in arrays[1:]]
    with jax.numpy_dtype_promotion("standard"):
        of_cudnn = jax.nn.dot_product_attention(arrays.query[sample], *dense, implementation="cudnn")
    ours = attend_mosaic(*arrays, forest, plan)[sample]
    exact, _, most = (np.stack(x) for x in zip(*(Exact.of(arrays, forest, request) for request in sample), strict=True))
    our_errors, errors_of_cudnn = (np.asarray(x, np.float64) - exact for x in (ours, of_cudnn))
    assert (np.abs(our_errors) <= most).all()
    # Of the mean, since the greatest of many rounding errors depends on the order of sums by more than 10%.
    assert np.sqrt(np.mean(our_errors**2)) <= 1.05 * np.sqrt(np.mean(errors_of_cudnn**2))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "query_tokens"), [((16, 64), 1), ((16, 257), 1), ((16, 64), 3)], ids=str)
def test_1024_requests_on_a_deep_tree(length: tuple[int, int], query_tokens: int) -> None:
    heads, rng = Heads(32, 8, 128), np.random.default_rng(0)
    parent = [-1, *((node - 1) // 2 for node in range(1, 2047))]
    leaf = rng.permutation(1024) + 1023
    forest = Forest.from_nodes(parent, rng.integers(*length, 2047), leaf)
    plan = plan_of(forest, heads, query_tokens=query_tokens)
    num_pages = len(forest.used_pages)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, query_tokens, num_pages)
    check(arrays, forest, plan, requests=(0, 500, 1023))


@pytest.mark.gpu
def test_one_request_with_a_long_context() -> None:
    heads, tokens = Heads(16, 1, 128), 120_003
    forest = Forest.from_nodes([-1], [tokens], [0], page_size=64)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=len(forest.used_pages))
    check(arrays, forest, plan_of(forest, heads))


@pytest.mark.gpu
def test_none_chooses_the_kernels_where_they_serve() -> None:
    forest = Forest.from_nodes([-1], [40], [0])
    query, pages = jnp.zeros((1, 1, 8, 128), jnp.bfloat16), jnp.zeros((4, 16, 2, 128), jnp.bfloat16)
    plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=128)
    assert "mosaic" in attend.lower(query, pages, pages, forest, plan).as_text()
    exact = [x.astype(jnp.float32) for x in (query, pages, pages)]
    assert "mosaic" not in attend.lower(*exact, forest, plan).as_text()
    with pytest.raises(ValueError, match="cannot serve: it takes bfloat16 or float16"):
        forest_attention(*exact, forest, plan, implementation="mosaic")
