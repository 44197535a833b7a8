"""Policy "invariant": what a row goes through, operation by operation, is the same in any company and at any time."""

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import HEADS, Case, cases, room, rows_of, used_segments, visible

from codec_jax import Forest, PagePool, Plan, make_plan, replan
from codec_jax.forest import PageSubset
from codec_jax.forest.homes import Homes
from codec_jax.planning import invariant, planner
from pallas_kernels import Tiling

SHORTEST, LONGEST = 32, 128  # tokens of a part, so that small forests have several
Partials = list[list[list[list[int]]]]


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "_SHORTEST", SHORTEST.bit_length() - 1)
    monkeypatch.setattr(invariant, "_LONGEST", LONGEST.bit_length() - 1)
    monkeypatch.setattr(invariant, "_SHARE", 0.2)


def test_more_sums_than_the_device_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forest = Forest.from_nodes([-1], [9], [0])
    monkeypatch.setattr(planner, "default_tiling", lambda _: Tiling(16, 16, 2, (256, 256), sums=1))
    with pytest.raises(ValueError, match=r"lanes: expected at most 1 with the policy 'invariant', .* got 2"):
        make_plan(forest, **HEADS, lanes=2, policy="invariant")
    assert make_plan(forest, **HEADS, policy="invariant").arrays.lanes == 1


def plan_of(case: Case, forest: Forest, **options: Any) -> Plan:
    return make_plan(forest, **{**case.options, "policy": "invariant", **options})


