"""Rollouts for Tunix: against dense forward passes, Tunix' own rollout, and its learner."""

import importlib.util
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from codec_jax import LogitsError, Window, rollout
from codec_jax.nnx import Decoder, DecoderConfig, Replicas
from codec_jax.nnx.decoder_config import Mixture
from codec_jax.rollout import EngineRollout, Policy, left_padded, seed_number

tunix_only = pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="google-tunix is not installed")

VOCAB, PAD, BOS, EOS = 40, 0, 1, 2
PROMPT, NEW = 24, 12  # at most
PROMPTS = ["7 8 9", "30 31 32 33 34 35 36 37 38 39 30 31 32 33 34 35 36 37 38 39", "11", "7 8 9", "7 8 20 21"]


class Numbers:
    """A tokenizer whose tokens are written as numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def random_policy(seed: int, **variant: Any) -> Policy:
    """Weights that make for sharp attention and texts that do not repeat; padding is never the most likely token."""
    config = DecoderConfig(
        VOCAB, 32, 48, 2, 4, 2, 16, tied_embeddings=False, dtype=jnp.float32, param_dtype=jnp.float32, **variant
    )
    policy, rng = Policy(config, nnx.Rngs(0)), np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(policy)):
        shape = variable.get_value().shape
        values = np.ones(shape) if len(shape) == 1 else rng.normal(size=shape) * 2 * shape[0] ** -0.5
        variable.set_value(jnp.asarray(values, jnp.float32))
    policy.head.kernel.set_value(policy.head.kernel[...].at[:, PAD].set(0.0))
    return policy


def dense_logits(model: Decoder, tokens: list[int]) -> np.ndarray:
    """Logits of what follows each token, of one sequence without padding on its left."""
    padded = np.zeros((1, PROMPT + NEW), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_forward(*nnx.split(model), padded), np.float64)[0, : len(tokens)]


@jax.jit(static_argnums=0)
def _forward(graph: Any, weights: Any, tokens: jax.Array) -> jax.Array:
    return Decoder.__call__(nnx.merge(graph, weights), tokens)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def dense_logprobs(model: Decoder, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    logits = dense_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    return log_softmax(logits / temperature)[np.arange(len(tokens)), tokens]


def greedy(model: Decoder, prompt: list[int]) -> list[int]:
    """The most likely tokens, up to the one that ends a text."""
    context = list(prompt)
    while len(context) < len(prompt) + NEW and (len(context) == len(prompt) or context[-1] != EOS):
        context.append(int(dense_logits(model, context)[-1].argmax()))
    return context[len(prompt) :]


def encoded(prompt: str) -> list[int]:
    return [BOS, *Numbers().encode(prompt)]


# ---------------------------------------------------------------------- without Tunix


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=4), st.integers(0, 9))
def test_prompts_are_padded_on_the_left(rows, width):
    if any(len(row) > width for row in rows):
        with pytest.raises(ValueError, match=r"^prompts\[\d\]: expected at most max_prompt_length"):
            left_padded(rows, width, PAD)
    else:
        assert left_padded(rows, width, PAD).tolist() == [[PAD] * (width - len(row)) + row for row in rows]


def test_seeds_are_numbers_or_keys():
    assert [seed_number(seed) for seed in (None, 5, jnp.int32(5), jax.random.key(5))] == [0, 5, 5, 5]
    keys = jax.random.split(jax.random.key(0), 20)
    assert len({seed_number(key) for key in keys}) == 20
    assert [seed_number(key) for key in keys] == [seed_number(jax.random.key_data(key)) for key in keys]
    assert all(0 <= seed_number(key) < 2**32 for key in keys)
    for seed in (1.5, "x", 2**64, True):
        with pytest.raises(ValueError, match=f"^seed: expected an integer .* or a key, got {seed!r}"):
            seed_number(seed)


def masks_of(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and the causal mask of padded rows."""
    there = tokens != PAD
    causal = np.tril(np.ones((tokens.shape[1],) * 2, bool))
    return np.maximum(there.cumsum(1) - 1, 0).astype(np.int32), there[:, None] & causal[None]


