"""Variants of the decoder over forests, against its own dense path, which test_families.py compares with transformers.

Windows, sinks, caps, biases, norms on both sides and experts, together: in an engine, and divided among devices.
"""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, DOCUMENT, LONG, PROMPTS, VOCAB, Dense, assert_logits_follow, numbered
from engines import assert_alone, assert_no_page_leaked, greedy, make_engine, run
from flax import nnx

from codec_jax import Forest, Window, make_plan
from codec_jax.nnx import (
    Decoder,
    DecoderConfig,
    LinearScaling,
    Mixture,
    PlacedDecoder,
    Sampler,
    YarnScaling,
    intervals,
    random_decoder,
)
from codec_jax.nnx.experts import Experts

CONFIG = DecoderConfig(
    VOCAB, 32, 48, num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=8, rope_theta=1000.0,
    rope_scaling=YarnScaling(4.0, 40, 1.1, 4.0), window_rope_theta=100.0, windows=(Window(13), None), softcap=4.0,
    logit_softcap=20.0, scale=0.4, sinks=True, qkv_bias=True, out_bias=True, norm_placement="both", norm_plus_one=True,
    embedding_scale=1.5, activation="gelu_tanh", dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip
EXPERTS = replace(CONFIG, mixture=Mixture(5, 2, 24, bias=True, dense_layers=(1,)), activation="clamped")
OLMO = replace(
    CONFIG, qk_norm_over="projection", norm_placement="after", norm_plus_one=False, qkv_bias=False, sinks=False,
    windows=(Window(16, chunked=True), Window(9)),
)  # fmt: skip


def sharp(config: DecoderConfig) -> Decoder:
    """Weights with sharp attention and texts that do not repeat, in which norms, biases and sinks count."""
    graph, weights = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def draw(x: jax.Array) -> jax.Array:
        wide = rng.normal(size=x.shape) * 2 * x.shape[-2] ** -0.5 if x.ndim > 1 else rng.uniform(-0.5, 0.5, x.shape)
        return jnp.asarray(wide, x.dtype)

    return nnx.merge(graph, jax.tree.map(draw, weights))


def test_an_engine_with_windows_sinks_and_experts_says_what_the_dense_decoder_says(compilations: list[str]) -> None:
    dense = Dense(sharp(EXPERTS))
    engine = make_engine(dense.model, num_pages=96, max_requests=4, prefill_tokens=128)
    compilations.clear()
    requests = [engine.submit(prompt, greedy(12)) for prompt in [LONG[:100], *PROMPTS, DOCUMENT]]
    while len(requests[1].tokens) < 6:
        engine.step()
    requests.append(engine.fork(requests[1], greedy(20)))
    run(engine)
    assert not compilations
    for request in requests:
        assert_alone(request, dense)
    assert len({tuple(request.tokens) for request in requests}) > 3
    assert_no_page_leaked(engine)


@pytest.mark.parametrize(
    ("config", "context", "tensor"),
    [(replace(EXPERTS, mixture=replace(EXPERTS.mixture, num_experts=8)), 2, 2), (OLMO, 2, 1)],
    ids=["experts, 2 x 2", "norms over all heads, 2 x 1"],
)
def test_a_sampler_on_a_mesh_says_what_the_whole_decoder_says(config: DecoderConfig, context: int, tensor: int) -> None:
    dense = Dense(sharp(config))
    devices = jax.devices("cpu")[: context * tensor]
    mesh = jax.make_mesh((context, tensor), ("context", "tensor"), devices=devices)
    sampler = Sampler(dense.model, mesh=mesh, max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT, steps=8)
    state, texts = sampler.start(PROMPTS), numbered(PROMPTS)
    assert_logits_follow(state, texts, dense)
    state, generated = sampler.decode(state, 12, temperature=0.0)
    for request, text in texts.items():
        assert generated.tokens[request] == dense.greedy(text, 12)


@pytest.mark.parametrize("config", [EXPERTS, replace(OLMO, num_layers=1)], ids=["experts", "norms over all heads"])
def test_bfloat16_is_close_to_float32(config: DecoderConfig) -> None:
    graph, weights = nnx.split(sharp(replace(config, softcap=50.0, logit_softcap=None)))
    rounded = jax.tree.map(lambda x: (0.3 * x).astype(jnp.bfloat16), weights)
    exact = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    low = nnx.merge(
        nnx.graphdef(Decoder(replace(exact.config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), nnx.Rngs(0))), rounded
    )
    want = np.stack([Dense(exact).logits(prompt) for prompt in PROMPTS[:2]])
    state = Sampler(low, max_requests=2, num_pages=32, page_size=8, max_context=CONTEXT).start(PROMPTS[:2])
    for got in (state.logits, np.stack([Dense(low).logits(prompt) for prompt in PROMPTS[:2]])):
        assert np.abs(got - want).mean() < 0.03 * want.std()


@pytest.mark.parametrize("scales", [None, "token"])
def test_a_cache_of_one_byte_a_number_is_close_and_half_as_large(
    scales: Any, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(
        intervals, "make_plan", lambda *args, **options: planned.append(make_plan(*args, **options)) or planned[-1]
    )
    config = replace(CONFIG, kv_dtype=jnp.float8_e4m3fn, kv_scales=scales)
    dense, low = (Dense(sharp(each)) for each in (CONFIG, config))  # of the same weights
    cache = low.model.new_cache(4, 8)
    assert cache[0].key.nbytes * 4 == dense.model.new_cache(4, 8)[0].key.nbytes
    state = Sampler(low.model, max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT).start(PROMPTS)
    want = np.stack([dense.logits(prompt) for prompt in PROMPTS])
    apart, of_sampler = np.abs(np.asarray(state.logits) - want).mean() / want.std(), len(planned)
    assert 1e-4 < apart < 0.1  # as rounding to 4 bits makes it, of numbers that are averaged
    engine = make_engine(low.model, num_pages=96, max_requests=4, prefill_tokens=128)
    compilations.clear()
    request = engine.generate([PROMPTS[0]], greedy(6))[0]
    assert len(request.tokens) == 6
    assert not compilations
    assert all(pages.quantisation.saturated.tolist() == [0] for pages in engine._device._pages)
    assert 0 < of_sampler < len(planned)
    assert {plan.heads.kv_dtype for plan in planned} == {jnp.dtype(jnp.float8_e4m3fn)}


def test_a_cache_with_scales_by_token_holds_numbers_that_others_cannot_on_devices_that_divide_it() -> None:
    config = replace(CONFIG, kv_dtype=jnp.float8_e4m3fn, kv_scales="token")
    graph, weights = nnx.split(sharp(config))
    scaled = jax.tree.map(lambda x: 3000 * x if x.shape == (96,) else x, weights)  # biases of queries, keys and values
    model, exact = nnx.merge(graph, scaled), nnx.merge(nnx.split(sharp(CONFIG))[0], scaled)
    mesh = jax.make_mesh((2, 2), ("context", "tensor"), devices=jax.devices("cpu")[:4])
    options = {"max_requests": 4, "num_pages": 64, "page_size": 8, "max_context": CONTEXT}
    divided, alone = (Sampler(model, mesh=each, **options).start(PROMPTS) for each in (mesh, None))
    np.testing.assert_allclose(divided.logits, alone.logits, atol=1e-3, rtol=1e-3)
    want = np.stack([Dense(exact).logits(prompt) for prompt in PROMPTS])
    assert np.abs(np.asarray(alone.logits) - want).mean() < 0.1 * want.std()
    assert not any(pages.quantisation.saturated.any() for pages in (*divided.cache, *alone.cache))


def test_a_cache_of_one_byte_a_number_is_divided_among_devices_and_each_counts() -> None:
    graph, weights = nnx.split(sharp(replace(CONFIG, kv_dtype=jnp.float8_e4m3fn)))
    scaled = jax.tree.map(lambda x: 3000 * x if x.shape == (96,) else x, weights)  # biases of queries, keys and values
    model = nnx.merge(graph, scaled)
    mesh = jax.make_mesh((2, 2), ("context", "tensor"), devices=jax.devices("cpu")[:4])
    options = {"max_requests": 4, "num_pages": 64, "page_size": 8, "max_context": CONTEXT}
    divided, alone = (Sampler(model, mesh=each, **options).start(PROMPTS) for each in (mesh, None))
    np.testing.assert_allclose(divided.logits, alone.logits, atol=1e-3, rtol=1e-3)
    for parts, whole in zip(divided.cache, alone.cache, strict=True):
        counts = parts.quantisation.saturated
        assert counts.shape == (4,)
        assert counts.sum() == whole.quantisation.saturated.sum() > 0


def fails(device: Any) -> Any:
    """A step that ends with an error, and without the arrays that it was given."""

    def run(*_: Any) -> None:
        for array in jax.tree.leaves(device._pages):
            array.delete()
        raise RuntimeError("on purpose")

    return run


@pytest.mark.parametrize("devices", [1, 4])
def test_an_engine_says_how_many_numbers_were_too_large(devices: int) -> None:
    graph, weights = nnx.split(sharp(replace(CONFIG, kv_dtype=jnp.float8_e4m3fn)))
    model = nnx.merge(graph, jax.tree.map(lambda x: 3000 * x if x.shape == (96,) else x, weights))
    mesh = jax.make_mesh((2, 2), ("context", "tensor"), devices=jax.devices("cpu")[:4]) if devices == 4 else None
    engine = make_engine(model, mesh=mesh, num_pages=96, max_requests=4, prefill_tokens=128)
    assert engine.stats.saturated == 0
    engine.submit(PROMPTS[0], greedy(1))
    run(engine)
    sampler = Sampler(model, max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT)
    stored = [pages.quantisation.saturated.sum() for pages in sampler.start(PROMPTS[:1]).cache]
    count = sum(map(int, stored))
    assert engine.stats.saturated == count > 0
    # A step fails, and takes the arrays with it: what was counted is not forgotten, and the prompt is computed again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._device, "_run", fails(engine._device))
        engine.submit(PROMPTS[0], greedy(1))
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.step()
    assert engine.stats.saturated == count
    run(engine)
    assert engine.stats.saturated == 2 * count
    plain = make_engine(sharp(CONFIG), num_pages=96, max_requests=4, prefill_tokens=128)
    assert plain.stats.saturated == 0


def exact_experts(experts: Experts, x: np.ndarray) -> np.ndarray:
    """Token by token in float64."""

    def exact(weight: nnx.Variable) -> np.ndarray:
        return np.asarray(weight[...], np.float64)

    mixture, out = experts.mixture, np.zeros(x.shape)
    for t, token in enumerate(x.astype(np.float64)):
        logits = token @ exact(experts.router.kernel)
        shares = np.exp(logits - logits.max())
        chosen = np.argsort(-shares)[: mixture.experts_per_token]
        weights = shares[chosen] / (shares[chosen] if mixture.normalised else shares).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = np.split(token @ exact(experts.gate_up)[expert], 2)
            out[t] += weight * (gate / (1 + np.exp(-gate)) * up @ exact(experts.down)[expert])
    return out


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("normalised", [True, False])
def test_each_token_goes_through_the_experts_that_its_router_likes_most(tokens: int, normalised: bool) -> None:
    mixture = Mixture(7, 3, 24, normalised=normalised)
    config = replace(CONFIG, mixture=mixture, activation="silu")
    experts = Experts(config, mixture, nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(1, tokens, 32)).astype(np.float32)
    want = exact_experts(experts, x[0])
    assert want.std() > 0.1
    np.testing.assert_allclose(jax.jit(experts)(x)[0], want, atol=1e-5)


# --- What is refused ---------------------------------------------------------------------------------------------


def test_a_mesh_that_does_not_divide_experts_or_divides_norms_over_all_heads_is_refused() -> None:
    mesh = jax.make_mesh((1, 2), ("context", "tensor"), devices=jax.devices("cpu")[:2])
    with pytest.raises(ValueError, match=r"^mesh: expected 1 x 2 devices such that 2 divides num_experts = 5, got a r"):
        PlacedDecoder.of(Decoder(EXPERTS, nnx.Rngs(0)), mesh)
    shared = replace(EXPERTS, mixture=Mixture(6, 2, 24, shared_size=41), mlp_size=47)
    with pytest.raises(ValueError, match=r"^mesh: .* 2 divides shared_size = 41"):  # no layer has an MLP of 47
        random_decoder(shared, mesh=mesh)
    with pytest.raises(ValueError, match=r"^mesh: expected no axis 'tensor' for norms over all heads .*, got 2 dev"):
        random_decoder(OLMO, mesh=mesh)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([None], "plan: expected 2 for the windows of the model's layers, [None, Window(tokens=13, chunked=False)], "),
        ([None, None], "got 2 for [None, None]; make one with each of config.windows_used"),
        ([None, Window(14)], "got 2 for [None, Window(tokens=14, chunked=False)]; make one"),
    ],
)
def test_plans_for_other_windows_than_the_models_are_refused(windows: list, message: str) -> None:
    model = Decoder(CONFIG, nnx.Rngs(0))
    forest = Forest.from_nodes([-1], [5], [0], page_size=8)
    heads = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 8}
    plans = tuple(make_plan(forest, window=window, **heads) for window in windows)
    for plan in (plans, plans[0]):
        with pytest.raises(ValueError, match=re.escape(message) if plan is plans else r"^plan: expected 2 .*, got 1"):
            model.decode(np.zeros((1, 1), int), model.new_cache(4, 8), forest, plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": ()}, r"^windows: expected a tuple of Window, or None, for each layer .*, got \(\)"),
        ({"windows": (8,)}, r"^windows: .*, got \(8,\)"),
        ({"windows": Window(8)}, r"^windows: .* such as \(Window\(8\),\), got Window\(tokens=8, "),
        ({"windows": [None]}, r"^windows: expected a tuple .*, got \[None\]"),
        ({"sinks": 3}, r"^sinks: expected True or False, got 3"),
        ({"norm_plus_one": "no"}, r"^norm_plus_one: expected True or False, got 'no'"),
        ({"activation": "relu"}, r"^activation: expected one of silu, gelu_tanh, clamped, got 'relu'"),
        ({"norm_placement": "around"}, r"^norm_placement: expected one of before, after, both, got 'around'"),
        ({"qk_norm_over": "token"}, r"^qk_norm_over: expected one of head, projection, got 'token'"),
        ({"softcap": 0.0}, r"^softcap: expected a positive number, got 0.0"),
        ({"scale": -1.0}, r"^scale: expected a positive number, got -1.0"),
        ({"window_rope_theta": 0.0}, r"^window_rope_theta: expected a positive number"),
    ],
)
def test_variants_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize("name", ["mixture", "latent", "rope_scaling"])
def test_parts_of_other_types_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got dict"):
        replace(CONFIG, **{name: {"size": 3, "factor": 2.0}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(4, 2, 8, normalised="no"), r"^normalised: expected True or False, got 'no'"),
        (lambda: Mixture(4, 2, 8, dense_layers=[0]), r"^dense_layers: expected a tuple of layers, got \[0\]"),
        (lambda: Mixture(4, 2, 8, dense_layers=(-1,)), r"^dense_layers: expected an integer of at least 0, got -1"),
        (lambda: Mixture(4, 5, 8), r"^experts_per_token: expected at most num_experts = 4, got 5"),
        (lambda: Mixture(4, 2, 0), r"^expert_size: expected an integer of at least 1, got 0"),
        (lambda: LinearScaling(0.0), r"^factor: expected a positive number, got 0.0"),
        (lambda: YarnScaling(2.0, 40, -1.0), r"^attention_factor: expected a positive number, got -1.0"),
        (lambda: YarnScaling(2.0, 40, 1.0, 1.0, 2.0), r"^beta_fast: expected at least beta_slow, .* got 1.0 and 2.0"),
    ],
)
def test_mixtures_and_scalings_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_used_are_those_of_layers_that_exist() -> None:
    short, long = Window(4), Window(8)
    config = replace(CONFIG, num_layers=3, windows=(long, short, None))
    assert config.windows_used == (None, long, short)
    assert replace(config, num_layers=2).windows_used == (long, short)
    assert [config.window_of(layer) for layer in (3, 5)] == [long, None]
