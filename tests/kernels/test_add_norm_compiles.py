"""Sums and norms as machine code of an H200: a thread's numbers fit its registers.

No GPU is needed, but CUDA's compiler, as the wheels of jax[cuda13] bring it. A process compiles for one GPU only.
"""

from machine_code import check_on_hopper
from test_ampere_compiles import GPUS

COMPILE = """
import sys
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from pallas_kernels.addends import Parts, Shares
from pallas_kernels.hopper.add_norm import Factors, add_and_norm
from pallas_kernels.hopper.head_rows import Norm

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x1")
here = jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec())
def make(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)
def compiles(width, update):
    for norms in (False, True), (True, True), (True, False):
        run = jax.jit(partial(add_and_norm, norm=Norm(1e-6, False)))
        factors = Factors(*(make((width,)) if norm else None for norm in norms))
        run.lower(make((16, width)), update, factors).compile()
for width, parts in (896, 8), (2560, 8), (5120, 8), (8192, 2):
    compiles(width, Parts(make((parts, 16, width), jnp.float32)))
compiles(2880, Parts(make((8, 16, 2880), jnp.float32), make((2880,))))
for width, chosen in (2880, 4), (2048, 8), (4096, 8):
    compiles(width, Shares(make((288, width)), make((16, chosen), jnp.int32), make((16, chosen), jnp.float32)))
"""


def test_sums_and_norms_compile_without_spills() -> None:
    check_on_hopper(COMPILE, GPUS["sm_90"].target, kernels=24)
