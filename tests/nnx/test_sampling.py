"""Drawing against NumPy in float64, and transformers' processors; a row draws the same beside anybody."""

from collections import Counter
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.nnx.params import MAX_TOP_LOGPROBS, SamplingParams
from codec_jax.nnx.sampling import NO_TOKEN, Drawn, History, RowOptions, allowed_words, draw, request_keys
from codec_jax.nnx.truncation import truncate

VOCAB = 75  # no multiple of the 32 tokens of a word
ROWS = 8
DRAWS = 20_000
LOGITS = np.log(np.asarray([30, 22, 16, 11, 8, 5, 3, 2, 1.2, 0.9, 0.6, 0.3]) / 100)[
    np.random.default_rng(0).permutation(12)
].astype(np.float32)

jitted_draw = jax.jit(draw)
jitted_truncate = jax.jit(truncate)
jitted_keys = jax.jit(request_keys)
gumbel = jax.jit(jax.vmap(lambda key: jax.random.gumbel(key, (VOCAB,))))


class Allow:
    """A matcher that allows some tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def compute_bitmask(self) -> bytes:
        return sum(1 << token for token in self.tokens).to_bytes(4 * (max(self.tokens) // 32 + 1), "little")

    def consume_token(self, token: int) -> bool:
        return token in self.tokens

    def is_stopped(self) -> bool:
        return False

    def deep_copy(self) -> "Allow":
        return Allow(self.tokens)


def options_of(rows: list[SamplingParams | None], vocab: int = VOCAB) -> RowOptions:
    options = RowOptions.of(rows, vocab)
    for row, params in enumerate(rows):
        if params is not None and params.matcher is not None:
            options.allowed[row] = allowed_words(params.matcher.compute_bitmask(), vocab)
    return options


def history_of(prompts: list[list[int]], texts: list[list[int]], vocab: int = VOCAB) -> History:
    in_prompt, generated = np.zeros((len(prompts), vocab), bool), np.zeros((len(prompts), vocab), np.uint16)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        in_prompt[row, prompt] = True
        np.add.at(generated[row], text, 1)
    return History(in_prompt, generated)


def same(params: SamplingParams, rows: int, vocab: int) -> RowOptions:
    """Every row the same, but for their streams."""
    one = RowOptions.of([params], vocab)
    return jax.tree.map(lambda x: np.repeat(x, rows, axis=0), one)._replace(stream=np.arange(rows, dtype=np.int32))


def draw_many(logits: np.ndarray, params: SamplingParams) -> Drawn:
    """`DRAWS` tokens from the same logits."""
    logits = np.broadcast_to(logits, (DRAWS, len(logits)))
    return jitted_draw(logits, same(params, *logits.shape), None, np.full(DRAWS, 7, np.int32))


def scores_of(logits: np.ndarray, params: SamplingParams, prompt: list[int], text: list[int]) -> np.ndarray:
    """By definition, in float64: logits of what a token is drawn from, -inf for what cannot be drawn."""
    scores, count = logits.astype(np.float64), Counter(text)
    for token in {*prompt, *text}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in count:
        scores[token] -= params.presence_penalty + params.frequency_penalty * count[token]
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.matcher is not None:
        scores[[token for token in range(len(scores)) if not params.matcher.consume_token(token)]] = -np.inf
    if params.temperature == 0.0:
        return np.where(np.arange(len(scores)) == scores.argmax(), 0.0, -np.inf)
    weights = np.exp((scores - scores.max()) / params.temperature)
    ranked = sorted(range(len(scores)), key=lambda token: -weights[token])[: params.top_k]
    kept, held = [], 0.0
    for token in ranked:
        if held >= params.top_p * weights[ranked].sum() and params.top_p < 1.0:
            break
        kept.append(token)
        held += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p]  # the most likely one's weight is 1
    out = np.full(len(scores), -np.inf)
    out[kept] = scores[kept] / params.temperature
    return out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def noise_of(rows: list[SamplingParams], position: np.ndarray) -> np.ndarray:
    """What JAX's own `categorical` adds to the scores of each row."""
    keys = [
        jax.random.fold_in(jax.random.fold_in(jax.random.key(params.seed), params.stream), at)
        for params, at in zip(rows, position, strict=True)
    ]
    return np.asarray(gumbel(jnp.stack(keys)), np.float64)


