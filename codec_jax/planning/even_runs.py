"""The default policy: every thread block gets a run of equal cost, and all kv heads are cut alike (paper, section 5).

    one kv head   |..|--- stream 0 ---|..|--- stream 1 ---|- 2 -|- 3 -|
    runs             |  r0   |   r1   |  |   r2  |   r3   |               .. .. 2 | 2 3
                                                                            r4      r5
    thread blocks   r0 h0, r0 h1, r3 h0, r3 h1, ...: all runs of heads 0 and 1 | of heads 2 and 3 | ...

A stream that fills whole runs does so up to its last block, and what is left of all streams is laid end to end and
shared by the other runs; a stream that fills most of one more has equal runs to itself. So equal streams are cut alike,
and every kv head is. Streams none of which fills a run go whole to one run after the other, round by round, and only
the last ones are cut, to fill up the runs. Thread blocks that read the same pages then do so at the same time: in K and
V of other heads, which lie next to each other in memory, or once more for another pair of tiles, from the L2 cache.
Thread blocks of consecutive numbers share their way to that cache. So all runs of a pair of heads are neighbours, with
those of other streams between them: wide streams, which ask for little, leave it to narrow ones, wherever a launch
begins.
Paper: doi 10.1145/3802028.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from codec_jax.arrays import expand
from codec_jax.planning.estimate import Estimate
from codec_jax.planning.work import Schedule, Work
from pallas_kernels.family import Tiling
from pallas_kernels.heads import Heads, Window

#: Share of the thread blocks that may be left out so that kv heads are cut alike.
_MAX_LEFT_OUT = 0.1
#: Arithmetic over reading from which on no thread block is left out: it is worth more then than reading in step.
_MUCH_ARITHMETIC = 1.2
#: Where plans must not change: query rows of a request and of all, in a kv head, from which on arithmetic decides if
#: requests share much. If they do not, all thread blocks take 1% longer at most than some in step.
_MANY_ROWS = (8, 512)
#: What is left of a stream must fill more than this of a run for the stream to get one more run to itself, or never.
_ROUNDED_UP = (0.75, 2.0)
#: How close runs that several streams share come to the smallest load that they can have.
_TOLERANCE = 2e-3
#: Kv heads whose runs take turns. A head of 96 numbers ends within a line of 128 bytes of the cache, a pair does not.
_HEADS_TOGETHER = 2
#: Runs are placed by their multiples of it, modulo 1: any few that follow each other lie far apart.
_GOLDEN = 0.6180339887498949
#: Loads that are tried for a run, in units of the smallest that it can be.
_LOADS = np.append(np.linspace(1.0, 1.3, 61), [1.5, 2.0, 3.0, 10.0, 1e9])


class StreamCosts(NamedTuple):
    """The work to cut: for every stream that has blocks, one item for each kv head of a group of heads."""

    work: Work
    stream: Int[np.ndarray, " items"]
    head: Int[np.ndarray, " items"]  # counted within the group
    unit: Float[np.ndarray, "items 2"]  # cost of an unmasked and of a masked block
    opening: Float[np.ndarray, " items"]  # cost of a segment beyond its blocks
    body: Float[np.ndarray, " items"]  # cost of all blocks

    @classmethod
    def of(cls, work: Work, estimate: Estimate, num_heads: int) -> StreamCosts:
        """List the streams for a group of kv heads."""
        stream = np.flatnonzero(work.blocks)
        wide, unmasked = work.wide[stream].astype(np.int64), work.unmasked[stream]
        unit, opening = estimate.block_us[wide], estimate.opening_us[wide]
        body = unmasked * unit[:, 0] + (work.blocks[stream] - unmasked) * unit[:, 1]
        each = (np.repeat(x, num_heads, axis=0) for x in (unit, opening, body))
        return cls(work, np.repeat(stream, num_heads), np.tile(np.arange(num_heads), len(stream)), *each)

    def block_at(self, item: Int[np.ndarray, " n"], cost: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the block of an item at which its blocks so far cost about this much."""
        full, unit = self.work.unmasked[self.stream[item]], self.unit[item]
        beyond = cost - full * unit[:, 0]
        block = np.where(beyond <= 0, cost / unit[:, 0], full + beyond / unit[:, 1])
        return np.clip(np.rint(block), 0, self.work.blocks[self.stream[item]]).astype(np.int64)


