"""The Hopper kernels: lowered for CUDA on any machine, and compared with dense attention where there is such a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax import Forest, PagePool, Plan, mosaic
from codec_jax import make_plan as plan_for_device
from codec_jax.attention import forest_attention
from pallas_kernels import pac_mosaic, por_mosaic

PAGES = 160
attend = jax.jit(forest_attention, static_argnames=("implementation", "return_residuals"))


def make_plan(forest: Forest, heads: tuple[int, int, int], **options: int) -> Plan:
    q_heads, kv_heads, head_dim = heads
    sizes = {"tile_rows": 64, "block_tokens": 128, "num_ctas": 132, "block_capacity": 256} | options
    return plan_for_device(forest, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, **sizes)


def shapes(*named: tuple[tuple[int, ...], jnp.dtype]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in named]


# ---------------------------------------------------------------------- on any machine


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 8), (128, 8), (128, 1)])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_pac_lowers_for_cuda(dtype, head_dim, kv_heads, page_size):
    slots, blocks, segments, integer = 128 // page_size, 20, 140, jnp.int32
    arguments = shapes(
        ((kv_heads, 128, head_dim), dtype),
        *[((64, page_size, kv_heads, head_dim), dtype)] * 2,
        ((blocks, slots), integer),
        ((blocks * 128,), integer),
        *[((segments,), integer)] * 5,
        ((133,), integer),
    )

    def pac(query, key, value, page_id, columns, *plan):
        return pac_mosaic.pac(query, key, value, page_id, columns, pac_mosaic.Segments(*plan), scale=0.1)

    lowered = jax.jit(pac).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_por_lowers_for_cuda(dtype, head_dim):
    arguments = shapes(
        ((280, 64, head_dim), jnp.float32),
        *[((280, 64), jnp.float32)] * 2,
        ((17,), jnp.int32),
        ((140,), jnp.int32),
    )
    por = partial(por_mosaic.por, num_kv_heads=8, dtype=dtype)
    lowered = jax.jit(por).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says why there is no Hopper GPU; here may be one")
def test_without_a_hopper_gpu_the_reason_is_the_device():
    forest = Forest.from_nodes([-1], [20], [0])
    query, pages = jnp.zeros((1, 1, 8, 64), jnp.bfloat16), jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    plan = make_plan(forest, (8, 2, 64))
    assert "Hopper" in mosaic.why_not(query, pages, plan)
    with pytest.raises(ValueError, match=r"implementation: 'mosaic' cannot serve: .*Hopper.*'xla'"):
        forest_attention(query, pages, pages, forest, plan, implementation="mosaic")


# ---------------------------------------------------------------------- on a Hopper GPU


def check(forest: Forest, heads: tuple[int, int, int], dtype: jnp.dtype, seed: int, plan: Plan | None = None) -> None:
    """Compare with dense attention of each request over its own KV; what no request reads is huge."""
    q_heads, kv_heads, head_dim = heads
    rng = np.random.default_rng(seed)
    query = jnp.asarray(rng.normal(size=(forest.request_capacity, 1, q_heads, head_dim)), dtype)
    keys, values = np.full((2, PAGES * forest.page_size, kv_heads, head_dim), 1e4, np.float32)
    contexts = [forest.context_slots(request) for request in range(forest.request_capacity)]
    read = np.unique(np.concatenate(contexts))
    keys[read], values[read] = rng.normal(size=(2, len(read), kv_heads, head_dim))
    key, value = (jnp.asarray(x, dtype).reshape(PAGES, forest.page_size, kv_heads, head_dim) for x in (keys, values))
    plan = make_plan(forest, heads) if plan is None else plan
    out, (row_max, row_sum) = attend(query, key, value, forest, plan, implementation="mosaic", return_residuals=True)
    exact_q, exact_k, exact_v = (np.asarray(x, np.float64) for x in (query, key, value))
    group = q_heads // kv_heads
    for request, slots in enumerate(contexts):
        if not len(slots):
            assert not np.asarray(out[request]).any()
            assert not np.asarray(row_sum[request]).any()
            continue
        k = np.repeat(exact_k.reshape(-1, kv_heads, head_dim)[slots], group, axis=1)
        v = np.repeat(exact_v.reshape(-1, kv_heads, head_dim)[slots], group, axis=1)
        scores = np.einsum("nh,snh->ns", exact_q[request, 0], k) / np.sqrt(head_dim)
        most = scores.max(axis=1)
        weights = np.exp(scores - most[:, None])
        expected = np.einsum("ns,snh->nh", weights, v) / weights.sum(axis=1)[:, None]
        # The kernel rounds the weights and the result to the dtype.
        tolerance = 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(out[request, 0], np.float64), expected, atol=tolerance, rtol=tolerance)
        logsumexp = np.asarray(row_max[request, 0]) + np.log(np.asarray(row_sum[request, 0]))
        np.testing.assert_allclose(logsumexp, most + np.log(weights.sum(axis=1)), atol=1e-4)


@pytest.mark.gpu
@settings(max_examples=40)
@given(trees(max_nodes=10, max_length=150, max_requests=8), st.integers(0, 2**32 - 1))
def test_random_forests_equal_dense_attention(tree: Tree, seed: int):
    forest = Forest.from_nodes(*tree, request_capacity=10, node_capacity=32)
    check(forest.rebuild(entry_capacity=PAGES), (32, 8, 128), jnp.bfloat16, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("heads", [(8, 8, 64), (32, 8, 128), (16, 1, 128), (6, 3, 64)])
def test_layouts_equal_dense_attention(heads, page_size, dtype):
    tree = Tree([-1, 0, 0, 1, -1, 4], [300, 40, 0, 129, 1, 64], [3, 2, 1, 3, 5, 4, 0])
    check(Forest.from_nodes(*tree, page_size=page_size, request_capacity=9), heads, dtype, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ctas", [1, 3, 132])
def test_any_number_of_thread_blocks_and_many_requests(num_ctas):
    tree = Tree([-1, *[0] * 100], [200, *range(100)], list(range(100, 0, -1)))
    forest = Forest.from_nodes(*tree, page_size=64)
    check(forest, (16, 2, 64), jnp.bfloat16, 2, make_plan(forest, (16, 2, 64), num_ctas=num_ctas))


@pytest.mark.gpu
def test_one_plan_serves_leaves_that_grow():
    forest = Forest.from_nodes([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), 20)
    plan = make_plan(forest, (32, 8, 128), steps=20)
    for step in range(3):
        check(forest, (32, 8, 128), jnp.bfloat16, step, plan)
        forest = forest.extend(10) if step < 2 else forest


@pytest.mark.gpu
def test_results_are_the_same_from_run_to_run():
    forest = Forest.from_nodes([-1, *[0] * 16], [1500, *[50] * 16], list(range(1, 17)))
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (16, 1, 32, 128), jnp.bfloat16)
    key, value = (jax.random.normal(k, (PAGES, 16, 8, 128), jnp.bfloat16) for k in keys[1:])
    plan = make_plan(forest, (32, 8, 128))
    first, *others = (attend(query, key, value, forest, plan, implementation="mosaic") for _ in range(4))
    assert all((other == first).all() for other in others)


@pytest.mark.gpu
def test_a_page_size_that_does_not_divide_a_block_is_left_to_xla():
    forest = Forest.from_nodes([-1], [40], [0], page_size=24)
    query, pages = jnp.ones((1, 1, 8, 128), jnp.bfloat16), jnp.ones((4, 24, 2, 128), jnp.bfloat16)
    plan = make_plan(forest, (8, 2, 128))
    np.testing.assert_allclose(np.asarray(attend(query, pages, pages, forest, plan), np.float32), 1.0)
    with pytest.raises(ValueError, match="page sizes that divide 128, got 64 rows and blocks of 120 tokens"):
        forest_attention(query, pages, pages, forest, plan, implementation="mosaic")


@pytest.mark.gpu
def test_none_chooses_the_kernels_where_they_serve():
    forest = Forest.from_nodes([-1], [40], [0])
    query, pages = jnp.zeros((1, 1, 8, 128), jnp.bfloat16), jnp.zeros((4, 16, 2, 128), jnp.bfloat16)
    plan = make_plan(forest, (8, 2, 128))
    assert "mosaic" in attend.lower(query, pages, pages, forest, plan).as_text()
    exact = [x.astype(jnp.float32) for x in (query, pages, pages)]
    assert "mosaic" not in attend.lower(*exact, forest, plan).as_text()
    with pytest.raises(ValueError, match="cannot serve: it takes bfloat16 or float16"):
        forest_attention(*exact, forest, plan, implementation="mosaic")
