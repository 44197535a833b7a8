"""An engine under offered load, by the clocks of those who wait for tokens and of a device that waits for work.

The device is idle from when the last step that it was given has finished until the next one is dispatched. A thread
waits for each step and notes when it has finished; a step counts as dispatched when the call has returned, though the
device may have begun a little earlier.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import jax
import jax.monitoring
import numpy as np
from jaxtyping import Float

from benchmarks.offered import Offered, percentiles, throughput
from codec_jax.forest import Forest, PrefixCache
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.engine_step import Outcome
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.request import Request, Update
from codec_jax.nnx.scheduler import Step

#: The thread that sees a step finish is let in within so many seconds, whatever the one that schedules does in Python.
_SWITCH_SECONDS = 1e-4


class _Span(NamedTuple):
    """When a step was dispatched, and when it had finished."""

    dispatched: float
    finished: float


class _Watch:
    """What the device is given meanwhile."""

    def __init__(self, engine: Engine) -> None:
        """Watch an engine; `during` begins."""
        self._engine, self._spans = engine, list[Future[_Span]]()
        self.computed_tokens = self.decode_steps = self.decode_rows = self.compiled = 0
        self.context_tokens = self.unique_tokens = 0  # of the requests that draw, summed over the tokens they draw

    @contextmanager
    def during(self) -> Iterator[None]:
        """Count and clock every step."""
        dispatch, view, forests = self._engine._device.dispatch, PrefixCache.view, list[Forest]()

        def viewed(cache: PrefixCache, *arguments: object, **capacities: int) -> Forest:
            forests[:] = [view(cache, *arguments, **capacities)]
            return forests[0]

        def dispatched(step: Step, cache: PrefixCache, *, behind: bool) -> Outcome:
            outcome = dispatch(step, cache, behind=behind)
            self._spans.append(waiting.submit(_finished, time.perf_counter(), outcome))
            self._count(step, forests[0])
            return outcome

        def listen(event: str, *_: object, **__: object) -> None:
            self.compiled += event.endswith("backend_compile_duration")

        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        jax.monitoring.register_event_duration_secs_listener(listen)
        with (
            ThreadPoolExecutor(1) as waiting,
            patch.object(PrefixCache, "view", viewed),
            patch.object(self._engine._device, "dispatch", dispatched),
        ):
            try:
                yield
            finally:
                jax.monitoring.unregister_event_duration_listener(listen)
                sys.setswitchinterval(interval)

    def _count(self, step: Step, forest: Forest) -> None:
        self.computed_tokens += sum(piece.new_tokens for piece in step.pieces)
        if step.drawing:
            tokens = max(step.drawing.values())
            self.decode_steps, self.decode_rows = self.decode_steps + 1, self.decode_rows + len(step.drawing)
            self.context_tokens += tokens * int(forest.request_length.sum(dtype=np.int64))
            self.unique_tokens += tokens * int(forest.length.sum(dtype=np.int64))

    def idle_seconds(self, start: float, stop: float) -> float:
        """Add up when the device had nothing to do; everything has landed."""
        return idle_seconds([span.result() for span in self._spans], start, stop)


def _finished(dispatched: float, outcome: Outcome) -> _Span:
    jax.block_until_ready(outcome.tokens)
    return _Span(dispatched, time.perf_counter())


def idle_seconds(spans: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Add up the time between `start` and `stop` that lies in no span; spans begin in order."""
    idle, end = 0.0, start
    for dispatched, finished in spans:
        idle, end = idle + max(dispatched - end, 0.0), max(end, finished)
    return idle + max(stop - end, 0.0)


def replay(engine: Engine, offered: Sequence[Offered]) -> dict:
    """Offer load to an engine that is idle, until all is finished; returns what a row says of it.

    Raises RuntimeError unless every request gets all its tokens.
    """
    coming, requests = deque(offered), list[Request]()
    before, asleep, watch = engine.stats, 0.0, _Watch(engine)
    told: list[list[tuple[float, int]]] = [[] for _ in offered]  # when how many tokens came

    def submit(each: Offered) -> None:
        mine = told[len(requests)]
        params = SamplingParams(max_tokens=each.new_tokens, seed=len(requests), stream=each.stream)

        def on_update(request: Request, update: Update) -> None:
            mine.append((time.perf_counter(), len(update.tokens)))

        requests.append(engine.submit(each.prompt, params, on_update=on_update))

    with watch.during():
        start = time.perf_counter()
        while coming or not engine.idle:
            now = time.perf_counter() - start
            while coming and coming[0].at <= now:
                submit(coming.popleft())
            if engine.idle:
                time.sleep(max(coming[0].at - now, 0.0))
                asleep += time.perf_counter() - start - now
            else:
                engine.step()
        stop = time.perf_counter()
    for request, each in zip(requests, offered, strict=True):
        if len(request.tokens) != each.new_tokens:
            raise RuntimeError(f"requests: expected {each.new_tokens} tokens of each, got {request}") from request.error
    after, seconds = engine.stats, stop - start
    first = [times[0][0] - start - each.at for times, each in zip(told, offered, strict=True)]
    row = throughput(offered, after.generated_tokens - before.generated_tokens, seconds)
    return row | {
        **percentiles("first_token", np.asarray(first)),
        **percentiles("between_tokens", np.concatenate([_between(times) for times in told])),
        "hit_rate": sum(request.cached_tokens for request in requests) / row["prompt_tokens"],
        "computed_tokens": watch.computed_tokens,
        "preempted": after.preempted - before.preempted,
        "steps": after.steps - before.steps,
        "rows_a_step": watch.decode_rows / watch.decode_steps,
        "sharing_factor": watch.context_tokens / watch.unique_tokens,
        "no_load_seconds": asleep,
        "host_share": (watch.idle_seconds(start, stop) - asleep) / seconds,
        "compiled": watch.compiled,
    }


def _between(times: list[tuple[float, int]]) -> Float[np.ndarray, " tokens"]:
    """Return the time of each token after the first ones: tokens that come together share what has passed."""
    at, tokens = np.asarray(times).T
    return np.repeat(np.diff(at) / tokens[1:], tokens[1:].astype(np.int64))
