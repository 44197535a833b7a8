"""What the engine's tests share: engines over the model of the other tests, and what must hold when they are idle."""

import numpy as np
import pytest
from cases import CONTEXT, DOCUMENT, LONG, PAGE_SIZE, PROMPTS, VOCAB, Dense, small_tiles

from codec_jax.nnx import Decoder
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.request import Request


def make_engine(model: Decoder, **changes: object) -> Engine:
    """All of one size, so that what they run is compiled once."""
    options = {
        "max_requests": 6, "num_pages": 96, "page_size": PAGE_SIZE, "max_context": CONTEXT, "prefill_tokens": 384,
        "steps": 4,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_tiles(monkeypatch)
        engine = Engine(model, **(options | changes))
        engine.warm_up()
    return engine


def leave_pages(engine: Engine, pages: int) -> list[Request]:
    """Pin as much as leaves so many pages of the pool."""
    rng, pins = np.random.default_rng(99), []
    while (left := engine._pages_unpinned() - pages) > 0:
        pins.append(engine.pin(rng.integers(0, VOCAB, min(left, CONTEXT // PAGE_SIZE) * PAGE_SIZE)))
        run(engine)
    return pins


def greedy(max_tokens: int = 20, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


def run(engine: Engine) -> None:
    while not engine.idle:
        engine.step()
    engine.step()  # those that have finished leave
    assert engine.idle
    assert engine.stats.running == 0


def random_prompt(rng: np.random.Generator) -> list[int]:
    """A prompt that shares something with others, most of the time."""
    start = [LONG, DOCUMENT, *PROMPTS][rng.integers(2 + len(PROMPTS))]
    return [*start[: rng.integers(0, min(len(start), 100))], *rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()]


def random_trace(engine: Engine, rng: np.random.Generator) -> list[Request]:
    """Let requests come, fork and leave while prefixes are pinned and steps go on; return all of them, finished."""
    requests: list[Request] = []
    pins: list[Request] = []
    for _ in range(120):
        event = rng.random()
        if event < 0.35:
            prompt = random_prompt(rng)
            requests.append(engine.submit(prompt, greedy(int(rng.integers(1, min(40, CONTEXT - len(prompt)))))))
        elif event < 0.40 and requests:
            engine.abort(requests[rng.integers(len(requests))])
        elif event < 0.45 and requests:
            source = requests[rng.integers(len(requests))]
            if len(source.prompt) + len(source.tokens) + 9 <= CONTEXT:
                requests.append(engine.fork(source, greedy(len(source.tokens) + int(rng.integers(1, 9)))))
        elif event < 0.47:
            if len(pins) == 2:
                engine.unpin(pins.pop(0))
            else:
                pins.append(engine.pin(DOCUMENT[: rng.integers(1, 37)]))
        else:
            engine.step()
    run(engine)
    for pin in pins:
        engine.unpin(pin)
    return requests


def assert_no_page_leaked(engine: Engine) -> None:
    """Every page is free or cached; once the cache is forgotten, all are free."""
    run(engine)
    cache = engine._scheduler.cache
    assert not (cache.tree.leaf >= 0).any()
    assert cache.pool.num_free + len(cache.tree.page_ids) == cache.pool.num_pages
    assert len(np.unique(cache.tree.page_ids)) == len(cache.tree.page_ids)
    assert cache.drop().pool.num_free == cache.pool.num_pages


def assert_alone(request: Request, dense: Dense) -> None:
    """A greedy request has the tokens and log-probabilities that the dense model gives it alone."""
    prompt = request.prompt.tolist()
    if not request.tokens:
        return
    logits = dense.all_logits((*prompt, *request.tokens))[len(prompt) - 1 : -1]
    assert request.tokens == logits.argmax(axis=-1).tolist()
    np.testing.assert_allclose(request.logprobs, dense.logprobs(prompt, request.tokens), atol=2e-4)