@jax.jit(static_argnums=0)
def call(graph: Any, weights: Any, *arguments: Any) -> Any:
    return nnx.merge(graph, weights)(*arguments)


#: Layers that reach back for three tokens, or to the last multiple of two.
WINDOWED = {"windows": (Window(3), Window(2, chunked=True)), "sinks": True, "embedding_scale": 2.0}
#: Caches of one byte a number, which are for decoding: with scales that are far off here, or of each token.
FLOAT8 = {"kv_dtype": jnp.float8_e4m3fn, "kv_scales": ((0.05, 0.02),) * 2}
BY_TOKEN = {"kv_dtype": jnp.float8_e4m3fn, "kv_scales": "token"}
ROWS = [[3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]
VARIANTS = pytest.mark.parametrize(
    "variant", [{}, WINDOWED, FLOAT8, BY_TOKEN], ids=["plain", "windows", "float8", "float8 by token"]
)


@VARIANTS
def test_a_policy_sees_no_padding(variant):
    policy, tokens = random_policy(0, **variant), left_padded(ROWS, 8, PAD)
    positions, mask = masks_of(tokens)
    logits, cache = call(*nnx.split(policy), tokens, positions, None, mask)
    assert cache is None
    for row, got in zip(ROWS, np.asarray(logits), strict=True):
        np.testing.assert_allclose(got[8 - len(row) :], dense_logits(policy, row), atol=1e-4)


@VARIANTS
def test_a_policy_goes_on_from_its_cache(variant):
    policy, tokens = random_policy(0, **variant), left_padded(ROWS, 8, PAD)
    positions, mask = masks_of(tokens)
    cache = policy.init_cache(3, 10, jnp.float32)
    mask = np.pad(mask, ((0, 0), (0, 0), (0, 2)))
    got = []
    for part in (slice(0, 5), slice(5, 6), slice(6, 8)):
        logits, cache = call(*nnx.split(policy), tokens[:, part], positions[:, part], cache, mask[:, part])
        got.append(np.asarray(logits))
    assert int(cache.length) == 8
    for row, logits in zip(ROWS, np.concatenate(got, axis=1), strict=True):
        np.testing.assert_allclose(logits[8 - len(row) :], dense_logits(policy, row), atol=1e-4)


def test_what_a_cache_has_no_room_for_is_nowhere():
    policy, tokens = random_policy(0), np.asarray([[3, 4, 5], [6, 7, 8]], np.int32)
    positions, mask = masks_of(tokens)
    _, full = call(*nnx.split(policy), tokens, positions, policy.init_cache(2, 3, jnp.float32), mask)
    one, beyond = tokens[:, :1], np.full((2, 1), 3, np.int32)
    logits, after = call(*nnx.split(policy), one, beyond, full, mask[:, -1:])
    jax.tree.map(np.testing.assert_array_equal, after.pages, full.pages)
    assert np.isnan(logits).all()
    # Of several tokens those that still have a place have logits.
    first, half = call(
        *nnx.split(policy), tokens[:, :2], positions[:, :2], policy.init_cache(2, 3, jnp.float32), mask[:, :2]
    )
    again, _ = call(*nnx.split(policy), tokens[:, 1:], positions[:, 1:], half, mask[:, 1:])
    assert np.isfinite(first).all()
    assert np.isnan(again).all(axis=(0, 2)).tolist() == [False, True]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": np.zeros(3, np.int32)}, r"tokens: expected shape \[B, T\], got \(3,\)"),
        ({"positions": np.zeros((2, 2), np.int32)}, r"positions: expected shape \[B = 2, T = 3\], got \(2, 2\)"),
        ({"mask": np.ones((2, 1, 3, 3), bool)}, r"attention_mask: expected shape \[B = 2, T = 3, S = 3\], got"),
        ({"mask": np.ones((2, 3, 3), np.float32)}, "attention_mask: expected booleans, .*, got float32"),
        ({"cache": (2, 2)}, "cache: expected one of 2 requests with room for 3 tokens or more, got one of 2 with 2"),
        ({"cache": (4, 3)}, "cache: expected one of 2 requests with room for 3 tokens or more, got one of 4 with 3"),
    ],
)
def test_a_policy_says_what_does_not_belong_together(changed, message):
    policy, tokens = random_policy(0), np.asarray([[3, 4, 5], [6, 7, 8]], np.int32)
    positions, mask = masks_of(tokens)
    given = {"tokens": tokens, "positions": positions, "mask": mask} | changed
    cache = policy.init_cache(*given["cache"], jnp.float32) if "cache" in changed else None
    with pytest.raises(ValueError, match=f"^{message}"):
        policy(given["tokens"], given["positions"], cache, given["mask"])


