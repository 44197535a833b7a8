"""One sampler for all tests of this directory."""

from collections.abc import Iterator

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from cases import VOCAB, Dense, Setup, new_sampler, sharp, small_tiles

from codec_jax.nnx import DecoderConfig, Sampler


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


@pytest.fixture(scope="session")
def setup() -> Setup:
    """One sampler for all tests, so that its steps compile once.

    Tiles and blocks are small and pairs of tiles share what little both read, so that plans look as on a GPU they look
    for larger forests.
    """
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        mlp_size=48,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tied_embeddings=False,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    model = sharp(config)
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_tiles(monkeypatch)
        sampler = new_sampler(model)
    return Setup(sampler, Dense(model))


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What was compiled since the list was emptied."""
    events: list[str] = []

    def listen(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def sampler(setup: Setup) -> Sampler:
    return setup.sampler


@pytest.fixture
def dense(setup: Setup) -> Dense:
    return setup.dense
