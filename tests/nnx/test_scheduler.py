"""The engine's policy, without a model: everybody finishes, in order, and no page is lost, whatever happens."""

from collections import deque

import numpy as np
import pytest

from codec_jax.forest import PrefixCache
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.request import Request
from codec_jax.nnx.scheduler import Running, Scheduler, Step

PAGE_SIZE, CHUNK = 8, 16


class Simulation:
    """A device that draws the sum of a context, one step behind the scheduler."""

    def __init__(
        self, num_pages: int, rows: int, *, room: float = 1.0, steps: int = 3, chunks: int = 4, invariant: bool = False
    ) -> None:
        cache = PrefixCache.create(num_pages, PAGE_SIZE, rows, invariant=invariant)
        self.scheduler = Scheduler(cache, steps=steps, chunks=chunks, chunk_tokens=CHUNK, room=room)
        self.flight: Step | None = None
        self.entered: list[Request] = []
        self.count = 0

    def submit(self, prompt: list[int], max_tokens: int, *, scored: bool = False) -> Request:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored)
        request = Request(self.count, np.asarray(prompt, np.int64), params)
        self.count += 1
        self.scheduler.queue.append(request)
        return request

    def step(self) -> Step | None:
        inside = {running.request for running in self.scheduler.running}
        step = self.scheduler.schedule()
        self.entered += [x.request for x in self.scheduler.running if x.request not in inside]
        if step is not None:
            self.check(step)
        self.land()
        self.flight = step
        return step

    def check(self, step: Step) -> None:
        """Chunks build on what is there, in whole pages; whoever draws has its context and pages for the tokens.

        No chunk ends inside of what another one stores: there would be two nodes, and tokens are stored in the last.
        """
        cache = self.scheduler.cache
        assert len(step.pieces) <= 8
        assert not (cache.invariant and step.pieces and step.drawing)
        for piece in step.pieces:
            assert min(piece.store, piece.score) < piece.end <= min(piece.store, piece.score) + CHUNK
            for other in step.pieces:
                if piece.store < other.end < piece.end:
                    rows = piece.running.row, other.running.row
                    assert len({cache.node_at(row, piece.store) for row in rows}) == 2
        for running, count in step.drawing.items():
            assert cache.computed_tokens(running.row) >= running.wanted
            assert not running.scores_missing
            assert 1 <= count <= (1 if step.pieces else 3)
            room = cache.tree.page_count[cache.tree.leaf[running.row]] * PAGE_SIZE
            assert cache.tree.length[cache.tree.leaf[running.row]] + running.flying <= room

    def land(self) -> None:
        step, self.flight = self.flight, None
        if step is None:
            return
        drawn: dict[Running, list[int]] = {}
        for running, count in step.drawing.items():
            context = running.request.context.tolist()
            if not running.request.finished:
                drawn[running] = []
                for _ in range(count):
                    drawn[running].append(sum(context) % 7)
                    context.append(drawn[running][-1])
        self.scheduler.grow(drawn)
        for running, tokens in drawn.items():
            running.request.tokens += tokens
            if len(running.request.tokens) == running.request.params.max_tokens:
                running.request.finish_reason = "length"
        for running in step.finishing:
            running.request.finish_reason = running.request.finish_reason or "length"
        self.scheduler.land(step)

    def run(self) -> None:
        for _ in range(100_000):
            if self.step() is None and not self.scheduler.queue and not self.scheduler.running:
                return
        raise AssertionError("somebody waits for ever")