def test_a_policy_learns_what_a_decoder_does_and_leaves_it_alone():
    decoder = nnx.merge(nnx.graphdef(Decoder(random_policy(0).config, nnx.Rngs(0))), nnx.state(random_policy(0)))
    policy, tokens = Policy.of(decoder), jnp.asarray([ROWS[0]])
    positions, mask = masks_of(np.asarray(tokens))
    dense = nnx.jit(nnx.grad(lambda model: Decoder.__call__(model, tokens)[..., 7].sum()))
    masked = nnx.jit(nnx.grad(lambda model: model(tokens, positions, None, mask)[0][..., 7].sum()))
    for one, other in zip(jax.tree.leaves(dense(decoder)), jax.tree.leaves(masked(policy)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)
    before = jax.tree.map(np.asarray, nnx.state(decoder))
    nnx.update(policy, jax.tree.map(lambda x: x + 1.0, nnx.state(policy)))
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(decoder))
    with pytest.raises(TypeError, match="decoder: expected a Decoder, got str"):
        Policy.of("decoder")


@pytest.mark.parametrize("variant", [{}, {"mixture": Mixture(num_experts=4, experts_per_token=2, expert_size=256)}])
def test_a_policy_learns_on_a_gpu_whose_kernels_have_no_derivatives(variant, monkeypatch):
    config = DecoderConfig(VOCAB, 256, 5120, 2, 2, 1, 128, **variant)  # which all kernels of a decoder take
    policy = nnx.eval_shape(lambda: Policy(config, nnx.Rngs(0)))
    tokens = jnp.asarray([ROWS[0]])
    positions, mask = masks_of(np.asarray(tokens))
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200", core_count=132)
    monkeypatch.setattr(jax, "devices", lambda *_: [hopper])
    graph, weights = nnx.split(policy)

    def loss(weights):
        return nnx.merge(graph, weights)(tokens, positions, None, mask)[0][..., 7].sum()

    with jax.numpy_dtype_promotion("standard"):  # JAX's attention asks for it
        text = jax.jit(jax.grad(loss)).trace(weights).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in text


def test_without_tunix_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(rollout, "BaseRollout", object)
    with pytest.raises(ImportError, match=r"pip install codec-jax\[rollout\]"):
        EngineRollout(rollout_actor=random_policy(0), tokenizer=Numbers(), rollout_config=None)


# ---------------------------------------------------------------------- with Tunix


@pytest.fixture
def _as_tunix_has_it() -> Iterator[None]:
    """Tunix mixes dtypes and ranks, which other tests refuse, also in threads of its own."""
    before = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before[0])
    jax.config.update("jax_numpy_rank_promotion", before[1])


def rollout_config(**options: Any) -> Any:
    from tunix.rl.rollout.base_rollout import RolloutConfig

    sizes = {"max_prompt_length": PROMPT, "max_tokens_to_generate": NEW, "kv_cache_size": PROMPT + NEW}
    return RolloutConfig(**{**sizes, "temperature": 1.0, "return_logprobs": True, **options})


