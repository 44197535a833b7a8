"""Decode many requests over one forest: prefill each node once, sample, fork and prune between steps.

    start    prompts -> forest -> chunks of every node -> prefill -> logits of each request
    decode   reserve pages -> plan -> jitted loop of `steps` tokens -> fetch the tokens, and again; the next interval is
             planned while the device decodes, as if nobody stopped
    fork     another request that shares everything so far; no copy, no prefill
    prune    requests leave, and with them the pages that nobody else reads
    generate whole completions, any number of them, by an `Engine`

The jitted loop has the same shapes while the tree has up to 8 * max_requests nodes, and compiles once; where chains of
forks have more, arrays grow, and it compiles again. The host looks at its tokens once every `steps` tokens. All state
is in `Decoding` values; the KV pages in them are updated in place, so a state that was passed to `decode` must not be
used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from codec_jax import checks
from codec_jax.arrays import Integers, bucket, padded
from codec_jax.attention.backends import check_name
from codec_jax.errors import LogitsError, OutOfPagesError
from codec_jax.forest import Forest, PagePool
from codec_jax.forest.edits import spread
from codec_jax.forest.radix_tree import shared_tokens
from codec_jax.nnx import validate
from codec_jax.nnx.batch import all_plans
from codec_jax.nnx.completions import complete
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.intervals import EXPECTED_DEPTH, Interval, Intervals
from codec_jax.nnx.kept import pages_to_keep
from codec_jax.nnx.loops import turns_for
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.prefill import append_waves, prefill_waves
from codec_jax.nnx.sampler_device import SamplerDevice
from codec_jax.nnx.sampling import NO_TOKEN, RowOptions
from codec_jax.nnx.shards import PlacedDecoder
from codec_jax.nnx.state import Completion, Decoding, Generated
from codec_jax.planning.plan import growing_pages
from codec_jax.traffic import Traffic, count_pass


class Sampler:
    """Decodes with a model over a forest of requests.

    It keeps the weights that the model had when it was made, whatever becomes of the model: a frozen policy stays
    frozen. `update_weights` takes new ones. They are the same arrays, not copies, so a training step that donates the
    model's buffers takes them away.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> sampler = Sampler(Decoder(config, nnx.Rngs(0)), max_requests=8, num_pages=64)
    >>> completions = sampler.generate([[1, 2, 3], [1, 2, 4]], max_new_tokens=5)
    >>> [len(completion.tokens) for completion in completions]
    [5, 5]

    Or steer the tree yourself:

    >>> state = sampler.start([[1, 2, 3], [1, 2, 4]])
    >>> state, generated = sampler.decode(state, 5, stop_tokens=[0])
    >>> state, forks = sampler.fork(state, [1, 1])
    >>> state = sampler.append(state, {forks[0]: [7]})
    >>> state, logits = sampler.peek(state, {1: [9]})  # leaves no trace in the state
    >>> state = sampler.prune(state, [0])
    >>> state.requests
    [1, 2, 3]
    >>> sampler.update_weights(Decoder(config, nnx.Rngs(1)))
    """

    def __init__(
        self,
        model: Decoder | PlacedDecoder,
        *,
        mesh: Mesh | None = None,
        max_requests: int,
        num_pages: int,
        page_size: int = 16,
        max_context: int | None = None,
        steps: int = 16,
        reconstructed_pages: int | None = None,
        implementation: str | None = None,
        invariant: bool = False,
    ) -> None:
        """Prepare to decode up to `max_requests` requests at a time over a pool of `num_pages` pages.

        Args:
          model: the decoder.
          mesh: devices along axes "context" and "tensor" that decode together, as in `Engine`.
          max_requests: request slots (B): prompts and forks that are alive together.
          num_pages: KV pages of each layer, on all devices together.
          page_size: tokens in a page.
          max_context: tokens that one request may reach, prompt included; defaults to what the pool holds. Bounds
            the plan's arrays.
          steps: tokens between two looks of the host at the device, and between two plans.
          reconstructed_pages: with latent attention, pages of K and V beside those of latents, as in `Engine`.
          implementation: of `forest_attention`.
          invariant: compute every request as if it were alone, to the last bit, as in `Engine`.

        Raises ValueError for numbers that do not fit together, or a mesh that does not divide the model, or spreads
        pages over devices while `invariant`.
        """
        self.max_requests = checks.integer("max_requests", max_requests)
        self.num_pages = num_pages = checks.integer("num_pages", num_pages)
        self.page_size = page_size = checks.page_size(page_size)
        self.steps = checks.integer("steps", steps)
        self.max_context = num_pages * page_size if max_context is None else checks.integer("max_context", max_context)
        check_name(implementation)
        invariant = checks.boolean("invariant", invariant)
        placed = PlacedDecoder.of(model, mesh)
        self.config = placed.config
        parallel = Parallel.of(placed.mesh)
        self._empty = PagePool.create(num_pages, devices=parallel.context)
        if invariant and (parallel.context > 1 or reconstructed_pages):
            raise ValueError(
                f"invariant: expected pages on one device and reconstructed_pages = 0 or None, got {parallel.context} "
                f'along "context" and reconstructed_pages = {reconstructed_pages}: a sum has parts then'
            )
        self._invariant = invariant
        kept = 0 if invariant else reconstructed_pages
        reconstructed = pages_to_keep(placed.config, parallel, self.max_requests, num_pages, kept)
        self._intervals = Intervals(
            placed.config, steps, num_pages, page_size, parallel, reconstructed,
            max_context=self.max_context, invariant=invariant,
        )  # fmt: skip
        alike: dict[str, Any] = {
            "max_requests": max_requests,
            "num_pages": num_pages,
            "page_size": page_size,
            "reconstructed_pages": reconstructed,
            "implementation": implementation,
        }
        self._device = SamplerDevice(placed, self._intervals, **alike)
        self._new_engine: Callable[..., Engine] = partial(
            Engine, max_context=self.max_context, steps=steps, invariant=invariant, **alike
        )
        self._weights_taken = 0
        self._engine: Engine | None = None  # until the first call of `generate`
        self._is_generating = False

    def update_weights(self, model: Decoder | PlacedDecoder) -> None:
        """Take the weights that a model has now, for all calls from here on.

        K and V of states that were begun before stay as the old weights computed them.

        Args:
          model: a decoder of the same config.

        Raises ValueError for another config, or weights of other shapes or dtypes.
        """
        self._device.update_weights(model)
        self._weights_taken += 1
        if self._engine is not None:
            self._engine.update_weights(model)

    def start(
        self, prompts: Sequence[Integers], *, streams: Integers | None = None, progress: bool = False
    ) -> Decoding:
        """Find the prefixes that the prompts share, and prefill each of them once.

        Args:
          prompts: token ids; prompt i becomes request i.
          streams: the number of each request's random stream, 0, 1, ... by default: give a prompt the same number in
            any batch, and it draws the same random numbers.
          progress: show a bar.

        Raises ValueError for an empty or too long prompt, a token out of range, too many prompts, or streams that are
        not one number of at least 0 for each; OutOfPagesError if the pool does not hold them.
        """
        given = validate.prompts(prompts, self.max_context, self.config.vocab_size)
        validate.count(len(given), self.max_requests)
        numbers = validate.streams(range(len(given)) if streams is None else streams, len(given))
        tree = shared_tokens(given, self.page_size, whole_pages=self._invariant)
        if len(tree.page_ids) > self.num_pages:
            raise OutOfPagesError(
                f"the prompts need {len(tree.page_ids)} pages of {self.page_size} tokens, the pool has "
                f"{self.num_pages}; give the sampler more pages or fewer prompts"
            )
        node_capacity = max(EXPECTED_DEPTH * self.max_requests, len(tree.parent))
        tree, pool = spread(tree, self._empty)
        forest = Forest.build(tree, self.max_requests, node_capacity, self.num_pages)
        waves = prefill_waves(
            forest, given, self.num_pages, self._intervals.blocks_of_chunks, one_shape=self._invariant
        )
        cache, logits = self._device.prefill(waves, int(forest.length.sum(dtype=np.int64)), progress)
        stream = np.zeros(self.max_requests, np.int32)
        stream[: len(given)] = numbers
        return Decoding(
            sampler=self,
            forest=forest,
            pool=pool,
            cache=cache,
            logits=logits,
            stream=stream,
            next_stream=int(numbers.max()) + 1,
            block_capacity=self._intervals.block_capacity(self.max_requests, self.max_context),
            traffic=Traffic(),
            copies=self._intervals.no_copies,
            weights=self._weights_taken,
        )

    def decode(
        self,
        state: Decoding,
        max_tokens: int,
        *,
        stop_tokens: Integers = (),
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> tuple[Decoding, Generated]:
        """Append tokens to every request in use; a request stops early at a stop token.

        The stop token is appended too, so the state's logits always follow each request's last token. A request's
        tokens depend on the seed, its own stream and its own context, not on who is decoded beside it.

        Args:
          state: what `start` or an earlier call returned; it is used up.
          max_tokens: tokens to append to each request, at most.
          stop_tokens: tokens that end a request.
          temperature: 0 takes the most likely token.
          top_k: only the k most likely tokens may be drawn; None for all.
          top_p: of those, only the most likely ones that together hold this much of the probability.
          seed: the same seed draws the same tokens.
          on_tokens: called with a request and its new tokens, once per interval of `steps` tokens. An error that
            it raises ends the decoding, and the state with it.

        Raises ValueError for options out of range, a state that was used up before or a request that would exceed
        max_context; OutOfPagesError when the pool runs out and LogitsError for logits that are not finite, which both
        carry what was reached.
        """
        options = self._options(stop_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        checks.function("on_tokens", on_tokens)
        validate.state(state, self)
        validate.room("max_tokens", max_tokens, int(state.forest.request_length.max()), self.max_context)
        if state.weights != self._weights_taken:  # K and V beside latents are those of the weights that they came from
            state = replace(state, copies=self._intervals.no_copies, weights=self._weights_taken)
        generated = Generated.none(self.max_requests)
        remaining = np.where(state.forest.active, max_tokens, 0).astype(np.int32)
        interval: Interval | None = None
        while remaining.any():
            growing = np.flatnonzero(remaining)
            if interval is None or interval.source is not state.forest or (interval.remaining != remaining).any():
                try:
                    interval = self._intervals.prepare(
                        state.forest, state.pool, remaining, state.block_capacity, state.copies
                    )
                except OutOfPagesError as error:
                    error.state, error.generated = state, generated
                    raise
            turns = self.steps if self._invariant else turns_for(int(remaining.max()), self.steps)
            cache, logits, results = self._device.decode(
                interval, turns, state.cache, state.logits, options._replace(stream=state.stream)
            )
            # The call returns before the device is done. Meanwhile, what comes next if nobody stops is planned.
            expected = np.minimum(remaining, self.steps)
            forest = interval.forest.extend(expected)
            following = np.maximum(remaining - self.steps, 0)
            ahead = self._intervals.prepare_ahead(
                forest, interval.pool, following, state.block_capacity, interval.copies
            )
            tokens, logprobs, running, broken = jax.device_get(results)
            counts = (tokens >= 0).sum(axis=1, dtype=np.int32)
            state = replace(
                state,
                forest=forest if (counts == expected).all() else interval.forest.extend(counts),
                pool=interval.pool,
                cache=cache,
                logits=logits,
                block_capacity=interval.block_capacity,
                traffic=state.traffic + interval.traffic(counts),
                copies=interval.copies,
            )
            new = {request: tokens[request, : counts[request]].tolist() for request in growing.tolist()}
            for request, text in new.items():
                generated.tokens[request].extend(text)
                generated.logprobs[request].extend(logprobs[request, : counts[request]].tolist())
                generated.stopped[request] = text[-1] in options.stop_tokens[request]
            if on_tokens is not None:
                for request in growing[~broken[growing]].tolist():
                    on_tokens(request, new[request])
            if broken.any():
                raise LogitsError.of(np.flatnonzero(broken).tolist(), state, generated)
            remaining, interval = np.where(running, remaining - counts, 0), ahead
        return state, generated

    def append(self, state: Decoding, tokens: Mapping[int, Integers]) -> Decoding:
        """Append given tokens to some requests: a user's next turn, a tool's answer.

        Args:
          state: it is used up.
          tokens: what follows, by request.

        Raises ValueError for a request that is not in use, no tokens, or tokens out of range, OutOfPagesError if the
        pool does not hold them.
        """
        validate.state(state, self)
        new = validate.appended(tokens, state.forest, self.max_context, self.config.vocab_size)
        lengths = np.zeros(self.max_requests, np.int64)
        lengths[list(new)] = [len(given) for given in new.values()]
        forest, pool = state.forest.reserve(state.pool, lengths, list(new))
        cache, logits, traffic = state.cache, state.logits, state.traffic
        for wave in append_waves(forest, new, one_shape=self._invariant):
            plan, cache, logits = self._device.run(wave, cache, logits)
            traffic = traffic + count_pass(wave.chunks, all_plans(plan)[0])
        copies = state.copies.without(growing_pages(forest))
        forest = forest.extend(lengths)
        return replace(state, forest=forest, pool=pool, cache=cache, logits=logits, traffic=traffic, copies=copies)

    def peek(self, state: Decoding, tokens: Mapping[int, Integers]) -> tuple[Decoding, Float[Array, "B V"]]:
        """Return the logits that would follow if the tokens were appended, and the state without them.

        For asking a model about its thoughts: the question leaves no trace.

        Args:
          state: it is used up.
          tokens: as in `append`.

        Returns the state, and logits [B, V], float32. Raises what `append` raises.
        """
        asked = self.append(state, tokens)
        # The tokens went to pages that the state does not count as taken, so it stays as good as it was.
        return replace(state, cache=asked.cache, traffic=asked.traffic, copies=asked.copies), asked.logits

    def fork(self, state: Decoding, requests: Integers) -> tuple[Decoding, list[int]]:
        """Add one request for each entry of `requests` that shares everything the named one has.

        A fork draws its own random numbers.

        Args:
          state: it stays good, as long as the new one is not used up.
          requests: the request to fork, for each new one; repeats allowed.

        Returns the state and the new request slots. Raises what `Forest.fork` raises.
        """
        validate.state(state, self)
        forest, new = state.forest.fork(requests)
        source = np.arange(self.max_requests, dtype=np.int32)
        source[new] = requests
        stream = state.stream.copy()
        numbers = (state.next_stream + np.arange(len(new) + self.max_requests)) % 2**31
        stream[new] = numbers[~np.isin(numbers, state.stream[state.forest.active])][: len(new)]
        state = replace(
            state, forest=forest, logits=state.logits[source], stream=stream, next_stream=state.next_stream + len(new)
        )
        return state, new.tolist()

    def prune(self, state: Decoding, requests: Integers) -> Decoding:
        """Remove requests; pages that nobody else reads return to the pool.

        Args:
          state: it stays good, as long as the new one is not used up.
          requests: those to remove.

        Raises what `Forest.retire` raises.
        """
        validate.state(state, self)
        forest, pool = state.forest.retire(state.pool, requests)
        return replace(state, forest=forest, pool=pool)

    def generate(
        self,
        prompts: Sequence[Integers],
        *,
        max_new_tokens: int,
        samples: int = 1,
        stop_tokens: Integers = (),
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        streams: Integers | None = None,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        on_completion: Callable[[int, Completion], None] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete every prompt `samples` times; completions come prompt by prompt.

        An `Engine` of the sampler's sizes does it, which the first call makes, and which keeps its pages. Completions
        that find no room wait for others to finish. What prompts share is computed once, also with those of calls
        before. One whose logits are not finite ends with what it had, and finish_reason "error"; the others go on.

        Args:
          prompts: token ids.
          max_new_tokens: tokens of a completion, at most.
          samples: completions of each prompt.
          stop_tokens: tokens that end a completion, 16 at most.
          temperature, top_k, top_p, seed: as in `decode`.
          streams: as in `start`, one for each completion.
          on_tokens: called with the index of a completion and its new tokens. An error that it raises ends them all.
          on_completion: called with the index and the completion as soon as one is finished.
          progress: show a bar.

        Raises ValueError for options out of range, and prompts that cannot be or can never fit, before anything runs,
        and RuntimeError in a callback of `generate`.
        """
        checks.function("on_tokens", on_tokens)
        checks.function("on_completion", on_completion)
        if self._is_generating:
            raise RuntimeError(
                "sampler: expected nobody to generate in a callback of generate, got a call from one; do it when that "
                "call has returned, or with another sampler"
            )
        given = validate.prompts(prompts, self.max_context, self.config.vocab_size)
        validate.room("max_new_tokens", max_new_tokens, max(map(len, given)), self.max_context)
        count = len(given) * checks.integer("samples", samples)
        numbers = validate.streams(range(count) if streams is None else streams, count)
        params = SamplingParams(
            max_tokens=max_new_tokens,
            stop_tokens=tuple(validate.stop_tokens(stop_tokens, self.config.vocab_size)),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        if self._engine is None:
            self._engine = self._new_engine(self._device.model)
        self._is_generating = True
        try:
            return complete(
                self._engine,
                given,
                numbers,
                params,
                on_tokens=on_tokens,
                on_completion=on_completion,
                progress=progress,
            )
        except BaseException:
            self._engine = None  # its requests are not done, and an interruption may have left a step half done
            raise
        finally:
            self._is_generating = False

    # ------------------------------------------------------------------ internals

    def _options(self, stop_tokens: Integers, **drawing: Any) -> RowOptions:
        """Check how tokens are drawn, and return it as options of every row; their streams are the state's."""
        stops = validate.stop_tokens(stop_tokens, self.config.vocab_size)
        options = RowOptions.of([SamplingParams(**drawing)] * self.max_requests, self.config.vocab_size)
        filled = padded(stops, bucket(len(stops)), NO_TOKEN)  # so that their number hardly matters
        return options._replace(stop_tokens=np.tile(filled, (self.max_requests, 1)))
