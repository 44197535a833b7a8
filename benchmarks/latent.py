"""Time forest_attention over latents: one kv head of 576 numbers a token, of which the first 512 are the values.

    python -m benchmarks.latent --q-heads 128 --peers --repeats 7 --json benchmarks/results/latent_128_h200.json

Every forest is attended with the q heads of several models and held to float32 attention; where it has shared nodes,
also with K and V of their heads, reconstructed beforehand (`codec_jax.latent`). With --float8 latents have one byte a
number, as `LatentPages` has them, and there is no other form. Times are those of benchmarks/attention.py, of
attention's own kernels. XLA's are in `call_us` only: what applies up_key and up_value, which is in both forms, and what
the form with K and V has alone, a second query and the merging of two partials. The roofline is what reading every
latent once, or K and V of a node (and q and out) would take, or the products, in the cheaper form of each node.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks.arguments import how_many
from benchmarks.attention import bounds
from benchmarks.ceilings import ceilings
from benchmarks.inputs import MIN_BLOCKS, Inputs, Layout, check, make_inputs, reference
from benchmarks.peers import LATENTS, Peers
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, conditions
from benchmarks.timing import command, kernel_runs, kernel_time, parse
from benchmarks.turns import GPU, compiled_once
from benchmarks.workloads import LATENT, LATENT_PROBE, Workload
from codec_jax import LatentPages, PageSubset, make_plan
from codec_jax.attention import forest_attention
from codec_jax.attention.latent import absorbed, expanded
from codec_jax.latent import Reconstructed, choose_reconstructed, latent_attention, reconstruct

#: Numbers of a token, and of a value.
KEY, VALUE = 576, 512
#: Numbers of a head of K and V: the parts of a key without a position and with one, and a value.
NOPE, ROPE, HEAD_VALUE = 128, KEY - VALUE, 128
HEAD_KEY = NOPE + ROPE
_BYTES = 2  # of a number
#: Of a token in float8: numbers, a scale for each 128 of them, and the rotated key.
_FLOAT8_TOKEN_BYTES = VALUE + 4 * VALUE // 128 + ROPE * _BYTES
#: Of DeepSeek-V2-Lite, of Kimi K2, of DeepSeek-V3.
_Q_HEADS = (16, 64, 128)


def main() -> None:
    """Measure roots of several lengths under several requests, and no sharing."""
    parser = command(__doc__)
    parser.add_argument("--q-heads", nargs="+", type=how_many, default=list(_Q_HEADS))
    parser.add_argument("--page-size", type=how_many, default=64)
    parser.add_argument("--implementation", default="mosaic")
    parser.add_argument("--repeats", type=how_many, default=15)
    parser.add_argument("--quick", action="store_true", help="four forests only")
    parser.add_argument("--float8", action="store_true", help="latents of one byte a number, and no other form")
    parser.add_argument("--peers", action="store_true", help="FlashInfer's MLA too; it compiles kernels at first")
    arguments = parse(parser)
    if arguments.float8 and arguments.peers:
        parser.error("--float8: expected no --peers, which read bfloat16")
    rows = collect(measure_all(LATENT_PROBE if arguments.quick else LATENT, arguments), arguments.json)
    conclude("latent", rows, arguments.json, [f"{row['name']}, {row['variant']}" for row in rows if "error" in row])


def measure_all(workloads: Sequence[Workload], arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield a row for every number of q heads and form on every forest; one that fails says why, and ends none."""
    peers = Peers(LATENTS) if arguments.peers else None
    for q_heads in tqdm(arguments.q_heads):
        layout = Layout(q_heads, 1, KEY, arguments.page_size)
        for workload in workloads:
            asked = arguments.implementation, arguments.repeats
            with GPU.taken():
                inputs = make_inputs(workload, layout)
                known = conditions(layout, *(["torch", "flashinfer-python"] if peers else []))
                token_bytes = _FLOAT8_TOKEN_BYTES if arguments.float8 else KEY * _BYTES
                known |= {"implementation": arguments.implementation}
                known |= bounds_of(workload, inputs, layout, token_bytes)
                pages = rows = inputs.key_pages
                if arguments.float8:
                    pages = _in_float8(rows)
                    rows = pages.rows(slice(None))
                expected = reference(inputs._replace(key_pages=rows, value_pages=rows))[..., :VALUE]
                inputs = inputs._replace(key_pages=pages)
                row = {"variant": f"{q_heads} q heads{', float8' * arguments.float8}"} | known
                row |= attempt(partial(measure, inputs, layout, expected, *asked), "kernel_us", "error")
                if peers:
                    row |= peers.measure(workload, layout, expected, arguments.repeats)
                yield row
                if (inputs.forest.readers > 1).any() and not arguments.float8:
                    measured = partial(measure_reconstructed, inputs, layout, *asked)
                    row = {"variant": f"{q_heads} q heads, K and V of what is shared"} | known
                    yield row | attempt(measured, "kernel_us", "error")
    if peers:
        peers.close()


@jax.jit
def _in_float8(latents: Array) -> LatentPages:
    """Store the same latents in one byte a number."""
    pages, size = latents.shape[:2]
    slots = jnp.arange(pages * size).reshape(pages, size)
    return LatentPages.zeros(pages, size, KEY, jnp.float8_e4m3fn, rope=ROPE).write(slots, latents)


