"""A request of the engine: what was asked for, and what there is of it by now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax.nnx.params import Matcher, SamplingParams
from codec_jax.nnx.text import TextStream

FinishReason = Literal["stop", "length", "abort", "error"]


class Update(NamedTuple):
    """What is new of a request."""

    tokens: list[int]
    text: str  # empty without a tokenizer
    finish_reason: FinishReason | None


@dataclass(eq=False)
class Request:
    """A request that `Engine.submit` took; the engine fills it in as it steps."""

    id: int
    prompt: Int[np.ndarray, " tokens"]
    params: SamplingParams
    on_update: Callable[[Request, Update], None] | None = None
    scored_from: int = 0  # the first token of the prompt whose successor `prompt_logprobs` is about
    tokens: list[int] = field(default_factory=list)  # generated, a stop token included
    logprobs: list[float] = field(default_factory=list)  # of each, under the model's own distribution
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # with each, as many as were asked for then
    prompt_logprobs: list[float] = field(default_factory=list)  # of the prompt's tokens after `scored_from`
    text: str = ""  # a stop token or stop string left out
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # why, for "error"
    cached_tokens: int = 0  # of the prompt, found in the cache when the request entered
    forks: int = 0  # how many went on from it
    matcher: Matcher | None = None  # the state of the one in `params`
    mask: bytes | None = None  # of the tokens that it allows next
    stream: TextStream | None = None  # that makes the text

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to come."""
        return self.finish_reason is not None

    @property
    def context(self) -> Int[np.ndarray, " tokens"]:
        """The prompt and what was generated."""
        return part_of_context(self, 0, len(self.prompt) + len(self.tokens))

    @property
    def tokens_left(self) -> int:
        """How many tokens it may still draw."""
        return self.params.max_tokens - len(self.tokens)

    @property
    def last_token(self) -> int:
        """The token that is fed next."""
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    def __repr__(self) -> str:
        """Say how far it is."""
        return (
            f"Request({self.id}, {len(self.prompt):,} tokens of prompt, {len(self.tokens):,} generated, "
            f"{self.finish_reason or 'not finished'})"
        )


def part_of_context(request: Request, begin: int, end: int) -> Int[np.ndarray, " tokens"]:
    """Return the tokens of a request's context between two positions."""
    size = len(request.prompt)
    if end <= size:
        return request.prompt[begin:end]
    tokens = np.asarray(request.tokens[max(begin - size, 0) : end - size], np.int64)
    return np.concatenate([request.prompt[begin:], tokens])
