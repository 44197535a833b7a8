"""Count the bytes that attention reads on forests larger than the L2 cache, by the GPU's hardware counters.

    python -m benchmarks.traffic --json benchmarks/results/traffic_h200.json
    python -m benchmarks.traffic --peers --json benchmarks/results/traffic_peers_h200.json

The first counts ours on the probes and the paper's sweeps as far as the cache cannot hold them, the second ours and
FlashInfer on a forest of each kind. Needs ncu, and the permission to read counters. A process of its own counts the
calls, after checking their results against float32 attention; caches are flushed before each of their kernels.
"""

from __future__ import annotations

import numpy as np
from tqdm import tqdm

from benchmarks.counters import CONFIGURATIONS, read_counters
from benchmarks.inputs import Case, Layout
from benchmarks.peers import share_the_device
from benchmarks.report import conclude
from benchmarks.rows import collect, conditions, find, measured_before, reason
from benchmarks.timing import command, parse
from benchmarks.workloads import PAPER, PROBE, SHAPES, degenerate, flat, k_ary, shared_ratio, shared_root
from codec_jax import Forest

L2_BYTES = 60 << 20  # of an H200, rounded up
AT_ONCE = 6  # forests that one process counts

#: A forest of each kind, for the peers.
KINDS = [
    shared_root(120_000, 16, 1024),
    shared_root(32_768, 64, 1024),
    k_ary(2, 5, 8192),
    degenerate(8, 16_384),
    shared_ratio(0.5, 112_928),
    flat(32, 8192),
]


def main() -> None:
    """Count and write the rows."""
    parser = command(__doc__, resumes=True)
    parser.add_argument("--peers", action="store_true", help="FlashInfer too, on a forest of each kind")
    parser.add_argument("--shapes", action="store_true", help="trees of other shapes, as in benchmarks.attention")
    share_the_device()  # with the processes that count
    arguments = parse(parser)
    forests = KINDS if arguments.peers else SHAPES if arguments.shapes else PROBE + PAPER
    cases = [Case(each) for each in forests if sum(each.length) * Layout().kv_token_bytes > L2_BYTES]
    peers, packages = list(CONFIGURATIONS) * arguments.peers, ["torch", "flashinfer-python"] * arguments.peers
    before = measured_before(arguments.json, arguments.resume)
    at_once = tqdm([cases[i : i + AT_ONCE] for i in range(0, len(cases), AT_ONCE)], unit=f"x {AT_ONCE} forests")
    measured_rows = (row for some in at_once for row in measured(some, peers, packages, before))
    conclude("traffic", collect(measured_rows, arguments.json, before), arguments.json)


def measured(cases: list[Case], peers: list[str], packages: list[str], before: list[dict]) -> list[dict]:
    """Return a row for each case: one measured before, or a new one."""
    known = [{"name": case.workload.name} | conditions(case.layout, *packages) for case in cases]
    found = [find(before, each) for each in known]
    missing = [case for case, row in zip(cases, found, strict=True) if row is None]
    counted = iter(count(missing, peers) if missing else [])
    return [each | next(counted) if row is None else row for each, row in zip(known, found, strict=True)]


def count(cases: list[Case], peers: list[str]) -> list[dict]:
    """Count our call and the peers' on some cases; returns a row for each, with the reason where there is no count."""
    rows = [sizes(case) for case in cases]
    for prefix, caller in [("", "mosaic"), *((f"{peer}_", peer) for peer in peers)]:
        try:
            counts = read_counters(cases, caller)
        except FileNotFoundError as error:
            counts = [reason(error)] * len(cases)
        for row, counted in zip(rows, counts, strict=True):
            failed = {"dram_read_bytes": None, "error": counted}
            fields = failed if isinstance(counted, str) else counted
            row.update({f"{prefix}{field}": value for field, value in fields.items()})
    return rows


def sizes(case: Case) -> dict:
    """Count what there is to read: once, and for every request."""
    forest, each = Forest.from_nodes(*case.workload[1:]), case.layout.kv_token_bytes
    return {
        "requests": len(case.workload.leaf),
        "unique_bytes": int(forest.length.sum(dtype=np.int64)) * each,
        "unshared_bytes": int(forest.request_length.sum(dtype=np.int64)) * each,
    }


if __name__ == "__main__":
    main()
