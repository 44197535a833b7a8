"""Which replica takes a request: the one with its prefix, until that has more to do than others by what a copy costs.

    work      of a replica: tokens of prompts that it computes for those it has taken, and tokens that they draw
    missing   tokens of a prompt that it would compute: they are neither in its cache nor in a prompt that waits there
    cost      work and missing, each at its price; the replica with the least takes the request

The same calls place alike: nothing here depends on time or chance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

#: Prompt tokens that cost as much as drawing one. Reading the weights takes a GPU as long as computing some 300 tokens,
#: and the step that reads them draws a token for each of 64 to 128 requests.
DRAW_COST = 4
#: What a missing token costs: it is computed, and is one more that takes memory and that each step reads from then on.
#: With 1, a second request would leave a document that is still to be computed: that is work, too, as much as a copy.
COPY_COST = 2


class Prompt(NamedTuple):
    """A prompt, for comparison with others."""

    length: int
    page_size: int
    prefixes: list[int]  # a number for each prefix of whole pages; equal prefixes have equal ones

    @classmethod
    def of(cls, tokens: Int[np.ndarray, " tokens"], page_size: int) -> Prompt:
        """Number the prefixes of a list of tokens."""
        content, width = tokens.astype(np.int32).tobytes(), 4 * page_size
        pages = (content[at : at + width] for at in range(0, len(content) - width + 1, width))
        numbers = accumulate(pages, lambda before, page: hash((before, page)), initial=0)
        return cls(len(tokens), page_size, list(numbers)[1:])


class Router:
    """Ranks replicas for a request, and keeps count of what they have to do."""

    def __init__(self, replicas: int) -> None:
        """Begin with replicas that have nothing to do.

        Args:
          replicas: how many.
        """
        self.work = [0] * replicas
        self._waiting = [_Prefixes() for _ in range(replicas)]
        self._taken: dict[Hashable, _Taken] = {}
        self._ended = self._drawn = 0  # requests that ended, and the tokens that they drew

    def ranked(self, prompt: Prompt, cached: Sequence[int]) -> list[int]:
        """Return the replicas, best first; of equal ones the lowest number.

        Args:
          prompt: of the request.
          cached: tokens of it in the cache of each replica.
        """
        costs = [work + COPY_COST * self._missing(i, prompt, cached[i]) for i, work in enumerate(self.work)]
        return sorted(range(len(costs)), key=costs.__getitem__)

    def take(self, request: Hashable, replica: int, prompt: Prompt, cached: int, limit: int) -> None:
        """Count a request as one that a replica has taken.

        Args:
          request: the request.
          replica: its number.
          prompt: of the request.
          cached: tokens of it in the cache of that replica.
          limit: tokens that it may draw.
        """
        missing = self._missing(replica, prompt, cached)
        self._waiting[replica].hold(prompt.prefixes)
        taken = _Taken(replica, limit, missing, prompt.prefixes[-1] if prompt.prefixes else None)
        self._taken[request] = taken
        self._count(taken, missing + DRAW_COST * self._expected(limit))

    def settle(self, request: Hashable, left: int, finished: bool) -> None:
        """Count what a request still needs; nothing happens to one that is not taken.

        Args:
          request: the request.
          left: tokens that it may still draw; once it has drawn some, its prompt is computed.
          finished: whether it needs nothing more.
        """
        taken = self._taken.get(request)
        if taken is None:
            return
        drawn = taken.limit - left
        if drawn or finished:
            self._waiting[taken.replica].release(taken.prefix)
            taken.prefix, taken.missing = None, 0
        if not finished:
            self._count(taken, taken.missing + DRAW_COST * self._expected(left))
            return
        self._count(taken, 0)
        del self._taken[request]
        if drawn:
            self._ended += 1
            self._drawn += drawn

    def forget(self, replica: int) -> None:
        """Take a replica to have nothing to do.

        Args:
          replica: its number.
        """
        self._taken = {request: taken for request, taken in self._taken.items() if taken.replica != replica}
        self.work[replica], self._waiting[replica] = 0, _Prefixes()

    def _missing(self, replica: int, prompt: Prompt, cached: int) -> int:
        return prompt.length - max(cached, self._waiting[replica].held(prompt.prefixes) * prompt.page_size)

    def _expected(self, left: int) -> int:
        """Return the tokens that a request draws: few draw as many as they may, so what others drew counts, too."""
        return min(left, -(-self._drawn // self._ended)) if self._ended else left

    def _count(self, taken: _Taken, cost: int) -> None:
        self.work[taken.replica] += cost - taken.cost
        taken.cost = cost


@dataclass
class _Taken:
    """What a request that was taken needs."""

    replica: int
    limit: int  # tokens that it might draw when it was taken
    missing: int  # tokens of its prompt to compute
    prefix: int | None  # the longest one that it holds
    cost: int = 0  # as counted in the work of the replica


class _Prefixes:
    """Prefixes of prompts that wait: each is held by prompts that end there, and by those that are a page longer."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._shorter: dict[int, int | None] = {}

    def held(self, prefixes: Sequence[int]) -> int:
        """Return how many of a prompt's prefixes are held; with each, all shorter ones are."""
        return bisect_left(prefixes, True, key=lambda prefix: prefix not in self._holders)

    def hold(self, prefixes: Sequence[int]) -> None:
        """Hold the prefixes of a prompt, until the longest one is released."""
        for at in reversed(range(len(prefixes))):
            self._holders[prefixes[at]] = self._holders.get(prefixes[at], 0) + 1
            if self._holders[prefixes[at]] > 1:
                return
            self._shorter[prefixes[at]] = prefixes[at - 1] if at else None

    def release(self, prefix: int | None) -> None:
        """Release the longest prefix of a prompt, and with it those that nobody else holds."""
        while prefix is not None:
            self._holders[prefix] -= 1
            if self._holders[prefix]:
                return
            del self._holders[prefix]
            prefix = self._shorter.pop(prefix)
