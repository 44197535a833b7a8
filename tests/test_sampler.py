"""The sampler against dense attention over each request alone, token by token."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import OutOfPagesError, OutOfSlotsError, streams
from codec_jax.nnx import Decoder, DecoderConfig, Decoding, Sampler, prefill
from codec_jax.nnx import sampler as sampler_module
from codec_jax.plan import Tiling

VOCAB, CONTEXT = 48, 160
REQUESTS, PAGES, PAGE_SIZE, STEPS = 8, 64, 8, 7

RNG = np.random.default_rng(0)
DOCUMENT, SECTION = RNG.integers(0, VOCAB, 37).tolist(), RNG.integers(0, VOCAB, 12).tolist()
QUESTIONS = [RNG.integers(0, VOCAB, size).tolist() for size in (5, 3, 9)]
# Two requests share document and section, one the document alone; one is on its own; they part inside pages.
PROMPTS = [
    [*DOCUMENT, *SECTION, *QUESTIONS[0]],
    QUESTIONS[1],
    [*DOCUMENT, *SECTION, *QUESTIONS[2]],
    [*DOCUMENT, *QUESTIONS[2]],
]
LONG = RNG.integers(0, VOCAB, 150).tolist()
# Seven prompts that hardly share anything, and whose greedy texts do not fit the pool together.
CROWD = [LONG[15 * r : 15 * r + 45] for r in range(7)]


class Dense:
    """The model over one sequence at a time, padded to one length."""

    def __init__(self, model: Decoder) -> None:
        graph, weights = nnx.split(model)
        forward = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))

        def all_logits(context: tuple[int, ...]) -> np.ndarray:
            padded = np.zeros((1, CONTEXT), np.int32)
            padded[0, : len(context)] = context
            return np.asarray(forward(weights, padded)[0, : len(context)])

        self.all_logits = cache(all_logits)

    def logits(self, context: list[int]) -> np.ndarray:
        """Logits of the token that follows."""
        return self.all_logits(tuple(context))[-1]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        context = list(prompt)
        for _ in range(count):
            context.append(int(self.logits(context).argmax()))
        return context[len(prompt) :]

    def logprobs(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """Log-probability of each token after those before it, at temperature 1."""
        logits = self.all_logits((*prompt, *tokens))[len(prompt) - 1 : -1].astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[np.arange(len(tokens)), tokens]


class Setup(NamedTuple):
    sampler: Sampler
    dense: Dense


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    """One sampler for all tests, so that its steps compile once.

    The weights make for sharp attention and texts that do not repeat; tiles and blocks are small and pairs of tiles
    share what little both read, so that plans look as on a GPU they look for larger forests.
    """
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        mlp_size=48,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tied_embeddings=False,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    graph, weights = nnx.split(Decoder(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: jnp.asarray(1.0 + (x.ndim > 1) * (rng.normal(size=x.shape) * 2 * x.shape[0] ** -0.5 - 1.0), x.dtype),
        weights,
    )
    model = nnx.merge(graph, weights)
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiling = Tiling(num_ctas=5, tile_rows=8, block_tokens=32, lanes=2)
        monkeypatch.setattr(Tiling, "of_device", classmethod(lambda cls, *sizes: tiling))
        monkeypatch.setattr(streams, "LEAST_WIDE_TOKENS", PAGE_SIZE)
        sampler = Sampler(
            model, max_requests=REQUESTS, num_pages=PAGES, page_size=PAGE_SIZE, max_context=CONTEXT, steps=STEPS
        )
        yield Setup(sampler, Dense(model))


@pytest.fixture
def sampler(setup: Setup) -> Sampler:
    return setup.sampler


@pytest.fixture
def dense(setup: Setup) -> Dense:
    return setup.dense


def assert_logits_follow(state: Decoding, contexts: dict[int, list[int]], dense: Dense) -> None:
    assert state.requests == sorted(contexts)
    for request, context in contexts.items():
        chex.assert_trees_all_close(np.asarray(state.logits[request]), dense.logits(context), atol=1e-4, rtol=1e-4)


def numbered(prompts: list[list[int]]) -> dict[int, list[int]]:
    return {request: list(prompt) for request, prompt in enumerate(prompts)}


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
    monkeypatch.setattr(prefill, "MOST_CHUNK_TOKENS", PAGE_SIZE)
    monkeypatch.setattr(prefill, "MOST_WAVE_TOKENS", chunks * PAGE_SIZE)


@pytest.mark.parametrize("name", ["shared prefixes", "longer than a wave"])
def test_prefill_in_many_waves_gives_the_same_logits(
    sampler: Sampler, dense: Dense, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    prefill_in_waves_of(4, monkeypatch)
    state = sampler.start(PROMPT_SETS[name])
    assert len(prefill.prefill_waves(state.forest, PROMPT_SETS[name])) > 3
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


def until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def stops_for(texts: list[list[int]]) -> list[int]:
    """A token that ends the first text at its tenth token or later and does not occur in some other one."""
    for token in texts[0][9:]:
        if token not in texts[0][:9] and any(token not in text for text in texts[1:]):
            return [token, VOCAB - 1 if token else VOCAB - 2]
    raise AssertionError("no token stops the first text only; choose other weights")


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


# --- Forks and prunes -------------------------------------------------------------------------------------------


def test_a_fork_goes_on_from_what_it_shares(sampler: Sampler, dense: Dense) -> None:
    state, generated = sampler.decode(sampler.start(PROMPTS), 10, temperature=0.0)
    free = state.pool.num_free
    state, new = sampler.fork(state, [0, 2, 0])
    assert new == [4, 5, 6]
    assert state.pool.num_free == free
    assert_logits_follow(
        state,
        {r: PROMPTS[s] + generated.tokens[s] for r, s in enumerate([0, 1, 2, 3, 0, 2, 0])},
        dense,
    )
    state, generated = sampler.decode(state, 20, temperature=0.0)
    assert generated.tokens[4] == generated.tokens[6] == generated.tokens[0]
    assert generated.tokens[5] == generated.tokens[2]
    assert generated.tokens[0] == dense.greedy(PROMPTS[0], 30)[10:]
    assert generated.tokens[2] == dense.greedy(PROMPTS[2], 30)[10:]


def test_forks_draw_numbers_of_their_own_and_leave_their_source_alone(sampler: Sampler) -> None:
    def run(forks: list[int]) -> list[list[int]]:
        state, _ = sampler.decode(sampler.start(PROMPTS), 5, seed=2)
        state, _ = sampler.fork(state, forks)
        return sampler.decode(state, 15, seed=2)[1].tokens

    alone, forked = run([]), run([0, 0, 1])
    assert forked[: len(PROMPTS)] == alone[: len(PROMPTS)]
    assert len({tuple(forked[request]) for request in (0, 1, 4, 5, 6)}) == 5


def test_a_fork_in_the_place_of_a_pruned_request_draws_new_numbers(sampler: Sampler) -> None:
    state, (first,) = sampler.fork(sampler.start(PROMPTS), [0])
    state, generated = sampler.decode(state, 9, seed=2)
    again, _ = sampler.fork(sampler.start(PROMPTS), [0])
    again, (second,) = sampler.fork(sampler.prune(again, [first]), [0])
    assert first == second
    _, other = sampler.decode(again, 9, seed=2)
    assert other.tokens[0] == generated.tokens[0]
    assert other.tokens[second] != generated.tokens[first]


def test_pruning_everything_frees_every_page(sampler: Sampler) -> None:
    state, _ = sampler.decode(sampler.start(PROMPTS), 10)
    state, new = sampler.fork(state, [0, 3])
    state, _ = sampler.decode(state, 10)
    state = sampler.prune(state, [0, *new])
    assert state.requests == [1, 2, 3]
    state = sampler.prune(state, [2, 1])
    # One request with 46 + 20 tokens is left; at most its four nodes' last pages are not full.
    assert state.pool.num_free >= PAGES - (-(-66 // PAGE_SIZE) + 4)
    state = sampler.prune(state, [3])
    assert state.requests == []
    assert state.pool.num_free == PAGES
    state, generated = sampler.decode(state, 10)
    assert generated.tokens == [[]] * REQUESTS


@pytest.mark.parametrize("seed", range(3))
def test_any_history_of_forks_and_prunes_stays_exact_and_compiles_once(
    sampler: Sampler, dense: Dense, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    state = sampler.start(PROMPTS)
    contexts, unshared, count = numbered(PROMPTS), 0, 0
    for _ in range(12):
        free = REQUESTS - len(contexts)
        action = rng.choice(["decode", "decode", "fork", "prune", "append", "peek"])
        if action == "fork" and free:
            sources = rng.choice(sorted(contexts), rng.integers(1, free + 1)).tolist()
            state, new = sampler.fork(state, sources)
            assert not set(new) & set(contexts)
            contexts |= {request: list(contexts[source]) for request, source in zip(new, sources, strict=True)}
        elif action == "prune" and len(contexts) > 2:
            gone = rng.choice(sorted(contexts), rng.integers(1, len(contexts) - 1), replace=False).tolist()
            state = sampler.prune(state, gone)
            contexts = {request: context for request, context in contexts.items() if request not in gone}
        elif action in ("append", "peek"):
            asked = rng.choice(sorted(contexts), rng.integers(1, len(contexts) + 1), replace=False).tolist()
            # One of them gets four tokens, so that rows have one width.
            given = {r: rng.integers(0, VOCAB, 4 if r == asked[0] else rng.integers(1, 5)).tolist() for r in asked}
            longer = {r: context + given.get(r, []) for r, context in contexts.items()}
            unshared += sum(len(longer[request]) for request in asked)
            if action == "append":
                state, contexts = sampler.append(state, given), longer
                assert_logits_follow(state, contexts, dense)
            else:
                state, logits = sampler.peek(state, given)
                assert_logits_follow(replace(state, logits=logits), longer, dense)
        else:
            stops = rng.integers(0, VOCAB, 2).tolist()
            state, generated = sampler.decode(state, int(rng.integers(1, 10)), stop_tokens=stops, seed=seed)
            for request, context in contexts.items():
                tokens = generated.tokens[request]
                want = dense.logprobs(context, tokens)
                chex.assert_trees_all_close(np.asarray(generated.logprobs[request]), want, atol=1e-3, rtol=1e-3)
                for token in tokens:
                    context.append(token)
                    unshared += len(context)
                count += len(tokens)
            assert_logits_follow(state, contexts, dense)
    assert (state.traffic.generated_tokens, state.traffic.kv_tokens_unshared) == (count, unshared)
    assert state.traffic.kv_tokens_read > 0
    assert sampler._decode._cache_size() == 1
    assert sampler.prune(state, state.requests).pool.num_free == PAGES


# --- Given tokens -----------------------------------------------------------------------------------------------


def test_appended_tokens_follow_those_before_and_decoding_goes_on_from_them(sampler: Sampler, dense: Dense) -> None:
    """Of any length, on requests that share and on some of them only."""
    state, new = sampler.fork(sampler.start(PROMPTS), [0, 0])
    given = {0: LONG[:7], new[0]: LONG[7:8], 2: LONG[20:33]}
    contexts = numbered([*PROMPTS, PROMPTS[0], PROMPTS[0]])
    contexts = {request: context + given.get(request, []) for request, context in contexts.items()}
    state = sampler.append(state, given)
    assert_logits_follow(state, contexts, dense)
    assert state.forest.request_length.tolist() == [len(contexts.get(r, [])) for r in range(REQUESTS)]
    _, generated = sampler.decode(state, 9, temperature=0.0)
    assert generated.tokens[:6] == [dense.greedy(context, 9) for context in contexts.values()]


def test_appending_in_several_passes_gives_the_same(
    sampler: Sampler, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "MOST_CHUNK_TOKENS", 4)
    given = {1: LONG[:23], 3: LONG[30:36]}
    state = sampler.append(sampler.start(PROMPTS), given)
    assert_logits_follow(state, {r: PROMPTS[r] + given.get(r, []) for r in range(4)}, dense)


def test_appending_nothing_to_nobody_changes_nothing(sampler: Sampler, dense: Dense) -> None:
    assert_logits_follow(sampler.append(sampler.start(PROMPTS), {}), numbered(PROMPTS), dense)


def test_peeking_gives_the_logits_and_leaves_no_trace(sampler: Sampler, dense: Dense) -> None:
    state, _ = sampler.fork(sampler.start(PROMPTS), [0])
    contexts = numbered([*PROMPTS, PROMPTS[0]])
    for question in ({0: LONG[:4], 3: LONG[4:7]}, {4: LONG[7:11], 0: LONG[11:14], 1: LONG[14:16]}):
        before = state
        state, logits = sampler.peek(state, question)
        longer = {request: context + question.get(request, []) for request, context in contexts.items()}
        assert_logits_follow(replace(state, logits=logits), longer, dense)
        assert_logits_follow(state, contexts, dense)
        assert state.pool.num_free == before.pool.num_free
        np.testing.assert_array_equal(state.forest.request_length, before.forest.request_length)
    state, generated = sampler.decode(state, 12, temperature=0.0)
    assert generated.tokens[:5] == [dense.greedy(context, 12) for context in contexts.values()]


def test_a_long_request_does_not_bound_what_is_appended_to_a_short_one(sampler: Sampler, dense: Dense) -> None:
    state = sampler.append(sampler.start([LONG, [1]]), {1: LONG[:16]})
    assert_logits_follow(state, {0: LONG, 1: [1, *LONG[:16]]}, dense)
    with pytest.raises(ValueError, match=r"^tokens(\[0\])?: .*got 11"):
        sampler.append(state, {0: LONG[:11]})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({4: [1]}, r"^requests: .*\[4\]"),
        ({0: [1], 1: []}, r"^tokens\[1\]: expected at least one token"),
        ({0: [1, VOCAB]}, rf"^tokens\[0\]: .*got {VOCAB} at index 1"),
        ({0: [-1]}, r"^tokens\[0\]: .*got -1"),
        ({0: [0.5]}, r"^tokens\[0\]: expected a list of integers"),
        ({0: [1] * 107}, r"^tokens(\[0\])?: .*got 107"),
    ],
)
def test_tokens_that_cannot_be_appended_are_refused(sampler: Sampler, dense: Dense, tokens: dict, message: str) -> None:
    state = sampler.start(PROMPTS)
    assert len(PROMPTS[0]) == 54
    with pytest.raises(ValueError, match=message):
        sampler.append(state, tokens)
    with pytest.raises(ValueError, match=message):
        sampler.peek(state, tokens)
    assert_logits_follow(state, numbered(PROMPTS), dense)


def test_appending_more_than_the_pool_holds_is_refused_and_changes_nothing(sampler: Sampler, dense: Dense) -> None:
    state = sampler.start(CROWD)
    with pytest.raises(OutOfPagesError, match="free pages of 64"):
        sampler.append(state, {request: LONG[:60] for request in range(7)})
    assert_logits_follow(state, numbered(CROWD), dense)


def test_a_long_text_for_one_request_takes_no_pages_for_the_others(sampler: Sampler, dense: Dense) -> None:
    """Sixty tokens need eight pages at the most, one token for each of the others needs none."""
    given = {request: LONG[:1] for request in range(1, 7)} | {0: LONG[:60]}
    state = sampler.start(CROWD)
    free = state.pool.num_free
    assert free < 7 * 8
    state = sampler.append(state, given)
    assert_logits_follow(state, {r: CROWD[r] + given[r] for r in range(7)}, dense)
    assert state.pool.num_free >= free - 8


# --- Running out of pages and slots -----------------------------------------------------------------------------


def test_running_out_of_pages_loses_nothing_and_decoding_goes_on_after_a_prune(sampler: Sampler, dense: Dense) -> None:
    sampler.decode(sampler.start([[5]]), 1)
    with pytest.raises(OutOfPagesError, match="free pages of 64") as caught:
        sampler.decode(sampler.start(CROWD), 100, temperature=0.0)
    assert sampler._decode._cache_size() == 1  # one step serves an empty pool and a full one
    state, generated = caught.value.state, caught.value.generated
    reached = len(generated.tokens[0])
    assert 0 < reached < 100
    texts = [dense.greedy(prompt, reached + 10) for prompt in CROWD]
    assert generated.tokens[:7] == [text[:reached] for text in texts]
    assert_logits_follow(state, {r: CROWD[r] + texts[r][:reached] for r in range(7)}, dense)
    state, generated = sampler.decode(sampler.prune(state, [0, 2, 3, 6]), 10, temperature=0.0)
    for request in (1, 4, 5):
        assert generated.tokens[request] == texts[request][reached:]


def test_prompts_that_the_pool_cannot_hold_are_refused(sampler: Sampler) -> None:
    prompts = [[r, *LONG[: 8 * 8]] for r in range(8)]
    with pytest.raises(OutOfPagesError, match="the prompts need 72 pages of 8 tokens, the pool has 64"):
        sampler.start(prompts)


def test_more_forks_than_request_slots_are_refused(sampler: Sampler) -> None:
    state = sampler.start(PROMPTS)
    with pytest.raises(OutOfSlotsError, match="requests: 5 forks"):
        sampler.fork(state, [0] * 5)
    with pytest.raises(ValueError, match=r"requests: .*\[6\]"):
        sampler.fork(state, [6])
    with pytest.raises(ValueError, match=r"requests: .*\[7\]"):
        sampler.prune(state, [7])


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


def test_requests_that_have_finished_make_room_for_the_others(sampler: Sampler, dense: Dense) -> None:
    """Pages for all seven texts are not there, unless those that stop early give theirs back."""
    texts = [dense.greedy(prompt, 80) for prompt in CROWD]
    by_variety = sorted(texts, key=lambda text: len(set(text)))
    lasting = {token for text in by_variety[:2] for token in text}
    stops = sorted({next(token for token in text if token not in lasting) for text in by_variety[2:]})
    want = [until_stop(text, stops) for text in texts]
    assert sorted(map(len, want))[-3:] < [20, 80, 80]
    options = {"temperature": 0.0, "stop_tokens": stops}
    with pytest.raises(OutOfPagesError):
        sampler.decode(sampler.start(CROWD), 80, **options)
    completions = sampler.generate(CROWD, max_new_tokens=80, **options)
    assert [completion.tokens for completion in completions] == want


def test_generate_shows_progress(sampler: Sampler, capsys: pytest.CaptureFixture) -> None:
    completions = sampler.generate(PROMPTS, max_new_tokens=9, progress=True)
    assert [len(completion.tokens) for completion in completions] == [9] * 4
    shown = capsys.readouterr().err
    assert "prefill" in shown
    assert "36/36" in shown
    sampler.generate(PROMPTS, max_new_tokens=9)
    assert capsys.readouterr().err == ""


# --- Arguments that do not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "^prompts: expected at least one prompt"),
        ([[1], []], r"^prompts\[1\]: expected 1 to max_context = 160 tokens, got 0"),
        ([[1] * 161], r"^prompts\[0\]: expected 1 to max_context = 160 tokens, got 161"),
        ([[1, 2], [1, VOCAB]], rf"^prompts\[1\]: expected tokens in \[0, {VOCAB}\), got {VOCAB} at index 1"),
        ([[-1]], r"^prompts\[0\]: .* got -1 at index 0"),
        ([[0.5]], r"^prompts\[0\]: expected a list of integers, got float64"),
        ([[1]] * 9, "^prompts: expected at most max_requests = 8 requests, got 9"),
    ],
)
def test_prompts_that_cannot_be_are_refused(sampler: Sampler, prompts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler.start(prompts)
    with pytest.raises(ValueError, match=message):
        sampler.generate(prompts, max_new_tokens=1)


WRONG_OPTIONS = [
    ({"temperature": -0.1}, "^temperature: .*-0.1"),
    ({"temperature": np.nan}, "^temperature: .*nan"),
    ({"temperature": np.inf}, "^temperature: .*inf"),
    ({"top_k": 0}, "^top_k: .*got 0"),
    ({"top_p": 0.0}, "^top_p: .*got 0.0"),
    ({"top_p": 1.5}, "^top_p: .*got 1.5"),
    ({"top_p": np.nan}, "^top_p: .*got nan"),
    ({"stop_tokens": [3, VOCAB]}, rf"^stop_tokens: .*got {VOCAB} at index 1"),
    ({"stop_tokens": [-1]}, "^stop_tokens: .*got -1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_options_that_cannot_be_are_refused(sampler: Sampler, options: dict, message: str) -> None:
    state = sampler.start([[5]])
    with pytest.raises(ValueError, match=message):
        sampler.decode(state, 5, **options)
    with pytest.raises(ValueError, match=message):
        sampler.generate([[5]], max_new_tokens=5, **options)


@pytest.mark.parametrize("tokens", [0, -3])
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
    with pytest.raises(ValueError, match=f"^{name}: expected a positive number, got {value}"):
        Sampler(model, **sizes)


def test_an_unknown_implementation_is_refused(sampler: Sampler) -> None:
    model = Decoder(sampler.config, nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^implementation: .*'nonsense'"):
        Sampler(model, max_requests=2, num_pages=8, implementation="nonsense").start([[1]])


def test_weights_that_are_not_finite_are_noticed(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_weights", jax.tree.map(lambda x: x * jnp.nan, sampler._weights))
    state = sampler.start(PROMPTS)
    with pytest.raises(FloatingPointError, match=r"^logits: .*requests \[0, 1, 2, 3\]"):
        sampler.decode(state, 5)


# --- Last, for it compiles the step anew ------------------------------------------------------------------------


def test_decoding_ends_when_all_requests_have_stopped(sampler: Sampler) -> None:
    """Every token is a stop token, which are more than the step has room for at first."""
    state, generated = sampler.decode(sampler.start(PROMPTS), 30, stop_tokens=range(VOCAB))
    assert [len(tokens) for tokens in generated.tokens[: len(PROMPTS)]] == [1] * len(PROMPTS)
    assert state.traffic.generated_tokens == len(PROMPTS)
