"""Serve a Hugging Face checkpoint over HTTP, as OpenAI's API does.

    python -m codec_jax.serve --model DIR --port 8000

    POST /v1/completions        prompts of text or token ids
    POST /v1/chat/completions   messages, by the checkpoint's chat template
    GET  /v1/models             the name that the model is served by
    GET  /health                200 while requests are taken, 503 after an error of the engine
    GET  /metrics               counts and times, for Prometheus

Whatever prompts have in common with those that run, or came before, is computed once. After SIGINT or SIGTERM no more
connections are taken, those that are open are answered, and the exit status is 0; it is 1 for an error. A second SIGINT
cuts off what still runs.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hmac
import json
import os
import signal
import socket
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from codec_jax.command_line import add_engine_options, count_parser, number_parser, open_model
from codec_jax.forest import NO_SLOT
from codec_jax.nnx.async_engine import AsyncEngine, Following, StoppedError
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.memory import KV_DTYPES, pages_of_replicas, take_most_of_the_gpu
from codec_jax.nnx.replicas import Serving, device_groups, replicated
from codec_jax.nnx.request import Update
from codec_jax.serve_api import Answer, Refused, Served, read_call, refusal

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'codec-jax[serve]'") from error

PAGE_SIZE = 16
#: Bytes of a body; a prompt of a million tokens has fewer.
MAX_BODY = 2**24
#: A body must be there by then.
BODY_SECONDS = 60
#: After a signal, what runs must end by then: it never does where a client keeps its connection and does not read.
ENDING_SECONDS = 600
#: The share of `max_tokens` that there must be pages for. Chats that name no limit may take the whole context, and
#: hardly ever do.
ROOM = 0.1
KEY = "CODEC_JAX_API_KEY"


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model, and serve it until a signal comes."""
    arguments = _parse(argv)
    take_most_of_the_gpu()
    try:
        if arguments.api_key == "":
            raise ValueError(f"--api-key: expected a key, got an empty one; leave out the option and {KEY} for none")
        _check_free(arguments.host, arguments.port)
        engine, served = _open(arguments)
        _say("compiling")
        engine.warm_up()
    except (OSError, ValueError) as error:
        sys.exit(f"codec_jax.serve: {error}")
    except KeyboardInterrupt:
        os._exit(130)  # at once, for threads of XLA may still compile
    if arguments.api_key is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        _say(f"warning: whoever reaches {arguments.host} may use the model, for there is no --api-key")
    # uvicorn finishes what runs, and then raises the signal once more: by then it has been dealt with.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    app = make_app(engine, served, api_key=arguments.api_key)
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        ws="none",
        lifespan="on",
        access_log=False,
        timeout_graceful_shutdown=ENDING_SECONDS,
    )
    if app.state.failed:
        sys.exit("codec_jax.serve: a step of the engine failed, and no calls were taken after that")


def _check_free(host: str, port: int) -> None:
    """Say before anything is loaded that nobody can listen there; connections are taken once there is a model.

    Of the addresses of a name, those that this machine lacks do not count if there is another one.
    """
    problems: list[OSError] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in addresses:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as error:
                problems.append(error)
                if error.errno == errno.EADDRINUSE or len(problems) == len(addresses):
                    raise
    except OSError as error:
        raise ValueError(
            f"--host, --port: expected an address of this machine where nobody listens, got {host}, port {port}: "
            f"{error.strerror or error}; --port 0 takes a free one"
        ) from error


