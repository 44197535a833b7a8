"""PAC over pages of 16 bits as machine code of an H200: registers and spills.

No GPU is needed, but CUDA's compiler, as the wheels of jax[cuda13] bring it. A process compiles for one GPU only. What
the warpgroups that load and prepare have to spill, all others wait for.
"""

import re

from machine_code import check_on_hopper, compiled
from test_ampere_compiles import GPUS, fails_where_kernels_are_linked

SETUP = """
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock
import jax, jax.numpy as jnp
from jax.experimental import topologies
from codec_jax import Forest, make_plan
from codec_jax.attention import forest_attention

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x1")
here = jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec())
device = SimpleNamespace(compute_capability="9.0", core_count=132, platform="gpu", device_kind="NVIDIA H200")
def make(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)
forest = Forest.from_nodes([-1] + [0] * 64, [32768] + [1024] * 64, list(range(1, 65)), page_size=16)
num_pages = int(forest.used_pages.max()) + 1
"""

COMPILE = f"""{SETUP}
with mock.patch.object(jax, "devices", lambda: [device]):
    for dim, value_dim, block, softcap in (
        (64, 64, 128, None), (128, 128, 128, None), (128, 128, 64, None), (128, 128, 128, 50.0), (192, 128, 64, None),
    ):
        plan = make_plan(
            forest, num_q_heads=32, num_kv_heads=8, head_dim=dim, value_head_dim=value_dim, block_tokens=block
        )
        assert plan.arrays.used_segments.is_wide.any()
        arrays = jax.tree.map(lambda x: make(x.shape, x.dtype), (forest, plan))
        query, *pages = make((64, 1, 32, dim)), make((num_pages, 16, 8, dim)), make((num_pages, 16, 8, value_dim))
        attend = jax.jit(partial(forest_attention, implementation="mosaic", softcap=softcap))
        attend.lower(query, *pages, *arrays).compile()
        print("CASE", flush=True)
"""


@fails_where_kernels_are_linked
def test_attention_compiles_without_spills_and_products_of_wide_segments_overlap() -> None:
    said = check_on_hopper(COMPILE, GPUS["sm_90"].target, kernels=10)  # two a call
    assert said.count("CASE") == 5


# Rows of a kv head have several sinks, or one.
COMPILE_SINKS = f"""{SETUP}
with mock.patch.object(jax, "devices", lambda: [device]):
    for kv_heads, dtype in (8, jnp.bfloat16), (32, jnp.float32):
        plan = make_plan(forest, num_q_heads=32, num_kv_heads=kv_heads, head_dim=128)
        arrays = jax.tree.map(lambda x: make(x.shape, x.dtype), (forest, plan))
        query, pages, sinks = make((64, 1, 32, 128)), make((num_pages, 16, kv_heads, 128)), make((32,), dtype)
        attend = jax.jit(lambda *arrays, sinks: forest_attention(*arrays, sinks=sinks, implementation="mosaic"))
        attend.lower(query, pages, pages, *arrays, sinks=sinks).compile()
        print("CASE", flush=True)
"""


def test_sinks_compile_whatever_rows_have_in_common() -> None:
    assert compiled(COMPILE_SINKS, GPUS["sm_90"].target, kernels=4).count("CASE") == 2


# Where rows are in their contexts, which masks then ask for.
COMPILE_POSITIONS = f"""{SETUP}
with mock.patch.object(jax, "devices", lambda: [device]):
    for tokens, window in (1, 1024), (4, None), (4, 1024):
        plan = make_plan(forest, num_q_heads=32, num_kv_heads=8, head_dim=128, query_tokens=tokens, window=window)
        arrays = jax.tree.map(lambda x: make(x.shape, x.dtype), (forest, plan))
        query, pages = make((64, tokens, 32, 128)), make((num_pages, 16, 8, 128))
        attend = jax.jit(partial(forest_attention, implementation="mosaic"))
        program = attend.lower(query, pages, pages, *arrays).compile().as_text()
        print("FUSIONS", program[program.index("ENTRY") :].count(" fusion("), flush=True)
"""


def test_windows_and_causal_masks_need_no_kernels_but_those_of_attention() -> None:
    said = compiled(COMPILE_POSITIONS, GPUS["sm_90"].target, kernels=6)
    assert re.findall(r"FUSIONS (\d+)", said) == ["0"] * 3
