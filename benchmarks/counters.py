"""Bytes that one call moves, by the GPU's hardware counters: ncu runs a process of its own with a single call in it."""

from __future__ import annotations

import csv
import ctypes
import os
import subprocess
import sys

import jax

from benchmarks.inputs import Layout, attention_call, make_inputs
from benchmarks.workloads import PAPER, PROBE, SHAPES, Workload

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
}


def read_counters(workload: Workload, layout: Layout, implementation: str) -> dict[str, int]:
    """Sum the counters over all kernels of a call; caches are flushed before each kernel.

    Raises FileNotFoundError without ncu, RuntimeError if it cannot read the counters.
    """
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", "benchmarks.counters", workload.name, *map(str, layout), implementation]
    # The process that asks holds most of the GPU's memory.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        return total(run.stdout)
    except KeyError:
        raise RuntimeError(f"ncu gave no counters: {(run.stderr or run.stdout).strip()[-300:]}") from None


def total(report: str) -> dict[str, int]:
    """Sum the metrics over the kernels of ncu's report: a row of names, one of units, and one for each kernel."""
    table = list(csv.DictReader(row for row in report.splitlines() if row.startswith('"')))[1:]
    if not table:
        raise KeyError("no kernels")
    return {
        name: sum(int(float(kernel[metric].replace(",", ""))) for kernel in table) for name, metric in METRICS.items()
    }


def main() -> None:
    """Call forest_attention twice, the second time under the profiler."""
    name, *sizes, implementation = sys.argv[1:]
    workload = next(workload for workload in PROBE + PAPER + SHAPES if workload.name == name)
    layout = Layout(*map(int, sizes))
    attend, _ = attention_call(make_inputs(workload, layout), layout, implementation)
    jax.block_until_ready(attend())
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuProfilerStart()
    jax.block_until_ready(attend())
    driver.cuProfilerStop()


if __name__ == "__main__":
    main()
