"""The text of generated tokens, as they come: whole characters only, and none of a stop string.

    push          tokens -> the text that no later token changes
    finish        the rest: half a character, or what might have become a stop string
    added_texts   what single tokens add: those that came, and those that might have
    token_ids     the other way, for prompts

A token is decoded together with the few before it, so text costs the same however long it is. `DecodeStream` of the
tokenizers library does so too, but raises an error for bytes that are no text, which a model may well generate.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from codec_jax import checks
from codec_jax.arrays import Integers

#: Tokens to decode a new one with. They have four bytes at least, so that half a character is among them whole.
_CONTEXT = 4
#: A byte of a character that a vocabulary in the manner of SentencePiece does not have.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Stands for bytes that are no character, or not yet.
_NO_CHARACTER = "\ufffd"
#: The characters by which vocabularies in the manner of GPT-2 write bytes, and these.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def token_ids(name: str, text: str, tokenizer: Tokenizer, *, special: bool = True) -> list[int]:
    """Return a text as token ids, while other threads go on: a batch leaves the interpreter to them, `encode` does not.

    Args:
      name: of the text in errors.
      text: to encode.
      tokenizer: of the model.
      special: whether to add the tokens that the tokenizer begins or ends texts with.

    Raises ValueError for a text that the tokenizer has no tokens for.
    """
    try:
        return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    except Exception as error:  # of no class of its own
        raise ValueError(f"{name}: expected text that the tokenizer takes, got its error: {error}") from error


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens of a tokenizer, which are left out of texts.

    Args:
      tokenizer: as `Checkpoint.tokenizer`.

    >>> from codec_jax.nnx.text import special_tokens
    >>> from tokenizers import Tokenizer, models
    >>> tokenizer = Tokenizer(models.WordLevel({"one": 0}))
    >>> tokenizer.add_special_tokens(["<end>"]), special_tokens(tokenizer)
    (1, frozenset({1}))
    """
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)


class TextStream:
    """The text of one request's generated tokens. Special tokens are left out.

    In the end it is what the tokenizer decodes all tokens to, up to the first stop string. `stopped` says whether
    there was one, and `kept_tokens` how many tokens came until then: those that are pushed later do not count.

    >>> from tokenizers import Tokenizer, models
    >>> from codec_jax.nnx import TextStream
    >>> tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}))
    >>> stream = TextStream(tokenizer, stop=["two three"])
    >>> [stream.push([token]) for token in (0, 1, 0, 1, 2, 0)]
    ['one', ' ', 'two one', ' ', '', '']
    >>> stream.finish(), stream.text, stream.stopped, stream.kept_tokens
    ('', 'one two one ', True, 5)
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, special: frozenset[int] | None = None
    ) -> None:
        r"""Begin a text.

        Args:
          tokenizer: as `Checkpoint.tokenizer`.
          stop: strings that end the text, and are not part of it. They may begin and end inside of tokens.
          special: the tokenizer's special tokens; for many texts ask `special_tokens` once, which may take a while.

        Raises TypeError for another tokenizer, ValueError for a stop string that is empty or has a "\ufffd", which
        stands for bytes that are no character.
        """
        checks.instance("tokenizer", tokenizer, Tokenizer)
        if isinstance(stop, str) or not all(isinstance(one, str) for one in stop):
            raise ValueError(f"stop: expected a list of strings, got {stop!r}")
        for i, one in enumerate(stop):
            if not one or _NO_CHARACTER in one:
                raise ValueError(f"stop[{i}]: expected at least one character, all of them valid, got {one!r}")
        self.stopped = False
        self.kept_tokens = 0
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=1)
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer) if special is None else special
        #: All text that was returned so far.
        self.text = ""
        self._pieces: list[str] = []  # that are certain, and were not returned yet
        self._held = ""  # certain text that may be the beginning of a stop string
        self._context: list[int] = []  # the last tokens whose text is known, up to half a character
        self._read = 0  # characters of the context that are known
        # A run of byte tokens is text if all of it is, else each of its bytes is none. So it is certain at its end.
        self._run: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._tail: str | None = ""  # of the text with the run in it, as long as a stop string; None if it is no text

    def push(self, tokens: Integers) -> str:
        """Take tokens and return the text that is certain by now and was not returned before.

        Args:
          tokens: any number of token ids. Those that the tokenizer does not have are no text.

        Raises ValueError for what is no list of token ids.
        """
        given = checks.int_vector("tokens", tokens)
        checks.each("tokens", given, given >= 0, "token ids of at least 0")
        for token in given.tolist():
            if self.stopped:
                break
            self.kept_tokens += 1
            self._take(token)
        return self._return()

    def finish(self) -> str:
        """Return what was held back, as no more tokens come."""
        rest = "" if self.stopped else self._held + self._decode([*self._context, *self._run])[self._read :]
        self._held, self._context, self._read, self._run = "", [], 0, []
        self._pieces.append(rest)
        return self._return()

    def _return(self) -> str:
        new = "".join(self._pieces)
        self._pieces.clear()
        self.text += new
        return new

    def _take(self, token: int) -> None:
        """Add what is certain with this token to the text."""
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._special:
            return
        self._run.append(token)
        byte = _byte_of(name)
        if byte is not None and not self._seems_to_stop(byte):
            return
        tokens = [*self._context, *self._run]
        new = _whole(self._decode(tokens))[self._read :]
        text = self._held + new
        if found := [at for one in self._stop if (at := text.find(one)) >= 0]:
            self.stopped = True
            self._pieces.append(text[: min(found)])
        elif byte is None:
            certain = self._certain(text)
            self._pieces.append(text[:certain])
            self._held = self._tail = text[certain:]
            self._context = tokens[-_CONTEXT:]
            self._read = len(_whole(self._decode(self._context)))
            self._run = []
            self._utf8.reset()

    def _seems_to_stop(self, byte: int) -> bool:
        """Say whether a stop string is complete with this byte, if the run is text."""
        if self._tail is None:
            return False
        try:
            self._tail = (self._tail + self._utf8.decode(bytes([byte])))[-self._longest :]
        except UnicodeDecodeError:
            self._tail = None
            return False
        return self._tail.endswith(self._stop)

    def _certain(self, text: str) -> int:
        """Return how much of a text goes before what may be the beginning of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(one.startswith(text[at:]) for one in self._stop):
                return at
        return len(text)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class AddedText(NamedTuple):
    """What a token adds to those before it."""

    text: str
    characters: int  # that are whole with it, and were not before
    bytes: bytes | None  # those of the token alone; None where it has a part of a character, and does not say which


