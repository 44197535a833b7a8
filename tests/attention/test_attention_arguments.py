"""Arguments of `forest_attention` that do not fit, and those that do in other forms."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import NODES, PAGES, REQUESTS, Layout, assert_close, attend, attend_each, forest_of, jitted
from forests import SECTIONS, contexts

from codec_jax import Forest, PlanError, make_plan
from codec_jax.attention import forest_attention


@pytest.mark.parametrize("name", ["mosaic", "triton", "nonsense", "XLA", ""])
def test_an_implementation_that_cannot_serve_is_refused_by_name(name: str) -> None:
    layout, forest = Layout(), forest_of(SECTIONS)
    arguments = (*layout.arrays(np.random.default_rng(0)), forest, layout.plan(forest))
    with pytest.raises(ValueError, match=f"^implementation: .*'{name}'"):
        forest_attention(*arguments, implementation=name)
    with pytest.raises(ValueError, match=f"^implementation: .*'{name}'"):
        jitted(implementation=name)(*arguments)


def test_arrays_of_the_host_serve_as_well() -> None:
    layout, forest = Layout(), forest_of(SECTIONS)
    arrays = layout.arrays(np.random.default_rng(0))
    want = attend_each(*arrays, contexts(SECTIONS, 16)).out
    assert_close(forest_attention(*arrays, forest, layout.plan(forest)), want)
    assert_close(jax.jit(lambda *rest: forest_attention(*arrays, *rest))(forest, layout.plan(forest)), want)


def test_xla_may_be_named() -> None:
    layout, forest = Layout(), forest_of(SECTIONS)
    arrays = layout.arrays(np.random.default_rng(0))
    out = jitted(implementation="xla")(*arrays, forest, layout.plan(forest))
    assert_close(out, attend_each(*arrays, contexts(SECTIONS, 16)).out)


# What fits: a query [10, 1, 4, 64], and pages [128, 16, 2, 64] of which the forest uses 11.
FITTING = {"query": (REQUESTS, 1, 4, 64), "key": (PAGES, 16, 2, 64), "value": (PAGES, 16, 2, 64)}
MISFITS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of another batch": ({"query": (9, 1, 4, 64)}, ValueError, r"^query: .*B = 10.*\(9, 1, 4, 64\)"),
    "query without tokens": ({"query": (10, 0, 4, 64)}, PlanError, r"^plan: .*query_tokens.* = \(0, "),
    "query of three axes": ({"query": (10, 4, 64)}, ValueError, r"^query: .*\[B = 10, T, N, H\].*\(10, 4, 64\)"),
    "integer query": ({"query": jnp.int32}, ValueError, "^query: .*bfloat16.*int32"),
    "pages of another size": ({"pages": (128, 8, 2, 64)}, ValueError, r"^key_pages: .* = 16, K, H = 64\].*8, 2, 64"),
    "pages of another head size": ({"pages": (128, 16, 2, 32)}, ValueError, r"^key_pages: .*K, H = 64\].*2, 32"),
    "pages of three axes": ({"pages": (2048, 2, 64)}, ValueError, r"^key_pages: .*\(2048, 2, 64\)"),
    "too few pages": ({"pages": (10, 16, 2, 64)}, ValueError, r"^key_pages: .*at least 11 pages.*got 10"),
    "integer pages": ({"pages": jnp.int8}, ValueError, "^key_pages: .*bfloat16.*int8"),
    "fewer value pages": ({"value": (127, 16, 2, 64)}, ValueError, r"^value_pages: .*= 128, .*\(127, "),
    "values of another dtype": ({"value": jnp.bfloat16}, ValueError, "^value_pages: .*float32.*bfloat16"),
    "other q heads": ({"query": (10, 1, 8, 64)}, PlanError, r"^plan: .*= \(1, 8, 2, 64\).*\(1, 4, 2, 64\)"),
    "other kv heads": ({"pages": (128, 16, 4, 64)}, PlanError, r"^plan: .*= \(1, 4, 4, 64\).*\(1, 4, 2, 64\)"),
    "other head size": (
        {"query": (10, 1, 4, 32), "pages": (128, 16, 2, 32)}, PlanError, r"^plan: .*= \(1, 4, 2, 32\).*\(1, 4, 2, 64\)"
    ),
    "other query tokens": ({"query": (10, 2, 4, 64)}, PlanError, r"^plan: .*= \(2, 4, 2, 64\).*\(1, 4, 2, 64\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_arrays_that_do_not_fit_are_refused_by_name(case: str) -> None:
    changes, error, message = MISFITS[case]
    if "pages" in changes:
        changes = {**changes, "key": changes["pages"], "value": changes["pages"]}
    arrays = []
    for name, shape in FITTING.items():
        change = changes.get(name, shape)
        shape, dtype = (change, jnp.float32) if isinstance(change, tuple) else (shape, change)
        arrays.append(jax.ShapeDtypeStruct(shape, dtype))
    forest = forest_of(SECTIONS)
    plan = Layout().plan(forest)
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda *arrays: forest_attention(*arrays, forest, plan), *arrays)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, np.complex64(1)])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    layout, forest = Layout(), forest_of(SECTIONS)
    with pytest.raises(ValueError, match=rf"^scale: expected a finite number, got .*{re.escape(str(scale))}"):
        forest_attention(*layout.arrays(np.random.default_rng(0)), forest, layout.plan(forest), scale=scale)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("page_size", {"page_size": 8}),
        ("request_capacity", {"request_capacity": REQUESTS + 1}),
        ("node_capacity", {"node_capacity": NODES + 1}),
    ],
)
def test_a_plan_for_other_capacities_is_refused_also_under_jit(name: str, options: dict[str, int]) -> None:
    layout, forest = Layout(), forest_of(SECTIONS)
    other = Forest.from_nodes(
        *SECTIONS, **{"page_size": 16, "request_capacity": REQUESTS, "node_capacity": NODES, **options}
    )
    with pytest.raises(PlanError, match=f"plan: expected a plan for {name} = "):
        attend(*layout.arrays(np.random.default_rng(0)), forest, layout.plan(other))


def test_a_derivative_is_refused_and_one_around_it_is_not() -> None:
    forest = Forest.from_nodes([-1, 0, 0], [30, 2, 5], [1, 2])
    plan = make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16)
    query, pages = jnp.ones((2, 1, 4, 16)), jnp.ones((4, 16, 2, 16))

    def total(query: jax.Array, pages: jax.Array, scale: float) -> jax.Array:
        return scale * forest_attention(query, pages, pages, forest, plan).sum()

    for argument in (0, 1):
        with pytest.raises(NotImplementedError, match=r"^forest_attention: expected no derivative"):
            jax.grad(jax.jit(total), argnums=argument)(query, pages, 2.0)
    assert jax.grad(total, argnums=2)(query, pages, 2.0) == query.size  # all values are 1

    def scaled(key_scale: jax.Array, value_scale: jax.Array) -> jax.Array:
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        return forest_attention(query, small, small, forest, plan, **scales).sum()

    small, ones = pages.astype(jnp.float8_e4m3fn), jnp.ones(2)
    for argument in (0, 1):
        with pytest.raises(NotImplementedError, match=r"^forest_attention: expected no derivative"):
            jax.grad(scaled, argnums=argument)(ones, ones)