class Slices(NamedTuple):
    """Parts of items, in the order in which runs have them."""

    run: Int[np.ndarray, " slices"]
    item: Int[np.ndarray, " slices"]
    begin: Float[np.ndarray, " slices"]  # cost of the item's blocks before it
    end: Float[np.ndarray, " slices"]

    @classmethod
    def none(cls) -> Slices:
        """Return no slices."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, np.zeros(0), np.zeros(0))

    def then(self, others: Slices) -> Slices:
        """Return these slices and others after them."""
        return Slices(*map(np.append, self, others))


def thread_blocks(most: int, num_kv_heads: int, estimates: Iterable[Estimate]) -> int:
    """Choose how many of a device's thread blocks share the work, such that as few kv heads as may be are a group.

    A few are left out for that, unless arithmetic decides on all devices that the estimates are of.
    """
    decides = all(estimate.arithmetic >= _MUCH_ARITHMETIC for estimate in estimates)
    return most if decides else _in_step(most, num_kv_heads)


def lasting_thread_blocks(
    tiling: Tiling, heads: Heads, requests: int, query_tokens: int = 1, window: Window | None = None
) -> int:
    """Choose the same for plans of one step, whose number of thread blocks stays whatever the forest comes to be.

    Args:
      tiling: how the plans are cut.
      heads: of the plans.
      requests: as many as there is room for.
      query_tokens: T, query tokens of each.
      window: of the plans; inside of one little is shared, so that reading decides.
    """
    each, together = _MANY_ROWS
    rows = query_tokens * heads.group
    has_many = rows >= each and rows * requests >= together
    all_pay = window is None and (has_many or not tiling.in_step)
    return tiling.num_ctas if all_pay else _in_step(tiling.num_ctas, heads.num_kv_heads)


def _in_step(most: int, num_kv_heads: int) -> int:
    """Leave out as few thread blocks as let the smallest groups of kv heads be cut alike."""
    groups = (num_kv_heads // n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0)
    return next(most - most % n for n in groups if n == 1 or (n <= most and most % n <= _MAX_LEFT_OUT * most))


def even_runs(work: Work, num_ctas: int, estimate: Estimate) -> Schedule:
    """Cut the streams for one group of kv heads, and all groups alike.

    A group is one head, or as many as leave out no thread block.
    """
    num_groups = math.gcd(work.num_kv_heads, num_ctas)
    num_heads = work.num_kv_heads // num_groups
    costs = StreamCosts.of(work, estimate, num_heads)
    num_runs = num_ctas // num_groups
    run, item, begin, end = cut_into_runs(costs, num_runs)
    first, last = costs.block_at(item, begin), costs.block_at(item, end)
    run, item, first, last = (x[last > first] for x in (run, item, first, last))
    place = np.argsort(np.argsort(np.arange(num_runs) * _GOLDEN % 1))
    together = math.gcd(num_groups, _HEADS_TOGETHER)
    pair, nth = np.divmod(np.arange(num_groups), together)
    cta = ((pair * num_runs + place[run][:, None]) * together + nth).reshape(-1)
    order = np.argsort(cta, kind="stable")
    at, group = np.divmod(order, num_groups)
    stream = costs.stream[item[at]]
    return Schedule(
        stream=stream,
        head=group * num_heads + costs.head[item[at]],
        begin=work.block_ptr[stream] + first[at],
        end=work.block_ptr[stream] + last[at],
        cta_ptr=np.searchsorted(cta[order], np.arange(num_groups * num_runs + 1)),
    )


def cut_into_runs(costs: StreamCosts, num_runs: int) -> Slices:
    """Cut the items into runs of about equal cost, as few of them as possible shared by several items."""
    body, opening = costs.body, costs.opening
    if not len(body):
        return Slices.none()
    mean = (body.sum() + opening.sum() * max(1.0, num_runs / len(body))) / num_runs
    whole, size = _runs_alone(costs, num_runs, mean)
    if not whole.any():
        return _round_robin(costs, num_runs)
    # They end with their item, so that leaves that grow make different runs longer.
    left = np.maximum(body - whole * size, 0.0)
    item, nth = expand(whole)
    # Where one run ends the next one begins, to the last digit, or the two would round to different blocks.
    begin, end = (left[item] + n * size[item] for n in (nth, nth + 1))
    alone = Slices(np.arange(len(item)), item, begin, end)
    rest = np.flatnonzero(costs.block_at(np.arange(len(body)), left))
    shared = _fill_runs(rest, left[rest], opening[rest], np.zeros(num_runs - len(item)))
    return alone.then(shared._replace(run=shared.run + len(item)))


def _runs_alone(
    costs: StreamCosts, num_runs: int, mean: float
) -> tuple[Int[np.ndarray, " items"], Float[np.ndarray, " items"]]:
    """Choose how many runs each item has to itself, and the cost of its blocks in each of them.

    Of a few dozen loads, the smallest with which all runs suffice, for either way to round what is left of an item.
    """
    body, opening = costs.body, costs.opening
    loads = mean * _LOADS
    large = np.flatnonzero(body + opening > mean)  # the others fill no run, whatever its load
    room = np.maximum(loads[:, None] - opening[large], 1e-9)  # [loads, large]
    runs = body[large] / room
    filled = np.floor(runs + 1e-6)
    up = runs - filled > np.asarray(_ROUNDED_UP)[:, None, None]  # [ways, loads, large]
    # What is left is cut at whole blocks. Of many streams alike a part of one in each is as much as a stream.
    unit = costs.unit[large, 0]
    left = np.where(up, 0.0, np.rint((body[large] - filled * room) / unit) * unit)
    even = left <= 0
    shared = np.where(left > 0, left + opening[large], 0.0).sum(-1)  # [ways, loads]
    shared += (body + opening).sum() - (body + opening)[large].sum()
    shared += opening.max() * np.floor(shared / loads)  # a cut opens one more segment
    filled = filled + up
    enough = filled.sum(-1) + np.maximum(np.ceil(shared / loads - 1e-6), shared > 0) <= num_runs
    lightest = np.argmax(enough, axis=1)
    best = int(np.argmin(lightest)), lightest.min()
    whole, size = np.zeros(len(body), np.int64), np.zeros(len(body))
    whole[large] = filled[best]
    size[large] = np.where(even[best], body[large] / np.maximum(filled[best], 1), room[best[1]])
    return whole, size


def _round_robin(costs: StreamCosts, num_runs: int) -> Slices:
    """Deal out items none of which fills a run: whole ones in rounds, then parts of the last few.

    Streams whose rows descend from one node begin with the same pages. Runs that begin them together read those once
    from memory; begun wherever an even cut falls, they would find nothing in the L2 cache any more.
    """
    order = _alternating(costs.work.wide[costs.stream], num_runs)
    rounds, given = _rounds((costs.body + costs.opening)[order], num_runs)
    whole, rest = np.split(order, [rounds * num_runs])
    dealt = Slices(np.arange(len(whole)) % num_runs, whole, np.zeros(len(whole)), costs.body[whole])
    return dealt.then(_fill_runs(rest, costs.body[rest], costs.opening[rest], given))


def _alternating(wide: Bool[np.ndarray, " items"], num_runs: int) -> Int[np.ndarray, " items"]:
    """Order items such that of any `num_runs`, from the first one on, half are wide, and others in the next round.

    Wide ones keep the tensor cores busy and narrow ones the memory; begun together, they take turns in waiting.
    """
    half = max(num_runs // 2, 1)
    turn = np.where(wide, (np.cumsum(wide) - 1) // half, (np.cumsum(~wide) - 1) // max(num_runs - half, 1))
    return np.argsort(2 * turn + (wide == turn % 2), kind="stable")


def _rounds(cost: Float[np.ndarray, " items"], num_runs: int) -> tuple[int, Float[np.ndarray, " runs"]]:
    """Count the rounds, of an item for each run, that surely give no run more than the mean, and add up what runs get.

    A round counts as if its longest item went to the run that has most.
    """
    rounds = cost[: len(cost) // num_runs * num_runs].reshape(-1, num_runs)
    given = np.pad(np.cumsum(rounds, axis=0), ((1, 0), (0, 0)))
    fits = given[:-1].max(axis=1) + rounds.max(axis=1) <= cost.sum() / num_runs * (1 + 1e-9)
    count = int(np.argmin(np.append(fits, False)))
    return count, given[count]


def _fill_runs(
    item: Int[np.ndarray, " items"],
    left: Float[np.ndarray, " items"],
    opening: Float[np.ndarray, " items"],
    given: Float[np.ndarray, " runs"],
) -> Slices:
    """Lay what is left of items end to end, each after the cost of its segment, and fill up runs with it."""
    if not len(item):
        return Slices.none()
    fullest = np.argsort(-given, kind="stable")
    cuts, load = _even_cuts(left.tolist(), opening.tolist(), given[fullest].tolist())
    if len(item) <= len(given):
        longest, emptiest = np.argsort(-(left + opening), kind="stable"), fullest[::-1][: len(item)]
        # A cut must save more than the segment that it opens.
        if (given[emptiest] + (left + opening)[longest]).max() <= load + opening.max():
            return Slices(emptiest, item[longest], np.zeros(len(item)), left[longest])
    last = np.cumsum(left + opening)
    first = np.concatenate([[0.0], last[:-1]])
    bounds = np.sort(np.concatenate([first, cuts, last[-1:]]))
    bounds = bounds[np.append(True, bounds[1:] > bounds[:-1])]
    begin, end = bounds[:-1], bounds[1:]
    nth = np.searchsorted(first, begin, side="right") - 1
    origin = (first + opening)[nth]  # where the blocks of what is left begin on the line
    # The rest of an item ends exactly where the runs of its own begin.
    past = np.where(end == last[nth], left[nth], np.maximum(end - origin, 0.0))
    run = fullest[np.searchsorted(cuts, begin, side="right")]
    return Slices(run, item[nth], np.maximum(begin - origin, 0.0), past)


def _even_cuts(left: list[float], opening: list[float], given: list[float]) -> tuple[list[float], float]:
    """Cut items, end to end, such that the busiest of the runs that get the parts has about as little as possible.

    Each item takes its opening and what is left of it; where it is cut, what follows opens another segment. Runs have
    something to do already, the first ones most. There may be fewer parts than runs. Returns where to cut, and what
    the busiest has then.
    """
    total = sum(left) + sum(opening) + sum(given)
    low = max(total / len(given), given[0], given[-1] + max(opening))
    high = low + 3 * max(opening)  # enough for every run to open one more segment, and to end short of another
    cuts = _cuts_of_load(left, opening, given, high)
    while high - low > _TOLERANCE * low:
        load = (low + high) / 2
        tried = _cuts_of_load(left, opening, given, load)
        if len(tried) < len(given):
            high, cuts = load, tried
        else:
            low = load
    return cuts, high


def _cuts_of_load(left: list[float], opening: list[float], given: list[float], load: float) -> list[float]:
    """Fill one run after the other up to a load, and return where they end.

    Where the runs do not suffice, it goes on with empty ones.
    """
    cuts: list[float] = []
    room, first = load - given[0], 0.0
    for whole, opens in zip(left, opening, strict=True):
        remaining = whole  # counted down, so that after the last piece it is 0 to the last digit
        while remaining > 0:
            piece = min(remaining, room - opens)
            if piece > 0:
                remaining -= piece
                room -= opens + piece
            if remaining > 0:
                cuts.append(first + (opens + whole - remaining if remaining < whole else 0.0))
                room = load - (given[len(cuts)] if len(cuts) < len(given) else 0.0)
        first += opens + whole
    return cuts
