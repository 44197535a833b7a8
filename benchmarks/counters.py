"""Bytes that one call moves, by the GPU's hardware counters: ncu runs a process of its own that calls on some cases.

That process is this module, which benchmarks.traffic starts.
"""

from __future__ import annotations

import csv
import ctypes
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.inputs import MAX_RELATIVE_ERROR, PLAIN, Case, Layout, check, make_inputs, planned_call, reference
from benchmarks.peers import MAX_PEER_ERROR, PEERS, Tensors, start
from benchmarks.rows import reason
from benchmarks.turns import GPU, NCU
from benchmarks.workloads import Workload

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
}

#: The configurations of the peers that are counted: the fastest on an H200, on the forests of benchmarks.traffic.
CONFIGURATIONS = {"flashinfer_decode": "tensor cores", "flashinfer_cascade": "fa2"}

#: Now and then ncu crashes while a process compiles under it, which then never ends (ncu 2025.3.1, JAX 0.11.2). So a
#: case, which takes ten seconds, ends the process after so many; the first use of a peer compiles it for minutes.
CASE_SECONDS = 600


def read_counters(cases: Sequence[Case], caller: str) -> list[dict[str, int] | str]:
    """Sum the counters over all kernels of a call on each case, or say why there is no sum.

    Caches are flushed before each kernel. `caller` is a peer of `CONFIGURATIONS`, or an implementation of ours.

    Raises FileNotFoundError without ncu.
    """
    with TemporaryDirectory() as folder:
        asked, failed = Path(folder) / "cases.json", Path(folder) / "failed.json"
        asked.write_text(json.dumps([{"workload": case.workload, "layout": case.layout} for case in cases]))
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
        command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
        command += [sys.executable, "-m", "benchmarks.counters", str(asked), str(failed), caller]
        # The process that asks may hold most of the GPU's memory.
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with GPU.given(), NCU.taken():
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        reasons = json.loads(failed.read_text()) if failed.exists() else {}
    messages = run.stderr or "\n".join(row for row in run.stdout.splitlines() if not row.startswith('"'))
    lost = f"ncu gave no counters: {' '.join(messages.split())[-260:]}"
    counts = totals(run.stdout)
    counts += [None] * (len(cases) - len(counts))
    return [reasons.get(str(i)) or counts[i] or lost for i in range(len(cases))]


def totals(report: str) -> list[dict[str, int] | None]:
    """Sum the metrics over the kernels of each case in ncu's report, None for one that has no kernels.

    The report has a row of names, one of units, and one for each kernel. The first kernel also comes after each case.
    """
    kernels = list(csv.DictReader(row for row in report.splitlines() if row.startswith('"')))[1:]
    counts: list[dict[str, int] | None] = []
    of_case: list[dict[str, str]] = []
    for kernel in kernels[1:]:
        if kernel["Kernel Name"] != kernels[0]["Kernel Name"]:
            of_case.append(kernel)
            continue
        sums = {
            name: sum(int(float(each[metric].replace(",", ""))) for each in of_case) for name, metric in METRICS.items()
        }
        counts.append(sums if of_case else None)
        of_case = []
    return counts


def prepare(case: Case, caller: str) -> Callable[[], object]:
    """Plan a call, run it once and check the result; returns the call, which waits for its kernels.

    Raises ValueError for a wrong result.
    """
    inputs = make_inputs(*case[:2])
    expected = reference(inputs)
    if caller not in CONFIGURATIONS:
        attend, _ = planned_call(inputs, case.layout, caller)
        check(attend(), expected, MAX_RELATIVE_ERROR)
        return lambda: jax.block_until_ready(attend())
    import torch

    run = PEERS[caller][CONFIGURATIONS[caller]](Tensors.of(inputs, PLAIN))
    check(run().float().cpu().numpy(), expected[inputs.forest.request_of_row], MAX_PEER_ERROR)
    return lambda: (run(), torch.cuda.synchronize())


def main() -> None:
    """Call twice on each case, the second time under the profiler; what fails is written down and left out."""
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    asked, failed, caller = sys.argv[1:]
    driver, reasons = ctypes.CDLL("libcuda.so.1"), {}
    between, nothing = jax.jit(between_cases), jnp.zeros(8)

    def end() -> None:
        jax.block_until_ready(between(nothing))

    def profile(call: Callable[[], object]) -> None:
        driver.cuProfilerStart()
        call()
        driver.cuProfilerStop()

    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    end()
    if caller in CONFIGURATIONS:
        start()
    profile(end)
    for i, fields in enumerate(json.loads(Path(asked).read_text())):
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        with GPU.taken():
            try:
                profile(prepare(Case(Workload(*fields["workload"]), Layout(*fields["layout"])), caller))
            except Exception as error:
                reasons[i] = reason(error)
                Path(failed).write_text(json.dumps(reasons))
            profile(end)


def between_cases(x: Array) -> Array:
    """Run a kernel that no call has."""
    return jnp.arctan2(x, x)


if __name__ == "__main__":
    main()
