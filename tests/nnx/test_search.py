"""Beam search finds what transformers finds, and all there is if it may look everywhere; the best of n is the best."""

import itertools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, LONG, PROMPTS, VOCAB, Dense, Setup, until_stop
from engines import assert_alone, assert_no_page_leaked, greedy, make_engine, run
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoints import SIZES, save_tokenizer

from codec_jax.errors import LogitsError
from codec_jax.nnx import Decoder, DecoderConfig, open_checkpoint
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.search import Beam, beam_search, best_of

EARLY_STOPPING = st.sampled_from([True, False, "never"])
LENGTH_PENALTY = st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.5])


@pytest.fixture(scope="module")
def shared(setup: Setup) -> Engine:
    return make_engine(setup.dense.model)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert_no_page_leaked(shared)


# --- As transformers does it -------------------------------------------------------------------------------------


class Both:
    """A checkpoint that transformers wrote, here and there, of the sizes of the other tests' decoder."""

    def __init__(self, directory: Path) -> None:
        self.torch = pytest.importorskip("torch", reason="beams are compared with those of transformers")
        transformers = pytest.importorskip("transformers", reason="beams are compared with those of transformers")
        sizes = {**SIZES, "intermediate_size": 48, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
        config = transformers.Qwen3Config(**sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
        self.torch.manual_seed(0)
        self.model = transformers.Qwen3ForCausalLM(config).eval()
        with self.torch.no_grad():
            for weight in self.model.parameters():
                weight.uniform_(0.5, 1.5) if weight.ndim == 1 else weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
        self.model.save_pretrained(directory)
        save_tokenizer(directory)
        self.ours = open_checkpoint(directory).load(jnp.float32)

    @cached_property
    def engine(self) -> Engine:
        return make_engine(self.ours)

    def theirs(
        self, prompt: list[int], beams: int, max_tokens: int, stop_tokens: list[int], penalty: float, early: bool | str
    ) -> list[Beam]:
        """Return all beams that transformers finds; one beam is greedy decoding there, and has no score."""
        several = {"num_return_sequences": beams, "length_penalty": penalty, "early_stopping": early}
        out = self.model.generate(
            self.torch.tensor([prompt]), attention_mask=self.torch.ones(1, len(prompt)), do_sample=False,
            num_beams=beams, max_new_tokens=max_tokens, eos_token_id=stop_tokens or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, **(several if beams > 1 else {}),
        )  # fmt: skip
        texts = [until_stop(row[len(prompt) :].tolist(), stop_tokens) for row in out.sequences]
        if beams > 1:
            scores = out.sequences_scores.tolist()
        else:
            logprobs = self.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
            scores = [logprobs.sum().item() / len(texts[0]) ** penalty]
        return [Beam(text, score) for text, score in zip(texts, scores, strict=True)]

    def frequent(self, prompt: list[int]) -> list[int]:
        """Return tokens that do occur in completions of a prompt."""
        return list(dict.fromkeys(self.theirs(prompt, 4, 14, [], 1.0, False)[0].tokens))

    def assert_same(
        self, prompt: list[int], beams: int, max_tokens: int, stop_tokens: list[int], penalty: float, early: bool | str
    ) -> list[Beam]:
        got = beam_search(
            self.engine, prompt, beams=beams, max_tokens=max_tokens, stop_tokens=stop_tokens, length_penalty=penalty,
            early_stopping=early, results=beams,
        )  # fmt: skip
        want = self.theirs(prompt, beams, max_tokens, stop_tokens, penalty, early)
        assert [beam.tokens for beam in got] == [beam.tokens for beam in want]
        np.testing.assert_allclose([b.score for b in got], [b.score for b in want], rtol=1e-4, atol=1e-4)
        assert_no_page_leaked(self.engine)
        return got


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("checkpoint"))


@settings(max_examples=15)
@given(
    prompt=st.sampled_from([*PROMPTS, LONG[:30], [7]]),
    beams=st.integers(1, 4),
    max_tokens=st.integers(1, 14),
    first=st.integers(0, 4),
    stops=st.integers(0, 3),
    penalty=LENGTH_PENALTY,
    early=EARLY_STOPPING,
)
def test_tokens_and_scores_are_those_of_transformers(
    both: Both, prompt: list[int], beams: int, max_tokens: int, first: int, stops: int, penalty: float,
    early: bool | str,
) -> None:  # fmt: skip
    stop_tokens = both.frequent(prompt)[first : first + stops]
    both.assert_same(prompt, beams, max_tokens, stop_tokens, penalty, early)


def test_every_way_to_stop_is_that_of_transformers(both: Both) -> None:
    ways: dict[bool | str, list[list[Beam]]] = {True: [], False: [], "never": []}
    for stop, (early, found) in itertools.product(both.frequent(PROMPTS[0]), ways.items()):
        found.append(both.assert_same(PROMPTS[0], 3, 14, [stop], 1.0, early))
    assert ways[True] != ways[False] != ways["never"]  # or the wrong one might do as well


# --- Everywhere --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Dense:
    """A model of four tokens."""
    config = DecoderConfig(4, 32, 48, 2, 4, 2, 16, dtype=jnp.float32, param_dtype=jnp.float32)
    return Dense(Decoder(config, nnx.Rngs(3)))


@pytest.fixture(scope="module")
def cramped(tiny: Dense) -> Engine:
    """With less room than the beams need together."""
    return make_engine(tiny.model, num_pages=14, max_context=48, prefill_tokens=128)


@settings(max_examples=40)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_tokens=st.integers(1, 3),
    stop_tokens=st.sets(st.integers(0, 3)),
    penalty=LENGTH_PENALTY,
    early=EARLY_STOPPING,
)
def test_beams_that_reach_everything_find_the_best(
    tiny: Dense, cramped: Engine, prompt: list[int], max_tokens: int, stop_tokens: set[int], penalty: float,
    early: bool | str,
) -> None:  # fmt: skip
    texts = {
        tuple(until_stop(list(tokens), list(stop_tokens))) for tokens in itertools.product(range(4), repeat=max_tokens)
    }
    scores = {text: tiny.logprobs(prompt, list(text)).sum() / len(text) ** penalty for text in texts}
    got = beam_search(
        cramped, prompt, beams=16, max_tokens=max_tokens, stop_tokens=stop_tokens, length_penalty=penalty,
        early_stopping=early, results=16,
    )  # fmt: skip
    np.testing.assert_allclose([b.score for b in got], sorted(scores.values(), reverse=True)[:16], atol=1e-3)
    assert len({tuple(beam.tokens) for beam in got}) == len(got)
    for beam in got:
        np.testing.assert_allclose(beam.score, scores[tuple(beam.tokens)], atol=1e-3)
    assert_no_page_leaked(cramped)


