"""Decoders whose heads one kernel splits: what it is given, and which decoders it serves.

Where there is no GPU, plain operations take the place of the kernel, which has tests of its own.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, PROMPTS, VOCAB, Dense, assert_logits_follow, numbered
from flax import nnx
from norm_calls import summed

from codec_jax import Forest, PagePool, Window, make_plan
from codec_jax.forest import KVPages
from codec_jax.nnx import Decoder, DecoderConfig, Sampler, head_sizes, head_split
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.rope import LinearScaling
from pallas_kernels.addends import Parts
from pallas_kernels.hopper import head_rows
from pallas_kernels.hopper.head_rows import HeadSizes, Places

CONFIG = DecoderConfig(
    64, 64, 64, num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=128, norm_plus_one=True, qkv_bias=True,
    windows=(Window(8), None), window_rope_theta=100.0, rope_scaling=LinearScaling(4.0),
)  # fmt: skip
HOPPER_GPU = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")


@pytest.fixture
def _hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_sizes.jax, "devices", lambda: [HOPPER_GPU])


def split_heads(columns: Parts, scales: Any, places: Places, sizes: HeadSizes) -> tuple[Any, Any, Any]:
    """What the kernel does, by means of the pages' own writing."""
    heads = summed(columns).reshape(columns.parts.shape[1], sizes.num_heads, sizes.head_dim)
    query, key, value = jnp.split(heads, [sizes.num_q_heads, sizes.num_q_heads + sizes.num_kv_heads], axis=1)

    def turned(x: Any, stored: Any) -> Any:
        assert sizes.norm is not None
        x = x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + sizes.norm.epsilon)
        left, right = jnp.split(x * sizes.norm.factors(stored)[None, None], 2, axis=2)
        cos, sin = places.cos[:, None], places.sin[:, None]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=2)

    pages = KVPages(places.key_pages, places.value_pages)
    pages = pages.write(places.slots[:, None], turned(key, scales[1])[:, None], value[:, None])
    return turned(query, scales[0]), pages.key, pages.value


def test_a_decoder_gives_the_same_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(1)
        return split_heads(*given)

    monkeypatch.setattr(head_rows, "split_heads", counted)
    # The kernel takes no float32, in which nothing but a mistake makes a difference.
    model = Decoder(replace(CONFIG, dtype=jnp.float32, param_dtype=jnp.float32), nnx.Rngs(0))
    forest = Forest.from_nodes([-1] + [0] * 5, [30, *range(1, 6)], list(range(1, 6)))
    forest, _ = forest.reserve(PagePool.create(16, forest.used_pages), 1)
    heads = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 128}
    plans = tuple(make_plan(forest, window=window, **heads) for window in CONFIG.windows_used)
    draw = iter(jax.random.split(jax.random.key(0), 100))
    cache = jax.tree.map(lambda x: jax.random.normal(next(draw), x.shape, x.dtype), model.new_cache(16, 16))
    tokens, store = np.arange(5)[:, None], np.asarray([[True]] * 4 + [[False]])

    def decode(is_served: bool) -> Any:
        monkeypatch.setattr(head_split, "serves", lambda *_: is_served)
        step = jax.jit(lambda *rest: model.decode(tokens, *rest, store=store, implementation="xla"))
        return step(cache, forest.extend(), plans)

    wanted, made = decode(False), decode(True)
    assert len(calls) == 2
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5), wanted, made)


def test_each_device_of_a_mesh_splits_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = set()

    def counted(columns: Parts, scales: Any, places: Places, sizes: HeadSizes) -> Any:
        heads.add((sizes.num_q_heads, sizes.num_kv_heads))
        return split_heads(columns, scales, places, sizes)

    monkeypatch.setattr(head_rows, "split_heads", counted)
    monkeypatch.setattr(head_split, "serves", lambda *_: True)
    changes = {"num_layers": 1, "num_q_heads": 4, "num_kv_heads": 2, "dtype": jnp.float32, "param_dtype": jnp.float32}
    whole = Dense(Decoder(replace(CONFIG, vocab_size=VOCAB, **changes), nnx.Rngs(0)))
    mesh = jax.make_mesh((2, 2), ("context", "tensor"), devices=jax.devices("cpu")[:4])
    sampler = Sampler(whole.model, mesh=mesh, max_requests=4, num_pages=32, page_size=8, max_context=CONTEXT, steps=2)
    state, texts = sampler.start(PROMPTS), numbered(PROMPTS)
    state, generated = sampler.decode(state, 2, temperature=0.0)
    for request, tokens in enumerate(generated.tokens):
        texts[request] += tokens
    assert_logits_follow(state, texts, whole)
    assert heads == {(2, 1)}


@pytest.mark.usefixtures("_hopper_gpu")
def test_it_serves_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert head_split.serves(CONFIG, ALONE, 16)
    assert head_split.serves(replace(CONFIG, dtype=jnp.float16, qk_norm=False), ALONE, 8192)
    assert all(head_split.serves(replace(CONFIG, head_dim=size), ALONE, 16) for size in (64, 256))
    assert not head_split.serves(CONFIG, ALONE, 3)
    for changes in (
        {"dtype": jnp.float32}, {"head_dim": 80}, {"head_dim": 192}, {"head_dim": 512}, {"qk_norm_over": "projection"},
        {"kv_dtype": jnp.float8_e4m3fn},
    ):  # fmt: skip
        assert not head_split.serves(replace(CONFIG, **changes), ALONE, 16), changes
    monkeypatch.setattr(head_sizes.jax, "devices", jax.local_devices)
    assert not head_split.serves(CONFIG, ALONE, 16)


@pytest.mark.usefixtures("_hopper_gpu")
def test_it_serves_devices_by_themselves_and_no_arrays_that_several_have() -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()[:2]).reshape(2, 1), ("context", "tensor"))
    served = {}

    def inside_of(*axes: str) -> bool:
        def look(x: jax.Array) -> jax.Array:
            served[axes] = head_split.serves(CONFIG, Parallel(context=2), 16)
            return x

        spec = jax.sharding.PartitionSpec()
        jax.jit(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={*axes}))(np.ones(1))
        return served[axes]

    assert inside_of("context", "tensor")
    assert not inside_of("context")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert not head_split.serves(CONFIG, ALONE, 16)
