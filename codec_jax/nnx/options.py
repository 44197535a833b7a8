"""Checks of what the sampler is asked to do; each error names the argument, what was expected, and what came."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.pages import KVPages


def check_prompts(prompts: Sequence[Integers], max_requests: int, max_context: int, vocab_size: int) -> None:
    """Raise ValueError for no prompts, too many, or one that is empty, too long or not of the vocabulary."""
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one prompt, got none")
    if len(prompts) > max_requests:
        raise ValueError(
            f"prompts: expected at most max_requests = {max_requests} requests, got {len(prompts)}; "
            "decode them in batches or make the sampler larger"
        )
    for i, prompt in enumerate(prompts):
        tokens = checks.int_vector(f"prompts[{i}]", prompt)
        if not 0 < len(tokens) <= max_context:
            raise ValueError(f"prompts[{i}]: expected 1 to max_context = {max_context} tokens, got {len(tokens)}")
        checks.tokens(f"prompts[{i}]", tokens, vocab_size)


def check_streams(streams: Integers, requests: int) -> Int[np.ndarray, " requests"]:
    """Return the numbers of the requests' random streams, or raise ValueError if they cannot be."""
    numbers = checks.int_vector("streams", streams)
    if len(numbers) != requests or numbers.min() < 0:
        raise ValueError(f"streams: expected {requests} numbers of at least 0, one for each request, got {streams}")
    return numbers


def check_room(name: str, tokens: int, length: int, max_context: int) -> None:
    """Raise ValueError unless a request of `length` tokens can take so many more."""
    checks.positive(name, tokens)
    if length + tokens > max_context:
        raise ValueError(
            f"{name}: expected at most {max_context - length}, which takes a request from {length} tokens to "
            f"max_context = {max_context}, got {tokens}"
        )


def check_unused(cache: Sequence[KVPages]) -> None:
    """Raise ValueError for the cache of a state that a call has used up."""
    if cache[0].key.is_deleted():
        raise ValueError(
            "state: expected one that no call has used up, got one that was passed to decode or append before; "
            "go on with the state that it returned"
        )


def check_sampling(
    stop_tokens: Integers, temperature: float, top_k: int | None, top_p: float, seed: int, vocab_size: int
) -> None:
    """Raise ValueError for sampling options out of range."""
    checks.tokens("stop_tokens", checks.int_vector("stop_tokens", list(stop_tokens)), vocab_size)
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise ValueError(f"temperature: expected a finite number of at least 0, got {temperature}")
    if top_k is not None and (not isinstance(top_k, int | np.integer) or top_k < 1):
        raise ValueError(f"top_k: expected an integer of at least 1, or None for all tokens, got {top_k}")
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed: expected an integer in [0, 2**32), got {seed}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: expected a probability in (0, 1], got {top_p}")
