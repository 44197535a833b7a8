"""Checks of what sampler and engine are asked to do: errors name the argument, what was expected, and what came."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.forest import Forest
from codec_jax.forest.tree import check_in_use
from codec_jax.nnx.state import Decoding


def prompts(given: Any, max_context: int, vocab_size: int) -> list[Int[np.ndarray, " tokens"]]:
    """Return each prompt as an array, which is made once for all that comes after.

    Raises ValueError for none, or one that is empty, too long or no tokens.
    """
    listed = several("prompts", given)
    if not listed:
        raise ValueError("prompts: expected at least one prompt, got none")
    arrays = [checks.int_vector(f"prompts[{i}]", prompt) for i, prompt in enumerate(listed)]
    for i, tokens in enumerate(arrays):
        if not 0 < len(tokens) <= max_context:
            raise ValueError(f"prompts[{i}]: expected 1 to max_context = {max_context} tokens, got {len(tokens)}")
        checks.tokens(f"prompts[{i}]", tokens, vocab_size)
    return arrays


def several(name: str, given: Any) -> list[Any]:
    """Return a list of prompts or completions. Raises ValueError for what is a single one, or none."""
    if isinstance(given, str) or not np.iterable(given):
        raise ValueError(f"{name}: expected a list with one for each request, got {given!r:.80}; write [{given!r:.80}]")
    listed = list(given)
    if listed and isinstance(listed[0], int | np.integer):
        raise ValueError(f"{name}: expected lists of token ids, got token ids; write [[...]] for a single one")
    return listed


def count(requests: int, max_requests: int) -> None:
    """Raise ValueError unless there are slots for so many requests."""
    if requests > max_requests:
        raise ValueError(
            f"prompts: expected at most max_requests = {max_requests} requests, got {requests}; "
            "decode them in batches or make the sampler larger"
        )


def stop_tokens(given: Any, vocab_size: int) -> Int[np.ndarray, " stops"]:
    """Return tokens, which may be a set, as an array. Raises ValueError for what are none."""
    tokens = checks.int_vector("stop_tokens", list(given) if np.iterable(given) else given)
    checks.tokens("stop_tokens", tokens, vocab_size)
    return tokens


def streams(given: Integers, requests: int) -> Int[np.ndarray, " requests"]:
    """Return the numbers of the requests' random streams, or raise ValueError if they cannot be."""
    numbers = checks.int_vector("streams", given)
    if len(numbers) != requests or numbers.min() < 0:
        raise ValueError(f"streams: expected {requests} numbers of at least 0, one for each request, got {given}")
    return numbers


def room(name: str, tokens: int, length: int, max_context: int) -> None:
    """Raise ValueError unless a request of `length` tokens can take so many more."""
    if length + checks.integer(name, tokens) > max_context:
        raise ValueError(
            f"{name}: expected at most {max_context - length}, which takes a request from {length} tokens to "
            f"max_context = {max_context}, got {tokens}"
        )


def appended(
    tokens: Mapping[int, Integers], forest: Forest, max_context: int, vocab_size: int
) -> dict[int, Int[np.ndarray, " tokens"]]:
    """Return the tokens that requests get. Raises ValueError for requests or tokens that cannot be."""
    checks.instance("tokens", tokens, Mapping)
    requests = check_in_use(list(tokens), forest.leaf)
    new = {request: checks.int_vector(f"tokens[{request}]", tokens[request]) for request in requests.tolist()}
    for request, given in new.items():
        if not given.size:
            raise ValueError(f"tokens[{request}]: expected at least one token, got none")
        checks.tokens(f"tokens[{request}]", given, vocab_size)
        room(f"tokens[{request}]", len(given), int(forest.request_length[request]), max_context)
    return new


def state(given: Any, sampler: object) -> None:
    """Raise an error unless a state is one of this sampler's, and no call has used it up."""
    checks.instance("state", given, Decoding)
    if given.sampler is not sampler:
        raise ValueError("state: expected one that this sampler started, got one of another sampler")
    if given.cache[0].key.is_deleted():
        raise ValueError(
            "state: expected one that no call has used up, got one that was passed to decode or append before; "
            "go on with the state that it returned"
        )
