"""The speculative example: its rule of acceptance against the distributions it must keep, and its tokens at 0."""

import random
import re
from collections import Counter
from functools import partial

import game24
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import speculative
from hypothesis import given, settings
from hypothesis import strategies as st
from verification import Drafts, accept

from codec_jax.nnx import Sampler


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    """Pearson's statistic per degree of freedom; what cannot happen must not have happened."""
    possible = probability > 0
    assert not counts[~possible].any()
    expected = counts.sum() * probability[possible]
    assert expected.min() > 20
    return float(((counts[possible] - expected) ** 2 / expected).sum() / (possible.sum() - 1))


# --- Acceptance ---------------------------------------------------------------------------------------------------

# A tree of two levels with two guesses below each candidate, depth first.
PARENT, DEPTH = np.asarray([-1, 0, 1, 1, 0, 4, 4]), np.asarray([0, 1, 2, 2, 1, 2, 2])
TREES = 60_000


def tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What follows each of 5 tokens, by the model and by the draft, which cannot say one of them."""
    rng = np.random.default_rng(seed)
    model, draft = rng.dirichlet(np.full(5, 0.7), 5) + 0.02, rng.dirichlet(np.full(4, 0.7), 5) + 0.02
    return tuple((x / x.sum(1, keepdims=True)).astype(np.float32) for x in (model, draft))


@jax.jit
@partial(jax.vmap, in_axes=(0, None, None, None))
def drawn_and_tested(key: jax.Array, model: jax.Array, draft: jax.Array, temperature: jax.Array) -> tuple:
    """One tree, and what of it is kept; the draft never says token 0."""
    keys, ids = jax.random.split(key, 8), jnp.arange(4, dtype=jnp.int32) + 1
    tokens = [jnp.int32(0)] * 7
    for candidate in range(7):
        # Without replacement, one after another, by definition.
        left = draft[tokens[candidate]]
        for child in np.flatnonzero(candidate == PARENT):
            drawn = jax.random.categorical(keys[child], jnp.log(left))
            tokens[child], left = ids[drawn], left.at[drawn].set(0.0)
    tokens = jnp.stack(tokens)
    every = jnp.broadcast_to(ids, (7, 4))
    parent = jnp.asarray(PARENT, jnp.int32)
    return tokens, *accept(keys[7], jnp.log(model)[tokens], parent, tokens, every, draft[tokens], temperature)


@pytest.mark.parametrize(("seed", "temperature"), [(0, 1.0), (1, 1.0), (2, 0.6)])
def test_tokens_of_random_trees_are_distributed_as_the_model_says(seed: int, temperature: float) -> None:
    model, draft = tables(seed)
    keys = jax.random.split(jax.random.key(seed), TREES)
    tokens, kept, following = map(np.asarray, drawn_and_tested(keys, model, draft, jnp.float32(temperature)))
    # The tokens that each tree gives: those kept below the root, in order, then the following one.
    count = kept.sum(1)
    path = np.sort(np.where(kept, np.arange(7), 7), axis=1)[:, :3]
    assert (path[:, 0] == 0).all()
    assert all((PARENT[path[count > d, d]] == path[count > d, d - 1]).all() for d in (1, 2))
    said = np.concatenate([tokens, following[:, None]], axis=1)
    sequence = np.take_along_axis(said, np.concatenate([path, np.full((TREES, 1), 7)], axis=1), axis=1)
    sequence[np.arange(TREES), count] = following
    target = model ** (1 / temperature)
    target /= target.sum(1, keepdims=True)
    first = np.bincount(sequence[:, 1], minlength=5)
    assert chi_square(first, target[0]) < 6  # of 4 degrees of freedom: by chance once in 10,000
    for position in (2, 3):
        for before in range(1, 5):
            reached = (count >= position) & (sequence[:, position - 1] == before)
            counts = np.bincount(sequence[reached, position], minlength=5)
            if reached.sum() > 20 / target[before].min():
                assert chi_square(counts, target[before]) < 6
    assert 0.2 < (count > 1).mean() < 1  # and yet many guesses are kept


def test_at_temperature_0_the_likeliest_guesses_are_kept_and_nothing_else() -> None:
    model, draft = tables(0)
    rng = np.random.default_rng(1)
    decide = jax.jit(partial(accept, temperature=jnp.float32(0)))
    for trial in range(50):
        tokens = np.concatenate([[0], rng.integers(1, 5, 6)])
        kept, following = decide(
            jax.random.key(trial),
            jnp.log(model)[tokens],
            jnp.asarray(PARENT),
            jnp.asarray(tokens),
            jnp.broadcast_to(jnp.arange(4) + 1, (7, 4)),
            jnp.asarray(draft)[tokens],
        )
        path, last = [0], 0
        for candidate in range(1, 7):
            if PARENT[candidate] == last and tokens[candidate] == model[tokens[last]].argmax():
                path, last = [*path, candidate], candidate
        assert np.flatnonzero(kept).tolist() == path
        assert following == model[tokens[last]].argmax()


@pytest.mark.parametrize("rest", [(1e-20, 0), (1e-31, 0), (1e-40, 0), (3e-38, 1e-38), (0, 0)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_siblings_to_which_the_draft_gives_next_to_nothing_leave_the_model_as_it_is(rest, temperature) -> None:
    """The surest guess comes first, and then one that hardly any drawing would give."""
    model, draft = np.asarray([0.3, 0.5, 0.2], np.float32), np.asarray([1, *rest], np.float32)
    parent, tokens = jnp.asarray([-1, 0, 0], jnp.int32), jnp.asarray([0, 0, 1], jnp.int32)
    logits, ids = jnp.tile(jnp.log(model), (3, 1)), jnp.tile(jnp.arange(3, dtype=jnp.int32), (3, 1))
    decide = partial(accept, temperature=jnp.float32(temperature))
    many = jax.jit(jax.vmap(decide, in_axes=(0, *[None] * 5)))
    keys = jax.random.split(jax.random.key(0), TREES)
    kept, following = map(np.asarray, many(keys, logits, parent, tokens, ids, jnp.tile(draft, (3, 1))))
    first = np.where(kept[:, 1], 0, np.where(kept[:, 2], 1, following))
    if temperature == 0.0:
        assert (first == 1).all()
        assert kept[:, 2].all()
    else:
        assert chi_square(np.bincount(first, minlength=3), model) < 9.3  # of 2 degrees: by chance once in 10,000


# --- Drafts -------------------------------------------------------------------------------------------------------


def test_draws_are_without_replacement_one_after_another() -> None:
    probability, rng = np.asarray([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(0)
    pairs = np.zeros((4, 4))
    for _ in range(20_000):
        pairs[tuple(speculative.draw(probability, 2, rng))] += 1
    exact = probability[:, None] * probability / (1 - probability[:, None]) * (1 - np.eye(4))
    assert chi_square(pairs.reshape(-1), exact.reshape(-1)) < 3.6  # of 11 degrees: by chance once in 10,000
    assert speculative.draw(probability, 3, None) == [0, 1, 2]
    assert sorted(speculative.draw(probability, 9, rng)) == [0, 1, 2, 3]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=8), min_size=5, max_size=5),
    st.integers(0, 4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(),
)
def test_trees_hold_different_guesses_of_what_may_follow_each_candidate(
    followers: list[list[int]], last: int, widths: list[int], greedy: bool
) -> None:
    """What may follow depends on the last token here."""
    drafts, rng = Drafts.empty(2, speculative.tree_size(widths)), None if greedy else np.random.default_rng(0)
    guesses = speculative.grow(drafts, 1, [9, last], lambda text: Counter(followers[text[-1]]), widths, rng)
    assert (drafts.parent[0] == -1).all()
    parent, tokens = drafts.parent[1], drafts.tokens[1]
    assert (parent[0], tokens[0]) == (-1, last)
    assert (parent[1 : guesses + 1] >= 0).all()
    assert (parent[guesses + 1 :] == -1).all()
    depth = [0] * (guesses + 1)
    for candidate in range(1, guesses + 1):
        depth[candidate] = depth[parent[candidate]] + 1
    for candidate in range(guesses + 1):
        children, may = tokens[np.flatnonzero(parent == candidate)].tolist(), followers[tokens[candidate]]
        if depth[candidate] == len(widths):
            assert not children
            continue
        assert len(set(children)) == len(children) == min(len(set(may)), widths[depth[candidate]])
        drawn_from = np.bincount(drafts.ids[1, candidate], drafts.probability[1, candidate], minlength=5)
        for token in children:
            assert drawn_from[token] == pytest.approx(may.count(token) / len(may))
        if greedy and children:
            assert may.count(children[0]) == max(map(may.count, may))


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("weights", "guesses"), [({1: 3, 2: 0, 3: 1}, {1: 0.75, 3: 0.25}), ({2: 0}, {}), ({}, {})])
def test_tokens_of_weight_0_are_no_guesses(weights: dict, guesses: dict, greedy: bool) -> None:
    drafts, rng = Drafts.empty(1, 4), None if greedy else np.random.default_rng(0)
    assert speculative.grow(drafts, 0, [9], lambda _: Counter(weights), [3], rng) == len(guesses)
    assert set(drafts.tokens[0, 1 : len(guesses) + 1].tolist()) == set(guesses)
    assert (drafts.parent[0, len(guesses) + 1 :] == -1).all()
    drawn_from = zip(drafts.ids[0, 0].tolist(), drafts.probability[0, 0].tolist(), strict=True)
    assert {token: chance for token, chance in drawn_from if chance} == guesses


def test_guesses_follow_the_rules_and_leave_out_no_correct_step() -> None:
    dice = random.Random(0)
    for puzzle in dice.sample(game24.puzzles(), 20):
        text, state = game24.encode_prompt(puzzle), puzzle
        while len(state) > 1:
            steps = [tuple(game24.encode_move(move)) for move in game24.moves(state)]
            for step in steps:
                for end in range(len(step)):
                    likely = speculative.by_the_rules([*text, *step[:end]])
                    assert likely[step[end]] >= sum(other[: end + 1] == step[: end + 1] for other in steps) > 0
            assert not speculative.by_the_rules([*text, game24.DONE])
            move = dice.choice(game24.moves(state))
            text, state = text + game24.encode_move(move), move.after
        assert speculative.by_the_rules(text) == Counter([game24.DONE])


# --- Decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rows"), [("small", 4), ("small", 6), ("windowed", 4)])
def test_at_temperature_0_tokens_are_those_of_greedy_decoding_in_fewer_passes(request, name, rows) -> None:
    """Four prompts of six tokens, of which three begin alike and two are the same; right and wrong guesses of them."""
    prompts = [[7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 30, 31], [20, 21, 22, 23, 24, 25], [7, 8, 9, 10, 11, 12]]
    small = request.getfixturevalue(name)
    greedy = [small.greedy(prompt, 30) for prompt in prompts]
    answer = {tuple(prompt): tokens for prompt, tokens in zip(prompts, greedy, strict=True)}
    trusted = {1, 2, 5, 7, 8, 9, 10, 14, 20, 21, 22, 23}  # of these tokens of an answer, the guesses are right first

    def guess(text: list[int]) -> Counter[int]:
        place = len(text) - 6
        right = [*answer[tuple(text[:6])], *[0] * 30][place]
        return Counter({right: 6 if place in trusted else 4, (right + 1) % small.vocab_size: 5})

    sampler = Sampler(small.decoder, max_requests=rows, num_pages=64)
    options = {"max_new_tokens": 30, "stop_tokens": [small.stop], "widths": (2, 1, 1)}
    answers = speculative.speculate(small.decoder, sampler, prompts, guess, **options)
    assert answers.tokens == greedy
    passes = []
    for tokens, guessed in zip(greedy, answers.guessed, strict=True):
        # Each pass keeps a token of the first level in any case, and those below it while the first guess is right.
        expected = [False]
        while len(expected) < len(tokens):
            at = len(expected)
            kept = 1 if at + 1 not in trusted else 2 if at + 2 not in trusted else 3
            expected += [True] * kept + [False]
        assert guessed == expected[: len(tokens)]
        passes.append(expected[: len(tokens)].count(False))
    assert answers.passes in (max(passes) - 1, max(passes))


def test_a_report_compares_with_decoding_token_by_token(monkeypatch, capsys) -> None:
    runs, speculate = [], speculative.speculate
    monkeypatch.setattr(
        speculative, "speculate", lambda *given, **options: runs.append(speculate(*given, **options)) or runs[-1]
    )
    speculative.main(["--puzzles", "3"])
    (answers,), output = runs, capsys.readouterr().out
    games = re.findall(r"^ *(\d+ \d+ \d+ \d+) : (.*)$", output, re.MULTILINE)
    assert [puzzle for puzzle, _ in games] == [" ".join(map(str, puzzle)) for puzzle in game24.split()[1][:3]]
    for (_, game), tokens, guessed in zip(games, answers.tokens, answers.guessed, strict=True):
        assert re.sub(r"[][ ]", "", game) == game24.text(tokens).replace(" ", "")
        kept = [word for part in re.findall(r"\[(.*?)\]", game) for word in part.replace("/", " / ").split()]
        assert kept == [game24.VOCABULARY[token] for token, guess in zip(tokens, guessed, strict=True) if guess]
        assert tokens[-1] == game24.DONE
    assert f"{sum(map(sum, answers.guessed)):,} of {answers.guesses:,} guesses kept" in output
    assert "same answers     3 of 3" in output
    # Most of a step is arithmetic, so a pass gives several tokens.
    (steps,) = re.findall(r"tokens in (\d+) steps", output)
    assert int(steps) == max(map(len, answers.tokens)) > 3 * answers.passes


def test_no_tokens_are_refused_as_by_the_sampler(small) -> None:
    sampler = Sampler(small.decoder, max_requests=1, num_pages=8)
    with pytest.raises(ValueError, match=r"^max_new_tokens: expected an integer of at least 1, got 0"):
        speculative.speculate(small.decoder, sampler, [[7]], lambda _: Counter(), max_new_tokens=0)


@pytest.mark.parametrize("flags", [("--puzzles", "0"), ("--temperature", "-1")], ids=" ".join)
def test_options_that_cannot_be_are_refused(flags, capsys) -> None:
    with pytest.raises(SystemExit):
        speculative.main(list(flags))
    assert f"{flags[0]}: expected" in capsys.readouterr().err