def _say(text: str) -> None:
    print(f"codec_jax.serve: {text}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="codec-jax serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    port = number_parser(int, "a port from 0 to 65535", 0, 65536)
    count = count_parser()
    parser.add_argument("--port", type=port, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--api-key", default=os.environ.get(KEY), help=f"that calls must bring (default: {KEY}'s)")
    parser.add_argument("--served-model-name", help="name in calls (default: that of the directory)")
    parser.add_argument(
        "--max-context", type=count, help="tokens of prompt and text (default: all that there is room for)"
    )
    parser.add_argument("--prefill-tokens", type=count, default=2048, help="of prompts in a step (default: 2048)")
    add_engine_options(parser)
    return parser.parse_args(argv)


def _open(arguments: argparse.Namespace) -> tuple[Serving, Served]:
    checkpoint = open_model(arguments.model)
    if (arguments.max_context or 1) > checkpoint.max_context:
        raise ValueError(
            f"--max-context: expected 1 to {checkpoint.max_context}, which the model was made for, "
            f"got {arguments.max_context}"
        )
    groups = device_groups(
        checkpoint.config,
        data=arguments.data_parallel,
        context=arguments.context_parallel,
        tensor=arguments.tensor_parallel,
    )
    of_cache = KV_DTYPES.get(arguments.kv_dtype, {})
    models = [checkpoint.load(arguments.dtype, mesh=mesh, progress=True, **of_cache) for mesh in groups]
    config = models[0].config
    sizes = {name: getattr(arguments, name) for name in ("max_requests", "prefill_tokens", "invariant")}
    num_pages = pages_of_replicas(config, groups, PAGE_SIZE, gib=arguments.kv_cache_gib, **sizes)
    most_pages = NO_SLOT // PAGE_SIZE
    if not 0 < num_pages <= most_pages:
        raise ValueError(
            f"--kv-cache-gib: expected room for 1 to {most_pages:,} pages of {PAGE_SIZE} tokens beside the weights, "
            f"got room for {num_pages:,}"
        )
    if (most := num_pages * PAGE_SIZE) < (arguments.max_context or 0):
        raise ValueError(
            f"--max-context: expected at most {most}, the tokens that there is room for, got {arguments.max_context}; "
            "give it more memory by --kv-cache-gib, or more GPUs"
        )
    engine = replicated(
        [
            Engine(
                model,
                **sizes,
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                max_context=arguments.max_context or min(checkpoint.max_context, most),
                room=1.0 if arguments.invariant else ROOM,
                tokenizer=checkpoint.tokenizer,
            )
            for model in models
        ]
    )
    name = arguments.served_model_name or arguments.model.resolve().name
    each = f"{len(groups)} replicas with {num_pages:,}" if len(groups) > 1 else f"{num_pages:,}"
    _say(f"{name}: {each} pages of {PAGE_SIZE} tokens, {engine.max_context:,} tokens of a request at most")
    return engine, Served(name, checkpoint, engine.max_context)


# ---------------------------------------------------------------------- the server


def make_app(engine: Serving, served: Served, *, api_key: str | None = None) -> Starlette:
    """Return the server as an ASGI application, whose lifespan serves the engine.

    Args:
      engine: or replicas; has the tokenizer of the model that is served.
      served: what calls are read and answered by.
      api_key: what calls of /v1 must bring, if anything.
    """
    server = _Server(engine, served, api_key)
    return Starlette(
        routes=[
            Route("/v1/completions", partial(server.complete, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(server.complete, chat=True), methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
        ],
        lifespan=server.lifespan,
        exception_handlers=dict.fromkeys((Refused, HTTPException, StoppedError, ClientDisconnect), _refuse),
    )


def _refuse(_: Request, error: Exception) -> Response:
    """Answer with OpenAI's error object."""
    refused = _refused(error)
    return JSONResponse(refused.body, refused.status)


def _refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    return Refused(getattr(error, "status_code", 503), getattr(error, "detail", str(error)))


class _Server:
    """The answers to all calls."""

    def __init__(self, engine: Serving, served: Served, api_key: str | None) -> None:
        self._engine, self._served = AsyncEngine(engine), served
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self._first, self._between = _Histogram(), _Histogram()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._engine:
            yield
        app.state.failed = self._engine.failed

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        model = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "codec_jax"}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": self._served.max_context}]})

    async def health(self, _: Request) -> Response:
        self._engine.check()
        return Response()

    async def metrics(self, _: Request) -> Response:
        stats = await self._engine.call(lambda engine: engine.stats)
        ended = {f'{{finish_reason="{reason}"}}': count for reason, count in self._finished.items()}
        lines = [
            *_lines("requests_total", "counter", "Requests that ended, by reason", ended),
            *(line for field, *of in _STATS for line in _lines(of[0], of[1], of[2], {"": getattr(stats, field)})),
            *self._first.lines("time_to_first_token_seconds", "From a call to the first token of an answer"),
            *self._between.lines("time_between_tokens_seconds", "From one token of an answer to the next"),
        ]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def complete(self, request: Request, *, chat: bool) -> ASGIApp:
        self._authorize(request)
        content = await _read(request)
        began = time.perf_counter()
        try:
            call = await asyncio.to_thread(read_call, content, chat, self._served)  # long texts take a while
            following = await self._engine.follow(call.submit)
        except ValueError as error:
            raise refusal(error, chat) from error
        answer, updates = Answer(call, self._served, following.requests), self._updates(following, began)

        async def reply(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                async with following:  # aborts what is not finished, should the client go away
                    if call.stream:
                        response: Response = StreamingResponse(_events(answer, updates), media_type="text/event-stream")
                    else:
                        response = JSONResponse(await _unless_gone(receive, _whole(answer, updates)))
                    await response(scope, receive, send)
            finally:
                self._finished.update(request.finish_reason or "abort" for request in following.requests)

        return reply

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._authorization is not None and not hmac.compare_digest(given, self._authorization):
            raise Refused(401, "authorization: expected the API key as bearer token, got another or none")

    async def _updates(self, following: Following, began: float) -> AsyncIterator[tuple[int, Update]]:
        """Pass updates on, and measure when they come. Raises Refused for an answer that cannot be completed."""
        times: dict[int, float] = {}
        async for number, update in following:
            if update.finish_reason in ("abort", "error"):
                raise Refused(500, f"the request ended early: {following.requests[number].error or 'aborted'}")
            if update.tokens:
                now, count = time.perf_counter(), len(update.tokens)
                if number in times:
                    self._between.add((now - times[number]) / count, count)
                else:
                    self._first.add(now - began)
                times[number] = now
            yield number, update


async def _read(request: Request) -> bytes:
    """Return the body of a call, if it is not too long and comes in time: the server does not end before."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > MAX_BODY:
                    raise Refused(413, f"body: expected at most {MAX_BODY} bytes, got more")
    except TimeoutError:
        raise Refused(408, f"body: expected all of it within {BODY_SECONDS} s, got {len(content)} bytes") from None
    return bytes(content)


async def _unless_gone(receive: Receive, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Wait for an answer, but no longer than the client does."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Task] = [asyncio.create_task(answer), asyncio.create_task(gone())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def _whole(answer: Answer, updates: AsyncIterator[tuple[int, Update]]) -> dict[str, Any]:
    async for _ in updates:
        pass
    return await asyncio.to_thread(answer.whole)  # texts of many tokens; others go on meanwhile


async def _events(answer: Answer, updates: AsyncIterator[tuple[int, Update]]) -> AsyncIterator[str]:
    """Yield server-sent events: chunks, or an error in the end."""
    try:
        async for number, update in updates:
            for chunk in answer.chunks(number, update):
                yield _event(chunk)
        for chunk in answer.last_chunks():
            yield _event(chunk)
    except (Refused, StoppedError) as error:
        yield _event(_refused(error).body)
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


# ---------------------------------------------------------------------- metrics


class _Histogram:
    """Counts times by buckets, in the way of Prometheus."""

    BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self.BOUNDS, seconds)] += count
        self._sum += seconds * count

    def lines(self, name: str, text: str) -> list[str]:
        bounds, totals = (*self.BOUNDS, "+Inf"), list(accumulate(self._counts))
        values = {f'_bucket{{le="{bound}"}}': total for bound, total in zip(bounds, totals, strict=True)}
        return _lines(name, "histogram", text, {**values, "_sum": self._sum, "_count": totals[-1]})


def _lines(name: str, kind: str, text: str, values: Mapping[str, float]) -> list[str]:
    """Write one metric; values are named by what follows its name."""
    lines = [f"codec_jax_{name}{suffix} {value}" for suffix, value in values.items()]
    return [f"# HELP codec_jax_{name} {text}", f"# TYPE codec_jax_{name} {kind}", *lines]


#: What `Stats` has, and the name, kind and meaning of the metric.
_STATS = (
    ("prompt_tokens", "prompt_tokens_total", "counter", "Tokens of prompts that entered, but for the last of each"),
    ("cached_tokens", "cached_tokens_total", "counter", "Of those, found in the cache"),
    ("generated_tokens", "generated_tokens_total", "counter", "Tokens that were generated"),
    ("preempted", "preemptions_total", "counter", "Times that a request gave way to others"),
    ("running", "running", "gauge", "Requests that are computed or decode"),
    ("waiting", "waiting", "gauge", "Requests that wait for room"),
    ("free_pages", "free_pages", "gauge", "KV pages that hold nothing"),
    ("cached_pages", "cached_pages", "gauge", "KV pages that no running request reads"),
    ("reconstructed_pages", "reconstructed_pages", "gauge", "Pages of latents with K and V beside them"),
    ("saturated", "saturated_total", "counter", "Numbers too large for their scale, of pages of one byte"),
)


if __name__ == "__main__":
    main()
