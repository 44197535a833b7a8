"""Draw the next token of each request from its logits, each with options of its own."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt16, UInt32

from codec_jax.arrays import HostOrDevice
from codec_jax.nnx.params import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, SamplingParams
from codec_jax.nnx.truncation import truncate
from pallas_kernels.varying import vary_like

#: Larger biases and penalties decide no more than this, which the lowest temperature does not make infinite.
_MAX_BIAS = 1e30

#: No token: what fills up stop tokens and top tokens.
NO_TOKEN = -1


class RowOptions(NamedTuple):
    """How the token of each row is drawn, as the device takes it."""

    seed: UInt32[HostOrDevice, " B"]
    stream: Int[HostOrDevice, " B"]
    temperature: Float[HostOrDevice, " B"]
    top_k: Int[HostOrDevice, " B"]  # of all tokens, if there is no limit
    top_p: Float[HostOrDevice, " B"]
    min_p: Float[HostOrDevice, " B"]
    repetition: Float[HostOrDevice, " B"]
    presence: Float[HostOrDevice, " B"]
    frequency: Float[HostOrDevice, " B"]
    stop_tokens: Int[HostOrDevice, "B stops"]  # filled up with NO_TOKEN
    bias_tokens: Int[HostOrDevice, "B biases"]  # filled up with a token that there is not
    bias_values: Float[HostOrDevice, "B biases"]
    allowed: UInt32[HostOrDevice, "B words"]  # a bit for each token, read where `constrained`
    constrained: Bool[HostOrDevice, " B"]
    top_logprobs: Int[HostOrDevice, " B"]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams | None], vocab_size: int) -> "RowOptions":
        """Return the options of each row, on the host; no token is allowed yet where there is a matcher.

        Args:
          rows: one for each row; None for one whose token does not matter.
          vocab_size: tokens of the model (V), which the options have been checked for.
        """
        given = [_NEUTRAL if params is None else params for params in rows]
        count = len(given)
        stop_tokens = np.full((count, MAX_STOP_TOKENS), NO_TOKEN, np.int32)
        bias_tokens = np.full((count, MAX_BIASED_TOKENS), vocab_size, np.int32)
        bias_values = np.zeros((count, MAX_BIASED_TOKENS), np.float32)
        for row, params in enumerate(given):
            if params.stop_tokens:
                stop_tokens[row, : len(params.stop_tokens)] = params.stop_tokens
            if params.logit_bias:
                bias_tokens[row, : len(params.logit_bias)] = list(params.logit_bias)
                bias_values[row, : len(params.logit_bias)] = _bounded(list(params.logit_bias.values()))
        return cls(
            seed=np.asarray([params.seed for params in given], np.uint32),
            stream=np.asarray([params.stream for params in given], np.int32),
            temperature=np.asarray([params.temperature for params in given], np.float32),
            top_k=np.asarray([min(params.top_k or vocab_size, vocab_size) for params in given], np.int32),
            top_p=np.asarray([params.top_p for params in given], np.float32),
            min_p=np.asarray([params.min_p for params in given], np.float32),
            repetition=_bounded([max(params.repetition_penalty, 1 / _MAX_BIAS) for params in given]),
            presence=_bounded([params.presence_penalty for params in given]),
            frequency=_bounded([params.frequency_penalty for params in given]),
            stop_tokens=stop_tokens,
            bias_tokens=bias_tokens,
            bias_values=bias_values,
            allowed=np.zeros((count, num_words(vocab_size)), np.uint32),
            constrained=np.asarray([params.matcher is not None for params in given], bool),
            top_logprobs=np.asarray([params.top_logprobs for params in given], np.int32),
        )


_NEUTRAL = SamplingParams(temperature=0.0)


def _bounded(values: Sequence[float]) -> Float[np.ndarray, " n"]:
    return np.clip(values, -_MAX_BIAS, _MAX_BIAS).astype(np.float32)


class History(NamedTuple):
    """What penalties look at: the tokens that each row has seen. Its methods are jittable."""

    in_prompt: Bool[HostOrDevice, "B V"]
    generated: UInt16[HostOrDevice, "B V"]  # how often, up to 65535

    @classmethod
    def empty(cls, batch: int, vocab_size: int) -> "History":
        """Return one of rows that have seen nothing.

        Args:
          batch: number of rows (B).
          vocab_size: tokens of the model (V).
        """
        return cls(jnp.zeros((batch, vocab_size), bool), jnp.zeros((batch, vocab_size), jnp.uint16))

    def add(self, token: Int[Array, " B"], active: Bool[Array, " B"]) -> "History":
        """Count a generated token of each row.

        Args:
          token: int32 [B].
          active: bool [B], the rows to which it happened.
        """
        row = jnp.arange(token.shape[0], dtype=jnp.int32)
        count = self.generated[row, token]
        more = (active & (count < np.iinfo(np.uint16).max)).astype(jnp.uint16)
        return self._replace(generated=self.generated.at[row, token].set(count + more))

    def set_row(
        self, row: Int[HostOrDevice, ""], in_prompt: Bool[HostOrDevice, " V"], generated: UInt16[HostOrDevice, " V"]
    ) -> "History":
        """Replace one row: another request has it.

        Args:
          row: int32, which one.
          in_prompt: bool [V], whether each token is in the prompt.
          generated: uint16 [V], how often each was generated.
        """
        return History(self.in_prompt.at[row].set(in_prompt), self.generated.at[row].set(generated))


class Drawn(NamedTuple):
    """A token of each row and what comes with it."""

    token: Int[Array, " B"]
    logprob: Float[Array, " B"]  # under the model's own distribution: at temperature 1 and with nothing changed
    top_tokens: Int[Array, "B 20"]  # the most likely ones first, as many as the row asks for, and NO_TOKEN
    top_logprobs: Float[Array, "B 20"]  # theirs, under the model's own distribution; -inf where there is none
    finite: Bool[Array, " B"]  # whether all logits are


def num_words(vocab_size: int) -> int:
    """Return the number of uint32 that have a bit for each token."""
    return -(-vocab_size // 32)


def allowed_words(mask: bytes, vocab_size: int) -> UInt32[np.ndarray, " words"]:
    """Return a matcher's bit mask as a row of `RowOptions.allowed`; a tokenizer may have fewer tokens than the model.

    Args:
      mask: of `Matcher.compute_bitmask`.
      vocab_size: tokens of the model (V).
    """
    words = np.zeros(num_words(vocab_size), np.uint32)
    given = np.frombuffer(mask, "<u4")[: len(words)]
    words[: len(given)] = given
    return words


def request_keys(
    key: Key[Array, ""] | Key[Array, " B"], stream: Int[Array, " B"], position: Int[Array, " B"]
) -> Key[Array, " B"]:
    """Return one key per request that depends on its own stream and position only, not on who decodes beside it."""
    keys = jnp.broadcast_to(key, stream.shape)
    return jax.vmap(lambda k, s, p: jax.random.fold_in(jax.random.fold_in(k, s), p))(keys, stream, position)


# A decoder's programs draw alike: a jitted function is traced once for all of one batch.
@jax.jit
def draw(
    logits: Float[Array, "B V"],
    options: RowOptions,
    history: History | None,
    position: Int[Array, " B"],
    rows: Int[Array, " B"] | None = None,
) -> Drawn:
    """Draw a token for each row. Jittable. A row gets the same whatever the other rows ask for.

    The order is that of `SamplingParams`; the most likely token that is allowed can always be drawn.

    Args:
      logits: float32 [B, V].
      options: of each row.
      history: of each row; None if no row has penalties, biases, a constraint or top_logprobs, which then are left out.
      position: int32 [B], of the token in its request's context.
      rows: int32 [B], those of the history that are meant; None if it has these alone.
    """
    batch, vocab_size = logits.shape
    greedy = options.temperature == 0.0
    more = ~greedy & ((options.top_k < vocab_size) | (options.top_p < 1.0) | (options.min_p > 0.0))
    more |= _needs_more(options, vocab_size) if history is not None else False

    def draw_from(logits: Array, best: Array, *, truncated: bool) -> Array:
        scaled = logits / jnp.maximum(options.temperature, 1e-6)[:, None]
        if truncated:
            scaled = truncate(scaled, options.top_k, options.top_p, options.min_p)
        keys = request_keys(jax.vmap(jax.random.key)(options.seed), options.stream, position)
        return jnp.where(greedy, best, jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32))

    def everything() -> tuple[Array, Array]:
        if history is None:
            return draw_from(logits, best, truncated=True), no_tokens
        # Here, as it takes a copy of the history, which few steps look at.
        of_rows = history if rows is None else jax.tree.map(lambda x: jnp.asarray(x)[rows], history)
        asked, adjusted = options.top_logprobs, _adjusted(logits, options, of_rows)
        top_tokens = lax.cond((asked > 0).any(), lambda: _most_likely(logits, asked), lambda: no_tokens)
        return draw_from(adjusted, _best(adjusted), truncated=True), top_tokens

    no_tokens = vary_like(jnp.full((batch, MAX_TOP_LOGPROBS), NO_TOKEN, jnp.int32), logits)
    # Outside of the branches, where it shares a pass over the logits with what else needs all of them.
    best = _best(logits)
    # Random numbers for a whole vocabulary, and passes over it, are work that a step should do only where it is asked
    # for. All branches are fit for a CUDA graph, or the host would wait for the device here.
    token, top_tokens = lax.switch(
        jnp.where(more, 2, jnp.where(greedy, 0, 1)).max(),
        [lambda: (best, no_tokens), lambda: (draw_from(logits, best, truncated=False), no_tokens), everything],
    )
    # `jax.nn.log_softmax` at a few tokens only: of the vocabulary no more than the sum is needed.
    greatest = logits.max(axis=-1, keepdims=True)
    log_sum = jnp.log(jnp.exp(logits - greatest).sum(axis=-1, keepdims=True))
    asked_for = jnp.concatenate([token[:, None], top_tokens], axis=1)
    logprobs = jnp.take_along_axis(logits, jnp.maximum(asked_for, 0), axis=-1) - greatest - log_sum
    top_logprobs = jnp.where(top_tokens == NO_TOKEN, -jnp.inf, logprobs[:, 1:])
    return Drawn(token, logprobs[:, 0], top_tokens, top_logprobs, jnp.isfinite(logits).all(axis=-1))


def _best(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _needs_more(options: RowOptions, vocab_size: int) -> Bool[Array, " B"]:
    """Return which rows need more than their logits, or more of them than one token."""
    penalised = (options.repetition != 1.0) | (options.presence != 0.0) | (options.frequency != 0.0)
    biased = (options.bias_tokens < vocab_size).any(axis=-1)
    return penalised | biased | options.constrained | (options.top_logprobs > 0)


def _adjusted(logits: Float[Array, "B V"], options: RowOptions, history: History) -> Float[Array, "B V"]:
    """Return the logits after penalties, biases and constraints; rows without any keep theirs bit by bit."""
    repetition, presence, frequency = (x[:, None] for x in (options.repetition, options.presence, options.frequency))
    count = history.generated.astype(logits.dtype)
    seen = (history.in_prompt | (history.generated > 0)) & (repetition != 1.0)
    logits = jnp.where(seen, jnp.where(logits < 0, logits * repetition, logits / repetition), logits)
    logits -= presence * (count > 0).astype(logits.dtype) + frequency * count
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = logits.at[row, options.bias_tokens].add(options.bias_values, mode="drop")
    logits = jnp.clip(logits, -_MAX_BIAS, _MAX_BIAS)  # as often as a penalty may count
    bits = (options.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    allowed = bits.reshape(len(bits), -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | ~options.constrained[:, None], logits, -jnp.inf)


def _most_likely(logits: Float[Array, "B V"], asked: Int[Array, " B"]) -> Int[Array, "B 20"]:
    """Return the most likely tokens of each row, as many as are asked for."""
    count = min(MAX_TOP_LOGPROBS, logits.shape[1])

    def one_by_one(logits: Array) -> Array:
        places = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        value, place = jnp.full_like(logits[:, :1], jnp.inf), jnp.full_like(places[:, :1], -1)
        found = []
        for _ in range(count):
            # The barrier keeps turns apart, so that all have the same kernels, compiled once.
            value, place = lax.optimization_barrier((value, place))
            follows = (logits < value) | ((logits == value) & (places > place))
            value, place = _first(jnp.where(follows, logits, -jnp.inf), places)
            found.append(place)
        return jnp.concatenate(found, axis=1)

    def at_once(logits: Array) -> Array:
        return lax.top_k(logits, count)[1]

    # XLA sorts for so many, which it cannot capture in a CUDA graph.
    tokens = lax.platform_dependent(logits, cuda=one_by_one, default=at_once)
    tokens = jnp.pad(tokens, ((0, 0), (0, MAX_TOP_LOGPROBS - tokens.shape[1])), constant_values=NO_TOKEN)
    return jnp.where(jnp.arange(MAX_TOP_LOGPROBS, dtype=jnp.int32)[None] < asked[:, None], tokens, NO_TOKEN)


def _first(logits: Float[Array, "B V"], places: Int[Array, "B V"]) -> tuple[Float[Array, "B 1"], Int[Array, "B 1"]]:
    """Return the greatest logit of each row, and the first place that has it."""

    def better(some: tuple, others: tuple) -> tuple:
        chosen = (some[0] > others[0]) | ((some[0] == others[0]) & (some[1] < others[1]))
        return tuple(jnp.where(chosen, a, b) for a, b in zip(some, others, strict=True))

    nothing = np.float32(-np.inf), np.int32(np.iinfo(np.int32).max)
    value, place = lax.reduce((logits, places), nothing, better, (1,))
    return value[:, None], place[:, None]
