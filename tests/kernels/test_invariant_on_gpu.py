"""Under policy "invariant" the kernels give a request the same bits in any company; on a GPU."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, seeds, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import PAGES, Arrays, Heads, attend, check, grown, plan_of
from plan_cases import room

from codec_jax import Forest, PagePool, Plan
from codec_jax.planning import invariant
from pallas_kernels import AMPERE, HOPPER

pytestmark = pytest.mark.gpu
KERNELS: list[tuple[str, Heads, dict[str, Any]]] = [
    ("mosaic", Heads(32, 8, 128), {}),
    ("mosaic", Heads(16, 2, 64), {}),
    ("mosaic", Heads(8, 4, 256), {}),
    ("mosaic", Heads(32, 8, 128), {"query_tokens": 5}),
    ("mosaic", Heads(32, 8, 128), {"window": 100}),
    ("mosaic", Heads(32, 8, 128), {"softcap": 2.0}),
    ("ampere", Heads(32, 8, 128), {}),
    ("ampere", Heads(8, 4, 256), {"query_tokens": 5}),
]


@pytest.fixture(autouse=True)
def _served(request: pytest.FixtureRequest) -> None:
    if "ampere" in request.node.name and not hasattr(plgpu, "mma"):
        pytest.skip("before JAX 0.11 there are no warp-level products")


def planned(forest: Forest, implementation: str, heads: Heads, **options: Any) -> Plan:
    family = {"mosaic": HOPPER, "ampere": AMPERE}[implementation]
    given = {"segment_capacity": 1024, "policy": "invariant", "lanes": 2 if family is HOPPER else 1}
    return plan_of(forest, heads, family, **(given | options))


def bits(forest: Forest, arrays: Arrays, plan: Plan, implementation: str, softcap: float | None = None) -> np.ndarray:
    """The output of each request in use, and maximum and sum of its softmax, by request; the others have zeros."""
    options = {"softcap": softcap, "implementation": implementation, "return_residuals": True}
    out, residuals = attend(*arrays, forest, plan, **options)
    rows = [np.asarray(x, np.float32).reshape(forest.request_capacity, -1) for x in (out, *residuals)]
    return np.where(forest.active[:, None], np.concatenate(rows, axis=1), 0)


@pytest.mark.parametrize(("implementation", "heads", "options"), KERNELS, ids=str)
def test_outputs_are_the_same_alone_in_any_batch_without_sharing_and_by_any_plan(
    implementation: str, heads: Heads, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of 256 tokens, so that partials are merged, with masks by token, by row, and none."""
    monkeypatch.setattr(invariant, "_SHORTEST", 8)
    softcap, options = options.get("softcap"), {name: x for name, x in options.items() if name != "softcap"}

    @settings(max_examples=20)
    @given(trees(max_nodes=8, max_length=300, max_requests=8), seeds, st.data())
    def check_one(tree: Tree, seed: int, data: st.DataObject) -> None:
        forest = grown(tree, 16, seed, request_capacity=40)
        forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), 20)
        later = forest.extend(room(forest, 20))
        arrays = Arrays.random(later, heads, jnp.bfloat16, seed, options.get("query_tokens", 1))
        kept = data.draw(st.lists(st.integers(0, len(tree.leaf) - 1), min_size=1, unique=True))
        early = planned(forest, implementation, heads, steps=20, **options)
        for now in (forest, later):
            expected = bits(now, arrays, early, implementation, softcap)
            for view in (now, now.only(kept), now.only(kept[:1]), now.unshared()):
                plan = planned(view, implementation, heads, **options)
                found = bits(view, arrays, plan, implementation, softcap)
                np.testing.assert_array_equal(found, np.where(view.active[:, None], expected, 0))

    check_one()


@pytest.mark.parametrize("implementation", ["mosaic", "ampere"])
def test_long_contexts_have_the_same_bits_and_are_right(implementation: str) -> None:
    """A document under two sections, and fifty requests with a little or much of their own."""
    heads, rng = Heads(32, 8, 128), np.random.default_rng(0)
    own = rng.choice([7, 100, 1500, 6000], 50)
    forest = Forest.from_nodes([-1, 0, 0, *rng.integers(0, 3, 50)], [16 * 700, 16 * 90, 16 * 300, *own], range(3, 53))
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=len(forest.used_pages))
    plan = planned(forest, implementation, heads)
    check(arrays, forest, plan, requests=range(0, 50, 7), implementation=implementation)
    expected, others = bits(forest, arrays, plan, implementation), 0
    for view in (forest.only([11]), forest.only(range(0, 50, 3)), forest.unshared()):
        for policy in ("invariant", "aligned"):
            of_view = planned(view, implementation, heads, policy=policy)
            same = np.array_equal(
                bits(view, arrays, of_view, implementation), np.where(view.active[:, None], expected, 0)
            )
            assert same or policy == "aligned"
            others += not same
    assert others == 3
