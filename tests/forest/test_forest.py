"""Forests as they are built and as their leaves grow: contexts, slots, rows and readers, on host and under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import ancestry, contexts, num_pages, page_sizes, prefixes, readers, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import Forest, OutOfPagesError, PagePool, make_plan
from codec_jax.forest import NO_SLOT

# Fixed capacities, so that a jitted function compiles once per page size and bucket of pages.
CAPACITY = {"request_capacity": 8, "node_capacity": 200}


@jax.jit
def jitted_lookups(forest):
    return forest.request_length, forest.positions(3), forest.slots(3), forest.active


@jax.jit
def jitted_extend(forest, count):
    return forest.extend(count)


def on_device(forest):
    return jax.tree.map(jnp.asarray, forest)


def plan_for(forest, **options):
    return make_plan(forest, num_q_heads=1, num_kv_heads=1, head_dim=8, num_ctas=2, tile_rows=8, **options)


def used_nodes(forest):
    return [node for node in range(forest.node_capacity) if forest.parent[node] >= -1]


def assert_same_forest(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype == np.int32
        np.testing.assert_array_equal(a, b)


@settings(deadline=None, max_examples=100)
@given(trees(), page_sizes, st.integers(0, 3))
def test_from_nodes_lays_contexts_out_in_node_order_from_page_0(tree, page_size, free_requests):
    capacity = len(tree.leaf) + free_requests
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=capacity)
    expected = contexts(tree, page_size) + [[]] * free_requests
    assert [forest.context_slots(r).tolist() for r in range(capacity)] == expected
    assert [forest.path(r) for r in range(len(tree.leaf))] == [ancestry(tree.parent, n) for n in tree.leaf]
    assert forest.used_pages.tolist() == list(range(num_pages(tree, page_size)))
    assert forest.request_capacity == capacity
    assert used_nodes(forest) == list(range(len(tree.parent)))


@settings(deadline=None, max_examples=100)
@given(trees(max_nodes=20, max_requests=12), st.integers(0, 3))
def test_readers_of_every_node_are_one_interval_of_rows(tree, free_requests):
    capacity = len(tree.leaf) + free_requests
    forest = Forest.from_nodes(*tree, request_capacity=capacity)
    assert sorted(forest.row_of_request.tolist()) == list(range(capacity))
    for node, requests in enumerate(readers(tree)):
        rows = sorted(forest.row_of_request[requests].tolist())
        assert rows == list(range(forest.row_lo[node], forest.row_hi[node]))


@settings(deadline=None, max_examples=100)
@given(trees(max_nodes=20, max_requests=12), st.permutations(range(20)))
def test_requests_that_come_depth_first_are_rows_in_their_own_order(tree, rank):
    """Whatever the order of siblings, and whatever their numbers."""

    def walk(node):
        children = [child for child, parent in enumerate(tree.parent) if parent == node]
        below = [end for child in sorted(children, key=rank.__getitem__) for end in walk(child)]
        return [node] * tree.leaf.count(node) + below

    leaf = walk(-1)
    forest = Forest.from_nodes(tree.parent, tree.length, leaf)
    assert forest.row_of_request.tolist() == list(range(len(leaf)))


@settings(deadline=None, max_examples=100)
@given(trees(max_nodes=20))
def test_start_is_the_number_of_tokens_above_a_node(tree):
    forest = Forest.from_nodes(*tree)
    for node, parent in enumerate(tree.parent):
        assert forest.start[node] == sum(tree.length[above] for above in ancestry(tree.parent, parent))


def test_a_chain_of_a_thousand_nodes_has_the_right_starts_and_intervals():
    nodes = 1000
    leaves = [nodes - 1, 0, 500]
    forest = Forest.from_nodes(list(range(-1, nodes - 1)), [3] * nodes, leaves)
    assert forest.start[:nodes].tolist() == list(range(0, 3 * nodes, 3))
    widths = [sum(leaf >= node for leaf in leaves) for node in range(nodes)]
    assert (forest.row_hi - forest.row_lo)[:nodes].tolist() == widths
    assert len(forest.context_slots(0)) == 3 * nodes


@settings(deadline=None, max_examples=40)
@given(trees(), page_sizes)
def test_lengths_positions_and_slots_agree_with_the_contexts_on_host_and_under_jit(tree, page_size):
    forest = Forest.from_nodes(*tree, page_size=page_size, **CAPACITY)
    host = forest.request_length, forest.positions(3), forest.slots(3), forest.active
    for on_host, under_jit in zip(host, jitted_lookups(forest), strict=True):
        np.testing.assert_array_equal(on_host, under_jit)
        assert on_host.dtype == under_jit.dtype
    lengths, positions, slots, active = host
    for request, context in enumerate(contexts(tree, page_size)):
        in_leaf = tree.length[tree.leaf[request]]
        assert active[request]
        assert lengths[request] == len(context)
        assert positions[request].tolist() == [len(context) + back for back in (-3, -2, -1)]
        expected = [context[-back] if back <= in_leaf else NO_SLOT for back in (3, 2, 1)]
        assert slots[request].tolist() == expected
    free = np.arange(8) >= len(tree.leaf)
    assert not active[free].any()
    assert not lengths[free].any()
    assert (positions[free] < 0).all()
    assert (slots[free] == NO_SLOT).all()


# Neighbouring bytes and word sizes: sorting must compare tokens as numbers or at least consistently.
token_lists = st.sampled_from([[0, 1], [0, 1, 2], [1, 255, 256, 65536], [0, 2**31 - 1]]).flatmap(
    lambda alphabet: st.lists(st.lists(st.sampled_from(alphabet), min_size=1, max_size=24), min_size=1, max_size=10)
)


@settings(deadline=None, max_examples=150)
@given(token_lists, page_sizes)
def test_from_sequences_stores_every_distinct_prefix_once(lists, page_size):
    forest = Forest.from_sequences(lists, page_size=page_size)
    memory = {}
    for request, tokens in enumerate(lists):
        for slot, token in zip(forest.context_slots(request).tolist(), tokens, strict=True):
            assert memory.setdefault(slot, token) == token
    assert len(memory) == forest.length.sum() == len(prefixes(lists))


@settings(deadline=None, max_examples=150)
@given(token_lists)
def test_from_sequences_cuts_nodes_only_where_lists_part_or_end(lists):
    forest = Forest.from_sequences(lists)
    trie, ends = prefixes(lists), {tuple(tokens) for tokens in lists}
    children = dict.fromkeys(trie, 0)
    for prefix in trie:
        if prefix[:-1]:
            children[prefix[:-1]] += 1
    cuts = [prefix for prefix in trie if children[prefix] != 1 or prefix in ends]
    assert len(used_nodes(forest)) == len(cuts)


def test_equal_lists_end_at_one_node_and_a_prefix_ends_at_an_inner_node():
    forest = Forest.from_sequences([[1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [9]], page_size=8)
    assert forest.leaf[0] == forest.leaf[2]
    assert forest.parent[forest.leaf[0]] == forest.leaf[1]
    assert [len(forest.path(r)) for r in range(4)] == [2, 1, 2, 1]
    assert sorted(forest.length[used_nodes(forest)].tolist()) == [1, 2, 2]


def test_from_sequences_takes_rows_of_an_array_and_capacities():
    forest = Forest.from_sequences(np.asarray([[5, 6], [5, 7]], np.int32), **CAPACITY)
    assert (forest.request_capacity, forest.node_capacity) == (8, 200)
    assert [len(forest.context_slots(r)) for r in range(8)] == [2, 2, 0, 0, 0, 0, 0, 0]


@st.composite
def block_tables(draw):
    """Rows that copy the head of an earlier row and go on with pages of their own, in any order."""
    page_size = draw(page_sizes)
    num_rows = draw(st.integers(1, 8))
    ids = draw(st.permutations(range(64)))
    rows, fresh = [], iter(ids)
    for row in range(num_rows):
        head = []
        if row:
            earlier = rows[draw(st.integers(0, row - 1))]
            head = earlier[: draw(st.integers(0, len(earlier)))]
        rows.append(head + [next(fresh) for _ in range(draw(st.integers(0, 3)))])
    lens = []
    for pages in rows:
        # The last page is full, or in use in part; lengths repeat, so that partly filled pages are shared too.
        last = draw(st.sampled_from([page_size, page_size, 1, page_size - 1, page_size // 2]))
        lens.append(max(0, (len(pages) - 1) * page_size + last) if pages else 0)
    width = max(1, *(len(pages) for pages in rows)) + draw(st.integers(0, 2))
    unused = draw(st.sampled_from([-1, 0, 63]))
    table = [pages + [unused] * (width - len(pages)) for pages in rows]
    order = draw(st.permutations(range(num_rows)))
    return [table[i] for i in order], [lens[i] for i in order], page_size


@settings(deadline=None, max_examples=150)
@given(block_tables().filter(lambda drawn: any(drawn[1])))
def test_from_block_table_reads_what_the_table_says_and_shares_equal_pages_once(drawn):
    table, lens, page_size = drawn
    forest = Forest.from_block_table(np.asarray(table), np.asarray(lens), page_size)
    keys = []
    for request, (row, length) in enumerate(zip(table, lens, strict=True)):
        expected = [row[p // page_size] * page_size + p % page_size for p in range(length)]
        assert forest.context_slots(request).tolist() == expected
        filled = [min(page_size, length - first) for first in range(0, length, page_size)]
        keys.append(list(zip(row[: len(filled)], filled, strict=True)))
    assert forest.active.tolist() == [length > 0 for length in lens]
    assert forest.page_count.sum() == len(prefixes(keys))
    assert forest.length.sum() == sum(prefix[-1][1] for prefix in prefixes(keys))
    for node in used_nodes(forest):
        below = [r for r in range(len(lens)) if node in forest.path(r)]
        rows = range(forest.row_lo[node], forest.row_hi[node])
        assert sorted(forest.row_of_request[below].tolist()) == list(rows)


def test_pages_that_all_rows_of_a_block_table_list_are_in_one_node():
    table = np.asarray([[7, 3, 5, 0], [7, 3, 6, 9], [7, 3, 8, -1]])
    forest = Forest.from_block_table(table, np.asarray([40, 64, 33]), 16)
    roots = [node for node in used_nodes(forest) if forest.parent[node] == -1]
    assert len(roots) == 1
    assert forest.pages_of(roots[0]).tolist() == [7, 3]
    assert forest.length[roots[0]] == 32
    assert len(used_nodes(forest)) == 4


def test_a_request_never_writes_into_a_page_of_a_block_table_that_another_request_reads():
    # Row 0 holds 16 tokens in page 5, row 1 only the first 10 of them.
    forest = Forest.from_block_table(np.asarray([[5], [5]]), np.asarray([16, 10]), 16)
    pool = PagePool.create(8, taken=forest.used_pages)
    before = forest.context_slots(0).tolist()
    grown = forest.reserve(pool, 1, [1])[0].extend([0, 1])
    assert grown.context_slots(0).tolist() == before
    assert grown.slots(1)[1, 0] != NO_SLOT
    assert grown.slots(1)[1, 0] not in before
    assert grown.context_slots(1).tolist()[:10] == before[:10]


@settings(deadline=None, max_examples=40)
@given(trees(max_nodes=8), page_sizes, st.lists(st.integers(0, 20), min_size=8, max_size=8))
def test_extend_lengthens_the_contexts_by_count_on_host_and_under_jit(tree, page_size, count):
    forest = Forest.from_nodes(*tree, page_size=page_size, **CAPACITY)
    pool = PagePool.create(64, taken=forest.used_pages)
    forest, pool = forest.reserve(pool, 20)
    grown = forest.extend(count)
    assert_same_forest(grown, jax.device_get(jitted_extend(forest, jnp.asarray(count))))
    assert_same_forest(grown, jax.device_get(on_device(forest).extend(count)))
    seen = set()
    for request, context in enumerate(contexts(tree, page_size)):
        slots = grown.context_slots(request).tolist()
        own = slots[len(context) :]
        assert slots[: len(context)] == context
        assert len(own) == count[request]
        assert grown.slots(20)[request, 20 - count[request] :].tolist() == own
        assert len(set(own)) == len(own)
        assert not seen & set(own)
        seen |= set(own)
    everyone = [slot for context in contexts(tree, page_size) for slot in context]
    assert not seen & set(everyone)


@pytest.mark.parametrize("count", [2**31, 2**32, 2**32 + 3, 2**64 - 1])
def test_a_count_past_int32_is_too_many(count):
    forest = Forest.from_nodes([-1], [3], [0])
    with pytest.raises(ValueError, match=r"count: request 0 cannot take .* more tokens"):
        forest.extend(np.asarray(count))
    with pytest.raises((ValueError, OutOfPagesError), match=r"pages|tokens"):
        forest.reserve(PagePool.create(4, forest.used_pages), np.asarray(count))


def test_extend_by_a_scalar_grows_every_request_in_use():
    forest = Forest.from_nodes([-1, -1], [3, 9], [0, 1], page_size=16, request_capacity=4)
    np.testing.assert_array_equal(forest.extend().request_length, [4, 10, 0, 0])
    np.testing.assert_array_equal(forest.extend(7).request_length, [10, 16, 0, 0])
    np.testing.assert_array_equal(forest.request_length, [3, 9, 0, 0])


SHARED_LEAF = Forest.from_nodes([-1, 0], [16, 3], [1, 1], page_size=16)
INNER_END = Forest.from_nodes([-1, 0], [10, 3], [0, 1], page_size=16)
FULL_LEAF = Forest.from_nodes([-1, 0, 0], [16, 14, 3], [1, 2], page_size=16)


@pytest.mark.parametrize(
    ("forest", "count", "message"),
    [
        (SHARED_LEAF, 1, r"count: request 0 .* 1 more tokens.* read by other requests.*reserve"),
        (INNER_END, [1, 0], r"count: request 0 .* 1 more tokens.* read by other requests.*reserve"),
        (FULL_LEAF, 3, r"count: request 0 .* 3 more tokens.* no room.*reserve"),
        (FULL_LEAF, [0, 14], r"count: request 1 .* 14 more tokens.* no room.*reserve"),
        (FULL_LEAF, [2, -1], r"count: expected at least 0 tokens for request 1, got -1"),
        (FULL_LEAF, 2**31 - 1, r"count: request 0 .* 2147483647 more tokens.* no room"),
    ],
)
def test_an_extend_without_a_leaf_or_room_raises_on_host_and_spoils_the_plan_under_jit(forest, count, message):
    plan = plan_for(forest, steps=2)
    assert plan.is_valid_for(forest)
    with pytest.raises(ValueError, match=message):
        forest.extend(count)
    spoilt = jitted_extend(forest, jnp.asarray(count))
    assert not plan.is_valid_for(jax.device_get(spoilt))
    assert not jax.jit(plan.is_valid_for)(spoilt)


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 8, 15, 16, 17, 32])
@pytest.mark.parametrize("steps", [1, 2, 16])
def test_a_forest_that_was_spoilt_stays_spoilt_however_many_requests_and_steps(requests, steps):
    # One inner node (never owned by the requests that end there) and one reader below it.
    forest = Forest.from_nodes([-1, 0], [16, 4], [0] * requests + [1], page_size=16)
    plan = plan_for(forest, steps=4)
    spoilt = forest
    for _ in range(steps):
        spoilt = jitted_extend(spoilt, jnp.asarray([1] * requests + [0]))
        assert not plan.is_valid_for(jax.device_get(spoilt))


def test_a_leaf_without_room_stays_spoilt_however_many_steps_go_on():
    forest = Forest.from_nodes([-1], [16], [0], page_size=16)
    plan = plan_for(forest)
    spoilt = forest
    for _ in range(40):
        spoilt = jitted_extend(spoilt, 1)
        assert not plan.is_valid_for(jax.device_get(spoilt))
        assert (np.asarray(spoilt.slots(1)) == NO_SLOT).all()


def test_a_forest_is_a_pytree_that_survives_a_round_trip_through_the_device():
    forest = Forest.from_nodes([-1, 0, 0], [16, 3, 0], [1, 2, 0], page_size=8, request_capacity=4)
    assert forest.is_host
    device = on_device(forest)
    assert isinstance(device, Forest)
    assert not device.is_host
    back = jax.device_get(device)
    assert back.is_host
    assert back.page_size == 8
    assert_same_forest(forest, back)
    assert_same_forest(forest, jax.device_get(jax.jit(lambda f: f)(forest)))
    leaves, structure = jax.tree.flatten(forest)
    assert_same_forest(forest, jax.tree.unflatten(structure, leaves))
    pool = PagePool.create(16, taken=back.used_pages)
    assert_same_forest(back.reserve(pool, 5)[0], forest.reserve(pool, 5)[0])


def test_the_page_size_is_part_of_the_compiled_shape_and_lengths_are_not():
    jitted = jax.jit(lambda forest: forest.slots(2))
    for length in ([5, 6], [6, 5], [0, 8]):
        jitted(Forest.from_nodes([-1, -1], length, [0, 1], page_size=8, **CAPACITY))
    assert jitted._cache_size() == 1
    jitted(Forest.from_nodes([-1, -1], [5, 6], [0, 1], page_size=16, **CAPACITY))
    assert jitted._cache_size() == 2


def test_the_checksum_tells_trees_apart_and_not_lengths():
    def structure(parent, length, leaf, **options):
        return int(Forest.from_nodes(parent, length, leaf, **{**CAPACITY, **options}).structure_hash)

    base = structure([-1, 0, 0], [16, 3, 5], [1, 2])
    assert base == structure([-1, 0, 0], [15, 4, 1], [1, 2])
    others = [
        structure([-1, 0, -1], [16, 3, 5], [1, 2]),
        structure([-1, 0, 0], [16, 3, 5], [2, 1]),
        structure([-1, 0, 0], [16, 3, 5], [1, 1]),
        structure([-1, 0, 0], [17, 3, 5], [1, 2]),
        structure([-1, 0, 0], [16, 3, 0], [1, 2]),
        structure([-1, 0, 0], [16, 17, 0], [1, 2]),
        structure([-1, 0, 0], [8, 3, 5], [1, 2], page_size=8),
    ]
    assert base not in others
    tables = [np.asarray([[0, 1], [0, 2]]), np.asarray([[0, 1], [0, 3]]), np.asarray([[0, 2], [0, 1]])]
    sums = {int(Forest.from_block_table(table, np.asarray([20, 20]), 16).structure_hash) for table in tables}
    assert len(sums) == 3