def new_rollout(policy: Decoder, **options: Any) -> EngineRollout:
    sizes = {"max_requests": 6, "page_size": 8, "prefill_tokens": 64, "steps": 4}
    return EngineRollout(
        rollout_actor=policy, tokenizer=Numbers(), rollout_config=rollout_config(), **{**sizes, **options}
    )


@pytest.fixture(scope="module")
def shared() -> EngineRollout:
    """A rollout that compiles once; every test leaves it with the weights of `random_policy(0)`."""
    return new_rollout(random_policy(0))


@tunix_only
def test_rollouts_are_those_of_dense_attention(shared):
    output = shared.generate(PROMPTS, rollout_config(temperature=0.0))
    assert output.left_padded_prompt_tokens.dtype == np.int32
    policy, ended = random_policy(0), 0
    for i, prompt in enumerate(PROMPTS):
        expected = greedy(policy, encoded(prompt))
        assert output.tokens[i].tolist() == expected
        assert output.left_padded_prompt_tokens[i].tolist() == left_padded([encoded(prompt)], PROMPT, PAD)[0].tolist()
        np.testing.assert_allclose(output.logprobs[i], dense_logprobs(policy, encoded(prompt), expected), atol=1e-4)
        stopped = expected[-1] == EOS
        assert output.text[i] == Numbers().decode(expected[:-1] if stopped else expected)
        ended += stopped
    stop = int(output.tokens[1][4])
    cut = shared.generate(PROMPTS[1:2], rollout_config(temperature=0.0, eos_tokens=[stop], return_logprobs=False))
    assert cut.logprobs is None
    first = output.tokens[1].tolist().index(stop)
    assert cut.tokens[0].tolist() == output.tokens[1][: first + 1].tolist()
    assert cut.text[0] == Numbers().decode(cut.tokens[0][:-1].tolist())


@tunix_only
def test_a_group_shares_its_prompt(shared):
    prompt = " ".join(str(3 + 5 * i % 31) for i in range(PROMPT - 1))
    before = shared.engine.stats.computed_tokens
    shared.generate([prompt] * 6, rollout_config())
    assert PROMPT - 1 <= shared.engine.stats.computed_tokens - before < 2 * PROMPT


@tunix_only
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_at_the_sampling_temperature_before_truncation(shared, temperature):
    output = shared.generate(PROMPTS, rollout_config(temperature=temperature, top_k=5, top_p=0.9))
    policy = random_policy(0)
    for prompt, tokens, logprobs in zip(PROMPTS, output.tokens, output.logprobs, strict=True):
        expected = dense_logprobs(policy, encoded(prompt), tokens.tolist(), temperature)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        logits = dense_logits(policy, [*encoded(prompt), *tokens])[len(encoded(prompt)) - 1 : -1]
        assert all(token in row.argsort()[-5:] for token, row in zip(tokens, logits, strict=True))


@tunix_only
def test_logprobs_are_those_of_the_weights_that_drew(shared, monkeypatch):
    """Also where a learner brings others as soon as the last token is there."""
    config = rollout_config(temperature=0.7)
    finished = shared._finished

    def then_updated(*arguments: Any) -> Any:
        drawn = finished(*arguments)
        shared.update_params(nnx.state(random_policy(1)))
        return drawn

    monkeypatch.setattr(shared, "_finished", then_updated)
    output = shared.generate(PROMPTS[:1], config)
    monkeypatch.undo()
    shared.update_params(nnx.state(random_policy(0)))
    expected = dense_logprobs(random_policy(0), encoded(PROMPTS[0]), output.tokens[0].tolist(), 0.7)
    np.testing.assert_allclose(output.logprobs[0], expected, atol=1e-4)


@tunix_only
def test_every_request_draws_from_a_fresh_stream_and_the_seed_decides_all():
    one, other = new_rollout(random_policy(0)), new_rollout(random_policy(0))
    config = rollout_config(seed=jax.random.PRNGKey(3))
    texts = [rollout.generate(["7 8 9"] * 3, config).text for rollout in (one, one, other, other)]
    assert len({*texts[0], *texts[1]}) == 6
    assert texts[:2] == texts[2:]
    assert other.generate(["7 8 9"] * 3, replace(config, seed=4)).text != one.generate(["7 8 9"] * 3, config).text


