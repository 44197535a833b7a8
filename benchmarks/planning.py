"""Time planning and re-planning on the CPU, and draw the load that plans predict for each thread block.

    python -m benchmarks.planning --json benchmarks/results/planning.json --plot benchmarks/results/planning.svg

Plans are for the Hopper kernels and an H200, whatever machine this runs on. A time is the median of whole calls, after
one that is not counted: of make_plan, of replan where every leaf grew by 16 tokens and got a page for the next ones,
and of a jitted program that takes forest and plan from the host, as the arrays that they are and as one buffer that the
program takes apart. A row has the roofline of a call, too, as benchmarks.attention has it: a plan serves 16 tokens in
all layers of a model. `--plot` and `--overhead` need matplotlib, which the extra `bench` installs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from benchmarks.attention import bounds
from benchmarks.inputs import Layout
from benchmarks.rows import conditions, publish, write_draft
from benchmarks.workloads import PAPER, Workload, degenerate, k_ary, shared_root
from codec_jax import CostModel, Forest, PagePool, Plan, make_plan
from codec_jax import cost as costs
from codec_jax.replan import replan
from codec_jax.schedule import loads

#: What make_plan takes from the device where it is a GPU.
TILING = {"num_ctas": 132, "tile_rows": 64, "block_tokens": 128, "lanes": 2}

MANY_QUESTIONS, MANY_REQUESTS = shared_root(120_000, 64, 2048), k_ary(4, 6, 256)
BATCHES = [shared_root(120_000, 2**i, 2048) for i in range(11)]
FORESTS = list({each.name: each for each in [MANY_QUESTIONS, MANY_REQUESTS, *PAPER, *BATCHES]}.values())
DRAWN = [MANY_QUESTIONS, MANY_REQUESTS, k_ary(2, 6, 1024), degenerate(6, 4096)]

QUICK = 2  # forests
STEPS, LAYERS = 16, 36  # what a plan serves: tokens of every request, layers of Qwen3-4B
LEAST_CALLS, LEAST_SECONDS = 15, 0.3


def main() -> None:
    """Measure, write the rows, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="an SVG file of predicted loads")
    parser.add_argument("--overhead", type=Path, help="an SVG file of times by batch size")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK} forests only")
    arguments = parser.parse_args()
    layout = Layout()
    rows: list[dict] = []
    for workload in tqdm(FORESTS[: QUICK if arguments.quick else None]):
        rows.append(measure(workload, layout))
        write_draft(rows, arguments.json)
        tqdm.write(line(rows[-1]))
    publish(arguments.json)
    if arguments.plot:
        plans = {workload.name: planning_call(forest_of(workload, layout), layout)() for workload in DRAWN}
        draw({name: loads(plan) for name, plan in plans.items()}, arguments.plot)
    if arguments.overhead:
        from benchmarks import charts

        charts.planning(rows, arguments.overhead)


def forest_of(workload: Workload, layout: Layout) -> Forest:
    """Build the forest of a workload."""
    return Forest.from_nodes(*workload[1:], page_size=layout.page_size)


