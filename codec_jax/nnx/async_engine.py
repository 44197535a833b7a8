"""The engine under asyncio: a thread of its own steps it, and updates come to the event loop.

    tasks                                 thread
    call, submit, follow ── functions ──► between two steps, in their order
    async for            ◄── updates ──── after each step

The thread sleeps while there is nothing to do. A task that is slow to take its updates holds up nobody.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.replicas import Serving, check_serving
from codec_jax.nnx.request import Request, Update

Result = TypeVar("Result")
EngineT = TypeVar("EngineT", bound=Serving)


class StoppedError(RuntimeError):
    """The engine takes no calls: a step of it failed, or it is not served, or not any more."""


class Following:
    """Requests of `AsyncEngine.submit`, whose updates come with their number: (0, Update), (1, Update), ...

    `async for` ends when all of them are finished. Leaving `async with` aborts those that are not.
    """

    def __init__(self, engine: AsyncEngine[Any]) -> None:
        """Begin without requests, which `AsyncEngine.follow` adds.

        Args:
          engine: the one that takes them.
        """
        self.requests: tuple[Request, ...] = ()
        self._engine = engine
        self._news: asyncio.Queue[tuple[int, Update] | StoppedError] = asyncio.Queue()
        self._finished = 0
        self._is_waiting = False

    def abort(self) -> None:
        """End those that are not finished with what they have; this comes as their last update."""
        self._engine._post(lambda engine: _abort(engine, self.requests))

    async def __aenter__(self) -> Self:
        """Return this."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort what is not finished."""
        if self._finished < len(self.requests):
            self.abort()

    def __aiter__(self) -> Self:
        """Return this."""
        return self

    async def __anext__(self) -> tuple[int, Update]:
        """Wait for what is new. Raises StoppedError if a step of the engine failed, RuntimeError for a second task."""
        if self._is_waiting:
            raise RuntimeError("following: expected one task that takes updates, got another while it waits")
        if self._finished == len(self.requests):
            raise StopAsyncIteration
        self._is_waiting = True
        try:
            news = await self._news.get()
        finally:
            self._is_waiting = False
        if isinstance(news, StoppedError):
            self._finished = len(self.requests)
            raise news
        self._finished += news[1].finish_reason is not None
        return news


@dataclass
class _Told:
    """How much of a request was told."""

    following: Following
    number: int
    tokens: int = 0
    characters: int = 0


