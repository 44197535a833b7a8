"""Replicas of a model, each an engine on devices of its own: a request goes where its prefix is.

                    ┌─► Engine 0 ─► devices 0 ... n-1
    submit ─► Router┼─► Engine 1 ─► devices n ... 2n-1
                    └─► ...

Every step of replicas is one of each engine, which dispatches before it waits: all devices have something to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from codec_jax import checks
from codec_jax.arrays import Integers
from codec_jax.mesh import CONTEXT, DATA, TENSOR
from codec_jax.nnx import calls
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.request import Request, Update
from codec_jax.nnx.routing import Prompt, Router
from codec_jax.nnx.shards import check_sizes
from codec_jax.nnx.stats import Stats

#: Axis of a device mesh -> what commands say of its option, by the rules of `argparse`.
PARALLEL_HELP = {
    DATA: "replicas of the model; a request goes where its prefix is (default: 1)",
    CONTEXT: "devices that share the KV pages of a replica (default: 1)",
    TENSOR: "devices that share the heads of a replica (default: 1)",
}


class Replicas:
    """Several engines in the place of one: each request is decoded by the one that has, or will have, its prefix.

    A document is computed by one of them, and by others when it has more to do than they by about what that costs. The
    same calls in the same order place requests alike, and no request's tokens depend on where it is.

    >>> from codec_jax.nnx import Replicas
    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> model, devices = Decoder(config, nnx.Rngs(0)), jax.devices()
    >>> meshes = [jax.make_mesh((1, 1), ("context", "tensor"), devices=[device]) for device in (devices * 2)[:2]]
    >>> replicas = Replicas([Engine(model, mesh=mesh, num_pages=32, prefill_tokens=128) for mesh in meshes])
    >>> replicas.warm_up()
    >>> document, params = list(range(40)), SamplingParams(max_tokens=5)
    >>> pinned = replicas.pin(document)
    >>> first, second = replicas.submit_samples([*document, 7], 2, params)
    >>> other = replicas.submit([7, 8, 9], params)
    >>> fork = replicas.fork(first)
    >>> replicas.abort(second)
    >>> updates = list(replicas.stream(other))
    >>> while not replicas.idle:
    ...     news = replicas.step()
    >>> fork.finish_reason, replicas.stats.submitted, replicas.stats.computed_tokens < 60
    ('length', 5, True)
    >>> [len(request.tokens) for request in replicas.generate([[*document, 4], [5]], params)]
    [5, 5]
    >>> [logprobs] = replicas.score([document], [[1, 2]])
    >>> replicas.unpin(pinned)
    >>> replicas.update_weights(Decoder(config, nnx.Rngs(1)))
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Take engines; requests that they have go on.

        Args:
          engines: of one model, each on devices of its own.

        Raises ValueError for none, one that comes twice, or models of several configs.
        """
        for engine in engines:
            checks.instance("engines", engine, Engine)
        if not engines or len(set(engines)) < len(engines) or any(x.config != engines[0].config for x in engines):
            raise ValueError(
                f"engines: expected engines of one config, each once, got {len(engines)}, {len(set(engines))} of them "
                f"different, of {len({x.config for x in engines})} configs"
            )
        self.config, self.tokenizer = engines[0].config, engines[0].tokenizer
        self.max_context = min(engine.max_context for engine in engines)
        self._engines = list(engines)
        self._ids = count(max(next(engine._ids) for engine in engines))
        for engine in engines:  # forks and pins get their numbers from engines
            engine._ids = self._ids
        self._router = Router(len(engines))
        self._homes: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._news: list[Request] = []  # that no step has told of yet
        for replica in range(len(engines)):
            self._count_anew(replica)

    submit, submit_samples, stream = calls.submit, calls.submit_samples, calls.stream
    generate, score = calls.generate, calls.score

    def fork(
        self,
        request: Request,
        params: SamplingParams | None = None,
        *,
        on_update: Callable[[Request, Update], None] | None = None,
    ) -> Request:
        """Take a request that goes on from where another one is now, in the same replica.

        Args:
          request, params, on_update: as in `Engine.fork`, which says what it raises.
        """
        checks.instance("request", request, Request)
        home = self._homes.get(request)
        return self._place(request.context, lambda engine: engine.fork(request, params, on_update=on_update), home)

    def abort(self, request: Request) -> None:
        """End a request with what it has; nothing happens to one that is finished.

        Args:
          request: one of these engines'.

        Raises ValueError for one of another engine that is not finished.
        """
        self._check_own(request)
        self._engines[self._homes.get(request, 0)].abort(request)
        self._settle(request)

    def pin(self, prompt: str | Integers) -> Request:
        """Compute a prefix, and keep it in one replica until `unpin`; requests with this prefix are drawn there.

        Args:
          prompt: as in `submit`.

        Returns a request that is finished when the prefix is there. Raises what `Engine.pin` raises.
        """
        return self._place(calls.tokens_of(self, "prompt", prompt), lambda engine: engine.pin(prompt))

    def unpin(self, request: Request) -> None:
        """Let a replica forget a prefix that was pinned.

        Args:
          request: what `pin` returned.

        Raises ValueError for one that is not pinned.
        """
        checks.instance("request", request, Request)
        self._engines[self._homes.get(request, 0)].unpin(request)
        self._settle(request)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, and nothing that no step has told of."""
        return all(engine.idle for engine in self._engines) and not self._news

    @property
    def stats(self) -> Stats:
        """What was done so far, and what there is now, in all replicas together."""
        return Stats(*map(sum, zip(*(astuple(engine.stats) for engine in self._engines), strict=True)))

    def step(self) -> list[Request]:
        """Make a step of each engine: return the requests of which something is new.

        An error or an interruption in one of them is one of its `Engine.step`, and leaves the others as they are.

        Raises RuntimeError in a callback of any of them.
        """
        self._refuse_in_callbacks()
        for replica, engine in enumerate(self._engines):
            try:
                news = engine.step()
            except BaseException:
                self._count_anew(replica)
                raise
            self._news += news
            for request in news:
                self._settle(request)
        told, self._news = list(dict.fromkeys(self._news)), []
        return told

    def update_weights(self, model: Decoder) -> None:
        """Take the weights that a model has now, in every replica; see `Engine.update_weights`.

        Args:
          model: a decoder of the same config.

        Raises ValueError for another config, or weights of other shapes or dtypes, RuntimeError in a callback. An
        interruption of one replica is raised when the others have the weights, too.
        """
        checks.instance("model", model, Decoder)  # one that is placed is that of one replica
        self._refuse_in_callbacks()
        errors: list[BaseException] = []
        for replica, engine in enumerate(self._engines):
            try:
                engine.update_weights(model)
            except BaseException as error:
                errors.append(error)
            self._count_anew(replica)
        if errors:
            raise errors[0]

    def warm_up(self) -> None:
        """Compile what steps run, so that the first requests do not wait for it.

        Raises RuntimeError in a callback.
        """
        self._refuse_in_callbacks()
        for engine in self._engines:
            engine.warm_up()

    def _refuse_in_callbacks(self) -> None:
        """Raise RuntimeError while any of them takes in a step, before others have done anything."""
        for engine in self._engines:
            engine._refuse_in_callbacks()

    # ------------------------------------------------------------------ who has what

    def _check_own(self, request: Request) -> None:
        home = self._homes.get(request, 0) if isinstance(request, Request) else 0
        self._engines[home]._check_own(request)

    def _submit(self, request: Request) -> Request:
        return self._place(request.context, lambda engine: engine._submit(request))

    def _place(
        self, context: Int[np.ndarray, " tokens"], submit: Callable[[Engine], Request], home: int | None = None
    ) -> Request:
        """Submit a request to its home, or to the best replica that takes it: in others more may be pinned."""
        prompt, refusals = Prompt.of(context, self._engines[0]._page_size), list[ValueError]()
        cached = [_cached(engine, context) for engine in self._engines]
        for replica in self._router.ranked(prompt, cached) if home is None else [home]:
            try:
                request = submit(self._engines[replica])
            except ValueError as refusal:
                refusals.append(refusal)
                continue
            self._homes[request] = replica
            self._router.take(request, replica, prompt, cached[replica], request.tokens_left)
            return request
        raise refusals[0]

    def _settle(self, request: Request) -> None:
        self._router.settle(request, request.tokens_left, request.finished)

    def _count_anew(self, replica: int) -> None:
        """Take what an engine has to do as new to it: it may have forgotten what was computed."""
        engine = self._engines[replica]
        self._router.forget(replica)
        self._homes.update(dict.fromkeys(engine._pins, replica))
        for request in _unfinished(engine):
            self._homes[request], context = replica, request.context
            prompt = Prompt.of(context, engine._page_size)
            self._router.take(request, replica, prompt, _cached(engine, context), request.tokens_left)