def planning_call(forest: Forest, layout: Layout, **options: int) -> Callable[[], Plan]:
    """Return make_plan's call on a forest."""
    model = CostModel.shipped("NVIDIA H200", costs.Layout(*layout)) or CostModel.roofline(costs.Layout(*layout))
    heads = {"num_q_heads": layout.num_q_heads, "num_kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim}
    return partial(make_plan, forest, **heads, **TILING, **options, cost_model=model)


def replanning_call(forest: Forest, layout: Layout) -> tuple[Callable[[], Plan], bool]:
    """Return the call of replan after 16 tokens on every leaf, and whether it extends the plan before."""
    pool = PagePool.create(len(forest.used_pages) + 2 * forest.request_capacity, forest.used_pages)
    forest, pool = forest.reserve(pool, STEPS)
    plan = planning_call(forest, layout, steps=STEPS)()
    grown, _ = forest.extend(STEPS).reserve(pool, STEPS)
    call = partial(replan, plan, forest, grown, steps=STEPS)
    return call, call().merge_ptr is plan.merge_ptr  # which an extended plan has from the one before


def copy_calls(forest: Forest, plan: Plan) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls of a program that takes forest and plan, and of one that takes them as one buffer."""
    leaves = jax.tree.leaves((forest, plan))
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def use(leaves: list[jax.Array]) -> jax.Array:
        return sum(leaf.sum() for leaf in leaves)

    def unpack(buffer: jax.Array) -> list[jax.Array]:
        return [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(buffer, ends), leaves, strict=True)]

    apart = jax.jit(lambda forest_and_plan: use(jax.tree.leaves(forest_and_plan)))
    packed = jax.jit(lambda buffer: use(unpack(buffer)))

    return (
        lambda: jax.block_until_ready(apart((forest, plan))),
        lambda: jax.block_until_ready(packed(np.concatenate([leaf.reshape(-1) for leaf in leaves]))),
    )


def clocked(call: Callable[[], object]) -> list[float]:
    """Return the times of calls in microseconds."""
    call()
    times: list[float] = []
    while len(times) < LEAST_CALLS or sum(times) < LEAST_SECONDS * 1e6:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def measure(workload: Workload, layout: Layout) -> dict:
    """Time one workload; returns its row."""
    forest = forest_of(workload, layout)
    call = planning_call(forest, layout)
    plan = call()
    times = clocked(call)
    again, extended = replanning_call(forest, layout)
    apart, packed = copy_calls(forest, plan)
    load = loads(plan)
    common = {name: value for name, value in conditions(layout, "numpy").items() if name != "dtype"}
    return {
        "name": workload.name,
        "requests": len(workload.leaf),
        "nodes": len(workload.parent),
        "roofline_us": bounds(workload, forest, layout)["roofline_us"],
        "plan_us": statistics.median(times),
        "least_plan_us": min(times),
        "replan_us": statistics.median(clocked(again)),
        "replan_extends": extended,
        "copy_us": statistics.median(clocked(apart)),
        "packed_copy_us": statistics.median(clocked(packed)),
        "calls": len(times),
        "segments": int(plan.cta_ptr[-1]),
        "mean_load": float(load.mean()),
        "most_load": float(load.max()),
        "costs": f"{plan.cost_model.device} {plan.cost_model.date}".strip(),
        **TILING,
        **common,
        "device": processor(),
        "accelerator": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
    }


def served_us(row: dict) -> float:
    """Return what the attention that a plan serves takes at least."""
    return STEPS * LAYERS * row["roofline_us"]


def processor() -> str:
    """Return the name of the CPU."""
    described = Path("/proc/cpuinfo")
    if described.exists():
        for entry in described.read_text().splitlines():
            name, _, value = entry.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def line(row: dict) -> str:
    """Show a row: times, and how much more than the mean the busiest thread block has to do."""
    again = f"{'extended' if row['replan_extends'] else 'anew'} in {row['replan_us']:.0f} us"
    times = f"{row['plan_us']:9.0f} us  {row['least_plan_us']:9.0f} us at least  {again:<21}"
    return f"{row['name']:<42} {times}  most load {row['most_load'] / row['mean_load']:.3f} x mean"


def draw(load: dict[str, Float[np.ndarray, " num_ctas"]], out: Path) -> None:
    """Draw a chart for each forest: a bar for each thread block, and a line at the mean."""
    from benchmarks.plot import chart_grid, save

    canvas, charts = chart_grid(len(load), 4.8, 2.3)
    for axes, (name, values) in zip(charts, load.items(), strict=True):
        axes.bar(np.arange(len(values)), values, width=1.0, color="#56B4E9", edgecolor="white", linewidth=0.3)
        axes.axhline(values.mean(), color="#333333", linewidth=1.2)
        axes.set_title(f"{name}: most {values.max() / values.mean():.3f} × mean", fontsize=10)
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    canvas.supxlabel("thread block", fontsize=9)
    canvas.supylabel("predicted load, µs", fontsize=9)
    save(canvas, out)


if __name__ == "__main__":
    main()
