"""Cases of plans have one or two sums of a row in a segment, as there are on a Hopper GPU."""

import pytest

from codec_jax.planning import planner


@pytest.fixture(autouse=True)
def _two_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    default = planner.default_tiling
    monkeypatch.setattr(planner, "default_tiling", lambda heads: default(heads)._replace(sums=2))
