"""Cut the streams into segments of near-equal cost and give every thread block a run of them (paper, section 5).

    one kv head   |..|--- stream 0 ---|..|--- stream 1 ---|- 2 -|- 3 -|
    runs             |  r0   |   r1   |  |   r2  |   r3   |               .. .. 2 | 2 3     run r of head h: thread
                                                                            r4      r5      block seat(r) K + h

A stream that fills whole runs does so up to its last block, and what is left of all streams is laid end to end and
shared by the other runs; where it makes runs shorter, a stream that fills most of one more has equal runs to itself. So
equal streams are cut alike, and every kv head is. Streams none of which fills a run are dealt out whole, wave by wave,
and only the last ones are cut, to fill up the runs. Thread blocks that read the same pages then do so at the same time:
in K and V of other heads, which lie next to each other in memory, or once more for another pair of tiles, from the L2
cache. Runs are seated with those of other streams between them: neighbours share their way to that cache, and wide
streams, which ask for little, leave it to narrow ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from codec_jax.arrays import expand
from codec_jax.cost import CostModel, Estimate
from pallas_kernels.columns import Segment

if TYPE_CHECKING:
    from codec_jax.plan import Plan

#: Share of the thread blocks that may be left out so that kv heads are cut alike.
_MOST_LEFT_OUT = 0.1
#: What a stretch leaves of a run must fill for it to get that run to itself, in every way that is tried; above 1, none.
_ROUNDED_UP = (0.5, 0.75, 2.0)
#: How close runs that several stretches share come to the least load that they can have.
_CLOSE = 2e-3
#: Of the cost of opening a segment, what a piece of a stretch must be worth for a run to begin or end with it.
_LEAST_PIECE = 0.1
#: Runs are seated by their multiples of it, modulo 1: any few that follow each other lie far apart.
_GOLDEN = 0.6180339887498949
#: Loads that are tried for a run, in units of the least that it can be.
_LOADS = np.append(np.linspace(1.0, 1.3, 61), [1.5, 2.0, 3.0, 10.0, 1e9])


class Work(NamedTuple):
    """The blocks of all streams, and who works on them."""

    stream_ptr: Int[np.ndarray, " streams+1"]  # stream s has blocks [stream_ptr[s], stream_ptr[s + 1]), in each kv head
    unmasked: Int[np.ndarray, " streams"]  # how many of its first blocks need no mask
    wide: Bool[np.ndarray, " streams"]  # wide streams come first
    unique: float  # blocks of all streams, what several streams read counted once
    block_tokens: int
    num_kv_heads: int
    num_ctas: int  # at most
    by_token: float = 1.0  # share of the masked blocks that are masked by token

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
        return Estimate.of(model, self.block_tokens, narrow, wide, self.unique, self.by_token)


class Schedule(NamedTuple):
    """Segments in the order in which thread blocks run them."""

    stream: Int[np.ndarray, " segments"]
    head: Int[np.ndarray, " segments"]
    lo: Int[np.ndarray, " segments"]  # blocks [lo, hi) of all streams' blocks
    hi: Int[np.ndarray, " segments"]
    cta_ptr: Int[np.ndarray, " num_ctas+1"]  # thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])


class Line(NamedTuple):
    """Stretches of blocks: for every stream that has any, one for each kv head of a group of heads."""

    work: Work
    stream: Int[np.ndarray, " stretches"]
    head: Int[np.ndarray, " stretches"]  # counted within the group
    unit: Float[np.ndarray, "stretches 2"]  # cost of an unmasked and of a masked block
    opening: Float[np.ndarray, " stretches"]  # cost of a segment beyond its blocks
    body: Float[np.ndarray, " stretches"]  # cost of all blocks

    @classmethod
    def of(cls, work: Work, estimate: Estimate, num_heads: int) -> Line:
        """Lay out the streams for a group of kv heads."""
        stream = np.flatnonzero(work.blocks)
        wide, unmasked = work.wide[stream].astype(np.int64), work.unmasked[stream]
        unit, opening = estimate.block_us[wide], estimate.opening_us[wide]
        body = unmasked * unit[:, 0] + (work.blocks[stream] - unmasked) * unit[:, 1]
        each = (np.repeat(x, num_heads, axis=0) for x in (unit, opening, body))
        return cls(work, np.repeat(stream, num_heads), np.tile(np.arange(num_heads), len(stream)), *each)

    def block_at(self, stretch: Int[np.ndarray, " n"], cost: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the block of a stretch at which its blocks so far cost about this much."""
        full, unit = self.work.unmasked[self.stream[stretch]], self.unit[stretch]
        beyond = cost - full * unit[:, 0]
        block = np.where(beyond <= 0, cost / unit[:, 0], full + beyond / unit[:, 1])
        return np.clip(np.rint(block), 0, self.work.blocks[self.stream[stretch]]).astype(np.int64)


