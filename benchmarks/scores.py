"""Time forest_attention as models vary it: softcap, sinks, a window, pages of one byte a number; beside it plain.

    python -m benchmarks.scores --json benchmarks/results/scores.json
    python -m benchmarks.scores --peers --json benchmarks/results/scores.json

Every variant runs on the same forest and numbers, one after the other, and is held to float32 attention of its own; and
so are FlashInfer's kernels with `--peers`, those that have the variant. Times are those of benchmarks/attention.py. The
roofline counts what a variant needs: tokens that a window shows, and bytes of the pages' dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks.arguments import how_many
from benchmarks.attention import bounds
from benchmarks.ceilings import ceilings
from benchmarks.inputs import MIN_BLOCKS, MIN_CONTEXT, Inputs, Layout, Variant, check, make_inputs, padded_slots
from benchmarks.peers import FLASHINFER, Peers
from benchmarks.report import conclude
from benchmarks.rows import collect, conditions, found_or_measured, measured_before
from benchmarks.timing import command, kernel_time, parse
from benchmarks.turns import GPU, compiled_once
from benchmarks.workloads import PAPER, PROBE, Workload
from codec_jax import Window, make_plan
from codec_jax.arrays import bucket
from codec_jax.attention import forest_attention

#: The plain one first, whose time the others' are compared with.
VARIANTS = {
    "plain": Variant(),
    "softcap 50": Variant(softcap=50.0),
    "sinks": Variant(sinks=True),
    "window 1024": Variant(window=1024),
    "float8_e4m3fn": Variant(kv_dtype=jnp.float8_e4m3fn),
}


def main() -> None:
    """Measure the probes and the paper's sweeps."""
    parser = command(__doc__, resumes=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--heads", default="32/8", help="q heads / kv heads")
    parser.add_argument("--head-dim", type=how_many, default=128)
    parser.add_argument("--implementation", default="mosaic")
    parser.add_argument("--repeats", type=how_many, default=15)
    parser.add_argument("--quick", action="store_true", help="the probes only")
    parser.add_argument("--peers", action="store_true", help="FlashInfer, too; it compiles kernels at first")
    arguments = parse(parser)
    before = measured_before(arguments.json, arguments.resume)
    workloads = PROBE if arguments.quick else PROBE + PAPER
    rows = collect(measure_all(workloads, arguments, before), arguments.json, before)
    conclude("scores", rows, arguments.json, [f"{row['name']}, {row['variant']}" for row in rows if "error" in row])


def measure_all(workloads: Sequence[Workload], arguments: argparse.Namespace, before: list[dict]) -> Iterator[dict]:
    """Yield a row for every variant on every forest; one that fails says why, and does not end it.

    What is among the rows measured `before` stays as it is.
    """
    layout = Layout(*map(int, arguments.heads.split("/")), arguments.head_dim)
    peers, packages = (Peers(FLASHINFER), ("torch", "flashinfer-python")) if arguments.peers else (None, ())
    for workload in tqdm(workloads):
        inputs = cache(partial(make_inputs, workload, layout))
        for name in arguments.variants:
            variant = VARIANTS[name]
            known = {"name": workload.name, "variant": name, "implementation": arguments.implementation}
            known |= conditions(layout, *packages) | {"dtype": jnp.dtype(variant.kv_dtype).name}
            asked = arguments.implementation, arguments.repeats, peers
            with GPU.taken():
                yield found_or_measured(before, known, partial(measure, workload, inputs, layout, variant, *asked))
    if peers:
        peers.close()


def bounds_of(workload: Workload, inputs: Inputs, layout: Layout, variant: Variant) -> dict:
    """Count the tokens that a variant sees, and what reading each once, or multiplying, takes at least."""
    forest, plain = inputs.forest, bounds(workload, inputs.forest, layout)
    if variant.window is None:
        unique, total = plain["unique_tokens"], plain["total_tokens"]
    else:
        read = forest.row_hi > forest.row_lo
        hidden = forest.hidden_by(Window(variant.window))
        unique = int(np.maximum(forest.length - hidden, 0)[read].sum())
        total = int(np.minimum(forest.request_length, variant.window).sum())
    numbers = len(workload.leaf) * layout.num_q_heads * layout.head_dim
    size = unique * layout.kv_token_bytes * jnp.dtype(variant.kv_dtype).itemsize // 2
    most, operations = ceilings(), 4 * total * layout.num_q_heads * layout.head_dim
    roofline = max((size + 4 * numbers) / most.read_bytes_per_us, operations / most.flops_per_us)
    return plain | {"unique_tokens": unique, "total_tokens": total, "unique_bytes": size, "roofline_us": roofline}


def measure(
    workload: Workload,
    drawn: Callable[[], Inputs],
    layout: Layout,
    variant: Variant,
    implementation: str,
    repeats: int,
    peers: Peers | None = None,
) -> dict:
    """Check a variant and time its kernels, and those of peers that have it."""
    inputs = drawn()
    found = bounds_of(workload, inputs, layout, variant)
    key_pages, value_pages = (variant.stored(pages) for pages in inputs[2:])
    inputs = inputs._replace(key_pages=key_pages, value_pages=value_pages)
    sinks, expected = variant.sinks_of(layout.num_q_heads), reference(inputs, variant)
    options = {"window": variant.window, "kv_dtype": variant.kv_dtype, "block_capacity": MIN_BLOCKS}
    plan = make_plan(inputs.forest, **layout.heads, **options)
    on_device = jax.device_put((*inputs[1:], inputs.forest, plan, sinks))
    attend = compiled_once(_attend_with(implementation, variant.softcap), *on_device, tuned=implementation == "xla")
    error = check(attend(*on_device), expected)
    kernel_us, launches = kernel_time(lambda: attend(*on_device), repeats)
    found |= {"kernel_us": kernel_us, "launches": launches, "relative_error": error}
    return found | (peers.measure(workload, layout, expected, repeats, variant=variant) if peers else {})


def reference(inputs: Inputs, variant: Variant) -> Float[np.ndarray, "B N H"]:
    """Attend in float32, each request by itself over a copy of its own context."""
    forest, query, key, value = inputs
    sinks = variant.sinks_of(query.shape[2])
    slots = padded_slots(forest)
    slots = np.pad(slots, ((0, 0), (0, bucket(slots.shape[1], MIN_CONTEXT) - slots.shape[1])))
    arguments = query, key, value, slots, forest.request_length, sinks
    return np.asarray(compiled_once(_in_float32(variant.softcap, variant.window), *arguments)(*arguments))


@cache
def _attend_with(implementation: str, softcap: float | None) -> Callable[..., Array]:
    def attend(query: Array, key: Array, value: Array, forest: Any, plan: Any, sinks: Array | None) -> Array:
        return forest_attention(
            query, key, value, forest, plan, softcap=softcap, sinks=sinks, implementation=implementation
        )

    return jax.jit(attend)


@cache
def _in_float32(softcap: float | None, window: int | None) -> Callable[..., Array]:
    def attend(query: Array, key: Array, value: Array, slots: Array, length: Array, sinks: Array | None) -> Array:
        def one(request: tuple[Array, Array, Array]) -> Array:
            query, slots, length = request
            own_key, own_value = (x.reshape(-1, *x.shape[2:])[slots].astype(jnp.float32) for x in (key, value))
            grouped = query[0].astype(jnp.float32).reshape(key.shape[2], -1, query.shape[-1])  # [K, G, H]
            scores = jnp.einsum("kgh,skh->kgs", grouped, own_key) / query.shape[-1] ** 0.5
            scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
            position = jnp.arange(len(slots), dtype=jnp.int32)
            seen = (position < length) & (position >= length - (len(slots) if window is None else window))
            scores = jnp.where(seen[None, None], scores, -jnp.inf)
            if sinks is not None:
                sink = sinks.reshape(*scores.shape[:2], 1)
                scores = jnp.concatenate([scores, sink], axis=-1)
                own_value = jnp.pad(own_value, ((0, 1), (0, 0), (0, 0)))
            return jnp.einsum("kgs,skh->kgh", jax.nn.softmax(scores, axis=-1), own_value).reshape(query.shape[1:])

        # One request at a time: float32 copies of all contexts may not fit.
        with jax.default_matmul_precision("highest"):
            return jax.lax.map(one, (query, slots, length))

    return jax.jit(attend)


if __name__ == "__main__":
    main()
