"""Calls that an engine and replicas take alike, for they need no more of them than to take requests and to step.

`Engine` and `Replicas` have these functions as methods.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.nnx import validate
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.request import Request, Update
from codec_jax.nnx.text import token_ids


class Taking(Protocol):
    """What these calls need of an engine, and of replicas."""

    config: DecoderConfig
    tokenizer: Tokenizer | None
    _ids: count[int]  # of requests

    @property
    def submit(self) -> Any: ...  # noqa: D102
    @property
    def submit_samples(self) -> Any: ...  # noqa: D102
    def abort(self, request: Request) -> None: ...  # noqa: D102
    def step(self) -> list[Request]: ...  # noqa: D102
    def _check_own(self, request: Request) -> None: ...
    def _submit(self, request: Request) -> Request: ...


def submit(
    self: Taking,
    prompt: str | Integers,
    params: SamplingParams | None = None,
    *,
    on_update: Callable[[Request, Update], None] | None = None,
) -> Request:
    """Take a request; `step` works on it from then on.

    Args:
      prompt: token ids, or text if the engine has a tokenizer.
      params: how it is decoded.
      on_update: called with the request and what is new of it, its end included unless `abort` ends it. An error that
        it raises ends this request. It may submit, fork, pin and abort, but not step, or call what steps.

    Returns the request, which the engine fills in. Raises ValueError for one that can never be served.
    """
    params = SamplingParams() if params is None else params
    checks.instance("params", params, SamplingParams)
    return self._submit(new_request(self, prompt, params, on_update))


def submit_samples(
    self: Taking,
    prompt: str | Integers,
    samples: int,
    params: SamplingParams | None = None,
    *,
    on_update: Callable[[Request, Update], None] | None = None,
) -> list[Request]:
    """Take several requests for one prompt, which is computed once; they draw from streams of their own.

    Args:
      prompt, params, on_update: as in `submit`.
      samples: how many.

    Raises what `submit` raises.
    """
    params = SamplingParams() if params is None else params
    checks.instance("params", params, SamplingParams)
    tokens = tokens_of(self, "prompt", prompt)
    streams = range(params.stream, params.stream + checks.integer("samples", samples))
    of_samples = [replace(params, stream=stream) for stream in streams]  # all, or an error, before one is taken
    return [self.submit(tokens, of_sample, on_update=on_update) for of_sample in of_samples]


def fork(
    self: Taking,
    request: Request,
    params: SamplingParams | None = None,
    *,
    on_update: Callable[[Request, Update], None] | None = None,
) -> Request:
    """Take a request that goes on from where another one is now, finished or not.

    Args:
      request: the one to go on from; it is not changed.
      params: how the new one is decoded; by default as the other, with a random stream that each of its forks has
        another of. `max_tokens` counts the tokens that there are already. What would have ended a request before ends
        the fork: without the same stop tokens, stop strings and matcher it goes on.
      on_update: as in `submit`.

    Raises ValueError for `max_tokens` that are used up, or a request of an engine with a larger vocabulary, and what
    `submit` raises.
    """
    checks.instance("request", request, Request)
    checks.tokens("request", request.context, self.config.vocab_size)
    checks.function("on_update", on_update)
    if params is None:
        # Another one for each fork, also of a fork; those of samples, which are consecutive, hardly ever.
        stream = zlib.crc32(f"{request.params.stream}, fork {request.forks}".encode()) % 2**31
        params = replace(request.params, stream=stream)
    checks.instance("params", params, SamplingParams)
    if len(request.tokens) >= params.max_tokens:
        raise ValueError(
            f"params: expected max_tokens above the {len(request.tokens)} tokens that request {request.id} has, "
            f"got {params.max_tokens}"
        )
    # There are none of the tokens that came before somebody asked.
    tops = (list(request.top_logprobs) or [{} for _ in request.tokens]) if params.top_logprobs else []
    new = Request(
        next(self._ids), request.prompt, params, on_update,
        tokens=list(request.tokens),
        logprobs=list(request.logprobs),
        top_logprobs=tops,
    )  # fmt: skip
    self._submit(new)
    request.forks += 1
    return new


def stream(self: Taking, request: Request) -> Iterator[Update]:
    """Work until a request is finished, and yield what is new of it; the others are worked on as well.

    Args:
      request: one of this engine's.

    Raises ValueError for one of another engine that is not finished.
    """
    self._check_own(request)
    tokens = text = 0
    while True:
        if len(request.tokens) > tokens or request.finished:
            update = Update(request.tokens[tokens:], request.text[text:], request.finish_reason)
            tokens, text = len(request.tokens), len(request.text)
            yield update
        if request.finished:
            return
        self.step()


def generate(
    self: Taking, prompts: Sequence[str | Integers], params: SamplingParams | None = None, *, samples: int = 1
) -> list[Request]:
    """Complete prompts, and return the finished requests, prompt by prompt.

    Args:
      prompts: as in `submit`.
      params: of all of them, as in `submit`.
      samples: completions of each prompt.

    Raises what `submit` raises, with nothing left to do.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> engine = Engine(Decoder(config, nnx.Rngs(0)), max_requests=8, num_pages=64)
    >>> [len(request.tokens) for request in engine.generate([[1, 2], [3]], SamplingParams(max_tokens=4), samples=2)]
    [4, 4, 4, 4]
    """
    requests: list[Request] = []
    with _aborting(self, requests):
        for i, prompt in enumerate(validate.several("prompts", prompts)):
            with naming_prompt(f"prompts[{i}]"):
                requests += self.submit_samples(prompt, samples, params)
        _finish_all(self, requests)
    return requests


def score(
    self: Taking, prompts: Sequence[Integers], completions: Sequence[Integers]
) -> list[Float[np.ndarray, " tokens"]]:
    """Return the log-probability of each token of given completions; what they share is computed once.

    Args:
      prompts: token ids.
      completions: token ids of a completion of each prompt.

    Raises ValueError for lists that do not belong together or do not fit, LogitsError for logits that are not
    finite.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> engine = Engine(Decoder(config, nnx.Rngs(0)), max_requests=8, num_pages=64)
    >>> [logprobs] = engine.score([[1, 2, 3]], [[4, 5]])
    >>> logprobs.shape
    (2,)
    """
    prompts, completions = validate.several("prompts", prompts), validate.several("completions", completions)
    if len(prompts) != len(completions):
        raise ValueError(f"completions: expected one for each of {len(prompts)} prompts, got {len(completions)}")
    params = SamplingParams(max_tokens=0, prompt_logprobs=True)
    requests: list[Request] = []
    with _aborting(self, requests):
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            given = tokens_of(self, f"prompts[{i}]", prompt)
            tokens = np.concatenate([given, tokens_of(self, f"completions[{i}]", completion)])
            request = Request(next(self._ids), tokens, params, scored_from=len(given) - 1)
            with naming_prompt(f"prompts[{i}]"):
                requests.append(self._submit(request))
        _finish_all(self, requests)
    for request in requests:
        if request.error is not None:
            raise request.error
    return [np.asarray(request.prompt_logprobs, np.float32) for request in requests]


# ---------------------------------------------------------------------- what they are made of


def new_request(
    serving: Taking,
    prompt: str | Integers,
    params: SamplingParams,
    on_update: Callable[[Request, Update], None] | None = None,
) -> Request:
    """Make a request with a number of its own."""
    checks.function("on_update", on_update)
    return Request(next(serving._ids), tokens_of(serving, "prompt", prompt), params, on_update)


def tokens_of(serving: Taking, name: str, prompt: str | Integers) -> Int[np.ndarray, " tokens"]:
    """Return a prompt as token ids, or raise ValueError."""
    if isinstance(prompt, str):
        if serving.tokenizer is None:
            raise ValueError(f"{name}: expected token ids, for the engine has no tokenizer, got text")
        prompt = token_ids(name, prompt, serving.tokenizer)
    tokens = checks.int_vector(name, prompt)
    if not tokens.size:
        raise ValueError(f"{name}: expected at least one token, got none")
    checks.tokens(name, tokens, serving.config.vocab_size)
    return tokens


@contextmanager
def naming_prompt(name: str) -> Iterator[None]:
    """Have errors about a prompt call it by the name that whoever gave several has for it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"\bprompt(?=[:\[])", name, str(error))) from error


@contextmanager
def _aborting(serving: Taking, requests: list[Request]) -> Iterator[None]:
    """Leave nothing behind where an error ends what these requests were for."""
    try:
        yield
    except BaseException:
        for request in requests:
            serving.abort(request)
        raise


def _finish_all(serving: Taking, requests: Sequence[Request]) -> None:
    while not all(request.finished for request in requests):
        serving.step()
