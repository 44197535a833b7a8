"""Time whole decode steps of a published model on a GPU: requests over one document, with and without sharing.

    python -m benchmarks.decoding --json benchmarks/results/decoding.json

A step is the sampler's: the decoder with random weights, logits, sampling, and the loop around them, all in one jitted
call of several tokens. Three ways of attention run on the same inputs (benchmarks/decode_step.py); the first step's
logits of each are held to those of the first. The floor is what reading the weights and the unique KV once takes, those
that the step needs (benchmarks/decode_floor.py). A way that fails or does not fit has no time, and its row says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from benchmarks.arguments import how_many
from benchmarks.decode_floor import floors
from benchmarks.decode_step import STEPS, VARIANTS, SharedDocument, Step, layout_of
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, conditions
from benchmarks.step_parts import parts_of
from benchmarks.timing import command, kernels_of, parse, wall_time
from benchmarks.turns import GPU
from codec_jax.nnx import PUBLISHED, Decoder, random_decoder

DOCUMENTS, REQUESTS = (32_768, 120_000), (16, 64)

#: Rounding to bfloat16 in another order costs a few hundredths over all layers; a wrong context costs about 1.
MAX_DIFFERENCE = 0.2

ROUNDS, ROUND_SECONDS, MAX_CALLS = 3, 1.0, 20


def main() -> None:
    """Measure and write the rows."""
    parser = command(__doc__)
    parser.add_argument("--model", choices=PUBLISHED, default="qwen3-4b")
    parser.add_argument(
        "--documents", type=how_many, nargs="+", default=DOCUMENTS, help="tokens that all requests share"
    )
    parser.add_argument("--requests", type=how_many, nargs="+", default=REQUESTS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parse(parser)
    cases = [SharedDocument(*each) for each in product(arguments.documents, arguments.requests)]
    config = PUBLISHED[arguments.model]
    common = {"model": arguments.model} | conditions(layout_of(config))
    model = random_decoder(config, progress=True)
    measured = measure_all(model, cases, arguments.variants, common)
    rows = collect(measured, arguments.json)
    failed = [row["name"] for row in rows if "error" in row and row["variant"] != "cudnn"]
    conclude("decoding", rows, arguments.json, failed)


def measure_all(model: Decoder, cases: list[SharedDocument], variants: list[str], common: dict) -> Iterator[dict]:
    """Yield a row for every variant of every case; one that fails says why, and does not end it."""
    references: dict[SharedDocument, np.ndarray] = {}
    counted = cache(partial(floors, model))
    for case, variant in tqdm(list(product(cases, variants))):
        row = {"name": f"{case.name}, {variant}", "variant": variant}
        with GPU.taken():
            row |= attempt(partial(counted, case), "floor_us", "error")
            row |= attempt(partial(measure, model, case, variant, references), "wall_us", "error")
        yield row | common


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
    if not largest <= MAX_DIFFERENCE:
        raise ValueError(f"logits: expected a relative difference of at most {MAX_DIFFERENCE}, got {largest:.3g}")
    return largest


def wall(
    step: Callable[..., Any], temperature: float = 0.0, top_p: float = 1.0, seconds: float = ROUND_SECONDS
) -> float:
    """Return the time of a token by the host's clock: the median round of calls that are queued one after another.

    A round takes `seconds` at most, or one call.
    """

    def call() -> Any:
        return step(temperature=temperature, top_p=top_p)

    once = wall_time(call, 1)
    calls = min(MAX_CALLS, int(seconds * 1e6 / once))
    rounds = [wall_time(call, calls) for _ in range(ROUNDS)] if calls > 1 else [once]
    return statistics.median(rounds) / STEPS


def kernel_fields(step: Step) -> dict:
    """Sum the kernels of a call, and those of each part, by CUPTI."""
    kernels = kernels_of(step)
    return {"launches": len(kernels) / STEPS} | parts_of((name, us / STEPS) for name, us in kernels)


if __name__ == "__main__":
    main()