Serving: TypeAlias = Engine | Replicas


def check_serving(engine: Any) -> None:
    """Raise TypeError for what is no engine and no replicas."""
    if not isinstance(engine, Serving):
        raise TypeError(f"engine: expected an Engine or Replicas, got {type(engine).__name__}")


def device_groups(config: DecoderConfig, *, data: int, context: int, tensor: int) -> list[Mesh | None]:
    """Return a mesh for each replica, on the first devices that there are; None for a single one on a single device.

    Args:
      config: sizes of the model.
      data: replicas.
      context: devices of a replica that share the KV pages.
      tensor: devices of a replica that share the heads, beside each of these.

    Raises ValueError for more devices than there are, or devices that do not divide the model.
    """
    sizes = {DATA: data, CONTEXT: context, TENSOR: tensor}
    for axis, number in sizes.items():
        checks.integer(f"--{axis}-parallel", number)
    devices, needed = jax.devices(), data * context * tensor
    if needed > len(devices):
        several = {f"--{axis}-parallel": size for axis, size in sizes.items() if size > 1}
        got = " x ".join(map(str, several.values())) + (f" = {needed}" if len(several) > 1 else "")
        raise ValueError(f"{', '.join(several)}: expected at most the {len(devices)} devices that there are, got {got}")
    if needed == 1:
        return [None]
    groups = np.asarray(devices[:needed]).reshape(data, context, tensor)
    meshes = [Mesh(group, (CONTEXT, TENSOR)) for group in groups]
    check_sizes(config, Parallel.of(meshes[0]))
    return list(meshes)


def replicated(engines: Sequence[Engine]) -> Serving:
    """Return a single engine as it is, several as replicas."""
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _unfinished(engine: Engine) -> list[Request]:
    waiting = (request for request in engine._scheduler.queue if not request.finished)
    return [*engine._scheduler.inside, *waiting]


def _cached(engine: Engine, context: Int[np.ndarray, " tokens"]) -> int:
    """Return the tokens of a context that an engine's nodes have, computed or not."""
    return engine._scheduler.cache.match(context[:-1]).length
