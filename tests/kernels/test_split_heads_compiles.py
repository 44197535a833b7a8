"""The kernel that splits heads as machine code of an H200: registers, and what XLA may not do with pages.

No GPU is needed, but CUDA's compiler, as the wheels of jax[cuda13] bring it. A process compiles for one GPU only.
"""

from machine_code import check_on_hopper
from test_ampere_compiles import GPUS

COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from pallas_kernels.addends import Parts
from pallas_kernels.hopper.head_rows import HeadSizes, Norm, Places, split_heads

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x1")
here = jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec())
def make(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

sizes = HeadSizes(8, 4, 128, Norm(1e-6, False))
def run(columns, scales, cos, sin, slots, keys, values):
    def split(pages):
        return split_heads(Parts(columns), (scales, scales), Places(cos, sin, slots, *pages), sizes)
    one = split((keys[1], values[1]))
    return one, jax.lax.scan(lambda _, pages: (None, split(pages)), None, (keys, values))

pages = make((3, 64, 8, 4, 128))
angles = make((16, 64), jnp.float32)
given = make((1, 16, sizes.num_heads * 128)), make((128,)), angles, angles, make((16,), jnp.int32), pages, pages
print(jax.jit(run).lower(*given).compile().as_text())
"""


def test_pages_that_are_some_of_an_array_are_copied_from_it_and_not_written_to_where_they_are() -> None:
    said = check_on_hopper(COMPILE, GPUS["sm_90"].target, kernels=1)
    assert said.count('custom_call_target="mosaic_gpu_v2"') == 2
    assert said.count("output_to_operand_aliasing={{1}: (") == 2
    # XLA would let the kernel have the whole array, forget that results are where operands are, and return anything.
    assert "dynamic-slice-fusion" not in said
