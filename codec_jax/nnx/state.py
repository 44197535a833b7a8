"""The values that the sampler works on and returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Float, Int

from codec_jax.forest import Forest, PageCopies, PagePool, Pages
from codec_jax.traffic import Traffic


@dataclass(frozen=True)
class Decoding:
    """Everything between two calls of the sampler; request slots index all per-request arrays.

    `traffic` counts the tokens generated, the KV tokens read for them, and those that would be read without sharing.
    """

    sampler: object  # whose it is
    forest: Forest
    pool: PagePool
    cache: tuple[Pages, ...]
    logits: Float[Array, "B V"]  # of each request's next token
    stream: Int[np.ndarray, " B"]  # numbers the random stream of each request
    next_stream: int
    block_capacity: int
    traffic: Traffic
    copies: PageCopies  # pages that have K and V beside their latents
    weights: int  # how often the sampler had taken new ones when they were computed

    @property
    def requests(self) -> list[int]:
        """Request slots in use."""
        return np.flatnonzero(self.forest.active).tolist()


@dataclass(frozen=True)
class Generated:
    """Tokens that one `decode` call appended, by request slot."""

    tokens: list[list[int]]
    logprobs: list[list[float]]  # of each token, under the model's own distribution
    stopped: list[bool]  # whether the last token is a stop token

    @classmethod
    def none(cls, requests: int) -> Generated:
        """Return nothing for so many request slots.

        Args:
          requests: how many.
        """
        return cls([[] for _ in range(requests)], [[] for _ in range(requests)], [False] * requests)


@dataclass(frozen=True)
class Completion:
    """One finished continuation of a prompt."""

    prompt: int
    tokens: list[int]  # the stop token included
    logprobs: list[float]  # of each token, under the model's own distribution
    finish_reason: str  # "stop", "length", or "error": its logits were not finite
