"""Pages spread over devices: which are taken, against a model that places them one by one; how even the loads are."""

import re
from random import Random

import numpy as np
import pytest
from forests import contexts, seeds, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_world import World

from codec_jax import Forest, OutOfPagesError, PagePool, Window
from codec_jax.forest import PrefixCache, Tree, edits
from codec_jax.forest.homes import MIN_RUN_PAGES
from codec_jax.nnx.scheduler import Scheduler


def loads(forest, pool):
    """Count the pages of nodes that are read, of each device."""
    read = [page for node in np.flatnonzero(forest.readers) for page in forest.pages_of(node).tolist()]
    each = pool.num_pages // pool.devices
    return [sum(page // each == device for page in read) for device in range(pool.devices)]


def placed(nodes, read, added, free, devices, each):
    """Return the pages of each node after additions, page by page; `free` is a set of pages."""
    free_on = [sorted(page for page in free if page // each == device) for device in range(devices)]
    load = [
        sum(page // each == device for pages, counts in zip(nodes, read, strict=True) if counts for page in pages)
        for device in range(devices)
    ]
    room, homes = [len(pages) for pages in free_on], [[] for _ in nodes]
    for node in sorted((node for node, more in enumerate(added) if more), key=lambda node: (-added[node], node)):
        by_load = sorted((device for device in range(devices) if room[device]), key=lambda device: load[device])
        parts = max(1, min(added[node] // MIN_RUN_PAGES, devices))
        last = nodes[node][-1] // each if nodes[node] else None
        if parts == 1 and last in by_load and load[last] - load[by_load[0]] < MIN_RUN_PAGES:
            by_load = [last, *(device for device in by_load if device != last)]
        while sum(room[device] for device in by_load[:parts]) < added[node]:
            parts += 1
        for _ in range(added[node]):
            device = min((d for d in by_load[:parts] if room[d]), key=lambda d: (load[d], by_load.index(d)))
            homes[node].append(device)
            load[device] += 1
            room[device] -= 1
    return [pages + [free_on[device].pop(0) for device in sorted(of)] for pages, of in zip(nodes, homes, strict=True)]


def additions(random):
    """Return a pool's devices, nodes with pages anywhere in it, who is read, and what each node is to get more."""
    devices, each, few = random.choice([1, 2, 3, 4, 8]), random.choice([10, 60, 200]), random.random() < 0.5
    # Pages are taken from the end of the list; with a small spread, some devices are nearly full.
    spread = random.choice([0, 0.5, 1, 3, 100])
    ids = sorted(range(devices * each), key=lambda page: page // each + spread * random.random())
    nodes = []
    for _ in range(random.randint(1, 9)):
        size = random.choice([0, random.randint(1, 5), random.randint(1, 90)])
        nodes.append([ids.pop() for _ in range(min(size, len(ids) // 2))])
    left, added = len(ids), []
    for _ in nodes:
        added.append(min(left, random.choice([0, random.randint(1, 5), random.randint(1, 5 if few else 300)])))
        left -= added[-1]
    return devices, each, nodes, [random.random() < 0.7 for _ in nodes], added, set(ids)


@given(seed=seeds)
@settings(max_examples=250, deadline=None)
def test_pages_are_added_where_a_model_places_them_one_by_one(seed):
    devices, each, nodes, read, added, free = additions(Random(seed))
    counts = np.asarray([len(pages) for pages in nodes])
    taken = np.asarray([page for pages in nodes for page in pages], np.int64)
    leaf = np.asarray([node if is_read else -1 for node, is_read in enumerate(read)])
    tree = Tree(np.full(len(nodes), -1), counts * 8, counts.copy(), taken, leaf, 8)
    pool = PagePool.create(devices * each, taken, devices=devices)
    after, pool_after = edits.resized(tree, counts + added, pool)

    pages = [of_node.tolist() for of_node in after.pages_of_nodes()]
    counted = [is_read or more > 0 for is_read, more in zip(read, added, strict=True)]
    assert pages == placed(nodes, counted, added, free, devices, each)
    # What follows holds for any policy.
    fresh = [page for of_node, count in zip(pages, counts, strict=True) for page in of_node[count:]]
    assert [of_node[:count] for of_node, count in zip(pages, counts, strict=True)] == nodes
    assert len(set(fresh)) == len(fresh) == sum(added)
    assert set(fresh) <= free
    assert pool_after.devices == devices
    assert np.flatnonzero(pool_after.owners).tolist() == sorted([*taken.tolist(), *fresh])
    for of_node, count in zip(pages, counts, strict=True):
        homes = [page // each for page in of_node[count:]]
        assert homes == sorted(homes)  # one run on a device
    if devices == 1:
        assert fresh == sorted(free)[: len(fresh)]
    counts[0] += len(free) + 1
    with pytest.raises(OutOfPagesError, match=f"{len(free)} free pages of {devices * each}, {len(free) + 1} are"):
        edits.resized(tree, counts, pool)


few_pages = st.integers(0, MIN_RUN_PAGES)


@given(
    devices=st.sampled_from([2, 4, 8]),
    pages=st.lists(few_pages | st.integers(8 * MIN_RUN_PAGES, 3000), min_size=1, max_size=20),
    others=st.lists(st.integers(0, 8 * MIN_RUN_PAGES), max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_a_new_forest_is_spread_evenly(devices, pages, others):
    for counts, limit in ((pages, MIN_RUN_PAGES), (pages + others, 2 * MIN_RUN_PAGES)):
        nodes = len(counts)
        forest = Forest.from_nodes([-1] * nodes, [8 * count for count in counts], range(nodes), page_size=8)
        forest, pool = forest.spread(devices * (sum(counts) + 1), devices)
        each = loads(forest, pool)
        assert sum(each) == sum(counts)
        assert max(each) - min(each) <= limit
        for node, count in enumerate(counts):
            homes = pool.homes.of(forest.pages_of(node))
            assert len(set(homes.tolist())) <= max(1, count // MIN_RUN_PAGES)


@given(tree=trees(max_length=3000), devices=st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_spreading_moves_pages_and_changes_nothing_else(tree, devices):
    before = Forest.from_nodes(*tree, page_size=8)
    each = -(-len(before.used_pages) // devices) + 1
    forest, pool = before.spread(devices * each, devices)
    if devices == 1:
        assert forest.used_pages.tolist() == before.used_pages.tolist()
    assert pool.devices == devices
    assert np.flatnonzero(pool.owners).tolist() == sorted(forest.used_pages.tolist())
    assert pool.owners.max(initial=0) <= 1
    for name in ("parent", "length", "start", "page_count", "row_lo", "row_hi", "leaf"):
        assert getattr(forest, name).tolist() == getattr(before, name).tolist()
    moved = dict(zip(before.used_pages.tolist(), forest.used_pages.tolist(), strict=True))
    for request, context in enumerate(contexts(tree, 8)):
        assert forest.context_slots(request).tolist() == [moved[slot // 8] * 8 + slot % 8 for slot in context]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("tokens", [8, 40, 8 * 70])
def test_a_request_that_grows_by_thousands_of_pages_stays_spread(devices, tokens):
    forest = Forest.from_nodes([-1, 0, 0], [8 * 30, 3, 8], [1, 2], page_size=8)
    forest, pool = forest.spread(3000, devices)
    moves, limit = 0, MIN_RUN_PAGES + tokens // 8
    while pool.num_free > 200:
        last = forest.pages_of(1)[-1]
        forest, pool = forest.reserve(pool, tokens, [0])
        forest = forest.extend([tokens, 0])
        moves += pool.homes.of(last) != pool.homes.of(forest.pages_of(1)[-1])
        if pool.num_free % 7 == 0:
            each = loads(forest, pool)
            assert max(each) - min(each) <= limit
    if tokens < 8 * MIN_RUN_PAGES:
        assert moves <= forest.page_count[1] / MIN_RUN_PAGES


def test_pages_that_nobody_reads_are_no_load():
    document, other = range(20 * 16), range(1000, 1000 + 20 * 16)
    cache, [first] = PrefixCache.create(num_pages=200, page_size=16, request_capacity=4, devices=2).add([document])
    cache = cache.mark_computed(first, 20 * 16)
    assert cache.pool.free_of_devices.tolist() == [80, 100]
    assert cache.add([other])[0].pool.free_of_devices.tolist() == [80, 80]
    assert cache.retire([first]).add([other])[0].pool.free_of_devices.tolist() == [60, 100]


def test_a_list_that_shares_with_another_new_one_is_spread_in_runs():
    document = list(range(320 * 8))
    cache, requests = PrefixCache.create(num_pages=800, page_size=8, request_capacity=4, devices=4).add(
        [document, [*document[: 160 * 8], 7], document[: 200 * 8]]
    )
    view = cache.view(requests)
    assert [view.context_slots(r).shape for r in range(3)] == [(320 * 8,), (160 * 8 + 1,), (200 * 8,)]
    each = loads(view, cache.pool)
    assert sum(each) == 321
    assert max(each) - min(each) <= MIN_RUN_PAGES


@given(
    random=st.randoms(use_true_random=False),
    operations=st.lists(st.sampled_from([*World.operations, World.drop]), min_size=10, max_size=60),
    devices=st.sampled_from([2, 4]),
    num_pages=st.sampled_from([8, 16, 40]),
)
@settings(max_examples=40, deadline=None)
def test_a_cache_holds_its_invariants_on_several_devices(random, operations, devices, num_pages):
    world = World(num_pages=num_pages, devices=devices)
    for operation in operations:
        operation(world, random)
        world.check()


def test_a_cache_of_long_contexts_holds_its_invariants_while_requests_come_and_go():
    random, cache = Random(0), PrefixCache.create(num_pages=1600, page_size=8, request_capacity=6, devices=4)
    documents = [[random.randrange(9) for _ in range(8 * pages)] for pages in (150, 70, 300)]
    held = {}
    for count in range(120):
        if len(held) == 6 or (held and random.random() < 0.3):
            gone = random.choice(sorted(held))
            cache = cache.retire([gone])
            del held[gone]
        else:
            tokens = [*random.choice(documents), *(random.randrange(9) for _ in range(random.choice([5, 600])))]
            cache, [new] = cache.add([tokens])
            cache = cache.mark_computed(new, len(tokens)).reserve(random.choice([1, 300]), [new])
            held[int(new)] = tokens
        if count % 10 == 0 and cache.num_cached:
            cache = cache.evict(cache.num_cached // 2)
        assert np.bincount(cache.tree.page_ids, minlength=1600).tolist() == cache.pool.owners.tolist()
        assert cache.pool.owners.max() <= 1
        assert all(cache.context(request).tolist() == tokens for request, tokens in held.items())


def test_a_pool_takes_pages_of_the_devices_that_are_named():
    pool = PagePool.create(12, np.asarray([0, 5]), devices=3)
    assert (pool.homes.devices, pool.homes.pages) == (3, 4)
    assert pool.homes.of(np.arange(12)).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    after, pages = pool.allocate_on(np.asarray([2, 1, 2, 0, 1]))
    assert pages.tolist() == [8, 4, 9, 1, 6]
    assert after.free_of_devices.tolist() == [2, 1, 2]
    assert pool.free_of_devices.tolist() == [3, 3, 4]
    assert after.release(pages).free_of_devices.tolist() == [3, 3, 4]
    assert pool.allocate(2)[1].tolist() == [1, 2]
    assert pool.allocate(2)[0].devices == after.release(pages).devices == 3
    assert pool.allocate_on(np.zeros(0, int))[1].tolist() == []


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PagePool.create(10, devices=4), ValueError, "pages on each of 4 devices, got 10; make it 12"),
        (lambda: PagePool.create(8, devices=0), ValueError, "devices: expected an integer of at least 1, got 0"),
        (lambda: PrefixCache.create(9, 8, 1, devices=2), ValueError, "pages on each of 2 devices, got 9; make it 10"),
        (lambda: Forest.from_nodes([-1], [8], [0]).spread(3, 2), ValueError, "2 devices, got 3; make it 4"),
        (lambda: Forest.from_nodes([-1], [80], [0]).spread(4, 2), OutOfPagesError, "4 free pages of 4, 5 are needed"),
        (
            lambda: Forest.from_block_table(np.asarray([[5], [5]]), np.asarray([16, 10]), 16).spread(8, 2),
            ValueError,
            "pages that several nodes own, where K and V may be there already; build it with from_nodes",
        ),
        (
            lambda: Forest.from_nodes([-1], [40], [0]).forget(PagePool.create(8, range(3)), Window(20))[0].spread(8, 2),
            ValueError,
            "no page was given back of, got one after forget",
        ),
        (
            lambda: PagePool.create(4, devices=2).allocate_on(np.asarray([0, 1, 1, 1])),
            OutOfPagesError,
            "device 1 has 2 free pages, 3 are needed",
        ),
        (
            lambda: PagePool.create(4, devices=2).allocate_on(np.asarray([0, 2])),
            ValueError,
            "devices: expected devices in [0, 2), got devices[1] = 2",
        ),
    ],
    ids=[
        "create", "no devices", "cache", "spread", "small pool", "shared pages", "forgotten", "full device",
        "no device",
    ],
)  # fmt: skip
def test_pools_and_forests_say_what_they_cannot_spread(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_a_scheduler_that_restarts_keeps_its_devices():
    cache = PrefixCache.create(num_pages=64, page_size=8, request_capacity=2, devices=4)
    scheduler = Scheduler(cache, steps=1, chunks=1, chunk_tokens=16, room=0.5)
    scheduler.restart()
    assert scheduler.cache.pool.homes == cache.pool.homes
