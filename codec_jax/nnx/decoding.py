"""What the sampler works on and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from codec_jax.forest import Forest
from codec_jax.pages import KVPages, PagePool
from codec_jax.plan import Plan
from codec_jax.traffic import Traffic


class Interval(NamedTuple):
    """What requests with tokens remaining decode with until the host looks at the device again."""

    source: Forest  # that it was prepared from, for so many tokens of each request
    remaining: Int[np.ndarray, " B"]
    forest: Forest  # with room for the tokens
    pool: PagePool
    growers: Forest  # with nobody else in it
    plan: Plan  # of `growers`


@dataclass(frozen=True)
class Decoding:
    """Everything between two calls of the sampler; request slots index all per-request arrays."""

    forest: Forest
    pool: PagePool
    cache: tuple[KVPages, ...]
    logits: Float[Array, "B V"]  # of each request's next token
    stream: Int[np.ndarray, " B"]  # numbers the random stream of each request
    next_stream: int
    block_capacity: int
    traffic: Traffic
    interval: Interval | None = None  # the last one, whose plan the next may extend
    ahead: Interval | None = None  # the next one if it is as expected, prepared while the device decoded

    @property
    def requests(self) -> list[int]:
        """Request slots in use."""
        return np.flatnonzero(self.forest.active).tolist()


@dataclass(frozen=True)
class Generated:
    """What one `decode` call appended, by request slot."""

    tokens: list[list[int]]
    logprobs: list[list[float]]  # of each token, under the model's own distribution
    stopped: list[bool]  # whether the last token is a stop token


@dataclass(frozen=True)
class Completion:
    """One finished continuation of a prompt."""

    prompt: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"
