"""Time forest_attention under other divisions of its work, and without sharing: what the planner is worth on a GPU.

    python -m benchmarks.ablation --json benchmarks/results/ablation.json [--part NAME ...] [--quick]

    sharing     neither sharing nor division, the tree only, division only, both: on two trees of 200k tokens of context
    fixed       every stream cut into 1, 2, 4, ..., 128 slices, and the default
    policies    every policy of codec_jax.division on the paper's sweeps
    predicted   the time that the plan's cost model predicts, on the paper's sweeps and on recorded trees

Kernel times as in benchmarks.attention, each result held to float32 attention before it is timed. A row that fails has
no time and says why.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxtyping import Array
from tqdm import tqdm

from benchmarks.attention import bounds
from benchmarks.inputs import Inputs, Layout, check, make_inputs, planned_call, reference, with_room
from benchmarks.rows import RESUME, attempt, conditions, draft_of, find, measured_before, publish, write_draft
from benchmarks.timing import kernel_time, require_gpu
from benchmarks.traces import RECORDED, recorded_trees
from benchmarks.turns import GPU
from benchmarks.workloads import PAPER, Workload, degenerate, k_ary, shared_root
from codec_jax.division import Policy
from codec_jax.schedule import call_us, loads
from codec_jax.traffic import count_pass

#: Contexts of 200,000 tokens at most: all requests at the same depth, and one at every depth.
DEEP = [
    k_ary(2, 5, 40_000)._replace(name="balanced binary, 200k context"),
    degenerate(8, 25_000)._replace(name="degenerate, 200k context"),
]
FIXED_FORESTS = [*DEEP, shared_root(120_000, 16, 2048), shared_root(120_000, 64, 2048), k_ary(2, 5, 1024)]
FIXED = [1, 2, 4, 8, 16, 32, 64, 128]
REPEATS = 15


class Variant(NamedTuple):
    """A way to plan."""

    name: str
    policy: Policy = "aligned"
    shared: bool = True


SHARING = [
    Variant("neither", policy=1, shared=False),
    Variant("tree only", policy=1),
    Variant("division only", shared=False),
    Variant("both"),
]
DEFAULT = Variant("aligned")
PARTS = ("sharing", "fixed", "policies", "predicted")


class Case(NamedTuple):
    """A forest and the ways to plan for it."""

    part: str
    workload: Workload
    variants: list[Variant]


def main() -> None:
    """Measure, write the rows and sum them up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--plot", type=Path, help="an SVG file; of sharing and fixed divisions")
    parser.add_argument("--quick", action="store_true", help="the last forest of each part only")
    parser.add_argument("--resume", action="store_true", help=RESUME)
    arguments = parser.parse_args()
    require_gpu(parser)
    cases = [case for part in arguments.part for case in cases_of(part)[-1 if arguments.quick else 0 :]]
    rows = collect(cases, Layout(), arguments.json, measured_before(arguments.json, arguments.resume))
    print(summary(rows))
    failed = [f"{row['name']}, {row['variant']}" for row in rows if row["kernel_us"] is None]
    if failed:
        sys.exit(
            f"failed: {'; '.join(failed)}. The rows are in {draft_of(arguments.json)}, {arguments.json} is as it was"
        )
    publish(arguments.json)
    if arguments.plot:
        from benchmarks import charts

        charts.ablation(rows, arguments.plot)


def cases_of(part: str) -> list[Case]:
    """List the forests of a part and the ways to plan for them."""
    if part == "sharing":
        return [Case(part, workload, SHARING) for workload in DEEP]
    if part == "fixed":
        fixed = [Variant(f"{n} slices" if n > 1 else "1 slice", policy=n) for n in FIXED]
        return [Case(part, workload, [*fixed, DEFAULT]) for workload in FIXED_FORESTS]
    if part == "policies":
        variants = [DEFAULT, Variant("paper", policy="paper")]
        return [Case(part, workload, variants) for workload in PAPER]
    trees = [case.workload for case in recorded_trees(RECORDED)]
    return [Case(part, workload, [DEFAULT]) for workload in [*PAPER, *trees]]


