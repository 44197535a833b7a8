"""What a step brought, from the device to the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer

from codec_jax.errors import LogitsError
from codec_jax.nnx.engine_step import Outcome
from codec_jax.nnx.request import FinishReason, Request, Update
from codec_jax.nnx.sampling import NO_TOKEN
from codec_jax.nnx.scheduler import Running, Scheduler, Step
from codec_jax.nnx.text import TextStream


class Landed(NamedTuple):
    """An `Outcome` on the host; empty arrays for what nobody has asked for."""

    tokens: Int[np.ndarray, "B steps"]
    logprobs: Float[np.ndarray, "B steps"]
    top_tokens: Int[np.ndarray, "B steps 20"]
    top_logprobs: Float[np.ndarray, "B steps 20"]
    broken: Bool[np.ndarray, " B"]
    scores: Float[np.ndarray, "C T"]


def fetch(step: Step, outcome: Outcome) -> Landed:
    """Wait for an outcome, and copy what somebody has asked for."""
    tops = any(running.request.params.top_logprobs for running in step.drawing)
    scores = any(piece.score < piece.running.score_end for piece in step.pieces)
    nothing = np.zeros((*outcome.tokens.shape, 0))
    return Landed(
        *jax.device_get((
            outcome.tokens,
            outcome.logprobs,
            outcome.top_tokens if tops else nothing,
            outcome.top_logprobs if tops else nothing,
            outcome.broken,
            outcome.scores if scores else nothing,
        ))
    )  # fmt: skip


def begin(request: Request, tokenizer: Tokenizer | None, special: frozenset[int]) -> None:
    """Give a request the text and the state of the matcher that belong to its tokens, whatever it had before."""
    params, got = request.params, min(len(request.tokens), len(request.logprobs))
    if params.top_logprobs:
        got = min(got, len(request.top_logprobs))
    for of_tokens in (request.tokens, request.logprobs, request.top_logprobs):
        del of_tokens[got:]  # an interruption may come in between
    if tokenizer is not None and params.max_tokens:
        request.stream = TextStream(tokenizer, params.stop, special=special)
        request.stream.push(request.tokens)
        request.text = request.stream.text
    if params.matcher is not None:
        request.matcher = params.matcher.deep_copy()
        _consume(request, request.tokens)


def take_tokens(step: Step, landed: Landed, scheduler: Scheduler) -> dict[Request, int]:
    """Give the requests their tokens, and tell those who listen; return how many each got."""
    drawn: dict[Running, list[int]] = {}
    reasons: dict[Running, FinishReason | None] = {}
    updates: dict[Request, Update] = {}
    going = [running for running in step.drawing if not running.request.finished]
    for running in going:
        request, tokens = running.request, landed.tokens[running.row]
        with failing_alone(request, updates.__setitem__):
            _check_finite(~landed.broken[running.row], request)
            drawn[running], reasons[running] = _accepted(request, tokens[tokens >= 0].tolist())
    scheduler.grow(drawn)
    for running, accepted in drawn.items():
        row, request = running.row, running.request
        request.tokens.extend(accepted)
        request.logprobs.extend(landed.logprobs[row, : len(accepted)].tolist())
        if count := request.params.top_logprobs:
            tops = landed.top_tokens[row, : len(accepted), :count], landed.top_logprobs[row, : len(accepted), :count]
            request.top_logprobs += [  # a vocabulary may have fewer tokens than are asked for
                {token: logprob for token, logprob in zip(*each, strict=True) if token != NO_TOKEN}
                for each in zip(*(x.tolist() for x in tops), strict=True)
            ]
        updates[request] = settle(request, accepted, reasons[running])
    # When all have theirs, for callbacks may abort others; and each is told, even if one before is interrupted.
    with ExitStack() as told:
        for request, update in reversed(updates.items()):
            told.callback(call_back, request, update)
    return {running.request: len(drawn.get(running, ())) for running in going}


def take_scores(step: Step, landed: Landed, chunk_tokens: int) -> list[Request]:
    """Give the requests the log-probabilities of their prompts; return those that failed."""
    failed: list[Request] = []
    for row, piece in enumerate(step.pieces):
        request, end = piece.running.request, min(piece.end, piece.running.score_end)
        if piece.score < end and not request.finished:
            at = chunk_tokens - piece.end
            scores = landed.scores[row, at + piece.score : at + end]
            with failing_alone(request):
                _check_finite(np.isfinite(scores).all(), request)
                request.prompt_logprobs.extend(scores.tolist())
            failed += [request] * request.finished
    return failed


def tell(request: Request, tokens: list[int], reason: FinishReason | None) -> None:
    """Finish a request if there is a reason, and call back with its new tokens."""
    call_back(request, settle(request, tokens, reason))


def settle(request: Request, tokens: list[int], reason: FinishReason | None) -> Update:
    """Finish a request if there is a reason, and return what is new of it, of which these are the tokens."""
    before = len(request.text)
    if reason is not None:
        finish(request, reason)
    elif request.stream is not None:
        request.text = request.stream.text
    return Update(tokens, request.text[before:], reason)


def call_back(request: Request, update: Update) -> None:
    """Tell who listens what is new of a request, unless it was aborted since."""
    if request.on_update is None or request.finish_reason != update.finish_reason:
        return
    if request.error is not None:
        with suppress(Exception):  # the first error is the request's
            request.on_update(request, update)
        return
    with failing_alone(request, lambda *_: None):  # it has heard of what it raised
        request.on_update(request, update)


def finish(request: Request, reason: FinishReason) -> None:
    """End a request."""
    request.finish_reason = reason
    if request.stream is not None:
        request.stream.finish()
        request.text, request.stream = request.stream.text, None


def _accepted(request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Return those of newly drawn tokens that belong to a request, and why it ends with them, if it does."""
    is_stopped = request.matcher is not None and request.matcher.is_stopped()
    if is_stopped or (request.tokens and request.tokens[-1] in request.params.stop_tokens):
        return [], "stop"  # what a fork began with has ended it
    stop = tokens[-1] in request.params.stop_tokens
    if request.stream is not None:
        request.stream.push(tokens[: -1 if stop else None])
        if request.stream.stopped:
            kept = request.stream.kept_tokens - len(request.tokens)
            tokens, stop = tokens[: max(kept, 0)], True  # what a fork began with may have the string
    if request.matcher is not None:
        _consume(request, tokens)
        stop = stop or request.matcher.is_stopped()
    at_end = len(request.tokens) + len(tokens) >= request.params.max_tokens
    return tokens, "stop" if stop else "length" if at_end else None


