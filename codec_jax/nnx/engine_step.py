"""What one step of the engine runs on the device: chunks of prompts beside requests that decode.

    chunks    [C, T]  tokens of prompts: K and V go to the pages; with `score`, the log-probability of what follows
    decoding  [B, 1]  each request feeds its last token, and draws the next one; again, `steps` times

A request feeds the last token of its prompt as it feeds any other, so chunks end one token before a prompt does and
draw nothing. All layers store K and V of both before they attend: a request may decode beside its own last chunk.

The host dispatches a step before it knows how the one before ended. Three things thus stay on the device: the token to
feed, who has stopped, and by how many tokens each leaf is longer than the host's forest says.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from codec_jax.arrays import HostOrDevice
from codec_jax.forest import Forest, Pages
from codec_jax.nnx.batch import Batch, Plans
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.loops import repeat
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.sampling import MAX_TOP_LOGPROBS, History, RowOptions, draw


class Carried(NamedTuple):
    """What a step leaves on the device for the next one."""

    token: Int[Array, " B"]  # drawn, and not fed yet
    stopped: Bool[Array, " B"]
    grown: Int[Array, " B"]  # tokens that the step added to each request's leaf
    history: History


class Drawing(NamedTuple):
    """Which requests draw tokens in a step; all others have no leaf in the forest."""

    forest: Forest  # as the host knows it
    behind: Bool[HostOrDevice, ""]  # whether that is without what the step before added
    plan: Plans  # for what both steps may add
    allowed: Int[HostOrDevice, " B"]  # tokens that each request may draw
    first: Int[HostOrDevice, " B"]  # the token that a request begins with, -1 for those that go on
    options: RowOptions
    places: Int[HostOrDevice, " num_pages"] | None  # of each page in layers with windows, if they have fewer


class Chunks(NamedTuple):
    """Tokens of prompts, right-aligned; what fills a row up to the left is not stored."""

    forest: Forest  # a request for each chunk
    plan: Plans
    tokens: Int[HostOrDevice, "C T"]
    store: Bool[HostOrDevice, "C T"]
    following: Int[HostOrDevice, "C T"]  # the token after each one whose log-probability is wanted, -1 elsewhere


class Outcome(NamedTuple):
    """What a step hands to the host."""

    tokens: Int[Array, "B steps"]  # -1 where nothing was drawn
    logprobs: Float[Array, "B steps"]
    top_tokens: Int[Array, "B steps 20"]
    top_logprobs: Float[Array, "B steps 20"]
    broken: Bool[Array, " B"]  # whose logits are not finite
    scores: Float[Array, "C T"] | None  # log-probabilities of `Chunks.following`


def run_step(
    model: Decoder,
    steps: int,
    implementation: str | None,
    cache: tuple[Pages, ...],
    carried: Carried,
    drawing: Drawing,
    chunks: Chunks | None,
    *,
    parallel: Parallel = ALONE,
) -> tuple[tuple[Pages, ...], Carried, Outcome]:
    """Draw up to `steps` tokens for each request, one if there are chunks."""
    begins = drawing.first >= 0
    active = drawing.forest.leaf >= 0
    forest = jax.tree.map(jnp.asarray, drawing.forest).extend(jnp.where(begins | ~drawing.behind, 0, carried.grown))
    token = jnp.where(begins, drawing.first, carried.token)
    stopped = jnp.where(begins, False, carried.stopped)
    left = jnp.where(active & ~stopped, drawing.allowed, 0)
    batch, own_options = left.shape[0], parallel.own(drawing.options)

    def step(i: Array | int, carry: tuple, chunks: Chunks | None = None) -> tuple:
        forest, cache, token, left, stopped, history, outcome = carry
        active = left > 0
        forest = forest.extend(active.astype(jnp.int32))
        batches = [Batch(token[:, None], forest, drawing.plan, active[:, None], places=drawing.places)]
        if chunks is not None:
            batches.append(Batch(chunks.tokens, chunks.forest, chunks.plan, chunks.store, places=drawing.places))
        hidden, cache = model.decode_together(batches, cache, implementation=implementation, parallel=parallel)
        own_logits = model.own_logits(hidden[0][:, 0], parallel)
        position = parallel.own(forest.request_length)
        new = parallel.pool(draw(own_logits, own_options, history, position, parallel.own_rows(batch)), batch)
        history = history.add(new.token, active)
        stops = active & (new.token[:, None] == drawing.options.stop_tokens).any(axis=-1)
        outcome = Outcome(
            tokens=outcome.tokens.at[:, i].set(jnp.where(active, new.token, -1)),
            logprobs=outcome.logprobs.at[:, i].set(new.logprob),
            top_tokens=outcome.top_tokens.at[:, i].set(new.top_tokens),
            top_logprobs=outcome.top_logprobs.at[:, i].set(new.top_logprobs),
            broken=outcome.broken | (active & ~new.finite),
            scores=None if chunks is None else _score(model, parallel, hidden[1], chunks.following),
        )
        token = jnp.where(active, new.token, token)
        left = jnp.where(stops, 0, jnp.maximum(left - 1, 0))
        return forest, cache, token, left, stopped | stops, history, outcome

    nothing = Outcome(
        tokens=jnp.full((batch, steps), -1, jnp.int32),
        logprobs=jnp.zeros((batch, steps), jnp.float32),
        top_tokens=jnp.zeros((batch, steps, MAX_TOP_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((batch, steps, MAX_TOP_LOGPROBS), jnp.float32),
        broken=jnp.zeros(batch, bool),
        scores=None,
    )
    carry = (forest, cache, token, left, stopped, carried.history, nothing)
    carry = repeat(step, carry, steps, lambda carry: (carry[3] > 0).any()) if steps > 1 else step(0, carry, chunks)
    _, cache, token, _, stopped, history, outcome = carry
    grown = (outcome.tokens >= 0).sum(axis=1, dtype=jnp.int32)
    return cache, Carried(token, stopped, grown, history), outcome


def _score(
    model: Decoder, parallel: Parallel, hidden: Float[Array, "C T D"], following: Int[Array, "C T"]
) -> Float[Array, "C T"]:
    """Return the log-probability of the token after each one, where it is asked for."""

    def score(row: tuple[Array, Array]) -> Array:
        logits = model.logits(row[0], parallel)  # of one chunk at a time: those of all would take gigabytes
        chosen = jnp.take_along_axis(logits, jnp.maximum(row[1], 0)[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def scores() -> Float[Array, "C T"]:
        # Not by a loop, which would keep the branch out of CUDA graphs, so that the host would wait for the device. The
        # next chunk comes to the front, so that all have the same kernels, compiled once.
        rows, found = (hidden, following), []
        for _ in range(len(following)):
            rows = lax.optimization_barrier(rows)
            found.append(score(jax.tree.map(lambda x: x[0], rows)))
            rows = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), rows)
        return jnp.stack(found)

    nothing = jnp.zeros(following.shape, jnp.float32)
    return lax.cond((following >= 0).any(), scores, lambda: nothing)
