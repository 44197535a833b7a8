"""Try the sizes of the Hopper kernels' blocks and rings, and say which are the fastest: pallas_kernels/config.py.

    python -m benchmarks.tune --json benchmarks/results/tune.json

Every config whose ring fits shared memory is timed on a few forests as benchmarks.attention does it, each result held
to float32 attention first. The best config of a table has the least geometric mean of time over roofline on the
forests that the table serves. What does not compile, since a kernel keeps more in shared memory than its ring, or is
wrong on any of them is out, and its rows say why.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import jax
from tqdm import tqdm

from benchmarks.attention import bounds, measure_ours
from benchmarks.inputs import Layout, forget_programs, make_inputs, reference
from benchmarks.rows import RESUME, attempt, conditions, draft_of, find, measured_before, publish, write_draft
from benchmarks.timing import require_gpu
from benchmarks.turns import GPU
from benchmarks.workloads import Workload, flat, k_ary, shared_root
from codec_jax import Forest
from codec_jax.streams import tokens_of_tiles
from pallas_kernels.config import LARGE, SMALL, Config, is_large
from pallas_kernels.packing import Packing

TABLES = {"LARGE": LARGE, "SMALL": SMALL}

#: Little work and much, requests of one tile and of several, nodes that pairs of tiles read; those of --quick first.
FORESTS = [
    shared_root(4096, 16, 256),
    shared_root(120_000, 16, 1024),
    shared_root(32_768, 64, 1024),
    flat(32, 8192),
    k_ary(2, 3, 1024),
    shared_root(32_768, 16, 1024),
    k_ary(2, 6, 1024),
    shared_root(120_000, 64, 2048),
]
QUICK = 4  # forests

HEAD_DIMS = [64, 128, 256]
BLOCK_TOKENS = [64, 128]  # wgmma takes multiples of 64, the mask at most 128
STAGES = range(2, 9)
SHARED_MEMORY_BYTES = 227 << 10
REPEATS = 15

Measure = Callable[[], dict]


def main() -> None:
    """Sweep, write the rows, and print tables and the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} forests")
    parser.add_argument("--resume", action="store_true", help=RESUME)
    arguments = parser.parse_args()
    require_gpu(parser)
    before = measured_before(arguments.json, arguments.resume)
    rows: list[dict] = []
    for head_dim, workload in product(arguments.head_dim, FORESTS[: QUICK if arguments.quick else None]):
        rows += measured(workload, Layout(head_dim=head_dim), before)
        write_draft(rows, arguments.json)
    tables = list(product(arguments.head_dim, TABLES))
    print("\n\n".join(report(rows, head_dim, table) for head_dim, table in tables))
    if any(best(rows, head_dim, table) is None for head_dim, table in tables):
        sys.exit(
            f"failed: no config serves all forests. The rows are in {draft_of(arguments.json)}, "
            f"{arguments.json} is as it was"
        )
    publish(arguments.json)


def measured(workload: Workload, layout: Layout, before: list[dict]) -> list[dict]:
    """Return a row for each config on a forest: one measured before, or a new one."""
    of_forest = {"name": workload.name} | conditions(layout)
    rows = {config: find(before, of_forest | asdict(config)) for config in candidates(layout.head_dim)}
    missing = [config for config, row in rows.items() if row is None]
    if missing:
        with GPU.taken():
            measure, common = prepare(workload, layout)
        new = sweep(layout.head_dim, missing, measure)
        rows |= {config: common | row | of_forest for config, row in zip(missing, new, strict=True)}
    return list(rows.values())


def prepare(workload: Workload, layout: Layout) -> tuple[Measure, dict]:
    """Draw inputs and the expected result; returns what times the config in force, and the fields that all share."""
    inputs = make_inputs(workload, layout)
    common = bounds(workload, inputs.forest, layout) | {"implementation": "mosaic"}
    common["table"] = table_of(inputs.forest, layout, jax.devices()[0].core_count)
    return partial(measure_ours, inputs, layout, reference(inputs), "mosaic", REPEATS), common


def table_of(forest: Forest, layout: Layout, num_ctas: int) -> str:
    """Say which table serves a forest."""
    group = layout.num_q_heads // layout.num_kv_heads
    num_tokens, again = tokens_of_tiles(forest, group, Packing.of(group).tile_rows)
    return "LARGE" if is_large(num_tokens, again, layout.num_kv_heads / num_ctas) else "SMALL"


def candidates(head_dim: int) -> list[Config]:
    """List the configs whose ring of K and V blocks fits shared memory."""
    configs = [Config(tokens, stages) for tokens in BLOCK_TOKENS for stages in STAGES]
    return [each for each in configs if 2 * 2 * each.block_tokens * head_dim * each.stages <= SHARED_MEMORY_BYTES]


def sweep(head_dim: int, configs: list[Config], measure: Measure) -> list[dict]:
    """Measure configs, each while planning and the kernels find it in either table; then put back what was there."""
    rows = []
    for config in tqdm(configs, desc=f"head size {head_dim}"):
        with GPU.taken(), patch.dict(LARGE, {head_dim: config}), patch.dict(SMALL, {head_dim: config}):
            forget_programs()
            fields = attempt(measure, "kernel_us", "error")
        rows.append(asdict(config) | fields)
    forget_programs()
    return rows


def by_config(rows: list[dict], head_dim: int, table: str) -> dict[Config, dict[str, dict]]:
    """Return the rows of a table by config and forest."""
    grouped: dict[Config, dict[str, dict]] = {}
    for row in rows:
        if (row["head_dim"], row["table"]) == (head_dim, table):
            grouped.setdefault(Config(row["block_tokens"], row["stages"]), {})[row["name"]] = row
    return grouped


def score(forests: dict[str, dict]) -> float | None:
    """Return the geometric mean of time over roofline, or None if a forest has no time."""
    if any(row["kernel_us"] is None for row in forests.values()):
        return None
    return statistics.geometric_mean(row["kernel_us"] / row["roofline_us"] for row in forests.values())


def best(rows: list[dict], head_dim: int, table: str) -> Config | None:
    """Return the config of the least score, or None if none serves all forests."""
    scores = {config: score(forests) for config, forests in by_config(rows, head_dim, table).items()}
    served = {config: value for config, value in scores.items() if value is not None}
    return min(served, key=served.__getitem__, default=None)


def report(rows: list[dict], head_dim: int, table: str) -> str:
    """Lay out a table: a line for each config, a column of microseconds for each forest, the score, and the best."""
    grouped = by_config(rows, head_dim, table)
    names = list(next(iter(grouped.values())))
    lines = [f"{table}, head size {head_dim}", f"{'block':>6} {'stages':>6}  " + "  ".join([*names, "x roofline"])]
    for config, forests in grouped.items():
        times = [forests[name]["kernel_us"] for name in names]
        cells = [
            "-".rjust(len(name)) if us is None else f"{us:{len(name)}.1f}"
            for name, us in zip(names, times, strict=True)
        ]
        value = score(forests)
        errors = [row["error"] for row in forests.values() if row["kernel_us"] is None]
        cells.append(errors[0] if value is None else f"{value:10.3f}")
        lines.append(f"{config.block_tokens:6} {config.stages:6}  " + "  ".join(cells))
    lines.append(f"best: {best(rows, head_dim, table)}, at present {TABLES[table].get(head_dim)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