def _consume(request: Request, tokens: Sequence[int]) -> None:
    """Tell a request's matcher of tokens, and ask what may come next."""
    assert request.matcher is not None
    for token in tokens:
        if not request.matcher.consume_token(token):
            raise ValueError(f"matcher: expected token {token} to be consumed, which it had allowed")
    request.mask = request.matcher.compute_bitmask()
    if len(request.mask) % 4:
        raise ValueError(f"matcher: expected a mask of words of 4 bytes, got {len(request.mask)} bytes")
    if not np.frombuffer(request.mask, np.uint8).any() and not request.matcher.is_stopped():
        raise ValueError("matcher: expected a token to be allowed, or the matcher to be stopped, got neither")


@contextmanager
def failing_alone(request: Request, told: Callable[[Request, Update], None] = call_back) -> Iterator[None]:
    """End a request, and nothing else, with an error that is raised here, and let this be told."""
    before = len(request.text)
    try:
        yield
    except Exception as error:
        request.error = error
        finish(request, "error")
        told(request, Update([], request.text[before:], "error"))


def _check_finite(finite: np.bool, request: Request) -> None:
    """Raise LogitsError unless the logits of a request are finite."""
    if not finite:
        raise LogitsError(
            f"logits: expected finite numbers, got others for request {request.id}; are the weights finite?"
        )