@tunix_only
@pytest.mark.usefixtures("_as_tunix_has_it")
def test_tunix_own_rollout_of_a_policy_draws_the_same(shared):
    from tunix.rl.rollout.base_rollout import CacheConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    policy = random_policy(0)
    vanilla = VanillaRollout(policy, Numbers(), CacheConfig(PROMPT + NEW, 2, 2, 16))
    # Without top_p Tunix's own sampler takes the most likely tokens; it leaves out the one that ends a text.
    theirs = vanilla.generate(PROMPTS, rollout_config(top_p=None))
    ours = shared.generate(PROMPTS, rollout_config(temperature=0.0))
    assert theirs.text == ours.text
    np.testing.assert_array_equal(theirs.left_padded_prompt_tokens, ours.left_padded_prompt_tokens)
    for one, other in zip(theirs.logprobs, ours.logprobs, strict=True):
        np.testing.assert_allclose(one, other[: len(one)], atol=1e-4)


@tunix_only
@pytest.mark.usefixtures("_as_tunix_has_it")
def test_logps_of_given_tokens_are_those_of_a_dense_pass(shared):
    from tunix.rl import common

    prompts = left_padded([encoded(prompt) for prompt in PROMPTS], PROMPT, PAD)
    completions = np.random.default_rng(1).integers(1, VOCAB, (len(PROMPTS), NEW)).astype(np.int32)
    lengths = np.array([NEW, 5, 0, 1, 7])
    completions[np.arange(NEW) >= lengths[:, None]] = PAD
    graph, weights = nnx.split(random_policy(0))
    dense = common.compute_per_token_logps(graph, weights, prompts, completions, PAD, EOS)
    got = shared.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions))
    np.testing.assert_allclose(got, np.where(completions == PAD, 0, dense), atol=1e-4)


@tunix_only
def test_a_stop_token_that_is_the_padding_is_scored_where_a_text_ends(shared, monkeypatch):
    prompts = left_padded([encoded(prompt) for prompt in PROMPTS], PROMPT, PAD)
    prompts[prompts == EOS] = PAD
    monkeypatch.setattr(shared, "eos_id", lambda: PAD)
    completions = np.full((len(PROMPTS), 4), PAD, np.int32)
    texts = [[5, 6, 7, 8], [5, 6, 7], [9], [], [4, 4]]
    for row, text in zip(completions, texts, strict=True):
        row[: len(text)] = text
    got = np.asarray(shared.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions)))
    for row, text in enumerate(texts):
        scored = [*text, PAD][:4]
        prompt = prompts[row][prompts[row] != PAD].tolist()
        np.testing.assert_allclose(got[row, : len(scored)], dense_logprobs(random_policy(0), prompt, scored), atol=1e-4)
        assert (got[row, len(scored) :] == 0).all()
    nothing = np.full_like(prompts, PAD), np.full_like(completions, PAD)
    assert not np.asarray(shared.get_per_token_logps(*nothing)).any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_requests": "4"}, ValueError, "max_requests: expected an integer of at least 1, got '4'"),
        ({"page_size": 0}, ValueError, "page_size: expected a positive multiple of 8, got 0"),
        ({"max_context": -1}, ValueError, "max_context: expected an integer of at least 1, got -1"),
        ({"mesh": "x"}, TypeError, "mesh: expected a Mesh, got str"),
    ],
)
@tunix_only
def test_sizes_that_do_not_fit_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        new_rollout(random_policy(0), **options)


