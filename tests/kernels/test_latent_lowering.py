"""The Hopper kernels for latents on any machine: what they lower to for CUDA, and what they refuse."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from latent_calls import KEY, VALUE, attend_latents, latent_plan

from codec_jax import Forest, Window, make_plan
from codec_jax.attention import backends
from pallas_kernels import HOPPER, HOPPER_LATENT, Heads, Scores

ONE_BYTE = jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("q_heads", "query_tokens", "page_size", "dtype", "window", "softcap", "drafts"),
    [
        (128, 1, 64, jnp.bfloat16, Window(64, chunked=True), None, False),
        (20, 5, 8, jnp.float32, None, 30.0, True),
        (128, 2, 64, ONE_BYTE, Window(64), None, False),
    ],
)
def test_a_call_lowers_for_cuda_as_two_kernels_and_nothing_that_moves_latents(
    q_heads: int, query_tokens: int, page_size: int, dtype: Any, window: Any, softcap: float | None, drafts: bool
) -> None:
    requests = 5
    leaves = range(1, requests + 1)
    forest = Forest.from_nodes([-1, *[0] * requests], [200, *[40] * requests], leaves, page_size=page_size)
    plan = latent_plan(forest, q_heads, query_tokens=query_tokens, window=window)
    is_one_byte, tokens = dtype == ONE_BYTE, (64, plan.arrays.page_tokens, 1)
    query = jax.ShapeDtypeStruct((requests, query_tokens, q_heads, KEY), jnp.float32 if is_one_byte else dtype)
    pages = jax.ShapeDtypeStruct((*tokens, VALUE if is_one_byte else KEY), ONE_BYTE if is_one_byte else jnp.bfloat16)
    scales = jax.ShapeDtypeStruct((*tokens, 4), jnp.float32)
    rotated = jax.ShapeDtypeStruct((*tokens, KEY - VALUE), jnp.bfloat16)
    beside = (scales, rotated) if is_one_byte else (None, None)
    by_token = jax.ShapeDtypeStruct((plan.arrays.block_pages.shape[0], plan.arrays.block_tokens), jnp.int32)
    planes = (by_token,) * ((1 + (window is not None)) * drafts)
    attend = jax.jit(partial(attend_latents, softcap=softcap))
    lowered = attend.trace(query, pages, forest, plan, planes, beside).lower(lowering_platforms=("cuda",))
    assert (lowered.out_info.shape, lowered.out_info.dtype) == ((*query.shape[:3], VALUE), query.dtype)
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    assert is_one_byte or "stablehlo.slice" not in text  # of the query
    assert "stablehlo.transpose" not in text


ONE_BYTE_LATENTS = {"kv_dtype": jnp.dtype(ONE_BYTE), "query_dtype": jnp.dtype(jnp.float32), "rotated_beside": 64}
DEVICE = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a test's device", core_count=132)
LATENTS = {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": KEY, "value_head_dim": VALUE, "values_in_keys": True}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"query_dtype": jnp.dtype(jnp.float16), "kv_dtype": jnp.dtype(jnp.float16)}, None),
        ({"query_dtype": jnp.dtype(jnp.float32)}, None),
        ({"query_dtype": jnp.dtype(jnp.float16)}, "same or of float32, got bfloat16 and float16"),
        ({"kv_dtype": jnp.dtype(jnp.float32), "query_dtype": jnp.dtype(jnp.float32)}, "got float32 and float32"),
        ({"kv_dtype": jnp.dtype(ONE_BYTE)}, "bfloat16 or float16, .*`LatentPages` .*, got float8_e4m3fn and bfloat16"),
        (ONE_BYTE_LATENTS, None),
        (ONE_BYTE_LATENTS | {"rotated_beside": 32}, "and 64 numbers of rotated keys, got float8_e4m3fn and 32"),
        (
            ONE_BYTE_LATENTS | {"kv_dtype": jnp.dtype(jnp.float8_e5m2)},
            "it takes float8_e4m3fn and 64 .* got float8_e5m2",
        ),
        (ONE_BYTE_LATENTS | {"value_head_dim": 384}, "with value_head_dim=512.*, and values of 384"),
        ({"num_kv_heads": 2}, r"1 kv head of 576 .* got 2 of 576, and values of 512 in the same pages"),
        ({"value_head_dim": KEY}, r"with value_head_dim=512\), got 1 of 576, and values of 576 in the same pages"),
        ({"values_in_keys": False}, r"value_pages=None.*, and values of 512 in pages of their own"),
        ({"lanes": 2}, "it takes plans of 64 rows a tile, 1 lane and blocks of 64 tokens, got .* 2 lanes"),
        ({"block_tokens": 128}, "blocks of 64 tokens, got .* blocks of 128 tokens"),
    ],
    ids=str,
)
def test_why_not_names_what_the_kernels_do_not_take(changed: dict[str, Any], reason: str | None) -> None:
    options = {name: changed[name] for name in ("lanes", "block_tokens") if name in changed}
    heads = Heads(**(LATENTS | {name: x for name, x in changed.items() if name not in options}))
    plan = latent_plan(Forest.from_nodes([-1], [40], [0]), 128, **options)
    got = HOPPER_LATENT.why_not(heads, DEVICE, None, plan.arrays)
    assert got is None if reason is None else re.search(reason, got)


def test_other_kernels_do_not_take_values_in_keys_and_these_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [DEVICE])
    heads, scores = Heads(**LATENTS), Scores(0.1)
    plan = latent_plan(Forest.from_nodes([-1], [40], [0]), 128).arrays
    for name in ("mosaic", None):
        assert backends.choose(name, heads, scores, plan) is HOPPER_LATENT
    with pytest.raises(ValueError, match=r"^implementation: 'mosaic' cannot serve: .*; or of latents .*; pass 'xla'"):
        backends.choose("mosaic", Heads(**LATENTS | {"num_kv_heads": 2}), scores, plan)
    for head_dim in (64, 128):
        assert "pages of their own" in HOPPER.why_not(Heads(8, 1, head_dim, head_dim, values_in_keys=True), DEVICE)
    assert "Hopper GPU" in HOPPER_LATENT.why_not(heads, SimpleNamespace(platform="cpu", device_kind="cpu"))
    sizes = {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": KEY}
    by_default = make_plan(Forest.from_nodes([-1], [40], [0]), **sizes, value_head_dim=VALUE).arrays
    assert HOPPER_LATENT.why_not(heads, DEVICE, scores, by_default) is None
    assert "a scale of 0 or more" in HOPPER_LATENT.why_not(heads, DEVICE, Scores(-1.0))


def test_plans_of_reconstructed_heads_suit_the_kernels_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values are shorter than keys, too, but have pages of their own."""
    monkeypatch.setattr(jax, "devices", lambda: [DEVICE])
    sizes = {"num_q_heads": 128, "num_kv_heads": 128, "head_dim": 192, "value_head_dim": 128}
    plan = make_plan(Forest.from_nodes([-1], [40], [0]), **sizes).arrays
    assert backends.choose(None, Heads(*sizes.values()), Scores(0.1), plan) is HOPPER
