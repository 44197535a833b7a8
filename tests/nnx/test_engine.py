"""Each request of an engine gets what it gets alone, whatever else happens; nothing leaks, and nothing compiles."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, DOCUMENT, LONG, PAGE_SIZE, PROMPTS, QUESTIONS, VOCAB, Dense, Setup, small_tiles
from engines import (
    assert_alone,
    assert_no_page_leaked,
    greedy,
    leave_pages,
    make_engine,
    random_prompt,
    random_trace,
    run,
)
from flax import nnx

from codec_jax.errors import LogitsError
from codec_jax.nnx import Decoder, DecoderConfig, beam_search, landing
from codec_jax.nnx import engine as engine_module
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.request import Request, Update


@pytest.fixture(scope="module")
def shared(setup: Setup) -> Engine:
    return make_engine(setup.dense.model)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert_no_page_leaked(shared)


@pytest.fixture(scope="module")
def tight(setup: Setup) -> Engine:
    """Pages for little more than one long request, and everybody may enter who has room for the prompt."""
    engine = make_engine(setup.dense.model, room=0.0)
    leave_pages(engine, 26)
    return engine


def with_other_weights(dense: Dense) -> Dense:
    graph, weights = nnx.split(dense.model)
    return Dense(nnx.merge(graph, jax.tree.map(lambda x: x * 1.1 if x.ndim > 1 else x, weights)))


# --- Alone or not ------------------------------------------------------------------------------------------------


def test_greedy_tokens_equal_decoding_alone(engine: Engine, dense: Dense) -> None:
    requests = [engine.submit(prompt, greedy()) for prompt in [*PROMPTS, *PROMPTS, [7]]]
    while len(requests[0].tokens) < 9:
        engine.step()
    engine.warm_up()  # at any time
    run(engine)
    for request in requests:
        assert request.finish_reason == "length"
        assert len(request.tokens) == 20
        assert_alone(request, dense)


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_warming_up_compiles_each_program_once(mesh: tuple[int, int] | None) -> None:
    """And all of them: what runs afterwards finds them."""
    compiled: list[str] = []

    def listen(event: str, *_: object, fun_name: str = "", **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    config = DecoderConfig(VOCAB, 32, 40, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    devices = mesh and jax.make_mesh(mesh, ("context", "tensor"), devices=jax.devices("cpu")[:4])
    engine = Engine(
        Decoder(config, nnx.Rngs(0)), mesh=devices, max_requests=2, num_pages=64, max_context=1024,
        prefill_tokens=256, steps=4,
    )  # fmt: skip
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine.warm_up()
        programs = sum("run" in name or "divided" in name for name in compiled)
        compiled.clear()
        engine.generate([LONG[:90], [7]], greedy(9))
        engine.generate([[7]], greedy(4, matcher=Only({3, 5}, 9)))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert programs == 3  # steps without chunks, with one, and with two: their plans are of one size each
    assert not compiled


def test_what_was_computed_once_is_found_again(engine: Engine, dense: Dense) -> None:
    [first] = engine.generate([LONG[:90]], greedy(10))
    turn = [*LONG[:90], *first.tokens, *QUESTIONS[0]]
    [second] = engine.generate([turn], greedy(10))
    assert second.cached_tokens >= 96  # all whole pages of prompt and answer
    assert_alone(second, dense)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["shared", "tight"])
def test_random_traces(name: str, seed: int, request: pytest.FixtureRequest, dense: Dense) -> None:
    engine: Engine = request.getfixturevalue(name)
    preempted = engine.stats.preempted
    requests = random_trace(engine, np.random.default_rng(seed))
    for each in requests:
        assert each.finish_reason in ("length", "abort")
        assert_alone(each, dense)
    assert {each.finish_reason for each in requests} == {"length", "abort"}
    if name == "tight":
        assert engine.stats.preempted > preempted
    assert_no_page_leaked(engine)


def test_seeds_give_the_same_tokens_in_any_company(engine: Engine) -> None:
    params = SamplingParams(
        max_tokens=15, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=3, repetition_penalty=1.3,
        presence_penalty=0.2, frequency_penalty=0.1, logit_bias={5: 2.0},
    )  # fmt: skip
    alone = engine.submit_samples(PROMPTS[0], 2, params)
    run(engine)
    company = [engine.submit(prompt, SamplingParams(max_tokens=30, seed=9)) for prompt in PROMPTS]
    engine.step()
    again = engine.submit_samples(PROMPTS[0], 2, params)
    run(engine)
    assert [request.tokens for request in again] == [request.tokens for request in alone]
    assert alone[0].tokens != alone[1].tokens
    assert all(len(request.tokens) == 30 for request in company)


def test_a_fork_goes_on_from_where_its_source_is(engine: Engine, dense: Dense) -> None:
    source = engine.submit(PROMPTS[0], greedy(40))
    while len(source.tokens) < 10:
        engine.step()
    before = list(source.tokens)
    same, other = engine.fork(source, greedy(40)), engine.fork(source, SamplingParams(max_tokens=40, seed=1))
    run(engine)
    assert_alone(source, dense)
    assert same.tokens == source.tokens
    assert other.tokens[: len(before)] == before
    assert other.tokens != source.tokens
    np.testing.assert_allclose(other.logprobs, dense.logprobs(PROMPTS[0], other.tokens), atol=2e-4)


def test_forks_draw_numbers_of_their_own(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, stream=2**31 - 3)
    samples = engine.submit_samples(PROMPTS[0], 3, params)
    forks = [engine.fork(samples[0]) for _ in range(2)]
    forks += [engine.fork(forks[0]), engine.fork(samples[2])]
    run(engine)
    assert len({tuple(request.tokens) for request in (*samples, *forks)}) == 7


def test_what_is_no_function_is_refused(engine: Engine) -> None:
    source = engine.submit(PROMPTS[0], greedy(2))
    for call in (engine.submit, lambda prompt, **given: engine.submit_samples(prompt, 2, **given)):
        with pytest.raises(TypeError, match=r"^on_update: expected a function or None, got str"):
            call(PROMPTS[0], on_update="print")
    with pytest.raises(TypeError, match=r"^on_update: expected a function or None, got int"):
        engine.fork(source, on_update=1)
    run(engine)
    assert_no_page_leaked(engine)


def test_tokens_of_a_larger_vocabulary_are_not_forked(engine: Engine) -> None:
    other = Request(0, np.array([1, VOCAB]), greedy(4), None)
    with pytest.raises(ValueError, match=rf"^request: expected tokens in \[0, {VOCAB}\), got request\[1\] = {VOCAB}$"):
        engine.fork(other)


def test_what_ended_a_request_ends_its_fork_or_is_left_out(engine: Engine, dense: Dense) -> None:
    tokens = dense.greedy(PROMPTS[0], 20)
    stop = tokens[6]
    [source] = engine.generate([PROMPTS[0]], greedy(20, stop_tokens=[stop]))
    count = tokens.index(stop) + 1
    same, on = engine.fork(source), engine.fork(source, greedy(20))
    run(engine)
    for request in (source, same):
        assert (request.tokens, request.finish_reason) == (tokens[:count], "stop")
    assert (on.tokens, on.finish_reason) == (tokens, "length")


def test_requests_of_another_engine_are_refused(engine: Engine, dense: Dense) -> None:
    other = make_engine(dense.model)
    request = other.submit(PROMPTS[0], greedy(2))
    for call in (engine.abort, lambda request: list(engine.stream(request))):
        with pytest.raises(ValueError, match=r"^request: expected one of this engine's, got Request\(0, .* of another"):
            call(request)
    assert [update.finish_reason for update in other.stream(request)][-1] == "length"
    engine.abort(request)  # nothing happens to one that is finished
    assert request.finish_reason == "length"


def test_a_fork_that_asks_for_more_than_its_source_keeps_what_that_has(engine: Engine) -> None:
    source = engine.submit(PROMPTS[0], greedy(6))
    run(engine)
    fork = engine.fork(source, greedy(10, top_logprobs=2))
    assert fork.tokens == source.tokens
    run(engine)
    assert fork.tokens[:6] == source.tokens
    assert [len(each) for each in fork.top_logprobs] == [0] * 6 + [2] * 4
    less = engine.fork(fork, greedy(12))
    run(engine)
    assert less.tokens[:10] == fork.tokens
    assert less.top_logprobs == []


def test_an_engine_is_not_idle_before_it_has_told_of_everything(setup: Setup, engine: Engine) -> None:
    request, told = engine.submit(PROMPTS[0], greedy(4)), []
    for count in range(20):
        told += engine.step() if not engine.idle else []
        if count == 1:
            engine.update_weights(setup.dense.model)  # which takes in the step that is under way
    assert request.finished
    assert told[-1] is request


@pytest.mark.parametrize(("tokens", "reason"), [(8, "length"), (30, "abort")])
def test_a_callback_may_abort_a_request_that_lands_with_its_own(engine: Engine, tokens: int, reason: str) -> None:
    heard: list[Update] = []
    requests: list[Request] = []

    def first(_: Request, update: Update) -> None:
        if update.finish_reason:
            engine.abort(requests[1])

    requests.append(engine.submit(PROMPTS[0], greedy(8), on_update=first))
    requests.append(engine.submit(PROMPTS[0], greedy(tokens), on_update=lambda _, update: heard.append(update)))
    run(engine)
    assert requests[1].finish_reason == reason  # one that has ended in the same step has nothing to abort
    told = [token for update in heard for token in update.tokens]
    assert told == requests[1].tokens[: len(told)]
    assert [update.finish_reason for update in heard if update.finish_reason] == ["length"] * (reason == "length")


def test_who_is_aborted_by_the_callback_of_an_error_has_nothing_more(engine: Engine, dense: Dense) -> None:
    """Also where tokens of both have come with the same step."""
    had: list[int] = []
    ends: list[str | None] = []

    def cancel(_: Request, update: Update) -> None:
        if update.finish_reason == "error":
            engine.abort(first)
            had.append(len(first.tokens))

    first = engine.submit(PROMPTS[0], greedy(30), on_update=lambda _, update: ends.append(update.finish_reason))
    failing = engine.submit(PROMPTS[0], greedy(matcher=Failing({1, 2, 3}, 6)), on_update=cancel)
    run(engine)
    assert isinstance(failing.error, RuntimeError)
    assert (first.finish_reason, [len(first.tokens)]) == ("abort", had)
    assert ends[-1] is None
    assert_alone(first, dense)


def test_samples_are_all_taken_or_none(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"stream: expected"):
        engine.submit_samples([1, 2], 3, SamplingParams(max_tokens=50, stream=2**31 - 2))
    assert engine.idle


# --- What comes with the tokens ----------------------------------------------------------------------------------


def test_log_probabilities_of_prompts_and_completions(engine: Engine, dense: Dense) -> None:
    for _ in range(2):  # what is cached is scored alike
        prompts = [*PROMPTS, LONG[:140]]
        requests = [engine.submit(prompt, greedy(4, prompt_logprobs=True)) for prompt in prompts]
        pairs = [(PROMPTS[0], LONG[:70]), (PROMPTS[0], [3]), (LONG[:3], LONG[3:150]), (PROMPTS[0], LONG[:70])]
        scores = engine.score(*zip(*pairs, strict=True))
        run(engine)
        for request, prompt in zip(requests, prompts, strict=True):
            np.testing.assert_allclose(request.prompt_logprobs, dense.logprobs(prompt[:1], prompt[1:]), atol=2e-4)
            assert_alone(request, dense)
        for (prompt, completion), got in zip(pairs, scores, strict=True):
            np.testing.assert_allclose(got, dense.logprobs(prompt, completion), atol=2e-4)


def test_scores_of_what_is_cached_leave_others_all_their_tokens(engine: Engine, dense: Dense) -> None:
    """A step with chunks draws one token of each request, also where every context is computed."""
    engine.score([DOCUMENT], [QUESTIONS[0]])
    request = engine.submit(PROMPTS[1], greedy(20))
    while len(request.tokens) < 2:
        engine.step()
    engine.score([DOCUMENT], [QUESTIONS[0]])
    run(engine)
    assert len(request.tokens) == 20
    assert_alone(request, dense)


def test_top_logprobs_are_those_of_the_model(engine: Engine, dense: Dense) -> None:
    request = engine.submit(PROMPTS[1], SamplingParams(max_tokens=6, top_logprobs=5, temperature=2.0))
    run(engine)
    for i, tops in enumerate(request.top_logprobs):
        logits = dense.logits([*PROMPTS[1], *request.tokens[:i]]).astype(np.float64)
        want = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert list(tops) == np.argsort(-want)[:5].tolist()
        np.testing.assert_allclose(list(tops.values()), np.sort(want)[::-1][:5], atol=2e-4)


def test_stop_tokens_end_a_request(engine: Engine, dense: Dense) -> None:
    text = dense.greedy(PROMPTS[0], 20)
    stop = next(token for i, token in enumerate(text) if i > 4 and token not in text[:i])
    request = engine.submit(PROMPTS[0], greedy(20, stop_tokens=[stop]))
    run(engine)
    assert request.tokens == text[: text.index(stop) + 1]
    assert request.finish_reason == "stop"


def test_loops_that_run_to_their_ends_draw_the_same(
    setup: Setup, dense: Dense, monkeypatch: pytest.MonkeyPatch, compilations: list
) -> None:
    """As on a GPU: after the last token of all requests, further turns change nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    engine = make_engine(setup.dense.model, steps=3)  # of no other test: loops are chosen where they are traced
    text = dense.greedy(PROMPTS[0], 11)
    stop = next(token for i, token in enumerate(text) if i > 2 and token not in text[:i])
    compilations.clear()
    stops = engine.submit(PROMPTS[0], greedy(11, stop_tokens=[stop]))
    requests = [engine.submit(prompt, greedy(5 + i)) for i, prompt in enumerate(PROMPTS)]
    run(engine)
    [late] = engine.generate([[*PROMPTS[0], *stops.tokens]], greedy(1))
    assert not compilations
    assert stops.tokens == text[: text.index(stop) + 1]
    for i, request in enumerate(requests):
        assert len(request.tokens) == 5 + i
    for request in (stops, late, *requests):
        assert_alone(request, dense)
    assert_no_page_leaked(engine)


