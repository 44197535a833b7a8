"""Two engines in the place of one: the same tokens, documents computed once, and nothing left behind."""

import asyncio
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from cases import DOCUMENT, LONG, PROMPTS, QUESTIONS, Dense, Setup, small_tiles
from engines import assert_alone, assert_no_page_leaked, greedy, leave_pages, make_engine
from flax import nnx
from jax.sharding import Mesh

from codec_jax.mesh import CONTEXT, TENSOR
from codec_jax.nnx import (
    AsyncEngine,
    DecoderConfig,
    Engine,
    PlacedDecoder,
    Replicas,
    Request,
    SamplingParams,
    beam_search,
    best_of,
)
from codec_jax.nnx.replicas import device_groups, replicated

DRAWN = SamplingParams(max_tokens=12, temperature=1.3, top_k=20, seed=3, repetition_penalty=1.2)
#: Documents of whole pages, in the order of their questions.
DOCUMENTS = [LONG[:64], LONG[64:128], LONG[40:104]]
ASKED = [[*document, *question] for document in DOCUMENTS for question in QUESTIONS]


MESHES = [Mesh([[device]], (CONTEXT, TENSOR)) for device in jax.devices()[:2]]


@pytest.fixture(scope="module")
def pair(setup: Setup) -> Replicas:
    """Each on a device of its own, where there are two."""
    return Replicas(
        [make_engine(setup.dense.model, mesh=MESHES[i % len(MESHES)], prefill_tokens=128) for i in range(2)]
    )


@pytest.fixture
def replicas(pair: Replicas, setup: Setup) -> Iterator[Replicas]:
    """With nothing in their caches."""
    pair.update_weights(setup.dense.model)
    yield pair
    for engine in pair._engines:
        assert_no_page_leaked(engine)
    pair.step()
    assert pair.idle
    assert pair._router.work == [0, 0]


@pytest.fixture(scope="module")
def alone(setup: Setup) -> Engine:
    return make_engine(setup.dense.model, mesh=MESHES[0], prefill_tokens=128)


def run(replicas: Replicas) -> list[Request]:
    told: list[Request] = []
    while not replicas.idle:
        told += replicas.step()
    return told


def home(replicas: Replicas, request: Request) -> int:
    """Where a request is: in the queue or the rows of one engine."""
    inside = [
        [*(running.request for running in engine._scheduler.running), *engine._scheduler.queue]
        for engine in replicas._engines
    ]
    [found] = [i for i, requests in enumerate(inside) if request in requests]
    return found


def test_tokens_are_those_of_one_engine(replicas: Replicas, alone: Engine, dense: Dense) -> None:
    for requests in (replicas.generate(PROMPTS * 3, greedy(10)), replicas.generate(ASKED, greedy(5), samples=2)):
        for request in requests:
            assert_alone(request, dense)
    ours, theirs = (serving.generate([*PROMPTS, LONG[:50]], DRAWN, samples=3) for serving in (replicas, alone))
    assert [request.tokens for request in ours] == [request.tokens for request in theirs]
    assert all(engine.stats.generated_tokens for engine in replicas._engines)
    assert len({request.id for request in ours}) == len(ours)
    scores = [serving.score([LONG[:30]] * 2, QUESTIONS[:2]) for serving in (replicas, alone)]
    for got, expected in zip(*scores, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-4)


