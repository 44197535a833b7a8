"""What a decode step reads and multiplies at least: weights, experts that are really chosen, K and V within windows.

Which experts tokens go through depends on the weights, on what requests have read and on what was drawn, so they are
counted: the same step once more, which keeps the router's choices.
"""

from __future__ import annotations

from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from benchmarks.ceilings import ceilings
from benchmarks.decode_step import STEPS, SharedDocument, first_logits, plans_of, random_cache
from benchmarks.turns import compiled
from codec_jax import Forest, KVPages
from codec_jax.nnx import Decoder
from codec_jax.nnx.batch import Plans
from codec_jax.nnx.expert_products import Chosen
from codec_jax.nnx.experts import Experts
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.shards import PlacedDecoder, program

#: Weights of experts, of all that a mixture has; those that no token goes through are not read.
_OF_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")


def floors(model: Decoder, case: SharedDocument) -> dict:
    """Count the bytes of a step, and what reading them once takes at least, in microseconds.

    `roofline_us` counts products too: weights are read while they multiply the rows of all requests, and a layer's
    attention lasts as long as its reading or its products, whichever takes longer.
    """
    config, most, row = model.config, ceilings(), {}
    weights = read_once = weight_bytes(model)
    products = weights / jnp.dtype(config.param_dtype).itemsize
    if mixture := config.mixture:
        chosen, of_experts = experts_chosen(model, case), expert_bytes(model)
        weights = round(read_once - of_experts * (1 - chosen / mixture.num_experts))
        # A token multiplies with its own experts only.
        idle = of_experts * (1 - mixture.experts_per_token / mixture.num_experts)
        products = (read_once - idle) / jnp.dtype(config.param_dtype).itemsize
        row = {"experts": chosen, "experts_of_uniform_choice": uniformly_chosen(model, case)}
    unique = total = attention_us = 0.0
    token_bytes, flops = config.kv_token_bytes / config.num_layers, 4 * config.num_q_heads * config.head_dim
    for layer in range(config.num_layers):
        document, own = case.seen(config.window_of(layer))
        seen = document + case.requests * own, case.requests * (document + own)
        unique, total = unique + seen[0] * token_bytes, total + seen[1] * token_bytes
        attention_us += max(seen[0] * token_bytes / most.read_bytes_per_us, seen[1] * flops / most.flops_per_us)
    return row | {
        "document_tokens": case.document,
        "own_tokens": case.own,
        "requests": case.requests,
        "tokens_per_call": STEPS,
        "weight_bytes": weights,
        "unique_kv_bytes": int(unique),
        "total_kv_bytes": int(total),
        "floor_us": (weights + unique) / most.read_bytes_per_us,
        "roofline_us": attention_us
        + max(weights / most.read_bytes_per_us, 2 * products * case.requests / most.flops_per_us),
    }


def weight_bytes(model: Decoder) -> int:
    """Return the bytes of weights that a step of many tokens reads: all but an embedding that is not the head too."""
    _, weights = nnx.split(model)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    return total if model.config.tied_embeddings else total - model.embedding.embedding[...].nbytes


def expert_bytes(model: Decoder) -> int:
    """Return the bytes of all experts of all layers."""
    mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, Experts)]
    return sum(getattr(each, name)[...].nbytes for each in mixtures for name in _OF_EXPERTS if hasattr(each, name))


def uniformly_chosen(model: Decoder, case: SharedDocument) -> float:
    """Return how many experts of a layer somebody would choose if all choices were equally likely, and independent."""
    mixture = model.config.mixture
    assert mixture is not None
    return mixture.num_experts * (1 - (1 - mixture.experts_per_token / mixture.num_experts) ** case.requests)


def experts_chosen(model: Decoder, case: SharedDocument) -> float:
    """Count the experts of a layer that some request goes through: the mean over layers and the steps of a call."""
    forest, num_pages = case.forest()
    plan = plans_of(model.config, forest, num_pages)
    cache, logits = random_cache(model.config, case), first_logits(model.config, case.requests)
    placed, counts = PlacedDecoder.of(model), []
    forest, plan = jax.device_put((forest, plan))
    step = compiled(
        program(placed.graph, placed.config, None, _counting, donate=(1,)), placed.weights, cache, logits, forest, plan
    )
    for _ in range(STEPS):
        cache, logits, forest, count = step(placed.weights, cache, logits, forest, plan)
        counts.append(count)
    return float(np.mean(jax.device_get(counts)))


def _counting(
    model: Decoder,
    cache: tuple[KVPages, ...],
    logits: Float[Array, "B V"],
    forest: Forest,
    plan: Plans,
    *,
    parallel: Parallel,
) -> tuple:
    """Decode the likeliest token of each request; returns cache, logits, forest and the experts of each layer."""
    counts, choose = [], Experts._choose

    def counted(experts: Experts, *rows: Array, **options: bool) -> Chosen:
        chosen = choose(experts, *rows, **options)
        is_chosen = jnp.zeros(experts.mixture.num_experts, bool).at[chosen.expert].set(True)
        counts.append(is_chosen.sum())
        return chosen

    forest = forest.extend()
    with patch.object(Experts, "_choose", counted):
        hidden, cache = model.decode(logits.argmax(axis=-1)[:, None], cache, forest, plan, parallel=parallel)
    return cache, model.logits(hidden[:, 0], parallel), forest, jnp.stack(counts)
