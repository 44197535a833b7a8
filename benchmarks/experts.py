"""Time the experts of a mixture: those that each token goes through, and as a rival all of them for every token.

    python -m benchmarks.experts --json benchmarks/results/experts_h200.json

One layer of published sizes with random weights and random choices of experts, without the router: rows in the order of
their experts, both products, and the sum over a token's experts. Some tokens are held to float32 products before
anything is timed. The roofline is the longer of reading every chosen expert, and the tokens, once, and of the products,
at the rates of benchmarks/ceilings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from benchmarks.arguments import how_many
from benchmarks.ceilings import ceilings
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, provenance
from benchmarks.timing import command, kernel_time, parse
from benchmarks.turns import GPU
from codec_jax.nnx import PUBLISHED, DecoderConfig
from codec_jax.nnx.expert_products import Chosen, Weights, map_densely, map_tokens

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
TOKENS = (16, 64, 512, 4096)
WAYS = {"chosen experts": map_tokens, "all experts": map_densely}
CHECKED = 8  # tokens
MAX_ERROR = 4e-2  # what rounding to bfloat16 between both products leaves
REPEATS = 11


def main() -> None:
    """Measure every number of tokens."""
    parser = command(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=how_many, default=list(TOKENS))
    arguments = parse(parser)
    sizes = ((name, PUBLISHED[name]) for name in arguments.models)
    rows = collect((row for each in sizes for row in measure_all(*each, arguments.tokens)), arguments.json)
    conclude("experts", rows, arguments.json, [f"{row['name']}, {row['variant']}" for row in rows if "error" in row])


def measure_all(model: str, config: DecoderConfig, tokens: list[int]) -> Iterator[dict]:
    """Yield a row for every number of tokens and way to compute; one that fails says why, and ends none."""
    weights = draw_weights(config)
    for count in tqdm(tokens, desc=model):
        x, chosen = draw_tokens(config, count)
        expected = exact(config, weights, x[:CHECKED], jax.tree.map(lambda each: each[:CHECKED], chosen))
        name = f"{model}, {count:,} token{'s' if count > 1 else ''}"
        known = provenance() | {"name": name, "tokens": count} | bounds(config, np.asarray(chosen.expert))
        for variant in WAYS:
            with GPU.taken():
                call = partial(_jitted(variant), x, chosen, weights, config.activation)
                measured = attempt(partial(measure, call, expected), "kernel_us", "error")
            yield known | {"variant": variant} | measured


def draw_weights(config: DecoderConfig) -> Weights:
    """Draw the weights of one layer such that what experts make of tokens is about 1."""
    mixture, hidden = config.mixture, config.hidden_size
    assert mixture is not None
    up, down = (
        (mixture.num_experts, hidden, 2 * mixture.expert_size),
        (mixture.num_experts, mixture.expert_size, hidden),
    )
    shapes = [up, down] + ([up[::2], down[::2]] if mixture.bias else [])
    keys = jax.random.split(jax.random.key(0), len(shapes))

    def draw(key: Array, shape: tuple[int, ...]) -> Array:
        scale = shape[1] ** -0.5 if len(shape) == 3 else 1.0
        return jax.random.normal(key, shape, config.dtype) * jnp.asarray(scale, config.dtype)

    return Weights(*(jax.jit(draw, static_argnums=1)(key, shape) for key, shape in zip(keys, shapes, strict=True)))


def draw_tokens(config: DecoderConfig, count: int) -> tuple[Float[Array, "tokens D"], Chosen]:
    """Draw tokens, and experts for each of them; some experts are liked more than others."""
    mixture, rng = config.mixture, np.random.default_rng(0)
    assert mixture is not None
    liked = rng.gumbel(size=(count, mixture.num_experts)) + rng.normal(size=mixture.num_experts) / 2
    expert = np.argsort(-liked, axis=1)[:, : mixture.experts_per_token].astype(np.int32)
    share = rng.dirichlet(np.ones(mixture.experts_per_token), count).astype(np.float32)
    x = jax.random.normal(jax.random.key(1), (count, config.hidden_size), config.dtype)
    return x, Chosen(jnp.asarray(expert), jnp.asarray(share))


def bounds(config: DecoderConfig, expert: np.ndarray) -> dict:
    """Count experts, and what reading them once, or multiplying, takes at least."""
    mixture, most = config.mixture, ceilings()
    assert mixture is not None
    used, numbers = len(np.unique(expert)), 3 * config.hidden_size * mixture.expert_size
    moved = (used * numbers + 2 * len(expert) * config.hidden_size) * jnp.dtype(config.dtype).itemsize
    return {
        "experts": used,
        "roofline_us": max(moved / most.read_bytes_per_us, 2 * expert.size * numbers / most.flops_per_us),
    }


def exact(config: DecoderConfig, weights: Weights, x: Array, chosen: Chosen) -> Float[np.ndarray, "checked D"]:
    """Return what the experts make of tokens, in float32."""

    def one(token: tuple[Array, Chosen]) -> Array:
        x, chosen = token
        own = Weights(*(None if each is None else each[chosen.expert].astype(jnp.float32) for each in weights))
        alone = Chosen(jnp.arange(len(chosen.expert))[None], chosen.share[None])
        return map_densely(x[None].astype(jnp.float32), alone, own, config.activation)[0]

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.lax.map(one, (x, chosen)))


def measure(call: Callable[[], Array], expected: Float[np.ndarray, "checked D"]) -> dict:
    """Check a call and time its kernels."""
    error = float(np.linalg.norm(np.asarray(call(), np.float32)[: len(expected)] - expected) / np.linalg.norm(expected))
    if not error < MAX_ERROR:
        raise AssertionError(f"expected float32 products but for {MAX_ERROR}, got {error}")
    kernel_us, launches = kernel_time(call, REPEATS)
    return {"kernel_us": kernel_us, "launches": launches, "relative_error": error}


@cache
def _jitted(variant: str) -> Callable[..., Array]:
    return jax.jit(WAYS[variant], static_argnums=3)


if __name__ == "__main__":
    main()
