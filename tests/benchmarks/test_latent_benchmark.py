"""The benchmark of attention over latents, as far as it shows without a GPU."""

from argparse import Namespace

import jax.numpy as jnp
import pytest

from benchmarks import latent, tables
from benchmarks.inputs import Layout, make_inputs
from benchmarks.workloads import shared_root

WORKLOAD = shared_root(300, 3, 20)


def test_every_number_of_q_heads_is_measured_and_held_to_the_first_numbers_of_the_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent, "kernel_time", lambda call, repeats: (float(jnp.asarray(call()).size), 2))
    monkeypatch.setattr(latent, "MIN_BLOCKS", 64)
    asked = Namespace(q_heads=[2, 4], page_size=16, implementation="xla", repeats=1)
    rows = list(latent.measure_all([WORKLOAD], asked))
    assert [row.get("error") for row in rows] == [None, None]
    assert [(row["variant"], row["kernel_us"]) for row in rows] == [
        ("2 q heads", 3 * 2 * 512),
        ("4 q heads", 3 * 4 * 512),
    ]
    assert all(row["relative_error"] < 5e-3 for row in rows)
    assert tables.score_variants(rows).count("μs") == 2


def test_the_roofline_counts_a_latent_once_and_its_products_for_every_request() -> None:
    layouts = Layout(16, 1, 576), Layout(1 << 20, 1, 576)
    inputs = make_inputs(WORKLOAD, Layout(1, 1, 576))
    few, many = (latent.bounds_of(WORKLOAD, inputs, layout) for layout in layouts)
    assert few["unique_bytes"] == 360 * 576 * 2
    assert few["roofline_us"] == pytest.approx((360 * 1152 + 3 * 16 * 1088 * 2) / 4.52e6)
    assert many["roofline_us"] == pytest.approx(2 * 960 * (1 << 20) * 1088 / 700e6)
