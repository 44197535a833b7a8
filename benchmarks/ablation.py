"""Time forest_attention under other divisions of its work, and without sharing: what the planner is worth on a GPU.

    python -m benchmarks.ablation --json benchmarks/results/ablation.json [--part NAME ...]

    sharing     neither sharing nor division, the tree only, division only, both: on two trees of 200k tokens of context
    fixed       every stream cut into 1, 2, 4, ..., 128 slices, and the default
    policies    the default and the paper's policy on the paper's sweeps
    predicted   the time that the plan's cost model predicts, on the paper's sweeps and on recorded trees

Kernel times as in benchmarks.attention, each result held to float32 attention before it is timed. A row that fails has
no time and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

from jaxtyping import Array
from tqdm import tqdm

from benchmarks.attention import bounds
from benchmarks.inputs import Inputs, Layout, check, make_inputs, planned_call, reference, with_room
from benchmarks.report import conclude
from benchmarks.rows import collect, conditions, found_or_measured, measured_before
from benchmarks.timing import command, kernel_time, parse
from benchmarks.traces import recorded_trees
from benchmarks.turns import GPU
from benchmarks.workloads import PAPER, Workload, degenerate, k_ary, shared_root
from codec_jax.planning.division import Policy
from codec_jax.planning.predict import call_us, loads
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
    parser = command(__doc__, resumes=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    arguments = parse(parser)
    cases = [case for part in arguments.part for case in cases_of(part)]
    before = measured_before(arguments.json, arguments.resume)
    rows = collect(measure_all(cases, Layout(), before), arguments.json, before)
    failed = [f"{row['name']}, {row['variant']}" for row in rows if row["kernel_us"] is None]
    conclude("ablation", rows, arguments.json, failed)


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
    return [Case(part, workload, [DEFAULT]) for workload in [*PAPER, *(case.workload for case in recorded_trees())]]


def measure_all(cases: list[Case], layout: Layout, before: list[dict]) -> Iterator[dict]:
    """Yield a row for every variant of every case; what is among the rows measured `before` stays as it is."""
    common = conditions(layout)
    for case in tqdm(cases, unit="forest"):
        prepare = cache(partial(prepared, case.workload, layout))
        for variant in case.variants:
            known = {"part": case.part, "name": case.workload.name, "variant": variant.name} | common
            with GPU.taken():
                row = found_or_measured(before, known, partial(measure, variant, layout, prepare))
            yield row


def prepared(workload: Workload, layout: Layout) -> tuple[Inputs, Array, dict]:
    """Draw inputs; return them, the expected result, and the fields that all variants share."""
    inputs = make_inputs(workload, layout)
    return inputs, reference(inputs), bounds(workload, inputs.forest, layout)


def measure(variant: Variant, layout: Layout, prepare: Callable[[], tuple], implementation: str = "mosaic") -> dict:
    """Check and time one plan, and say what its cost model expects of it."""
    inputs, expected, common = prepare()
    if not variant.shared:
        inputs = inputs._replace(forest=with_room(inputs.forest.unshared()))
    call, plan = planned_call(inputs, layout, implementation, variant.policy)
    error = check(call(), expected)
    kernel_us, launches = kernel_time(call, REPEATS)
    load = loads(plan)
    return common | {
        "kernel_us": kernel_us,
        "launches": launches,
        "predicted_us": call_us(plan),
        "makespan_over_mean": float(load.max() / load.mean()),
        "segments": int(plan.arrays.cta_ptr[-1]),
        "partials": int(plan.arrays.merge_ptr[-1]),
        "kv_bytes": count_pass(inputs.forest, plan).kv_tokens_read * layout.kv_token_bytes,
        "relative_error": error,
        "costs": f"{plan.cost_model.device} {plan.cost_model.date}".strip(),
    }


if __name__ == "__main__":
    main()
