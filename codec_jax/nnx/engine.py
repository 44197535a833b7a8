"""An engine that requests enter and leave: one living forest, in which whatever was computed once is found again.

    submit ─► queue ─► Scheduler ─► Step ─► Device ─► Outcome ─► tokens ─► updates
                       who enters,                       │
                       computes, draws                   │
                          ▲                              │
                          └───── the forest grows ◄──────┘

The host is one step ahead: `step` schedules and dispatches a step, and then waits for the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as numbers
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int
from tokenizers import Tokenizer

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.attention.backends import check_name
from codec_jax.forest import PrefixCache, WindowPages
from codec_jax.nnx import calls
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.device import Device
from codec_jax.nnx.engine_step import Outcome
from codec_jax.nnx.kept import pages_to_keep
from codec_jax.nnx.landing import begin, failing_alone, fetch, finish, take_scores, take_tokens, tell
from codec_jax.nnx.memory import pages_of_windows, pages_that_fit
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.pins import pages_beside, pages_unpinned
from codec_jax.nnx.prefill import chunk_tokens
from codec_jax.nnx.request import Request
from codec_jax.nnx.scheduler import PREFILL_TOKENS, STEPS, Scheduler, Step
from codec_jax.nnx.shards import PlacedDecoder
from codec_jax.nnx.stats import Stats, count
from codec_jax.nnx.text import special_tokens

#: What commands say of their option.
INVARIANT_HELP = "compute every request as if it were alone, to the last bit, which takes more time"


class _Flight(NamedTuple):
    """A step that has not landed: the host does not know yet what it brought."""

    step: Step
    outcome: Outcome | None  # None if there was nothing to run


class Engine:
    """Decodes requests that come at any time, and computes what they share once.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> engine = Engine(Decoder(config, nnx.Rngs(0)), max_requests=8, num_pages=64)
    >>> one = engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    >>> other = engine.submit([1, 2, 4], SamplingParams(max_tokens=3, temperature=0.0))
    >>> sum(len(update.tokens) for update in engine.stream(other))
    3
    >>> while not engine.idle:
    ...     news = engine.step()
    >>> len(one.tokens), one.finish_reason
    (5, 'length')

    Prefixes stay while there is room, and longer if they are pinned; a request may be left, or go two ways:

    >>> engine.warm_up()  # compiles everything now
    >>> document = engine.pin(list(range(40)))
    >>> answers = engine.submit_samples([*range(40), 7], 3, SamplingParams(max_tokens=8))
    >>> news = engine.step(), engine.step()
    >>> fork = engine.fork(answers[0], SamplingParams(max_tokens=12, seed=1))
    >>> engine.abort(answers[1])
    >>> [update.finish_reason for update in engine.stream(fork)][-1], answers[1].finish_reason
    ('length', 'abort')
    >>> engine.unpin(document)
    >>> engine.update_weights(Decoder(config, nnx.Rngs(1)))
    """

    def __init__(
        self,
        model: Decoder | PlacedDecoder,
        *,
        mesh: Mesh | None = None,
        max_requests: int = 64,
        num_pages: int | None = None,
        page_size: int = 16,
        max_context: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        steps: int = STEPS,
        room: float = 1.0,
        reconstructed_pages: int | None = None,
        windowed_pages: int | None = None,
        tokenizer: Tokenizer | None = None,
        implementation: str | None = None,
        invariant: bool = False,
    ) -> None:
        """Allocate the pages of the KV cache.

        Args:
          model: the decoder. The engine keeps the weights that it has now; `update_weights` takes new ones.
          mesh: devices along axes "context" and "tensor" that decode together: heads and weights are divided along
            "tensor", KV pages and weights along "context". Not needed for a model that is placed.
          max_requests: rows (B): requests that are computed or decode at a time. Any number may wait.
          num_pages: KV pages of each layer, on all devices together; defaults to what fits into the memory that the
            device has left.
          page_size: tokens in a page.
          max_context: tokens of prompt and text together, at most; defaults to what the pool holds.
          prefill_tokens: tokens of prompts that a step computes beside requests that decode, at most, but a chunk at
            least: whole pages of at most 128 tokens, or two pages if these have more.
          steps: tokens that requests draw between two looks of the host, while no prompt is computed.
          room: the share of `max_tokens` for which there must be pages before a request enters. With 1, all that are
            inside can finish. With less, more are inside at a time, and one may have to give way, to be computed
            again later.
          reconstructed_pages: with latent attention, pages of each layer for K and V of every head, which are kept
            beside the latents of prefixes that many requests share. Defaults to a quarter of the memory of `num_pages`
            on a GPU by whose rates `max_requests` can be enough to be worth it, and to none elsewhere.
          windowed_pages: pages of each layer with a window, where others see everything; 0 for as many as these have.
            Pages that no request sees any more make room there. Defaults to what requests can see, and as much again
            for the ends of prefixes that nobody reads. A prefix that is found is used as far as its end is there.
          tokenizer: for prompts given as text, the text of updates, and stop strings.
          implementation: of `forest_attention`.
          invariant: compute every request as if it were alone, to the last bit: with plans of the policy "invariant",
            and steps that either compute prompts or decode, in arrays of always the same shapes. It takes more time.

        Raises ValueError for numbers that do not fit together, a mesh that does not divide the model, and what
        `invariant` does not go with: pages on several devices, fewer pages in some layers than in others, or less room
        than for all that requests may generate.
        """
        check_name(implementation)
        if not 0.0 <= checks.number("room", room) <= 1.0:
            raise ValueError(f"room: expected a share in [0, 1], got {room}")
        page_size = checks.page_size(page_size)
        num_pages = None if num_pages is None else checks.integer("num_pages", num_pages)
        invariant = checks.boolean("invariant", invariant)
        placed = PlacedDecoder.of(model, mesh)
        config, parallel = placed.config, Parallel.of(placed.mesh)
        if invariant and (room < 1.0 or parallel.context > 1 or reconstructed_pages or windowed_pages):
            raise ValueError(
                "invariant: expected room = 1, pages on one device and neither reconstructed_pages nor windowed_pages, "
                f'got room = {room}, {parallel.context} along "context", reconstructed_pages = {reconstructed_pages} '
                f"and windowed_pages = {windowed_pages}: who gives way is computed anew otherwise than before, and so "
                "is the end of a prefix; a sum over devices or forms has parts"
            )
        rows, kept = checks.integer("max_requests", max_requests), 0 if invariant else reconstructed_pages
        given = 0 if invariant else windowed_pages
        windowed = pages_of_windows(
            config, parallel, page_size,
            max_requests=rows, prefill_tokens=prefill_tokens, steps=steps, given=given,
        )  # fmt: skip
        if num_pages is None:
            sharing, asked = (rows, 0) if kept is None else (1, pages_to_keep(config, parallel, rows, 0, kept))
            num_pages = pages_that_fit(
                config, page_size,
                mesh=placed.mesh, max_requests=sharing, windowed_pages=windowed, reconstructed_pages=asked,
            )  # fmt: skip
        reconstructed = pages_to_keep(config, parallel, rows, num_pages, kept)
        windows = None
        if 0 < windowed < num_pages:
            windows = WindowPages.create(num_pages, windowed, [x for x in config.windows_used if x is not None])
        cache = PrefixCache.create(
            num_pages, page_size, rows, devices=parallel.context, invariant=invariant, windows=windows
        )
        if tokenizer is not None:
            checks.instance("tokenizer", tokenizer, Tokenizer)
        self.config, self.tokenizer = config, tokenizer
        self._special = frozenset[int]() if tokenizer is None else special_tokens(tokenizer)
        self.max_context = num_pages * page_size if max_context is None else checks.integer("max_context", max_context)
        self._page_size = page_size
        self._chunk_tokens = width = max(chunk_tokens(page_size), 2 * page_size)
        chunks = max(checks.integer("prefill_tokens", prefill_tokens) // width, 1)
        sizes = {"steps": checks.integer("steps", steps), "chunks": chunks, "chunk_tokens": width}
        self._scheduler = Scheduler(cache, room=room, **sizes)
        self._device = Device(
            placed,
            cache=cache,
            max_context=self.max_context,
            reconstructed_pages=reconstructed,
            implementation=implementation,
            **sizes,
        )
        self._ids = numbers()
        self._taken = WeakSet[Request]()
        self._flight: _Flight | None = None
        self._news: list[Request] = []  # that no step has told of yet
        self._is_taking_in = False  # what a step brought
        self._pins: dict[Request, Int[np.ndarray, " pages"] | None] = {}  # None: still to be computed
        self._submitted = self._steps = self._generated = 0

    # ------------------------------------------------------------------ requests

    submit, submit_samples, fork = calls.submit, calls.submit_samples, calls.fork

    def abort(self, request: Request) -> None:
        """End a request with what it has; nothing happens to one that is finished.

        Args:
          request: one of this engine's.

        Raises ValueError for one of another engine that is not finished.
        """
        self._check_own(request)
        if not request.finished:
            finish(request, "abort")

    def pin(self, prompt: str | Integers) -> Request:
        """Compute a prefix, and keep it in the cache until `unpin`; who goes on from it needs room for the rest only.

        Args:
          prompt: as in `submit`.

        Returns a request that is finished when the prefix is there. Raises ValueError if that leaves too little room
        for the requests that there are.
        """
        request = calls.new_request(self, prompt, SamplingParams(max_tokens=0))
        inside = [*self._scheduler.queue, *self._scheduler.inside]
        others = [each for each in inside if not each.finished and each not in self._pins]
        cache = self._scheduler.cache
        largest = max((pages_beside(each, self._pins, cache, request) for each in others), default=0)
        unpinned = self._pages_unpinned()
        pages, room = unpinned - self._pages_unpinned(request), unpinned - largest
        if pages > room:
            raise ValueError(
                f"prompt: expected at most {max(room, 0)} pages of {self._page_size} tokens to pin, which leaves room "
                f"for each of the requests that there are, got {pages}; unpin others or make the pool larger"
            )
        self._pins[self._submit(request)] = None
        return request

    def unpin(self, request: Request) -> None:
        """Let the cache forget a prefix that was pinned.

        Args:
          request: what `pin` returned.

        Raises ValueError for one that is not pinned.
        """
        checks.instance("request", request, Request)
        if request not in self._pins:
            raise ValueError(f"request: expected one that pin returned, and that is still pinned, got {request!r}")
        self.abort(request)
        pages = self._pins.pop(request)
        if pages is not None:
            self._scheduler.cache = self._scheduler.cache.unpin(pages)

    # ------------------------------------------------------------------ work

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, and nothing that no step has told of."""
        waiting = any(not request.finished for request in self._scheduler.queue)
        return not waiting and not self._scheduler.running and self._flight is None and not self._news

    @property
    def stats(self) -> Stats:
        """What was done so far, and what there is now; with pages of one byte it waits for the step in flight."""
        of_device = self._device.copies.count, self._device.saturated
        return count(self._scheduler, self._submitted, self._steps, self._generated, *of_device)

    def step(self) -> list[Request]:
        """Dispatch the next step, and take in the one before: return the requests of which something is new.

        An error of one request, such as logits that are not finite or a callback that raises, ends this request with
        `finish_reason` "error" and is its `error`. The others go on. After any other error, or an interruption, all
        that was computed is forgotten, and the next step computes it again.

        Raises RuntimeError in a callback, as do all methods that step.
        """
        with self._taking_in():
            return self._step()

    def _step(self) -> list[Request]:
        news, self._news = self._news, []
        # What a matcher allows depends on the last token: nothing is done ahead while there is one.
        if any(running.request.matcher is not None for running in self._scheduler.running):
            news += self._land()
        step, flight = self._scheduler.schedule(), None
        if step is not None:
            outcome = None
            if step.pieces or step.drawing:
                outcome = self._device.dispatch(step, self._scheduler.cache, behind=self._flight is not None)
                self._steps += 1
            flight = _Flight(step, outcome)
        news += self._land()
        self._flight = flight
        return list(dict.fromkeys(news))

    stream, generate, score = calls.stream, calls.generate, calls.score

    def update_weights(self, model: Decoder | PlacedDecoder) -> None:
        """Take the weights that a model has now. Nothing compiles; what the old ones computed is forgotten.

        Running requests go on from what they have generated, computed again by the new weights, which also give all
        log-probabilities of a prompt that has not all of them yet.

        Args:
          model: a decoder of the same config.

        Raises ValueError for another config, or weights of other shapes or dtypes, RuntimeError in a callback. After an
        interruption it is as with `step`; take the weights again.
        """
        self._refuse_in_callbacks()
        placed = self._device.placed(model)
        with self._taking_in():  # whatever comes in between, nothing of the old weights stays beside the new ones
            self._device.take_weights(placed)
            self._news += self._land()
            self._restart()

    def warm_up(self) -> None:
        """Compile what steps run, so that the first requests do not wait for it.

        Raises RuntimeError in a callback.
        """
        with self._taking_in():
            self._news += self._land()  # what the device carries for the next step is that of the last one
            self._device.warm_up(self._scheduler.cache)

    @contextmanager
    def _taking_in(self) -> Iterator[None]:
        """Take in the step in flight; after an error that is not a request's forget all that was computed."""
        self._refuse_in_callbacks()
        flight, news = self._flight, self._news
        inside = [] if flight is None else [*flight.step.drawing, *flight.step.finishing]
        going = [running.request for running in inside if not running.request.finished]
        try:
            self._is_taking_in = True
            yield
        except BaseException:
            self._news = list(dict.fromkeys([*news, *(request for request in going if request.finished)]))
            self._flight = None
            self._device.restart()
            self._restart()
            again = list(self._scheduler.queue)  # callbacks may submit others
            for request in again:  # a landing may have come to any of them halfway
                with failing_alone(request):
                    begin(request, self.tokenizer, self._special)
            self._news += [request for request in again if request.finished]
            raise
        finally:
            self._is_taking_in = False

    def _refuse_in_callbacks(self) -> None:
        """Raise RuntimeError while a step is taken in: half of the requests do not have theirs yet."""
        if self._is_taking_in:
            raise RuntimeError(
                "engine: expected nobody to step, generate, stream, score, warm_up or update_weights in a callback, "
                "got a call from one; submit, fork, pin and abort there, and step when this step has returned"
            )

    def _restart(self) -> None:
        """Send everybody back to the queue, with what they have generated, and pinned prefixes before them."""
        self._scheduler.restart()
        for request, pages in self._pins.items():
            if pages is not None:
                self._pins[request] = request.finish_reason = None
                if request not in self._scheduler.queue:  # it is there if it was interrupted as it finished
                    self._scheduler.queue.appendleft(request)

    # ------------------------------------------------------------------ on the way in

    def _pages_unpinned(self, *more: Request) -> int:
        """Count the pages that are not pinned once all prefixes to pin are there, and more of them."""
        return pages_unpinned(self._pins, self._scheduler.cache, *more)

    def _check_own(self, request: Request) -> None:
        """Raise ValueError for a request that is not finished, and that this engine does not work on."""
        checks.instance("request", request, Request)
        if not request.finished and request not in self._taken:
            raise ValueError(f"request: expected one of this engine's, got {request!r} of another")

    def _submit(self, request: Request) -> Request:
        params = request.params
        params.check(self.config.vocab_size)
        total, room = len(request.prompt) + params.max_tokens, self._pages_unpinned()
        pages = pages_beside(request, self._pins, self._scheduler.cache)
        if total > self.max_context:
            raise ValueError(
                f"prompt: expected at most max_context = {self.max_context} tokens together with max_tokens = "
                f"{params.max_tokens}, got {total}"
            )
        if pages > room:
            raise ValueError(
                f"prompt: expected at most {room} pages for prompt and max_tokens, which the pool has beside what is "
                f"pinned, got {pages}; generate fewer tokens, unpin others or make the pool larger"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no stop strings, for the engine has no tokenizer; use stop_tokens")
        begin(request, self.tokenizer, self._special)
        self._taken.add(request)
        self._submitted += 1
        self._scheduler.queue.append(request)
        return request

    # ------------------------------------------------------------------ from the device

    def _land(self) -> list[Request]:
        """Wait for the step in flight, and take in what it brought."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        step, outcome = flight
        news: list[Request] = []
        if outcome is not None:
            landed = fetch(step, outcome)
            drawn = take_tokens(step, landed, self._scheduler)
            news = [*drawn, *take_scores(step, landed, self._chunk_tokens)]
            self._generated += sum(drawn.values())
        for running in step.finishing:
            if (request := running.request).finished:
                continue
            if request in self._pins:
                if running not in self._scheduler.running:  # it gave way meanwhile, and comes again
                    continue
                self._scheduler.cache, self._pins[request] = self._scheduler.cache.pin(running.row)
            tell(request, [], "length")
            news.append(request)
        self._scheduler.land(step)
        return news
