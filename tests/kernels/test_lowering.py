"""The Hopper kernels on any machine: what they lower to for CUDA, and what they refuse."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from kernel_calls import CONFIGS, PADDED_CONFIGS, Heads, attend_hopper, plan_of

from codec_jax import Forest, Window, make_plan
from codec_jax.attention import forest_attention
from codec_jax.attention.backends import choose
from pallas_kernels import HOPPER, Scores
from pallas_kernels import Heads as AllHeads
from pallas_kernels.compat import MIXES_EIGHT_BITS


class Call(NamedTuple):
    """One call of the kernels: shapes, and the block that the planner is told to use."""

    heads: Heads
    block_tokens: int
    page_size: int = 16
    requests: int = 9
    query_tokens: int = 1


WITH_MIXED_BITS = pytest.mark.skipif(not MIXES_EIGHT_BITS, reason="wgmma of both kinds of 8 bits takes JAX 0.11")
ONE_TILE = [Call(heads, block, requests=3) for heads, block in [*CONFIGS, PADDED_CONFIGS[0]]]
SEVERAL_TILES = [Call(heads, block, requests=21, query_tokens=4) for heads, block in [*CONFIGS, PADDED_CONFIGS[1]]]
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
    Call(Heads(71, 1, 72), 128, page_size=8, requests=2),
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
    keys, values = (
        jax.ShapeDtypeStruct((64, plan.arrays.page_tokens, heads.kv, size), dtype)
        for size in (heads.dim, heads.value_dim)
    )

    lowered = jax.jit(attend_hopper).trace(query, keys, values, forest, plan).lower(lowering_platforms=("cuda",))
    assert (lowered.out_info.shape, lowered.out_info.dtype) == ((*query.shape[:3], heads.value_dim), dtype)
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    assert "stablehlo.transpose" not in text
    assert "stablehlo.gather" not in text


def test_heads_of_512_lower_for_cuda_and_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, forest = Heads(16, 2, 512), Forest.from_nodes([-1, 0], [200, 40], [1] * 9, page_size=64)
    plan = plan_of(forest, heads, query_tokens=5, window=1024)
    query = jax.ShapeDtypeStruct((9, 5, heads.q, 512), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((64, plan.arrays.page_tokens, heads.kv, 512), jnp.bfloat16)
    lowered = jax.jit(attend_hopper).trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a test's device", core_count=132)
    monkeypatch.setattr(jax, "devices", lambda: [hopper])
    wanted, scores = AllHeads(heads.q, heads.kv, 512, 512), Scores(0.1)
    sizes = {"num_q_heads": heads.q, "num_kv_heads": heads.kv, "head_dim": 512}
    for made in (plan, make_plan(forest, **sizes)):
        assert choose(None, wanted, scores, made.arrays) is HOPPER
    one_byte = AllHeads(heads.q, heads.kv, 512, 512, kv_dtype=jnp.dtype(jnp.float8_e4m3fn))
    assert "it takes head sizes 64, 128, 256, got 512" in HOPPER.why_not(one_byte, hopper)


@pytest.mark.parametrize(
    ("heads", "block_tokens", "kv_dtype"),
    [
        *((*config, jnp.float8_e4m3fn) for config in CONFIGS if config[0].values is None),
        pytest.param(*CONFIGS[-1], jnp.float8_e5m2, marks=WITH_MIXED_BITS),
    ],
)
def test_pages_of_one_byte_lower_for_cuda_as_two_kernels_and_nothing_else(
    heads: Heads, block_tokens: int, kv_dtype: Any
) -> None:
    forest = Forest.from_nodes([-1, 0], [200, 40], [1] * 9)
    plan = plan_of(forest, heads, block_tokens=block_tokens)
    query = jax.ShapeDtypeStruct((9, 1, heads.q, heads.dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((64, plan.arrays.page_tokens, heads.kv, heads.dim), kv_dtype)
    scales = (jax.ShapeDtypeStruct((heads.kv,), jnp.float32),) * 2
    by_token = (jax.ShapeDtypeStruct((32, heads.kv, 2 * plan.arrays.page_tokens), jnp.float32),) * 2
    for given in ((None, None), scales, by_token):
        traced = jax.jit(attend_hopper).trace(query, pages, pages, forest, plan, scales=given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
        assert not re.search(r"stablehlo\.(convert|multiply|reduce).*x(bf16|f32|f8)", text)


def test_calls_of_a_step_that_differ_only_in_their_arrays_are_lowered_once() -> None:
    heads, forest = Heads(8, 2, 128), Forest.from_nodes([-1, 0], [200, 40], [1])
    plan = plan_of(forest, heads, block_tokens=128)
    query = jax.ShapeDtypeStruct((1, 1, heads.q, heads.dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((64, plan.arrays.page_tokens, heads.kv, heads.dim), jnp.bfloat16)

    def layers(query: jax.Array, *arguments: Any) -> jax.Array:
        for _ in range(3):
            query = attend_hopper(query, *arguments)
        return query

    lowered = jax.jit(layers).trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


def test_draft_trees_lower_for_cuda_as_two_kernels() -> None:
    heads, tokens, requests = Heads(32, 8, 128), 9, 5
    forest = Forest.from_nodes([-1, *[0] * requests], [200, *[40] * requests], range(1, requests + 1))
    query = jax.ShapeDtypeStruct((requests, tokens, heads.q, heads.dim), jnp.bfloat16)
    for block_tokens, window in ((64, None), (128, None), (128, 1024)):
        plan = plan_of(forest, heads, query_tokens=tokens, block_tokens=block_tokens, window=window)
        pages = jax.ShapeDtypeStruct((64, plan.arrays.page_tokens, heads.kv, heads.dim), jnp.bfloat16)
        by_token = jax.ShapeDtypeStruct((plan.arrays.block_pages.shape[0], block_tokens), jnp.int32)

        planes = [by_token] if window is None else [by_token] * 2
        traced = jax.jit(attend_hopper).trace(query, pages, pages, forest, plan, *planes)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("config", "window", "softcap", "tokens"),
    [
        (CONFIGS[0], 1024, None, 1),
        (CONFIGS[1], None, 50.0, 1),
        (CONFIGS[2], Window(64, chunked=True), 30.0, 4),
        (CONFIGS[-1], 100, 50.0, 1),
        (PADDED_CONFIGS[0], 100, 50.0, 4),
    ],
    ids=["a window", "a cap", "both, several tokens", "both", "both, padded heads"],
)
def test_windows_and_caps_lower_for_cuda_as_two_kernels(
    config: tuple[Heads, int], window: Any, softcap: float | None, tokens: int
) -> None:
    heads, block_tokens = config
    forest = Forest.from_nodes([-1, 0], [200, 40], [1] * 9)
    plan = plan_of(forest, heads, query_tokens=tokens, block_tokens=block_tokens, window=window)
    query = jax.ShapeDtypeStruct((9, tokens, heads.q, heads.dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((64, plan.arrays.page_tokens, heads.kv, heads.dim), jnp.bfloat16)
    attend = jax.jit(partial(attend_hopper, softcap=softcap))
    text = attend.trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


# --- What is refused --------------------------------------------------------------------------------------------


def device(platform: str = "gpu", capability: str = "9.0") -> SimpleNamespace:
    return SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind="a test's device", core_count=132
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        *(({"head_dim": size}, None) for size in (64, 72, 96, 112, 120)),
        ({"block_tokens": 64}, None),
        ({"page_size": 256}, None),
        ({"pages": jnp.float8_e4m3fn}, None),
        ({"pages": jnp.float8_e5m2}, None if MIXES_EIGHT_BITS else "with float8_e5m2 it takes JAX 0.11 or later, got"),
        (
            {"device": device(capability="8.0")},
            r"it needs a Hopper GPU \(sm_90\), the default device is a test's device",
        ),
        ({"device": device(capability="10.0")}, "it needs a Hopper GPU"),
        ({"device": device("cpu")}, "it needs a Hopper GPU"),
        (
            {"query": jnp.float32},
            r"the same for all, or float8_e4m3fn or .* for keys and values, got float32 and bfloat16",
        ),
        ({"pages": jnp.float16}, r"it takes bfloat16 or float16, .*, got bfloat16 and float16"),
        (
            {"head_dim": 100},
            "it takes head sizes 64, 72, 80, 88, 96, 104, 112, 120, 128, 256, 512, 192 with values of 128, got 100$",
        ),
        ({"head_dim": 136}, "got 136$"),
        ({"head_dim": 96, "value_head_dim": 112}, "got 96 with values of 112$"),
        ({"head_dim": 96, "pages": jnp.float8_e4m3fn}, "it takes head sizes 64, 128, 256, got 96$"),
        ({"value_head_dim": 64}, "got 128 with values of 64$"),
        ({"lanes": 1}, "it takes plans of 64 rows a tile, 2 lanes and blocks of 64 or 128 tokens, got .* 1 lanes"),
        ({"tile_rows": 16}, "it takes plans of 64 rows a tile, .*, got 16 rows"),
        ({"block_tokens": 256}, "blocks of 64 or 128 tokens, got .* blocks of 256 tokens"),
        ({"head_dim": 256, "block_tokens": 128}, "blocks of 64 tokens, got .* blocks of 128 tokens"),
    ],
    ids=str,
)
def test_why_not_names_what_the_kernels_do_not_take(changed: dict[str, Any], reason: str | None) -> None:
    options = dict(changed)
    head_dim, page_size = options.pop("head_dim", 128), options.pop("page_size", 16)
    default_device = options.pop("device", device())
    query = jax.ShapeDtypeStruct((1, 1, 8, head_dim), options.pop("query", jnp.bfloat16))
    pages = jax.ShapeDtypeStruct((64, page_size, 2, head_dim), options.pop("pages", jnp.bfloat16))
    values = jax.ShapeDtypeStruct((*pages.shape[:3], options.pop("value_head_dim", head_dim)), pages.dtype)
    forest = Forest.from_nodes([-1], [40], [0], page_size=page_size)
    plan = plan_of(forest, Heads(8, 2, head_dim), **options)
    got = HOPPER.why_not(AllHeads.of(query, pages, values), default_device, None, plan.arrays)
    assert got is None if reason is None else re.search(reason, got)


def test_why_not_names_a_negative_scale() -> None:
    assert HOPPER.why_not(AllHeads(8, 2, 128, 128), device(), Scores(-0.1)) == "it takes a scale of 0 or more, got -0.1"


def test_scores_so_small_that_a_mask_would_not_show_are_refused() -> None:
    def got(*scores: float) -> str | None:
        return HOPPER.why_not(AllHeads(8, 2, 128, 128), device(), Scores(*scores))

    assert got(0.0) == "it takes a scale of 1e-09 or more, got 0.0"
    assert got(1e-12) == "it takes a scale of 1e-09 or more, got 1e-12"
    assert got(0.125, 1e-30) == "it takes a softcap of 1e-09 or more, got 1e-30"
    assert got(1e-9) is got(0.0, 1e-9) is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says why there is no Hopper GPU; here may be one")
def test_without_a_hopper_gpu_the_reason_is_the_device() -> None:
    forest = Forest.from_nodes([-1], [20], [0])
    query, pages = jnp.zeros((1, 1, 8, 64), jnp.bfloat16), jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    plan = plan_of(forest, Heads(8, 2, 64))
    with pytest.raises(ValueError, match=r"implementation: 'mosaic' cannot serve: .*Hopper.*'xla'"):
        forest_attention(query, pages, pages, forest, plan, implementation="mosaic")
