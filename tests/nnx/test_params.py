"""Options of a request: which are refused, and constraints that decide which tokens may come next."""

import re
from typing import Any

import jax
import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from codec_jax.nnx.params import Matcher, SamplingParams
from codec_jax.nnx.sampling import History, RowOptions, allowed_words, draw

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
END = len(ALPHABET)  # 256, alone in a word of the mask
VOCAB = 300  # a model may have more tokens than its tokenizer

jitted_draw = jax.jit(draw)


def test_lists_become_tuples() -> None:
    params = SamplingParams(stop_tokens=[3, np.int64(4)], stop=["a", "b"])
    assert (params.stop_tokens, params.stop) == ((3, 4), ("a", "b"))


def test_numbers_become_pythons_own_which_hold_any_sum() -> None:
    """60 tokens of a prompt and an int8 of 100 would be -96."""
    given = {"max_tokens": np.int8(100), "top_k": np.uint8(3), "seed": np.uint32(7), "stream": np.int16(4)}
    given |= {"top_logprobs": np.int8(5), "temperature": np.float16(0.5), "top_p": np.float32(1), "min_p": 0}
    params = SamplingParams(**given, prompt_logprobs=np.bool_(True), stop_tokens={5, 3})
    kinds = {name: type(getattr(params, name)) for name in given}
    assert kinds == dict.fromkeys(given, int) | dict.fromkeys(("temperature", "top_p", "min_p"), float)
    assert all(getattr(params, name) == value for name, value in given.items())
    assert params.prompt_logprobs is True
    assert sorted(params.stop_tokens) == [3, 5]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "^max_tokens: expected an integer of at least 0, got -1"),
    ({"temperature": -0.1}, "^temperature: expected a finite number of at least 0, got -0.1"),
    ({"temperature": np.nan}, "^temperature: .*nan"),
    ({"temperature": "hot"}, "^temperature: .*'hot'"),
    ({"top_k": 0}, "^top_k: .*got 0"),
    ({"top_p": 0.0}, r"^top_p: expected a probability in \(0, 1\], got 0.0"),
    ({"top_p": 1.1}, "^top_p: .*got 1.1"),
    ({"min_p": -0.1}, r"^min_p: expected a probability in \[0, 1\], got -0.1"),
    ({"min_p": 1.1}, "^min_p: .*got 1.1"),
    ({"repetition_penalty": 0.0}, "^repetition_penalty: expected a number above 0, got 0.0"),
    ({"repetition_penalty": 1e-60}, "^repetition_penalty: .*got 1e-60"),
    ({"presence_penalty": np.inf}, "^presence_penalty: .*inf"),
    ({"frequency_penalty": 1e39}, "^frequency_penalty: .*1e\\+39"),
    ({"seed": -1}, r"^seed: expected an integer in \[0, 2\*\*32\), got -1"),
    ({"seed": 2**32}, "^seed: .*got 4294967296"),
    ({"seed": True}, "^seed: .*got True"),
    ({"stream": 2**31}, "^stream: .*got 2147483648"),
    ({"stop_tokens": [1, -1]}, r"^stop_tokens: .*got stop_tokens\[1\] = -1"),
    ({"stop_tokens": 7}, "^stop_tokens: expected a list of integers"),
    ({"stop_tokens": range(17)}, "^stop_tokens: expected at most 16 tokens, got 17"),
    ({"stop": "end"}, "^stop: expected a list of strings, none of them empty, got 'end'"),
    ({"stop": ["end", ""]}, "^stop: "),
    ({"stop": [1]}, "^stop: "),
    ({"stop": None}, "^stop: .*got None"),
    ({"top_logprobs": 21}, "^top_logprobs: expected an integer of at least 0 and below 21, got 21"),
    ({"prompt_logprobs": 1}, "^prompt_logprobs: expected True or False, got 1"),
    ({"logit_bias": [1.0]}, "^logit_bias: expected a number for each token"),
    ({"logit_bias": {-1: 1.0}}, "^logit_bias: .*got -1"),
    ({"logit_bias": {"5": 1.0}}, "^logit_bias: .*got '5'"),
    ({"logit_bias": {5: -np.inf}}, r"^logit_bias\[5\]: expected a finite number, got -inf"),
    ({"temperature": 10**400}, "^temperature: expected a finite number, got 1000"),
    ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "^logit_bias: expected at most 300 tokens, got 301"),
    ({"matcher": "[a-z]+"}, "^matcher: expected the methods compute_bitmask, .*, got str"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_tokens": [3, 300]}, r"^stop_tokens: expected tokens in \[0, 300\), got stop_tokens\[1\] = 300"),
        ({"logit_bias": {5: 1.0, 300: 1.0}}, r"^logit_bias: .*got logit_bias\[1\] = 300"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_named(options: dict[str, Any], message: str) -> None:
    params = SamplingParams(**options)
    params.check(301)
    with pytest.raises(ValueError, match=message):
        params.check(VOCAB)


def test_extreme_options_are_accepted() -> None:
    SamplingParams(
        max_tokens=0,
        temperature=0,
        top_k=2**40,
        top_p=1,
        min_p=1,
        seed=2**32 - 1,
        stream=2**31 - 1,
        stop_tokens=range(16),
    )


def test_the_largest_bias_decides_at_the_lowest_temperature() -> None:
    rows = [SamplingParams(temperature=t, logit_bias={5: 3e38, 6: -3e38}, stream=i) for i, t in enumerate((1e-6, 0.5))]
    options, history = RowOptions.of(rows, VOCAB), History.empty(2, VOCAB)
    for position in range(8):
        logits = np.random.default_rng(position).normal(size=(2, VOCAB)).astype(np.float32)
        assert jitted_draw(logits, options, history, np.full(2, position, np.int32)).token.tolist() == [5, 5]


# ---------------------------------------------------------------------- constraints


class OneOf:
    """Lets one of some texts come, a byte a token, and then the end."""

    def __init__(self, texts: list[str], said: tuple[int, ...] = ()) -> None:
        self.texts, self.said = [[ALPHABET.index(letter) for letter in text] + [END] for text in texts], said

    def next_tokens(self) -> set[int]:
        count = len(self.said)
        return {text[count] for text in self.texts if len(text) > count and tuple(text[:count]) == self.said} or {END}

    def compute_bitmask(self) -> bytes:
        return sum(1 << token for token in self.next_tokens()).to_bytes(36, "little")

    def consume_token(self, token: int) -> bool:
        fits = token in self.next_tokens()
        self.said = (*self.said, token)
        return fits

    def is_stopped(self) -> bool:
        return self.next_tokens() == {END}

    def deep_copy(self) -> "OneOf":
        return OneOf(["".join(ALPHABET[token] for token in text[:-1]) for text in self.texts], self.said)


def texts_under(matchers: list[Matcher], temperature: float = 1.0) -> list[str]:
    """What rows say, each under its own matcher, with random logits that prefer what is not allowed."""
    rng, count = np.random.default_rng(0), len(matchers)
    rows = [
        SamplingParams(temperature=temperature, stream=row, matcher=matcher) for row, matcher in enumerate(matchers)
    ]
    options, history = RowOptions.of(rows, VOCAB), History.empty(count, VOCAB)
    texts: list[str] = [""] * count
    for position in range(40):
        for row, matcher in enumerate(matchers):
            options.allowed[row] = allowed_words(matcher.compute_bitmask(), VOCAB)
        logits = rng.normal(size=(count, VOCAB)).astype(np.float32)
        token = np.asarray(jitted_draw(logits, options, history, np.full(count, position, np.int32)).token)
        for row, matcher in enumerate(matchers):
            assert matcher.consume_token(int(token[row]))
            texts[row] += "" if token[row] == END else ALPHABET[token[row]]
        if (token == END).all():
            return texts
    raise AssertionError(f"expected texts that end, got {texts}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_say_what_their_matchers_allow(temperature: float) -> None:
    said = texts_under([OneOf(["yes", "no"]) for _ in range(20)] + [OneOf(["maybe"])] * 1, temperature)
    assert set(said[:-1]) == {"yes", "no"}
    assert said[-1] == "maybe"


def test_a_copy_of_a_matcher_goes_on_by_itself() -> None:
    matcher: Matcher = OneOf(["yes", "yet"])
    assert matcher.consume_token(ALPHABET.index("y"))
    copy = matcher.deep_copy()
    assert copy.consume_token(ALPHABET.index("e"))
    assert texts_under([matcher])[0] in ("es", "et")


def test_masks_are_cut_and_filled_to_the_models_tokens() -> None:
    mask = (2**0 + 2**2 + 2**64 + 2**65).to_bytes(12, "little")
    bits = np.unpackbits(allowed_words(mask, 100).view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(np.flatnonzero(bits), [0, 2, 64, 65])
    assert len(bits) == 128
    np.testing.assert_array_equal(allowed_words(mask, 64), [5, 0])


def test_llguidances_matcher_is_one() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokens = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=END)
    pattern = r"(ab|cd){1,3}-[0-9]{2,6}"
    matchers = [
        llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_regex(pattern)).deep_copy() for _ in range(8)
    ]
    assert all(isinstance(matcher, Matcher) for matcher in matchers)
    said = texts_under(matchers)
    assert all(re.fullmatch(pattern, text) for text in said), said
    assert len(set(said)) > 1
    assert all(matcher.is_stopped() for matcher in matchers)
