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
from pallas_kernels.addends import Parts, Shares
from pallas_kernels.hopper.add_norm import Factors
from pallas_kernels.hopper.head_rows import HeadSizes, Norm, Places

sys.path.append(str(Path(codec_jax.__file__).parents[1] / "tests"))
from merge_calls import Rows, partials_of

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x2")
mesh = topologies.make_mesh(topology, (2,), ("context",))
everywhere, divided = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("context")
out = jax.ShapeDtypeStruct((16, 1, 32, 128), jnp.bfloat16)
heads = [HeadSizes(8, 4, head_dim, Norm(1e-6, False)) for head_dim in (64, 128, 256)]

@partial(jax.jit, static_argnames="sizes")
def merge(memory, rows, sizes):
    return por(*partials_of(rows, 8), memory, sizes)

def split(x, weights, pages, mailboxes):
    pages, by_part = list(pages), x.reshape(16, 4, 640).swapaxes(0, 1)
    for i, (each, mailbox, (keys, values)) in enumerate(zip(heads, mailboxes, pages, strict=True)):
        columns = each.share(2).num_heads * each.head_dim
        parts = jnp.dot(by_part, weights[0][:640, :columns], preferred_element_type=jnp.float32)
        angles = jnp.ones((16, each.half), jnp.float32)
        scales, slots = jnp.tanh(x[0, : each.head_dim]), jnp.arange(16, dtype=jnp.int32) + i
        places = Places(angles, angles, slots, keys, values)
        query, *pages[i] = mailbox.split_heads(Parts(parts), (scales, scales), places, each)
        x += jnp.pad(query[:, 0], ((0, 0), (0, x.shape[1] - each.head_dim)))
    return x, pages

def turn(i, carry, weights):
    x, pages = carry
    token = x[0, 0].astype(jnp.int32)
    sums, gathers = Mailbox.for_arrays(token, x, 2), Mailbox.for_columns(token + 1, x, [2304, 256], 2)
    merges, norms = Mailbox.for_merges(token + 2, out, 8, 2), Mailbox.for_rows(token + 3, x, 2)
    shares = [jax.ShapeDtypeStruct((16, 1, each.share(2).num_heads, each.head_dim), x.dtype) for each in heads]
    of_heads = [Mailbox.for_heads(token + 4 + i, share, 2) for i, share in enumerate(shares)]
    for mailbox in (sums, gathers, merges, norms, *of_heads):
        x += mailbox.opened.astype(x.dtype)
    x = lax.psum(x, "context")
    for _ in range(3):
        x = sums.add_up(jnp.tanh(x @ weights[0])) + gathers.collect(jnp.tanh(x @ weights[0]), [2304, 256])[:, :2560]
        rows = jnp.ones(out.shape[:3], jnp.float32)
        merged, _, _ = merges._run(merge, Rows(jnp.tile(x, 2)[:, : 32 * 128].reshape(out.shape), rows, rows))
        share = jnp.dot(x.reshape(16, 4, 640).swapaxes(0, 1), weights[0][:640], preferred_element_type=jnp.float32)
        factors = Factors(None, jnp.tanh(x.max(0)))
        x, normed = norms.add_up_and_norm(x, Parts(share), factors, Norm(1e-6, False))
        places = jnp.arange(32, dtype=jnp.int32).reshape(16, 2)
        shares = Shares(jnp.tile(normed, (2, 1)), places, jnp.ones(places.shape, jnp.float32))
        x, normed = norms.add_up_and_norm(x, shares, factors, Norm(1e-6, False))
        x, normed = norms.add_up_and_norm(x, Parts(normed[None]), Factors(*factors[::-1]), Norm(1e-6, False))
        x += normed + jnp.pad(merged.reshape(16, -1), ((0, 0), (0, x.shape[1] - 16 * 128)))
        x, pages = split(x, weights, pages, of_heads)
    return x, pages

def steps(x, weights, pages):
    return lax.fori_loop(0, 4, lambda i, carry: turn(i, carry, weights), (x, pages))

def make(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))

specs = (everywhere, divided, divided), (everywhere, divided)
loop = jax.shard_map(steps, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
pages = [[make((514, 8, each.num_kv_heads, each.head_dim), divided)] * 2 for each in heads]
given = make((16, 2560), everywhere), make((2, 2560, 2560), divided), pages
print(jax.jit(loop, donate_argnums=2).lower(*given).compile().as_text())
"""


def test_each_step_has_memory_of_its_own_that_stays_where_it_is() -> None:
    said = check_on_hopper(COMPILE, GPUS["sm_90"].target, kernels=15)  # six make mailboxes, by their sizes
    computations = re.split(r"\n(?=%|ENTRY)", said)
    [body] = [text for text in computations if "mosaic_gpu_v2" in text]
    assert not body.startswith("ENTRY")  # made in each turn of the loop
    # Seven that are made, and calls in each of three layers. None reads a copy of what others write to.
    assert body.count('custom_call_target="mosaic_gpu_v2"') == 7 + 3 * 9
    # Nor are pages copied: K and V go to those that the step is given.
    assert "bf16[257,8,4,64]" in said
    assert not [line for line in said.splitlines() if re.search(r"= bf16\[(257|2056),\S* copy\(", line)]
    assert "dynamic-slice-fusion" not in said
    assert not [line for line in said.splitlines() if re.search(r"= s32\[\d{4,}\]\S* copy\(", line)]
