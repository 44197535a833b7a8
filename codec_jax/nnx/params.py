"""How one request is to be decoded."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from codec_jax import checks

#: What a row of the device's arrays has room for.
MAX_STOP_TOKENS, MAX_BIASED_TOKENS, MAX_TOP_LOGPROBS = 16, 300, 20
#: Each is looked for wherever text comes.
MAX_STOPS = 64


@runtime_checkable
class Matcher(Protocol):
    """A constraint: which tokens may come next. llguidance's `LLMatcher` is one.

    Source: https://github.com/guidance-ai/llguidance
    """

    def compute_bitmask(self) -> bytes:
        """Return bit t % 32 of little-endian uint32 t // 32 for each token t: 1 if it may come next."""
        ...

    def consume_token(self, token: int, /) -> bool:
        """Go on after a token; False if it was not allowed.

        Args:
          token: the one that came.
        """
        ...

    def is_stopped(self) -> bool:
        """Return whether nothing but an end-of-text token may follow."""
        ...

    def deep_copy(self) -> "Matcher":
        """Return one that goes on by itself from here, for a fork."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded: what is drawn, when it ends, and what comes with each token.

    The penalties, the bias and the matcher act first, in this order, then the temperature, top_k, top_p and min_p.

    Raises ValueError for a value out of range, and names it.

    >>> params = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, stop_tokens=[2])
    >>> params.stop_tokens
    (2,)
    >>> params.check(vocab_size=32000)
    """

    max_tokens: int = 256  # generated, at most; 0 computes the prompt only
    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int | None = None  # only the k most likely tokens may be drawn
    top_p: float = 1.0  # of those, only the most likely ones that together hold this much of the probability
    min_p: float = 0.0  # and of those, the ones with at least this share of the most likely one's probability
    repetition_penalty: float = 1.0  # divides positive logits of tokens of the prompt and the text, multiplies others
    presence_penalty: float = 0.0  # subtracted from the logit of every generated token
    frequency_penalty: float = 0.0  # subtracted once for each time that a token was generated
    seed: int = 0  # the same seed draws the same tokens
    stream: int = 0  # number of the random stream: samples of one prompt take 0, 1, ...
    stop_tokens: tuple[int, ...] = ()  # tokens that end the text, 16 at most
    stop: tuple[str, ...] = ()  # strings that end the text, 64 at most
    top_logprobs: int = 0  # the most likely tokens that come with each generated one, 20 at most
    prompt_logprobs: bool = False  # whether the log-probabilities of the prompt's tokens come, too
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of 300 tokens at most
    matcher: Matcher | None = None  # tells which tokens may come next

    def __post_init__(self) -> None:
        """Check what needs no vocabulary."""
        keep = partial(object.__setattr__, self)  # numbers as Python's own, which hold any sum
        keep("max_tokens", checks.integer("max_tokens", self.max_tokens, 0))
        keep("temperature", checks.number("temperature", self.temperature))
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature: expected a finite number of at least 0, got {self.temperature}")
        if self.top_k is not None:
            keep("top_k", checks.integer("top_k", self.top_k, below=2**63))
        keep("top_p", checks.number("top_p", self.top_p))
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: expected a probability in (0, 1], got {self.top_p}")
        keep("min_p", checks.number("min_p", self.min_p))
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p: expected a probability in [0, 1], got {self.min_p}")
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            keep(name, checks.number(name, getattr(self, name)))
        if not np.float32(self.repetition_penalty) > 0.0:
            raise ValueError(f"repetition_penalty: expected a number above 0, got {self.repetition_penalty}")
        if not checks.is_integer(self.seed) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected an integer in [0, 2**32), got {self.seed}")
        keep("seed", int(self.seed))
        keep("stream", checks.integer("stream", self.stream, 0))
        given = self.stop_tokens
        stop_tokens = checks.int_vector("stop_tokens", list(given) if isinstance(given, Set) else given)
        checks.each("stop_tokens", stop_tokens, stop_tokens >= 0, "tokens of at least 0")
        _at_most("stop_tokens", len(stop_tokens), MAX_STOP_TOKENS)
        keep("stop_tokens", tuple(stop_tokens.tolist()))
        several = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        if not several or not all(isinstance(each, str) and each for each in self.stop):
            raise ValueError(f"stop: expected a list of strings, none of them empty, got {self.stop!r:.100}")
        _at_most("stop", len(self.stop), MAX_STOPS, "strings")
        keep("stop", tuple(self.stop))
        keep("top_logprobs", checks.integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS + 1))
        keep("prompt_logprobs", checks.boolean("prompt_logprobs", self.prompt_logprobs))
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias: expected a number for each token, got {self.logit_bias!r}")
        _at_most("logit_bias", len(self.logit_bias), MAX_BIASED_TOKENS)
        biases = {
            checks.integer("logit_bias", token, 0): checks.number(f"logit_bias[{token}]", bias)
            for token, bias in self.logit_bias.items()
        }
        keep("logit_bias", biases)
        if not isinstance(self.matcher, Matcher | None):
            raise ValueError(
                "matcher: expected the methods compute_bitmask, consume_token, is_stopped and deep_copy, "
                f"got {type(self.matcher).__name__}"
            )

    def check(self, vocab_size: int) -> None:
        """Check the tokens that are named.

        Args:
          vocab_size: tokens of the model.

        Raises ValueError for a stop token or a biased token that the model does not have.
        """
        checks.tokens("stop_tokens", np.asarray(self.stop_tokens, np.int64), vocab_size)
        checks.tokens("logit_bias", np.asarray(list(self.logit_bias), np.int64), vocab_size)


def check_stop_tokens(name: str, given: Sequence[int], own: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for stop tokens that cannot be added to those of a model, by the name that they are given by."""
    checks.tokens(name, checks.int_vector(name, given), vocab_size)
    if len(given) > (room := MAX_STOP_TOKENS - len(own)):
        raise ValueError(f"{name}: expected at most {room} tokens beside the model's {len(own)}, got {len(given)}")


def _at_most(name: str, count: int, limit: int, what: str = "tokens") -> None:
    if count > limit:
        raise ValueError(f"{name}: expected at most {limit} {what}, got {count}")