def added_texts(tokenizer: Tokenizer, tokens: Sequence[int], at: int, choices: Iterable[int]) -> list[AddedText]:
    r"""Say what each of some tokens adds to the text of those before it, special tokens included.

    Args:
      tokenizer: as `Checkpoint.tokenizer`.
      tokens: of a text.
      at: which of them the choices take the place of.
      choices: token ids.

    Returns "\ufffd" as the text of a token that begins a character, and the character as that of the one that ends it.

    >>> from codec_jax.nnx.text import added_texts
    >>> from tokenizers import Tokenizer, decoders, models
    >>> tokenizer = Tokenizer(models.BPE({"Ã": 0, "©": 1}, []))
    >>> tokenizer.decoder = decoders.ByteLevel()
    >>> added_texts(tokenizer, [0, 1], 1, [1])
    [AddedText(text='é', characters=1, bytes=b'\xa9')]
    """

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    begin = max(at - 2 * _CONTEXT, 0)
    while begin and (byte := _byte_of(tokenizer.id_to_token(tokens[begin]))) is not None and 0x80 <= byte < 0xC0:
        begin -= 1  # in the middle of a character
    context = [*tokens[begin:at]]
    known = decode(context)
    is_whole = not known.endswith(_NO_CHARACTER)
    if not is_whole:  # a run of bytes is no character at all while the last one is not whole
        ends = range(len(context), max(len(context) - _CONTEXT, -1), -1)
        known = max((decode(context[:end]).rstrip(_NO_CHARACTER) for end in ends), key=len)

    def added(token: int) -> AddedText:
        text = decode([*context, token])[len(known) :]
        whole = text.rstrip(_NO_CHARACTER)
        if whole == text and is_whole:
            return AddedText(text, len(text), text.encode())
        return AddedText(whole or _NO_CHARACTER, len(whole), _bytes_of(tokenizer.id_to_token(token) or ""))

    return [added(token) for token in choices]


def _byte_of(name: str | None) -> int | None:
    """Return the byte that a token in the manner of SentencePiece is, None for others."""
    byte = _BYTE.fullmatch(name or "")
    return int(byte[1], 16) if byte else None


def _bytes_of(name: str) -> bytes | None:
    """Return the bytes of a token that may be a part of a character, None where its name does not say."""
    if (byte := _byte_of(name)) is not None:
        return bytes([byte])
    return bytes(_BYTE_OF[character] for character in name) if _BYTE_OF.keys() >= {*name} else None


def _whole(text: str) -> str:
    """Leave out what may become a character: bytes that are certainly none have a character of the text after them."""
    return text.removesuffix(_NO_CHARACTER)
