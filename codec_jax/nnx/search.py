"""Search for likely completions: the best of several samples, and beam search.

Both are requests of an engine or of replicas, so what they share is computed once:

    best_of      samples of one prompt, sorted
    beam_search  a request for each beam and token: the engine finds all but its last token in the cache, feeds that
                 one, and says which tokens are likely next
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.nnx.params import MAX_TOP_LOGPROBS, SamplingParams
from codec_jax.nnx.replicas import Serving, check_serving
from codec_jax.nnx.request import Request

#: Of the power of a length that scores are divided by.
_MOST_DECIMALS = 300


class Beam(NamedTuple):
    """A completion that beam search found."""

    tokens: list[int]  # a stop token included
    score: float  # log-probability, divided by the number of tokens to the power of `length_penalty`


def best_of(
    engine: Serving,
    prompt: str | Integers,
    samples: int,
    params: SamplingParams,
    *,
    score: Callable[[Request], float] | None = None,
) -> list[Request]:
    """Complete a prompt several times, and return the requests, best first.

    Args:
      engine: or replicas; works on its other requests as well.
      prompt: token ids, or text if the engine has a tokenizer.
      samples: how many.
      params: how they are decoded; they draw from streams of their own.
      score: of a finished request, higher is better; the mean log-probability of its tokens by default.

    Raises what `Engine.submit` raises, and ValueError for a score that is no number.

    >>> from codec_jax.nnx.engine import Engine
    >>> from codec_jax.nnx import best_of
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> engine = Engine(Decoder(config, nnx.Rngs(0)), max_requests=8, num_pages=64)
    >>> best, *others = best_of(engine, [1, 2, 3], 4, SamplingParams(max_tokens=5))
    >>> all(sum(best.logprobs) >= sum(other.logprobs) for other in others)
    True
    """
    check_serving(engine)
    checks.function("score", score)
    requests = engine.generate([prompt], params, samples=samples)
    scores = [_mean_logprob(request) if score is None else score(request) for request in requests]
    for value in scores:
        # Those of failed requests may be infinite. Of integers there are some that NumPy does not have.
        if not isinstance(value, int | float | np.integer | np.floating) or value != value:
            raise ValueError(f"score: expected a function that gives a number for each request, got {value!r:.100}")
    return [requests[i] for i in sorted(range(len(requests)), key=scores.__getitem__, reverse=True)]


def _mean_logprob(request: Request) -> float:
    """Return the mean log-probability of the tokens; those of a failed request are worth nothing."""
    return -np.inf if request.error is not None or not request.tokens else float(np.mean(request.logprobs))


def beam_search(
    engine: Serving,
    prompt: str | Integers,
    *,
    beams: int,
    max_tokens: int,
    stop_tokens: Integers | Set[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    results: int = 1,
) -> list[Beam]:
    """Return likely completions of a prompt, best first: those of `generate(num_beams=...)` of transformers 5.

    Args:
      engine: or replicas; works on its other requests as well. A token takes one step if all beams can enter at once.
      prompt: token ids, or text if the engine has a tokenizer.
      beams: completions that are followed at a time; with 1, the most likely token is taken each time.
      max_tokens: tokens of a completion, at most.
      stop_tokens: tokens that end a completion.
      length_penalty: exponent of the length that log-probabilities are divided by; above 0 favors long completions.
      early_stopping: when to stop, once `beams` completions have ended. True: at once. False: when no beam would be
        better if it ended now. "never": when no beam would be better even at the length that favors it most.
      results: completions to return, at most `beams`; there are fewer if the vocabulary has no more.

    Raises ValueError for options out of range, and what `Engine.submit` raises; LogitsError for logits that are not
    finite.

    >>> from codec_jax.nnx.engine import Engine
    >>> from codec_jax.nnx import beam_search
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> engine = Engine(Decoder(config, nnx.Rngs(0)), max_requests=8, num_pages=64)
    >>> first, second = beam_search(engine, [1, 2, 3], beams=4, max_tokens=5, stop_tokens=[0], results=2)
    >>> len(first.tokens) <= 5, first.score >= second.score
    (True, True)

    Source: https://github.com/huggingface/transformers/blob/main/src/transformers/generation/utils.py
    """
    check_serving(engine)
    # As Python's own numbers, of which powers hold.
    beams, max_tokens = checks.integer("beams", beams), checks.integer("max_tokens", max_tokens)
    length_penalty = checks.number("length_penalty", length_penalty)
    power = length_penalty * math.log10(max_tokens)
    if abs(power) > _MOST_DECIMALS:
        most = math.floor(_MOST_DECIMALS / math.log10(max_tokens))
        raise ValueError(
            f"length_penalty: expected a number from {-most} to {most}, to whose power {max_tokens} max_tokens are a "
            f"number that scores can be divided by, got {length_penalty}"
        )
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f'early_stopping: expected True, False or "never", got {early_stopping!r}')
    if checks.integer("results", results) > beams:
        raise ValueError(f"results: expected at most beams = {beams}, got {results}")
    given: Any = stop_tokens  # which `SamplingParams` makes a tuple
    whole = SamplingParams(max_tokens=max_tokens, stop_tokens=given)
    stops = set(whole.stop_tokens)
    # All beams that go on may come from one, which may have every stop token among its most likely ones.
    likely = min(beams + len(stops), engine.config.vocab_size)
    if likely > MAX_TOP_LOGPROBS:
        raise ValueError(
            f"beams: expected at most {MAX_TOP_LOGPROBS} together with stop_tokens, for which the engine says what is "
            f"likely next, got {beams} beams and {len(stops)} stop_tokens"
        )
    request = engine.submit(prompt, whole)  # refused if the longest completion does not fit
    engine.abort(request)

    longest = early_stopping == "never" and length_penalty > 0.0
    live, ended = [Beam([], 0.0)], list[Beam]()  # scores of those that live are not divided
    for length in range(1, max_tokens + 1):
        ranked = _extended(engine, request.prompt, live, likely)
        for beam in ranked[:beams]:
            if length == max_tokens or beam.tokens[-1] in stops:
                ended.append(Beam(beam.tokens, beam.score / length**length_penalty))
        ended = sorted(ended, key=_score, reverse=True)[:beams]
        live = [beam for beam in ranked if beam.tokens[-1] not in stops][:beams]
        if not live:  # all tokens are stop tokens
            break
        if len(ended) == beams:
            best = live[0].score / (max_tokens if longest else length) ** length_penalty
            # A single beam is greedy decoding, which ends where the beam does.
            if early_stopping is True or beams == 1 or best <= ended[-1].score:
                break
    return ended[:results]


def _extended(engine: Serving, prompt: Int[np.ndarray, " tokens"], beams: list[Beam], likely: int) -> list[Beam]:
    """Return the beams with each of so many tokens that are likely to follow, most likely first."""
    contexts = [np.concatenate([prompt, np.asarray(beam.tokens, np.int64)]) for beam in beams]
    requests = engine.generate(contexts, SamplingParams(max_tokens=1, temperature=0.0, top_logprobs=likely))
    extended: list[Beam] = []
    for beam, request in zip(beams, requests, strict=True):
        if request.error is not None:
            raise request.error
        [following] = request.top_logprobs
        extended += [Beam([*beam.tokens, token], beam.score + logprob) for token, logprob in following.items()]
    return sorted(extended, key=_score, reverse=True)


def _score(beam: Beam) -> float:
    return beam.score
