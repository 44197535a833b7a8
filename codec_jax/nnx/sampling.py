"""Draw the next token of each request from its logits."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key


def request_keys(key: Key[Array, ""], stream: Int[Array, " B"], position: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return one key per request that depends on its own stream and position only, not on who decodes beside it."""
    return jax.vmap(lambda s, p: jax.random.fold_in(jax.random.fold_in(key, s), p))(stream, position)


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Sample a token per row; temperature 0 takes the most likely one.

    Only the top_k most likely tokens may be drawn, and of those only the most likely ones that together hold top_p
    of the probability. Returns the tokens and their log-probabilities under the model's own distribution, that is
    at temperature 1 and with nothing cut off.
    """

    # Outside of the branches, where it shares a pass over the logits with what else needs all of them.
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(truncated: bool) -> Array:
        scaled = logits / jnp.maximum(temperature, 1e-6)
        if truncated:
            scaled = _truncate(scaled, top_k, top_p)
        return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)

    # Random numbers for a whole vocabulary, and sorting it, are work that a step should do only where it is asked for.
    truncate = (top_k < logits.shape[-1]) | (top_p < 1.0)
    way = jnp.where(temperature == 0.0, 0, 1 + truncate.astype(jnp.int32))
    token = lax.switch(way, [lambda: best, lambda: draw(False), lambda: draw(True)])
    # `jax.nn.log_softmax` at one token only: of the vocabulary no more than the sum is needed.
    greatest = logits.max(axis=-1, keepdims=True)
    log_sum = jnp.log(jnp.exp(logits - greatest).sum(axis=-1))
    return token, (jnp.take_along_axis(logits, token[:, None], axis=-1) - greatest)[:, 0] - log_sum


def _truncate(scaled: Float[Array, "B V"], top_k: Array, top_p: Array) -> Float[Array, "B V"]:
    """Set all but the most likely tokens to -inf; the most likely one always stays."""
    order = jnp.argsort(scaled, axis=-1, descending=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(scaled.shape[-1], dtype=jnp.int32)
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    ranked = jnp.where((before < top_p) | (rank == 0), ranked, -jnp.inf)
    return jnp.put_along_axis(scaled, order, ranked, axis=-1, inplace=False)
