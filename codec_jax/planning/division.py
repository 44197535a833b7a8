"""Policies of division: how the streams are cut, and which thread block gets which piece (paper, section 5).

aligned    runs of equal cost that are cut alike in all kv heads (`even_runs`); the default
paper      slices of a stream, as many as a lower bound of the makespan asks for, longest first to whoever is free
n          n equal slices of every stream, longest first to whoever is free
invariant  streams are cut as their rows allow before they come here (`invariant`); longest first to whoever is free

Paper: doi 10.1145/3802028.
"""

from __future__ import annotations

import heapq

import numpy as np
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import expand
from codec_jax.planning.estimate import Estimate
from codec_jax.planning.even_runs import even_runs
from codec_jax.planning.work import Schedule, Work

Policy = str | int
ALIGNED, INVARIANT = "aligned", "invariant"

#: Slice costs that "paper" tries, from its lower bound to twice as much.
_GRID = 16


def divide(work: Work, num_ctas: int, estimate: Estimate, policy: Policy) -> Schedule:
    """Cut the streams into segments and assign them to thread blocks.

    Raises ValueError for a policy that is not "aligned", "paper", "invariant" or a positive number of slices.
    """
    if policy == ALIGNED:
        return even_runs(work, num_ctas, estimate)
    if policy == "paper":
        return _paper(work, num_ctas, estimate)
    slices = 1 if policy == INVARIANT else policy
    if checks.is_integer(slices) and 0 < slices < 2**31:
        return _longest_first(_Slices.equal(work, num_ctas, estimate, np.full(len(work.wide), slices)))
    raise ValueError(f"policy: expected 'aligned', 'paper', 'invariant' or a positive number of slices, got {policy!r}")


class _Slices:
    """Pieces of streams, in every kv head, and what each costs."""

    def __init__(
        self,
        work: Work,
        num_ctas: int,
        estimate: Estimate,
        stream: Int[np.ndarray, " slices"],
        begin: Int[np.ndarray, " slices"],
        end: Int[np.ndarray, " slices"],
    ) -> None:
        middle = np.clip(work.first_masked[stream], begin, end)
        self.work, self.num_ctas, self.stream, self.begin, self.end = work, num_ctas, stream, begin, end
        self.cost = estimate.segments(work.wide[stream], middle - begin, end - middle)

    @classmethod
    def equal(cls, work: Work, num_ctas: int, estimate: Estimate, slices: Int[np.ndarray, " streams"]) -> _Slices:
        """Cut every stream into equal slices, but not into more than it has blocks."""
        slices = np.minimum(slices, work.blocks)
        stream, nth = expand(slices)
        first, blocks, count = work.block_ptr[stream], work.blocks[stream], slices[stream]
        return cls(work, num_ctas, estimate, stream, first + nth * blocks // count, first + (nth + 1) * blocks // count)

    @property
    def mean_load(self) -> float:
        """Cost that each thread block would have if it could be spread evenly."""
        return float(self.cost.sum()) * self.work.num_kv_heads / self.num_ctas


def _paper(work: Work, num_ctas: int, estimate: Estimate) -> Schedule:
    """Search for the division as the paper does, with one number in the place of one for each node.

    Slices no longer than cost_l, the least mean load that slices of this length have themselves, bound how many are
    worth having. Among longer ones, those whose schedule has the least makespan win.
    """
    whole = _Slices.equal(work, num_ctas, estimate, np.ones(len(work.wide), np.int64))
    if not len(whole.stream):
        return _longest_first(whole)
    cost = np.bincount(whole.stream, whole.cost, len(work.wide))

    def slices_of(longest: float) -> _Slices:
        return _Slices.equal(work, num_ctas, estimate, np.ceil(cost / longest).astype(np.int64))

    low, high = 0.0, float(max(cost.max(), whole.mean_load))
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if slices_of(middle).mean_load <= middle else (middle, high)
    best: tuple[float, Schedule] | None = None
    for longest in high * np.linspace(1.0, 2.0, _GRID):
        slices = slices_of(longest)
        assigned, makespan = _assigned(slices)
        if best is None or makespan < best[0]:
            best = makespan, _schedule(slices, assigned)
    assert best is not None
    return best[1]


def _longest_first(slices: _Slices) -> Schedule:
    return _schedule(slices, _assigned(slices)[0])


def _assigned(slices: _Slices) -> tuple[Int[np.ndarray, " slices*K"], float]:
    """Give the longest slice that is left to the thread block with the least load, until none is left.

    Returns the thread block of each slice, kv head by kv head, and the makespan.
    """
    heads = slices.work.num_kv_heads
    cost = np.tile(slices.cost, heads)
    cta = np.zeros(len(cost), np.int64)
    heap = [(0.0, c) for c in range(slices.num_ctas)]
    for slice_, length in zip(np.argsort(-cost, kind="stable").tolist(), -np.sort(-cost), strict=True):
        load, cta[slice_] = heap[0]
        heapq.heapreplace(heap, (load + length, int(cta[slice_])))
    return cta, max(heap)[0]


def _schedule(slices: _Slices, cta: Int[np.ndarray, " slices*K"]) -> Schedule:
    """List the slices by thread block, each one's in the order of its streams."""
    order = np.argsort(cta, kind="stable")
    head, at = np.divmod(order, len(slices.stream)) if len(order) else (order, order)
    cta_ptr = np.searchsorted(cta[order], np.arange(slices.num_ctas + 1))
    return Schedule(slices.stream[at], head, slices.begin[at], slices.end[at], cta_ptr)