# --- In an engine ------------------------------------------------------------------------------------------------


def test_a_token_takes_one_step_and_nothing_is_computed_twice(engine: Engine, compilations: list[str]) -> None:
    prompt = [5, *LONG[:50]]  # of which nothing is cached
    del compilations[:]
    before = engine.stats
    beam_search(engine, prompt, beams=3, max_tokens=20)
    after = engine.stats
    assert not compilations
    assert after.steps - before.steps == 20 + 1  # the prompt
    computed = [stats.prompt_tokens - stats.cached_tokens for stats in (before, after)]
    assert computed[1] - computed[0] == len(prompt) - 1


def test_beams_may_part_all_the_time(engine: Engine, dense: Dense) -> None:
    """Each time they do, nodes begin: more of them than a step expects."""
    beams = beam_search(engine, PROMPTS[1], beams=5, max_tokens=100, results=5)
    assert engine._scheduler.cache.num_nodes > 8 * 6
    for beam in beams:
        np.testing.assert_allclose(beam.score, dense.logprobs(PROMPTS[1], beam.tokens).mean(), atol=2e-4)


def test_others_are_decoded_meanwhile(engine: Engine, dense: Dense) -> None:
    alone = beam_search(engine, PROMPTS[1], beams=4, max_tokens=10, results=4)
    others = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    beside = beam_search(engine, PROMPTS[1], beams=4, max_tokens=10, results=4)
    run(engine)
    for other in others:
        assert_alone(other, dense)
    assert [beam.tokens for beam in beside] == [beam.tokens for beam in alone]
    for beam in beside:
        np.testing.assert_allclose(beam.score, dense.logprobs(PROMPTS[1], beam.tokens).mean(), atol=2e-4)


