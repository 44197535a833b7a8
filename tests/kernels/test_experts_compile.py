"""The kernels for mixtures as machine code of an H200: registers, spills, shared memory, and products that overlap.

No GPU is needed, but CUDA's compiler, as the wheels of jax[cuda13] bring it. A process compiles for one GPU only.
"""

from machine_code import check_on_hopper
from test_ampere_compiles import GPUS

COMPILE = """
import re, sys
from functools import partial
from types import SimpleNamespace
from unittest import mock
import jax, jax.numpy as jnp
from jax.experimental import topologies
from codec_jax.nnx import expert_products
from codec_jax.nnx.expert_products import Chosen, Weights
from pallas_kernels.addends import Parts
from pallas_kernels.hopper.choose import choose

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x1")
here = jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec())
device = SimpleNamespace(compute_capability="9.0", core_count=132, platform="gpu")
def make(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)
with mock.patch.object(expert_products.jax, "devices", lambda: [device]):
    cases = (64, 128, 8, 2048, 768, "silu"), (16, 32, 4, 2880, 2880, "clamped")
    for tokens, count, chosen, hidden, size, activation in cases:
        biases = [make((count, 2 * size)), make((count, hidden))] if activation == "clamped" else []
        weights = Weights(make((count, hidden, 2 * size)), make((count, size, hidden)), *biases)
        each = Chosen(make((tokens, chosen), jnp.int32), make((tokens, chosen), jnp.float32))
        run = jax.jit(expert_products.map_tokens, static_argnames="activation")
        text = run.lower(make((tokens, hidden)), each, weights, activation).compile().as_text()
        # Weights go to the kernels as they are.
        assert set(re.findall(rf" = bf16\\[{count},\\S+ ([\\w-]+)\\(", text)) == {"parameter"}
for parts, tokens, count, chosen in (32, 64, 128, 8), (45, 16, 32, 4), (1, 7, 512, 10):
    scores = Parts(make((parts, tokens, count), jnp.float32), make((count,)))
    jax.jit(partial(choose, dtype=jnp.bfloat16, chosen=chosen, normalised=True)).lower(scores).compile()
"""


def test_the_kernels_compile_without_spills_and_their_products_overlap() -> None:
    check_on_hopper(COMPILE, GPUS["sm_90"].target, kernels=9)