def bounds_of(workload: Workload, inputs: Inputs, layout: Layout, token_bytes: int = KEY * _BYTES) -> dict:
    """Count latents, and what reading each once, or multiplying, takes at least: of each node in its cheaper form."""
    forest, heads, most = inputs.forest, layout.num_q_heads, ceilings()
    counted = bounds(workload, forest, layout)
    tokens, rows = forest.length.astype(np.float64), forest.readers * heads
    tokens = np.where(rows > 0, tokens, 0.0)
    forms = [(token_bytes, KEY + VALUE), (heads * (HEAD_KEY + HEAD_VALUE) * _BYTES, HEAD_KEY + HEAD_VALUE)]
    reading = np.stack([tokens * size for size, _ in forms]) / most.read_bytes_per_us
    multiplying = np.stack([2 * tokens * rows * products for _, products in forms]) / most.flops_per_us
    cheaper = np.maximum(reading, multiplying).argmin(axis=0)[None]
    queries = len(workload.leaf) * heads * (KEY + VALUE) * _BYTES / most.read_bytes_per_us
    reads, multiplies = (float(np.take_along_axis(each, cheaper, 0).sum()) for each in (reading, multiplying))
    return counted | {
        "unique_bytes": counted["unique_tokens"] * token_bytes,
        "roofline_us": max(reads + queries, multiplies),
    }


def measure(
    inputs: Inputs, layout: Layout, expected: Float[np.ndarray, "B N V"], implementation: str, repeats: int
) -> dict:
    """Check a call over latents and time its kernels."""
    forest, query, pages, _ = inputs
    plan = make_plan(forest, **layout.heads, value_head_dim=VALUE, block_capacity=MIN_BLOCKS)
    on_device = jax.device_put((query, pages, forest, plan))
    attend = compiled_once(_attend_with(implementation), *on_device, tuned=implementation == "xla")
    error = check(attend(*on_device), expected)
    kernel_us, launches = kernel_time(lambda: attend(*on_device), repeats)
    return {"kernel_us": kernel_us, "launches": launches, "relative_error": error}


class Heads(NamedTuple):
    """Queries of heads, and the weights between them and latents."""

    query_nope: Array  # [B, 1, N, 128]
    query_rope: Array  # [B, 1, N, 64]
    up_key: Array  # [512, N, 128]
    up_value: Array  # [512, N, 128]

    @classmethod
    def random(cls, requests: int, num_q_heads: int) -> Heads:
        """Draw them such that scores are about 1."""
        shapes = (requests, 1, num_q_heads, NOPE), (requests, 1, num_q_heads, ROPE)
        weights = (VALUE, num_q_heads, NOPE), (VALUE, num_q_heads, HEAD_VALUE)
        keys = jax.random.split(jax.random.key(1), 4)
        drawn = [jax.random.normal(key, shape) for key, shape in zip(keys, (*shapes, *weights), strict=True)]
        return cls(*(x.astype(jnp.bfloat16) for x in (*drawn[:2], *(w * VALUE**-0.5 for w in drawn[2:]))))


def measure_reconstructed(inputs: Inputs, layout: Layout, implementation: str, repeats: int) -> dict:
    """Check a call over K and V of what is shared and latents of the rest; time attention's kernels, and all of them.

    `chosen_pages` are those that `choose_reconstructed` would have reconstructed, of `reconstructed_pages`.
    """
    forest, latents, requests = inputs.forest, inputs.key_pages, len(inputs.query)
    given = Heads.random(requests, layout.num_q_heads)
    query = absorbed(*given[:3])
    exact = inputs._replace(query=query * (KEY / HEAD_KEY) ** 0.5, value_pages=latents)  # scaled by KEY ** -0.5 there
    expected = np.asarray(expanded(jnp.asarray(reference(exact)[:, None]), given.up_value))[:, 0]
    nodes = np.flatnonzero(forest.readers > 1)
    pages = np.concatenate([forest.pages_of(int(node)) for node in nodes])
    subset = PageSubset.of(pages, len(latents), len(pages))
    sizes = {"num_q_heads": layout.num_q_heads, "latent": VALUE, "rope": ROPE, "nope": NOPE}
    chosen = choose_reconstructed(forest, **sizes, value=HEAD_VALUE, num_pages=len(latents), capacity=len(latents))
    rest = make_plan(forest, **layout.heads, value_head_dim=VALUE, block_capacity=MIN_BLOCKS, subset=subset.rest)
    of_heads = layout._replace(num_kv_heads=layout.num_q_heads, head_dim=HEAD_KEY).heads
    plan = make_plan(forest, **of_heads, value_head_dim=HEAD_VALUE, block_capacity=MIN_BLOCKS, subset=subset)
    shared = jax.jit(reconstruct)(latents[subset.page_ids], given.up_key, given.up_value)
    on_device = jax.device_put((*given[:2], latents, *given[2:], forest, rest, Reconstructed(shared, plan)))
    attend = compiled_once(_attend_both_with(implementation), *on_device, tuned=implementation == "xla")
    error = check(attend(*on_device), expected)
    runs = kernel_runs(lambda: attend(*on_device), repeats)
    own = [[ms for name, ms in run if "mosaic" in name] for run in runs]
    return {
        "kernel_us": 1e3 * statistics.median(map(sum, own)),
        "call_us": 1e3 * statistics.median(sum(ms for _, ms in run) for run in runs),
        "launches": len(runs[0]),
        "reconstructed_pages": len(pages),
        "chosen_pages": int((chosen.place >= 0).sum()),
        "relative_error": error,
    }


@cache
def _attend_with(implementation: str) -> Callable[..., Array]:
    def attend(query: Array, pages: Array, forest: Any, plan: Any) -> Array:
        return forest_attention(query, pages, None, forest, plan, implementation=implementation)

    return jax.jit(attend)


@cache
def _attend_both_with(implementation: str) -> Callable[..., Array]:
    def attend(*arguments: Any) -> Array:
        *given, reconstructed = arguments
        return latent_attention(*given, reconstructed=reconstructed, implementation=implementation)

    return jax.jit(attend)


if __name__ == "__main__":
    main()
