"""Time one forest_attention call on a GPU, beside cuDNN attention of every request by itself.

    python -m benchmarks.attention --json benchmarks/results/attention.json

Times are sums over all kernels of a call by CUPTI, the median of several calls, with the L2 cache flushed before each.
The roofline is what reading every KV token once (and q and out), or the products, would take at the measured ceilings
of an H200: 4.52 TB/s and 700 TFLOP/s. Results are compared with cuDNN's before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler
from tqdm import tqdm

from benchmarks.workloads import PAPER, PROBE, Workload
from codec_jax import Forest, make_plan
from codec_jax.attention import forest_attention

READ_BYTES_PER_US, FLOPS_PER_US = 4.52e6, 700e6
MOST_DENSE_BYTES = 60e9  # what the unshared copies of K and V may take


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--heads", default="32/8", help="q heads / kv heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--implementation", default="mosaic")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="the probes only")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"expected a GPU, the default backend is {jax.default_backend()}")
    q_heads, kv_heads = map(int, arguments.heads.split("/"))
    device = {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "heads": arguments.heads,
        "head_dim": arguments.head_dim,
        "page_size": arguments.page_size,
        "dtype": "bfloat16",
    }
    rows = []
    for workload in tqdm(PROBE if arguments.quick else PROBE + PAPER):
        row = measure(workload, q_heads, kv_heads, arguments)
        rows.append(row | device)
        tqdm.write(
            f"{row['name']:<34} {row['kernel_us']:8.1f} us  {row['kernel_us'] / row['roofline_us']:5.2f} x roofline  "
            f"{row['kernel_us'] - row['roofline_us']:6.1f} us over   cuDNN {row['cudnn_us'] or float('nan'):8.1f} us"
        )
        draft = arguments.json.with_suffix(".part")
        draft.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    draft.replace(arguments.json)
    large = [row for row in rows if row["roofline_us"] * READ_BYTES_PER_US >= 100e6]
    ratio = statistics.geometric_mean(row["kernel_us"] / row["roofline_us"] for row in large)
    print(f"geometric mean over {len(large)} forests of 100 MB and more: {ratio:.3f} x roofline")


def measure(workload: Workload, q_heads: int, kv_heads: int, arguments: argparse.Namespace) -> dict:
    """Check and time one workload."""
    head_dim = arguments.head_dim
    forest = Forest.from_nodes(
        workload.parent,
        workload.length,
        workload.leaf,
        page_size=arguments.page_size,
        node_capacity=len(workload.parent),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (int(forest.used_pages.max()) + 1, arguments.page_size, kv_heads, head_dim)
    key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:2])
    query = jax.random.normal(keys[2], (len(workload.leaf), 1, q_heads, head_dim), jnp.bfloat16)
    plan = make_plan(forest, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    on_device = jax.device_put((query, key, value, forest, plan))
    attend = jax.jit(lambda *args: forest_attention(*args, implementation=arguments.implementation))
    out = jax.block_until_ready(attend(*on_device))
    kernel_us, launches = kernel_time(lambda: attend(*on_device), arguments.repeats)

    unique, total = int(forest.length.sum()), int(forest.request_length.sum())
    moved = unique * kv_heads * head_dim * 4 + 2 * query.size * 2
    row = {
        "name": workload.name,
        "implementation": arguments.implementation,
        "unique_tokens": unique,
        "total_tokens": total,
        "requests": len(workload.leaf),
        "kernel_us": kernel_us,
        "wall_us": wall_time(lambda: attend(*on_device)),
        "roofline_us": max(moved / READ_BYTES_PER_US, 4 * total * q_heads * head_dim / FLOPS_PER_US),
        "launches": launches,
        "cudnn_us": None,
    }
    longest = int(forest.request_length.max())
    if len(workload.leaf) * longest * kv_heads * head_dim * 4 <= MOST_DENSE_BYTES:
        row["cudnn_us"] = cudnn_time(forest, query, key, value, out, arguments.repeats)
    return row


def cudnn_time(
    forest: Forest, query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, repeats: int
) -> float:
    """Time cuDNN on a contiguous copy of every request's K and V, having compared its result with ours."""
    lengths = jnp.asarray(forest.request_length)
    slots = np.zeros((len(lengths), int(lengths.max())), np.int32)
    for request in range(len(lengths)):
        slots[request, : lengths[request]] = forest.context_slots(request)
    dense = [x.reshape(-1, *x.shape[2:])[slots] for x in (key, value)]
    attend = jax.jit(
        lambda q, k, v, n: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=n, implementation="cudnn")
    )
    expected = attend(query, *dense, lengths)
    np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2, rtol=2e-2)
    return kernel_time(lambda: attend(query, *dense, lengths), repeats)[0]


class Flushed(jax.stages.Wrapped):
    """A call after a flush of the L2 cache: two programs, which the profiler must not compile into one."""

    def __init__(self, call: Callable[[], jax.Array]) -> None:
        """Prepare 256 MB to overwrite, several times the cache."""
        self.call, self.flush = call, jax.jit(lambda x: x + 1, donate_argnums=0)
        self.junk = jnp.zeros(64 << 20, jnp.int32)

    def __call__(self) -> jax.Array:
        """Flush, then call."""
        self.junk = self.flush(self.junk)
        return self.call()

    def trace(self) -> None:
        """Refuse: there is no single program to trace."""
        raise NotImplementedError("a flush and a call are two programs")

    lower = trace


def kernel_time(call: Callable[[], jax.Array], repeats: int) -> tuple[float, int]:
    """Return the median time of all kernels of a call in microseconds, L2 flushed before each, and their number."""
    _, runs = profiler.measure(Flushed(call), aggregate=False, iterations=repeats)()
    # The first kernel of every run is the flush.
    return 1e3 * statistics.median(sum(ms for _, ms in run[1:]) for run in runs), len(runs[0]) - 1


def wall_time(call: Callable[[], jax.Array], calls: int = 50) -> float:
    """Return the time of a call in microseconds when many are queued one after another."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(calls):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls * 1e6


if __name__ == "__main__":
    main()
