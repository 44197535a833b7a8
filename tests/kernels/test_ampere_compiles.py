"""The kernels for GPUs since Ampere as machine code of each of them: registers, spills and shared memory.

No GPU is needed, but CUDA's compiler, as the wheels of jax[cuda13] bring it. A process compiles for one GPU only.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pallas_kernels.ampere.tiling import SHARED_KIB
from pallas_kernels.compat import LINKS_KERNELS

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip("compiling for GPUs needs the wheels of jax[cuda13]", allow_module_level=True)


class Gpu(NamedTuple):
    """The facts that XLA asks of a GPU that is not there."""

    name: str
    capability: str
    multiprocessors: int
    shared_per_core: int
    l2_bytes: int
    features: str = ""

    @property
    def target(self) -> str:
        major, minor = self.capability.split(".")
        return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {self.shared_per_core} threads_per_core_limit: 1536 core_count: {self.multiprocessors}
          fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: 1000000000000 l2_cache_size: {self.l2_bytes} clock_rate_ghz: 1.5
          device_memory_size: 25769803776 shared_memory_per_block_optin: {SHARED_KIB[self.capability] * 1024}
          cuda_compute_capability {{ major: {major} minor: {minor} {self.features} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 driver_version: "13.0.0"
          runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.name}"
        """


ACCELERATED = "feature_extension: ACCELERATED_FEATURES"
GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 167936, 41943040),
    "sm_86": Gpu("NVIDIA GeForce RTX 3090", "8.6", 82, 102400, 6291456),
    "sm_89": Gpu("NVIDIA GeForce RTX 4090", "8.9", 128, 102400, 75497472),
    "sm_90": Gpu("NVIDIA H200", "9.0", 132, 233472, 52428800, ACCELERATED),
    "sm_100": Gpu("NVIDIA B200", "10.0", 148, 233472, 132120576, ACCELERATED),
    "sm_120": Gpu("NVIDIA GeForce RTX 5090", "12.0", 170, 102400, 100663296, ACCELERATED),
}
DIMS = (64, 96, 128, 256)
#: Bytes of a thread's registers that may go to memory: 128 registers are accumulators where a segment has two tiles, or
#: heads have 256 columns.
SPILLED = {("sm_100", 256): 16, ("sm_120", 256): 32}
SPILLED |= {(name, dim): 64 for name in ("sm_86", "sm_89", "sm_90") for dim in (64, 96, 128)}
SPILLED |= {("sm_120", dim): 128 for dim in (64, 96, 128)}

COMPILE = """
import json, sys
from types import SimpleNamespace
from unittest import mock
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core, utils
from kernel_calls import Heads, plan_of
from test_ampere import attend_ampere
from codec_jax import Forest
from pallas_kernels import AMPERE
from pallas_kernels import Heads as AllHeads

target, capability, multiprocessors, calls = json.loads(sys.argv[1])
topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
here = jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec())
device = SimpleNamespace(compute_capability=capability, core_count=multiprocessors, platform="gpu")
shared = core._smem_tree_size
def count(tree):
    print("SHARED", shared(tree), file=sys.stderr, flush=True)
    return shared(tree)
with mock.patch.object(utils, "_infer_arch", lambda: tuple(map(int, capability.split(".")))), \\
     mock.patch.object(core, "_smem_tree_size", count):
    for dim, tokens, window in calls:
        tiling = AMPERE.tiling(AllHeads(32, 8, dim, dim), device)
        forest = Forest.from_nodes([-1, 0], [200, 40], [1] * 9)
        plan = plan_of(forest, Heads(32, 8, dim), query_tokens=tokens, window=window, num_ctas=tiling.num_ctas,
                       block_tokens=tiling.block_tokens[0], lanes=tiling.lanes)
        shapes = (9, tokens, 32, dim), (64, plan.arrays.page_tokens, 8, dim)
        arrays = *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), forest, plan
        arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arrays)
        print("HEADS", dim, file=sys.stderr, flush=True)
        jax.jit(attend_ampere).lower(*arrays).compile()
"""


#: As docs/your-gpu.md says; some GPUs have registers enough all the same.
fails_where_kernels_are_linked = pytest.mark.xfail(
    LINKS_KERNELS, reason="JAX 0.12 compiles kernels to be linked, which leaves them too few registers"
)


@fails_where_kernels_are_linked
@pytest.mark.parametrize("name", GPUS)
def test_kernels_compile_and_fit(name: str) -> None:
    gpu, tests = GPUS[name], Path(__file__).parents[1]
    calls = [(dim, tokens, window) for dim in DIMS for tokens, window in ((1, None), (4, 100))]
    paths = os.pathsep.join([str(tests), str(tests / "kernels"), str(tests.parent)])
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    argument = json.dumps([gpu.target, gpu.capability, gpu.multiprocessors, calls])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, argument], env=environment, capture_output=True, text=True, timeout=600
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    shared = [int(size) for size in re.findall(r"SHARED (\d+)", said)]
    assert len(shared) == 2 * len(calls)
    assert max(shared) <= SHARED_KIB[gpu.capability] * 1024
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == 2 * len(calls)
    spilled = [int(size) for size in re.findall(r"stack frame, (\d+) bytes spill stores", said)]
    print(f"{name}: registers {registers}, spilled {spilled}, shared {shared}")
    by_dim = {dim: max(spilled[4 * i : 4 * i + 4]) for i, dim in enumerate(DIMS)}
    assert len(spilled) == 2 * len(calls)
    assert all(size <= SPILLED.get((name, dim), 0) for dim, size in by_dim.items()), by_dim
