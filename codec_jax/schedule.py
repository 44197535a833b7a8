"""Cut the streams into segments of near-equal cost and give every thread block a run of them (paper, section 5).

    cost      |-- wide streams x kv heads --|------ narrow streams x kv heads ------|
    cuts      |      |      |      |        |      |      |      |      |      |    |     one run a thread block

Streams lie end to end, so a cut is a position on one line and every thread block gets one contiguous run. Runs of a
wide stream with many blocks end with it: the thread blocks of two pairs of tiles that read the same node then stand at
the same place at the same time, and the second to ask for a block finds it in the L2 cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from codec_jax.cost import CostModel, Estimate
from pallas_kernels.columns import Segment

if TYPE_CHECKING:
    from codec_jax.plan import Plan

#: Thread blocks that a wide stream must keep busy to have them to itself.
_LEAST_TEAM = 8


class Work(NamedTuple):
    """The blocks of all streams, and who works on them."""

    stream_ptr: Int[np.ndarray, " streams+1"]  # stream s has blocks [stream_ptr[s], stream_ptr[s + 1]), in each kv head
    unmasked: Int[np.ndarray, " streams"]  # how many of its first blocks need no mask
    wide: Bool[np.ndarray, " streams"]  # wide streams come first
    unique_wide: float  # blocks of wide streams, those of several streams counted once
    block_tokens: int
    num_kv_heads: int
    num_ctas: int

    @property
    def blocks(self) -> Int[np.ndarray, " streams"]:
        """Blocks of each stream."""
        return np.diff(self.stream_ptr)

    def estimate(self, model: CostModel) -> Estimate:
        """Return what blocks and segments cost beside each other."""
        masked = self.blocks - self.unmasked
        narrow, wide = (
            (float(self.unmasked[which].sum()), float(masked[which].sum())) for which in (~self.wide, self.wide)
        )
        return Estimate.of(model, self.block_tokens, narrow, wide, self.unique_wide)


class Schedule(NamedTuple):
    """Segments in the order in which thread blocks run them."""

    stream: Int[np.ndarray, " segments"]
    head: Int[np.ndarray, " segments"]
    lo: Int[np.ndarray, " segments"]  # blocks [lo, hi) of all streams' blocks
    hi: Int[np.ndarray, " segments"]
    cta_ptr: Int[np.ndarray, " num_ctas+1"]  # thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])


class Line(NamedTuple):
    """Streams end to end: for every stream, one stretch a kv head, along which cost adds up."""

    work: Work
    stream: Int[np.ndarray, " stretches"]
    unit: Float[np.ndarray, "stretches 2"]  # cost of an unmasked and of a masked block
    opening: Float[np.ndarray, " stretches"]  # cost before the first block
    cost: Float[np.ndarray, " stretches"]

    @classmethod
    def of(cls, work: Work, estimate: Estimate, streams: Int[np.ndarray, " some"]) -> Line:
        """Lay some streams end to end; those without blocks are left out."""
        streams = streams[work.blocks[streams] > 0]
        wide, unmasked = work.wide[streams].astype(np.int64), work.unmasked[streams]
        unit, opening = estimate.block_us[wide], estimate.segment_us(wide)
        cost = opening + unmasked * unit[:, 0] + (work.blocks[streams] - unmasked) * unit[:, 1]
        heads = work.num_kv_heads
        return cls(work, np.repeat(streams, heads), *(np.repeat(x, heads, axis=0) for x in (unit, opening, cost)))

    def cut(self, cuts: Float[np.ndarray, " cuts"]) -> tuple[Schedule, Int[np.ndarray, " segments"]]:
        """Cut the line at positions counted in cost, rounded to whole blocks.

        Returns the segments, in order, and for each of them how many cuts lie at or before its begin.
        """
        work, count = self.work, len(self.stream)
        nothing = np.zeros(0, np.int64)
        if not count:
            return Schedule(nothing, nothing, nothing, nothing, np.zeros(len(cuts) + 2, np.int64)), nothing
        end = np.cumsum(self.cost)
        blocks = work.blocks[self.stream]
        base = np.concatenate([[0], np.cumsum(blocks)])  # blocks before each stretch
        # Where each cut falls: its stretch, then the block within it; cuts are counted in blocks from here on.
        at = np.minimum(np.searchsorted(end, cuts, side="right"), count - 1)
        full, unit = work.unmasked[self.stream[at]], self.unit[at]
        inside = cuts - (end - self.cost)[at] - self.opening[at]
        beyond = inside - full * unit[:, 0]
        block = np.where(beyond <= 0, inside / unit[:, 0], full + beyond / unit[:, 1])
        cut = base[at] + np.clip(np.rint(block), 0, blocks[at]).astype(np.int64)

        bounds = np.sort(np.concatenate([base, cut]))
        bounds = bounds[np.append(True, bounds[1:] > bounds[:-1])]
        begin, past = bounds[:-1], bounds[1:]
        stretch = np.searchsorted(base, begin, side="right") - 1
        stream = self.stream[stretch]
        shift = work.stream_ptr[stream] - base[stretch]  # from blocks of the line to blocks of the streams
        cta_ptr = np.concatenate([[0], np.searchsorted(begin, cut), [len(begin)]])
        segments = Schedule(stream, stretch % work.num_kv_heads, begin + shift, past + shift, cta_ptr)
        return segments, np.searchsorted(cut, begin, side="right")


def cut(work: Work, estimate: Estimate) -> Schedule:
    """Cut all streams, laid end to end, into one contiguous run for each thread block."""
    line = Line.of(work, estimate, np.arange(len(work.wide)))
    return line.cut(even_cuts(line))[0]


def even_cuts(line: Line) -> Float[np.ndarray, " num_ctas-1"]:
    """Return where on the line the runs of thread blocks 1, 2, ... begin, such that all cost about as much."""
    num_ctas, total = line.work.num_ctas, float(line.cost.sum())
    # A wide stream is a group: its stretches in all kv heads, which follow each other.
    wide_cost = line.cost[line.work.wide[line.stream]].reshape(-1, line.work.num_kv_heads).sum(1)
    share = total / num_ctas
    small = wide_cost < _LEAST_TEAM * share
    alone = int(np.argmax(small)) if small.any() else len(wide_cost)
    if not alone:
        return share * np.arange(1, num_ctas)
    groups = np.append(wide_cost[:alone], total - wide_cost[:alone].sum())
    # The lightest load that fits: every group rounds up to whole thread blocks, and equal groups get equally many.
    loads = share * np.linspace(1.0, 1.5, 101)[:, None]
    fitting = np.ceil(groups / np.maximum(loads, 1e-9) - 1e-6)
    ctas = fitting[np.argmax(fitting.sum(1) <= num_ctas), :alone].astype(np.int64)
    cuts, base = [np.zeros(0)], 0.0
    for cost, count in zip(groups, ctas, strict=False):
        cuts.append(base + cost * np.arange(1, count + 1) / count)
        base += cost
    rest = num_ctas - int(ctas.sum())
    cuts.append(base + (total - base) * np.arange(1, rest) / rest)
    return np.concatenate(cuts)[: num_ctas - 1]


def loads(plan: Plan) -> Float[np.ndarray, " num_ctas"]:
    """Estimate how long each thread block of a plan takes by the plan's cost model, in microseconds."""
    cta_ptr = np.asarray(plan.cta_ptr)
    segments = Segment(*np.asarray(plan.segments)[: cta_ptr[-1]].T)
    estimate = Estimate(plan.cost_model, plan.block_tokens, int(plan.waiting))
    cost = estimate.segments(segments.is_wide, segments.masked - segments.lo, segments.hi - segments.masked)
    return np.diff(np.concatenate([[0], np.cumsum(cost)])[cta_ptr])
