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
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks.arguments import how_many
from benchmarks.ceilings import Ceilings, ceilings
from benchmarks.inputs import (
    Case,
    Inputs,
    Layout,
    check,
    check_copies,
    check_room,
    make_inputs,
    padded_slots,
    planned_call,
    reference,
    with_room,
)
from benchmarks.peers import FLASHINFER, OTHERS, Peers
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, conditions, found_or_measured, measured_before
from benchmarks.timing import command, kernel_runs, kernel_time, parse, wall_time
from benchmarks.turns import GPU, compiled_once
from benchmarks.workloads import PAPER, PROBE, SHAPES, Workload
from codec_jax import Forest
from codec_jax.traffic import count_pass


def main() -> None:
    """Measure the probes and the paper's sweeps, or what is asked for."""
    parser = command(__doc__, resumes=True)
    add_arguments(parser)
    parser.add_argument("--heads", default="32/8", help="q heads / kv heads")
    parser.add_argument("--head-dim", type=how_many, default=128)
    parser.add_argument("--page-size", type=how_many, default=16)
    parser.add_argument("--quick", action="store_true", help="the probes only")
    parser.add_argument("--shapes", action="store_true", help="other shapes only: many small nodes, one request")
    arguments = parse(parser)
    layout = Layout(*map(int, arguments.heads.split("/")), arguments.head_dim, arguments.page_size)
    selected = PROBE * arguments.quick + SHAPES * arguments.shapes or PROBE + PAPER
    run("paper", [Case(workload, layout) for workload in selected], arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command takes that measures cases with `run`."""
    parser.add_argument("--implementation", default="mosaic")
    parser.add_argument("--repeats", type=how_many, default=15)
    parser.add_argument("--peers", action="store_true", help="FlashInfer too; it compiles kernels for minutes at first")
    parser.add_argument("--others", action="store_true", help="FlashAttention-3 and PyTorch's FlexAttention too")


def run(page: str, cases: Sequence[Case], arguments: Namespace) -> None:
    """Measure cases as the arguments of `add_arguments` say, then show and publish them as on a page.

    Exits where our own time is missing from a row: the rows then stay in the draft of the result.
    """
    names = FLASHINFER * arguments.peers + OTHERS * arguments.others
    measure_one = partial(measure, implementation=arguments.implementation, repeats=arguments.repeats)
    conclude(page, measure_all(cases, measure_one, names, arguments), arguments.json)


def measure_all(
    cases: Sequence[Case], measure: Callable[[Case, Peers | None], dict], names: Sequence[str], asked: Namespace
) -> list[dict]:
    """Return the rows of one case after another, with peers of these names; one that fails says why.

    Rows of an interrupted run stay as they are, where it is to be resumed.
    """
    needs = {
        "torch": set(names),
        "flashinfer-python": set(names) & set(FLASHINFER),
        "fa3-fwd": set(names) & set(OTHERS),
    }
    packages = [package for package, users in needs.items() if users]
    before = measured_before(asked.json, asked.resume)
    peers = Peers(names) if names else None

    def row(case: Case) -> dict:
        place = {"series": case.series, "x": case.x} if case.series else {}
        known = {"name": case.workload.name, "implementation": asked.implementation} | place
        known |= conditions(case.layout, *packages)
        with GPU.taken():
            return found_or_measured(before, known, partial(measure, case, peers))

    rows = collect(map(row, tqdm(cases)), asked.json, before)
    if peers:
        peers.close()
    return rows


def measure(case: Case, peers: Peers | None, implementation: str | None, repeats: int, unshared: bool = False) -> dict:
    """Check and time ours and others on one case; `unshared` is our kernels, each request reading for itself."""
    inputs, layout = make_inputs(case.workload, case.layout), case.layout
    expected = reference(inputs)
    row = bounds(case.workload, inputs.forest, layout) | {"implementation": implementation}
    row |= attempt(partial(measure_ours, inputs, layout, expected, implementation, repeats), "kernel_us", "error")
    if unshared:
        row |= attempt(partial(measure_unshared, inputs, layout, expected, repeats), "unshared_us", "unshared_error")
    row |= attempt(partial(measure_cudnn, inputs, layout, expected, repeats), "cudnn_us", "cudnn_error")
    return row | (peers.measure(case.workload, layout, expected, repeats) if peers else {})


def bounds(workload: Workload, forest: Forest, layout: Layout, most: Ceilings | None = None) -> dict:
    """Count tokens, and what reading each once or multiplying takes at least, at the rates of the default device."""
    read = forest.row_hi > forest.row_lo
    unique, total = int(forest.length[read].sum()), int(forest.request_length.sum(dtype=np.int64))
    query_size = len(workload.leaf) * layout.num_q_heads * layout.head_dim
    moved = unique * layout.kv_token_bytes + 2 * query_size * 2
    operations = 4 * total * layout.num_q_heads * layout.head_dim
    most = most or ceilings()
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
    attend, plan = planned_call(inputs, layout, implementation)
    error = check(attend(), expected)
    runs = kernel_runs(attend, repeats)
    por = {"por_us": 1e3 * statistics.median(run[1][1] for run in runs)} if len(runs[0]) == 2 else {}
    return {
        "kernel_us": 1e3 * statistics.median(sum(ms for _, ms in run) for run in runs),
        **por,
        "wall_us": wall_time(attend),
        "launches": len(runs[0]),
        "kv_bytes": count_pass(inputs.forest, plan).kv_tokens_read * layout.kv_token_bytes,
        "relative_error": error,
    }


def measure_unshared(inputs: Inputs, layout: Layout, expected: Float[np.ndarray, "B N H"], repeats: int) -> dict:
    """Check and time our kernels on the same pages, read by every request for itself."""
    row = measure_ours(inputs._replace(forest=with_room(inputs.forest.unshared())), layout, expected, "mosaic", repeats)
    return {"unshared_us": row["kernel_us"], "unshared_relative_error": row["relative_error"]}


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


if __name__ == "__main__":
    main()
