"""Time planning on the CPU, and predict how evenly plans load the thread blocks of an H200.

    python -m benchmarks.planning --json benchmarks/results/planning.json

Plans are for the Hopper kernels, whatever machine this runs on. A time is the median of whole calls of make_plan, after
one that is not counted. A row has what attention takes at least in all that a plan serves, 16 tokens in all layers of a
model, each call at its roofline. The load of the busiest thread block over the mean is predicted by the cost model of
the plan, for the default division, the paper's, and streams that are not divided.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks.attention import bounds
from benchmarks.inputs import Layout
from benchmarks.report import conclude
from benchmarks.rows import collect, conditions
from benchmarks.timing import command
from benchmarks.workloads import PAPER, Workload, k_ary, shared_root
from codec_jax import CostModel, Forest, Plan, make_plan
from codec_jax.planning.cost import HeadLayout
from codec_jax.planning.division import Policy
from codec_jax.planning.predict import loads

#: What make_plan takes from an H200, whose last 4 multiprocessors it leaves out where reading decides.
TILING = {"num_ctas": 128, "tile_rows": 64, "block_tokens": 128, "lanes": 2}

BATCHES = [shared_root(120_000, 2**i, 2048) for i in range(11)]
FORESTS = list({each.name: each for each in [*BATCHES, *PAPER, k_ary(4, 6, 256)]}.values())
POLICIES: tuple[Policy, ...] = ("aligned", "paper", 1)

STEPS, LAYERS = 16, 36  # what a plan serves: tokens of every request, layers of Qwen3-4B
MIN_CALLS, MIN_SECONDS = 15, 0.3


def main() -> None:
    """Measure and write the rows."""
    path = command(__doc__).parse_args().json
    conclude("planning", collect((measure(each, Layout()) for each in tqdm(FORESTS)), path), path)


def planning_call(forest: Forest, layout: Layout, policy: Policy = "aligned") -> Callable[[], Plan]:
    """Return make_plan's call on a forest."""
    of_heads = HeadLayout(*layout)
    model = CostModel.shipped("NVIDIA H200", of_heads) or CostModel.roofline(of_heads)
    return partial(make_plan, forest, **layout.heads, **TILING, policy=policy, cost_model=model)


def max_over_mean_load(plan: Plan) -> float:
    """Return how much longer than the mean thread block the busiest one is expected to take."""
    load = loads(plan)
    return float(load.max() / load.mean())


def clocked(call: Callable[[], object]) -> list[float]:
    """Return the times of calls in microseconds."""
    call()
    times: list[float] = []
    while len(times) < MIN_CALLS or sum(times) < MIN_SECONDS * 1e6:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def measure(workload: Workload, layout: Layout) -> dict:
    """Time one workload; returns its row."""
    forest = Forest.from_nodes(*workload[1:], page_size=layout.page_size)
    call = planning_call(forest, layout)
    plan = call()
    times = clocked(call)
    common = {name: value for name, value in conditions(layout, "numpy").items() if name != "dtype"}
    return {
        "name": workload.name,
        "requests": len(workload.leaf),
        "nodes": len(workload.parent),
        "attention_us": STEPS * LAYERS * bounds(workload, forest, layout)["roofline_us"],
        "plan_us": statistics.median(times),
        "min_plan_us": min(times),
        "calls": len(times),
        "segments": int(plan.arrays.cta_ptr[-1]),
        "max_over_mean_load": {
            str(policy): max_over_mean_load(planning_call(forest, layout, policy)()) for policy in POLICIES
        },
        "costs": f"{plan.cost_model.device} {plan.cost_model.date}".strip(),
        **TILING,
        **common,
        "device": processor(),
        "accelerator": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
    }


def processor() -> str:
    """Return the name of the CPU."""
    described = Path("/proc/cpuinfo")
    if described.exists():
        for entry in described.read_text().splitlines():
            name, _, value = entry.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