@tunix_only
def test_new_weights_change_what_is_drawn_and_compile_nothing(shared):
    config = rollout_config(temperature=0.0)
    before = shared.generate(PROMPTS, config)
    compiled: list[str] = []

    def listen(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    new = random_policy(1)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        shared.update_params(nnx.state(new, nnx.Param), (nnx.Param,))
        output = shared.generate(PROMPTS, config)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert [tokens.tolist() for tokens in output.tokens] == [greedy(new, encoded(prompt)) for prompt in PROMPTS]
    assert output.text != before.text
    jax.tree.map(np.testing.assert_array_equal, nnx.state(shared.model()), nnx.state(new))
    # Some of the weights alone, in another dtype.
    head = {"head": {"kernel": nnx.Param(random_policy(0).head.kernel[...].astype(jnp.bfloat16))}}
    shared.update_params(nnx.State(head))
    new.head.kernel.set_value(head["head"]["kernel"][...].astype(jnp.float32))
    assert shared.generate(PROMPTS, config).tokens[0].tolist() == greedy(new, encoded(PROMPTS[0]))
    shared.update_params(nnx.state(random_policy(0)))
    assert shared.generate(PROMPTS, config).text == before.text


@tunix_only
def test_one_text_is_no_list_and_stop_tokens_may_be_an_array(shared):
    with pytest.raises(TypeError, match="prompts: expected a list of texts, got a text"):
        shared.generate("7", rollout_config())
    greedily = rollout_config(temperature=0.0)
    stop = int(shared.generate(PROMPTS[1:2], greedily).tokens[0][2])
    of_list, of_array = (
        shared.generate(PROMPTS[1:2], replace(greedily, eos_tokens=stops)) for stops in ([stop, 3], np.array([stop, 3]))
    )
    assert of_array.text == of_list.text
    assert len(of_array.tokens[0]) <= 3


@tunix_only
def test_new_weights_are_copied(shared):
    _, given = nnx.split(random_policy(1))
    shared.update_params(given)
    jax.jit(lambda given: jax.tree.map(lambda x: x * 2, given), donate_argnums=0)(given)
    tokens = shared.generate(PROMPTS[:1], rollout_config(temperature=0.0)).tokens[0].tolist()
    assert tokens == greedy(random_policy(1), encoded(PROMPTS[0]))
    shared.update_params(nnx.state(random_policy(0)))


@tunix_only
def test_weights_of_which_one_does_not_fit_change_nothing(shared):
    bad = nnx.state(random_policy(1))
    bad["norm"]["scale"] = nnx.Param(jnp.ones(3))  # the last but few
    with pytest.raises(ValueError, match=r"params: expected shape \(32,\) for norm.scale, got \(3,\)"):
        shared.update_params(bad)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(shared.model()), nnx.state(random_policy(0)))


@tunix_only
def test_logprobs_of_hardly_any_temperature_are_finite(shared):
    for temperature in (1e-3, 1e-30, 1e-45):
        [logprobs] = shared.generate(["7 8"], rollout_config(temperature=temperature)).logprobs
        assert np.isfinite(logprobs).all()
        assert (logprobs <= 0).all()


@tunix_only
def test_tokens_to_score_that_do_not_fit_are_refused(shared):
    prompts, completions = np.array([[0, 1, 7], [0, 0, 0]]), np.array([[3, 0], [4, 5]])
    with pytest.raises(ValueError, match=r"got shapes \(2, 3\) and \(1, 2\)"):
        shared.get_per_token_logps(prompts, completions[:1])
    with pytest.raises(ValueError, match=r"got shapes \(2, 3\) and \(2,\)"):
        shared.get_per_token_logps(prompts, completions[0])
    with pytest.raises(ValueError, match=r"^prompt_tokens: expected a token .* in rows \[1\]"):
        shared.get_per_token_logps(prompts, completions)


@tunix_only
def test_weights_that_do_not_fit_are_refused(shared):
    with pytest.raises(TypeError, match="params: expected a State, got NoneType"):
        shared.update_params(None)
    with pytest.raises(ValueError, match=r"params: expected shape \(32, 40\) for head.kernel, got \(3,\)"):
        shared.update_params(nnx.State({"head": {"kernel": nnx.Param(jnp.ones(3))}}))
    with pytest.raises(ValueError, match=r"params: expected variables of the rollout's model, got lora\.a"):
        shared.update_params(nnx.State({"lora": {"a": nnx.Param(jnp.ones(3))}}))


