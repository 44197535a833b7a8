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
from jaxtyping import Float, Int

from codec_jax.arrays import expand
from pallas_kernels.columns import Page, Segment

if TYPE_CHECKING:
    from codec_jax.plan import Plan

# Time of one block of 128 KV tokens, in units of the time in which a thread block's share of the memory bandwidth
# brings it. Estimates until costs are measured per device: a wide block is bound by arithmetic; a narrow block waits
# for memory, but not when others that compute leave it more bandwidth.
_WIDE_COST = 1.1
_NARROW_COST = 0.75
_MASKED_FACTOR = 1.1  # masks cost a few instructions per score
_SEGMENT_COST = 2.0  # a segment loads query tiles and writes partials that POR reads again
#: Thread blocks that a wide stream must keep busy to have them to itself.
_LEAST_TEAM = 8


class Schedule(NamedTuple):
    """Segments in the order in which thread blocks run them."""

    stream: Int[np.ndarray, " segments"]
    head: Int[np.ndarray, " segments"]
    lo: Int[np.ndarray, " segments"]  # blocks [lo, hi) of all streams' blocks
    hi: Int[np.ndarray, " segments"]
    cta_ptr: Int[np.ndarray, " num_ctas+1"]  # thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])


def schedule(
    stream_ptr: Int[np.ndarray, " streams+1"],
    unmasked: Int[np.ndarray, " streams"],
    wide: Int[np.ndarray, " streams"],
    unique_wide: float,
    *,
    num_kv_heads: int,
    num_ctas: int,
) -> Schedule:
    """Cut streams into segments.

    Args:
      stream_ptr: stream s has blocks [stream_ptr[s], stream_ptr[s + 1]), for every kv head.
      unmasked: how many of its first blocks need no mask.
      wide: whether it is wide; wide streams come first.
      unique_wide: blocks of wide streams, those of several streams counted once.
      num_kv_heads: K.
      num_ctas: thread blocks.
    """
    blocks = np.diff(stream_ptr)
    used = np.flatnonzero(blocks)
    blocks, unmasked, wide = blocks[used], unmasked[used], wide[used]
    effective = unmasked + _MASKED_FACTOR * (blocks - unmasked)
    in_wide, in_narrow = effective[wide].sum(), effective[~wide].sum()
    unit = np.where(wide, _WIDE_COST, _narrow_cost(in_wide, in_narrow, unique_wide))

    # One line: for every stream, one stretch a kv head.
    line_stream = np.repeat(np.arange(len(used)), num_kv_heads)
    line_cost = (effective * unit + _SEGMENT_COST)[line_stream]
    line_end = np.cumsum(line_cost)
    line_base = np.concatenate([[0], np.cumsum(blocks[line_stream])])  # blocks before each stretch
    cuts = _cuts(
        np.bincount(line_stream[np.repeat(wide, num_kv_heads)], line_cost[np.repeat(wide, num_kv_heads)]),
        line_end[-1] if len(used) else 0.0,
        num_ctas,
    )

    # Where each cut falls: its stretch, then the block within it; cuts are counted in blocks from here on.
    at = np.minimum(np.searchsorted(line_end, cuts, side="right"), max(len(line_end) - 1, 0))
    if not len(used):
        nothing = np.zeros(0, np.int64)
        return Schedule(nothing, nothing, nothing, nothing, np.zeros(num_ctas + 1, np.int64))
    of = line_stream[at]
    inside = (cuts - (line_end - line_cost)[at] - _SEGMENT_COST) / unit[of]
    block = np.where(inside <= unmasked[of], inside, unmasked[of] + (inside - unmasked[of]) / _MASKED_FACTOR)
    cut = line_base[at] + np.clip(np.rint(block), 0, blocks[of]).astype(np.int64)

    bounds = np.unique(np.concatenate([line_base, cut]))
    begin, end = bounds[:-1], bounds[1:]
    stretch = np.searchsorted(line_base, begin, side="right") - 1
    stream = line_stream[stretch]
    shift = stream_ptr[used[stream]] - line_base[stretch]  # from blocks of the line to blocks of the streams
    return Schedule(
        stream=used[stream],
        head=stretch % num_kv_heads,
        lo=begin + shift,
        hi=end + shift,
        cta_ptr=np.concatenate([[0], np.searchsorted(begin, cut), [len(begin)]]),
    )


def loads(plan: Plan) -> Float[np.ndarray, " num_ctas"]:
    """Estimate what the run of each thread block of a plan costs, with the costs by which `schedule` cut it.

    The unit is the time in which a thread block's share of the memory bandwidth brings one block.
    """
    cta_ptr = np.asarray(plan.cta_ptr)
    segments, pages = np.asarray(plan.segments)[: cta_ptr[-1]], np.asarray(plan.pages)
    columns = Segment(*segments.T)
    wide, lo, masked, hi = columns.is_wide, columns.lo, columns.masked, columns.hi
    effective = masked - lo + _MASKED_FACTOR * (hi - masked)
    segment, nth = expand((hi - lo)[wide])
    page = Page(*pages[lo[wide][segment] + nth].reshape(-1, 4).T)
    unique_wide = np.asarray(plan.most_length)[np.unique(page.node[page.readers > 0])].sum() / plan.block_tokens
    in_wide, in_narrow = (effective[which].sum() / plan.num_kv_heads for which in (wide, ~wide))
    cost = effective * np.where(wide, _WIDE_COST, _narrow_cost(in_wide, in_narrow, unique_wide)) + _SEGMENT_COST
    return np.diff(np.concatenate([[0], np.cumsum(cost)])[cta_ptr])


def _narrow_cost(in_wide: float, in_narrow: float, unique_wide: float) -> float:
    """Return what a narrow block costs beside so many blocks of each kind: what fills the time that the whole takes."""
    total = max(unique_wide + in_narrow, in_wide * _WIDE_COST + in_narrow * _NARROW_COST)
    return float(np.clip((total - in_wide * _WIDE_COST) / max(in_narrow, 1), _NARROW_COST, 1.0))


def _cuts(wide_cost: Float[np.ndarray, " wide"], total: float, num_ctas: int) -> Float[np.ndarray, " num_ctas-1"]:
    """Return where on the line of costs the runs of thread blocks 1, 2, ... begin."""
    share = total / num_ctas
    small = wide_cost < _LEAST_TEAM * share
    alone = int(np.argmax(small)) if small.any() else len(wide_cost)
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