def assert_drawn(tokens: np.ndarray, scores: np.ndarray, noise: np.ndarray) -> None:
    """The token of each row has the greatest sum, up to float32's rounding."""
    total = scores + noise
    chosen = np.take_along_axis(total, np.asarray(tokens)[:, None], axis=1)[:, 0]
    assert np.isfinite(chosen).all()
    np.testing.assert_allclose(chosen, total.max(-1), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- every option

tokens_of = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 4, 30, 10**12]),
    top_p=st.sampled_from([1.0, 0.93, 0.6, 1e-7]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    seed=st.sampled_from([0, 1, 2**32 - 1]),
    stream=st.sampled_from([0, 5, 2**31 - 1]),
    stop_tokens=st.lists(st.integers(0, VOCAB - 1), max_size=16),
    top_logprobs=st.sampled_from([0, 0, 1, 20]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 0.5, 3.0]), max_size=5),
    matcher=st.none() | st.builds(Allow, st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True)),
)


@settings(max_examples=100)
@given(
    seed=seeds,
    rows=st.lists(params_of, min_size=ROWS, max_size=ROWS),
    prompts=st.lists(tokens_of, min_size=ROWS, max_size=ROWS),
    texts=st.lists(tokens_of, min_size=ROWS, max_size=ROWS),
)
def test_rows_draw_what_their_own_options_define(
    seed: int, rows: list[SamplingParams], prompts: list[list[int]], texts: list[list[int]]
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(ROWS, VOCAB)) * 2).astype(np.float32)
    position = rng.integers(0, 2**20, ROWS, np.int32)
    drawn = jitted_draw(logits, options_of(rows), history_of(prompts, texts), position)
    chex.assert_shape(drawn, [(ROWS,), (ROWS,), (ROWS, MAX_TOP_LOGPROBS), (ROWS, MAX_TOP_LOGPROBS), (ROWS,)])
    chex.assert_type(drawn, [jnp.int32, jnp.float32, jnp.int32, jnp.float32, bool])
    scores = np.stack([scores_of(*each) for each in zip(logits, rows, prompts, texts, strict=True)])
    assert_drawn(drawn.token, scores, noise_of(rows, position))
    own = log_softmax(logits)
    np.testing.assert_allclose(drawn.logprob, own[np.arange(ROWS), drawn.token], rtol=1e-5, atol=1e-5)
    for row, params in enumerate(rows):
        count = params.top_logprobs
        best = (-logits[row]).argsort()[:count]
        np.testing.assert_array_equal(drawn.top_tokens[row], [*best, *[NO_TOKEN] * (MAX_TOP_LOGPROBS - count)])
        np.testing.assert_allclose(drawn.top_logprobs[row, :count], own[row, best], rtol=1e-5, atol=1e-5)
        assert np.isneginf(drawn.top_logprobs[row, count:]).all()
    assert drawn.finite.all()


