"""Bytes that one call moves, by the GPU's hardware counters: ncu runs a process of its own that calls on some cases."""

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

from benchmarks.inputs import MOST_RELATIVE_ERROR, Case, Layout, attention_call, check, make_inputs, reference
from benchmarks.peers import MOST_PEER_ERROR, PEERS, Tensors, start
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
#: case, which takes ten seconds, may take so many without a wait, and so may what comes before the first one; the first
#: use of a peer compiles it for minutes. A case that is lost is counted again by itself, so often.
CASE_SECONDS, COMPILING_SECONDS, MORE_TRIES = 120, 600, 2


def read_counters(cases: Sequence[Case], caller: str) -> list[dict[str, int] | str]:
    """Sum the counters over all kernels of a call on each case, or say why there is no sum.

    Caches are flushed before each kernel. `caller` is a peer of `CONFIGURATIONS`, or an implementation of ours.

    Raises FileNotFoundError without ncu.
    """
    counts, said = count_together(cases, caller)
    for i in [i for i, count in enumerate(counts) if count is None]:
        for _ in range(MORE_TRIES):
            [counts[i]], said = count_together(cases[i : i + 1], caller)
            if counts[i] is not None:
                break
        else:  # it is not by chance
            break
    return [f"ncu gave no counters: {said}" if count is None else count for count in counts]


def count_together(cases: Sequence[Case], caller: str) -> tuple[list[dict[str, int] | str | None], str]:
    """Count cases in one process; returns None for each one that it lost, and what was said at the end."""
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
    counts = totals(run.stdout)
    counts += [None] * (len(cases) - len(counts))
    return [reasons.get(str(i)) or counts[i] for i in range(len(cases))], last_words(run.stdout, run.stderr)


def last_words(stdout: str, stderr: str) -> str:
    """Say in one line how a process under ncu ended that gave too few counts."""
    if "Timeout (" in stderr:  # faulthandler's
        seconds = stderr.partition("Timeout (")[2].partition(")")[0]
        return f"ended after {seconds} without a wait for the GPU"
    messages = stderr or "\n".join(row for row in stdout.splitlines() if not row.startswith('"'))
    return " ".join(messages.split())[-260:]


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
        attend, _ = attention_call(inputs, case.layout, caller)
        check(attend(), expected, MOST_RELATIVE_ERROR)
        return lambda: jax.block_until_ready(attend())
    import torch

    run = PEERS[caller][CONFIGURATIONS[caller]](Tensors.of(inputs))
    check(run().float().cpu().numpy(), expected[inputs.forest.request_of_row], MOST_PEER_ERROR)
    return lambda: (run(), torch.cuda.synchronize())


def main() -> None:
    """Call twice on each case, the second time under the profiler; what fails is written down and left out."""
    asked, failed, caller = sys.argv[1:]
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    driver = ctypes.CDLL("libcuda.so.1")

    def profile(call: Callable[[], object]) -> None:
        driver.cuProfilerStart()
        call()
        driver.cuProfilerStop()

    between, nothing = jax.jit(between_cases), jnp.zeros(8)

    def end() -> None:
        jax.block_until_ready(between(nothing))

    end()
    if caller in CONFIGURATIONS:
        start()
    profile(end)
    faulthandler.cancel_dump_traceback_later()
    reasons = {}
    for i, fields in enumerate(json.loads(Path(asked).read_text())):
        with GPU.taken(at_most=COMPILING_SECONDS if caller in CONFIGURATIONS and i == 0 else CASE_SECONDS):
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