def test_the_best_of_several_samples_comes_first(engine: Engine, dense: Dense) -> None:
    params = SamplingParams(max_tokens=8, stop_tokens=[3, 11], seed=4)
    samples = best_of(engine, PROMPTS[2], 7, params)
    assert len({tuple(sample.tokens) for sample in samples}) > 3
    means = [dense.logprobs(PROMPTS[2], sample.tokens).mean() for sample in samples]
    np.testing.assert_allclose(means, np.sort(means)[::-1], atol=1e-3)
    by_tokens = best_of(engine, PROMPTS[2], 7, params, score=lambda request: sum(request.tokens))
    sums = [sum(sample.tokens) for sample in by_tokens]
    assert sums == sorted(sums, reverse=True)
    assert sorted(sample.tokens for sample in samples) == sorted(sample.tokens for sample in by_tokens)


@pytest.mark.parametrize("value", [None, "9", float("nan"), np.ones(2), np.complex64(1)])
def test_a_score_that_is_no_number_is_refused_by_name(engine: Engine, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^score: expected a function that gives a number for each request, got "):
        best_of(engine, PROMPTS[2], 2, greedy(2), score=lambda _: value)


def test_scores_may_be_integers_of_any_size(engine: Engine) -> None:
    first, second = best_of(engine, PROMPTS[2], 2, greedy(2), score=lambda request: 10**400 + request.params.stream)
    assert (first.params.stream, second.params.stream) == (1, 0)


@pytest.mark.parametrize(("power", "same"), [(np.int64(-1), -1.0), (np.int32(8), 8.0), (np.float16(1), 1.0)])
def test_a_length_penalty_may_be_a_number_of_numpy(engine: Engine, power: Any, same: float) -> None:
    options = {"beams": 3, "max_tokens": np.int8(20), "stop_tokens": [3]}
    found, expected = (beam_search(engine, PROMPTS[1], **options, length_penalty=each) for each in (power, same))
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    np.testing.assert_allclose([beam.score for beam in found], [beam.score for beam in expected], rtol=1e-5)
    assert {type(beam.score) for beam in found} == {float}


def test_what_is_no_engine_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"^engine: expected an Engine or Replicas, got str"):
        best_of("engine", [1], 2, greedy(2))
    with pytest.raises(TypeError, match=r"^engine: expected an Engine or Replicas, got NoneType"):
        beam_search(None, [1], beams=2, max_tokens=2)


def test_logits_that_are_not_finite_end_a_search(setup: Setup) -> None:
    graph, weights = nnx.split(setup.dense.model)
    broken = jax.tree.map(lambda x: x, weights)
    broken["embedding"]["embedding"][...] = weights["embedding"]["embedding"][...].at[13].set(np.nan)
    engine = make_engine(nnx.merge(graph, broken))
    with pytest.raises(LogitsError, match="logits: expected finite numbers"):
        beam_search(engine, [13, 2], beams=2, max_tokens=4)
    [bad] = best_of(engine, [13, 2], 1, greedy(3))
    assert isinstance(bad.error, LogitsError)
    assert_no_page_leaked(engine)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([1], {"beams": 0}, "beams: expected an integer of at least 1, got 0"),
        ([1], {"max_tokens": 0}, "max_tokens: expected an integer of at least 1, got 0"),
        ([1], {"results": 5}, "results: expected at most beams = 4, got 5"),
        ([1], {"early_stopping": "always"}, "early_stopping: expected True, False or \"never\", got 'always'"),
        ([1], {"length_penalty": np.nan}, "length_penalty: expected a finite number, got nan"),
        ([1], {"length_penalty": 2000}, "length_penalty: expected a number from -628 to 628"),
        ([1], {"length_penalty": -2000.0}, "length_penalty: expected a number from -628 to 628"),
        ([1], {"beams": 20, "stop_tokens": [2]}, "beams: expected at most 20 together with stop_tokens"),
        ([1], {"stop_tokens": [VOCAB]}, r"stop_tokens: expected tokens in \[0, 48\)"),
        (LONG[:100], {"max_tokens": 61}, f"prompt: expected at most max_context = {CONTEXT} tokens together"),
        ([], {}, "prompt: expected at least one token, got none"),
    ],
)
def test_searches_that_do_not_fit_are_refused(
    engine: Engine, prompt: list[int], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        beam_search(engine, prompt, **({"beams": 4, "max_tokens": 3} | options))
    assert engine.idle