def test_each_processor_of_transformers_agrees() -> None:
    reason = "transformers and torch are installed for one Python version only"
    torch = pytest.importorskip("torch", reason=reason)
    hf = pytest.importorskip("transformers", reason=reason)
    cases = [
        (SamplingParams(repetition_penalty=1.3), [hf.RepetitionPenaltyLogitsProcessor(1.3)]),
        (SamplingParams(repetition_penalty=0.7), [hf.RepetitionPenaltyLogitsProcessor(0.7)]),
        (SamplingParams(top_k=7), [hf.TopKLogitsWarper(7)]),
        (SamplingParams(top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
        (SamplingParams(min_p=0.1), [hf.MinPLogitsWarper(0.1)]),
        (SamplingParams(temperature=0.6), [hf.TemperatureLogitsWarper(0.6)]),
        (
            SamplingParams(repetition_penalty=1.2, temperature=1.4, top_k=20, top_p=0.9, min_p=0.05),
            [
                hf.RepetitionPenaltyLogitsProcessor(1.2),
                hf.TemperatureLogitsWarper(1.4),
                hf.TopKLogitsWarper(20),
                hf.TopPLogitsWarper(0.9),
                hf.MinPLogitsWarper(0.05),
            ],
        ),
    ]
    rng, count = np.random.default_rng(0), 300
    logits = (rng.normal(size=(count, VOCAB)) * 2).astype(np.float32)
    seen = rng.integers(0, VOCAB, (count, 20))
    history = history_of(seen[:, :12].tolist(), seen[:, 12:].tolist())
    position = np.arange(count, dtype=np.int32)
    for params, processors in cases:
        rows = [replace(params, stream=row) for row in range(count)]
        drawn = jitted_draw(logits, RowOptions.of(rows, VOCAB), history, position)
        scores = hf.LogitsProcessorList(processors)(torch.tensor(seen), torch.tensor(logits)).double().numpy()
        assert_drawn(drawn.token, scores, noise_of(rows, position))


# (temperature, top_k, top_p, min_p, how many tokens may be drawn); the limits of top_p are well away from every sum of
# probabilities, of which the greatest ones at temperature 1 are 30, 52, 68, 79, 87, 92, 95, 97 %.
CUTS = [
    (1.0, None, 1.0, 0.0, 12),
    (1.0, 1000, 1.0, 0.0, 12),
    (1.0, 3, 1.0, 0.0, 3),
    (1.0, 11, 1.0, 0.0, 11),
    (1.0, None, 0.25, 0.0, 1),
    (1.0, None, 0.35, 0.0, 2),
    (1.0, None, 0.94, 0.0, 7),
    (1.0, 3, 0.75, 0.0, 2),  # 30 and 22 of the 68 % that top_k leaves; without top_k it takes 4 tokens
    (1.0, 2, 0.5, 0.0, 1),  # 30 of 52 %
    (0.5, None, 0.65, 0.0, 2),  # 46 and 25 %: the temperature comes before top_p
    (3.0, 4, 0.9, 0.0, 4),
    (2.0, 8, 0.8, 0.0, 6),
    (1.0, None, 1.0, 0.2, 5),  # 8 of 30 %
    (2.0, None, 1.0, 0.24, 8),  # the square root of 2 of 30 % is 0.26, that of 1.2 is 0.2
    (1.0, 4, 0.9, 0.5, 3),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p", "support"), CUTS)
def test_tokens_come_as_often_as_they_should(
    temperature: float, top_k: int | None, top_p: float, min_p: float, support: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    want = np.exp(log_softmax(scores_of(LOGITS, params, [], [])))
    assert np.count_nonzero(want) == support
    counts = np.bincount(draw_many(LOGITS, params).token, minlength=len(LOGITS))
    np.testing.assert_array_equal(counts > 0, want > 0)
    # Six standard deviations of the count of each token.
    np.testing.assert_array_less(np.abs(counts - DRAWS * want), 6 * np.sqrt(DRAWS * want * (1 - want)) + 1e-6)


def test_equal_logits_are_cut_to_exactly_top_k_tokens() -> None:
    assert len(np.unique(draw_many(np.zeros(12, np.float32), SamplingParams(top_k=5)).token)) == 5


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from([1.0, 0.97, 0.6, 0.35, 1e-30, 1e-60]),
)
@settings(max_examples=100, deadline=None)
def test_of_equal_scores_the_first_ones_stay(levels: list[int], top_k: int, top_p: float) -> None:
    """As sorting would have it, whose order equal scores keep; weights are powers of four, which are summed exactly."""
    weights = 4.0 ** np.asarray(levels, np.float64)
    ranked = sorted(range(len(levels)), key=lambda token: -levels[token])[:top_k]
    before = np.cumsum(weights[ranked]) - weights[ranked]
    wanted = max(float(np.float32(top_p)) * weights[ranked].sum(), 1e-38)
    stays = [token for token, held in zip(ranked, before, strict=True) if held < wanted * (1 - 1e-6) or top_p == 1.0]
    unsure = [token for token, held in zip(ranked, before, strict=True) if abs(held - wanted) <= 1e-5 * wanted]
    padded = np.full((1, 40), -np.inf, np.float32)
    padded[0, : len(levels)] = np.log(weights)
    arguments = (np.asarray([value], kind) for value, kind in ((top_k, np.int32), (top_p, np.float32), (0, np.float32)))
    kept = np.flatnonzero(np.isfinite(jitted_truncate(padded, *arguments)[0]))
    assert set(stays) - set(unsure) <= set(kept) <= set(stays) | set(unsure)


@pytest.mark.parametrize("size", [1e-3, 100.0])
def test_logprobs_are_right_for_flat_and_for_sharp_logits(size: float) -> None:
    drawn = draw_many(LOGITS * np.float32(size), SamplingParams(top_k=5, temperature=2.0))
    np.testing.assert_allclose(drawn.logprob, log_softmax(LOGITS * np.float32(size))[drawn.token], rtol=1e-5, atol=1e-5)


def test_rows_whose_logits_are_not_finite_are_named() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[[0, 1, 3], [5, 6, 7]] = np.nan, np.inf, -np.inf
    drawn = jitted_draw(logits, RowOptions.of([None] * 4, VOCAB), None, np.zeros(4, np.int32))
    np.testing.assert_array_equal(drawn.finite, [False, False, True, False])


# ---------------------------------------------------------------------- company

WIDE = 3000
COMPANY = [
    None,
    SamplingParams(),
    SamplingParams(top_k=9),
    SamplingParams(min_p=0.3),
    SamplingParams(temperature=0.0, top_logprobs=3),
    SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0),
    SamplingParams(top_p=0.5, logit_bias={5: 3.0}, matcher=Allow([5, 6, 7])),
]
ALONE = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3, temperature=0.7),
    SamplingParams(seed=4, temperature=1.3),
    SamplingParams(seed=3, top_k=40),
    SamplingParams(seed=3, top_p=0.9, temperature=1.1),
    SamplingParams(seed=3, min_p=0.1),
    SamplingParams(seed=3, top_p=0.7, presence_penalty=0.5),
]


