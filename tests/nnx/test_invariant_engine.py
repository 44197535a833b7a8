"""An invariant engine or sampler computes every request as if it were alone, to the last bit of a log-probability."""

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from cases import CONTEXT, DOCUMENT, LONG, PAGE_SIZE, PROMPTS, VOCAB, Setup
from engines import assert_no_page_leaked, greedy, run

from codec_jax.nnx import Engine, Sampler, intervals, prefill
from codec_jax.nnx.params import SamplingParams
from codec_jax.planning import invariant, planner
from pallas_kernels import Tiling

PARAMS = [greedy(11), SamplingParams(max_tokens=6, seed=3), SamplingParams(max_tokens=0, prompt_logprobs=True)]
SIZES = {"page_size": PAGE_SIZE, "max_context": CONTEXT, "steps": 3}


@pytest.fixture(scope="module", autouse=True)
def _one_lane() -> Iterator[None]:
    """Tiles, blocks, parts and chunks are small, and there is one lane, as plans have on a CPU."""
    tiling = Tiling(num_ctas=5, tile_rows=8, lanes=1, block_tokens=(16, 16))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (planner, intervals):
            monkeypatch.setattr(module, "default_tiling", lambda heads: tiling)
        monkeypatch.setattr(invariant, "_SHORTEST", 5)
        monkeypatch.setattr(prefill, "MAX_CHUNK_TOKENS", 32)
        monkeypatch.setattr(prefill, "MAX_WAVE_TOKENS", 128)
        yield


@pytest.fixture(autouse=True)
def _small_tiles() -> None:
    """Leave the tiles of this module alone."""


@pytest.fixture(scope="module")
def shared(_one_lane: None, setup: Setup) -> Engine:
    engine = Engine(setup.dense.model, **SIZES, max_requests=5, num_pages=128, prefill_tokens=128, invariant=True)
    engine.generate([PROMPTS[0]], PARAMS[0])  # compiles one program for prompts, and one that decodes
    return engine


@pytest.fixture
def engine(shared: Engine, setup: Setup, compilations: list[str]) -> Iterator[Engine]:
    shared.update_weights(setup.dense.model)  # so that nothing is cached
    compilations.clear()
    yield shared
    assert compilations == []
    assert_no_page_leaked(shared)


Asked = tuple[list[int], SamplingParams]


@pytest.fixture
def alone(engine: Engine, setup: Setup) -> Callable[[Asked], tuple]:
    """What a request gets of an engine that has nothing else, and never had."""

    def compute(asked: Asked) -> tuple:
        run(engine)
        engine.update_weights(setup.dense.model)
        request = engine.submit(*asked)
        run(engine)
        return request.tokens, request.logprobs, request.prompt_logprobs

    return compute


def random_request(rng: np.random.Generator) -> Asked:
    """One that shares something with others, most of the time, and parts from them anywhere in a page."""
    start = [LONG, DOCUMENT, *PROMPTS][rng.integers(2 + len(PROMPTS))]
    prompt = [*start[: rng.integers(0, min(len(start), 100))], *rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()]
    return prompt, PARAMS[rng.integers(len(PARAMS))]


@pytest.mark.parametrize("seed", range(3))
def test_a_request_gets_the_same_bits_whatever_comes_before_beside_and_after_it(
    engine: Engine, alone: Callable[[Asked], tuple], seed: int
) -> None:
    rng, requests = np.random.default_rng(seed), []
    for _ in range(14):
        asked = random_request(rng)
        requests += [(asked, engine.submit(*asked)) for _ in range(rng.integers(1, 3))]
        for _ in range(rng.integers(0, 6)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(requests[rng.integers(len(requests))][1])
    run(engine)
    assert sum(request.cached_tokens for _, request in requests) > 100
    results = [(asked, request) for asked, request in requests if request.finish_reason != "abort"]
    assert len(results) > 12
    for asked, got in results:
        assert (got.tokens, got.logprobs, got.prompt_logprobs) == alone(asked)


def test_a_conversation_goes_on_as_if_it_were_new(engine: Engine, alone: Callable[[Asked], tuple]) -> None:
    """What was generated is computed again, as a prompt is: whether it is still there is up to others."""
    first = engine.submit(PROMPTS[0], greedy(20))
    fork = engine.fork(first, greedy(20))
    run(engine)
    again = engine.submit([*PROMPTS[0], *first.tokens], greedy(8))
    run(engine)
    assert again.cached_tokens == len(PROMPTS[0]) // PAGE_SIZE * PAGE_SIZE
    assert (fork.tokens, fork.logprobs) == (first.tokens, first.logprobs)
    assert (again.tokens, again.logprobs) == alone(([*PROMPTS[0], *first.tokens], greedy(8)))[:2]


def test_a_sampler_gives_the_same_bits_in_any_batch(setup: Setup) -> None:
    sampler = Sampler(setup.dense.model, **SIZES, max_requests=5, num_pages=96, invariant=True)

    def bits(numbers: list[int]) -> dict[int, tuple]:
        prompts = [[*PROMPTS, PROMPTS[0]][i] for i in numbers]
        state = sampler.start(prompts, streams=[7] * len(prompts))
        state, first = sampler.decode(state, 5, seed=1)
        state = sampler.append(state, {r: LONG[: 3 + i] for r, i in enumerate(numbers)})
        after = np.asarray(state.logits)
        state, then = sampler.decode(state, 4, temperature=0.0)
        return {
            i: (first.tokens[r], first.logprobs[r], after[r].tolist(), then.logprobs[r], state.logits[r].tolist())
            for r, i in enumerate(numbers)
        }

    together = bits([0, 1, 2, 3, 4])
    assert together[0][:2] == together[4][:2]  # samples of one prompt
    for numbers in ([3, 1, 0], [2], [4]):
        assert bits(numbers) == {i: together[i] for i in numbers}


def test_what_it_does_not_go_with_is_refused(setup: Setup) -> None:
    model, sizes = setup.dense.model, {"num_pages": 16, "page_size": PAGE_SIZE}
    with pytest.raises(ValueError, match=r"invariant: expected room = 1, .* got room = 0\.5"):
        Engine(model, **sizes, room=0.5, invariant=True)
    mesh = jax.make_mesh((2, 1), ("context", "tensor"), devices=jax.devices("cpu")[:2])
    for make in (Engine, Sampler):
        with pytest.raises(ValueError, match=r"invariant: expected .*pages on one device .* got .*2 along"):
            make(model, **sizes, max_requests=2, mesh=mesh, invariant=True)
        with pytest.raises(ValueError, match=r"invariant: .* got .*reconstructed_pages = 3"):
            make(model, **sizes, max_requests=2, reconstructed_pages=3, invariant=True)