def test_each_document_is_computed_once(replicas: Replicas) -> None:
    """The first questions come at once, the others when all documents are there."""
    before = replicas.stats
    first = [replicas.submit(prompt, greedy(2)) for prompt in ASKED]
    homes = [home(replicas, request) for request in first]
    assert homes == [homes[i // 3 * 3] for i in range(9)]
    assert set(homes) == {0, 1}
    assert run(replicas)
    for i, document in enumerate(DOCUMENTS):
        for question in QUESTIONS:
            request = replicas.submit([*document, 1, *question], greedy(2))
            assert home(replicas, request) == homes[3 * i]
        run(replicas)
        assert request.cached_tokens >= 64
    new = 2 * 3 * sum(map(len, QUESTIONS)) + 3 * 3
    stats = replicas.stats
    # Beside documents and questions, the first of two drawn tokens: the other one is never fed.
    assert stats.computed_tokens - before.computed_tokens <= 3 * 64 + new + 18 + 18
    assert stats.submitted - before.submitted == 18
    assert stats.finished == stats.submitted
    assert stats.generated_tokens - before.generated_tokens == 2 * 18
    assert (stats.running, stats.waiting) == (0, 0)


def test_forks_stay_where_their_source_is(replicas: Replicas, dense: Dense) -> None:
    busy = [replicas.submit(LONG[i : i + 40], greedy(30)) for i in range(4)]
    source = replicas.submit(PROMPTS[0], greedy(30))
    stream = replicas.stream(source)
    while len(source.tokens) < 8:
        next(stream)
    forks = [replicas.fork(source, greedy(30)) for _ in range(5)]
    assert {home(replicas, fork) for fork in forks} == {home(replicas, source)}
    replicas.abort(busy[0])
    run(replicas)
    again = replicas.fork(source, greedy(33))
    assert busy[0].finish_reason == "abort"
    run(replicas)
    for request in (source, *forks, *busy, again):
        assert_alone(request, dense)
    with pytest.raises(ValueError, match="params: expected max_tokens above the 30 tokens"):
        replicas.fork(source, greedy(30))


def test_what_was_pinned_before_there_were_replicas_is_unpinned_where_it_is(setup: Setup) -> None:
    engines = [make_engine(setup.dense.model) for _ in range(2)]
    pinned = engines[1].pin(DOCUMENT)
    while not engines[1].idle:
        engines[1].step()
    replicas = Replicas(engines)
    replicas.unpin(pinned)
    assert not engines[1]._scheduler.cache.pins.any()


def test_work_that_is_aborted_counts_no_more(replicas: Replicas) -> None:
    requests = replicas.submit_samples(PROMPTS[0], 8, greedy(40))
    assert {home(replicas, request) for request in requests} == {0, 1}
    replicas.step()
    for request in requests:
        replicas.abort(request)
    assert replicas._router.work == [0, 0]
    with pytest.raises(ValueError, match=r"^prompts\[1\]: expected at most max_context"):
        replicas.generate([LONG[:10], LONG], greedy(100))
    assert replicas._router.work == [0, 0]
    with pytest.raises(ValueError, match="prompt: expected token ids, for the engine has no tokenizer"):
        replicas.submit("text")


def test_requests_of_other_engines_are_refused(replicas: Replicas, alone: Engine) -> None:
    request = alone.submit(PROMPTS[0], greedy(2))
    for call in (replicas.abort, lambda request: list(replicas.stream(request))):
        with pytest.raises(ValueError, match=r"^request: expected one of this engine's, got Request"):
            call(request)
    alone.abort(request)


def test_a_single_option_or_all_that_ask_for_too_many_devices_are_named() -> None:
    config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=16, num_kv_heads=16, head_dim=16)
    with pytest.raises(ValueError, match=r"^--tensor-parallel: expected at most the 8 devices that there are, got 16$"):
        device_groups(config, data=1, context=1, tensor=16)
    several = "^--data-parallel, --context-parallel: expected at most the 8 devices that there are, got 3 x 4 = 12$"
    with pytest.raises(ValueError, match=several):
        device_groups(config, data=3, context=4, tensor=1)


def test_pins_draw_their_requests(replicas: Replicas, setup: Setup, dense: Dense) -> None:
    other = replicas.pin(LONG[:32])
    pin = replicas.pin(DOCUMENT)
    assert [home(replicas, request) for request in (other, pin)] == [0, 1]
    for _ in range(2):  # also where they are computed again
        requests = [replicas.submit([*DOCUMENT, i], greedy(3)) for i in range(3)]
        assert {home(replicas, request) for request in requests} == {1}
        run(replicas)
        for request in requests:
            assert_alone(request, dense)
        replicas.update_weights(setup.dense.model)
    replicas.unpin(pin)
    replicas.unpin(other)
    with pytest.raises(ValueError, match="request: expected one that pin returned"):
        replicas.unpin(pin)


def test_another_replica_takes_what_the_best_has_no_room_for(replicas: Replicas, dense: Dense) -> None:
    fillers = leave_pages(replicas._engines[0], 4)
    request = replicas.submit(LONG[:70], greedy(5))
    assert home(replicas, request) == 1
    run(replicas)
    assert_alone(request, dense)
    for filler in fillers:
        replicas._engines[0].unpin(filler)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_interruption_in_one_leaves_the_others_as_they_are(
    replicas: Replicas, dense: Dense, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [replicas.submit(prompt, greedy(20)) for prompt in ASKED[::2]]
    for _ in range(3):
        told = replicas.step()
    works, other = replicas._engines[broken]._device.dispatch, replicas._engines[1 - broken]

    def interrupted(*arguments: Any, **options: Any) -> None:
        works(*arguments, **options)
        monkeypatch.undo()
        small_tiles(monkeypatch)
        raise KeyboardInterrupt

    monkeypatch.setattr(replicas._engines[broken]._device, "dispatch", interrupted)
    computed = other.stats.computed_tokens
    with pytest.raises(KeyboardInterrupt):
        replicas.step()
    told += run(replicas)
    assert set(told) == set(requests)
    for request in requests:
        assert_alone(request, dense)
    assert other.stats.computed_tokens - computed <= 5  # nothing was computed again


@pytest.fixture(scope="module")
def other(setup: Setup) -> Dense:
    """The same decoder with other weights."""
    graph, weights = nnx.split(setup.dense.model)
    return Dense(nnx.merge(graph, jax.tree.map(lambda x: x * 1.1 if x.ndim > 1 else x, weights)))


def test_new_weights_are_used_in_every_replica(replicas: Replicas, setup: Setup, other: Dense) -> None:
    replicas.update_weights(other.model)
    for request in replicas.generate(ASKED, greedy(4)):
        assert_alone(request, other)
    replicas.update_weights(setup.dense.model)
    with pytest.raises(TypeError, match="model: expected a Decoder, got PlacedDecoder"):
        replicas.update_weights(PlacedDecoder.of(other.model, MESHES[0]))


def test_weights_are_new_in_every_replica_though_one_was_interrupted(replicas: Replicas, other: Dense) -> None:
    armed = []

    def interrupt(request: Request, update: Any) -> None:
        del request, update
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    request = replicas.submit(LONG[:30], greedy(), on_update=interrupt)
    while not request.tokens:
        replicas.step()
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        replicas.update_weights(other.model)
    run(replicas)
    for engine in replicas._engines:
        [asked] = engine.generate([LONG[:50]], greedy(12))
        assert_alone(asked, other)
    assert request.finish_reason == "length"


@pytest.mark.parametrize("name", ["step", "update_weights", "warm_up"])
def test_replicas_refuse_to_step_in_a_callback_of_any_of_them(
    name: str, replicas: Replicas, other: Dense, dense: Dense
) -> None:
    requests = [replicas.submit([*document, 7], greedy()) for document in DOCUMENTS]
    last = next(request for request in requests if home(replicas, request) == 1)
    given = [other.model] if name == "update_weights" else []
    last.on_update = lambda *_: getattr(replicas, name)(*given)
    run(replicas)
    assert isinstance(last.error, RuntimeError)
    for request in requests:
        if request is not last:
            assert request.finish_reason == "length"
            assert_alone(request, dense)
    for engine in replicas._engines:
        [asked] = engine.generate([LONG[:50]], greedy(12))
        assert_alone(asked, dense)


def test_searches_and_tasks_take_replicas(replicas: Replicas, alone: Engine, dense: Dense) -> None:
    found = [beam_search(serving, PROMPTS[0], beams=4, max_tokens=6) for serving in (replicas, alone)]
    assert found[0][0].tokens == found[1][0].tokens
    best = [best_of(serving, PROMPTS[1], 3, DRAWN)[0].tokens for serving in (replicas, alone)]
    assert best[0] == best[1]

    async def main() -> list[int]:
        async with AsyncEngine(replicas) as serving:
            streams = [serving.stream(prompt, greedy(7)) for prompt in PROMPTS]
            return [[token async for update in stream for token in update.tokens] for stream in streams]

    assert asyncio.run(main()) == [dense.greedy(prompt, 7) for prompt in PROMPTS]


def test_engines_that_do_not_go_together_are_refused(setup: Setup, alone: Engine) -> None:
    for engines in ([], [alone, alone]):
        with pytest.raises(ValueError, match="engines: expected engines of one config, each once"):
            Replicas(engines)
    with pytest.raises(TypeError, match="engines: expected a Engine, got Decoder"):
        Replicas([setup.dense.model])
    assert replicated([alone]) is alone


def test_groups_of_devices_are_those_that_there_are(setup: Setup) -> None:
    config, devices = setup.dense.model.config, jax.devices()
    assert device_groups(config, data=1, context=1, tensor=1) == [None]
    if len(devices) > 1:
        first, second = device_groups(config, data=2, context=1, tensor=1)
        assert [*first.devices.flat, *second.devices.flat] == devices[:2]
        assert dict(first.shape) == {CONTEXT: 1, TENSOR: 1}
    with pytest.raises(
        ValueError, match=rf"^--data-parallel: .* {len(devices)} devices that there are, got {len(devices) + 1}$"
    ):
        device_groups(config, data=len(devices) + 1, context=1, tensor=1)
    with pytest.raises(ValueError, match="--tensor-parallel: expected an integer of at least 1"):
        device_groups(config, data=1, context=1, tensor=0)
    with pytest.raises(ValueError, match="mesh: expected"):
        device_groups(config, data=1, context=1, tensor=5)