class Only:
    """A constraint: tokens of a set, and a stop after so many."""

    def __init__(self, tokens: set[int], count: int) -> None:
        self.tokens, self.count = tokens, count

    def compute_bitmask(self) -> bytes:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[list(self.tokens)] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def consume_token(self, token: int) -> bool:
        self.count -= 1
        return token in self.tokens

    def is_stopped(self) -> bool:
        return self.count <= 0

    def deep_copy(self) -> "Only":
        return type(self)(self.tokens, self.count)


class Failing(Only):
    """A constraint with an error when it would stop."""

    def consume_token(self, token: int) -> bool:
        if self.count == 1:
            raise RuntimeError("no grammar")
        return super().consume_token(token)


def test_a_matcher_says_what_may_come_and_when_it_ends(engine: Engine, dense: Dense) -> None:
    others = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    matcher = Only({3, 11, 40}, 7)
    request = engine.submit(PROMPTS[0], greedy(20, matcher=matcher))
    again = engine.submit(PROMPTS[0], greedy(20, matcher=matcher))  # each has a copy
    run(engine)
    want: list[int] = []
    while len(want) < 7:
        want.append(max(matcher.tokens, key=lambda token: dense.logits([*PROMPTS[0], *want])[token]))
    assert request.tokens == again.tokens == want
    assert request.finish_reason == "stop"
    fork = engine.fork(request)  # has nothing to go on with
    run(engine)
    assert (fork.tokens, fork.finish_reason) == (want, "stop")
    for other in others:
        assert_alone(other, dense)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (bytes(VOCAB), "matcher: expected a token to be allowed"),
        (b"\xff" * (VOCAB // 8), "matcher: expected a mask of words of 4 bytes, got 6 bytes"),
    ],
)
def test_a_mask_of_no_token_or_of_half_a_word_ends_its_request(
    mask: bytes, message: str, engine: Engine, dense: Dense
) -> None:
    class Nothing(Only):
        def compute_bitmask(self) -> bytes:
            return super().compute_bitmask() if self.count > 2 else mask

    other = engine.submit(PROMPTS[1], greedy())
    [request] = engine.generate([PROMPTS[0]], greedy(20, matcher=Nothing({3, 11}, 4)))
    assert request.finish_reason == "error"
    assert message in str(request.error)
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPTS[0], greedy(20, matcher=Nothing({3, 11}, 2)))
    run(engine)
    assert_alone(other, dense)


