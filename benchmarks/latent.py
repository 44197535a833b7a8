"""Time forest_attention over latents: one kv head of 576 numbers a token, of which the first 512 are the values.

    python -m benchmarks.latent --json benchmarks/results/latent_h200.json

Every forest is attended with the q heads of several models and held to float32 attention. Times are those of
benchmarks/attention.py. The roofline is what reading every latent once (and q and out) would take, or the products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
from jaxtyping import Array
from tqdm import tqdm

from benchmarks.attention import bounds
from benchmarks.ceilings import ceilings
from benchmarks.inputs import MIN_BLOCKS, Inputs, Layout, check, make_inputs, reference
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, conditions
from benchmarks.timing import command, kernel_time, parse
from benchmarks.turns import GPU, compiled_once
from benchmarks.workloads import LATENT, LATENT_PROBE, Workload
from codec_jax import make_plan
from codec_jax.attention import forest_attention

#: Numbers of a token, and of a value.
KEY, VALUE = 576, 512
_BYTES = 2  # of a number
#: Of DeepSeek-V2-Lite, of Kimi K2, of DeepSeek-V3.
_Q_HEADS = (16, 64, 128)


def main() -> None:
    """Measure roots of several lengths under several requests, and no sharing."""
    parser = command(__doc__)
    parser.add_argument("--q-heads", nargs="+", type=int, default=list(_Q_HEADS))
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--implementation", default="mosaic")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="four forests only")
    arguments = parse(parser)
    rows = collect(measure_all(LATENT_PROBE if arguments.quick else LATENT, arguments), arguments.json)
    conclude("latent", rows, arguments.json, [f"{row['name']}, {row['variant']}" for row in rows if "error" in row])


def measure_all(workloads: Sequence[Workload], arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield a row for every number of q heads on every forest; one that fails says why, and does not end it."""
    for q_heads in tqdm(arguments.q_heads):
        layout = Layout(q_heads, 1, KEY, arguments.page_size)
        for workload in workloads:
            with GPU.taken():
                inputs = make_inputs(workload, layout)
                row = {"variant": f"{q_heads} q heads", "implementation": arguments.implementation}
                row |= bounds_of(workload, inputs, layout)
                measured = partial(measure, inputs, layout, arguments.implementation, arguments.repeats)
                yield row | attempt(measured, "kernel_us", "error") | conditions(layout)


def bounds_of(workload: Workload, inputs: Inputs, layout: Layout) -> dict:
    """Count latents, and what reading each once, or multiplying, takes at least."""
    counted, most = bounds(workload, inputs.forest, layout), ceilings()
    size = counted["unique_tokens"] * KEY * _BYTES
    rows = len(workload.leaf) * layout.num_q_heads
    reading = (size + rows * (KEY + VALUE) * _BYTES) / most.read_bytes_per_us
    multiplying = 2 * counted["total_tokens"] * layout.num_q_heads * (KEY + VALUE) / most.flops_per_us
    return counted | {"unique_bytes": size, "roofline_us": max(reading, multiplying)}


def measure(inputs: Inputs, layout: Layout, implementation: str, repeats: int) -> dict:
    """Check a call and time its kernels."""
    forest, query, pages, _ = inputs
    expected = reference(inputs._replace(value_pages=pages))[..., :VALUE]
    plan = make_plan(forest, **layout.heads, value_head_dim=VALUE, block_capacity=MIN_BLOCKS)
    on_device = jax.device_put((query, pages, forest, plan))
    attend = compiled_once(_attend_with(implementation), *on_device, tuned=implementation == "xla")
    error = check(attend(*on_device), expected)
    kernel_us, launches = kernel_time(lambda: attend(*on_device), repeats)
    return {"kernel_us": kernel_us, "launches": launches, "relative_error": error}


@cache
def _attend_with(implementation: str) -> Callable[..., Array]:
    def attend(query: Array, pages: Array, forest: Any, plan: Any) -> Array:
        return forest_attention(query, pages, None, forest, plan, implementation=implementation)

    return jax.jit(attend)


if __name__ == "__main__":
    main()