class AsyncEngine(Generic[EngineT]):
    """Serves an engine, or replicas, to the tasks of an event loop. While it does, nobody else may touch the engine.

    >>> import asyncio
    >>> from codec_jax.nnx import AsyncEngine
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> engine = Engine(Decoder(config, nnx.Rngs(0)), max_requests=8, num_pages=64)
    >>> async def main():
    ...     async with AsyncEngine(engine) as serving:
    ...         async for update in serving.stream([1, 2, 3], SamplingParams(max_tokens=5)):
    ...             print(len(update.tokens), update.finish_reason)
    ...         async with await serving.submit([1, 2, 4], SamplingParams(max_tokens=2), samples=3) as samples:
    ...             async for number, update in samples:
    ...                 pass
    ...         both = await serving.follow(lambda engine: [engine.fork(samples.requests[0], SamplingParams())])
    ...         return await serving.call(lambda engine: engine.stats.submitted)
    >>> asyncio.run(main())
    5 length
    5
    """

    def __init__(self, engine: EngineT) -> None:
        """Take an engine; the thread begins and ends with `async with`.

        Leaving it takes no new requests and finishes those that there are. An error or a cancellation aborts them.

        Args:
          engine: the engine, or replicas. Requests that it has go on.
        """
        check_serving(engine)
        self._engine = engine
        self._told: dict[Request, _Told] = {}
        self._calls: list[Callable[[EngineT], object]] = []
        self._wake = threading.Condition()
        self._open = self._aborted = False
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        """Start the thread."""
        if self._open:
            raise RuntimeError("engine: expected one that is not served yet, got one inside of `async with`")
        self._open, self._aborted = True, False
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="codec_jax engine")
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish or abort what runs, and end the thread."""
        self._close(abort=kind is not None)
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self._close(abort=True)
            raise
        finally:
            self._thread.join()

    # ------------------------------------------------------------------ for tasks

    def check(self) -> None:
        """Raise StoppedError unless calls are taken."""
        if self._error is not None:
            raise self._failure()
        if not self._open:
            raise StoppedError("engine: expected calls inside of `async with AsyncEngine(...)`, got one outside")

    @property
    def failed(self) -> bool:
        """Whether a step failed, so that no calls are taken any more."""
        return self._error is not None

    async def call(self, function: Callable[[EngineT], Result]) -> Result:
        """Run a function between two steps, such as `lambda engine: engine.pin(prompt)`, and return what it returns.

        Args:
          function: takes the engine, and runs in its thread: what it waits for, all requests wait for.

        Raises what the function raises (RuntimeError for StopIteration), StoppedError if a step failed or the engine is
        not served any more.
        """
        future: Future[Result] = Future()

        def run(engine: EngineT) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._error is not None:
                    raise self._failure()
                future.set_result(function(engine))
            except StopIteration as error:  # which no coroutine can raise
                raised = RuntimeError("function: expected no StopIteration, got one")
                raised.__cause__ = error
                future.set_exception(raised)
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            self.check()
            self._post(run)
        return await asyncio.wrap_future(future)

    async def follow(self, function: Callable[[EngineT], Sequence[Request]]) -> Following:
        """Run a function that submits requests in one way or another, and follow these.

        Args:
          function: as in `call`; returns requests that are not followed yet.

        Raises what `call` raises; TypeError for what are no requests, ValueError for those that are followed, come
        twice, or are another engine's. Others among them are aborted then.
        """
        following = Following(self)

        def submit(engine: EngineT) -> None:
            given = function(engine)
            requests = tuple(given) if isinstance(given, Iterable) else (given,)
            new = {
                each: _Told(following, number)
                for number, each in enumerate(requests)
                if isinstance(each, Request) and each not in self._told
            }
            try:
                if not isinstance(given, Iterable) or len(new) < len(requests):
                    self._refuse(given, requests)
                for each in new:
                    engine._check_own(each)
            except (TypeError, ValueError):
                _abort(engine, new)
                raise
            following.requests = requests
            self._told |= new

        try:
            await self.call(submit)
        except asyncio.CancelledError:
            following.abort()
            raise
        return following

    async def submit(
        self, prompt: str | Integers, params: SamplingParams | None = None, *, samples: int = 1
    ) -> Following:
        """Take requests for a prompt, as `Engine.submit_samples` does.

        Args:
          prompt, params, samples: as there.

        Raises what that raises, and `call`.
        """
        return await self.follow(lambda engine: engine.submit_samples(prompt, samples, params))

    async def stream(self, prompt: str | Integers, params: SamplingParams | None = None) -> AsyncIterator[Update]:
        """Take a request, and yield what is new of it. It is aborted if nobody asks for the rest.

        Args:
          prompt, params: as in `Engine.submit`.

        Raises what `submit` raises.
        """
        async with await self.submit(prompt, params) as following:
            async for _, update in following:
                yield update

    # ------------------------------------------------------------------ between both

    def _refuse(self, given: object, requests: Sequence[Request]) -> NoReturn:
        """Say what is wrong with what a function returned to be followed."""
        if not isinstance(given, Iterable):
            raise TypeError(f"function: expected one that returns a list of requests, got {given!r:.100}")
        for request in requests:
            checks.instance("function: each of what it returns", request, Request)
        again = next(each for number, each in enumerate(requests) if each in self._told or each in requests[:number])
        raise ValueError(f"function: expected requests that nobody follows yet, got {again} again")

    def _post(self, function: Callable[[EngineT], object]) -> None:
        with self._wake:
            self._calls.append(function)
            self._wake.notify()

    def _close(self, *, abort: bool) -> None:
        with self._wake:
            self._open, self._aborted = False, abort
            self._post(lambda engine: _abort(engine, self._told if abort else ()))

    def _failure(self) -> StoppedError:
        error = StoppedError(f"engine: expected steps without errors, got {self._error!r}; serve the engine anew")
        error.__cause__ = self._error
        return error

    # ------------------------------------------------------------------ in the thread

    def _work(self) -> None:
        """Step while there is something to do, until the end."""
        engine = self._engine
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._calls or not self._open or not engine.idle)
                    calls, self._calls = self._calls, []
                    if not calls and not self._open and (engine.idle or self._aborted):
                        return
                for call in calls:
                    call(engine)
                if not engine.idle:
                    engine.step()
                self._tell()
        except BaseException as error:
            with self._wake:
                self._error = error
                calls, self._calls = self._calls, []
            for call in calls:
                call(engine)
            followed = {told.following for told in self._told.values()}
            with suppress(Exception):  # of an engine that cannot do that either
                _abort(engine, self._told)
            self._told = {}
            self._deliver([(following, self._failure()) for following in followed])
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)

    def _tell(self) -> None:
        """Deliver what is new of requests that somebody follows: calls and callbacks may have finished any of them."""
        news: list[tuple[Following, tuple[int, Update] | StoppedError]] = []
        for request, told in list(self._told.items()):
            if len(request.tokens) == told.tokens and not request.finished:
                continue
            update = Update(request.tokens[told.tokens :], request.text[told.characters :], request.finish_reason)
            told.tokens, told.characters = len(request.tokens), len(request.text)
            news.append((told.following, (told.number, update)))
            if request.finished:
                del self._told[request]
        self._deliver(news)

    def _deliver(self, news: list[tuple[Following, tuple[int, Update] | StoppedError]]) -> None:
        def put() -> None:
            for following, one in news:
                following._news.put_nowait(one)

        if news:
            self._loop.call_soon_threadsafe(put)


def _abort(engine: Serving, requests: Iterable[Request]) -> None:
    for request in requests:
        with suppress(ValueError):  # of one that is another engine's
            engine.abort(request)
