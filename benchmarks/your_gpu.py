"""Check the kernels on any NVIDIA GPU since Ampere and time them: one command for a GPU that nobody has measured.

    python -m benchmarks.your_gpu --json my_gpu.json

The first row says what the GPU reads and multiplies at most, as XLA reaches it; rooflines are of these rates. Then
every probe runs by the kernels that are chosen for the GPU and on the xla path, held to float32 attention before it is
timed. A probe that fails or does not fit has no time, and its row says why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import jax
from tqdm import tqdm

from benchmarks import tables
from benchmarks.arguments import how_many
from benchmarks.attention import bounds, measure_ours
from benchmarks.ceilings import READ_BYTES, SIZE, Ceilings
from benchmarks.ceilings import measure as measure_ceilings
from benchmarks.inputs import Inputs, Layout, make_inputs, reference
from benchmarks.rows import attempt, collect, conditions, publish
from benchmarks.timing import command, parse
from benchmarks.turns import GPU
from benchmarks.workloads import PROBE, Workload
from pallas_kernels import FAMILIES, Heads

REPEATS = 15


def main() -> None:
    """Measure and write the rows."""
    parser = command(__doc__)
    parser.add_argument("--heads", default="32/8", help="q heads / kv heads")
    parser.add_argument("--head-dim", type=how_many, default=128)
    arguments = parse(parser)
    layout = Layout(*map(int, arguments.heads.split("/")), arguments.head_dim)
    rows = collect(measure_all(PROBE, layout), arguments.json)
    print(tables.your_gpu(rows))
    publish(arguments.json, rows)  # what failed is worth sending, too
    if failed := [f"{row['name']}, {row['implementation']}" for row in rows if "error" in row]:
        sys.exit(f"failed: {'; '.join(failed)}. {arguments.json} says why")


def measure_all(workloads: Sequence[Workload], layout: Layout) -> Iterator[dict]:
    """Yield the rates of the GPU, then two rows of every forest."""
    with GPU.taken():
        rates = measure_ceilings(_fitting(READ_BYTES), SIZE)
    yield rates | {"implementation": "XLA"} | conditions(layout)
    most = Ceilings(rates["read_bytes_per_us"], rates["flops_per_us"])
    for workload in tqdm(workloads):
        with GPU.taken():
            yield from (row | conditions(layout) for row in measure(workload, layout, most))


def measure(workload: Workload, layout: Layout, most: Ceilings) -> Iterator[dict]:
    """Check and time a forest by the kernels and on the xla path."""
    heads, device = Heads(layout.num_q_heads, layout.num_kv_heads, layout.head_dim, layout.head_dim), jax.devices()[0]
    families = [family.name for family in FAMILIES if family.why_not(heads, device) is None]
    for implementation in (*families[:1], "xla"):
        row = {"name": workload.name, "implementation": implementation}
        yield row | attempt(partial(_measure, workload, layout, most, implementation), "kernel_us", "error")


def _measure(workload: Workload, layout: Layout, most: Ceilings, implementation: str) -> dict:
    inputs: Inputs = make_inputs(workload, layout)
    times = measure_ours(inputs, layout, reference(inputs), implementation, REPEATS)
    return bounds(workload, inputs.forest, layout, most) | times


def _fitting(size: int) -> int:
    """Return so many bytes, or a quarter of the memory that the device has for arrays."""
    memory = jax.local_devices()[0].memory_stats()
    return min(size, memory["bytes_limit"] // 4 // 128 * 128) if memory else size


if __name__ == "__main__":
    main()
