"""Text as it comes, against what the tokenizer decodes all tokens to at once."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from codec_jax.nnx.text import TextStream, added_texts, token_ids

CORPUS = [
    "the cat and the hat",
    "日本語のテキスト",
    "naïve café",
    "👩‍👩‍👧 👍🏽 emoji",
    "e\u0301 o\u0308",
    "stop\n\nstop",
]
SPECIAL = ["<s>", "</s>"]
NO_CHARACTER = "\ufffd"


def byte_level() -> Tokenizer:
    """As those of Llama 3 and Qwen3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """As that of Llama 2: characters it does not have are byte tokens, and so is the newline."""
    words = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abehnstéの", "th", "the", "▁the"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoder
    return tokenizer


def words() -> Tokenizer:
    """Without a decoder: spaces between all tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["a", "b", "the", "st", "é"])}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


STRIPPED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
TOKENIZERS = {
    "byte-level": byte_level(),
    "byte fallback": byte_fallback(decoders.Sequence(STRIPPED)),
    "byte fallback, Metaspace": byte_fallback(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    ),
    "words": words(),
}


class Expected(NamedTuple):
    """The text of the fewest tokens that have a stop string in them, cut at the first; else of all."""

    text: str
    kept: int
    stopped: bool


def expected(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> Expected:
    for kept in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:kept])
        if found := [text.index(one) for one in stop if one in text]:
            return Expected(text[: min(found)], kept, True)
    return Expected(tokenizer.decode(tokens), len(tokens), False)


def check(tokenizer: Tokenizer, tokens: list[int], stop: list[str], cuts: list[int]) -> None:
    stream = TextStream(tokenizer, stop)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    pieces = [stream.push(tokens[a:b]) for a, b in pairwise(bounds)]
    assert stream.text == "".join(pieces)
    pieces.append(stream.finish())
    assert Expected("".join(pieces), stream.kept_tokens, stream.stopped) == expected(tokenizer, tokens, stop)
    assert stream.text == "".join(pieces)
    assert stream.finish() == ""


# Few characters meet often: stop strings in texts, bytes that are characters together.
CHARACTERS = st.one_of(
    st.sampled_from("abehnst  \n"),
    st.sampled_from(["é", "e\u0301", "の", "語", "👩‍👩‍👧", "👍🏽", "\u0308", "the ", NO_CHARACTER]),
    st.characters(exclude_categories=["Cs"]),
)
TEXTS = st.lists(CHARACTERS, max_size=25).map("".join)
CUTS = st.lists(st.integers(0, 60), max_size=10)
STOPS = st.lists(st.text("abehnst \nのé👩👍\u200d\u0301", min_size=1, max_size=4), max_size=3)

#: Tokens that make for trouble: spaces, special tokens, bytes that begin a character or are none.
OFTEN = ["<0x20>", "<0xE2>", "<0x0A>", "▁", "<s>", "Ã", "©", "ð", "Ł", "a"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, cuts=CUTS, stop=STOPS, data=st.data())
def test_text_is_what_all_kept_tokens_decode_to_up_to_the_first_stop_string(
    name: str, text: str, cuts: list[int], stop: list[str], data: st.DataObject
) -> None:
    if len(text) > 1 and data.draw(st.booleans(), label="stops inside of the text"):
        start = data.draw(st.integers(0, len(text) - 1))
        inside = text[start : start + data.draw(st.integers(1, 5))]
        stop = [*stop, *([] if NO_CHARACTER in inside else [inside])]
    tokenizer = TOKENIZERS[name]
    check(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids, stop, cuts)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), cuts=CUTS, stop=STOPS)
def test_so_it_is_for_tokens_in_any_order(name: str, data: st.DataObject, cuts: list[int], stop: list[str]) -> None:
    """A model may generate bytes that are no text, special tokens, and rows of padded weights."""
    tokenizer = TOKENIZERS[name]
    often = [tokenizer.token_to_id(token) for token in OFTEN if tokenizer.token_to_id(token) is not None]
    any_token = st.integers(0, tokenizer.get_vocab_size() + 1)
    check(tokenizer, data.draw(st.lists(st.sampled_from(often) | any_token, max_size=40)), stop, cuts)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS.filter(lambda text: NO_CHARACTER not in text), stop=STOPS)
def test_text_comes_as_soon_as_it_is_certain(name: str, text: str, stop: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TextStream(tokenizer, stop)
    for count, token in enumerate(tokens, 1):
        stream.push([token])
        if stream.stopped:
            return
        if not tokenizer.id_to_token(token).startswith("<0x"):  # a byte is certain with the next token
            certain = tokenizer.decode(tokens[:count]).removesuffix(NO_CHARACTER)
            held = [n for one in stop for n in range(1, len(one)) if certain.endswith(one[:n])]
            assert stream.text == certain[: len(certain) - max(held, default=0)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS.filter(lambda text: NO_CHARACTER not in text))
def test_what_tokens_add_is_the_text_and_its_bytes(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    whole, characters, written = tokenizer.decode(tokens, skip_special_tokens=False), 0, b""
    for i, token in enumerate(tokens):
        [added] = added_texts(tokenizer, tokens, i, [token])
        assert whole[characters:].startswith(added.text.rstrip(NO_CHARACTER))
        assert len(added.text.rstrip(NO_CHARACTER)) == added.characters
        characters += added.characters
        written += added.bytes or b""
    assert characters == len(whole)
    assert written == whole.encode()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_tokens_in_any_order_add_something(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    often = [tokenizer.token_to_id(token) for token in OFTEN if tokenizer.token_to_id(token) is not None]
    any_token = st.integers(0, tokenizer.get_vocab_size() + 1)
    tokens = data.draw(st.lists(st.sampled_from(often) | any_token, max_size=40))
    for i in range(len(tokens)):
        assert all(added.characters >= 0 for added in added_texts(tokenizer, tokens, i, tokens))


def test_a_stop_string_of_bytes_ends_the_text_at_once() -> None:
    """Llama 2 has the newline as a byte: no request should go on for another token."""
    tokenizer = TOKENIZERS["byte fallback"]
    stream = TextStream(tokenizer, ["\n\n"])
    newline = tokenizer.token_to_id("<0x0A>")
    assert stream.push([tokenizer.token_to_id("a"), newline]) == "a"
    assert not stream.stopped
    assert stream.push([newline]) == ""
    assert (stream.stopped, stream.text, stream.kept_tokens) == (True, "a", 3)


def test_bytes_of_a_run_with_a_wrong_one_are_all_wrong() -> None:
    """The tokenizers library has it so; characters that were shown too early would be there twice."""
    tokenizer = TOKENIZERS["byte fallback"]
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in [*"€".encode(), 0xFF]]
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in run] == [""] * 4
    assert stream.push([tokenizer.token_to_id("a")]) == 4 * NO_CHARACTER + "a"


def test_half_a_character_before_other_text_does_not_hide_a_stop_string_of_bytes() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    stream = TextStream(tokenizer, ["\n"])
    assert stream.push([tokenizer.token_to_id(token) for token in ("<0xE2>", "a", "<0x0A>")]) == NO_CHARACTER + "a"
    assert stream.stopped


@pytest.mark.parametrize(
    ("name", "first", "repeated"),
    [
        ("byte-level", "a", "the"),
        ("byte-level", "a", "¢"),  # a byte that is no character
        ("byte-level", "a", "Ã"),  # half a character, for ever
        ("byte fallback", "a", "the"),
        ("byte fallback", "a", "<0x80>"),
        ("byte fallback", "<0xFF>", "<0x0A>"),  # what would stop, were the first byte not wrong
        ("words", "a", "the"),
    ],
)
def test_the_work_per_token_does_not_grow(name: str, first: str, repeated: str) -> None:
    tokenizer, decoded = TOKENIZERS[name], 0

    class Counting(TextStream):
        def _decode(self, tokens: list[int]) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return super()._decode(tokens)

    stream = Counting(tokenizer, ["\n"])
    for token in [first] + [repeated] * 400:
        stream.push([tokenizer.token_to_id(token)])
    stream.finish()
    assert not stream.stopped
    assert decoded <= 4000


def test_tokens_may_be_an_array_of_any_length() -> None:
    stream = TextStream(TOKENIZERS["words"])
    assert stream.push(np.zeros(0, np.int32)) == ""
    assert stream.push(np.asarray([0, 1], np.int32)) == "a b"


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("end", r"^stop: expected a list of strings, got 'end'"),
        ([b"end"], r"^stop: expected a list of strings, got \[b'end'\]"),
        (["a", ""], r"^stop\[1\]: expected at least one character, all of them valid, got ''"),
        (["\ufffd"], r"^stop\[0\]: expected at least one character, all of them valid, got"),
    ],
)
def test_other_stop_strings_are_refused(stop: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextStream(TOKENIZERS["words"], stop)


def test_what_is_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokens: expected token ids of at least 0, got tokens\[1\] = -1"):
        TextStream(TOKENIZERS["words"]).push([0, -1])
    with pytest.raises(TypeError, match=r"^tokenizer: expected a Tokenizer, got str"):
        TextStream("words")


def test_a_text_that_the_tokenizer_has_no_tokens_for_is_named() -> None:
    tokenizer = Tokenizer(models.Unigram([("w", -1.0), ("1", -2.0)]))
    assert token_ids("prompt", "1w", tokenizer) == [1, 0]
    with pytest.raises(ValueError, match=r"prompt: expected text that the tokenizer takes, got its error: "):
        token_ids("prompt", "w2", tokenizer)
