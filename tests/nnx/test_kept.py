"""K and V of what many requests share, kept beside latents: texts stay those of the dense decoder."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, DOCUMENT, LONG, PAGE_SIZE, PROMPTS, QUESTIONS, Dense, assert_logits_follow, numbered
from engines import assert_alone, assert_no_page_leaked, greedy, make_engine, run
from flax import nnx
from latent_cases import CONFIG, mesh_of, sharp

from codec_jax import Window
from codec_jax.latent import reconstruct
from codec_jax.nnx import Decoder, DecoderConfig, Engine, Latent, Sampler, device, memory, sampler_device
from codec_jax.nnx.kept import pages_to_keep
from codec_jax.nnx.memory import pages_that_fit
from codec_jax.nnx.parallel import ALONE, Parallel

#: Programs of one layer compile in half of the time.
SMALL = replace(CONFIG, num_layers=1, mixture=None)
SIZES: dict[str, Any] = {"max_requests": 4, "num_pages": 64, "page_size": PAGE_SIZE, "max_context": CONTEXT, "steps": 8}


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense(sharp(SMALL))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages whose K and V are computed, in this order."""
    pages: list[int] = []
    for module in (device, sampler_device):

        def noted(model: Any, cache: Any, new: Any, places: Any, run: Any = module.reconstruct) -> Any:
            pages.extend(new.tolist())
            return run(model, cache, new, places)

        monkeypatch.setattr(module, "reconstruct", noted)
    return pages


def test_an_engine_says_the_same_while_requests_join_fork_leave_and_are_forgotten(
    dense: Dense, compilations: list[str], copied: list[int]
) -> None:
    engine = make_engine(dense.model, num_pages=32, max_requests=4, prefill_tokens=128, reconstructed_pages=24)
    compilations.clear()
    copied.clear()
    requests = [engine.submit(prompt, greedy(12)) for prompt in [*PROMPTS, LONG[:100], DOCUMENT]]
    while len(requests[0].tokens) < 6:
        engine.step()
    requests.append(engine.fork(requests[0], greedy(20)))
    engine.abort(requests[2])
    run(engine)
    assert engine.stats.reconstructed_pages == len(copied) == len(set(copied)) > 0
    # Documents, and texts about them that go on in two ways, take each other's pages, and the places of their copies.
    for first in range(0, 100, 25):
        requests += [engine.submit([*LONG[first : first + 40], *question], greedy(9)) for question in QUESTIONS]
        run(engine)
        text = [*requests[-1].prompt, *requests[-1].tokens]
        requests += [engine.submit([*text, token], greedy(5)) for token in (1, 2)]
        run(engine)
    assert len(copied) > 24
    engine.update_weights(sharp(SMALL, seed=1))
    assert engine.stats.reconstructed_pages == 0
    for prompt in PROMPTS:
        engine.submit(prompt, greedy(5))
    run(engine)
    engine.update_weights(dense.model)
    requests += [engine.submit(prompt, greedy(12)) for prompt in PROMPTS]
    run(engine)
    assert not compilations
    for request in requests:
        assert_alone(request, dense)
    assert len({tuple(request.tokens) for request in requests}) > 10
    assert_no_page_leaked(engine)


def test_a_sampler_says_the_same_and_computes_k_and_v_once(dense: Dense, copied: list[int]) -> None:
    sampler = Sampler(dense.model, **SIZES, reconstructed_pages=12)
    state, texts = sampler.start(PROMPTS), numbered(PROMPTS)
    tokens = int(state.forest.length.sum())

    def decode(state: Any, tokens: int) -> Any:
        state, generated = sampler.decode(state, tokens, temperature=0.0)
        for request, text in texts.items():
            assert generated.tokens[request] == dense.greedy(text, tokens)
            text += generated.tokens[request]
        return state

    state = decode(state, 9)
    assert state.traffic.kv_tokens_read >= 9 * tokens  # in whatever form
    forest = state.forest
    shared = {page for node in np.flatnonzero(forest.readers > 1) for page in forest.pages_of(node).tolist()}
    assert sorted(copied) == sorted(shared)
    program, before = sampler._device.decode_program(8).jitted, list(copied)
    assert program._cache_size() == 1
    state = sampler.prune(state, [3])
    texts.pop(3)
    state, forks = sampler.fork(state, [0])
    texts[forks[0]] = [*texts[0]]
    state = sampler.append(state, {forks[0]: [7, 8, 9]})
    texts[forks[0]] += [7, 8, 9]
    state, _ = sampler.peek(state, {0: [1, 2, 3]})
    state = decode(state, 20)
    assert_logits_follow(state, texts, dense)
    assert not {*copied[len(before) :]} & shared
    # K and V of a state that was begun before are those of the weights that they came from.
    sampler.update_weights(dense.model)
    copied.clear()
    decode(state, 8)
    assert {*copied} >= shared
    assert program._cache_size() == 1