class Pieces(NamedTuple):
    """Parts of stretches, in the order in which runs have them."""

    run: Int[np.ndarray, " pieces"]
    stretch: Int[np.ndarray, " pieces"]
    begin: Float[np.ndarray, " pieces"]  # cost of the stretch's blocks before it
    end: Float[np.ndarray, " pieces"]

    @classmethod
    def none(cls) -> Pieces:
        """Return no pieces."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, np.zeros(0), np.zeros(0))

    def then(self, others: Pieces) -> Pieces:
        """Return these pieces and others after them."""
        return Pieces(*map(np.append, self, others))


def aligned(work: Work, estimate: Estimate) -> Schedule:
    """Cut the streams for one group of kv heads, and all groups alike.

    A group is one head, unless that leaves out too many thread blocks.
    """
    num_heads = next(n for n in range(1, work.num_kv_heads + 1) if _fits(work, n))
    num_groups = work.num_kv_heads // num_heads
    line = Line.of(work, estimate, num_heads)
    num_runs = work.num_ctas // num_groups
    run, stretch, begin, end = whole_runs(line, num_runs)
    lo, hi = line.block_at(stretch, begin), line.block_at(stretch, end)
    run, stretch, lo, hi = (x[hi > lo] for x in (run, stretch, lo, hi))
    # Groups take turns: the same runs of all of them are neighbours.
    seat = np.argsort(np.argsort(np.arange(num_runs) * _GOLDEN % 1))
    cta = seat[run][:, None] * num_groups + np.arange(num_groups)
    order = np.argsort(cta.reshape(-1), kind="stable")
    piece, group = np.divmod(order, num_groups)
    stream = line.stream[stretch[piece]]
    return Schedule(
        stream=stream,
        head=group * num_heads + line.head[stretch[piece]],
        lo=work.stream_ptr[stream] + lo[piece],
        hi=work.stream_ptr[stream] + hi[piece],
        cta_ptr=np.searchsorted(cta.reshape(-1)[order], np.arange(num_groups * num_runs + 1)),
    )


def _fits(work: Work, num_heads: int) -> bool:
    """Whether groups of this many kv heads leave few thread blocks without work; one group leaves none."""
    num_groups, left = divmod(work.num_kv_heads, num_heads)
    if left:
        return False
    return num_groups == 1 or work.num_ctas % num_groups <= min(
        _MOST_LEFT_OUT * work.num_ctas, work.num_ctas - num_groups
    )


def _runs_alone(
    line: Line, num_runs: int, least: float
) -> tuple[Int[np.ndarray, " stretches"], Float[np.ndarray, " stretches"]]:
    """Choose how many runs each stretch has to itself, and the cost of its blocks in each of them.

    Of a few dozen loads, the least with which all runs suffice, for each way to round what is left of a stretch.
    """
    body, opening = line.body, line.opening
    loads = least * _LOADS
    large = np.flatnonzero(body + opening > least)  # the others fill no run, whatever its load
    room = np.maximum(loads[:, None] - opening[large], 1e-9)  # [loads, large]
    runs = body[large] / room
    filled = np.floor(runs + 1e-6)
    up = runs - filled > np.asarray(_ROUNDED_UP)[:, None, None]  # [ways, loads, large]
    even = up | (body[large] - filled * room < line.unit[large, 0] / 2)  # nothing, or no block, is left
    left = np.where(even, 0.0, body[large] - filled * room)
    shared = np.where(left > 0, left + opening[large], 0.0).sum(-1)  # [ways, loads]
    shared += (body + opening).sum() - (body + opening)[large].sum()
    shared += opening.max() * np.floor(shared / loads)  # a cut opens one more segment
    filled = filled + up
    enough = filled.sum(-1) + np.maximum(np.ceil(shared / loads - 1e-6), shared > 0) <= num_runs
    lightest = np.argmax(enough, axis=1)
    way = int(np.argmin(lightest))
    filled, even, room = filled[way, lightest[way]], even[way, lightest[way]], room[lightest[way]]

    whole = np.zeros(len(body), np.int64)
    whole[large] = filled
    size = np.zeros(len(body))
    size[large] = np.where(even, body[large] / np.maximum(filled, 1), room)
    return whole, size


def whole_runs(line: Line, num_runs: int) -> Pieces:
    """Cut the stretches into runs of about equal cost, as few of them as possible shared by several stretches."""
    body, opening = line.body, line.opening
    if not len(body):
        return Pieces.none()
    least = (body.sum() + opening.sum() * max(1.0, num_runs / len(body))) / num_runs
    whole, size = _runs_alone(line, num_runs, least)
    if not whole.any():
        return _dealt(line, num_runs)
    # They end with their stretch, so that leaves that grow make different runs longer.
    left = np.maximum(body - whole * size, 0.0)
    stretch, nth = expand(whole)
    # Where one run ends the next one begins, to the last digit, or the two would round to different blocks.
    begin, end = (left[stretch] + n * size[stretch] for n in (nth, nth + 1))
    alone = Pieces(np.arange(len(stretch)), stretch, begin, end)
    rest = np.flatnonzero(line.block_at(np.arange(len(body)), left))
    shared = _share(rest, left[rest], opening[rest], np.zeros(num_runs - len(stretch)))
    return alone.then(shared._replace(run=shared.run + len(stretch)))


def _dealt(line: Line, num_runs: int) -> Pieces:
    """Deal out stretches none of which fills a run: whole ones in waves, then parts of the last few.

    Streams whose rows descend from one node begin with the same pages. Runs that begin them together read those once
    from memory; begun wherever an even cut falls, they would find nothing in the L2 cache any more.
    """
    order = _alternating(line.work.wide[line.stream], num_runs)
    waves, base = _waves((line.body + line.opening)[order], num_runs)
    whole, rest = np.split(order, [waves * num_runs])
    dealt = Pieces(np.arange(len(whole)) % num_runs, whole, np.zeros(len(whole)), line.body[whole])
    return dealt.then(_share(rest, line.body[rest], line.opening[rest], base))


def _alternating(wide: Bool[np.ndarray, " stretches"], num_runs: int) -> Int[np.ndarray, " stretches"]:
    """Order stretches such that of any `num_runs`, from the first one on, half are wide, and others in the next turn.

    Wide ones keep the tensor cores busy and narrow ones the memory; begun together, they take turns in waiting.
    """
    half = max(num_runs // 2, 1)
    turn = np.where(wide, (np.cumsum(wide) - 1) // half, (np.cumsum(~wide) - 1) // max(num_runs - half, 1))
    return np.argsort(2 * turn + (wide == turn % 2), kind="stable")


def _waves(cost: Float[np.ndarray, " stretches"], num_runs: int) -> tuple[int, Float[np.ndarray, " runs"]]:
    """Count the waves, of a stretch for each run, that surely give no run more than the mean, and add up what runs get.

    A wave counts as if its longest stretch went to the run that has most.
    """
    waves = cost[: len(cost) // num_runs * num_runs].reshape(-1, num_runs)
    given = np.pad(np.cumsum(waves, axis=0), ((1, 0), (0, 0)))
    fits = given[:-1].max(axis=1) + waves.max(axis=1) <= cost.sum() / num_runs * (1 + 1e-9)
    count = int(np.argmin(np.append(fits, False)))
    return count, given[count]


def _share(
    stretch: Int[np.ndarray, " stretches"],
    left: Float[np.ndarray, " stretches"],
    opening: Float[np.ndarray, " stretches"],
    base: Float[np.ndarray, " runs"],
) -> Pieces:
    """Lay what is left of stretches end to end, each after the cost of its segment, and fill up runs with it."""
    if not len(stretch):
        return Pieces.none()
    fullest = np.argsort(-base, kind="stable")
    last = np.cumsum(left + opening)
    first = np.concatenate([[0.0], last[:-1]])
    cuts = np.asarray(_even_cuts(left.tolist(), opening.tolist(), base[fullest].tolist()))
    bounds = np.sort(np.concatenate([first, cuts, last[-1:]]))
    bounds = bounds[np.append(True, bounds[1:] > bounds[:-1])]
    begin, end = bounds[:-1], bounds[1:]
    nth = np.searchsorted(first, begin, side="right") - 1
    origin = (first + opening)[nth]  # where the blocks of what is left begin on the line
    # What is left ends exactly where the runs of its own begin.
    past = np.where(end == last[nth], left[nth], np.maximum(end - origin, 0.0))
    run = fullest[np.searchsorted(cuts, begin, side="right")]
    return Pieces(run, stretch[nth], np.maximum(begin - origin, 0.0), past)


def _even_cuts(left: list[float], opening: list[float], base: list[float]) -> list[float]:
    """Cut stretches, end to end, such that the busiest of the runs that get the parts has about as little as possible.

    Each stretch takes its opening and what is left of it; where it is cut, what follows opens another segment. Runs
    have something to do already, the first ones most. There may be fewer parts than runs.
    """
    total = sum(left) + sum(opening) + sum(base)
    low = max(total / len(base), base[0], base[-1] + max(opening))
    # Enough for every run to open one more segment, and to leave out a piece that is not worth another.
    high = low + 3 * max(opening)
    cuts = _cuts_of_load(left, opening, base, high)
    while high - low > _CLOSE * low:
        load = (low + high) / 2
        tried = _cuts_of_load(left, opening, base, load)
        if len(tried) < len(base):
            high, cuts = load, tried
        else:
            low = load
    return cuts


def _cuts_of_load(left: list[float], opening: list[float], base: list[float], load: float) -> list[float]:
    """Fill one run after the other up to a load, and return where they end; a piece must be worth its segment.

    Where the runs do not suffice, it goes on with empty ones.
    """
    cuts: list[float] = []
    room, first = load - base[0], 0.0
    for whole, opens in zip(left, opening, strict=True):
        remaining = whole  # counted down, so that after the last piece it is 0 to the last digit
        while remaining > 0:
            piece = min(remaining, room - opens)
            if room == load or piece >= min(remaining, _LEAST_PIECE * opens):
                remaining -= piece
                room -= opens + piece
            if remaining > 0:
                cuts.append(first + (opens + whole - remaining if remaining < whole else 0.0))
                room = load - (base[len(cuts)] if len(cuts) < len(base) else 0.0)
        first += opens + whole
    return cuts


def loads(plan: Plan) -> Float[np.ndarray, " num_ctas"]:
    """Estimate how long each thread block of a plan takes by the plan's cost model, in microseconds."""
    cta_ptr = np.asarray(plan.cta_ptr)
    segments = Segment(*np.asarray(plan.segments)[: cta_ptr[-1]].T)
    cost = plan.estimate.segments(segments.is_wide, segments.masked - segments.lo, segments.hi - segments.masked)
    until = np.zeros(len(cost) + 1)
    np.cumsum(cost, out=until[1:])
    bounds = until[cta_ptr]
    return bounds[1:] - bounds[:-1]


def call_us(plan: Plan) -> float:
    """Estimate how long the kernels of a call take by the plan's cost model, in microseconds."""
    merges = plan.num_tiles * plan.num_kv_heads
    model = plan.cost_model
    return float(loads(plan).max()) + model.launch_us + model.stream_us * (merges - plan.num_kv_heads)
