"""Attention inside `jax.shard_map`, with its checks of which values vary along which device axes switched on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import Layout, attend_each, forest_of
from forests import Tree, contexts
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_calls import Heads, attend_hopper, plan_of

from codec_jax import Forest
from codec_jax.attention import forest_attention

HEADS = PartitionSpec(None, None, "heads", None)
TREE = Tree([-1, 0, 0, 1], [150, 20, 9, 40], [1, 2, 3, 3])


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])


@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("sharded", [True, False], ids=["kv heads on two devices", "the same on two devices"])
def test_sharded_attention_is_exact(mesh: jax.sharding.Mesh, sharded: bool, query_tokens: int) -> None:
    layout = Layout(num_q_heads=8, num_kv_heads=4, query_tokens=query_tokens)
    spec = HEADS if sharded else PartitionSpec()
    # The plan is for the heads of one device.
    plan = (
        layout._replace(num_q_heads=4, num_kv_heads=2).plan(forest_of(TREE))
        if sharded
        else layout.plan(forest_of(TREE))
    )
    arrays = layout.arrays(np.random.default_rng(0))

    def local(*args):
        return forest_attention(*args, implementation="xla", return_residuals=True)

    specs = (spec, spec, spec, PartitionSpec(), PartitionSpec())
    residual = PartitionSpec(*spec[:3])
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(spec, (residual, residual))))
    out, (row_max, row_sum) = step(*jax.device_put(arrays, NamedSharding(mesh, spec)), forest_of(TREE), plan)
    want = attend_each(*arrays, contexts(TREE, layout.page_size))
    np.testing.assert_allclose(out, want.out, atol=1e-5)
    np.testing.assert_allclose(row_max, want.max, rtol=1e-5)
    np.testing.assert_allclose(row_sum, want.sum, rtol=1e-4)


def test_sharded_kernels_lower_for_cuda(mesh: jax.sharding.Mesh) -> None:
    forest = Forest.from_nodes([-1, 0, 0], [300, 20, 30], [1, 2])
    plan = plan_of(forest, Heads(8, 2, 128), block_tokens=128)
    specs = (HEADS, HEADS, HEADS, PartitionSpec(), PartitionSpec())
    step = jax.jit(jax.shard_map(attend_hopper, mesh=mesh, in_specs=specs, out_specs=HEADS))
    query, pages = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 16, 128), (64, 16, 4, 128)))
    text = step.trace(query, pages, pages, forest, plan).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