# --- Others are not harmed ---------------------------------------------------------------------------------------


def test_errors_of_one_request_leave_the_others_alone(engine: Engine, dense: Dense) -> None:
    class Broken(Only):
        def consume_token(self, token: int) -> bool:
            raise RuntimeError("no grammar")

    def fails(request: Request, update: Update) -> None:
        if len(request.tokens) > 6:
            raise OSError("nobody listens")

    heard: list[Update] = []
    good = engine.submit(PROMPTS[0], greedy(), on_update=lambda _, update: heard.append(update))
    bad = engine.submit(PROMPTS[0], greedy(), on_update=fails)
    ended: list[str | None] = []
    worse = engine.submit(
        PROMPTS[0], greedy(matcher=Broken({1}, 9)), on_update=lambda _, update: ended.append(update.finish_reason)
    )
    gone = engine.submit(PROMPTS[2], greedy())
    engine.step()
    engine.abort(gone)
    run(engine)
    assert isinstance(bad.error, OSError)
    assert isinstance(worse.error, RuntimeError)
    assert ended == ["error"]
    assert (bad.finish_reason, worse.finish_reason, gone.finish_reason) == ("error", "error", "abort")
    assert_alone(good, dense)
    assert [token for update in heard for token in update.tokens] == good.tokens
    assert [update.finish_reason for update in heard][-2:] == [None, "length"]


