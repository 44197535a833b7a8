"""Rollouts for Tunix: its learners sample from the engine, and train the decoder that the engine runs.

    learner ── prompts, each repeated for its group ──► EngineRollout.generate ──► Engine: prompts are computed once
       │                                                                             ▲
       └──────── trains the Policy ──────── EngineRollout.update_params ─────────────┘

Source: https://github.com/google/tunix
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.mesh import CONTEXT, TENSOR
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.policy import Policy as Policy
from codec_jax.nnx.replicas import replicated
from codec_jax.nnx.request import Request
from codec_jax.nnx.weights import split

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ModuleNotFoundError as error:
    if error.name != "tunix":
        raise
    BaseRollout = object  # a policy needs no Tunix; a rollout says what is missing


class EngineRollout(BaseRollout):
    """A rollout worker of Tunix on `codec_jax.nnx.Engine`: give it to `ClusterConfig` as `rollout_engine`.

    Equal prompts, such as those of a GRPO group, and all that prompts have in common are computed once and read once.
    Several threads may generate at a time: their requests decode together. The worker has weights of its own. Learners
    bring new ones after each step, which compiles nothing. Its `engine` has the counts of what was shared.
    """

    def __init__(
        self,
        *,
        rollout_actor: Decoder,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        mesh: Mesh | None = None,
        **engine: Any,
    ) -> None:
        """Copy the weights, and allocate the pages of the KV cache. The cluster gives all but the last.

        Args:
          rollout_actor: the model to begin with. To be trained as well, it has to be a `Policy`.
          tokenizer: whatever Tunix takes for one.
          rollout_config: its `max_prompt_length` and `max_tokens_to_generate` say how much room a request takes.
          mesh: the devices to run on, each with a replica of the model; by default the one that has the weights.
          engine: arguments of each `Engine`, such as `max_requests`, by `functools.partial`. `num_pages` defaults to
            what `max_requests` requests take that share nothing, `max_context` to what one does.

        Raises ImportError without Tunix, TypeError for a model that is no decoder, and what `Engine` raises.
        """
        if BaseRollout is object:
            raise ImportError("EngineRollout needs Tunix: pip install codec-jax[rollout]")
        checks.instance("rollout_actor", rollout_actor, Decoder)
        if mesh is not None:
            checks.instance("mesh", mesh, Mesh)

        def copied(x: Array) -> Array:
            place = x.sharding if mesh is None or mesh.empty else NamedSharding(mesh, PartitionSpec())
            # A learner that sees its own arrays here takes its variables to be shared, and brings no new weights.
            return jax.device_put(x, place, may_alias=False)

        graph, weights = nnx.split(rollout_actor)
        self._model = nnx.merge(graph, jax.tree.map(copied, weights))
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        context = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        sizes = {"max_requests": 64, "page_size": 16, "max_context": context, **engine}
        sizes["max_context"] = context if sizes["max_context"] is None else sizes["max_context"]
        requests = checks.integer("max_requests", sizes["max_requests"])
        longest, page_size = checks.integer("max_context", sizes["max_context"]), checks.page_size(sizes["page_size"])
        sizes.setdefault("num_pages", requests * -(-longest // page_size))
        places: list[Mesh | None] = [None]
        if mesh is not None and mesh.size > 1:
            places = [Mesh([[device]], (CONTEXT, TENSOR)) for device in mesh.devices.flat]
        self.engine = replicated([Engine(self._model, mesh=place, **sizes) for place in places])
        self._weights = split(self._model)
        self._streams = 0  # random streams that requests have had
        self._lock = threading.Lock()

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig) -> RolloutOutput:
        """Complete prompts; every request draws from a random stream that none has had before.

        The same calls draw the same tokens for the same `rollout_config.seed`, which may be a number or a key. A stop
        token stays among the tokens, so that learners train it, and is left out of the text.

        Log-probabilities are what Tunix's own sampler returns: at the sampling temperature, before top_k and top_p. The
        engine has them at temperature 1, or 0, which counts as 1. For others the texts run through the model again.

        Args:
          prompts: texts.
          rollout_config: how they are completed. `top_p` None considers all tokens, as 1 does.

        Raises TypeError for one text in the place of a list; ValueError for a prompt of more than `max_prompt_length`
        tokens, and for settings that the engine does not take; LogitsError for logits that are not finite.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts: expected a list of texts, got a text; put it into a list")
        config, tokenizer = rollout_config, self._tokenizer
        begin = [tokenizer.bos_id()] if tokenizer.bos_id() else []
        tokens = [tokenizer.dedup_bos_ids(begin + list(tokenizer.encode(prompt))) for prompt in prompts]
        padded = left_padded(tokens, config.max_prompt_length, self.pad_id())
        stops = () if config.eos_tokens is None else config.eos_tokens
        params = SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_k=config.top_k if config.top_k and config.top_k > 0 else None,
            top_p=1.0 if config.top_p is None else config.top_p,
            seed=seed_number(config.seed),
            stop_tokens=stops if np.size(stops) else (self.eos_id(),),
        )
        requests, weights = self._finished(tokens, params)
        logprobs = None
        if config.return_logprobs and config.temperature in (0.0, 1.0):
            logprobs = [np.asarray(request.logprobs, np.float32) for request in requests]
        elif config.return_logprobs:
            logprobs = _logprobs_at(config.temperature, requests, weights, self.engine.max_context)
        return RolloutOutput(
            text=[tokenizer.decode(r.tokens[: -1 if r.finish_reason == "stop" else None]) for r in requests],
            logits=[],
            tokens=[np.asarray(request.tokens, np.int32) for request in requests],
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """Return the log-probability of each token of completions, at temperature 1, as Tunix's own rollout does.

        Args:
          prompt_tokens: [B, P], padded with `pad_id`.
          completion_tokens: [B, T], padded with `pad_id`.

        Returns [B, T], 0 at padding; but where the tokenizer pads with its stop token, the first one after each text is
        scored, which ended it if the text did not end by its length. Raises ValueError for arrays of other shapes, and
        for a completion without a prompt, and what `Engine.score` raises.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        if not prompts.ndim == completions.ndim == 2 or len(prompts) != len(completions):
            raise ValueError(
                "prompt_tokens, completion_tokens: expected [B, P] and [B, T], got shapes "
                f"{prompts.shape} and {completions.shape}"
            )
        there = completions != self.pad_id()
        if self.pad_id() == self.eos_id():
            lasts = completions.shape[1] - np.argmax(there[:, ::-1], axis=1)
            ends = np.where(there.any(axis=1), lasts, 0)
            begun = (ends < completions.shape[1]) & (prompts != self.pad_id()).any(axis=1)
            there[np.flatnonzero(begun), ends[begun]] = True
        rows = np.flatnonzero(there.any(axis=1))
        if missing := [int(row) for row in rows if (prompts[row] == self.pad_id()).all()]:
            raise ValueError(f"prompt_tokens: expected a token before each completion, got padding in rows {missing}")
        with self._lock:
            scores = self.engine.score(
                [prompts[row][prompts[row] != self.pad_id()] for row in rows],
                [completions[row][there[row]] for row in rows],
            )
        logps = np.zeros(completions.shape, np.float32)
        for row, score in zip(rows, scores, strict=True):
            logps[row, there[row]] = score
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take new weights, in the dtype and on the device that the old ones have.

        Args:
          params: the state of a model like `model()`, or of some of its variables.
          filter_types: which variables these are; their names say that, too.

        Raises TypeError for what is no state, ValueError for variables that the model does not have, or of other
        shapes; all weights are the old ones then.
        """
        checks.instance("params", params, nnx.State)
        own, taken = dict(nnx.to_flat_state(nnx.state(self._model))), []
        for path, new in nnx.to_flat_state(params):
            name = ".".join(map(str, path))
            if path not in own:
                raise ValueError(
                    f"params: expected variables of the rollout's model, got {name}, which it does not have"
                )
            value, old = jnp.asarray(new.get_value()), own[path].get_value()
            if value.shape != old.shape:
                raise ValueError(f"params: expected shape {old.shape} for {name}, got {value.shape}")
            # A copy: the next step of the learner may give its arrays away.
            taken.append((own[path], jax.device_put(value, old.sharding, may_alias=False).astype(old.dtype)))
        with self._lock:
            for variable, value in taken:
                variable.set_value(value)
            self._weights = split(self._model)
            self.engine.update_weights(self._model)

    def pad_id(self) -> int:
        """Return the token that pads prompts and completions."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token that ends a text, unless `rollout_config.eos_tokens` names others."""
        return self._tokenizer.eos_id()

    def model(self) -> Decoder:
        """Return the model with the weights that the next rollout uses."""
        return self._model

    def _finished(self, prompts: Sequence[Integers], params: SamplingParams) -> tuple[list[Request], Any]:
        """Submit a request for each prompt, and step until all are finished; other threads may step in between.

        Returns them, and the weights that drew last, for others may be there as soon as the lock is free.
        """
        requests: list[Request] = []
        try:
            with self._lock:
                weights = self._weights
                for prompt in prompts:
                    params = replace(params, stream=self._streams)
                    requests.append(self.engine.submit(prompt, params))
                    self._streams += 1
            while not all(request.finished for request in requests):
                with self._lock:
                    weights = self._weights
                    self.engine.step()
        except BaseException:
            with self._lock:
                for request in requests:
                    self.engine.abort(request)
            raise
        for request in requests:
            if request.error is not None:
                raise request.error
        return requests, weights


def _logprobs_at(
    temperature: float, requests: Sequence[Request], weights: Any, width: int
) -> list[Float[np.ndarray, " tokens"]]:
    """Return the log-probability of each generated token at a temperature."""
    tokens = np.zeros((len(requests), width), np.int32)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.context)] = request.context
    logprobs = np.asarray(_dense_logprobs(*weights, tokens, np.float32(temperature)))
    return [
        row[len(request.prompt) - 1 : len(request.context) - 1] for row, request in zip(logprobs, requests, strict=True)
    ]


