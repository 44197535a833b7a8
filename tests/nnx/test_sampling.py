"""Sampling against plain definitions of temperature, top-k and top-p, over many random keys."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.nnx.sampling import request_keys, sample

VOCAB = 12
DRAWS = 20_000
LOGITS = np.log(np.asarray([30, 22, 16, 11, 8, 5, 3, 2, 1.2, 0.9, 0.6, 0.3]) / 100)[
    np.random.default_rng(0).permutation(VOCAB)
].astype(np.float32)

jitted_sample = jax.jit(sample)
jitted_keys = jax.jit(request_keys)


def draw(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = VOCAB, top_p: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """`DRAWS` tokens from the same logits, one request each, and their log-probabilities."""
    keys = jitted_keys(jax.random.key(seed), np.arange(DRAWS, dtype=np.int32), np.full(DRAWS, 7, np.int32))
    options = np.float32(temperature), np.int32(top_k), np.float32(top_p)
    tokens, logprobs = jitted_sample(np.broadcast_to(logits, (DRAWS, VOCAB)), keys, *options)
    chex.assert_shape([tokens, logprobs], (DRAWS,))
    chex.assert_type([tokens, logprobs], [jnp.int32, jnp.float32])
    return np.asarray(tokens), np.asarray(logprobs)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """What a token should be drawn from, by definition, in float64."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    ranked = sorted(range(VOCAB), key=lambda token: -weights[token])[:top_k]
    kept, held = [], 0.0
    for token in ranked:
        if held >= top_p * weights[ranked].sum():
            break
        kept.append(token)
        held += weights[token]
    allowed = np.zeros(VOCAB)
    allowed[kept] = weights[kept]
    return allowed / allowed.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize("top_k", [1, 3, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
def test_temperature_0_takes_the_most_likely_token(top_k: int, top_p: float) -> None:
    rows = np.random.default_rng(0).normal(size=(DRAWS, VOCAB)).astype(np.float32)
    keys = jitted_keys(jax.random.key(0), np.arange(DRAWS, dtype=np.int32), np.zeros(DRAWS, np.int32))
    tokens, _ = jitted_sample(rows, keys, np.float32(0.0), np.int32(top_k), np.float32(top_p))
    np.testing.assert_array_equal(tokens, rows.argmax(-1))


@pytest.mark.parametrize("temperature", [0.1, 1.0, 50.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (VOCAB, 1e-6), (1, 0.3)])
def test_the_most_likely_token_is_all_that_top_k_1_or_a_tiny_top_p_leaves(
    temperature: float, top_k: int, top_p: float
) -> None:
    tokens, _ = draw(LOGITS, temperature, top_k, top_p)
    np.testing.assert_array_equal(tokens, LOGITS.argmax())


# (temperature, top_k, top_p, how many tokens may be drawn); the limits of top_p are well away from every sum of
# probabilities, of which the greatest ones at temperature 1 are 30, 52, 68, 79, 87, 92, 95, 97 %.
CUTS = [
    (1.0, VOCAB, 1.0, 12),
    (1.0, 1000, 1.0, 12),
    (1.0, 3, 1.0, 3),
    (1.0, 11, 1.0, 11),
    (1.0, VOCAB, 0.25, 1),
    (1.0, VOCAB, 0.35, 2),
    (1.0, VOCAB, 0.75, 4),
    (1.0, VOCAB, 0.94, 7),
    (1.0, 3, 0.75, 2),  # 30 and 22 of the 68 % that top_k leaves; without top_k it takes 4 tokens
    (1.0, 3, 0.9, 3),
    (1.0, 2, 0.5, 1),  # 30 of 52 %
    (0.5, VOCAB, 0.65, 2),  # 46 and 25 %: the temperature comes before top_p
    (3.0, 4, 0.9, 4),
    (2.0, 8, 0.8, 6),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "support"), CUTS)
def test_tokens_are_drawn_from_the_distribution_that_temperature_top_k_and_top_p_define(
    temperature: float, top_k: int, top_p: float, support: int
) -> None:
    want = distribution(LOGITS, temperature, top_k, top_p)
    assert np.count_nonzero(want) == support
    tokens, _ = draw(LOGITS, temperature, top_k, top_p)
    counts = np.bincount(tokens, minlength=VOCAB)
    np.testing.assert_array_equal(counts > 0, want > 0)
    # Six standard deviations of the count of each token.
    np.testing.assert_array_less(np.abs(counts - DRAWS * want), 6 * np.sqrt(DRAWS * want * (1 - want)) + 1e-6)


def test_seeds_streams_and_positions_draw_independently() -> None:
    """The most likely token has 30 %: two independent draws of DRAWS tokens agree in 19 % of them."""
    agreement = (np.exp(LOGITS.astype(np.float64)) ** 2).sum() / np.exp(LOGITS.astype(np.float64)).sum() ** 2
    key, other_key = jax.random.key(0), jax.random.key(1)
    many, seven = np.arange(DRAWS, dtype=np.int32), np.full(DRAWS, 7, np.int32)
    draws = {
        name: np.asarray(
            jitted_sample(
                np.broadcast_to(LOGITS, (DRAWS, VOCAB)),
                jitted_keys(*arguments),
                np.float32(1.0),
                np.int32(VOCAB),
                np.float32(1.0),
            )[0]
        )
        for name, arguments in {
            "streams": (key, many, seven),
            "streams of another seed": (other_key, many, seven),
            "streams at the next position": (key, many, seven + 1),
            "positions": (key, seven, many),
            "later streams": (key, many + DRAWS, seven),
        }.items()
    }
    names = list(draws)
    for i, left in enumerate(names):
        for right in names[i + 1 :]:
            share = (draws[left] == draws[right]).mean()
            assert abs(share - agreement) < 0.02, (left, right)


def test_keys_depend_on_seed_stream_and_position_only() -> None:
    stream, position = np.asarray([3, 0, 3, 9], np.int32), np.asarray([5, 5, 6, 2], np.int32)
    together = jax.random.key_data(request_keys(jax.random.key(4), stream, position))
    order = [2, 0, 3, 1]
    shuffled = jax.random.key_data(request_keys(jax.random.key(4), stream[order], position[order]))
    np.testing.assert_array_equal(shuffled, together[np.asarray(order)])
    for row in range(4):
        alone = request_keys(jax.random.key(4), stream[row : row + 1], position[row : row + 1])
        np.testing.assert_array_equal(jax.random.key_data(alone)[0], together[row])
    assert len(np.unique(together, axis=0)) == 4
    assert not (jax.random.key_data(request_keys(jax.random.key(5), stream, position)) == together).all(-1).any()


def test_a_row_is_drawn_from_its_own_logits_and_key() -> None:
    rows = np.random.default_rng(0).normal(size=(DRAWS, VOCAB)).astype(np.float32)
    keys = jitted_keys(jax.random.key(0), np.arange(DRAWS, dtype=np.int32), np.zeros(DRAWS, np.int32))
    options = np.float32(0.7), np.int32(5), np.float32(0.9)
    tokens, logprobs = jitted_sample(rows, keys, *options)
    back_tokens, back_logprobs = jitted_sample(rows[::-1], keys[::-1], *options)
    np.testing.assert_array_equal(back_tokens[::-1], tokens)
    np.testing.assert_array_equal(back_logprobs[::-1], logprobs)


@settings(max_examples=20)
@given(
    seed=seeds,
    size=st.sampled_from([0.1, 3.0, 100.0]),
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    top_k=st.sampled_from([2, VOCAB]),
    top_p=st.sampled_from([0.5, 1.0]),
)
def test_logprobs_are_those_of_the_model_itself(
    seed: int, size: float, temperature: float, top_k: int, top_p: float
) -> None:
    """At temperature 1 and with nothing cut off, however the tokens were drawn."""
    logits = (np.random.default_rng(seed).normal(size=VOCAB) * size).astype(np.float32)
    tokens, logprobs = draw(logits, temperature, top_k, top_p, seed)
    chex.assert_trees_all_close(logprobs.astype(np.float64), log_softmax(logits)[tokens], rtol=1e-5, atol=1e-5)


def test_equal_logits_are_cut_to_exactly_top_k_tokens() -> None:
    tokens, _ = draw(np.zeros(VOCAB, np.float32), top_k=5)
    assert len(np.unique(tokens)) == 5