def test_what_is_no_tokenizer_is_refused_at_once(setup: Setup) -> None:
    with pytest.raises(TypeError, match=r"^tokenizer: expected a Tokenizer, got str"):
        Engine(setup.dense.model, max_requests=2, num_pages=8, tokenizer="Qwen3-4B")  # type: ignore[arg-type]


def test_requests_that_can_never_fit_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"prompt: expected at most max_context = 160 tokens together"):
        engine.submit(LONG[:150], greedy(11))
    with pytest.raises(ValueError, match=r"prompt: expected at least one token, got none"):
        engine.submit([], greedy())
    with pytest.raises(ValueError, match=rf"prompt: expected tokens in \[0, {VOCAB}\), got prompt\[1\] = {VOCAB}"):
        engine.submit([1, VOCAB], greedy())
    with pytest.raises(ValueError, match=rf"^prompts\[2\]: .* got prompts\[2\]\[1\] = {VOCAB}$"):
        engine.generate([[1], [2], [3, VOCAB]], greedy())
    with pytest.raises(ValueError, match=rf"^prompts\[1\]: expected at most max_context = {CONTEXT} tokens"):
        engine.generate([[1], [2] * CONTEXT], greedy())
    with pytest.raises(ValueError, match=r"stop: expected no stop strings, for the engine has no tokenizer"):
        engine.submit([1], greedy(stop=["x"]))
    with pytest.raises(ValueError, match=r"prompt: expected token ids, for the engine has no tokenizer, got text"):
        engine.submit("text", greedy())
    with pytest.raises(ValueError, match=r"params: expected max_tokens above the 0 tokens that request"):
        engine.fork(engine.submit([1], greedy(0)), greedy(0))
    assert engine.idle or engine.stats.waiting == 1


