"""Attention divided among devices, by heads and by pages: every mesh of 8 against float64 attention of each request."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import PAGES, REQUESTS, SOME_TREES, Layout, assert_close, attend_alone, attend_each, forest_of, slots_of
from forests import Tree, ancestry, candidate_parents, renumbered, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from kernel_calls import Arrays, Exact

from codec_jax import DraftTrees, Forest, KVPages, PagePool, Plan, PlanError, make_plan
from codec_jax.attention import backends, forest_attention
from codec_jax.attention.xla import XLA
from codec_jax.forest.homes import Homes
from codec_jax.partial import merge_heads
from codec_jax.planning import replan
from codec_jax.planning.predict import call_us
from pallas_kernels import HOPPER

MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=lambda shape: f"{shape[0]} x {shape[1]}")
HEADS, HEAD_DIM = (16, 8), 16
QUERY, KV = PartitionSpec(None, None, "tensor"), PartitionSpec("context", None, "tensor")
TREE = Tree([-1, 0, 0, 1, 1], [150, 20, 9, 40, 33], [1, 2, 3, 3, 4])


def mesh_of(shape: tuple[int, int], *kinds: AxisType) -> Mesh:
    kinds = kinds * (3 - len(kinds)) if kinds else (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("context", "tensor"), axis_types=kinds, devices=jax.devices("cpu"))


def plan_of(forest: Forest, mesh: Mesh, query_tokens: int = 1, steps: int = 1, window: int | None = None) -> Plan:
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    return make_plan(
        forest,
        num_q_heads=HEADS[0] // tensor,
        num_kv_heads=HEADS[1] // tensor,
        head_dim=HEAD_DIM,
        steps=steps,
        query_tokens=query_tokens,
        window=window,
        num_ctas=3,
        tile_rows=8,
        block_tokens=32,
        block_capacity=512,
        homes=Homes(context, PAGES // context),
    )


def arrays_of(seed: int, query_tokens: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return Layout(*HEADS, HEAD_DIM, query_tokens).arrays(np.random.default_rng(seed))


def scattered(tree: Tree, seed: int) -> tuple[Forest, list[list[int]]]:
    """A forest on pages of all devices, and the token slots that each request reads."""
    order = np.random.default_rng(seed).permutation(PAGES)
    return forest_of(tree, 16, order), slots_of(tree, 16, order)


@every_mesh
@pytest.mark.parametrize("query_tokens", [1, 3])
def test_it_is_exact_on_any_mesh(shape: tuple[int, int], query_tokens: int) -> None:
    mesh = mesh_of(shape)
    attend = jax.jit(partial(forest_attention, mesh=mesh, return_residuals=True))

    @settings(max_examples=10)
    @given(SOME_TREES, seeds)
    def check(tree: Tree, seed: int) -> None:
        forest, slots = scattered(tree, seed)
        arrays = arrays_of(seed, query_tokens)
        out, (row_max, row_sum) = attend(*arrays, forest, plan_of(forest, mesh, query_tokens))
        want = attend_each(*arrays, slots)
        assert_close(out, want.out)
        assert_close(row_max, want.max)
        assert_close(row_sum, want.sum, atol=1e-4)

    check()
    assert attend._cache_size() == 1


@pytest.mark.parametrize(
    "kinds",
    [(AxisType.Auto,), (AxisType.Explicit,), (AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)],
    ids=["auto", "explicit", "explicit context", "explicit tensor"],
)
@pytest.mark.parametrize("jitted", [True, False], ids=["in jit", "outside of it"])
def test_arrays_may_be_divided_already(kinds: tuple[AxisType, ...], jitted: bool) -> None:
    mesh = mesh_of((2, 4), *kinds)
    forest, slots = scattered(TREE, 1)
    arrays = arrays_of(1)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, (QUERY, KV, KV), strict=True)]
    attend = partial(forest_attention, mesh=mesh)
    out = (jax.jit(attend) if jitted else attend)(*placed, forest, plan_of(forest, mesh))
    assert_close(out, attend_each(*arrays, slots).out)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, QUERY), out.ndim)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sinks_count_once_and_windows_leave_out_what_they_hide_on_every_device(kind: AxisType) -> None:
    mesh, sinks = mesh_of((4, 2), kind, kind), np.linspace(-1, 3, HEADS[0], dtype=np.float32)
    attend = jax.jit(partial(forest_attention, mesh=mesh, softcap=1.5, return_residuals=True))

    @settings(max_examples=6)
    @given(SOME_TREES, seeds)
    def check(tree: Tree, seed: int) -> None:
        forest, _ = scattered(tree, seed)
        if not forest.request_length.any():
            return
        arrays = Arrays(*map(jnp.asarray, arrays_of(seed, 2)))
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, (QUERY, KV, KV), strict=True)]
        plan = plan_of(forest, mesh, 2, window=21)
        out, (row_max, row_sum) = attend(*placed, forest, plan, sinks=jnp.asarray(sinks))
        for request in np.flatnonzero(forest.active):
            exact = Exact.of(arrays, forest, request, softcap=1.5, window=21, sinks=sinks)
            assert_close(out[request], exact.out)
            assert_close(row_max[request] + np.log(row_sum[request]), exact.logsumexp)

    check()


def test_draft_trees_are_seen_wherever_they_live() -> None:
    mesh = mesh_of((4, 2))
    attend = jax.jit(partial(forest_attention, mesh=mesh))
    whole = Forest.from_nodes([-1, *[0] * 6], [50, 20, 9, 40, 33, 0, 7], [1, 2, 3, 4, 5, 6], request_capacity=REQUESTS)
    whole, _ = whole.reserve(PagePool.create(PAGES, whole.used_pages), 3)

    @settings(max_examples=8)
    @given(st.lists(candidate_parents(3).map(renumbered), min_size=REQUESTS, max_size=REQUESTS), seeds)
    def check(parents: list[list[int]], seed: int) -> None:
        order = np.random.default_rng(seed).permutation(PAGES)
        forest = Forest.build(whole.tree._replace(page_ids=order[whole.used_pages]), None, 128, 128).extend(3)
        arrays = arrays_of(seed, 3)
        out = attend(*arrays, forest, plan_of(forest, mesh, 3), drafts=DraftTrees.from_parents(np.asarray(parents)))
        key, value = (x.reshape(-1, *x.shape[2:]) for x in arrays[1:])
        for request in range(6):
            slots = forest.context_slots(request)
            for t in range(3):
                seen = [*slots[:-3], *(slots[len(slots) - 3 + a] for a in ancestry(parents[request], t))]
                want = attend_alone(arrays[0][request, t : t + 1], key[seen], value[seen])
                assert_close(out[request, t], want.out[0])

    check()


def test_a_plan_serves_leaves_that_grow_where_they_live() -> None:
    """In the caller's own `jax.shard_map`, with JAX's default checks: write, attend, merge part of the heads."""
    mesh, steps, rng = mesh_of((4, 2)), 20, np.random.default_rng(0)
    forest, pool = Forest.from_nodes(*TREE, request_capacity=REQUESTS).spread(PAGES, devices=4)
    forest, pool = forest.reserve(pool, steps)
    assert len(set(pool.homes.of(forest.used_pages).tolist())) == 4
    plan = plan_of(forest, mesh, steps=steps)

    def local(query: Any, key: Any, value: Any, pages: KVPages, forest: Forest, plan: Plan) -> Any:
        first = jax.lax.axis_index("context") * pages.key.shape[0] * 16
        pages = pages.write(forest.slots() - first, key, value)
        out, residuals = forest_attention(query, pages.key, pages.value, forest, plan.local(), return_residuals=True)
        return merge_heads(out, *residuals, "context")[0], pages

    specs = (QUERY, QUERY, QUERY, KV, PartitionSpec(), plan.specs)
    by_all = PartitionSpec(None, None, ("tensor", "context"))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(by_all, KV)), donate_argnums=3)
    _, key_pages, value_pages = arrays_of(0)
    pages = jax.device_put(KVPages(key_pages, value_pages), NamedSharding(mesh, KV))
    whole = [np.array(x.reshape(-1, *x.shape[2:])) for x in (key_pages, value_pages)]
    for _ in range(steps):
        forest = forest.extend()
        query, key, value = (
            rng.normal(size=(REQUESTS, 1, n, HEAD_DIM)).astype(np.float32) for n in (HEADS[0], HEADS[1], HEADS[1])
        )
        out, pages = step(query, key, value, pages, forest, plan)
        for request in range(len(TREE.leaf)):
            slots = forest.context_slots(request)
            for tokens, new in zip(whole, (key, value), strict=True):
                tokens[slots[-1]] = new[request, 0]
            assert_close(out[request], attend_alone(query[request], *(tokens[slots] for tokens in whole)).out)
    assert step._cache_size() == 1


def test_nothing_compiles_as_the_tree_grows_and_plans_balance_the_devices() -> None:
    mesh = mesh_of((4, 2))
    forest, pool = Forest.from_nodes([-1, 0], [4000, 10], [1, 1], request_capacity=4, page_capacity=512).spread(
        512, devices=4
    )
    heads = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": HEAD_DIM}
    plan = make_plan(forest, **heads, homes=pool.homes)
    alone = make_plan(forest, **heads)
    assert call_us(plan) < call_us(alone)
    attend = jax.jit(partial(forest_attention, mesh=mesh))
    shape = (512, 16, 8, HEAD_DIM)
    query, pages = jnp.ones((4, 1, 16, HEAD_DIM)), jnp.ones(shape)
    for _ in range(6):
        assert np.isfinite(attend(query, pages, pages, forest, replan(plan, forest, steps=8))).all()
        forest, pool = forest.reserve(pool, 8)
        forest = forest.extend(8)
        if not forest.active.all():
            forest, _ = forest.fork([0])
    assert attend._cache_size() == 1


# --- Numbers that are no numbers, and refusals ---------------------------------------------------------------------


def test_a_plan_that_does_not_hold_on_one_device_gives_nan_everywhere() -> None:
    mesh = mesh_of((4, 2))
    forest, _ = scattered(TREE, 3)
    plan = plan_of(forest, mesh)
    arrays = arrays_of(3)

    def local(query: Any, key: Any, value: Any, forest: Forest, plan: Plan) -> Any:
        wrong = (jax.lax.axis_index("context") == 2) & (jax.lax.axis_index("tensor") == 1)
        plan = replace(
            plan.local(), guard=replace(plan.guard, structure_hash=plan.guard.structure_hash + wrong.astype(jnp.int32))
        )
        out, residuals = forest_attention(query, key, value, forest, plan, return_residuals=True)
        return merge_heads(out, *residuals, "context")[0]

    specs = (QUERY, KV, KV, PartitionSpec(), plan.specs)
    by_all = PartitionSpec(None, None, ("tensor", "context"))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=by_all))(*arrays, forest, plan)
    nan = np.isnan(out[:5]).all(axis=(0, 1, 3))
    # Heads of the group that the device is in; the other group has no part of it.
    assert nan.tolist() == [False] * 8 + [True] * 8


def test_arrays_that_are_divided_need_a_mesh() -> None:
    forest, _ = scattered(TREE, 4)
    plan, arrays = plan_of(forest, mesh_of((1, 8))), arrays_of(4)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of((1, 8), kind)
        placed = [jax.device_put(x, NamedSharding(mesh, QUERY)) for x in arrays]
        with pytest.raises(ValueError, match=r"query: expected an array of one device, got one .*pass mesh="):
            forest_attention(*placed, forest, plan)
    with pytest.raises(ValueError, match=r"query: expected an array of one device, got one .*pass mesh="):
        jax.jit(forest_attention)(*placed, forest, plan)
    whole = make_plan(forest, num_q_heads=16, num_kv_heads=8, head_dim=HEAD_DIM)
    placed = [jax.device_put(x, NamedSharding(mesh_of((1, 8)), QUERY)) for x in arrays]
    with pytest.raises(ValueError, match=r"got one that jax.jit divides among 8; pass mesh="):
        jax.jit(forest_attention)(*placed, forest, whole)


def test_meshes_and_plans_that_do_not_fit_are_refused() -> None:
    forest, _ = scattered(TREE, 5)
    arrays = arrays_of(5)
    two_by_four, four_by_two = mesh_of((2, 4)), mesh_of((4, 2))
    spread = plan_of(forest, four_by_two)
    with pytest.raises(PlanError, match=r"128 pages on the 2 devices .* got one for 128 on 4; .*devices=2"):
        forest_attention(*arrays, forest, spread, mesh=two_by_four)
    only_context = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    three = jax.make_mesh((3,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:3])
    with pytest.raises(PlanError, match=r"\(1, 16, 8, 16\).*got one for .*\(1, 8, 4, 16\)"):
        forest_attention(*arrays, forest, spread, mesh=only_context)
    with pytest.raises(ValueError, match=r"size divides the 8 kv heads, got 3; use an axis 'context'"):
        forest_attention(*arrays, forest, plan_of(forest, mesh_of((1, 8))), mesh=three)
    with pytest.raises(ValueError, match=r"plan: expected one for one device, got one for 4; pass mesh="):
        forest_attention(*arrays, forest, spread)
    part = (arrays[0][:, :, :8], *(x[:32, :, :4] for x in arrays[1:]))
    with pytest.raises(ValueError, match=r"return_residuals: expected True, .* one of 4 devices"):
        forest_attention(*part, forest, spread.local(1))
    of_all = [x[..., :n, :] for x, n in zip(arrays, (8, 4, 4), strict=True)]
    with pytest.raises(ValueError, match=r"key_pages: expected shape \[num_pages = 32"):
        forest_attention(*of_all, forest, spread.local(1), return_residuals=True)
    x_by_y = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))
    with pytest.raises(ValueError, match=r"mesh: expected an axis 'tensor' or 'context', got 'x', 'y'"):
        forest_attention(*arrays, forest, spread, mesh=x_by_y)
    with pytest.raises(TypeError, match=r"mesh: expected a Mesh, got AbstractMesh"):
        forest_attention(*arrays, forest, spread, mesh=four_by_two.abstract_mesh)
    with pytest.raises(ValueError, match=r"implementation: expected .*got \['xla'\]"):
        forest_attention(*arrays, forest, spread, mesh=four_by_two, implementation=["xla"])
    with pytest.raises(ValueError, match=r"device: expected an integer of at least 0 and below 4, got 4"):
        jax.device_put(spread).local(4)
    with pytest.raises(ValueError, match=r"homes: expected at least the \d+ pages of the forest"):
        make_plan(forest, num_q_heads=4, num_kv_heads=2, head_dim=16, homes=Homes(2, 8))


def test_what_the_host_sees_is_refused_on_a_mesh_as_without() -> None:
    forest, _ = scattered(TREE, 6)
    arrays, mesh = arrays_of(6, 3), mesh_of((1, 8))
    plan = plan_of(forest, mesh, 3)
    with pytest.raises(PlanError, match="plan: expected a plan for this forest, got one for another"):
        forest_attention(*arrays, scattered(TREE, 7)[0], plan, mesh=mesh)
    with pytest.raises(ValueError, match=r"key_pages: expected at least \d+ pages, .* got 8"):
        forest_attention(arrays[0], *(x[:8] for x in arrays[1:]), forest, plan, mesh=mesh)
    drafts = DraftTrees.from_parents(np.full((REQUESTS, 3), -1))
    with pytest.raises(ValueError, match="drafts: expected the 3 candidates of every request in a leaf"):
        forest_attention(*arrays, forest, plan, drafts=drafts, mesh=mesh)
    with pytest.raises(TypeError, match="drafts: expected a DraftTrees, got int"):
        forest_attention(*arrays, forest, plan, drafts=3, mesh=mesh)


def test_a_shard_map_that_leaves_axes_to_jit_is_refused() -> None:
    forest, _ = scattered(TREE, 8)
    mesh = mesh_of((4, 2))
    plan = plan_of(forest, mesh)

    def local(*arguments: Any) -> Any:
        return forest_attention(*arguments[:-1], arguments[-1].local(), return_residuals=True)[0]

    specs = (PartitionSpec(), *[PartitionSpec("context")] * 2, PartitionSpec(), plan.specs)
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), axis_names={"context"})
    with pytest.raises(ValueError, match=r"over all axes, got one that leaves 'tensor' to jax\.jit"):
        jax.jit(step)(*arrays_of(8), forest, plan)


def test_kernels_lower_for_cuda_with_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (HOPPER._replace(why_not=lambda *_: None), XLA))
    context, tensor = 4, 2
    mesh = mesh_of((context, tensor))
    forest = Forest.from_nodes([-1, 0, 0], [300, 20, 30], [1, 2])
    heads = {"num_q_heads": 16 // tensor, "num_kv_heads": 8 // tensor, "head_dim": 128}
    plan = make_plan(
        forest, **heads, num_ctas=132, tile_rows=64, block_tokens=128, lanes=2, homes=Homes(context, 64 // context)
    )
    query, pages = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 16, 128), (64, 16, 8, 128)))
    step = jax.jit(partial(forest_attention, mesh=mesh))
    text = step.trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    assert text.count("stablehlo.all_gather") == 1