def test_devices_that_divide_heads_keep_k_and_v_of_theirs_with_windows_and_softcaps(
    copied: list[int],
) -> None:
    config = replace(CONFIG, mixture=None, windows=(Window(45), None), softcap=4.0, window_rope_theta=50.0)
    dense = Dense(sharp(config))
    sampler = Sampler(dense.model, mesh=mesh_of(1, 2), **SIZES, reconstructed_pages=7)
    state = sampler.start(PROMPTS)
    state, generated = sampler.decode(state, 10, temperature=0.0)
    assert len(copied) == 7
    for pages in state.cache:
        kept = pages.reconstructed
        assert [shard.data.shape for shard in kept.key.addressable_shards] == [(7, PAGE_SIZE, 2, 20)] * 2
        assert [shard.data.shape for shard in kept.value.addressable_shards] == [(7, PAGE_SIZE, 2, 10)] * 2
    for request, text in numbered(PROMPTS).items():
        assert generated.tokens[request] == dense.greedy(text, 10)


def test_k_and_v_of_latents_in_float8_are_those_of_the_numbers_that_they_hold() -> None:
    config = replace(SMALL, latent=replace(SMALL.latent, size=128), head_dim=136, kv_dtype=jnp.float8_e4m3fn)
    attention, [pages] = sharp(config).blocks[0].attention, config.new_cache(6, PAGE_SIZE, 2)
    slots = 3 * PAGE_SIZE + np.arange(PAGE_SIZE)[None]
    pages = pages.write(slots, np.random.default_rng(0).normal(size=(1, PAGE_SIZE, 1, 136)))
    ids, places = np.array([3, 0]), np.array([1, 2])  # the second one is out of bounds
    kept = jax.jit(lambda pages: attention.reconstruct(pages, ids, places))(pages).reconstructed
    want = reconstruct(pages.rows(ids[:1]), attention.up_key[...], attention.up_value[...])
    assert np.abs(want.key).max() > 1
    for got, exact in ((kept.key, want.key), (kept.value, want.value)):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got[1], exact[0], rtol=1e-6, atol=1e-6)
        assert not got[0].any()


def test_pages_are_kept_by_default_where_rates_say_that_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Latent(size=512, nope_dim=128, rope_dim=64, value_dim=128)
    config = replace(CONFIG, num_q_heads=128, latent=sizes, head_dim=576, dtype=jnp.bfloat16)
    fitting = pages_that_fit(config, 16, gib=1.0)
    assert pages_to_keep(config, ALONE, 256, 1000, None) == 0
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: None)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    # K and V of 128 heads are 128 (128 + 64 + 128) / 576 times as large as a latent, and worth it from 43 readers on.
    kept = pages_to_keep(config, ALONE, 43, 1000, None)
    assert kept == int(0.25 * 1000 * 576 / (128 * 320))
    assert pages_to_keep(config, Parallel(tensor=8), 43, 1000, None) == int(0.25 * 1000 * 576 / (16 * 320))
    assert pages_to_keep(config, ALONE, 42, 1000, None) == pages_to_keep(config, Parallel(2, 2), 43, 1000, None) == 0
    assert pages_to_keep(config, ALONE, 256, 1000, 0) == 0
    assert pages_to_keep(config, ALONE, 1, 1000, 5) == 5
    # Both together take what latents alone would.
    assert pages_that_fit(config, 16, gib=1.0, max_requests=42) == fitting
    with_room = pages_that_fit(config, 16, gib=1.0, max_requests=43)
    kept = pages_to_keep(config, ALONE, 43, with_room, None)
    taken = with_room * config.kv_token_bytes + kept * config.reconstructed_token_bytes
    assert 0.99 < taken / (fitting * config.kv_token_bytes) <= 1.0
    # So they do where pages are asked for.
    beside = pages_that_fit(config, 16, gib=1.0, reconstructed_pages=100)
    taken = 16 * (beside * config.kv_token_bytes + 100 * config.reconstructed_token_bytes)
    assert 0.99 < taken / 2**30 <= 1.0


def test_an_engine_leaves_memory_for_pages_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DEFAULT_KV_GIB", 2e-3)
    model = Decoder(CONFIG, nnx.Rngs(0))
    sizes = {"max_requests": 2, "page_size": 16}
    without, engine = (Engine(model, reconstructed_pages=pages, **sizes) for pages in (0, 20))
    assert engine.max_context < without.max_context  # all that the pool holds
    taken = engine.max_context * CONFIG.kv_token_bytes + 20 * 16 * CONFIG.reconstructed_token_bytes
    assert 0.9 * 2e-3 * 2**30 < taken <= 2e-3 * 2**30


def test_pages_that_cannot_be_kept_are_refused() -> None:
    plain = Decoder(DecoderConfig(64, 32, 64, 1, 4, 2, 16), nnx.Rngs(0))
    for make in (Engine, Sampler):
        with pytest.raises(ValueError, match=r"^reconstructed_pages: expected 0 or None for a model without latent at"):
            make(plain, max_requests=4, num_pages=8, reconstructed_pages=1)
        with pytest.raises(ValueError, match=r"^reconstructed_pages: expected an integer of at least 0, got -1"):
            make(plain, max_requests=4, num_pages=8, reconstructed_pages=-1)
    with pytest.raises(ValueError, match=r"^reconstructed_pages: expected .* where 2 devices divide the pages, got 1"):
        pages_to_keep(CONFIG, Parallel(context=2), 4, 8, 1)