def collect(cases: list[Case], layout: Layout, path: Path, before: list[dict]) -> list[dict]:
    """Measure one case after another, keeping the draft of `path` up to date; what fails does not end it.

    What is among the rows measured `before` stays as it is.
    """
    rows: list[dict] = []
    common = conditions(layout)
    with tqdm(total=sum(len(case.variants) for case in cases), unit="plan") as bar:
        for case in cases:
            with GPU.taken():
                for row in measure(case, layout, common, before):
                    rows.append(row)
                    write_draft(rows, path)
                    bar.update()
                    tqdm.write(line(row))
    return rows


def measure(case: Case, layout: Layout, common: dict, before: list[dict]) -> Iterator[dict]:
    """Draw inputs once, then check and time every variant that was not measured before."""
    workload = case.workload

    @functools.cache
    def prepare() -> tuple[Inputs, Array, dict]:
        inputs = make_inputs(workload, layout)
        return inputs, reference(inputs), bounds(workload, inputs.forest, layout)

    def measured(variant: Variant) -> dict:
        inputs, expected, limits = prepare()
        return limits | measure_variant(variant, inputs, layout, expected)

    for variant in case.variants:
        known = {"part": case.part, "name": workload.name, "variant": variant.name} | common
        row = find(before, known)
        yield row if row is not None else known | attempt(functools.partial(measured, variant), "kernel_us", "error")


def measure_variant(
    variant: Variant, inputs: Inputs, layout: Layout, expected: Array, implementation: str = "mosaic"
) -> dict:
    """Check and time one plan, and say what its cost model expects of it."""
    if not variant.shared:
        inputs = inputs._replace(forest=with_room(inputs.forest.unshared()))
    call, plan = planned_call(inputs, layout, implementation, variant.policy)
    error = check(call(), expected)
    kernel_us, launches = kernel_time(call, REPEATS)
    load = loads(plan)
    return {
        "kernel_us": kernel_us,
        "launches": launches,
        "predicted_us": call_us(plan),
        "makespan_over_mean": float(load.max() / load.mean()),
        "segments": int(plan.cta_ptr[-1]),
        "partials": int(plan.merge_ptr[-1]),
        "kv_bytes": count_pass(inputs.forest, plan).kv_tokens_read * layout.kv_token_bytes,
        "relative_error": error,
        "costs": f"{plan.cost_model.device} {plan.cost_model.date}".strip(),
    }


def line(row: dict) -> str:
    """Show a row."""
    title = f"{row['part']:<10} {row['name']:<36} {row['variant']:<14}"
    if row["kernel_us"] is None:
        return f"{title} {row['error']}"
    return (
        f"{title} {row['kernel_us']:9.1f} us  predicted {row['predicted_us']:9.1f}  "
        f"most load {row['makespan_over_mean']:.3f} x mean  {row['kernel_us'] / row['roofline_us']:6.2f} x roofline"
    )


def summary(rows: list[dict]) -> str:
    """Say how much each variant takes of the default's time, and how far off predictions are."""
    lines = []
    measured = [row for row in rows if row["kernel_us"]]
    for part in PARTS:
        of_part = [row for row in measured if row["part"] == part]
        default = {row["name"]: row["kernel_us"] for row in of_part if row["variant"] in ("aligned", "both")}
        for variant in dict.fromkeys(row["variant"] for row in of_part):
            times = [row["kernel_us"] / default[row["name"]] for row in of_part
                     if row["variant"] == variant and row["name"] in default]  # fmt: skip
            if times and variant not in ("aligned", "both"):
                lines.append(
                    f"{part}: {variant} takes {statistics.geometric_mean(times):.3f} x the default over {len(times)} "
                    f"forests, {min(times):.3f} x at least, {max(times):.3f} x at most"
                )
        errors = [
            abs(row["predicted_us"] / row["kernel_us"] - 1) for row in of_part if row["variant"] in ("aligned", "both")
        ]
        if errors:
            lines.append(
                f"{part}: predictions are {100 * statistics.median(errors):.1f}% off in the median of {len(errors)} "
                f"forests, {100 * max(errors):.1f}% at most"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
