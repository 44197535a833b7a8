"""Under policy "invariant" a request's output has the same bits in any company; here on the path of any device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, seeds, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import HEADS, room

from codec_jax import Forest, PagePool, make_plan
from codec_jax.attention import forest_attention
from codec_jax.partial import Partial, por
from codec_jax.planning import invariant

REQUESTS, PAGES, PAGE_SIZE = 6, 512, 8
SIZES: dict[str, Any] = {
    **HEADS, "num_ctas": 3, "tile_rows": 8, "block_tokens": 16, "lanes": 1, "block_capacity": 256,
    "segment_capacity": 192,
}  # fmt: skip
CAPACITIES = {"page_size": PAGE_SIZE, "request_capacity": REQUESTS, "node_capacity": 96, "page_capacity": PAGES}
attend = jax.jit(partial(forest_attention, implementation="xla"))


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "_SHORTEST", 5)
    monkeypatch.setattr(invariant, "_SHARE", 0.2)


def bits(forest: Forest, arrays: tuple, policy: str = "invariant", **options: Any) -> np.ndarray:
    """The output of each request, [B, N x H]."""
    plan = make_plan(forest, **SIZES, policy=policy, **options)
    return np.asarray(attend(*arrays, forest, plan)).reshape(forest.request_capacity, -1)


def random_arrays(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (REQUESTS, 1, 4, 8), (PAGES, PAGE_SIZE, 2, 8), (PAGES, PAGE_SIZE, 2, 8)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def differing(tree: Tree, seed: int, policy: str, kept: list[int]) -> int:
    """How many views of a forest give some request other bits, at two points of its growth."""
    forest = Forest.from_nodes(*tree, **CAPACITIES)
    forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), 9)
    arrays, count = random_arrays(seed), 0
    for grown in (forest, forest.extend(room(forest, 9))):
        expected = bits(grown, arrays, policy)
        for view in (grown.only(kept), grown.unshared()):
            count += not np.array_equal(bits(view, arrays, policy)[kept], expected[kept])
        count += not np.array_equal(bits(forest, arrays, policy, steps=9), bits(forest, arrays, policy))
    return count


def test_outputs_are_the_same_alone_in_any_batch_without_sharing_and_by_any_plan() -> None:
    others = 0

    @settings(max_examples=25)
    @given(trees(max_nodes=8, max_length=150, max_requests=REQUESTS), seeds, st.data())
    def check(tree: Tree, seed: int, data: st.DataObject) -> None:
        nonlocal others
        kept = data.draw(st.lists(st.integers(0, len(tree.leaf) - 1), min_size=1, unique=True))
        assert differing(tree, seed, "invariant", kept) == 0
        others += differing(tree, seed, "aligned", kept)

    check()
    assert others > 25  # that bits are compared at all


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 150)), min_size=2, max_size=REQUESTS), seeds)
def test_lists_that_share_whole_pages_have_the_bits_of_each_alone(shares: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    root = rng.integers(0, 5, 60)
    lists = [np.concatenate([root[:shared], rng.integers(0, 5, own)]) for shared, own in shares]
    query, *tables = rng.normal(size=(REQUESTS, 1, 4, 8)), *(rng.normal(size=(5, 256, 2, 8)) for _ in range(2))

    def of(numbers: list[int]) -> np.ndarray:
        forest = Forest.from_sequences([lists[i] for i in numbers], whole_pages=True, **CAPACITIES)
        assert (forest.start % PAGE_SIZE == 0).all()
        pages = np.zeros((2, PAGES * PAGE_SIZE, 2, 8))
        for request, i in enumerate(numbers):
            slots = forest.context_slots(request)
            assert len(slots) == len(lists[i])
            pages[:, slots] = [table[lists[i], np.arange(len(slots))] for table in tables]
        rows = np.zeros_like(query)
        rows[: len(numbers)] = query[numbers]
        arrays = *rows[None], *pages.reshape(2, PAGES, PAGE_SIZE, 2, 8)
        return bits(forest, tuple(x.astype(np.float32) for x in arrays))[: len(numbers)]

    together = of(list(range(len(lists))))
    for i in range(len(lists)):
        np.testing.assert_array_equal(of([i])[0], together[i])


def test_merging_with_nothing_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    partial_of = Partial(*(jnp.asarray(rng.uniform(0.1, 9, size), jnp.float32) for size in ((50, 8), (50,), (50,))))
    empty = Partial.empty((50,), 8)
    for merged in (por(partial_of, empty), por(empty, partial_of)):
        jax.tree.map(np.testing.assert_array_equal, merged, partial_of)
