"""A prefix cache through any series of operations, against plain lists and a memory of hashes."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prefix_world import World

randoms = st.randoms(use_true_random=False)


class Serving(RuleBasedStateMachine):
    """What an engine does, in any order."""

    @initialize(num_pages=st.sampled_from([8, 16, 40]), rows=st.sampled_from([2, 6]), alphabet=st.sampled_from([1, 2]))
    def create(self, num_pages, rows, alphabet):
        self.world = World(num_pages, rows, alphabet=alphabet)

    @rule(operation=st.sampled_from([*World.operations, World.drop]), random=randoms)
    def operate(self, operation, random):
        operation(self.world, random)

    @rule(random=randoms, growing=st.booleans())
    def match(self, random, growing):
        self.world.check_match(self.world.text(random), sorted(self.world.flying) if growing else ())

    @rule(random=randoms)
    def view(self, random):
        self.world.check_view([r for r in self.world.model if random.random() < 0.7])

    @rule(random=randoms)
    def chunks(self, random):
        requests = [r for r, text in self.world.model.items() for _ in range(2) if text and random.random() < 0.7]
        pieces = [(r, random.choice(self.world.ends(r))) for r in requests]
        self.world.check_chunks(pieces, len(pieces) + random.choice([1, 2]))

    @invariant()
    def check(self):
        self.world.check()


Serving.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestServing = Serving.TestCase


@pytest.mark.parametrize(("operations", "devices"), [(5000, 1), (1000, 4)])
def test_thousands_of_operations_lose_no_page(operations, devices) -> None:
    random, world, nodes = Random(0), World(devices=devices), 0
    for count in range(operations):
        operation = World.drop if random.random() < 0.002 else random.choice(World.operations)
        operation(world, random)
        if count % 10 == 0:
            world.check()
            world.check_match(world.text(random), sorted(world.flying))
        nodes = max(nodes, len(world.cache.tree.parent))
    assert nodes <= 2 * world.cache.pool.num_pages  # slots of nodes are used again
    world.retire(random, share=1.0)
    world.check()
    world.drop(random)
    world.check()
    assert world.cache.pool.num_free == world.cache.pool.num_pages
    assert world.cache.num_nodes == 0


def test_an_invariant_cache_loses_no_page_and_shares_none_that_was_drawn() -> None:
    random, world = Random(1), World(invariant=True)
    for count in range(2000):
        random.choice(World.operations)(world, random)
        if count % 5 == 0:
            world.check()


@given(random=randoms, operations=st.lists(st.sampled_from(World.operations), max_size=25), data=st.data())
@settings(max_examples=40, deadline=None)
def test_operations_leave_their_input_as_it_was(random, operations, data) -> None:
    world = World()
    for operation in operations:
        operation(world, random)
    before = world.cache
    tree = before.tree
    kept = [
        np.copy(x)
        for x in (*tree[:5], before.pool.owners, before.tokens, before.computed, before.last_used, before.pins)
    ]
    data.draw(st.sampled_from([*World.operations, World.drop]))(world, random)
    after = (*tree[:5], before.pool.owners, before.tokens, before.computed, before.last_used, before.pins)
    for old, new in zip(kept, after, strict=True):
        np.testing.assert_array_equal(old, new)