def left_padded(rows: Sequence[Sequence[int]], width: int, pad: int) -> Int[np.ndarray, "B P"]:
    """Return prompts as the rows of an array, padded on the left.

    Args:
      rows: token ids of each prompt.
      width: tokens of a row (P).
      pad: the token to pad with.

    Raises ValueError for a prompt that is longer.

    >>> from codec_jax.rollout import left_padded
    >>> left_padded([[5, 6, 7], [8]], width=4, pad=0).tolist()
    [[0, 5, 6, 7], [0, 0, 0, 8]]
    """
    padded = np.full((len(rows), width), pad, np.int32)
    for i, row in enumerate(rows):
        if len(row) > width:
            raise ValueError(
                f"prompts[{i}]: expected at most max_prompt_length = {width} tokens, got {len(row)}; "
                "leave out such prompts, or raise max_prompt_length"
            )
        padded[i, width - len(row) :] = row
    return padded


def seed_number(seed: int | Array | None) -> int:
    """Return a seed of Tunix, which may be a number or a key of JAX, as one of `SamplingParams`.

    Args:
      seed: None is 0. Of a number the last 32 bits count.

    Raises ValueError for what is neither.

    >>> from codec_jax.rollout import seed_number
    >>> seed_number(7), seed_number(jax.random.PRNGKey(7)), seed_number(jax.random.key(7)), seed_number(None)
    (7, 7, 7, 0)
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(0 if seed is None else seed)
    if words.dtype.kind not in "iu":
        raise ValueError(f"seed: expected an integer of 64 bits at most, or a key, got {seed!r}")
    return int(np.bitwise_xor.reduce(words.astype(np.uint32), axis=None))


@partial(jax.jit, static_argnums=0)
def _dense_logprobs(
    graph: nnx.GraphDef[Decoder], weights: Any, tokens: Int[Array, "B T"], temperature: Float[Array, ""]
) -> Float[Array, "B T-1"]:
    """Log-probability of each token after those before it, row by row: logits of one row are large enough."""
    model = nnx.merge(graph, weights)

    def of_row(row: Int[Array, " T"]) -> Float[Array, " T-1"]:
        logits = Decoder.__call__(model, row[None, :-1])[0]
        # At a temperature of next to nothing the largest would not be finite, and of 0 is left what is too small.
        least = jnp.finfo(jnp.float32).tiny
        logits = (logits - logits.max(axis=1, keepdims=True)) / jnp.maximum(temperature, least)
        chosen = jnp.take_along_axis(logits, row[1:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=1)

    return lax.map(of_row, tokens)
