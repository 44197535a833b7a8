"""Count the bytes that attention reads on forests larger than the L2 cache, by the GPU's hardware counters.

    python -m benchmarks.traffic --json benchmarks/results/traffic_h200.json
    python -m benchmarks.traffic --peers --json benchmarks/results/traffic_peers_h200.json

The first counts ours on the probes and the paper's sweeps as far as the cache cannot hold them, the second ours and
FlashInfer on a forest of each kind. Needs ncu, and the permission to read counters. A process of its own counts the
calls, after checking their results against float32 attention; caches are flushed before each of their kernels.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from tqdm import tqdm

from benchmarks.counters import CONFIGURATIONS, METRICS, read_counters
from benchmarks.inputs import Case
from benchmarks.peers import share_the_device
from benchmarks.rows import RESUME, conditions, find, finish, measured_before, reason, write_draft
from benchmarks.timing import require_gpu
from benchmarks.workloads import PAPER, PROBE, SHAPES, Workload, degenerate, flat, k_ary, shared_ratio, shared_root

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--peers", action="store_true", help="FlashInfer too, on a forest of each kind")
    parser.add_argument("--shapes", action="store_true", help="trees of other shapes, as in benchmarks.attention")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--quick", action="store_true", help="two forests")
    parser.add_argument("--resume", action="store_true", help=RESUME)
    arguments = parser.parse_args()
    share_the_device()  # with the processes that count
    require_gpu(parser)
    forests = KINDS if arguments.peers else SHAPES if arguments.shapes else PROBE + PAPER
    cases = larger_than_the_cache(forests)
    peers = list(CONFIGURATIONS) * arguments.peers
    cases = cases[: 2 if arguments.quick else None]
    packages = ["torch", "flashinfer-python"] * arguments.peers
    before = measured_before(arguments.json, arguments.resume)
    rows: list[dict] = []
    for some in tqdm([cases[i : i + AT_ONCE] for i in range(0, len(cases), AT_ONCE)], unit=f"x {AT_ONCE} forests"):
        rows += measured(some, peers, packages, before)
        write_draft(rows, arguments.json)
        for row in rows[-len(some) :]:
            tqdm.write(line(row))
    print(summary(rows))
    finish(rows, arguments.json)
    if arguments.plot:
        from benchmarks import charts

        charts.traffic(rows, arguments.plot)


def larger_than_the_cache(forests: list[Workload]) -> list[Case]:
    """Return the forests that the L2 cache cannot hold."""
    cases = [Case(each) for each in forests]
    return [case for case in cases if sum(case.workload.length) * case.layout.kv_token_bytes > L2_BYTES]


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
    (_, parent, length, leaf), each = case.workload, case.layout.kv_token_bytes
    depth_tokens: list[int] = []  # from the root to the end of each node
    for above, tokens in zip(parent, length, strict=True):
        depth_tokens.append(tokens + (depth_tokens[above] if above >= 0 else 0))
    return {
        "requests": len(leaf),
        "unique_bytes": sum(length) * each,
        "unshared_bytes": sum(depth_tokens[end] for end in leaf) * each,
    }


def callers(row: dict) -> dict[str, str]:
    """Return the prefix of the fields of each call that the row was asked to count."""
    return {"codec_jax": ""} | {peer: f"{peer}_" for peer in CONFIGURATIONS if f"{peer}_dram_read_bytes" in row}


def line(row: dict) -> str:
    """Show a row: what each call read, as a multiple of the unique KV bytes; or why there is no count."""
    parts = []
    for caller, prefix in callers(row).items():
        if row[f"{prefix}dram_read_bytes"] is None:
            parts.append(f"{caller}: {row[f'{prefix}error']}")
        else:
            read = [row[f"{prefix}{field}"] / row["unique_bytes"] for field in ("dram_read_bytes", "l2_to_sm_bytes")]
            parts.append(f"{caller} DRAM {read[0]:.3f} x, L2 to SM {read[1]:.2f} x")
    return "   ".join([f"{row['name']:<42} {row['unique_bytes'] / 1e6:7.0f} MB", *parts])


def summary(rows: list[dict]) -> str:
    """Sum rows up: our DRAM reads over the unique KV bytes, and what the peers read over what we read."""
    counted = [row for row in rows if row["dram_read_bytes"]]
    lines = [f"{len(counted)} of {len(rows)} forests counted"]
    if counted:
        ratios = [row["dram_read_bytes"] / row["unique_bytes"] for row in counted]
        lines.append(f"{statistics.geometric_mean(ratios):.3f} x the unique KV bytes, {max(ratios):.3f} x at most")
    for peer in CONFIGURATIONS:
        for field in METRICS:
            name = f"{peer}_{field}"
            gains = [row[name] / row[field] for row in counted if row.get(name) and row[field]]
            if gains:
                mean = statistics.geometric_mean(gains)
                lines.append(f"{field} of {peer}: {mean:.2f} x ours, {max(gains):.2f} x at most")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
