"""What benchmarks.scaling_model says of published models on up to 1,024 GPUs, and of the committed rows.

`python -m benchmarks.scaling --predict` writes these rows; no GPU is needed for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path

from benchmarks.decode_step import SharedDocument
from benchmarks.rows import provenance
from benchmarks.scaling_model import (
    MACHINES,
    PLAIN_MODELS,
    Costs,
    Machine,
    calibrated,
    case_of,
    config_of,
    group_times,
    memory_bytes,
    step_us,
    with_meetings,
)
from codec_jax.nnx.parallel import ALONE, Parallel

#: What `--predict` looks at: groups that decode a document together, and GPUs of several hosts with a document for each
#: group.
MODELS = ("qwen3-4b", "qwen3-32b", "llama-3.1-70b")
PREDICTED_DOCUMENTS, PREDICTED_REQUESTS = (32_768, 120_000, 1 << 20), (16, 64, 256)
GROUPS, REPLICATED = (1, 2, 4, 8, 16, 32, 64), (16, 128, 1024)

#: Rows of one GPU: the first are what costs are fitted to, the others what they are tried on. The latter are from
#: before loops of a fixed length, which left time between kernels that there is no more.
FITTED, TRIED = ("decoding_120000_h200", "decoding_32768_16_h200", "decoding_32768_64_h200"), ("decoding_32768_h100",)
#: Rows of one and several GPUs of one host, of which each file has one GPU: what meetings are fitted to.
FITTED_TOGETHER = (
    "scaling_4b_h200",
    "scaling_32b_32k_16_h200",
    "scaling_32b_32k_64_h200",
    "scaling_32b_32k_256_h200",
    "scaling_32b_16_h200",
    "scaling_32b_64_h200",
    "scaling_32b_256_h200",
    "scaling_32b_1m_16_h200",
    "scaling_32b_1m_64_h200",
    "scaling_70b_16_h200",
    "scaling_70b_64_h200",
    "scaling_70b_256_h200",
)


@cache
def costs_of_an_h200() -> Costs:
    """Fit the model to the committed rows of one and several H200s."""
    rows, machine = [row for stem in FITTED for row in rows_of(stem, "shared")], MACHINES["NVIDIA H200"]
    costs = calibrated(rows, PLAIN_MODELS[rows[0]["model"]], machine)
    return with_meetings([rows_of(stem, "step") for stem in FITTED_TOGETHER], machine, costs)


def rows_of(stem: str, variant: str) -> list[dict]:
    """Return the rows of a result file that are of a variant: "shared" of benchmarks.decoding, "step" of this one."""
    rows = json.loads((Path(__file__).parent / f"results/{stem}.json").read_text())["rows"]
    return [row for row in rows if row["variant"] == variant]


def predict_all() -> Iterator[dict]:
    """Yield rows on one GPU and several, measured beside predicted, and the fastest groups of every case."""
    machine = MACHINES["NVIDIA H200"]
    common = provenance() | {"device": "model"}
    assumed = {"latency_inside_us": machine.inside.latency_us, "assumed_latency_between_us": machine.between.latency_us}
    for stem in FITTED + TRIED:
        yield from (on_one_gpu(row, stem in FITTED) | common for row in rows_of(stem, "shared"))
    for stem in FITTED_TOGETHER:
        yield from (on_several(row, machine) | common for row in rows_of(stem, "step") if row["gpus"] > 1)
    for model, document, requests in product(MODELS, PREDICTED_DOCUMENTS, PREDICTED_REQUESTS):
        yield from (row | assumed | common for row in predicted(model, SharedDocument(document, requests), machine))


def on_one_gpu(row: dict, fitted: bool) -> dict:
    """Lay the time of a row, and its parts over their rooflines, beside what the model says."""
    config, machine, case = PLAIN_MODELS[row["model"]], MACHINES[row["device"]], case_of(row)
    reading = row["weight_bytes"] / machine.rates.read_bytes_per_us
    return {
        "name": f"{case.name}, {row['device']}",
        "variant": "one GPU",
        "model": row["model"],
        "fitted": fitted,
        "wall_us": row["wall_us"],
        "kernel_us": row["kernel_us"],
        "predicted_us": sum(step_us(config, case, ALONE, machine, costs_of_an_h200()).values()),
        # Reading the weights takes longer than their products in all of them.
        "attention_over_roofline": row["attention_us"] / (row["roofline_us"] - reading),
        "products_over_roofline": row["products_us"] / reading,
        "costs": asdict(costs_of_an_h200()),
    }


def on_several(row: dict, machine: Machine) -> dict:
    """Lay the time of a step on several GPUs beside what the model says."""
    group = Parallel(row["tensor"], row["context"])
    parts = step_us(config_of(row), case_of(row), group, machine, costs_of_an_h200())
    return {
        "name": f"{row['model']}, {row['layers']} layers, {row['name']}",
        "variant": "several GPUs",
        "model": row["model"],
        "wall_us": row["wall_us"],
        "predicted_us": math.fsum(parts.values()),
    }


def predicted(model: str, case: SharedDocument, machine: Machine) -> Iterator[dict]:
    """Yield the fastest group of each number of GPUs, and the fastest of one host for each document on several hosts.

    Tokens per second and efficiency are of all requests: each group has a document, and so many of them.
    """
    config, alone, best = PLAIN_MODELS[model], 0.0, None
    for devices in GROUPS:
        if not (times := group_times(config, case, devices, machine, costs_of_an_h200())):
            continue
        group = min(times, key=times.__getitem__)
        parts = step_us(config, case, group, machine, costs_of_an_h200())
        row = {
            "name": f"{model}, {case.name}, {devices} GPUs",
            "variant": "one group",
            "model": model,
            "document_tokens": case.document,
            "requests": case.requests,
            "own_tokens": case.own,
            "gpus": devices,
            "data": 1,
            **asdict(group),
            "device_bytes": int(memory_bytes(config, case, group)),
            "predicted_us": times[group],
            "others_us": {
                f"{each.context} x {each.tensor}": round(us, 1) for each, us in times.items() if each != group
            },
            "decides": max(parts, key=parts.__getitem__),
            "parts_us": {part: round(us, 1) for part, us in parts.items()},
        }
        row["tokens_per_second"] = case.requests / row["predicted_us"] * 1e6
        alone = alone or row["tokens_per_second"] / devices
        row["efficiency"] = row["tokens_per_second"] / devices / alone
        yield row
        if devices <= machine.gpus_per_host and (best is None or row["predicted_us"] < best["predicted_us"]):
            best = row
    for gpus in REPLICATED if best else ():
        data = gpus // best["gpus"]
        name = f"{model}, {data} x {case.name}, {gpus} GPUs"
        changed = {"name": name, "variant": "groups", "gpus": gpus, "data": data}
        kept = {field: value for field, value in best.items() if field not in ("parts_us", "others_us")}
        yield kept | changed | {"tokens_per_second": data * best["tokens_per_second"]}
