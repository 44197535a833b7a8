"""Exchanges between devices as machine code of H200s, in a loop of steps: what XLA may not do with their memory.

No GPU is needed, but CUDA's compiler, as the wheels of jax[cuda13] bring it. A process compiles for one GPU only.
"""

import re

from machine_code import check_on_hopper
from test_ampere_compiles import GPUS

COMPILE = """
import sys
from functools import partial
from pathlib import Path
import codec_jax, jax, jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from codec_jax.nnx.mailboxes import Mailbox
from pallas_kernels.between_devices.por import por
from pallas_kernels.hopper.head_rows import Norm

sys.path.append(str(Path(codec_jax.__file__).parents[1] / "tests"))
from merge_calls import Rows, partials_of

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x2")
mesh = topologies.make_mesh(topology, (2,), ("context",))
everywhere, divided = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("context")
out = jax.ShapeDtypeStruct((16, 1, 32, 128), jnp.bfloat16)

@partial(jax.jit, static_argnames="sizes")
def merge(memory, rows, sizes):
    return por(*partials_of(rows, 8), memory, sizes)

def turn(i, x, weights):
    token = x[0, 0].astype(jnp.int32)
    sums, gathers = Mailbox.for_arrays(token, x, 2), Mailbox.for_columns(token + 1, x, [2304, 256], 2)
    merges, norms = Mailbox.for_merges(token + 2, out, 8, 2), Mailbox.for_rows(token + 3, x, 2)
    for mailbox in (sums, gathers, merges, norms):
        x += mailbox.opened.astype(x.dtype)
    x = lax.psum(x, "context")
    for _ in range(3):
        x = sums.add_up(jnp.tanh(x @ weights[0])) + gathers.collect(jnp.tanh(x @ weights[0]), [2304, 256])[:, :2560]
        rows = jnp.ones(out.shape[:3], jnp.float32)
        merged, _, _ = merges._run(merge, Rows(jnp.tile(x, 2)[:, : 32 * 128].reshape(out.shape), rows, rows))
        share = jnp.dot(x.reshape(16, 4, 640).swapaxes(0, 1), weights[0][:640], preferred_element_type=jnp.float32)
        x, normed = norms.add_up_and_norm(x, share, jnp.tanh(x.max(0)), Norm(1e-6, False))
        x += normed + jnp.pad(merged.reshape(16, -1), ((0, 0), (0, x.shape[1] - 16 * 128)))
    return x

def steps(x, weights):
    return lax.fori_loop(0, 4, lambda i, x: turn(i, x, weights), x)

def make(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))

loop = jax.shard_map(steps, mesh=mesh, in_specs=(everywhere, divided), out_specs=everywhere, check_vma=False)
print(jax.jit(loop).lower(make((16, 2560), everywhere), make((2, 2560, 2560), divided)).compile().as_text())
"""


def test_each_step_has_memory_of_its_own_that_stays_where_it_is() -> None:
    said = check_on_hopper(COMPILE, GPUS["sm_90"].target, kernels=7)  # three make mailboxes, by their sizes
    computations = re.split(r"\n(?=%|ENTRY)", said)
    [body] = [text for text in computations if "mosaic_gpu_v2" in text]
    assert not body.startswith("ENTRY")  # made in each turn of the loop
    # Four that are made, and twelve calls. None reads a copy of what others write to.
    assert body.count('custom_call_target="mosaic_gpu_v2"') == 4 + 12
    assert not [line for line in said.splitlines() if re.search(r"= s32\[\d{4,}\]\S* copy\(", line)]