@pytest.mark.parametrize("history", [False, True])
def test_a_row_gets_the_same_bits_beside_anybody(history: bool) -> None:
    rng = np.random.default_rng(0)
    count = 24
    logits = (rng.normal(size=(count, WIDE)) * 0.3).astype(np.float32)  # flat: the tail is drawn, too
    logits[::3] *= 10
    position = np.arange(count, dtype=np.int32)
    seen = rng.integers(0, WIDE, (2, count, 50)).tolist()
    past = history_of(*seen, WIDE) if history else None
    # Without a history, nobody may ask for what needs one.
    own, company = (ALONE, COMPANY) if history else (ALONE[:-1], COMPANY[:4])
    for params in own:
        alone = jitted_draw(logits, options_of([params] * count, WIDE), past, position)
        for other in company:
            rows = [params if row % 2 else other for row in range(count)]
            beside = jitted_draw(logits, options_of(rows, WIDE), past, position)
            chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[1::2], each) for each in (alone, beside)))


def test_without_limits_nothing_is_cut_off_where_others_have_some() -> None:
    """Not even tokens that come after a sum of probabilities that float32 rounds to 1 or more; few draws see them."""
    scaled = (np.random.default_rng(0).normal(size=(64, WIDE)) * 8).astype(np.float32)
    options = same(SamplingParams(), 64, WIDE)
    kept = jitted_truncate(scaled, options.top_k, options.top_p, options.min_p)
    np.testing.assert_array_equal(kept, scaled)


def test_a_row_is_drawn_from_its_own_logits_and_key() -> None:
    rows = np.random.default_rng(0).normal(size=(DRAWS, 12)).astype(np.float32)
    options = same(SamplingParams(temperature=0.7, top_k=5, top_p=0.9), DRAWS, 12)
    drawn = jitted_draw(rows, options, None, np.full(DRAWS, 7, np.int32))
    turned = jax.tree.map(lambda x: x[::-1], (rows, options))
    back = jitted_draw(*turned, None, np.full(DRAWS, 7, np.int32))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[::-1], back), drawn)


# ---------------------------------------------------------------------- random numbers