def expected(prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(sum(context) % 7)
    return context[len(prompt) :]


@pytest.mark.parametrize(
    ("num_pages", "room", "invariant"),
    [(400, 1.0, False), (24, 1.0, False), (24, 0.0, False), (24, 0.3, False), (24, 1.0, True)],
)
def test_5000_operations_lose_nothing(num_pages: int, room: float, invariant: bool) -> None:
    rng = np.random.default_rng(num_pages)
    simulation = Simulation(num_pages, 5, room=room, invariant=invariant)
    waiting: deque[Request] = deque()
    for _ in range(5000 // 4):
        event = rng.random()
        if event < 0.3:
            prompt = [*rng.integers(0, 2, rng.integers(1, 3)).repeat(rng.integers(1, 40)), *rng.integers(0, 3, 4)]
            waiting.append(simulation.submit(prompt, int(rng.integers(0, 40)), scored=rng.random() < 0.2))
        elif event < 0.33 and waiting:
            aborted = waiting[rng.integers(len(waiting))]
            aborted.finish_reason = aborted.finish_reason or "abort"
        elif event < 0.34:
            simulation.land()
            simulation.scheduler.restart()
        else:
            simulation.step()
        while waiting and waiting[0].finished:
            request = waiting.popleft()
            assert request.tokens == expected(request.prompt.tolist(), len(request.tokens))
            assert request.finish_reason == "abort" or len(request.tokens) == request.params.max_tokens
    simulation.run()
    assert all(request.finished for request in waiting)
    assert (simulation.scheduler.preempted > 0) == (room < 1.0)
    cache = simulation.scheduler.cache
    assert cache.pool.num_free + len(np.unique(cache.tree.page_ids)) == num_pages
    assert cache.drop().pool.num_free == num_pages


def test_first_come_first_served() -> None:
    simulation = Simulation(24, 3)
    requests = [simulation.submit([i] * (5 + 13 * (i % 5)), 20) for i in range(30)]
    simulation.run()
    assert simulation.entered == requests


def test_a_row_is_given_on_while_its_last_step_is_in_flight() -> None:
    simulation = Simulation(200, 1)
    leaving, entering = simulation.submit([1] * 4, 6), simulation.submit([2] * 4, 6)
    for _ in range(3):
        simulation.step()
    step = simulation.scheduler.schedule()
    assert step is not None
    assert [piece.running.request for piece in step.pieces] == [entering]
    assert (len(leaving.tokens), simulation.scheduler.inside) == (3, [leaving, entering])
    simulation.land()
    assert (leaving.finished, simulation.scheduler.leaving) == (True, [])
    simulation.flight = step
    simulation.run()
    assert leaving.tokens == expected([1] * 4, 6)
    assert entering.tokens == expected([2] * 4, 6)


def test_who_has_given_its_row_on_comes_first_after_a_restart() -> None:
    simulation = Simulation(200, 1)
    requests = [simulation.submit([i] * 4, 6) for i in range(3)]
    scheduler = simulation.scheduler
    for _ in range(3):
        simulation.step()
    scheduler.schedule()  # the second one enters while the last step of the first is in flight
    assert ([x.request for x in scheduler.leaving], scheduler.inside) == (requests[:1], requests[:2])
    scheduler.restart()
    simulation.flight = None
    simulation.run()
    assert simulation.entered[-3:] == requests
    assert all(request.tokens == expected(request.prompt.tolist(), 6) for request in requests)


def test_samples_take_no_more_than_there_is() -> None:
    """One token of the prompt is in a page of its own, where one of them may go on and the other may not."""
    simulation = Simulation(4, 3)
    simulation.submit([1] * 7, 0)
    simulation.run()  # leaves a node of 7 tokens
    requests = [simulation.submit([1] * 9, 8) for _ in range(2)]
    simulation.step()
    assert simulation.scheduler.inside == requests[:1]
    simulation.run()
    assert simulation.scheduler.preempted == 0
    assert all(request.tokens == expected([1] * 9, 8) for request in requests)


@pytest.mark.parametrize("during", ["computed_tokens", "retire"])
def test_an_interruption_loses_nobody(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while one enters, nor while one gives its row on: each is in the queue or inside."""
    simulation = Simulation(200, 1)
    requests = [simulation.submit([i] * 4, 6) for i in range(3)]
    scheduler, calls = simulation.scheduler, iter(range(100))
    method = getattr(PrefixCache, during)

    def interrupted(cache: PrefixCache, argument: object) -> object:
        done = method(cache, argument)
        if next(calls) == 0 and (during != "retire" or scheduler.leaving):
            raise KeyboardInterrupt
        return done

    for _ in range(3):
        simulation.step()
    monkeypatch.setattr(PrefixCache, during, interrupted)
    with pytest.raises(KeyboardInterrupt):
        scheduler.schedule()
    assert list(dict.fromkeys([*scheduler.inside, *scheduler.queue])) == requests
    simulation.flight = None
    scheduler.restart()
    simulation.run()
    assert all(request.tokens == expected(request.prompt.tolist(), 6) for request in requests)


def test_a_step_computes_as_many_prompts_as_its_chunks_hold() -> None:
    """However many samples each of them has: eight of a prompt that takes four chunks of a step's eight."""
    simulation = Simulation(400, 32, chunks=8)
    for prompt in range(4):
        for _ in range(8):
            simulation.submit([prompt] * (4 * CHUNK + 1), 4)
    assert [len(step.pieces) for step in (simulation.step(), simulation.step()) if step] == [8, 8]
    simulation.run()


def test_a_request_enters_when_there_is_room_to_finish() -> None:
    """Three pages of prompt and five of text: of 20 pages, two such requests take 16, and a third has to wait."""
    simulation = Simulation(20, 8)
    requests = [simulation.submit([i] * 25, 40) for i in range(3)]
    simulation.step()
    assert [running.request for running in simulation.scheduler.running] == requests[:2]
    simulation.run()
    assert all(request.tokens == expected(request.prompt.tolist(), 40) for request in requests)


def test_a_long_prompt_is_computed_beside_those_that_decode() -> None:
    simulation = Simulation(200, 2, chunks=2)
    short = simulation.submit([1, 2, 3], 100)
    simulation.step()
    simulation.submit([0] * 1000, 1)
    while not short.finished:
        before = len(short.tokens)
        step = simulation.step()
        assert step is None or len(step.pieces) <= 2
        assert short.finished or len(short.tokens) > before or before == 0
    simulation.run()


def test_samples_of_a_prompt_are_computed_once() -> None:
    simulation = Simulation(200, 8, chunks=8)
    for _ in range(8):
        simulation.submit([3] * 100, 10)
    simulation.run()
    scheduler = simulation.scheduler
    assert (scheduler.prompt_tokens, scheduler.cached_tokens) == (8 * 99, 0)
    assert scheduler.cache.match([3] * 99).length == 99
    assert len(scheduler.cache.tree.page_ids) <= 13 + 8 * 2
