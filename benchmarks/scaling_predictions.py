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
    by_kernels,
    calibrated,
    case_of,
    config_of,
    group_times,
    memory_bytes,
    step_us,
    with_meetings,
)
from codec_jax.nnx.parallel import Parallel

#: What `--predict` looks at: groups that decode a document together, and GPUs of several hosts with a document for each
#: group.
MODELS = ("qwen3-4b", "qwen3-32b", "llama-3.1-70b")
PREDICTED_DOCUMENTS, PREDICTED_REQUESTS = (32_768, 120_000, 1 << 20), (16, 64, 256)
GROUPS, REPLICATED = (1, 2, 4, 8, 16, 32, 64), (16, 128, 1024)

#: Rows of one GPU with the parts of a step: costs are fitted to them and to the steps of one GPU among those below.
FITTED = "decoding_qwen3_4b_h200"
#: Rows of one and several GPUs of one host, of which each file has one GPU: what waits are fitted to. First those with
#: exchanges by XLA, then those by kernels.
FITTED_TOGETHER = (
    "scaling_32b_32k_64_h200",
    "scaling_32b_32k_256_h200",
    "scaling_32b_16_h200",
    "scaling_32b_64_h200",
    "scaling_32b_256_h200",
    "scaling_32b_1m_2_h200",
    "scaling_32b_1m_16_h200",
    "scaling_32b_1m_64_h200",
    "scaling_32b_1m_256_h200",
    "scaling_70b_32k_64_h200",
    "scaling_70b_32k_256_h200",
    "scaling_70b_16_h200",
    "scaling_70b_256_h200",
    "scaling_70b_1m_16_h200",
    "scaling_70b_1m_64_h200",
    "scaling_70b_1m_256_h200",
    "scaling_32b_32k_16_h200",
    "scaling_32b_32k_16_two_h200",
    "scaling_32b_16_two_h200",
    "scaling_32b_64_two_h200",
    "scaling_32b_256_two_h200",
    "scaling_32b_1m_2_two_h200",
    "scaling_70b_32k_16_h200",
    "scaling_70b_32k_16_two_h200",
    "scaling_70b_16_two_h200",
    "scaling_70b_64_h200",
    "scaling_70b_64_two_h200",
)
#: Rows of one and two GPUs, with exchanges by kernels, that the fit did not see: of another model, of 64 requests over
#: another length, and with as many layers as fit.
MEASURED_AFTERWARDS = (
    "scaling_4b_h200",
    "scaling_4b_120k_h200",
    "scaling_32b_32k_64_two_h200",
    "scaling_32b_64_deep_two_h200",
    "scaling_70b_32k_64_two_h200",
    "scaling_70b_64_deep_two_h200",
)
#: Nor these, of one and four GPUs, since POR merges across devices.
MEASURED_SINCE = (
    "scaling_32b_32k_16_four_h200",
    "scaling_32b_32k_64_four_h200",
    "scaling_32b_32k_256_four_h200",
    "scaling_32b_16_four_h200",
    "scaling_32b_64_four_h200",
    "scaling_32b_256_four_h200",
    "scaling_70b_32k_16_four_h200",
    "scaling_70b_32k_64_four_h200",
    "scaling_70b_32k_256_four_h200",
    "scaling_70b_16_four_h200",
    "scaling_70b_64_four_h200",
)


@cache
def costs_of_an_h200(without: str = "") -> Costs:
    """Fit the model to the committed rows of one and several H200s, but for those of one file."""
    hosts = [rows_of(stem, "step") for stem in FITTED_TOGETHER if stem != without]
    alone = rows_of(FITTED, "shared") + [row for rows in hosts for row in rows if row["gpus"] == 1]
    machine = MACHINES["NVIDIA H200"]
    return with_meetings(hosts, machine, calibrated(alone, machine))


def rows_of(stem: str, variant: str) -> list[dict]:
    """Return the rows of a result file that are of a variant: "shared" of benchmarks.decoding, "step" of this one."""
    rows = json.loads((Path(__file__).parent / f"results/{stem}.json").read_text())["rows"]
    return [row for row in rows if row["variant"] == variant]


def predict_all() -> Iterator[dict]:
    """Yield rows on one GPU and several, measured beside predicted, and the fastest groups of every case."""
    machine = MACHINES["NVIDIA H200"]
    common = provenance() | {"device": "model"}
    assumed = {"latency_inside_us": machine.inside.latency_us, "assumed_latency_between_us": machine.between.latency_us}
    yield from (with_parts(row, machine) | common for row in rows_of(FITTED, "shared"))
    for stem in FITTED_TOGETHER:
        yield from (on_a_host(row, machine, costs_of_an_h200(stem)) | common for row in rows_of(stem, "step"))
    for when, stems in ("afterwards", MEASURED_AFTERWARDS), ("since", MEASURED_SINCE):
        for stem in stems:
            rows = (on_a_host(row, machine, costs_of_an_h200()) for row in rows_of(stem, "step"))
            yield from (row | {"variant": f"{row['variant']}, {when}"} | common for row in rows)
    for model, document, requests in product(MODELS, PREDICTED_DOCUMENTS, PREDICTED_REQUESTS):
        yield from (row | assumed | common for row in predicted(model, SharedDocument(document, requests), machine))


def with_parts(row: dict, machine: Machine) -> dict:
    """Lay the time of a step on one GPU, and its parts over their rooflines, beside what the model says."""
    reading = row["weight_bytes"] / machine.rates.read_bytes_per_us
    return on_a_host({"gpus": 1, "tensor": 1, "context": 1} | row, machine, costs_of_an_h200()) | {
        "variant": "parts",
        # Reading the weights takes longer than their products in all of them.
        "attention_over_roofline": row["attention_us"] / (row["roofline_us"] - reading),
        "products_over_roofline": row["products_us"] / reading,
        "costs": asdict(costs_of_an_h200()),
    }


def on_a_host(row: dict, machine: Machine, costs: Costs) -> dict:
    """Lay the time of a step on one GPU or several beside what the model says."""
    group, layers = Parallel(row["tensor"], row["context"]), f", {row['layers']} layers" if "layers" in row else ""
    parts = step_us(config_of(row), case_of(row), group, machine, costs, by_kernels(row))
    return {
        "name": f"{row['model']}{layers}, {row['name']}",
        "variant": "several GPUs" if row["gpus"] > 1 else "one GPU",
        "model": row["model"],
        "wall_us": row["wall_us"],
        "predicted_us": math.fsum(parts.values()),
        "parts_us": {part: round(us, 1) for part, us in parts.items()},
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
            "tensor": group.tensor,
            "context": group.context,
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
