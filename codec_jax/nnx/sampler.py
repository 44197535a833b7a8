"""Decode many requests over one forest: prefill each node once, sample, fork and prune between steps.

    start    prompts -> forest -> chunks of every node -> prefill -> logits of each request
    decode   reserve pages -> plan -> jitted loop of `steps` tokens -> fetch the tokens, and again; the next interval is
             planned while the device decodes, as if nobody stopped
    fork     another request that shares everything so far; no copy, no prefill
    prune    requests leave, and with them the pages that nobody else reads

The jitted loop has the same shapes throughout, so it compiles once, however the tree changes; the host looks at its
tokens once every `steps` tokens. All state is in `Decoding` values; the KV pages in them are updated in place, so a
state that was passed to `decode` must not be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.capacity import bucket
from codec_jax.errors import LogitsError, OutOfPagesError
from codec_jax.forest import Forest
from codec_jax.nnx import options
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoding import Completion, Decoding, Generated, Interval
from codec_jax.nnx.prefill import MOST_CHUNK_TOKENS, prefill_waves
from codec_jax.nnx.steps import decode_loop, prefill_step
from codec_jax.order import NO_NODE
from codec_jax.pages import KVPages, PagePool
from codec_jax.plan import Plan, Tiling, block_slots, make_plan
from codec_jax.replan import replan
from codec_jax.traffic import Traffic, count_decode, count_pass

#: Nodes that a path may have before the decode step is compiled anew for longer block lists.
_EXPECTED_DEPTH = 8


class Sampler:
    """Decodes with a model over a forest of requests."""

    def __init__(
        self,
        model: Decoder,
        *,
        max_requests: int,
        num_pages: int,
        page_size: int = 16,
        max_context: int | None = None,
        steps: int = 16,
        implementation: str | None = None,
    ) -> None:
        """Prepare to decode up to `max_requests` requests at a time over a pool of `num_pages` pages.

        Args:
          model: the decoder; its weights are taken as they are now.
          max_requests: request slots (B): prompts and forks that are alive together.
          num_pages: KV pages of each layer.
          page_size: tokens in a page.
          max_context: tokens that one request may reach, prompt included; defaults to what the pool holds. Bounds
            the plan's arrays.
          steps: tokens between two looks of the host at the device, and between two plans.
          implementation: of `forest_attention`.
        """
        max_context = num_pages * page_size if max_context is None else max_context
        for name, value in (
            ("max_requests", max_requests),
            ("num_pages", num_pages),
            ("max_context", max_context),
            ("steps", steps),
        ):
            checks.positive(name, value)
        checks.page_size(page_size)
        graph, self._weights = nnx.split(model)
        self.config = model.config
        self.max_requests, self.num_pages, self.page_size, self.steps = (
            max_requests,
            num_pages,
            page_size,
            steps,
        )
        self.max_context = max_context
        # Sizes for a full pool, so that they never change.
        config = model.config
        group = config.num_q_heads // config.num_kv_heads
        self._tiling = Tiling.of_device(
            num_pages * page_size, again=0, group=group, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        self._new_cache = lambda: model.new_cache(num_pages, page_size)
        self._decode = jax.jit(
            lambda weights, *rest: decode_loop(nnx.merge(graph, weights), steps, implementation, *rest),
            donate_argnums=(1,),
        )
        self._prefill = jax.jit(
            lambda weights, *rest: prefill_step(nnx.merge(graph, weights), implementation, *rest),
            donate_argnums=(1,),
        )

    def start(
        self, prompts: Sequence[Integers], *, streams: Integers | None = None, progress: bool = False
    ) -> Decoding:
        """Find the prefixes that the prompts share, and prefill each of them once.

        Prompt i becomes request i. `streams` numbers the random stream of each, 0, 1, ... by default: give a prompt
        the same number in any batch, and it draws the same random numbers. Raises ValueError for an empty or too long
        prompt, a token out of range, too many prompts, or streams that are not one number of at least 0 for each;
        OutOfPagesError if the pool does not hold them.
        """
        options.check_prompts(prompts, self.max_requests, self.max_context, self.config.vocab_size)
        return self._start(prompts, streams, progress)

    def _start(self, prompts: Sequence[Integers], streams: Integers | None, progress: bool) -> Decoding:
        numbers = options.check_streams(range(len(prompts)) if streams is None else streams, len(prompts))
        forest = Forest.from_sequences(prompts, page_size=self.page_size, request_capacity=self.max_requests)
        if len(forest.used_pages) > self.num_pages:
            raise OutOfPagesError(
                f"the prompts need {len(forest.used_pages)} pages of {self.page_size} tokens, the pool has "
                f"{self.num_pages}; give the sampler more pages or fewer prompts"
            )
        forest = forest.rebuild(node_capacity=_EXPECTED_DEPTH * self.max_requests, entry_capacity=self.num_pages)
        cache, logits = self._prefill_forest(forest, prompts, progress)
        stream = np.zeros(self.max_requests, np.int32)
        stream[: len(prompts)] = numbers
        return Decoding(
            forest=forest,
            pool=PagePool.create(self.num_pages, forest.used_pages),
            cache=cache,
            logits=logits,
            stream=stream,
            next_stream=int(numbers.max()) + 1,
            block_capacity=self._block_capacity(),
            traffic=Traffic(),
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
        """Append up to `max_tokens` tokens to every request in use; a request stops early at a stop token.

        The stop token is appended too, so the state's logits always follow each request's last token. A request's
        tokens depend on the seed, its own stream and its own context, not on who is decoded beside it. `on_tokens`
        is called with a request and its new tokens, once per interval of `steps` tokens. `state` is used up.

        Raises ValueError for options out of range, a state that was used up before or a request that would exceed
        max_context; OutOfPagesError when the pool runs out and LogitsError for logits that are not finite, which both
        carry what was reached. What `on_tokens` raises ends the decoding, and the state with it.
        """
        return self._decode_on(state, max_tokens, 0, stop_tokens, temperature, top_k, top_p, seed, on_tokens)

    def _decode_on(
        self,
        state: Decoding,
        max_tokens: int,
        then: int,
        stop_tokens: Integers,
        temperature: float,
        top_k: int | None,
        top_p: float,
        seed: int,
        on_tokens: Callable[[int, list[int]], None] | None,
    ) -> tuple[Decoding, Generated]:
        """Do what `decode` does, for a caller who expects to go on with `then` tokens for every request."""
        stop_tokens = list(stop_tokens)
        options.check_sampling(stop_tokens, temperature, top_k, top_p, seed, self.config.vocab_size)
        options.check_unused(state.cache)
        options.check_room("max_tokens", max_tokens, int(state.forest.request_length.max()), self.max_context)
        stops = np.full(max(8, len(stop_tokens)), -1, np.int32)
        stops[: len(stop_tokens)] = stop_tokens
        sampling = (
            jax.random.key(seed),
            np.float32(temperature),
            np.int32(self.config.vocab_size if top_k is None else min(top_k, self.config.vocab_size)),
            np.float32(top_p),
            stops,
        )
        generated = Generated(
            tokens=[[] for _ in range(self.max_requests)],
            logprobs=[[] for _ in range(self.max_requests)],
            stopped=[False] * self.max_requests,
        )
        remaining = np.where(state.forest.active, max_tokens, 0).astype(np.int32)
        while remaining.any():
            growing = np.flatnonzero(remaining)
            interval = state.ahead
            if interval is None or interval.source is not state.forest or (interval.remaining != remaining).any():
                try:
                    interval = self._prepare(state.forest, state.pool, remaining, state)
                except OutOfPagesError as error:
                    error.state, error.generated = state, generated
                    raise
            cache, logits, *results = self._decode(
                self._weights,
                state.cache,
                state.logits,
                interval.growers,
                interval.plan,
                state.stream,
                remaining,
                *sampling,
            )
            # The call returns before the device is done. Meanwhile, what comes next if nobody stops is planned.
            state = replace(state, interval=interval)
            expected = np.minimum(remaining, self.steps)
            forest = interval.forest.extend(expected)
            following = np.where(remaining > self.steps, remaining - self.steps, np.minimum(remaining, then))
            ahead = self._prepare_ahead(forest, interval.pool, following, state)
            tokens, logprobs, running, broken = jax.device_get(results)
            counts = (tokens >= 0).sum(axis=1, dtype=np.int32)
            state = replace(
                state,
                forest=forest if (counts == expected).all() else interval.forest.extend(counts),
                pool=interval.pool,
                cache=cache,
                logits=logits,
                block_capacity=interval.plan.pages.shape[0],
                traffic=state.traffic + count_decode(interval.growers, interval.plan, counts),
                ahead=ahead,
            )
            new = {request: tokens[request, : counts[request]].tolist() for request in growing.tolist()}
            for request, text in new.items():
                generated.tokens[request].extend(text)
                generated.logprobs[request].extend(logprobs[request, : counts[request]].tolist())
                generated.stopped[request] = text[-1] in stop_tokens
            if broken.any():
                broke = LogitsError(
                    f"logits: expected finite numbers, got others for requests {np.flatnonzero(broken).tolist()}; "
                    "are the weights finite? The others go on with the error's state, once these are pruned from it"
                )
                broke.state, broke.generated = state, generated
                raise broke
            if on_tokens is not None:
                for request, text in new.items():
                    on_tokens(request, text)
            remaining = np.where(running, remaining - counts, 0)
        return state, generated

    def append(self, state: Decoding, tokens: Mapping[int, Integers]) -> Decoding:
        """Append given tokens to some requests: a user's next turn, a tool's answer. `state` is used up.

        `tokens` maps requests to what follows in them. Raises ValueError for a request that is not in use, no
        tokens, or tokens out of range, OutOfPagesError if the pool does not hold them.
        """
        options.check_unused(state.cache)
        requests = checks.requests_in_use(list(tokens), state.forest.leaf)
        new = {request: checks.int_vector(f"tokens[{request}]", list(tokens[request])) for request in requests.tolist()}
        for request, given in new.items():
            if not given.size:
                raise ValueError(f"tokens[{request}]: expected at least one token, got none")
            checks.tokens(f"tokens[{request}]", given, self.config.vocab_size)
            length = int(state.forest.request_length[request])
            options.check_room(f"tokens[{request}]", len(given), length, self.max_context)
        lengths = np.zeros(self.max_requests, np.int32)
        lengths[requests] = [len(given) for given in new.values()]
        forest, pool = state.forest.reserve(state.pool, lengths, requests)
        cache, logits, traffic = state.cache, state.logits, state.traffic
        for first in range(0, int(lengths.max()), MOST_CHUNK_TOKENS):
            counts = np.clip(lengths - first, 0, MOST_CHUNK_TOKENS)
            forest = forest.extend(counts)
            growing = np.flatnonzero(counts)
            # Rows hold a power of two tokens, so that few lengths are compiled; tokens are at their right end.
            width = 1 << (int(counts.max()) - 1).bit_length()
            rows = np.zeros((self.max_requests, width), np.int32)
            for request in growing.tolist():
                rows[request, width - counts[request] :] = new[request][first : first + counts[request]]
            store = np.arange(width) >= width - counts[:, None]
            source = np.where(counts > 0, np.arange(self.max_requests), -1).astype(np.int32)
            growers = _only(forest, growing)
            plan = self._plan(growers, width, 0)
            cache, logits = self._prefill(self._weights, cache, logits, growers, plan, rows, store, source)
            traffic = traffic + count_pass(growers, plan)
        return replace(state, forest=forest, pool=pool, cache=cache, logits=logits, traffic=traffic)

    def peek(self, state: Decoding, tokens: Mapping[int, Integers]) -> tuple[Decoding, Float[Array, "B V"]]:
        """Return the logits that would follow if the tokens were appended, and the state without them.

        For asking a model about its thoughts: the question leaves no trace. Raises what `append` raises.
        """
        asked = self.append(state, tokens)
        # The tokens went to pages that the state does not count as taken, so it stays as good as it was.
        return replace(state, cache=asked.cache, traffic=asked.traffic), asked.logits

    def fork(self, state: Decoding, requests: Integers) -> tuple[Decoding, list[int]]:
        """Add one request for each entry of `requests` that shares everything the named one has; returns the new slots.

        A fork draws its own random numbers. Raises what `Forest.fork` raises.
        """
        forest, new = state.forest.fork(requests)
        source = np.arange(self.max_requests, dtype=np.int32)
        source[new] = requests
        stream = state.stream.copy()
        stream[new] = state.next_stream + np.arange(len(new))
        state = replace(
            state,
            forest=forest,
            logits=state.logits[source],
            stream=stream,
            next_stream=state.next_stream + len(new),
        )
        return state, new.tolist()

    def prune(self, state: Decoding, requests: Integers) -> Decoding:
        """Remove requests; pages that nobody else reads return to the pool. Raises what `Forest.retire` raises."""
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

        Requests leave the forest as they finish. Options and errors are those of `start` and `decode`, with a stream
        for each completion; `on_tokens` gets the index of the completion, and so does `on_completion`, which is
        called as soon as one is finished. `progress` shows bars for prefill and decoding. OutOfPagesError and
        LogitsError carry the completions so far as `generated`.
        """
        checks.positive("samples", samples)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        options.check_prompts(repeated, self.max_requests, self.max_context, self.config.vocab_size)
        options.check_room("max_new_tokens", max_new_tokens, max(map(len, prompts)), self.max_context)
        state = self._start(repeated, streams, progress)
        done = [Completion(r // samples, [], [], "length") for r in state.requests]
        left = max_new_tokens
        with tqdm(
            total=max_new_tokens * len(done), desc="decode", unit="token", leave=None, disable=not progress
        ) as bar:
            while state.requests and left > 0:
                try:
                    count = min(self.steps, left)
                    then = min(self.steps, left - count)
                    state, new = self._decode_on(
                        state, count, then, stop_tokens, temperature, top_k, top_p, seed, on_tokens
                    )
                except (OutOfPagesError, LogitsError) as error:
                    error.generated = done
                    raise
                left -= count
                for request in state.requests:
                    done[request].tokens.extend(new.tokens[request])
                    done[request].logprobs.extend(new.logprobs[request])
                    bar.update(len(new.tokens[request]) + (left if new.stopped[request] else 0))
                stopped = [request for request in state.requests if new.stopped[request]]
                for request in stopped:
                    done[request] = replace(done[request], finish_reason="stop")
                if on_completion is not None:
                    for request in stopped if left else state.requests:
                        on_completion(request, done[request])
                state = self.prune(state, stopped) if stopped else state
        return done

    # ------------------------------------------------------------------ internals

    def _prepare(self, forest: Forest, pool: PagePool, remaining: Int[np.ndarray, " B"], state: Decoding) -> Interval:
        """Take pages for the next interval and plan it, by extending the plan of the last one where that will do."""
        growing = np.flatnonzero(remaining)
        roomy, pool_left = forest.reserve(pool, int(min(self.steps, remaining.max())), growing)
        growers, last = _only(roomy, growing), state.interval
        if last is None:
            plan = self._plan(growers, 1, state.block_capacity)
        else:
            plan = replan(last.plan, last.growers, growers, steps=self.steps)
        return Interval(forest, remaining, roomy, pool_left, growers, plan)

    def _prepare_ahead(
        self, forest: Forest, pool: PagePool, remaining: Int[np.ndarray, " B"], state: Decoding
    ) -> Interval | None:
        """Prepare an interval that may not come; None if there is nothing left to do, or no room for it yet."""
        try:
            return self._prepare(forest, pool, remaining, state) if remaining.any() else None
        except OutOfPagesError:
            return None

    def _plan(self, forest: Forest, query_tokens: int, block_capacity: int) -> Plan:
        return make_plan(
            forest,
            num_q_heads=self.config.num_q_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            steps=self.steps,
            query_tokens=query_tokens,
            block_tokens=self._tiling.block_tokens,
            block_capacity=block_capacity,
        )

    def _block_capacity(self) -> int:
        """Bound the blocks of any plan: every tile reads every page, or every request its longest path."""
        slot_tokens, slots = block_slots(self.page_size, self._tiling.block_tokens)
        tiles = -(-self.max_requests * self.config.num_q_heads // (self.config.num_kv_heads * self._tiling.tile_rows))
        paths = self.max_requests * (-(-self.max_context // self.page_size) + _EXPECTED_DEPTH)
        parts = min(tiles * self.num_pages, paths) * (self.page_size // slot_tokens)
        return bucket(-(-parts // slots) + 2 * tiles)

    def _prefill_forest(
        self, forest: Forest, prompts: Sequence[Integers], progress: bool
    ) -> tuple[tuple[KVPages, ...], Float[Array, "B V"]]:
        """Compute K and V of every node once, in waves of chunks, and the logits after each prompt."""
        cache = self._new_cache()
        logits = jnp.zeros((self.max_requests, self.config.vocab_size), jnp.float32)
        for wave in tqdm(prefill_waves(forest, prompts), desc="prefill", leave=None, disable=not progress):
            plan = self._plan(wave.chunks, wave.tokens.shape[1], 0)
            cache, logits = self._prefill(
                self._weights, cache, logits, wave.chunks, plan, wave.tokens, wave.store, wave.chunk_of_request
            )
        return cache, logits


def _only(forest: Forest, requests: Int[np.ndarray, " some"]) -> Forest:
    """Leave only some requests in the forest, for a plan that does not read what the others alone would need."""
    leaf = np.full_like(forest.leaf, NO_NODE)
    leaf[requests] = forest.leaf[requests]
    return forest if (leaf == forest.leaf).all() else forest.rebuild(leaf=leaf)
