"""Time one forest_attention call on a GPU, beside cuDNN attention of every request by itself, and FlashInfer.

    python -m benchmarks.attention --json benchmarks/results/attention.json

Times are sums over all kernels of a call by CUPTI, the median of several calls, with the L2 cache flushed before each;
plans are made before. The roofline is what reading every KV token once (and q and out), or the products, would take at
the rates of benchmarks/ceilings.py. Every result is held to float32 attention before it is timed; what fails or cannot
run has no time, and its row says why.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks.ceilings import ceilings
from benchmarks.counters import read_counters
from benchmarks.inputs import (
    Case,
    Inputs,
    Layout,
    attention_call,
    check,
    check_copies,
    check_room,
    make_inputs,
    padded_slots,
    reference,
)
from benchmarks.peers import FLASHINFER, OTHERS, PEERS, Peers
from benchmarks.rows import RESUME, attempt, conditions, find, finish, measured_before, write_draft
from benchmarks.timing import kernel_runs, kernel_time, require_gpu, wall_time
from benchmarks.turns import GPU, compiled_once
from benchmarks.workloads import PAPER, PROBE, SHAPES, Workload
from codec_jax import Forest

LARGE_BYTES, SMALL_BYTES = 100e6, 32e6  # forests on which fixed costs should not show, and those on which only they do


def main() -> None:
    """Measure the probes and the paper's sweeps, or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--heads", default="32/8", help="q heads / kv heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="the probes only")
    parser.add_argument(
        "--shapes", action="store_true", help="trees of other shapes only: many small nodes, one request"
    )
    arguments = parser.parse_args()
    require_gpu(parser)
    layout = Layout(*map(int, arguments.heads.split("/")), arguments.head_dim, arguments.page_size)
    selected = PROBE * arguments.quick + SHAPES * arguments.shapes or PROBE + PAPER
    run([Case(workload, layout) for workload in selected], arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command takes that measures cases with `run`."""
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--implementation", default="mosaic")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peers", action="store_true", help="FlashInfer too; it compiles kernels for minutes at first")
    parser.add_argument("--others", action="store_true", help="FlashAttention-3 and PyTorch's FlexAttention too")
    parser.add_argument("--counters", action="store_true", help="bytes by hardware counters too; needs ncu")
    parser.add_argument("--resume", action="store_true", help=RESUME)


def run(cases: Sequence[Case], arguments: argparse.Namespace) -> list[dict]:
    """Measure cases as the arguments of `add_arguments` say, print a summary, and return and publish the rows.

    Exits where our own time is missing from a row: the rows then stay in the draft of the result.
    """
    names = FLASHINFER * arguments.peers + OTHERS * arguments.others
    peers = Peers(names) if names else None
    packages = ["torch"] * bool(names) + ["flashinfer-python"] * arguments.peers + ["fa3-fwd"] * arguments.others
    before = measured_before(arguments.json, arguments.resume)
    rows = collect(cases, partial(measure, arguments=arguments, peers=peers), arguments.json, before, *packages)
    if peers:
        peers.close()
    print(summary(rows))
    finish(rows, arguments.json)
    return rows


def collect(
    cases: Iterable[Case], measure: Callable[[Case], dict], path: Path, before: list[dict], *packages: str
) -> list[dict]:
    """Measure one case after another, keeping the draft of `path` up to date; one that fails does not end it.

    What is among the rows measured `before` stays as it is.
    """
    rows: list[dict] = []
    for case in tqdm(cases):
        place = {"series": case.series, "x": case.x} if case.series else {}
        known = {"name": case.workload.name} | place | conditions(case.layout, *packages)
        row = find(before, known)
        if row is None:
            with GPU.taken():
                row = known | attempt(partial(measure, case), "kernel_us", "error")
        rows.append(row)
        write_draft(rows, path)
        tqdm.write(line(row))
    return rows


def measure(case: Case, arguments: argparse.Namespace, peers: Peers | None) -> dict:
    """Check and time one case."""
    workload, layout = case.workload, case.layout
    inputs = make_inputs(workload, layout)
    expected = reference(inputs)
    ours = partial(measure_ours, inputs, layout, expected, arguments.implementation, arguments.repeats)
    cudnn = partial(measure_cudnn, inputs, layout, expected, arguments.repeats)
    row = bounds(workload, inputs.forest, layout) | {"implementation": arguments.implementation}
    row |= attempt(ours, "kernel_us", "error") | attempt(cudnn, "cudnn_us", "cudnn_error")
    if peers:
        row |= peers.measure(workload, layout, expected, arguments.repeats)
    if arguments.counters:
        row |= attempt(partial(count, case, arguments.implementation), "dram_read_bytes", "counters_error")
    return row


def count(case: Case, implementation: str) -> dict[str, int]:
    """Count the bytes that a call moves. Raises RuntimeError where there is no count."""
    counted = read_counters([case], implementation)[0]
    if isinstance(counted, str):
        raise RuntimeError(counted)
    return counted


def bounds(workload: Workload, forest: Forest, layout: Layout) -> dict:
    """Count tokens, and what reading each once or multiplying takes at least."""
    read = forest.row_hi > forest.row_lo
    unique, total = int(forest.length[read].sum()), int(forest.request_length.sum(dtype=np.int64))
    query_size = len(workload.leaf) * layout.num_q_heads * layout.head_dim
    moved = unique * layout.kv_token_bytes + 2 * query_size * 2
    operations = 4 * total * layout.num_q_heads * layout.head_dim
    most = ceilings()
    return {
        "name": workload.name,
        "unique_tokens": unique,
        "total_tokens": total,
        "unique_bytes": unique * layout.kv_token_bytes,
        "requests": len(workload.leaf),
        "roofline_us": max(moved / most.read_bytes_per_us, operations / most.flops_per_us),
    }


def measure_ours(
    inputs: Inputs, layout: Layout, expected: Float[np.ndarray, "B N H"], implementation: str | None, repeats: int
) -> dict:
    """Check forest_attention and time its kernels and a whole call; of two kernels the second one is POR."""
    attend, kv_bytes = attention_call(inputs, layout, implementation)
    error = check(attend(), expected)
    runs = kernel_runs(attend, repeats)
    por = {"por_us": 1e3 * statistics.median(run[1][1] for run in runs)} if len(runs[0]) == 2 else {}
    return {
        "kernel_us": 1e3 * statistics.median(sum(ms for _, ms in run) for run in runs),
        **por,
        "wall_us": wall_time(attend),
        "launches": len(runs[0]),
        "kv_bytes": kv_bytes,
        "relative_error": error,
    }


def measure_cudnn(inputs: Inputs, layout: Layout, expected: Float[np.ndarray, "B N H"], repeats: int) -> dict:
    """Check and time cuDNN on a contiguous copy of every request's K and V.

    Raises ValueError if the copies take too much, MemoryError if there is no room for them.
    """
    forest, query, key, value = inputs
    check_copies(len(query) * int(forest.request_length.max()) * layout.kv_token_bytes)
    slots, lengths = jax.device_put((padded_slots(forest), forest.request_length))
    gather = compiled_once(_gather, key, slots)
    copy = jax.ShapeDtypeStruct((*slots.shape, *key.shape[2:]), key.dtype)
    attend = compiled_once(_attend_with_cudnn, query, copy, copy, lengths)
    check_room(2 * copy.size * copy.dtype.itemsize + attend.memory_analysis().temp_size_in_bytes)
    arguments = query, gather(key, slots), gather(value, slots), lengths
    error = check(attend(*arguments), expected)
    return {
        "cudnn_us": kernel_time(lambda: attend(*arguments), repeats)[0],
        "cudnn_relative_error": error,
    }


@jax.jit
def _gather(pages: Array, slots: Array) -> Array:
    return pages.reshape(-1, *pages.shape[2:])[slots]


@jax.jit
def _attend_with_cudnn(query: Array, key: Array, value: Array, lengths: Array) -> Array:
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths, implementation="cudnn")


def line(row: dict) -> str:
    """Show a row: time, multiple of the roofline, time over it, and the peers' times; or why they are missing."""
    if row["kernel_us"]:
        over = row["kernel_us"] - row["roofline_us"]
        ours = (
            f"{row['kernel_us']:8.1f} us  {row['kernel_us'] / row['roofline_us']:5.2f} x roofline  {over:6.1f} us over"
        )
    else:
        ours = row["error"]
    peers = [
        f"{peer} {row[f'{peer}_us']:.1f}" if row[f"{peer}_us"] else f"{peer}: {row[f'{peer}_error']}"
        for peer in ("unshared", "cudnn", *PEERS)
        if f"{peer}_us" in row
    ]
    return "   ".join([f"{row['name']:<42} {ours}", *peers])


def summary(rows: list[dict]) -> str:
    """Sum rows up: time over roofline, what small forests cost over it, and each peer's time over ours.

    Means are geometric. The best peer is another one on every forest.
    """
    measured = [row for row in rows if row["kernel_us"]]
    large = [row for row in measured if row["unique_bytes"] >= LARGE_BYTES]
    small = [row for row in measured if row["unique_bytes"] < SMALL_BYTES]
    lines = [f"{len(measured)} of {len(rows)} workloads measured"]
    if large:
        ratios = [row["kernel_us"] / row["roofline_us"] for row in large]
        lines.append(
            f"{statistics.geometric_mean(ratios):.3f} x roofline over {len(large)} forests of 100 MB and more, "
            f"{max(ratios):.3f} x at most"
        )
    if small:
        over = max(row["kernel_us"] - row["roofline_us"] for row in small)
        lines.append(f"at most {over:.1f} us over the roofline on {len(small)} forests under 32 MB")
    names = ["cudnn", *PEERS]
    for label, peers in [*((name, [name]) for name in names), ("the best peer", names)]:
        times = [(row, [row[f"{peer}_us"] for peer in peers if row.get(f"{peer}_us")]) for row in measured]
        gains = [min(theirs) / row["kernel_us"] for row, theirs in times if theirs]
        if gains:
            lines.append(
                f"{statistics.geometric_mean(gains):.2f} x faster than {label} over {len(gains)} forests, "
                f"{min(gains):.2f} x at least"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
