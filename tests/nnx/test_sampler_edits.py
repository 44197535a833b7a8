"""Forks, prunes and given tokens between decoding, against dense attention over each request alone."""

from dataclasses import replace

import chex
import numpy as np
import pytest
from cases import CROWD, LONG, PAGE_SIZE, PAGES, PROMPTS, REQUESTS, VOCAB, Dense, assert_logits_follow, numbered

from codec_jax import OutOfPagesError, OutOfSlotsError
from codec_jax.nnx import Sampler, prefill

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


def test_a_fork_draws_no_numbers_of_a_request_that_has_the_next_stream(sampler: Sampler) -> None:
    state, (fork,) = sampler.fork(sampler.start(PROMPTS[:3], streams=[0, 2, 2**31 - 1]), [0])
    _, generated = sampler.decode(state, 15)
    assert generated.tokens[fork] != generated.tokens[0]
    state, forks = sampler.fork(sampler.start(PROMPTS[:3], streams=[0, 2, 2**31 - 1]), [1, 1])
    _, generated = sampler.decode(state, 15)
    assert len({tuple(generated.tokens[request]) for request in (1, *forks)}) == 3


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
    sampler.decode(sampler.start([[5]]), 1)
    compiled = sampler._device.decode_program(sampler.steps).jitted._cache_size()
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
    assert sampler._device.decode_program(sampler.steps).jitted._cache_size() == compiled
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
    monkeypatch.setattr(prefill, "MAX_CHUNK_TOKENS", 4)
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
        ({0: [1, VOCAB]}, rf"^tokens\[0\]: .*got tokens\[0\]\[1\] = {VOCAB}"),
        ({0: [-1]}, r"^tokens\[0\]: .* = -1$"),
        ({0: [0.5]}, r"^tokens\[0\]: expected a list of integers"),
        ({0: 5}, r"^tokens\[0\]: expected a list of integers"),
        ({0: None}, r"^tokens\[0\]: expected a list of integers"),
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
    compiled = sampler._device.decode_program(sampler.steps).jitted._cache_size()
    with pytest.raises(OutOfPagesError, match="free pages of 64") as caught:
        sampler.decode(sampler.start(CROWD), 100, temperature=0.0)
    assert (
        sampler._device.decode_program(sampler.steps).jitted._cache_size() == compiled
    )  # one step serves an empty pool and a full one
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