def test_seeds_streams_and_positions_draw_independently() -> None:
    """The most likely token has 30 %: two independent draws of DRAWS tokens agree in 19 % of them."""
    agreement = (np.exp(LOGITS.astype(np.float64)) ** 2).sum() / np.exp(LOGITS.astype(np.float64)).sum() ** 2
    many, seven = np.arange(DRAWS, dtype=np.int32), np.full(DRAWS, 7, np.int32)
    options = same(SamplingParams(), DRAWS, 12)
    draws = {
        name: np.asarray(
            jitted_draw(
                np.broadcast_to(LOGITS, (DRAWS, 12)),
                options._replace(seed=np.broadcast_to(np.uint32(seed), DRAWS), stream=stream),
                None,
                position,
            ).token
        )
        for name, (seed, stream, position) in {
            "streams": (0, many, seven),
            "streams of another seed": (1, many, seven),
            "streams at the next position": (0, many, seven + 1),
            "positions": (0, seven, many),
            "later streams": (0, many + DRAWS, seven),
            "seeds": (many + 2, seven, seven),
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
    shuffled = jax.random.key_data(jitted_keys(jax.random.key(4), stream[order], position[order]))
    np.testing.assert_array_equal(shuffled, together[np.asarray(order)])
    for row in range(4):
        alone = request_keys(jax.random.key(4), stream[row : row + 1], position[row : row + 1])
        np.testing.assert_array_equal(jax.random.key_data(alone)[0], together[row])
    assert len(np.unique(together, axis=0)) == 4
    assert not (jax.random.key_data(request_keys(jax.random.key(5), stream, position)) == together).all(-1).any()


# ---------------------------------------------------------------------- history


@settings(max_examples=30)
@given(
    events=st.lists(
        st.tuples(st.just("add"), st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=4, max_size=4))
        | st.tuples(st.just("set"), st.integers(0, 3), st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9))),
        max_size=12,
    )
)
def test_a_history_is_what_was_added_and_set(events: list[tuple]) -> None:
    history, prompts, texts = History.empty(4, 10), [[] for _ in range(4)], [[] for _ in range(4)]
    add, set_row = jax.jit(History.add), jax.jit(History.set_row)
    for what, *arguments in events:
        if what == "add":
            token, active = zip(*arguments[0], strict=True)
            history = add(history, np.asarray(token, np.int32), np.asarray(active))
            texts = [[*text, *[t][:a]] for text, t, a in zip(texts, token, active, strict=True)]
        else:
            row, prompts[row], texts[row] = arguments
            one = history_of([prompts[row]], [texts[row]], 10)
            history = set_row(history, np.int32(row), one.in_prompt[0], one.generated[0])
    chex.assert_trees_all_equal(history, history_of(prompts, texts, 10))


def test_counts_stay_at_the_most_that_they_hold() -> None:
    history = History(jnp.zeros((2, 3), bool), jnp.full((2, 3), 65534, jnp.uint16))
    for _ in range(3):
        history = history.add(jnp.asarray([1, 2], jnp.int32), jnp.asarray([True, False]))
    np.testing.assert_array_equal(history.generated, [[65534, 65535, 65534], [65534, 65534, 65534]])


def test_of_equal_scores_the_first_one_stays_whatever_the_sign_of_zero() -> None:
    scores = jnp.asarray([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]])
    kept = jitted_truncate(scores, jnp.ones(2, jnp.int32), jnp.ones(2), jnp.zeros(2))
    np.testing.assert_array_equal(kept, [[0, -np.inf, -np.inf]] * 2)


@pytest.mark.parametrize("options", [
    {"presence_penalty": -3e38}, {"frequency_penalty": -3e38}, {"presence_penalty": -1e33, "temperature": 1e-6},
    {"repetition_penalty": 1e-39}, {"repetition_penalty": 1e-38, "top_p": 0.9}, {"logit_bias": {1: 3e38}},
], ids=str)  # fmt: skip
def test_whatever_is_favoured_most_is_drawn(options: dict) -> None:
    """Token 1, which was generated, and whose logit is above 0, is favoured beyond what float32 can hold."""
    params = SamplingParams(**{"temperature": 0.5} | options)
    logits = np.tile(np.linspace(0.5, 3.0, VOCAB, dtype=np.float32), (64, 1))
    drawn = jitted_draw(logits, same(params, *logits.shape), history_of([[]] * 64, [[1]] * 64), np.arange(64))
    assert (np.asarray(drawn.token) == 1).all()


@pytest.mark.parametrize("options", [{"presence_penalty": 3e38}, {"repetition_penalty": 3e38}], ids=str)
def test_whatever_is_disfavoured_most_is_not_drawn(options: dict) -> None:
    params = SamplingParams(temperature=0.5, **options)
    logits = np.tile(np.where(np.arange(VOCAB) == 1, -0.1, -9.0).astype(np.float32), (64, 1))
    drawn = jitted_draw(logits, same(params, *logits.shape), history_of([[1]] * 64, [[1]] * 64), np.arange(64))
    assert (np.asarray(drawn.token) != 1).all()
