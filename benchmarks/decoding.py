"""Time whole decode steps of a published model on a GPU: requests over one document, with and without sharing.

    python -m benchmarks.decoding --json benchmarks/results/decoding.json

A step is the sampler's: the decoder with random weights, logits, sampling, and the loop around them, all in one jitted
call of several tokens. Three ways of attention run on the same inputs (benchmarks/decode_step.py); the first step's
logits of each are held to those of the first. The floor is what reading the weights and the unique KV once takes at
the rate of benchmarks/ceilings.py. What fails or does not fit has no time, and its row says why.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks.ceilings import ceilings
from benchmarks.decode_step import PAGE_SIZE, STEPS, VARIANTS, SharedDocument, Step, kv_token_bytes, weight_bytes
from benchmarks.inputs import Layout
from benchmarks.rows import attempt, conditions, draft_of, publish, write_draft
from benchmarks.timing import kernels_of, require_gpu, wall_time
from benchmarks.turns import GPU
from codec_jax.nnx import PUBLISHED, Decoder, random_decoder

DOCUMENTS, REQUESTS = (32_768, 120_000), (16, 64)

#: Part of a step -> what the names of its kernels have one of; the first part that fits is meant. Products are XLA's
#: own (gemm_fusion_dot) or those of cuBLAS, which are called by its newer kernels' prefix, by their library, or by what
#: they compute; what is none of these is "other": norms, rotation, writing K and V, sampling.
PARTS = {
    "attention": ("mosaic_gpu", "cudnn", "sdpa"),
    "products": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk"),
}

#: Rounding to bfloat16 in another order costs a few hundredths over all layers; a wrong context costs about 1.
MOST_DIFFERENCE = 0.2

ROUNDS, ROUND_SECONDS, MOST_CALLS = 3, 1.0, 20
LISTED_KERNELS = 16


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", choices=PUBLISHED, default="qwen3-4b")
    parser.add_argument("--documents", type=int, nargs="+", default=DOCUMENTS, help="tokens that all requests share")
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--quick", action="store_true", help="the first document and number of requests only")
    arguments = parser.parse_args()
    require_gpu(parser)
    cases = [SharedDocument(*each) for each in product(arguments.documents, arguments.requests)]
    config = PUBLISHED[arguments.model]
    common = {"model": arguments.model} | conditions(
        Layout(config.num_q_heads, config.num_kv_heads, config.head_dim, PAGE_SIZE)
    )
    model = random_decoder(config, progress=True)
    rows = collect(model, cases[:1] if arguments.quick else cases, arguments.variants, arguments.json, common)
    print(summary(rows))
    failed = [row["name"] for row in rows if "error" in row and row["variant"] != "cudnn"]
    if failed:
        sys.exit(
            f"failed: {'; '.join(failed)}. The rows are in {draft_of(arguments.json)}, {arguments.json} is as it was"
        )
    publish(arguments.json)
    if arguments.plot:
        from benchmarks import charts

        charts.decoding(rows, arguments.plot)


def collect(model: Decoder, cases: list[SharedDocument], variants: list[str], path: Path, common: dict) -> list[dict]:
    """Measure every variant of every case, keeping the draft of `path` up to date; one that fails does not end it."""
    rows: list[dict] = []
    references: dict[SharedDocument, np.ndarray] = {}
    for case, variant in tqdm(list(product(cases, variants))):
        row = {"name": f"{case.name}, {variant}", "variant": variant} | floors(model, case)
        with GPU.taken():
            row |= attempt(partial(measure, model, case, variant, references), "wall_us", "error")
        rows.append(row | common)
        write_draft(rows, path)
        tqdm.write(line(row))
    return rows


def floors(model: Decoder, case: SharedDocument) -> dict:
    """Count the bytes of a step, and what reading them once takes at least, in microseconds.

    `roofline_us` counts products too: weights are read while they multiply the rows of all requests, and a layer's
    attention lasts as long as its reading or its products, whichever takes longer.
    """
    config = model.config
    # Every call starts from the same lengths, so half of its tokens are there in the mean step, and the new one is.
    own = case.requests * (case.own + (STEPS + 1) / 2)
    unique, total = case.document + own, case.requests * case.document + own
    weights, kv = weight_bytes(model), unique * kv_token_bytes(config)
    products = 2 * (weights / 2) * case.requests
    attention = 4 * total * config.num_q_heads * config.head_dim * config.num_layers
    most = ceilings()
    return {
        "document_tokens": case.document,
        "own_tokens": case.own,
        "requests": case.requests,
        "tokens_per_call": STEPS,
        "weight_bytes": weights,
        "unique_kv_bytes": int(kv),
        "total_kv_bytes": int(total * kv_token_bytes(config)),
        "floor_us": (weights + kv) / most.read_bytes_per_us,
        "roofline_us": max(weights / most.read_bytes_per_us, products / most.flops_per_us)
        + max(kv / most.read_bytes_per_us, attention / most.flops_per_us),
    }


def measure(
    model: Decoder, case: SharedDocument, variant: str, references: dict[SharedDocument, Float[np.ndarray, "B V"]]
) -> dict:
    """Check and time one variant, in microseconds for each token of every request."""
    step = VARIANTS[variant](model, case)
    first = np.asarray(step(tokens=1))
    reference = references.setdefault(case, first)
    row = {"compile_seconds": step.compile_seconds, "logits_difference": difference(first, reference)}
    row["wall_us"] = wall(step)
    if variant == "shared":
        row |= {"sampled_wall_us": wall(step, 1.0), "top_p_wall_us": wall(step, 1.0, 0.95)}
    return row | attempt(partial(kernel_fields, step), "kernel_us", "kernel_error")


def difference(logits: Float[np.ndarray, "B V"], reference: Float[np.ndarray, "B V"]) -> float:
    """Return the largest relative difference of a request's logits, by the norm over the vocabulary.

    Raises ValueError if it is more than rounding can explain, or not a number.
    """
    apart = np.linalg.norm(logits - reference, axis=1) / np.linalg.norm(reference, axis=1)
    largest = float(apart.max())
    if not largest <= MOST_DIFFERENCE:
        raise ValueError(f"logits: expected a relative difference of at most {MOST_DIFFERENCE}, got {largest:.3g}")
    return largest


def wall(step: Step, temperature: float = 0.0, top_p: float = 1.0) -> float:
    """Return the time of a token by the host's clock: the median round of calls that are queued one after another."""

    def call() -> Array:
        return step(temperature=temperature, top_p=top_p)

    once = wall_time(call, 1)
    calls = min(MOST_CALLS, int(ROUND_SECONDS * 1e6 / once))
    rounds = [wall_time(call, calls) for _ in range(ROUNDS)] if calls > 1 else [once]
    return statistics.median(rounds) / STEPS


