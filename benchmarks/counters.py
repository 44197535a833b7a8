"""Bytes that one call moves, by the GPU's hardware counters: ncu runs a process of its own with a single call in it."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from benchmarks.inputs import MOST_RELATIVE_ERROR, Case, Layout, attention_call, check, make_inputs, reference
from benchmarks.peers import MOST_PEER_ERROR, PEERS, Tensors
from benchmarks.workloads import Workload

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
}

#: The configurations of the peers that are counted: the fastest ones on an H200, on every forest that was timed.
CONFIGURATIONS = {"flashinfer_decode": "tensor cores", "flashinfer_cascade": "fa2"}


def read_counters(case: Case, caller: str) -> dict[str, int]:
    """Sum the counters over all kernels of a call; caches are flushed before each kernel.

    `caller` is a peer of `CONFIGURATIONS`, or an implementation of ours.

    Raises FileNotFoundError without ncu, RuntimeError if it cannot read the counters or the call fails.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "case.json"
        file.write_text(json.dumps({"workload": case.workload, "layout": case.layout}))
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
        command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
        command += [sys.executable, "-m", "benchmarks.counters", str(file), caller]
        # The process that asks may hold most of the GPU's memory.
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        return total(run.stdout)
    except KeyError:
        said = " ".join((run.stderr or run.stdout).split())
        raise RuntimeError(f"ncu gave no counters: {said[-260:]}") from None


def total(report: str) -> dict[str, int]:
    """Sum the metrics over the kernels of ncu's report: a row of names, one of units, and one for each kernel."""
    table = list(csv.DictReader(row for row in report.splitlines() if row.startswith('"')))[1:]
    if not table:
        raise KeyError("no kernels")
    return {
        name: sum(int(float(kernel[metric].replace(",", ""))) for kernel in table) for name, metric in METRICS.items()
    }


def prepare(case: Case, caller: str) -> Callable[[], object]:
    """Plan a call, run it once and check the result; returns the call, which waits for its kernels.

    Raises ValueError for a wrong result.
    """
    inputs = make_inputs(*case[:2])
    expected = reference(inputs)
    if caller not in CONFIGURATIONS:
        attend, _ = attention_call(inputs, case.layout, caller)
        check(attend(), expected, MOST_RELATIVE_ERROR)
        return lambda: jax.block_until_ready(attend())
    import torch

    run = PEERS[caller][CONFIGURATIONS[caller]](Tensors.of(inputs))
    check(run().float().cpu().numpy(), expected[inputs.forest.request_of_row], MOST_PEER_ERROR)
    return lambda: (run(), torch.cuda.synchronize())


def main() -> None:
    """Call twice, the second time under the profiler."""
    file, caller = sys.argv[1:]
    fields = json.loads(Path(file).read_text())
    call = prepare(Case(Workload(*fields["workload"]), Layout(*fields["layout"])), caller)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuProfilerStart()
    call()
    driver.cuProfilerStop()


if __name__ == "__main__":
    main()
