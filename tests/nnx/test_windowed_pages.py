"""Layers with windows that have fewer pages than the others: requests get what they get alone, and pages come back."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, DOCUMENT, LONG, PAGE_SIZE, VOCAB, Dense, sharp
from engines import assert_alone, assert_no_page_leaked, greedy, make_engine, random_trace, run
from flax import nnx

from codec_jax import Window
from codec_jax.nnx import Decoder, DecoderConfig
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams

WINDOWS = Window(20), None, Window(16, chunked=True)
PREFILL_TOKENS = 128
#: Little more than what one request and the chunks of a step may see.
WINDOWED = 44


def config_of(windows: tuple[Window | None, ...]) -> DecoderConfig:
    sizes = {"num_layers": 3, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "tied_embeddings": False}
    return DecoderConfig(VOCAB, 32, 48, **sizes, windows=windows, dtype=jnp.float32, param_dtype=jnp.float32)


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense(sharp(config_of(WINDOWS)))


@pytest.fixture(scope="module")
def shared(dense: Dense) -> Engine:
    return make_engine(dense.model, prefill_tokens=PREFILL_TOKENS, windowed_pages=WINDOWED)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert_no_page_leaked(shared)
    windows = shared._scheduler.cache.windows
    # Places and pages say the same, and only pages of the cache have a place.
    taken = np.flatnonzero(windows.page >= 0)
    assert (windows.place[windows.page[taken]] == taken).all()
    assert np.count_nonzero(windows.place >= 0) == len(taken)
    assert (shared._scheduler.cache.pool.owners[windows.page[taken]] > 0).all()


def test_layers_with_windows_have_fewer_pages(engine: Engine) -> None:
    pages = [pages.key.shape[0] for pages in engine._device._pages]
    assert pages == [WINDOWED, 96, WINDOWED]


@pytest.mark.parametrize("seed", range(4))
def test_random_traces(engine: Engine, dense: Dense, compilations: list[str], seed: int) -> None:
    del compilations[:]
    requests = random_trace(engine, np.random.default_rng(seed))
    assert not compilations
    for each in requests:
        assert each.finish_reason in ("length", "abort")
        assert_alone(each, dense)


def test_pages_that_were_given_back_are_not_read(engine: Engine, dense: Dense) -> None:
    """Nothing is found in a place before it is written: what is not placed is poison."""
    run(engine)
    engine._scheduler.cache = engine._scheduler.cache.drop()
    windows = [i for i, window in enumerate(WINDOWS) if window is not None]
    pages = list(engine._device._pages)
    for layer in windows:
        pages[layer] = jax.tree.map(lambda x: np.full_like(x, 1e4), pages[layer])
    engine._device._pages = jax.device_put(tuple(pages))
    requests = [engine.submit(LONG[: 90 + n], greedy(30)) for n in range(3)]
    run(engine)
    for request in requests:
        assert_alone(request, dense)


def test_a_prefix_is_found_as_far_as_its_end_is_there(engine: Engine, dense: Dense) -> None:
    engine._scheduler.cache = engine._scheduler.cache.drop()
    first = engine.submit(LONG, greedy(5))
    run(engine)
    again = engine.submit(LONG, greedy(5))
    run(engine)
    assert again.cached_tokens == len(LONG) // PAGE_SIZE * PAGE_SIZE
    # Others take its places, and it is computed again as far as is needed.
    others = [engine.submit(np.roll(LONG, 37 * n), greedy(5)) for n in range(1, 4)]
    run(engine)
    later = engine.submit(LONG[:100], greedy(5))
    run(engine)
    assert later.cached_tokens < 96
    for request in (first, again, *others, later):
        assert_alone(request, dense)
    # What was computed anew is found then, beside what is left of the old one.
    found = engine.submit(LONG[:100], greedy(5))
    run(engine)
    assert found.cached_tokens >= 96


def test_log_probabilities_of_prompts_that_are_cached(engine: Engine, dense: Dense) -> None:
    run(engine)
    engine.submit(LONG[:120], greedy(3))
    run(engine)
    request = engine.submit(LONG[:120], SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=True))
    run(engine)
    np.testing.assert_allclose(request.prompt_logprobs, dense.logprobs(LONG[:1], LONG[1:120]), atol=2e-4)
    assert_alone(request, dense)


def test_pages_of_a_long_text_stay_as_many(engine: Engine, dense: Dense) -> None:
    """Growing over many windows takes no more places than one window does."""
    run(engine)
    request = engine.submit(DOCUMENT, greedy(CONTEXT - len(DOCUMENT)))
    seen = []
    while not engine.idle:
        engine.step()
        running = engine._scheduler.running
        seen += [len(np.unique(engine._scheduler._seen(each))) for each in running if each.computed]
    assert_alone(request, dense)
    assert max(seen) <= 20 // PAGE_SIZE + 4


@pytest.mark.parametrize(
    ("windows", "options", "message"),
    [
        ((None,), {"windowed_pages": 50}, "layers of both kinds"),
        ((Window(20),), {"windowed_pages": 50}, "layers of both kinds"),
        (WINDOWS, {"windowed_pages": 20}, "expected at least 41"),
        (WINDOWS, {"windowed_pages": 50, "invariant": True}, "windowed_pages = 50"),
    ],
)
def test_pages_that_a_model_cannot_have_are_refused(windows: tuple, options: dict, message: str) -> None:
    config = config_of(windows)
    with pytest.raises(ValueError, match=message):
        Engine(Decoder(config, nnx.Rngs(0)), num_pages=96, page_size=8, prefill_tokens=128, **options)


def test_the_default_saves_memory_where_it_can() -> None:
    config = config_of(WINDOWS)
    model, sizes = Decoder(config, nnx.Rngs(0)), {"max_requests": 2, "page_size": 8, "prefill_tokens": 128}
    large, small, off = (Engine(model, **sizes, **more) for more in (
        {"num_pages": 400}, {"num_pages": 60}, {"num_pages": 400, "windowed_pages": 0},
    ))  # fmt: skip
    assert large._device._pages[0].key.shape[0] < 100
    assert {pages.key.shape[0] for pages in small._device._pages} == {60}
    assert {pages.key.shape[0] for pages in off._device._pages} == {400}
