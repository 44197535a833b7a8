"""Decoders whose products leave their sums in parts: how many, which decoders, and that they give the same.

Where there is no GPU, plain operations take the place of the kernels, which have tests of their own.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from norm_calls import add_and_norm, summed, with_random_biases, with_random_norms

from codec_jax import Forest, PagePool, make_plan
from codec_jax.nnx import Decoder, DecoderConfig, expert_products, head_split, parts
from codec_jax.nnx.decoder_config import Mixture
from codec_jax.nnx.parallel import ALONE, Parallel
from pallas_kernels.addends import Parts, Shares
from pallas_kernels.hopper import add_norm, choose, head_rows
from pallas_kernels.hopper.head_rows import HeadSizes, Places

CONFIG = DecoderConfig(
    64, 128, 64, num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=64, dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip
HOPPER_GPU = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")


@given(st.integers(1, 40_000), st.integers(1, 300_000), st.integers(1, 5_000))
def test_parts_divide_the_depth_and_cost_little(depth: int, columns: int, rows: int) -> None:
    count = parts.number_of_parts(depth, columns, rows)
    assert count == 1 or count * columns <= 8 * 5120
    assert count in (1, 2, 4, 8)
    assert depth % count == 0
    if count > 1:
        written_and_read, weights = 2 * 4 * count * rows * columns, 2 * depth * columns
        assert written_and_read <= weights / 4
        assert depth // count >= 512


@pytest.mark.parametrize(
    ("depth", "columns", "rows", "count"),
    [
        (2560, 6144, 16, 4), (4096, 2560, 16, 8), (9728, 2560, 16, 8), (2560, 6144, 64, 2), (4096, 2560, 64, 4),
        (5120, 10240, 16, 2), (8192, 5120, 64, 4), (2560, 151_936, 16, 1), (4096, 2560, 65, 1), (4095, 64, 1, 1),
    ],
)  # fmt: skip
def test_few_columns_have_more_parts(depth: int, columns: int, rows: int, count: int) -> None:
    assert parts.number_of_parts(depth, columns, rows) == count


def test_a_product_of_another_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "serves", lambda *_: True)
    monkeypatch.setattr(parts, "number_of_parts", lambda *_: 2)
    with_lora = nnx.LoRALinear(64, 32, lora_rank=4, use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 1, 64))
    np.testing.assert_array_equal(parts.multiply(CONFIG, ALONE, with_lora, x), with_lora(x))
    plain = nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
    left = parts.multiply(CONFIG, ALONE, plain, x)
    assert left.parts.shape == (2, 3, 1, 32)
    np.testing.assert_allclose(summed(left), plain(x), atol=1e-5)


@given(st.integers(1, 300).map(lambda n: 8 * n), st.sampled_from([32, 128, 512]), st.integers(1, 600), st.booleans())
@settings(max_examples=20)
def test_scores_of_a_router_are_in_parts_that_registers_have_room_for(
    depth: int, num_experts: int, tokens: int, bias: bool
) -> None:
    router = nnx.Linear(depth, num_experts, use_bias=bias, rngs=nnx.Rngs(0))
    if bias:
        router.bias[...] = jnp.arange(num_experts, dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(depth), (tokens, depth))
    left = parts.router_scores(router, x)
    np.testing.assert_allclose(summed(left), router(x), atol=1e-4, rtol=1e-5)
    count = len(left.parts)
    assert count == 1 or (count * num_experts <= 4096 and count * num_experts * tokens <= 1 << 18)


def test_a_router_of_another_kind_is_left_whole() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 1024))
    plain = nnx.Linear(1024, 32, rngs=nnx.Rngs(0))
    assert len(parts.router_scores(plain, x).parts) > 1
    for router in (
        nnx.LoRALinear(1024, 32, lora_rank=4, rngs=nnx.Rngs(0)),
        nnx.LoRA(1024, 4, 32, base_module=plain, rngs=nnx.Rngs(0)),
    ):
        np.testing.assert_array_equal(parts.router_scores(router, x).parts[0], router(x))


def split_heads(columns: Parts, scales: Any, places: Places, sizes: HeadSizes) -> Any:
    """What the kernel does to the columns; norm, rotation and pages are in other tests."""
    heads = summed(columns).reshape(columns.parts.shape[1], sizes.num_heads, sizes.head_dim)
    return heads[:, : sizes.num_q_heads], places.key_pages, places.value_pages


@pytest.mark.parametrize(
    ("changes", "sums", "columns"),
    [
        ({}, 4, 2),  # after attention and MLP of two layers
        ({"qkv_bias": True, "qk_norm": False}, 4, 2),
        ({"out_bias": True}, 4, 2),
        ({"norm_placement": "both", "norm_plus_one": True}, 4, 2),
        ({"norm_placement": "after"}, 4, 2),
        ({"mixture": Mixture(num_experts=16, experts_per_token=2, expert_size=32, bias=True)}, 4, 2),
        ({"mixture": Mixture(num_experts=16, experts_per_token=2, expert_size=32, shared_size=32)}, 2, 2),
    ],
    ids=str,
)
def test_a_decoder_gives_the_same_in_parts(
    changes: dict, sums: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"sums": 0, "columns": 0}

    def counted_sums(x: Any, update: Any, *rest: Any) -> Any:
        calls["sums"] += 1
        assert isinstance(update, Shares) or len(update.parts) == 2
        assert jax.tree.leaves(update)[0].dtype == jnp.float32
        return add_and_norm(x, summed(update), *rest)

    def counted_columns(given: Any, *rest: Any) -> Any:
        calls["columns"] += len(given.parts) == 2
        return split_heads(given, *rest)

    def choose_experts(scores: Any, dtype: Any, *, chosen: int, normalised: bool) -> Any:
        assert normalised
        greatest, expert = jax.lax.top_k(summed(scores), chosen)
        return expert, jax.nn.softmax(greatest, axis=-1)

    monkeypatch.setattr(add_norm, "add_and_norm", counted_sums)
    monkeypatch.setattr(head_rows, "split_heads", counted_columns)
    monkeypatch.setattr(head_split, "serves", lambda *_: True)
    monkeypatch.setattr(parts, "number_of_parts", lambda *_: 2)
    monkeypatch.setattr(expert_products, "_TILE_ROWS", 1)  # so that so few tokens have rows of their own
    monkeypatch.setattr(choose, "choose", choose_experts)
    config = replace(CONFIG, **changes)
    model = with_random_biases(with_random_norms(Decoder(config, nnx.Rngs(0))))
    forest = Forest.from_nodes([-1] + [0] * 5, [30, *range(1, 6)], list(range(1, 6)))
    forest, _ = forest.reserve(PagePool.create(16, forest.used_pages), 1)
    plan = make_plan(forest, num_q_heads=2, num_kv_heads=1, head_dim=64)
    draw = iter(jax.random.split(jax.random.key(0), 100))
    cache = jax.tree.map(lambda x: jax.random.normal(next(draw), x.shape, x.dtype), model.new_cache(16, 16))

    def decode(in_parts: bool) -> Any:
        monkeypatch.setattr(parts, "serves", lambda *_: in_parts)
        monkeypatch.setattr(choose, "why_not", lambda *_: None if in_parts else "not now")
        step = jax.jit(lambda *rest: model.decode(np.arange(5)[:, None], *rest, implementation="xla"))
        return step(cache, forest.extend(), plan)[0]

    wanted = decode(False)
    assert calls == {"sums": 0, "columns": 0}
    np.testing.assert_allclose(decode(True), wanted, atol=2e-5, rtol=2e-5)
    assert calls == {"sums": sums, "columns": columns}


def test_it_serves_one_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, dtype=jnp.bfloat16)
    assert not parts.serves(config, ALONE)
    monkeypatch.setattr(parts.jax, "devices", lambda: [HOPPER_GPU])
    assert parts.serves(config, ALONE)
    assert not parts.serves(config, Parallel(tensor=2))
    assert not parts.serves(CONFIG, ALONE)
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with jax.sharding.use_abstract_mesh(mesh):  # of arrays that XLA divides among devices
        assert not parts.serves(config, ALONE)
