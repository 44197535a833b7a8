"""Arrays of the benchmarks' calls with room for little more than the small forests of their tests."""

import pytest

from benchmarks import inputs, latent, scores


@pytest.fixture
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MIN_POOL_PAGES", 16)
    for module in (inputs, scores):
        monkeypatch.setattr(module, "MIN_CONTEXT", 64)
    for module in (inputs, latent, scores):
        monkeypatch.setattr(module, "MIN_BLOCKS", 64)
