"""The parts of the sampler that run on the device: one wave of prefill, and the loop that generates tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from codec_jax.forest import Forest, Pages
from codec_jax.nnx.batch import Plans
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.loops import repeat
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.sampling import RowOptions, draw


def prefill_step(
    model: Decoder,
    implementation: str | None,
    cache: tuple[Pages, ...],
    logits: Float[Array, "B V"],
    chunks: Forest,
    plan: Plans,
    tokens: Int[Array, "chunks T"],
    store: Bool[Array, "chunks T"],
    source: Int[Array, " B"],
    *,
    parallel: Parallel = ALONE,
) -> tuple[tuple[Pages, ...], Float[Array, "B V"]]:
    """Run chunks of given tokens; requests whose tokens end with chunk `source` (>= 0) get their logits."""
    hidden, cache = model.decode(
        tokens, cache, chunks, plan, store=store, implementation=implementation, parallel=parallel
    )
    return cache, jnp.where(source[:, None] >= 0, model.logits(hidden[source, -1], parallel), logits)


def decode_loop(
    model: Decoder,
    steps: int,
    implementation: str | None,
    cache: tuple[Pages, ...],
    logits: Float[Array, "B V"],
    forest: Forest,
    plan: Plans,
    remaining: Int[Array, " B"],
    options: RowOptions,
    *,
    parallel: Parallel = ALONE,
) -> tuple:
    """Generate up to `steps` tokens for each request with tokens remaining, all on the device."""
    batch, config, own_options = remaining.shape[0], model.config, parallel.own(options)

    def step(i: Array, carry: tuple) -> tuple:
        forest, cache, hidden, own_logits, remaining, tokens, logprobs, broken = carry
        active = remaining > 0
        new = draw(own_logits, own_options, None, parallel.own(forest.request_length))
        token, logprob, finite = parallel.pool((new.token, new.logprob, new.finite), batch)
        broken |= active & ~finite
        forest = forest.extend(active.astype(jnp.int32))
        decoded, cache = model.decode(
            token[:, None], cache, forest, plan, store=active[:, None], implementation=implementation,
            parallel=parallel,
        )  # fmt: skip
        # A request that has stopped keeps the hidden state, which gives the same logits again: to keep those instead
        # would be a pass over the vocabulary.
        hidden = jnp.where(active[:, None], decoded[:, 0], hidden)
        tokens = tokens.at[:, i].set(jnp.where(active, token, -1))
        logprobs = logprobs.at[:, i].set(jnp.where(active, logprob, 0.0))
        stopped = (token[:, None] == options.stop_tokens).any(axis=-1)
        remaining = jnp.where(stopped, 0, jnp.maximum(remaining - 1, 0))
        return forest, cache, hidden, model.own_logits(hidden, parallel), remaining, tokens, logprobs, broken

    carry = (
        jax.tree.map(jnp.asarray, forest),
        cache,
        jnp.zeros((batch, config.hidden_size), config.dtype),
        parallel.own(logits),
        remaining,
        jnp.full((batch, steps), -1, jnp.int32),
        jnp.zeros((batch, steps), jnp.float32),
        jnp.zeros(batch, bool),
    )
    _, cache, _, last, left, tokens, logprobs, broken = repeat(step, carry, steps, lambda carry: (carry[4] > 0).any())
    last = parallel.join(last, axis=0)[:batch]
    logits = jnp.where((remaining > 0)[:, None], last, logits)  # those of the others do not follow from `hidden`
    return cache, logits, tokens, logprobs, left > 0, broken