def kernel_fields(step: Step) -> dict:
    """Sum the kernels of a call, and those of each part, by CUPTI; list those that take longest."""
    kernels = kernels_of(step)
    times = dict.fromkeys([*PARTS, "other"], 0.0)
    for name, us in kernels:
        times[part_of(name)] += us / STEPS
    if not times["attention"]:
        raise RuntimeError(f"kernels: expected some with {' or '.join(PARTS['attention'])} in their names, got none")
    return {
        "kernel_us": sum(times.values()),
        "launches": len(kernels) / STEPS,
        **{f"{part}_us": us for part, us in times.items()},
        "kernels": by_kind(kernels),
    }


def part_of(kernel: str) -> str:
    """Say which of `PARTS` a kernel belongs to, by its name, or "other"."""
    return next((part for part, names in PARTS.items() if any(name in kernel.lower() for name in names)), "other")


def by_kind(kernels: list[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Add up kernels whose names differ in their numbers only: launches and microseconds of a token, longest first."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, us in kernels:
        kinds[re.sub(r"(_\d+)+$", "", name)[:120]].append(us)
    longest = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:LISTED_KERNELS]
    return {name: {"launches": len(us) / STEPS, "us": sum(us) / STEPS} for name, us in longest}


def line(row: dict) -> str:
    """Show a row: time of a token, multiple of the floor, kernels of each part; or why they are missing."""
    if not row["wall_us"]:
        return f"{row['name']:<28} {row['error']}"
    kernels = row.get("kernel_error") or (
        f"kernels {row['kernel_us']:9.1f} us in {row['launches']:6.1f} launches ("
        + ", ".join(f"{part} {row[f'{part}_us']:.1f}" for part in [*PARTS, "other"])
        + ")"
    )
    sampled = (
        f"sampled {row['sampled_wall_us']:.1f} us, with top-p {row['top_p_wall_us']:.1f} us"
        if "sampled_wall_us" in row
        else f"logits {row['logits_difference']:.3g} apart"
    )
    return (
        f"{row['name']:<28} {row['wall_us']:9.1f} us  {row['wall_us'] / row['floor_us']:6.3f} x floor  "
        f"{row['wall_us'] / row['roofline_us']:6.3f} x roofline  {kernels}  {sampled}  "
        f"compiled in {row['compile_seconds']:.0f} s"
    )


def summary(rows: list[dict]) -> str:
    """Say for each case how many times longer a step takes than the floor, and the other ways than sharing."""
    times = {(row["requests"], row["document_tokens"], row["variant"]): row for row in rows if row["wall_us"]}
    lines = [f"{len(times)} of {len(rows)} measured"]
    for (requests, document, variant), row in times.items():
        if variant != "shared":
            continue
        text = f"{requests} over {document}: {row['wall_us'] / row['floor_us']:.3f} x floor"
        for other in VARIANTS:
            if other != variant and (requests, document, other) in times:
                text += f", {times[requests, document, other]['wall_us'] / row['wall_us']:.2f} x faster than {other}"
        lines.append(text)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
