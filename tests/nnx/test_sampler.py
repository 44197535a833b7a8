"""The sampler against dense attention over each request alone, token by token."""

import chex
import jax
import numpy as np
import pytest
from cases import (
    CONTEXT,
    DOCUMENT,
    LONG,
    PAGE_SIZE,
    PAGES,
    PROMPTS,
    REQUESTS,
    SECTION,
    STEPS,
    Dense,
    Setup,
    assert_logits_follow,
    new_sampler,
    numbered,
    stops_for,
    until_stop,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.nnx import Sampler, prefill

# --- Prefill ----------------------------------------------------------------------------------------------------

PROMPT_SETS = {
    "shared prefixes": PROMPTS,
    "equal prompts": [DOCUMENT, DOCUMENT, SECTION, DOCUMENT],
    "prefixes of each other": [DOCUMENT[:16], DOCUMENT, DOCUMENT[:1], DOCUMENT[:17]],
    "one token": [[5]],
    "longer than a wave": [LONG, LONG[:90] + SECTION, LONG[:130], SECTION],
}


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_start_gives_the_logits_of_every_prompt(sampler: Sampler, dense: Dense, name: str) -> None:
    prompts = PROMPT_SETS[name]
    assert_logits_follow(sampler.start(prompts), numbered(prompts), dense)


def prefill_in_waves_of(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a chunk a page, and a wave so many chunks."""
    monkeypatch.setattr(prefill, "MAX_CHUNK_TOKENS", PAGE_SIZE)
    monkeypatch.setattr(prefill, "MAX_WAVE_TOKENS", chunks * PAGE_SIZE)


@pytest.mark.parametrize("name", ["shared prefixes", "longer than a wave"])
def test_prefill_in_many_waves_gives_the_same_logits(
    sampler: Sampler, dense: Dense, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    prefill_in_waves_of(4, monkeypatch)
    prefill_step, waves = sampler._device.prefill_program, []
    monkeypatch.setattr(sampler._device, "prefill_program", lambda *args: [waves.append(None), prefill_step(*args)][1])
    state = sampler.start(PROMPT_SETS[name])
    assert len(waves) > 3
    assert_logits_follow(state, numbered(PROMPT_SETS[name]), dense)


@settings(max_examples=6)
@given(
    tokens=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=8),
    common=st.integers(0, 20),
)
def test_random_families_of_prompts_are_prefilled_exactly(setup: Setup, tokens: list[list[int]], common: int) -> None:
    prompts = [LONG[:common] + prompt for prompt in tokens]
    with pytest.MonkeyPatch.context() as monkeypatch:
        prefill_in_waves_of(8, monkeypatch)
        assert_logits_follow(setup.sampler.start(prompts), numbered(prompts), setup.dense)


def test_prompts_of_any_number_and_length_take_few_programs(sampler: Sampler) -> None:
    """One for up to 8 chunks, one for up to 32."""
    rng = np.random.default_rng(0)
    compiled = sampler._device.prefill_program.jitted._cache_size()
    for _ in range(12):
        common = LONG[: rng.integers(40)]
        sampler.start([common + LONG[rng.integers(60) :][: rng.integers(1, 50)] for _ in range(rng.integers(1, 9))])
    assert sampler._device.prefill_program.jitted._cache_size() <= compiled + 2


def test_prefill_computes_every_shared_token_once(sampler: Sampler) -> None:
    """Pages are taken for the distinct prefixes only: document 5, section 2, questions 1, 1, 2 and 2."""
    assert sampler.start(PROMPTS).pool.num_free == PAGES - 13


# --- Decoding ---------------------------------------------------------------------------------------------------


def test_greedy_decoding_with_new_plans_underway_equals_dense_decoding_of_each_request(
    sampler: Sampler, dense: Dense
) -> None:
    state, generated = sampler.decode(sampler.start(PROMPTS), 50, temperature=0.0)
    for request, prompt in enumerate(PROMPTS):
        want = dense.greedy(prompt, 50)
        assert len(set(want)) > 8  # a text that repeats one token would show little
        assert generated.tokens[request] == want
    assert generated.tokens[len(PROMPTS) :] == [[]] * (REQUESTS - len(PROMPTS))
    assert generated.stopped == [False] * REQUESTS
    contexts = {r: PROMPTS[r] + generated.tokens[r] for r in range(len(PROMPTS))}
    assert_logits_follow(state, contexts, dense)
    assert state.forest.request_length.tolist() == [len(contexts.get(r, [])) for r in range(REQUESTS)]


def test_decoding_in_pieces_equals_decoding_at_once(sampler: Sampler) -> None:
    """Also when the pieces do not fit the intervals between two plans, and for sampled tokens."""
    _, whole = sampler.decode(sampler.start(PROMPTS), 24, seed=3)
    state, pieces = sampler.start(PROMPTS), [[] for _ in range(REQUESTS)]
    for size in (1, 9, 7, 5, 2):
        state, generated = sampler.decode(state, size, seed=3)
        for request, tokens in enumerate(generated.tokens):
            assert len(tokens) == (size if request < len(PROMPTS) else 0)
            pieces[request] += tokens
    assert pieces == whole.tokens


def test_a_request_is_sampled_the_same_whoever_is_decoded_beside_it(sampler: Sampler) -> None:
    """Its tokens depend on its stream, which is its number at the start, and on its own prompt."""
    _, together = sampler.decode(sampler.start(PROMPTS), 20, seed=11)
    for request, prompt in enumerate(PROMPTS):
        others = [LONG[20 * i : 20 * i + 40] for i in range(len(PROMPTS))]
        others[request] = prompt
        _, apart = sampler.decode(sampler.start(others), 20, seed=11)
        assert apart.tokens[request] == together.tokens[request]
    _, other_seed = sampler.decode(sampler.start(PROMPTS), 20, seed=12)
    assert all(other_seed.tokens[r] != together.tokens[r] for r in range(len(PROMPTS)))


def test_tokens_at_temperature_0_are_the_same_in_every_batch(sampler: Sampler) -> None:
    """A batch decides how the plan cuts contexts, and so in which order they are summed up."""
    others = [LONG[20 * i : 20 * i + 40] for i in range(len(PROMPTS))]
    batches = [[prompt] for prompt in PROMPTS]
    batches += [PROMPTS, PROMPTS[::-1], PROMPTS[:2], PROMPTS[2:], [*others, *PROMPTS], [PROMPTS[3], *others[:2]]]
    alone: dict[tuple, tuple] = {}
    for batch in batches:
        _, generated = sampler.decode(sampler.start(batch), 20, temperature=0.0)
        for request, prompt in enumerate(batch):
            tokens, logprobs = generated.tokens[request], generated.logprobs[request]
            expected_tokens, expected_logprobs = alone.setdefault(tuple(prompt), (tokens, logprobs))
            assert tokens == expected_tokens
            np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0.0, atol=1e-4)


def test_decoding_takes_no_more_pages_than_its_tokens_need(sampler: Sampler) -> None:
    """The questions have 5, 3, 9 and 9 tokens, so three more fit their pages, and a fourth takes one more page."""
    state, _ = sampler.decode(sampler.start(PROMPTS), 3)
    assert state.pool.num_free == PAGES - 13
    state, _ = sampler.decode(state, 1)
    assert state.pool.num_free == PAGES - 14


def test_equal_prompts_are_sampled_apart_and_logprobs_are_those_of_the_model(sampler: Sampler, dense: Dense) -> None:
    options = {"temperature": 1.3, "top_k": 20, "top_p": 0.95}
    _, generated = sampler.decode(sampler.start([DOCUMENT, DOCUMENT, SECTION, DOCUMENT]), 15, seed=1, **options)
    assert len({tuple(tokens) for tokens in generated.tokens[:4]}) == 4
    for request in (0, 1, 3):
        want = dense.logprobs(DOCUMENT, generated.tokens[request])
        chex.assert_trees_all_close(np.asarray(generated.logprobs[request], np.float64), want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}, {"top_p": 1e-6}])
def test_options_reach_the_sampling(sampler: Sampler, dense: Dense, options: dict[str, float]) -> None:
    _, generated = sampler.decode(sampler.start(PROMPTS), 9, **options)
    assert generated.tokens[: len(PROMPTS)] == [dense.greedy(prompt, 9) for prompt in PROMPTS]


def test_top_k_bounds_the_rank_of_every_token(sampler: Sampler, dense: Dense) -> None:
    _, generated = sampler.decode(sampler.start(PROMPTS), 20, temperature=5.0, top_k=3)
    ranks = []
    for prompt, tokens in zip(PROMPTS, generated.tokens, strict=False):
        logits = dense.all_logits((*prompt, *tokens))[len(prompt) - 1 : -1]
        ranks += (logits > logits[np.arange(len(tokens)), tokens][:, None]).sum(-1).tolist()
    assert set(ranks) == {0, 1, 2}


# --- Stop tokens and callbacks ----------------------------------------------------------------------------------


def test_a_stop_token_ends_its_request_and_no_other(sampler: Sampler, dense: Dense) -> None:
    texts = [dense.greedy(prompt, 30) for prompt in PROMPTS]
    stops = stops_for(texts)
    want = [until_stop(text, stops) for text in texts]
    assert 9 < len(want[0]) < 30
    assert any(len(text) == 30 for text in want)

    state, generated = sampler.decode(sampler.start(PROMPTS), 30, temperature=0.0, stop_tokens=stops)
    assert generated.tokens[: len(PROMPTS)] == want
    assert [len(logprobs) for logprobs in generated.logprobs[: len(PROMPTS)]] == [len(text) for text in want]
    assert generated.stopped[: len(PROMPTS)] == [text[-1] in stops for text in want]
    # The logits follow the stop token, and from there a further call goes on.
    contexts = {r: PROMPTS[r] + want[r] for r in range(len(PROMPTS))}
    assert_logits_follow(state, contexts, dense)
    _, more = sampler.decode(state, 8, temperature=0.0)
    assert more.tokens[: len(PROMPTS)] == [dense.greedy(context, 8) for context in contexts.values()]


def test_a_stop_token_at_the_last_step_and_at_the_first_counts(sampler: Sampler, dense: Dense) -> None:
    text = dense.greedy(PROMPTS[0], 3)
    assert text[2] not in text[:2]
    _, generated = sampler.decode(sampler.start(PROMPTS), 3, temperature=0.0, stop_tokens=[text[2]])
    assert (generated.tokens[0], generated.stopped[0]) == (text, True)
    _, generated = sampler.decode(sampler.start(PROMPTS), 3, temperature=0.0, stop_tokens=[text[0]])
    assert (generated.tokens[0], generated.stopped[0]) == (text[:1], True)


def test_on_tokens_gets_what_is_generated_as_it_comes(sampler: Sampler, dense: Dense) -> None:
    stops = stops_for([dense.greedy(prompt, 30) for prompt in PROMPTS])
    calls: list[tuple[int, list[int]]] = []
    _, generated = sampler.decode(
        sampler.start(PROMPTS),
        30,
        temperature=0.0,
        stop_tokens=stops,
        on_tokens=lambda request, tokens: calls.append((request, list(tokens))),
    )
    heard = [[token for r, tokens in calls if r == request for token in tokens] for request in range(REQUESTS)]
    assert heard == generated.tokens
    assert all(0 < len(tokens) <= STEPS for _, tokens in calls)


def test_a_second_sampler_of_a_model_compiles_nothing(sampler: Sampler, setup: Setup, compilations: list[str]) -> None:
    sampler.decode(sampler.start(PROMPTS), 3)
    compilations.clear()
    second = new_sampler(setup.dense.model)
    second.decode(second.start(PROMPTS), 3)
    assert not compilations


def test_loops_that_run_to_their_ends_generate_the_same_in_few_programs(
    setup: Setup, dense: Dense, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    """As on a GPU, where tokens are generated in loops of 1, 2, 4 ... turns."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sampler = Sampler(
        setup.dense.model, max_requests=2, num_pages=48, page_size=PAGE_SIZE, max_context=CONTEXT, steps=4
    )
    state, texts = sampler.start(PROMPTS[:2]), numbered(PROMPTS[:2])
    for tokens in (1, 3, 6):
        state, generated = sampler.decode(state, tokens, temperature=0.0)
        for request, text in texts.items():
            assert generated.tokens[request] == dense.greedy(text, tokens)
            text.extend(generated.tokens[request])
    compilations.clear()
    state, generated = sampler.decode(state, 7, temperature=0.0)
    assert not compilations
    assert [len(tokens) for tokens in generated.tokens[:2]] == [7, 7]
