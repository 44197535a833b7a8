"""Forks, reservations and retirements, in any order, and what they refuse."""

import contextlib
import itertools

import jax
import numpy as np
import pytest
from forests import active_requests, ancestry, contexts, node_slots, num_pages, page_sizes, readers, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from codec_jax import Forest, OutOfPagesError, OutOfSlotsError, PagePool
from codec_jax.forest import NO_SLOT


def used_nodes(forest):
    return [node for node in range(forest.node_capacity) if forest.parent[node] >= -1]


def readers_of(forest):
    """Requests that read each node, found by walking up from every leaf."""
    found = {node: [] for node in used_nodes(forest)}
    for request in active_requests(forest):
        for node in ancestry(forest.parent, int(forest.leaf[request])):
            found[node].append(request)
    return found


def assert_refers_to_nodes_in_use(forest):
    used = used_nodes(forest)
    assert all(forest.parent[node] in (-1, *used) for node in used)
    assert all(leaf in (-1, *used) for leaf in forest.leaf)


def mergeable_nodes(forest, parent, leaf):
    """Full nodes that are read, with one child and no request that ends at them."""
    used = [node for node, above in enumerate(parent) if above >= -1]
    read = {node for end in leaf if end >= 0 for node in ancestry(parent, int(end))}
    return [
        node
        for node in used
        if node in read
        and [parent[child] for child in used].count(node) == 1
        and node not in leaf
        and forest.length[node] == forest.page_count[node] * forest.page_size
    ]


