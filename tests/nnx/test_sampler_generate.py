"""Whole completions, and what the sampler refuses."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, CROWD, LONG, PROMPTS, VOCAB, Dense, Setup, new_sampler, stops_for, until_stop
from flax import nnx

from codec_jax import LogitsError, OutOfPagesError
from codec_jax.nnx import Completion, Decoder, Sampler

# --- Generate ---------------------------------------------------------------------------------------------------


def test_generate_completes_every_prompt_greedily(sampler: Sampler, dense: Dense) -> None:
    texts = [dense.greedy(prompt, 30) for prompt in PROMPTS]
    stops = stops_for(texts)
    heard: dict[int, list[int]] = {}

    def listen(completion: int, tokens: list[int]) -> None:
        heard.setdefault(completion, []).extend(tokens)

    completions = sampler.generate(PROMPTS, max_new_tokens=30, temperature=0.0, stop_tokens=stops, on_tokens=listen)
    assert [completion.prompt for completion in completions] == [0, 1, 2, 3]
    for prompt, text, completion in zip(PROMPTS, texts, completions, strict=True):
        assert completion.tokens == until_stop(text, stops)
        assert completion.finish_reason == ("stop" if completion.tokens[-1] in stops else "length")
        want = dense.logprobs(prompt, completion.tokens)
        chex.assert_trees_all_close(np.asarray(completion.logprobs, np.float64), want, atol=1e-3, rtol=1e-3)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert heard == {i: completion.tokens for i, completion in enumerate(completions)}


def test_generate_samples_each_prompt_as_decode_would(sampler: Sampler, dense: Dense) -> None:
    options = {"seed": 5, "temperature": 1.5, "top_k": 30}
    completions = sampler.generate(PROMPTS, max_new_tokens=17, samples=2, **options)
    assert [completion.prompt for completion in completions] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({tuple(completion.tokens) for completion in completions}) == 8
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    _, generated = sampler.decode(sampler.start(prompts), 17, **options)
    for request, completion in enumerate(completions):
        assert (completion.tokens, completion.finish_reason) == (generated.tokens[request], "length")
        want = dense.logprobs(prompts[request], completion.tokens)
        chex.assert_trees_all_close(np.asarray(completion.logprobs, np.float64), want, atol=1e-3, rtol=1e-3)


def test_completions_wait_for_rows_and_pages(sampler: Sampler, dense: Dense) -> None:
    """Three samples of seven prompts are more than eight rows take, and more than the pool holds at a time."""
    with pytest.raises(OutOfPagesError):
        sampler.decode(sampler.start(CROWD), 80)
    completions = sampler.generate(CROWD, max_new_tokens=80, samples=3, temperature=0.0)
    assert [completion.prompt for completion in completions] == [i // 3 for i in range(21)]
    assert [completion.tokens for completion in completions] == [dense.greedy(CROWD[i // 3], 80) for i in range(21)]


def test_streams_give_a_prompt_the_same_tokens_in_any_batch(sampler: Sampler) -> None:
    together = sampler.generate(PROMPTS, max_new_tokens=12, samples=2, seed=3, streams=range(10, 18))
    [alone] = sampler.generate(PROMPTS[2:3], max_new_tokens=12, seed=3, streams=[15])
    assert alone.tokens == together[5].tokens
    assert alone.tokens != together[4].tokens


def test_callbacks_hear_all_that_comes_and_their_errors_end_the_call(sampler: Sampler, dense: Dense) -> None:
    texts: dict[int, list[int]] = {}
    done: list[int] = []

    def hear(completion: int, tokens: list[int]) -> None:
        assert tokens
        texts[completion] = texts.get(completion, []) + tokens

    def finish(index: int, completion: Completion) -> None:
        assert completion.tokens == texts[index]
        done.append(index)

    options = {"max_new_tokens": 30, "samples": 3}
    completions = sampler.generate(PROMPTS, **options, on_tokens=hear, on_completion=finish)
    assert sorted(done) == list(range(12))
    assert texts == {i: completion.tokens for i, completion in enumerate(completions)}

    for callback in ("on_tokens", "on_completion"):
        with pytest.raises(ZeroDivisionError):
            sampler.generate(PROMPTS, **options, **{callback: lambda *_: 1 / 0})
        [after] = sampler.generate(PROMPTS[:1], max_new_tokens=9, temperature=0.0)
        assert after.tokens == dense.greedy(PROMPTS[0], 9)


def test_a_callback_that_generates_is_refused_and_the_others_go_on(sampler: Sampler, dense: Dense) -> None:
    refused = []

    def judge(index: int, completion: Completion) -> None:
        with pytest.raises(RuntimeError, match=r"^sampler: expected nobody to generate in a callback of generate"):
            sampler.generate([completion.tokens], max_new_tokens=1)
        refused.append(index)

    completions = sampler.generate(PROMPTS, max_new_tokens=9, temperature=0.0, on_completion=judge)
    assert sorted(refused) == list(range(len(PROMPTS)))
    assert [completion.tokens for completion in completions] == [dense.greedy(prompt, 9) for prompt in PROMPTS]


def test_what_is_no_function_is_refused_before_anything_runs(sampler: Sampler) -> None:
    for callback in ("on_tokens", "on_completion"):
        with pytest.raises(TypeError, match=rf"^{callback}: expected a function or None, got str"):
            sampler.generate(PROMPTS, max_new_tokens=9, **{callback: "print"})
    state = sampler.start(PROMPTS)
    with pytest.raises(TypeError, match=r"^on_tokens: expected a function or None, got list"):
        sampler.decode(state, 3, on_tokens=[])
    sampler.decode(state, 3)  # it is not used up


def test_generate_shows_progress(sampler: Sampler, capsys: pytest.CaptureFixture) -> None:
    completions = sampler.generate(PROMPTS, max_new_tokens=9, progress=True)
    assert [len(completion.tokens) for completion in completions] == [9] * 4
    assert "36/36" in capsys.readouterr().err
    sampler.generate(PROMPTS, max_new_tokens=9)
    assert capsys.readouterr().err == ""


# --- Arguments that do not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "^prompts: expected at least one prompt"),
        ([[1], []], r"^prompts\[1\]: expected 1 to max_context = 160 tokens, got 0"),
        ([[1] * 161], r"^prompts\[0\]: expected 1 to max_context = 160 tokens, got 161"),
        ([[1, 2], [1, VOCAB]], rf"^prompts\[1\]: expected tokens in \[0, {VOCAB}\), got prompts\[1\]\[1\] = {VOCAB}$"),
        ([[-1]], r"^prompts\[0\]: .* = -1$"),
        ([[0.5]], r"^prompts\[0\]: expected a list of integers, got float64"),
    ],
)
def test_prompts_that_cannot_be_are_refused(sampler: Sampler, prompts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler.start(prompts)
    with pytest.raises(ValueError, match=message):
        sampler.generate(prompts, max_new_tokens=1)


def test_a_state_has_no_more_requests_than_there_are_slots(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match=r"^prompts: expected at most max_requests = 8 requests, got 9"):
        sampler.start([[1]] * 9)


@pytest.mark.parametrize("streams", [[0], [0, -1], [0, 1, 2], [0.5, 1.0]])
def test_streams_must_be_one_number_for_each_request(sampler: Sampler, streams: list) -> None:
    with pytest.raises(ValueError, match=r"^streams: expected "):
        sampler.start([[1], [2]], streams=streams)
    with pytest.raises(ValueError, match=r"^streams: expected "):
        sampler.generate([[1]], samples=2, max_new_tokens=1, streams=streams)


def test_a_prompt_that_the_pool_never_holds_is_refused_before_anything_runs(setup: Setup) -> None:
    sampler = Sampler(setup.dense.model, max_requests=2, num_pages=8, page_size=8, max_context=100)
    heard = []
    with pytest.raises(ValueError, match=r"^prompt: expected at most 8 pages for prompt and max_tokens"):
        sampler.generate([[1], LONG[:60]], max_new_tokens=6, on_tokens=lambda *call: heard.append(call))
    assert not heard


WRONG_OPTIONS = [
    ({"temperature": -0.1}, "^temperature: .*-0.1"),
    ({"temperature": np.nan}, "^temperature: .*nan"),
    ({"temperature": np.inf}, "^temperature: .*inf"),
    ({"top_k": 0}, "^top_k: .*got 0"),
    ({"top_k": 2.5}, "^top_k: .*got 2.5"),
    ({"seed": -1}, r"^seed: expected an integer in \[0, 2\*\*32\), got -1"),
    ({"seed": 2**32}, "^seed: .*got 4294967296"),
    ({"top_p": 0.0}, "^top_p: .*got 0.0"),
    ({"top_p": 1.5}, "^top_p: .*got 1.5"),
    ({"top_p": np.nan}, "^top_p: .*got nan"),
    ({"stop_tokens": [3, VOCAB]}, rf"^stop_tokens: .*got stop_tokens\[1\] = {VOCAB}$"),
    ({"stop_tokens": [-1]}, r"^stop_tokens: .*\[0\] = -1$"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_options_that_cannot_be_are_refused(sampler: Sampler, options: dict, message: str) -> None:
    state = sampler.start([[5]])
    with pytest.raises(ValueError, match=message):
        sampler.decode(state, 5, **options)
    with pytest.raises(ValueError, match=message):
        sampler.generate([[5]], max_new_tokens=5, **options)


@pytest.mark.parametrize("tokens", [0, -3, 2.5])
def test_the_number_of_tokens_must_be_positive(sampler: Sampler, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"^max_tokens: .*got {tokens}"):
        sampler.decode(sampler.start([[5]]), tokens)
    with pytest.raises(ValueError, match=f"^max_(new_)?tokens: .*got {tokens}"):
        sampler.generate([[5]], max_new_tokens=tokens)
    with pytest.raises(ValueError, match=f"^samples: .*got {tokens}"):
        sampler.generate([[5]], max_new_tokens=5, samples=tokens)


def test_the_longest_request_bounds_the_number_of_tokens(sampler: Sampler) -> None:
    state = sampler.start([LONG, [1]])
    with pytest.raises(ValueError, match=r"^max_tokens: expected at most 10, .*got 11"):
        sampler.decode(state, 11)
    state, _ = sampler.decode(state, 10)
    assert state.forest.request_length[:2].tolist() == [CONTEXT, 11]


def test_generate_refuses_too_many_tokens_before_it_generates_any(sampler: Sampler) -> None:
    heard = []
    with pytest.raises(ValueError, match=r"^max_(new_)?tokens: expected at most 10, .*got 11"):
        sampler.generate([LONG, [1]], max_new_tokens=11, on_tokens=lambda *call: heard.append(call))
    assert not heard


@pytest.mark.parametrize("name", ["max_requests", "num_pages", "steps", "max_context"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_of_a_sampler_must_be_positive(sampler: Sampler, setup: Setup, name: str, value: int) -> None:
    sizes = {"max_requests": 2, "num_pages": 8, "steps": 2, "max_context": 16, name: value}
    model = Decoder(sampler.config, nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"^{name}: expected an integer of at least 1, got {value}"):
        Sampler(model, **sizes)


def test_an_unknown_implementation_is_refused(sampler: Sampler) -> None:
    model = Decoder(sampler.config, nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^implementation: .*'nonsense'"):
        Sampler(model, max_requests=2, num_pages=8, implementation="nonsense").start([[1]])


def test_completions_whose_logits_are_not_finite_end_alone(dense: Dense) -> None:
    graph, weights = nnx.split(nnx.clone(dense.model))
    weights["embedding"]["embedding"][...] = weights["embedding"]["embedding"][...].at[13].set(np.nan)
    sampler = new_sampler(nnx.merge(graph, weights))
    prompts = [[13, 1, 2], [14, 1, 2], [3, 4]] * 4  # more than there are rows: some come where others were
    texts = [[] if 13 in prompt else until_stop(dense.greedy(prompt, 20), [13]) for prompt in prompts]
    assert all(13 not in text for text in texts)
    completions = sampler.generate(prompts, max_new_tokens=20, temperature=0.0)
    assert [(each.finish_reason, each.tokens) for each in completions] == [
        ("error" if not text else "length", text) for text in texts
    ]


def test_weights_that_are_not_finite_are_noticed(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = jax.tree.map(lambda x: x * jnp.nan, sampler._device.model.weights)
    monkeypatch.setattr(sampler._device, "model", replace(sampler._device.model, weights=broken))
    state = sampler.start(PROMPTS)
    with pytest.raises(FloatingPointError, match=r"^logits: .*requests \[0, 1, 2, 3\]"):
        sampler.decode(state, 5)


def test_requests_with_finite_logits_go_on_without_those_that_have_none(sampler: Sampler, dense: Dense) -> None:
    state = sampler.start(PROMPTS)
    state = replace(state, logits=state.logits.at[1].set(jnp.nan))
    with pytest.raises(LogitsError, match=r"^logits: .*requests \[1\]") as stopped:
        sampler.decode(state, 20, temperature=0.0)
    state, before = stopped.value.state, stopped.value.generated
    left = 20 - len(before.tokens[0])
    _, after = sampler.decode(sampler.prune(state, [1]), left, temperature=0.0)
    for request in (0, 2, 3):
        assert before.tokens[request] + after.tokens[request] == dense.greedy(PROMPTS[request], 20)


def test_a_state_that_was_used_up_is_refused(sampler: Sampler) -> None:
    state = sampler.start(PROMPTS)
    after, _ = sampler.decode(state, 1)
    for use in (lambda: sampler.decode(state, 1), lambda: sampler.append(state, {0: [1]})):
        with pytest.raises(ValueError, match=r"^state: expected one that no call has used up"):
            use()
    sampler.decode(after, 1)


def test_stop_tokens_may_be_a_set_and_top_k_any_number(sampler: Sampler) -> None:
    ends = [
        sampler.decode(sampler.start(PROMPTS), 9, stop_tokens=stops, top_k=top_k, seed=2**32 - 1)[1].tokens
        for stops, top_k in (({3, 5}, 2**40), ([5, 3], VOCAB))
    ]
    assert ends[0] == ends[1]


# --- Last, for it compiles the step anew ------------------------------------------------------------------------


def test_decoding_ends_when_all_requests_have_stopped(sampler: Sampler) -> None:
    """Every token is a stop token, which are more than the step has room for at first."""
    state, generated = sampler.decode(sampler.start(PROMPTS), 30, stop_tokens=range(VOCAB))
    assert [len(tokens) for tokens in generated.tokens[: len(PROMPTS)]] == [1] * len(PROMPTS)
    assert state.traffic.generated_tokens == len(PROMPTS)