def operations(plan: Plan, case: Case, forest: Forest) -> dict[tuple[int, int, int], Partials]:
    """The partials that each (request, row of it, kv head) is in, in the order in which they are merged.

    A partial has the blocks of each lane, and a block the token slot in each place that the row sees, or -1.
    """
    arrays, sees = plan.arrays, visible(plan, case, forest)
    rows_of_request = arrays.query_tokens * plan.heads.group
    requests = [None if of is None else of[0] for of in rows_of(plan, forest)]
    found = defaultdict(list)
    for segment in sorted(used_segments(plan), key=lambda segment: segment.partial0):
        # Every segment has as many blocks for each lane, or the next one would begin with another lane.
        assert segment.tile0 == segment.tile1
        assert (segment.end - segment.begin) % arrays.lanes == 0
        rows = segment.rows(plan)
        lanes: list[list[list]] = [[[] for _ in range(arrays.lanes)] for _ in rows]
        for block in range(segment.begin, segment.end):
            page = np.repeat(arrays.block_pages[block], arrays.page_tokens, axis=0).T  # [4, block_tokens]
            within = np.tile(np.arange(arrays.page_tokens), arrays.block_pages.shape[1])
            slot, nth = page[0] * arrays.page_tokens + within, np.arange(len(rows))[:, None]
            seen = (page[3] % 2**16 <= nth) & (nth < page[3] // 2**16) & (page[2] + within < forest.length[page[1]])
            seen &= sees[rows][:, slot]
            for row in np.flatnonzero(seen.any(axis=1)):
                of_lane = lanes[row][(block - segment.begin) % arrays.lanes]
                of_lane.append(np.where(seen[row], slot, -1).tolist())
        for row, blocks in zip(rows, lanes, strict=True):
            if any(blocks):
                request = requests[row]
                first = int(forest.row_of_request[request]) * rows_of_request
                found[request, row - first, segment.head].append(blocks)
    return dict(found)


def blocks_of(partials: Partials) -> list[list[int]]:
    return [block for partial in partials for blocks in partial for block in blocks]


def test_a_row_goes_through_the_same_alone_in_any_batch_and_without_sharing() -> None:
    kinds: Counter[str] = Counter()

    @settings(max_examples=80)
    @given(cases(), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        active = np.flatnonzero(case.forest.active).tolist()
        assume(active)
        together = operations(plan_of(case, case.forest), case, case.forest)
        kept = data.draw(st.lists(st.sampled_from(active), min_size=1, unique=True))
        for forest in (case.forest.only(kept), case.forest.only(kept[:1]), case.forest.unshared()):
            # Another number of thread blocks: that is what decides who shares a stream.
            plan = plan_of(case, forest, num_ctas=data.draw(st.sampled_from([1, 4, 50])))
            there = {key: partials for key, partials in together.items() if forest.active[key[0]]}
            assert operations(plan, case, forest) == there
        partials = together.values()
        kinds["several partials"] += any(len(of_row) > 1 for of_row in partials)
        kinds["blocks in both lanes"] += any(len(p) > 1 and all(p) for of_row in partials for p in of_row)
        kinds["places that nobody sees"] += any(-1 in block for of_row in partials for block in blocks_of(of_row))

    check()
    assert min(kinds.values()) > 5


@settings(max_examples=60)
@given(cases(), st.data())
def test_a_row_goes_through_the_same_whenever_the_plan_was_made(case: Case, data: st.DataObject) -> None:
    assume(case.forest.active.any())
    plan = plan_of(case, case.forest)
    grown = case.forest.extend([data.draw(st.integers(0, int(n))) for n in room(case.forest, case.options["steps"])])
    assert operations(plan, case, grown) == operations(plan_of(case, grown, steps=1), case, grown)
    assert operations(plan, case, grown) == operations(replan(plan, grown, steps=3), case, grown)


def part_of(position: int, tiles: int) -> int:
    """Where the part of a context begins that has a position."""
    begin, nearest = 0, SHORTEST
    while begin + nearest <= position // tiles:
        begin += nearest
        nearest = max(n for n in (32, 64, 128) if n == SHORTEST or 4 * n <= begin)
    return begin


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("query_tokens", "tiles"), [(1, 1), (6, 2)])
def test_tokens_stand_and_are_added_up_where_their_positions_say(lanes: int, query_tokens: int, tiles: int) -> None:
    """Nodes begin on page boundaries, blocks of 16 tokens have two pages, and 8 rows make a tile."""
    forest = Forest.from_nodes([-1, 0, 0, 1, 1], [200, 40, 411, 9, 250], [4, 3, 2], page_size=8)
    case = Case(forest, PagePool.create(200, forest.used_pages), {}, 1)
    sizes = {"num_ctas": 5, "tile_rows": 8, "block_tokens": 16, "query_tokens": query_tokens}
    plan = make_plan(forest, **HEADS, **sizes, lanes=lanes, policy="invariant")
    found = operations(plan, case, forest)
    assert len(found) == 3 * query_tokens * 2 * 2
    for (request, row, _), partials in found.items():
        context = forest.context_slots(request).tolist()
        context = context[: len(context) - query_tokens + row // 2 + 1]
        position = {slot: at for at, slot in enumerate(context)}
        parts = []
        for partial in partials:
            for lane, blocks in enumerate(partial):
                numbers = [{position[slot] // 16 for slot in block if slot >= 0} for block in blocks]
                assert all(len(number) == 1 and min(number) % lanes == lane for number in numbers)
                assert all(min(before) < min(after) for before, after in pairwise(numbers))
            slots = [slot for blocks in partial for block in blocks for slot in block]
            assert all(slot < 0 or position[slot] % 16 == at % 16 for at, slot in enumerate(slots))
            parts.append({part_of(position[slot], tiles) for slot in slots if slot >= 0})
        assert all(len(part) == 1 for part in parts)
        assert [min(part) for part in parts] == sorted({part_of(at, tiles) for at in range(len(context))})
        assert sorted(slot for block in blocks_of(partials) for slot in block if slot >= 0) == sorted(context)


def test_rows_with_much_to_read_have_streams_of_their_own() -> None:
    """And so thread blocks have about as much to do each."""
    forest = Forest.from_nodes([-1] + [0] * 8, [1000] + [2000] * 8, list(range(1, 9)), page_size=8)
    plan = make_plan(forest, **HEADS, num_ctas=16, tile_rows=16, block_tokens=16, lanes=1, policy="invariant")
    blocks = [sum(s.end - s.begin for s in used_segments(plan)[a:b]) for a, b in pairwise(plan.arrays.cta_ptr)]
    assert max(blocks) < 1.3 * np.mean(blocks)


def test_segments_are_padded_to_what_the_plan_before_had() -> None:
    forest = Forest.from_nodes([-1], [3000], [0], page_size=8)
    options = {**HEADS, "num_ctas": 2, "tile_rows": 8, "block_tokens": 16, "policy": "invariant"}
    plan = make_plan(forest, **options)
    short = replan(plan, Forest.from_nodes([-1], [30], [0], page_size=8, page_capacity=forest.page_capacity))
    assert short.arrays.segments.shape == plan.arrays.segments.shape
    assert short.arrays.num_partials == plan.arrays.num_partials
    assert len(make_plan(forest, **options, segment_capacity=5000).arrays.segments) == 5000


def test_pages_of_which_only_some_are_read_are_refused() -> None:
    forest = Forest.from_nodes([-1], [30], [0])
    subset = PageSubset.of(np.asarray([0]), num_pages=8, capacity=1)
    for given_pages in ({"homes": Homes(2, 4)}, {"subset": subset}):
        with pytest.raises(
            ValueError, match="policy: expected another one for pages on several devices or in a subset"
        ):
            make_plan(forest, **HEADS, policy="invariant", **given_pages)