@tunix_only
def test_prompts_and_models_that_do_not_fit_are_refused(shared):
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at most max_prompt_length = 4 tokens, got 5"):
        shared.generate(["7", "7 8 9 10"], rollout_config(max_prompt_length=4))
    with pytest.raises(ValueError, match="max_context"):
        shared.generate(PROMPTS, rollout_config(max_tokens_to_generate=100))
    with pytest.raises(TypeError, match="rollout_actor: expected a Decoder"):
        new_rollout(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    shared.update_params(nnx.State({"norm": {"scale": nnx.Param(jnp.full(32, jnp.nan))}}))
    with pytest.raises(LogitsError):
        shared.generate(PROMPTS, rollout_config())
    shared.update_params(nnx.state(random_policy(0)))


@tunix_only
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_a_mesh_says_where_rollouts_run():
    two = np.asarray(jax.devices()[:2])
    for devices in (two[1:], two):
        rollout = new_rollout(random_policy(0), mesh=jax.sharding.Mesh(devices, "fsdp"))
        rollout.update_params(nnx.state(random_policy(1)))
        assert all(leaf.devices() == set(devices) for leaf in jax.tree.leaves(nnx.state(rollout.model())))
        found = rollout.generate(PROMPTS, rollout_config(temperature=0.0)).tokens
        assert [tokens.tolist() for tokens in found] == [greedy(random_policy(1), encoded(text)) for text in PROMPTS]
    assert isinstance(rollout.engine, Replicas)


@tunix_only
def test_threads_generate_together(shared):
    config = rollout_config(temperature=0.0)
    expected = dict(zip(PROMPTS, shared.generate(PROMPTS, config).text, strict=True))
    texts: dict[str, list[str]] = {}

    def generate(prompt: str) -> None:
        texts[prompt] = shared.generate([prompt] * 2, config).text

    threads = [threading.Thread(target=generate, args=[prompt]) for prompt in set(PROMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {prompt: [text] * 2 for prompt, text in expected.items()}


@tunix_only
@pytest.mark.usefixtures("_as_tunix_has_it")
@pytest.mark.filterwarnings("default")  # Tunix' own
def test_a_learner_of_tunix_trains_on_rollouts():
    import optax
    from tunix.rl import utils
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role

    mesh = jax.sharding.Mesh(jax.devices()[:1], "fsdp")
    policy, rewarded = random_policy(0), []
    cluster = RLCluster(
        actor=policy,
        reference=Policy.of(policy),
        tokenizer=Numbers(),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh, Role.REFERENCE: mesh},
            rollout_engine=EngineRollout,
            rollout_config=rollout_config(),
            training_config=RLTrainingConfig(actor_optimizer=optax.sgd(1e-2), max_steps=4, eval_every_n_steps=9),
        ),
    )
    assert not utils.is_sharing_weights(cluster.actor_trainer.model, cluster.rollout.model())

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        rewarded.append((list(prompts), completions))
        return [float(len(text.split())) for text in completions]

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=4, num_iterations=2, beta=0.1), reward)
    learner.train([{"prompts": np.array([prompt])} for prompt in (PROMPTS[0], PROMPTS[2])])
    assert [prompts for prompts, _ in rewarded] == [[prompt] * 4 for prompt in (PROMPTS[0], PROMPTS[2])]
    actor, own = (jax.tree.leaves(nnx.state(m)) for m in (cluster.actor_trainer.model, cluster.rollout.model()))
    for trained, used, began in zip(actor, own, jax.tree.leaves(nnx.state(random_policy(0))), strict=True):
        np.testing.assert_array_equal(trained, used)
        assert not np.array_equal(trained, began)
