"""The speculative example: its rule of acceptance against the distributions it must keep, and its tokens at 0."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import speculative
from hypothesis import given, settings
from hypothesis import strategies as st
from speculative import Drafts, Ngrams
from test_examples import VOCAB, model_dir  # noqa: F401

from codec_jax.nnx import Decoder, Sampler, open_checkpoint


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
    return tokens, *speculative.accept(
        keys[7], jnp.log(model)[tokens], parent, tokens, every, draft[tokens], temperature
    )


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
    accept = jax.jit(partial(speculative.accept, temperature=jnp.float32(0)))
    for trial in range(50):
        tokens = np.concatenate([[0], rng.integers(1, 5, 6)])
        kept, following = accept(
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
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(),
)
def test_trees_hold_different_guesses_of_the_longest_context_seen(
    text: list[int], widths: list[int], greedy: bool
) -> None:
    ngrams, size = Ngrams(order=2), speculative.tree_size(widths)
    ngrams.learn(text, len(text))
    drafts = Drafts.empty(1, size)
    guesses = drafts.grow(0, text, ngrams, widths, None if greedy else np.random.default_rng(0))
    parent, tokens = drafts.parent[0], drafts.tokens[0]
    assert (parent[0], tokens[0]) == (-1, text[-1])
    assert (parent[1 : guesses + 1] >= 0).all()
    assert (parent[guesses + 1 :] == -1).all()
    for candidate in range(guesses + 1):
        path = [candidate]
        while parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
        if len(path) > len(widths):
            continue
        context = (text[:-1] + tokens[path].tolist())[-2:]
        seen = [text[i] for i in range(len(context), len(text)) if text[i - len(context) : i] == context]
        for shorter in range(1, 3):
            seen = seen or [text[i] for i in range(len(text)) if text[max(i - 2 + shorter, 0) : i] == context[shorter:]]
        children = tokens[np.flatnonzero(parent == candidate)].tolist()
        assert len(set(children)) == len(children) == min(len(set(seen)), widths[len(path) - 1])
        drawn_from = zip(drafts.ids[0, candidate].tolist(), drafts.probability[0, candidate], strict=True)
        drawn_from = {token: probability for token, probability in drawn_from if probability}
        for token in children:
            assert drawn_from[token] == pytest.approx(seen.count(token) / len(seen))


# --- Decoding -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Decoder:  # noqa: F811
    return open_checkpoint(model_dir).load(jnp.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Four prompts of six tokens, of which three begin alike and two are the same."""
    return [[7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 30, 31], [20, 21, 22, 23, 24, 25], [7, 8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def greedy(model: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    sampler = Sampler(model, max_requests=4, num_pages=64)
    return sampler.decode(sampler.start(prompts), 30, temperature=0.0)[1].tokens


OPTIONS = {"max_new_tokens": 30, "temperature": 0.0}


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1)], ids=str)
def test_at_temperature_0_tokens_are_those_of_greedy_decoding_in_fewer_passes(
    model: Decoder, prompts: list, greedy: list, widths: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {tuple(prompt): tokens for prompt, tokens in zip(prompts, greedy, strict=True)}

    def guess(self: Ngrams, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The right token, and a wrong one that looks more probable."""
        right = (answer[tuple(text[:6])] + [0] * 9)[len(text) - 6]
        return np.asarray([right, (right + 1) % VOCAB])[-widths[0] :], np.asarray([0.4, 0.6])[-widths[0] :]

    monkeypatch.setattr(Ngrams, "guess", guess)
    answers = speculative.speculate(model, prompts, widths=widths, **OPTIONS)
    assert answers.tokens == greedy
    # The first token comes before any pass, and each pass adds a token to those it keeps; one guess alone is wrong.
    each = 1 if widths[0] == 1 else 2
    assert answers.passes == max(-(-(len(tokens) - 1) // each) for tokens in greedy)
    assert answers.trees == sum(-(-(len(tokens) - 1) // each) for tokens in greedy)


def test_a_report_compares_with_decoding_token_by_token(model_dir, tmp_path, capsys) -> None:  # noqa: F811
    questions = tmp_path / "questions.txt"
    questions.write_text("w8 w7 w30\nw8 w9\n")
    speculative.main([
        "--model", str(model_dir), "--questions", str(questions), "--temperature", "0", "--max-new-tokens", "24",
        "--dtype", "float32", "--samples", "1", "--widths", "2", "1",
    ])  # fmt: skip
    output = capsys.readouterr().out
    tokens = re.findall(r"([\d,]+) tokens in", output)
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]
    assert "answers that are the same in every token: 2 of 2" in output


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--widths", "3", "0"], "--widths: expected numbers of at least 1 .* got 3 0"),
        (["--widths", "6", "6", "6"], "trees of up to 256 candidates, got 6 6 6"),
        (["--temperature", "-1"], "--temperature: expected a finite number of at least 0, got -1.0"),
        (["--samples", "0"], "--samples: expected at least 1, got 0"),
        (["--model", "m"], "--model: expected it together with --questions"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(flags: list[str], problem: str, capsys) -> None:
    with pytest.raises(SystemExit):
        speculative.parse(flags)
    assert re.search(problem, capsys.readouterr().err)