@contextlib.contextmanager
def unchanged(forest, pool):
    """Check that what happens inside leaves the arrays of both values as they were."""
    before = [np.copy(leaf) for leaf in (*jax.tree.leaves(forest), pool.owners)]
    yield
    after = [*jax.tree.leaves(forest), pool.owners]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def pages_needed(forest, tokens, requests):
    """Return how many pages `reserve` must take on balance, counted request by request."""
    needed, parting, shared = 0, set(), readers_of(forest)
    for request in requests:
        leaf = int(forest.leaf[request])
        if shared[leaf] == [request]:
            tokens_after = int(forest.length[leaf]) + tokens
            needed += max(0, -(-tokens_after // forest.page_size) - int(forest.page_count[leaf]))
        else:
            needed += -(-tokens // forest.page_size)
            parting.add(leaf)
    # What a shared leaf had in reserve, the requests that leave it cannot use.
    return needed - sum(
        int(forest.page_count[leaf]) - -(-int(forest.length[leaf]) // forest.page_size) for leaf in parting
    )


class Decoding(RuleBasedStateMachine):
    """A forest, its pool and a memory, against lists of token numbers: every number is written once."""

    @initialize(
        tree=trees(max_nodes=8, max_length=40, max_requests=5),
        page_size=page_sizes,
        free_requests=st.sampled_from([8, 4, 1, 0]),
        free_pages=st.sampled_from([40, 20, 5, 0]),
    )
    def build(self, tree, page_size, free_requests, free_pages):
        capacity = len(tree.leaf) + free_requests
        self.forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=capacity)
        pages = num_pages(tree, page_size)
        self.pool = PagePool.create(pages + free_pages + 1, taken=self.forest.used_pages)
        self.memory = np.full(self.pool.num_pages * page_size, -1)
        self.numbers = itertools.count()
        for slot in itertools.chain(*node_slots(tree, page_size)):
            self.memory[slot] = next(self.numbers)
        self.model = {
            request: [int(self.memory[slot]) for slot in context]
            for request, context in enumerate(contexts(tree, page_size))
        }
        # Nodes that nobody reads stay for good: retiring takes what loses its last reader.
        slots = node_slots(tree, page_size)
        unread = [node for node, requests in enumerate(readers(tree)) if not requests]
        self.unread_nodes = len(unread)
        self.unread_pages = sorted({slot // page_size for node in unread for slot in slots[node]})

    @rule(data=st.data())
    def fork(self, data):
        sources = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=2))
        free = self.forest.request_capacity - len(self.model)
        with unchanged(self.forest, self.pool):
            if len(sources) > free:
                with pytest.raises(OutOfSlotsError, match=rf"requests: {len(sources)} forks .* got {free} of"):
                    self.forest.fork(sources)
                return
            forest, new = self.forest.fork(sources)
        assert not set(new.tolist()) & set(self.model)
        assert len(set(new.tolist())) == len(sources)
        for source, request in zip(sources, new.tolist(), strict=True):
            self.model[request] = list(self.model[source])
        assert forest.used_pages.tolist() == self.forest.used_pages.tolist()
        self.forest = forest

    @rule(data=st.data(), tokens=st.one_of(st.sampled_from([8, 16, 24]), st.integers(0, 20)), everyone=st.booleans())
    def grow(self, data, tokens, everyone):
        active = sorted(self.model)
        growing = active if everyone else data.draw(st.lists(st.sampled_from(active), unique=True))
        needed, free = pages_needed(self.forest, tokens, growing), self.pool.num_free
        with unchanged(self.forest, self.pool):
            if needed > free:
                with pytest.raises(OutOfPagesError, match=r"free pages of \d+, \d+ are needed"):
                    self.forest.reserve(self.pool, tokens, None if everyone else growing)
                return
            forest, pool = self.forest.reserve(self.pool, tokens, None if everyone else growing)
        assert pool.num_free == free - needed
        self.forest, self.pool = forest, pool
        self.check_contexts()

        count = np.zeros(forest.request_capacity, int)
        # All of the reservation now and then: full pages are what merges.
        part = st.one_of(st.just(tokens), st.integers(0, tokens))
        count[growing] = data.draw(st.lists(part, min_size=len(growing), max_size=len(growing)))
        with unchanged(self.forest, self.pool):
            self.forest = self.forest.extend(count)
        slots = self.forest.slots(tokens)
        for request in growing:
            for slot in slots[request, tokens - count[request] :].tolist():
                assert slot != NO_SLOT
                self.model[request].append(next(self.numbers))
                self.memory[slot] = self.model[request][-1]

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def retire(self, data):
        gone = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=3))
        gone = gone[: len(self.model) - 1]
        before = readers_of(self.forest)
        stay = [node for node, requests in before.items() if not requests or set(requests) - set(gone)]
        leaf = [-1 if request in gone else int(end) for request, end in enumerate(self.forest.leaf)]
        parent = [
            (above if above in stay else -1) if node in stay else -2
            for node, above in enumerate(self.forest.parent.tolist())
        ]
        merging = mergeable_nodes(self.forest, parent, leaf)
        with unchanged(self.forest, self.pool):
            self.forest, self.pool = self.forest.retire(self.pool, gone)
        assert len(used_nodes(self.forest)) == len(stay) - len(merging)
        for request in set(gone):
            del self.model[request]

    @invariant()
    def check_parents_and_leaves_are_nodes_in_use(self):
        assert_refers_to_nodes_in_use(self.forest)

    @invariant()
    def check_contexts(self):
        assert active_requests(self.forest) == sorted(self.model)
        for request in range(self.forest.request_capacity):
            slots = self.forest.context_slots(request)
            assert self.memory[slots].tolist() == self.model.get(request, [])
            assert self.forest.request_length[request] == len(self.model.get(request, []))

    @invariant()
    def check_pages_of_nodes_are_the_taken_pages(self):
        owned = [int(page) for node in used_nodes(self.forest) for page in self.forest.pages_of(node)]
        assert len(set(owned)) == len(owned)
        np.testing.assert_array_equal(self.pool.owners, np.bincount(owned, minlength=self.pool.num_pages))
        assert sorted(self.forest.used_pages.tolist()) == sorted(owned)
        assert (self.forest.length <= self.forest.page_count * self.forest.page_size).all()

    @invariant()
    def check_readers_are_intervals(self):
        assert sorted(self.forest.row_of_request.tolist()) == list(range(self.forest.request_capacity))
        for node, requests in readers_of(self.forest).items():
            rows = sorted(self.forest.row_of_request[requests].tolist())
            assert rows == list(range(self.forest.row_lo[node], self.forest.row_hi[node]))

    @invariant()
    def check_that_retiring_everyone_would_free_everything(self):
        with unchanged(self.forest, self.pool):
            forest, pool = self.forest.retire(self.pool, sorted(self.model))
        assert_refers_to_nodes_in_use(forest)
        assert active_requests(forest) == []
        assert len(used_nodes(forest)) == self.unread_nodes
        assert np.flatnonzero(pool.owners).tolist() == self.unread_pages


TestDecoding = Decoding.TestCase
TestDecoding.settings = settings(deadline=None, max_examples=150, stateful_step_count=20)


@settings(deadline=None, max_examples=50)
@given(st.data(), page_sizes)
def test_requests_of_a_block_table_grow_without_touching_what_others_read(data, page_size):
    # Few page ids, so that rows list the same pages at other places, in part, and more than once.
    table = np.asarray(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4)))
    lens = data.draw(st.lists(st.integers(0, 3 * page_size), min_size=len(table), max_size=len(table)))
    lens[0] = max(1, lens[0])
    forest = Forest.from_block_table(table, np.asarray(lens), page_size)
    pool = PagePool.create(64, taken=forest.used_pages)
    memory = np.arange(64 * page_size)
    model = {
        r: [int(table[r, p // page_size]) * page_size + p % page_size for p in range(length)]
        for r, length in enumerate(lens)
        if length
    }
    fresh = itertools.count(64 * page_size)
    for _ in range(2):
        tokens = data.draw(st.integers(0, 20))
        forest, pool = forest.reserve(pool, tokens)
        forest = forest.extend(tokens)
        slots = forest.slots(tokens)
        for request in model:
            for slot in slots[request].tolist():
                model[request].append(next(fresh))
                memory[slot] = model[request][-1]
        for request, expected in model.items():
            assert memory[forest.context_slots(request)].tolist() == expected
    forest, pool = forest.retire(pool, sorted(model))
    assert used_nodes(forest) == []
    assert pool.num_free == 64


def test_everything_is_free_again_after_a_search_over_shared_prefixes():
    forest = Forest.from_sequences([[1] * 40 + [2] * 9, [1] * 40 + [3] * 20], request_capacity=6)
    pool = PagePool.create(32, taken=forest.used_pages)
    assert pool.num_free == 32 - 3 - 1 - 2
    forest, new = forest.fork([0, 1, 0])
    assert new.tolist() == [2, 3, 4]
    forest, pool = forest.reserve(pool, 17)
    forest, pool = forest.extend(17).retire(pool, [0, 2])
    forest, pool = forest.retire(pool, [1, 3, 4])
    assert pool.num_free == 32
    assert used_nodes(forest) == []
    assert active_requests(forest) == []
    assert not forest.length.any()
    forest, pool = forest.retire(pool, [])
    assert pool.num_free == 32


def test_fork_takes_the_free_request_slots_in_order_and_may_name_a_request_twice():
    forest = Forest.from_nodes([-1, -1], [4, 5], [0, 1], request_capacity=5)
    forked, new = forest.fork([1, 1, 0])
    assert new.tolist() == [2, 3, 4]
    assert [forked.context_slots(r).tolist() for r in new] == [forest.context_slots(r).tolist() for r in (1, 1, 0)]
    assert forest.fork([])[1].tolist() == []


def test_requests_that_share_a_leaf_part_at_reserve_and_only_those_that_are_named():
    forest = Forest.from_nodes([-1], [20], [0, 0, 0], page_size=16)
    pool = PagePool.create(16, taken=forest.used_pages)
    parted, after = forest.reserve(pool, 5, [1])
    assert parted.leaf[0] == parted.leaf[2] == 0
    assert parted.leaf[1] != 0
    assert parted.length[parted.leaf[1]] == 0
    assert parted.page_count[parted.leaf[1]] == 1
    assert after.num_free == pool.num_free - 1
    parted, after = parted.reserve(after, 5)
    assert len(set(parted.leaf.tolist())) == 3
    assert 0 not in parted.leaf
    assert after.num_free == pool.num_free - 3


def test_naming_a_request_twice_reserves_for_it_once():
    forest = Forest.from_nodes([-1], [20], [0, 0], page_size=16)
    pool = PagePool.create(16, taken=forest.used_pages)
    once, pool_once = forest.reserve(pool, 5, [1])
    twice, pool_twice = forest.reserve(pool, 5, [1, 1])
    assert used_nodes(once) == used_nodes(twice)
    np.testing.assert_array_equal(pool_once.owners, pool_twice.owners)


def test_a_reservation_that_is_already_met_changes_nothing():
    forest = Forest.from_nodes([-1, -1], [20, 3], [0, 1], page_size=16)
    pool = PagePool.create(16, taken=forest.used_pages)
    same, same_pool = forest.reserve(pool, 12)
    assert same.structure_hash == forest.structure_hash
    assert same_pool.num_free == pool.num_free
    more, more_pool = forest.reserve(pool, 13)
    assert more.structure_hash != forest.structure_hash
    assert more_pool.num_free == pool.num_free - 1


def test_retiring_merges_a_full_parent_with_its_only_remaining_child():
    forest = Forest.from_nodes([-1, 0, 0], [32, 5, 7], [1, 2], page_size=16)
    pool = PagePool.create(8, taken=forest.used_pages)
    context = forest.context_slots(0).tolist()
    merged, pool = forest.retire(pool, [1])
    assert merged.path(0) == [forest.leaf[0]]
    assert merged.length[merged.leaf[0]] == 37
    assert merged.context_slots(0).tolist() == context
    assert merged.pages_of(int(merged.leaf[0])).tolist() == [0, 1, 2]
    assert pool.num_free == 5


@pytest.mark.parametrize(
    ("parent", "length", "leaf", "why"),
    [
        ([-1, 0, 0], [31, 5, 7], [1, 2], "last page of the parent has room"),
        ([-1, 0, 0, 0], [32, 5, 7, 9], [1, 2, 3], "two children stay"),
        ([-1, 0, 0], [32, 5, 7], [1, 2, 0], "a request ends at the parent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_retiring_leaves_other_parents_alone(parent, length, leaf, why):
    forest = Forest.from_nodes(parent, length, leaf, page_size=16)
    pool = PagePool.create(8, taken=forest.used_pages)
    thinner, pool = forest.retire(pool, [1])
    assert thinner.path(0) == [0, 1], why
    assert thinner.context_slots(0).tolist() == forest.context_slots(0).tolist()
    assert pool.num_free == 8 - len(forest.used_pages) + 1


def test_a_chain_of_full_nodes_merges_into_one_however_the_nodes_are_numbered():
    forest = Forest.from_nodes([-1, -1], [16, 16], [0, 1], page_size=16, request_capacity=3)
    pool = PagePool.create(32, taken=forest.used_pages)
    forest, pool = forest.retire(pool, [0])
    for source, new in ((1, 0), (0, 2)):
        forest, added = forest.fork([source])
        assert added.tolist() == [new]
        forest, pool = forest.reserve(pool, 16)
        forest = forest.extend(16)
    assert forest.path(0) == [1, 0, 3]
    context = forest.context_slots(0).tolist()
    merged, pool = forest.retire(pool, [1, 2])
    assert merged.path(0) == [3]
    assert merged.context_slots(0).tolist() == context
    assert used_nodes(merged) == [3]
    assert pool.num_free == 32 - 3


def test_capacities_stay_while_they_suffice_and_grow_when_they_must():
    # 128 nodes hold the 126 here and two more, for the two requests at node 0, but not four others after that.
    nodes = 126
    forest = Forest.from_nodes([-1] * nodes, [4] * nodes, [0, 0], page_size=8, request_capacity=4, node_capacity=128)
    pool = PagePool.create(640, taken=forest.used_pages)
    parted, pool = forest.reserve(pool, 4)
    assert parted.node_capacity == 128
    assert len(parted.page_ids) == len(forest.page_ids)
    forked, _ = parted.extend(4).fork([0, 1])
    grown, pool = forked.reserve(pool, 800)
    assert grown.node_capacity >= nodes + 2 + 4
    assert len(grown.page_ids) >= len(grown.used_pages) == nodes + 2 + 4 * 100
    contexts_before = [forked.context_slots(r).tolist() for r in range(4)]
    assert [grown.context_slots(r).tolist() for r in range(4)] == contexts_before
    assert grown.extend(800).request_length.tolist() == [808] * 4
    smaller, pool = grown.retire(pool, [0, 1, 2])
    assert smaller.node_capacity == grown.node_capacity
    assert len(smaller.page_ids) == len(grown.page_ids)


@pytest.mark.parametrize("call", ["fork", "reserve", "retire"])
@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([2], r"requests: expected requests in use, \[0, 1\], got \[2\]"),
        ([0, 4, -1], r"requests: expected requests in use, \[0, 1\], got \[4, -1\]"),
        ([0.5], r"requests: expected a list of integers, got float64"),
        ([[0]], r"requests: expected a list of integers, got int64 of shape \(1, 1\)"),
    ],
)
def test_edits_name_requests_that_are_not_in_use(call, requests, message):
    forest = Forest.from_nodes([-1, -1], [4, 5], [0, 1], request_capacity=4)
    pool = PagePool.create(8, taken=forest.used_pages)
    edit = {
        "fork": lambda: forest.fork(requests),
        "reserve": lambda: forest.reserve(pool, 1, requests),
        "retire": lambda: forest.retire(pool, requests),
    }[call]
    with unchanged(forest, pool), pytest.raises(ValueError, match=message):
        edit()


def test_reserving_a_negative_number_of_tokens_raises():
    forest = Forest.from_nodes([-1], [4], [0])
    with pytest.raises(ValueError, match=r"tokens: expected a number of tokens.*got -1"):
        forest.reserve(PagePool.create(8, taken=forest.used_pages), -1)


def test_retiring_with_a_pool_that_never_gave_the_pages_raises():
    forest = Forest.from_nodes([-1], [4], [0])
    for requests in ([0], []):
        with pytest.raises(ValueError, match=r"pool: expected a pool in which all pages .* page 0 is not"):
            forest.retire(PagePool.create(8), requests)
    # Nor with one that does not know of what the forest has taken since, or its live pages would be given away again.
    old = PagePool.create(8, forest.used_pages)
    forest, new = forest.reserve(old, 30)
    forest, new = Forest.from_nodes([-1], [4], [0], request_capacity=2).fork([0])[0].reserve(old, 30)
    with pytest.raises(ValueError, match=r"pool: expected a pool in which all pages"):
        forest.retire(old, [1])
    assert forest.retire(new, [0, 1])[1].num_free == 8


@pytest.mark.parametrize(("num_pages", "taken", "missing"), [(8, [1], 0), (8, [0], 1), (1, [0], 1)])
def test_reserving_from_a_pool_that_does_not_know_the_forest_raises(num_pages, taken, missing):
    forest = Forest.from_nodes([-1], [12], [0], page_size=8)
    pool = PagePool.create(num_pages, taken=np.asarray(taken))
    with pytest.raises(ValueError, match=rf"pool: .* page {missing} is not"):
        forest.reserve(pool, 8)


@pytest.mark.parametrize("tokens", [9, 10**6, 2**31 - 1, 2**31, 2**40])
def test_a_reservation_that_the_pool_cannot_serve_raises_however_large_it_is(tokens):
    forest = Forest.from_nodes([-1], [16], [0], page_size=8)
    pool = PagePool.create(3, taken=forest.used_pages)
    with unchanged(forest, pool), pytest.raises(OutOfPagesError, match=r"the pool has 1 free pages of 3"):
        forest.reserve(pool, tokens)


def test_a_forest_without_capacity_for_pages_grows() -> None:
    forest, _ = Forest.from_nodes([-1], [0], [0], page_capacity=0).reserve(PagePool.create(8), 4)
    assert forest.page_count.sum() == 1
    assert forest.page_capacity >= 1