@pytest.mark.parametrize("single", [5, None, "text"])
def test_a_single_prompt_is_no_list_of_prompts(engine: Engine, single: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts: expected a list with one for each request"):
        engine.generate(single)
    with pytest.raises(ValueError, match=r"^prompts: expected a list with one for each request"):
        engine.score(single, [[1]])
    with pytest.raises(ValueError, match=r"^completions: expected a list with one for each request"):
        engine.score([[1]], single)
    with pytest.raises(
        ValueError, match=rf"^prompts\[1\]: expected at most max_context = {CONTEXT} tokens .*, got 161$"
    ):
        engine.score([[1], [1] * CONTEXT], [[2], [2]])
    run(engine)
    with pytest.raises(ValueError, match=r"^prompts: expected lists of token ids, got token ids; write \[\[...\]\]"):
        engine.generate([1, 2])
    with pytest.raises(TypeError, match=r"^request: expected a Request"):
        engine.unpin([single])


def test_prompts_are_scored_beside_those_that_compute_them(setup: Setup, dense: Dense) -> None:
    """Where what scores ends, nodes are cut, and what is stored in the same step must not lie on both sides."""
    engine, prompt = make_engine(setup.dense.model), LONG[:150]
    engine.generate([prompt[:PAGE_SIZE]], greedy(0))
    requests = [engine.submit(prompt, greedy(9)), engine.submit(prompt, greedy(9, prompt_logprobs=True))]
    run(engine)
    for request in (*requests, *engine.generate([prompt], greedy(9))):
        assert_alone(request, dense)
    np.testing.assert_allclose(requests[1].prompt_logprobs, dense.logprobs(prompt[:1], prompt[1:]), atol=2e-4)


def test_a_pin_counts_before_it_is_computed(setup: Setup) -> None:
    """Otherwise a request would be taken that waits for ever once it is."""
    engine = make_engine(setup.dense.model)
    fillers = leave_pages(engine, 24)
    pins = [engine.pin(DOCUMENT), engine.pin([*DOCUMENT, 1])]  # of the same pages, but for one at most
    for _ in range(2):
        with pytest.raises(ValueError, match=r"prompt: expected at most 1[89] pages for prompt and max_tokens"):
            engine.submit(LONG[:140], greedy(20))
        run(engine)
        engine.update_weights(setup.dense.model)  # everything is to be computed again
    engine.abort(pins[1])
    assert engine.submit(LONG[:140], greedy(10)).finish_reason is None
    for pin in (*pins, *fillers):
        engine.unpin(pin)
    run(engine)
    assert_no_page_leaked(engine)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a request"])
def test_a_pin_of_a_text_that_beams_found_takes_no_more_pages_than_it_has_tokens_for(
    beside: bool, setup: Setup, dense: Dense
) -> None:
    """Each token of a beam may have a page of its own, which others must not wait for in vain."""
    engine = make_engine(setup.dense.model)
    best, *_ = beam_search(engine, LONG[:20], beams=4, max_tokens=24)
    text, unpinned = [*LONG[:20], *best.tokens], engine._pages_unpinned()
    if beside:  # this one may have the pages of the beam
        engine.submit([*text, 7], greedy(3))
    pin = engine.pin(text)
    run(engine)
    assert unpinned - engine._pages_unpinned() == -(-len(text) // PAGE_SIZE)
    largest = engine._pages_unpinned() * PAGE_SIZE - 20
    [request] = engine.generate([LONG[40:60]], greedy(min(largest, CONTEXT - 20)))
    assert request.finish_reason == "length"
    engine.unpin(pin)
    assert_no_page_leaked(engine)


def test_what_extends_a_pinned_prefix_needs_room_for_the_rest_only(setup: Setup, dense: Dense) -> None:
    engine = make_engine(setup.dense.model)
    fillers = leave_pages(engine, 19)
    prefix = LONG[: 16 * PAGE_SIZE]
    pin = engine.pin(prefix)
    for cached in (0, len(prefix)):  # before it is computed, and when it is there
        assert engine._pages_unpinned() == 3
        request, fork = engine.submit([*prefix, 5], greedy(3 * PAGE_SIZE)), engine.fork(pin, greedy(9))
        with pytest.raises(ValueError, match=r"prompt: expected at most 3 pages .* beside what is pinned, got 4;"):
            engine.submit([*prefix, 5], greedy(3 * PAGE_SIZE + 1))
        with pytest.raises(ValueError, match=r"prompt: expected at most 3 pages .* beside what is pinned, got 4;"):
            engine.submit([*prefix[:-1], 5], greedy(2 * PAGE_SIZE + 2))
        run(engine)
        assert request.cached_tokens >= cached
        assert_alone(request, dense)
        assert_alone(fork, dense)
    for each in (pin, *fillers):
        engine.unpin(each)
    assert_no_page_leaked(engine)


def test_pins_that_wait_and_requests_that_are_finished_do_not_count_twice(setup: Setup) -> None:
    engine = make_engine(setup.dense.model)
    fillers = leave_pages(engine, 24)
    engine.abort(engine.submit(LONG[:100], greedy(60)))
    first = engine.pin(LONG[: 12 * PAGE_SIZE])
    engine.submit([*LONG[: 12 * PAGE_SIZE], 3], greedy(4))  # which needs a page beside what is pinned
    with pytest.raises(ValueError, match=r"prompt: expected at most 11 pages of 8 tokens to pin, .* got 12;"):
        engine.pin(LONG[1 : 1 + 12 * PAGE_SIZE])
    second = engine.pin(LONG[1 : 1 + 11 * PAGE_SIZE])
    third = engine.pin(LONG[: 11 * PAGE_SIZE])  # in pages of the first
    run(engine)
    assert engine._pages_unpinned() == 1
    for each in (first, second, third, *fillers):
        engine.unpin(each)
    run(engine)
    assert_no_page_leaked(engine)


def test_pins_stay_and_leave_room_for_the_others(setup: Setup, dense: Dense) -> None:
    engine = make_engine(setup.dense.model)
    fillers = leave_pages(engine, 24)
    pin = engine.pin(DOCUMENT)
    run(engine)
    assert pin.finish_reason == "length"
    for start in range(6):  # the rest of the pool is used again and again
        assert_alone(engine.generate([LONG[start : start + 110]], greedy(20))[0], dense)
    [request] = engine.generate([[*DOCUMENT, 1, 2]], greedy(8))
    assert request.cached_tokens >= 32
    with pytest.raises(ValueError, match=r"prompt: expected at most 19 pages for prompt and max_tokens"):
        engine.submit(LONG[:140], greedy(18))
    waiting = engine.submit(LONG[:140], greedy(10))
    with pytest.raises(ValueError, match=r"prompt: expected at most 0 pages of 8 tokens to pin"):
        engine.pin([1, 2, 3])
    run(engine)
    assert_alone(waiting, dense)
    engine.unpin(pin)
    with pytest.raises(ValueError, match=r"request: expected one that pin returned"):
        engine.unpin(pin)
    for filler in fillers:
        engine.unpin(filler)
    assert_no_page_leaked(engine)


def test_logits_that_are_not_finite_end_their_request_and_are_not_cached(setup: Setup) -> None:
    graph, weights = nnx.split(setup.dense.model)
    broken = jax.tree.map(lambda x: x, weights)
    broken["embedding"]["embedding"][...] = weights["embedding"]["embedding"][...].at[13].set(np.nan)
    engine = make_engine(nnx.merge(graph, broken))
    good, bad = engine.submit([1, 2, 3], greedy(5)), engine.submit([1, 2, 13, *range(12)], greedy(5))
    run(engine)
    assert good.finish_reason == "length"
    assert isinstance(bad.error, LogitsError)
    with pytest.raises(LogitsError, match="logits: expected finite numbers"):
        engine.score([[1]], [[13, 2]])
    assert engine._scheduler.cache.match([1, 2, 13, *range(12)]).length == 0


@pytest.mark.parametrize("place", ["schedule", "dispatch", "run", "fetch", "grow", "finish"])
def test_an_interruption_costs_only_time(
    place: str, engine: Engine, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, also while the device has the pages: everybody goes on with what was generated."""
    pin = engine.pin(DOCUMENT)
    requests = [engine.submit(prompt, greedy(15 + i)) for i, prompt in enumerate(PROMPTS * 2)]
    target, name = {
        "schedule": (engine._scheduler, "_compute"),
        "dispatch": (engine._device, "_chunks"),
        "run": (engine._device, "_run"),
        "fetch": (engine_module, "fetch"),
        "grow": (engine._scheduler, "grow"),
        "finish": (landing, "finish"),
    }[place]
    works = getattr(target, name)

    def interrupted(*arguments: Any) -> None:
        works(*arguments)
        monkeypatch.undo()
        small_tiles(monkeypatch)
        raise KeyboardInterrupt

    told: list[Request] = []

    def go_on() -> None:
        while not engine.idle:
            told.extend(engine.step())

    for steps in (1, 3, 2):
        for _ in range(steps):
            told += engine.step()
        monkeypatch.setattr(target, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            go_on()
        requests.append(engine.submit(PROMPTS[0], greedy(12)))
    go_on()
    assert set(requests) < set(told)
    for request in requests:
        assert request.finish_reason == "length"
        assert_alone(request, dense)
    assert engine._scheduler.cache.match(DOCUMENT).length == len(DOCUMENT)
    engine.unpin(pin)


def test_a_step_that_fails_after_it_was_dispatched_costs_only_time(engine: Engine, dense: Dense) -> None:
    """What it gave back is not deleted, and nobody can have its numbers."""

    def fail(_: Any) -> None:
        raise RuntimeError("a device that fails")

    @jax.jit
    def slow(x: Any) -> Any:  # what waits for it is dispatched before it fails
        return jax.lax.fori_loop(0, 50, lambda _, x: x @ x / 1e3, x)

    @jax.jit
    def failing(x: Any, late: Any) -> Any:
        number = jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), late[0, 0])
        return jax.tree.map(lambda x: x + number.astype(x.dtype), x)

    first, second = engine.submit(PROMPTS[0], greedy()), engine.submit(PROMPTS[1], greedy())
    engine.step()
    engine.step()
    engine._device._pages = failing(engine._device._pages, slow(jnp.ones((1000, 1000))))
    assert not any(array.is_deleted() for array in jax.tree.leaves(engine._device._pages))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a device that fails"):
        run(engine)
    run(engine)
    for request in (first, second):
        assert_alone(request, dense)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_callback_that_is_interrupted_costs_no_other_its_news(nth: int, engine: Engine, dense: Dense) -> None:
    heard: dict[Request, list[Update]] = {}
    calls = itertools.count(1)

    def listen(request: Request, update: Update) -> None:
        heard.setdefault(request, []).append(update)
        if next(calls) == nth:
            raise KeyboardInterrupt

    requests = [engine.submit(prompt, greedy(4 + 3 * i), on_update=listen) for i, prompt in enumerate(PROMPTS[:3])]
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    run(engine)
    for request in requests:
        assert_alone(request, dense)
        assert [token for update in heard[request] for token in update.tokens] == request.tokens
        assert [update.finish_reason for update in heard[request] if update.finish_reason] == ["length"]


@pytest.mark.parametrize("name", ["update_weights", "warm_up"])
def test_an_interruption_of_what_lands_a_step_costs_only_time(
    name: str, engine: Engine, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    while len(requests[0].tokens) < 5:
        engine.step()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(engine, name)(*[dense.model] * (name == "update_weights"))
    run(engine)
    for request in requests:
        assert request.finish_reason == "length"
        assert_alone(request, dense)


def test_an_interruption_leaves_nothing_of_the_old_weights_beside_the_new_ones(
    engine: Engine, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = with_other_weights(dense)
    taken = engine._device.take_weights

    def interrupted(*placed: Any) -> None:
        taken(*placed)
        raise KeyboardInterrupt

    engine.generate([LONG[:100]], greedy(2))
    with monkeypatch.context() as patch:
        patch.setattr(engine._device, "take_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(other.model)
    [request] = engine.generate([LONG[:100]], greedy(5))
    assert_alone(request, other)
    engine.update_weights(dense.model)


def test_log_probabilities_of_a_prompt_are_all_of_the_same_weights(engine: Engine, dense: Dense) -> None:
    other = with_other_weights(dense)
    rng = np.random.default_rng(7)
    for _ in range(2):  # a chunk of the step each, which leaves one
        engine.submit(rng.integers(0, VOCAB, 120), greedy(1))
    request = engine.submit(LONG, SamplingParams(max_tokens=0, prompt_logprobs=True))
    engine.step()
    engine.update_weights(other.model)
    assert not request.finished
    run(engine)
    np.testing.assert_allclose(request.prompt_logprobs, other.logprobs(LONG[:1], LONG[1:]), atol=2e-4)
    engine.update_weights(dense.model)


def test_an_interruption_hides_no_request_that_has_finished(
    engine: Engine, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, told = engine.submit([1, 2, 3], greedy(3)), []
    while not any(running.flying for running in engine._scheduler.running):
        engine.step()
    engine.update_weights(dense.model)
    assert first.finished  # and no step has said so
    last = engine.submit([5, 6, 7], greedy(5))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._device, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while not engine.idle:
        told += engine.step()
    assert {first, last} <= {*told}


def test_an_interruption_tells_nobody_twice_and_of_all_that_fail_to_begin_again(
    engine: Engine, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = dense.greedy(PROMPTS[0], 20)
    stop = next(token for at, token in enumerate(text) if at >= 6 and token not in text[:at])
    ended, told = engine.submit(PROMPTS[0], greedy(stop_tokens=[stop])), []
    while not ended.finished:
        told += engine.step()
    assert told.count(ended) >= 1
    assert any(running.request is ended for running in engine._flight.step.drawing)
    retries: list[Request] = []
    waiting = engine.submit(
        PROMPTS[1], greedy(), on_update=lambda *_: retries.append(engine.submit(PROMPTS[1], greedy(3)))
    )

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def failing(request: Request, *_: Any) -> None:
        if request is waiting:
            raise ValueError("no text")

    with monkeypatch.context() as patch:
        patch.setattr(engine._device, "dispatch", interrupted)
        patch.setattr(engine_module, "begin", failing)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    news = engine.step()
    assert ended not in news
    assert waiting in news
    assert waiting.finish_reason == "error"
    run(engine)
    [retry] = retries
    assert_alone(retry, dense)


def test_a_pin_that_is_interrupted_as_it_finishes_waits_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = engine.pin(DOCUMENT)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    assert list(engine._scheduler.queue) == [pin]
    run(engine)
    assert pin.finish_reason == "length"
    engine.unpin(pin)


@pytest.mark.parametrize("name", ["step", "generate", "score", "update_weights", "warm_up"])
def test_a_callback_that_steps_ends_its_request_alone(name: str, engine: Engine, dense: Dense) -> None:
    given = {"generate": ([[1, 2]], greedy(3)), "score": ([[1, 2]], [[3]]), "update_weights": (dense.model,)}

    def step(request: Request, update: Update) -> None:
        del request, update
        getattr(engine, name)(*given.get(name, ()))

    failed, other = engine.submit(PROMPTS[0], greedy(), on_update=step), engine.submit(PROMPTS[2], greedy())
    run(engine)
    assert failed.finish_reason == "error"
    with pytest.raises(RuntimeError, match="engine: expected nobody to step"):
        raise failed.error or AssertionError
    assert other.finish_reason == "length"
    assert_alone(other, dense)


def test_a_callback_may_submit_fork_and_pin(engine: Engine, dense: Dense) -> None:
    made: list[Request] = []

    def more(request: Request, update: Update) -> None:
        del update
        if not made:
            made.extend([engine.submit(PROMPTS[1], greedy(7)), engine.fork(request, greedy(25)), engine.pin(DOCUMENT)])

    first = engine.submit(PROMPTS[0], greedy(), on_update=more)
    run(engine)
    for request in (first, *made[:2]):
        assert request.finish_reason == "length"
        assert_alone(request, dense)
    engine.unpin(made[2])


def test_a_pin_that_gives_way_while_it_is_in_flight_comes_again(engine: Engine, dense: Dense) -> None:
    other = engine.submit(PROMPTS[0], greedy())
    pin = engine.pin([*range(20), 3])
    while not any(running.request is pin and running.flying for running in engine._scheduler.running):
        engine.step()
    assert engine._scheduler.running[-1].request is pin
    engine._scheduler._give_way(engine._scheduler.running[-1])  # as when pages run short
    run(engine)
    assert pin.finish_reason == "length"
    assert_alone(other, dense)
    assert engine._scheduler.cache.match([*range(20), 3]).length == 21
    engine.unpin(pin)


# --- Steady state ------------------------------------------------------------------------------------------------


def test_new_weights_are_used_at_once_and_nothing_compiles(engine: Engine, dense: Dense, compilations: list) -> None:
    other = with_other_weights(dense)
    other.logits(PROMPTS[0])  # compiles here
    pin = engine.pin(DOCUMENT)
    run(engine)
    running = engine.submit(PROMPTS[0], greedy(30))
    while len(running.tokens) < 10:
        engine.step()
    before = list(running.tokens)
    del compilations[:]
    engine.update_weights(other.model)
    run(engine)
    [again] = engine.generate([PROMPTS[0]], greedy())
    engine.unpin(pin)
    engine.update_weights(dense.model)
    [back] = engine.generate([PROMPTS[0]], greedy())
    assert not compilations
    assert before == dense.greedy(PROMPTS[0], 30)[: len(before)]
    assert running.tokens[len(before) :] == other.greedy([*PROMPTS[0], *before], 30 - len(before))
    assert_alone(again, other)
    assert again.cached_tokens >= 32  # the pinned prefix was computed again
    assert_alone(back, dense)
    layers = dense.model.config.num_layers
    with pytest.raises(ValueError, match=rf"^model: .* as before, got num_layers = 1 in place of {layers}$"):
        engine.update_weights(Decoder(dataclasses.replace(dense.model.config, num_layers=1), nnx.Rngs(0)))
    wrong = nnx.clone(dense.model)
    wrong.norm.scale.set_value(wrong.norm.scale[...].astype(jax.numpy.bfloat16))
    with pytest.raises(ValueError, match=r"^model: .* as before, got norm.scale = .*bfloat16.* in place of .*float32"):
        engine.update_weights(wrong)


def test_nothing_compiles_while_2000_requests_pass(engine: Engine, compilations: list) -> None:
    rng = np.random.default_rng(5)
    del compilations[:]
    texts = [random_prompt(rng) for _ in range(300)]
    for i in range(2000):
        options = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_logprobs": 3}, {"logit_bias": {1: 2.0}}][i % 5]
        max_tokens = int(rng.geometric(0.4))
        engine.submit(texts[i % 300], SamplingParams(max_tokens=max_tokens, prompt_logprobs=i % 50 == 0, **options))
        if i % 100 == 99:
            run(engine)
    assert not compilations
    assert engine.stats.waiting == 0
