"""The benchmark of mixtures, as far as it shows without a GPU."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import experts, tables
from codec_jax.nnx import DecoderConfig, Mixture

CONFIG = DecoderConfig(
    64, 32, 64, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16, mixture=Mixture(6, 2, 16, bias=True)
)


def test_both_ways_are_held_to_float32_and_one_that_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "kernel_time", lambda call, repeats: (float(jnp.asarray(call()).size), 2))
    dense, wrong = experts.map_densely, lambda *given: experts.map_densely(*given) * 1.1
    monkeypatch.setattr(experts, "WAYS", {"chosen experts": experts.map_tokens, "all": dense, "wrong": wrong})
    rows = list(experts.measure_all("small", CONFIG, [3, 20]))
    assert [row["kernel_us"] for row in rows] == [3 * 32, 3 * 32, None, 20 * 32, 20 * 32, None]
    assert ["error" in row for row in rows] == [False, False, True] * 2
    assert all(row["relative_error"] < 2e-2 for row in rows if row["kernel_us"])
    assert tables.score_variants(rows).count("μs") == 4


def test_the_roofline_counts_chosen_experts_once() -> None:
    few = experts.bounds(CONFIG, np.asarray([[0, 4], [4, 0], [4, 5]]))
    assert few["experts"] == 3
    assert few["roofline_us"] == pytest.approx((3 * 3 * 32 * 16 + 2 * 3 * 32) * 2 / 4.52e6)
    large = replace(CONFIG, mixture=replace(CONFIG.mixture, expert_size=1024))
    many = experts.bounds(large, np.zeros((1 << 20, 2), int))
    assert many["roofline_us"] == pytest.approx(2 * (1 << 21) * 3 * 32 * 1024 / 700e6)
