"""Draw the next token of each request from its logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from codec_jax import checks
from codec_jax.arrays import Integers, bucket, padded


class Sampling(NamedTuple):
    """How tokens are drawn, as the decode loop takes it."""

    key: Key[Array, ""]
    temperature: np.float32
    top_k: np.int32  # of all tokens, if there is no limit
    top_p: np.float32
    stop_tokens: Int[np.ndarray, " stops"]  # filled up with -1, so that their number hardly matters

    @classmethod
    def of(
        cls, stop_tokens: Integers, temperature: float, top_k: int | None, top_p: float, seed: int, vocab_size: int
    ) -> "Sampling":
        """Check the options. Raises ValueError for one that is out of range."""
        stops = checks.int_vector("stop_tokens", list(stop_tokens) if np.iterable(stop_tokens) else stop_tokens)
        checks.tokens("stop_tokens", stops, vocab_size)
        if not checks.number("temperature", temperature) >= 0.0:
            raise ValueError(f"temperature: expected a finite number of at least 0, got {temperature}")
        max_tokens = vocab_size if top_k is None else min(checks.integer("top_k", top_k, below=2**63), vocab_size)
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
            raise ValueError(f"seed: expected an integer in [0, 2**32), got {seed}")
        if not 0.0 < checks.number("top_p", top_p) <= 1.0:
            raise ValueError(f"top_p: expected a probability in (0, 1], got {top_p}")
        return cls(
            key=jax.random.key(seed),
            temperature=np.float32(temperature),
            top_k=np.int32(max_tokens),
            top_p=np.float32(top_p),
            stop_tokens=padded(stops, bucket(len(stops)), -1),
        )


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
    rank = jnp.arange(scaled.shape[-1], dtype=jnp.int32)[None]
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    ranked = jnp.where((before < top_p) | (rank == 0), ranked, -jnp.inf)
    return jnp.put_along_axis(scaled, order, ranked, axis=-1, inplace=False)
