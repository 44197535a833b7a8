"""The engine under asyncio: tasks get what they get alone; they come, leave and fail, and nothing is left behind."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cases import LONG, PROMPTS, QUESTIONS, Dense, Setup
from engines import assert_alone, assert_no_page_leaked, greedy, make_engine
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.nnx import Engine, Request, SamplingParams
from codec_jax.nnx.async_engine import AsyncEngine, Following, StoppedError


@pytest.fixture(scope="module")
def shared(setup: Setup) -> Engine:
    return make_engine(setup.dense.model)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert_no_page_leaked(shared)
    assert not [thread for thread in threading.enumerate() if thread.name == "codec_jax engine"]


@pytest.fixture
def fresh(setup: Setup) -> Engine:
    """An engine whose steps are replaced: it compiles nothing."""
    return Engine(setup.dense.model, max_requests=4, num_pages=64, page_size=8)


class Gate:
    """Lets an engine make only as many steps as it is allowed to."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed, step = threading.Semaphore(0), engine.step

        def gated() -> list[Request]:
            self._allowed.acquire(timeout=60)
            return step()

        monkeypatch.setattr(engine, "step", gated)

    def allow(self, steps: int = 10_000) -> None:
        self._allowed.release(steps)


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(engine, monkeypatch)


async def tokens_of(serving: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [token async for update in serving.stream(prompt, params) for token in update.tokens]


async def unfinished(serving: AsyncEngine) -> int:
    stats = await serving.call(lambda engine: engine.stats)
    return stats.running + stats.waiting


# --- Updates -----------------------------------------------------------------------------------------------------


def test_tasks_get_what_they_get_alone(engine: Engine, dense: Dense) -> None:
    prompts = [*PROMPTS, *QUESTIONS, *PROMPTS]

    async def main() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            return await asyncio.gather(*(tokens_of(serving, prompt, greedy(9)) for prompt in prompts))

    for _ in range(2):  # in two event loops, one after the other
        assert asyncio.run(main()) == [dense.greedy(prompt, 9) for prompt in prompts]


def test_samples_come_with_their_numbers(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, seed=3)
    expected = [request.tokens for request in engine.generate([PROMPTS[0]], params, samples=3)]

    async def main() -> list[list[int]]:
        found: list[list[int]] = [[], [], []]
        ended = []
        async with AsyncEngine(engine) as serving:
            async for number, update in await serving.submit(PROMPTS[0], params, samples=3):
                found[number] += update.tokens
                ended += [number] * (update.finish_reason == "length")
        assert sorted(ended) == [0, 1, 2]
        return found

    assert asyncio.run(main()) == expected


def test_a_fork_is_followed_from_its_first_token_on(engine: Engine, dense: Dense) -> None:
    async def main() -> list[int]:
        async with AsyncEngine(engine) as serving:
            following = await serving.submit(PROMPTS[1], greedy(5))
            assert len([update async for update in following]) > 1
            forks = await serving.follow(lambda engine: [engine.fork(following.requests[0], greedy(12))])
            return [token async for _, update in forks for token in update.tokens]

    assert asyncio.run(main()) == dense.greedy(PROMPTS[1], 12)


def test_what_is_followed_and_is_no_request_is_refused_and_nobody_else_suffers(engine: Engine, dense: Dense) -> None:
    async def main() -> list[int]:
        async with AsyncEngine(engine) as serving:
            other = await serving.submit(PROMPTS[0], greedy(20))
            with pytest.raises(TypeError, match=r"^function: each of what it returns: expected a Request, got int"):
                await serving.follow(lambda engine: [5])
            return [token async for _, update in other for token in update.tokens]

    assert asyncio.run(main()) == dense.greedy(PROMPTS[0], 20)


def test_a_request_of_another_engine_is_not_followed_and_nobody_else_suffers(
    engine: Engine, fresh: Engine, dense: Dense
) -> None:
    async def main() -> list[int]:
        async with AsyncEngine(engine) as serving:
            other = await serving.submit(PROMPTS[0], greedy(20))
            own: list[Request] = []

            def submit(engine: Engine) -> list[Request]:
                own.append(engine.submit(PROMPTS[1], greedy(20)))
                return [foreign, *own]

            with pytest.raises(ValueError, match=r"^request: expected one of this engine's, got Request"):
                await serving.follow(submit)
            assert own[0].finish_reason == "abort"
            return [token async for _, update in other for token in update.tokens]

    foreign = fresh.submit(PROMPTS[1], greedy(4))
    assert asyncio.run(main()) == dense.greedy(PROMPTS[0], 20)
    assert not foreign.finished


def test_a_request_has_one_follower_and_a_follower_one_task(engine: Engine, dense: Dense) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            first = await serving.submit(PROMPTS[0], greedy(60))
            [request] = first.requests
            with pytest.raises(ValueError, match=r"^function: expected requests that nobody follows yet, got Request"):
                await serving.follow(lambda _: [request])
            twice: list[Request] = []

            def submit(engine: Engine) -> list[Request]:
                twice.extend([engine.submit(PROMPTS[1], greedy(50))] * 2)
                return twice

            with pytest.raises(ValueError, match=r"^function: expected requests that nobody follows yet"):
                await serving.follow(submit)
            waiting = asyncio.ensure_future(anext(first))
            await asyncio.sleep(0)
            if not waiting.done():
                with pytest.raises(RuntimeError, match=r"^following: expected one task that takes updates"):
                    await anext(first)
            await waiting
            async for _ in first:
                pass
            assert_alone(request, dense)
            assert twice[0].finish_reason == "abort"

    asyncio.run(main())


@pytest.mark.parametrize("beside", ["text", None])
def test_what_was_submitted_beside_what_is_no_request_is_aborted(engine: Engine, beside: str | None) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            submitted: list[Request] = []

            def submit(engine: Engine) -> Any:
                submitted.append(engine.submit(PROMPTS[0], greedy(50)))
                return submitted[0] if beside is None else [submitted[0], beside]

            with pytest.raises(TypeError, match=r"^function: (each of what it returns: )?expected "):
                await serving.follow(submit)
            assert submitted[0].finish_reason == "abort"

    asyncio.run(main())


def test_who_follows_one_that_a_callback_aborts_is_told(fresh: Engine) -> None:
    waiting: list[Request] = []

    def submit(engine: Engine) -> list[Request]:
        first = [engine.submit(PROMPTS[0], greedy(2), on_update=lambda *_: engine.abort(waiting[0])) for _ in range(4)]
        waiting.append(engine.submit(PROMPTS[1], greedy(2)))  # there is room for four
        return [*first, *waiting]

    async def main() -> list[str | None]:
        async with AsyncEngine(fresh) as serving:
            updates = [each async for each in await asyncio.wait_for(serving.follow(submit), 60)]
            return [update.finish_reason for number, update in updates if number == 4]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == ["abort"]


def test_one_that_does_not_take_its_updates_holds_up_nobody(engine: Engine, dense: Dense) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            slow = await serving.submit(QUESTIONS[0], greedy(12))
            for prompt in PROMPTS:
                assert await tokens_of(serving, prompt, greedy(20)) == dense.greedy(prompt, 20)
            assert slow.requests[0].finished
            late = [token async for _, update in slow for token in update.tokens]
            assert late == dense.greedy(QUESTIONS[0], 12)

    asyncio.run(main())


def test_the_thread_sleeps_while_there_is_nothing_to_do(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: steps.append(1) or step())

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            await tokens_of(serving, QUESTIONS[0], greedy(4))
            while not await serving.call(lambda engine: engine.idle):
                pass
            done = len(steps)
            await asyncio.sleep(0.2)
            assert len(steps) == done
            await tokens_of(serving, QUESTIONS[1], greedy(4))
            assert len(steps) > done

    asyncio.run(main())


# --- Calls -------------------------------------------------------------------------------------------------------


def test_calls_run_between_steps(engine: Engine, setup: Setup, dense: Dense) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            pinned = await serving.call(lambda engine: engine.pin(LONG[:64]))
            stream = serving.stream(PROMPTS[0], greedy(30))
            found = (await anext(stream)).tokens
            await serving.call(lambda engine: engine.update_weights(nnx.clone(setup.dense.model)))
            async for update in stream:
                found += update.tokens
            assert found == dense.greedy(PROMPTS[0], 30)
            following = await serving.submit(LONG[:70], greedy(2))
            assert len([update async for update in following]) >= 1
            assert following.requests[0].cached_tokens >= 64
            await serving.call(lambda engine: engine.unpin(pinned))

    asyncio.run(main())


def test_errors_of_calls_are_raised_where_they_were_made(engine: Engine, dense: Dense) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            other = asyncio.create_task(tokens_of(serving, PROMPTS[0], greedy(20)))
            with pytest.raises(ValueError, match="prompt: expected at most max_context"):
                await serving.submit([1], greedy(10_000))
            with pytest.raises(ValueError, match="prompt: expected at least one token"):
                await tokens_of(serving, [], greedy())
            with pytest.raises(ZeroDivisionError):
                await serving.call(lambda engine: 1 // 0)
            with pytest.raises(RuntimeError, match="expected no StopIteration"):
                await serving.call(lambda engine: next(iter([])))
            with pytest.raises(RuntimeError, match="not served yet"):
                await serving.__aenter__()
            assert await other == dense.greedy(PROMPTS[0], 20)

    asyncio.run(main())


def test_nothing_is_taken_outside_of_the_context(engine: Engine) -> None:
    async def main() -> None:
        serving = AsyncEngine(engine)
        for _ in range(2):
            with pytest.raises(StoppedError, match="inside of `async with"):
                await serving.submit([1])
            async with serving:
                serving.check()

    asyncio.run(main())
    with pytest.raises(TypeError, match="engine: expected an Engine or Replicas, got NoneType"):
        AsyncEngine(None)


# --- Leaving -----------------------------------------------------------------------------------------------------


def test_leaving_early_aborts(engine: Engine, dense: Dense, gate: Gate) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            other = asyncio.create_task(tokens_of(serving, PROMPTS[0], greedy(20)))
            following = await serving.submit(PROMPTS[1], greedy(100), samples=2)
            gate.allow(8)  # enough for first tokens, and by far not for the last ones
            async for _ in serving.stream(PROMPTS[2], greedy(100)):
                break
            async with following:
                await anext(following)
            cancelled = asyncio.create_task(tokens_of(serving, PROMPTS[3], greedy(100)))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            gate.allow()
            assert [update.finish_reason async for _, update in following].count("abort") == 2
            assert await other == dense.greedy(PROMPTS[0], 20)
            assert await unfinished(serving) == 0

    asyncio.run(main())


def test_a_task_that_is_cancelled_while_it_submits_leaves_nothing(engine: Engine) -> None:
    async def main() -> None:
        begun, go_on = threading.Event(), threading.Event()

        def submit(engine: Engine) -> list:
            begun.set()
            go_on.wait(60)
            return [engine.submit(PROMPTS[0], greedy(90))]

        async with AsyncEngine(engine) as serving:
            running = asyncio.create_task(serving.follow(submit))
            await asyncio.to_thread(begun.wait, 60)
            waiting = asyncio.create_task(serving.submit(PROMPTS[1], greedy(90)))
            await asyncio.sleep(0)
            running.cancel()
            waiting.cancel()
            await asyncio.sleep(0)  # the thread of the engine learns of it in the loop's next turn
            before = engine.stats.submitted
            go_on.set()
            ends = await asyncio.gather(running, waiting, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
            assert await unfinished(serving) == 0
            assert engine.stats.submitted == before + 1  # the call that had not begun was not made

    asyncio.run(main())


@settings(max_examples=15)
@given(
    tasks=st.lists(
        st.tuples(
            st.integers(0, len(PROMPTS) - 1),
            st.integers(1, 12),
            st.sampled_from(["stay", "leave", "cancel"]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_tasks_come_and_go(shared: Engine, setup: Setup, tasks: list[tuple[int, int, str, int]]) -> None:
    async def one(serving: AsyncEngine, number: int, count: int, how: str, patience: int) -> None:
        found: list[int] = []
        async for update in serving.stream(PROMPTS[number], greedy(count)):
            found += update.tokens
            patience -= 1
            if how == "leave" and patience < 0:
                break
        else:
            assert len(found) == count
        assert found == setup.dense.greedy(PROMPTS[number], count)[: len(found)]

    async def main() -> None:
        async with AsyncEngine(shared) as serving:
            running = [asyncio.create_task(one(serving, *task)) for task in tasks]
            for task, (_, _, how, patience) in zip(running, tasks, strict=True):
                if how == "cancel":
                    await asyncio.sleep(patience * 0.003)
                    task.cancel()
            for end in await asyncio.gather(*running, return_exceptions=True):
                assert end is None or isinstance(end, asyncio.CancelledError)
            assert await unfinished(serving) == 0

    asyncio.run(main())
    assert_no_page_leaked(shared)


# --- The end -----------------------------------------------------------------------------------------------------


def test_leaving_the_context_finishes_what_runs(engine: Engine, dense: Dense) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            following = [await serving.submit(prompt, greedy(50)) for prompt in [*PROMPTS, *PROMPTS]]
            asyncio.get_running_loop().call_soon(asyncio.create_task, refused(serving))
        assert all(one.requests[0].finish_reason == "length" for one in following)
        for prompt, one in zip([*PROMPTS, *PROMPTS], following, strict=True):
            assert [token async for _, update in one for token in update.tokens] == dense.greedy(prompt, 50)
        assert refusals == 1

    refusals = 0

    async def refused(serving: AsyncEngine) -> None:
        nonlocal refusals
        with pytest.raises(StoppedError):
            await serving.submit(PROMPTS[0], greedy())
        refusals += 1

    asyncio.run(main())


def test_a_call_that_was_made_before_the_end_is_answered(engine: Engine) -> None:
    async def main() -> None:
        for _ in range(20):
            async with AsyncEngine(engine) as serving:
                stats = asyncio.create_task(serving.call(lambda engine: engine.stats))
                await asyncio.sleep(0)
            assert (await stats).running == 0

    asyncio.run(main())


def test_an_error_in_the_context_aborts_what_runs(engine: Engine, gate: Gate) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            held.append(await serving.submit(PROMPTS[0], greedy(100)))
            gate.allow(4)
            asyncio.get_running_loop().call_later(0.05, gate.allow)
            raise ZeroDivisionError

    held: list[Following] = []
    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert held[0].requests[0].finish_reason == "abort"


def test_cancelling_the_end_aborts_what_runs(engine: Engine, gate: Gate) -> None:
    async def serve(leaving: asyncio.Event) -> None:
        async with AsyncEngine(engine) as serving:
            held.append(await serving.submit(PROMPTS[0], greedy(100), samples=8))
            leaving.set()

    async def main() -> None:
        leaving = asyncio.Event()
        task = asyncio.create_task(serve(leaving))
        await leaving.wait()
        gate.allow(4)
        await asyncio.sleep(0.01)
        threading.Timer(0.05, gate.allow).start()  # of another thread: the loop waits for the engine's
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    held: list[Following] = []
    asyncio.run(main())
    assert [request.finish_reason for request in held[0].requests] == ["abort"] * 8


def test_a_step_that_fails_fails_everybody(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def step() -> list:
        go_on.wait(60)
        raise MemoryError("no more of it")

    monkeypatch.setattr(fresh, "step", step)

    async def main() -> None:
        async with AsyncEngine(fresh) as serving:
            streams = [await serving.submit([1]), asyncio.create_task(tokens_of(serving, [2], greedy()))]
            pending = asyncio.create_task(serving.call(lambda engine: engine.stats))
            await asyncio.sleep(0.01)
            go_on.set()
            for awaitable in (anext(streams[0]), streams[1], pending, serving.submit([3])):
                with pytest.raises(StoppedError, match=r"no more of it.*; serve the engine anew") as raised:
                    await awaitable
                assert isinstance(raised.value.__cause__, MemoryError)
            with pytest.raises(StopAsyncIteration):
                await anext(streams[0])
            assert streams[0].requests[0].finish_reason == "abort"  # nobody computes it where the engine goes on
            assert serving.failed

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "codec_jax engine"]
