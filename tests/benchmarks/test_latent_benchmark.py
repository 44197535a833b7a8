"""The benchmark of attention over latents, as far as it shows without a GPU."""

from argparse import Namespace

import jax.numpy as jnp
import pytest

from benchmarks import latent, tables
from benchmarks.inputs import Layout, make_inputs
from benchmarks.workloads import flat, shared_root

pytestmark = pytest.mark.usefixtures("_little_room")
WORKLOAD = shared_root(300, 3, 20)


def test_every_number_of_q_heads_is_measured_and_held_to_the_first_numbers_of_the_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent, "kernel_time", lambda call, repeats: (float(jnp.asarray(call()).size), 2))
    # Of a call over K and V the size of what comes out tells which it was, and 2 of 3 kernels are attention's.
    monkeypatch.setattr(
        latent, "kernel_runs", lambda call, repeats: [[("a_mosaic_gpu", call().size / 1e3), ("gemm", 1.0)]] * 2
    )
    asked = Namespace(q_heads=[2, 4], page_size=16, implementation="xla", repeats=1, peers=False, float8=False)
    rows = list(latent.measure_all([WORKLOAD, flat(2, 30)], asked))
    assert [row.get("error") for row in rows] == [None] * 6
    assert [(row["variant"], row["kernel_us"], row.get("call_us")) for row in rows] == [
        (f"{heads} q heads{form}", requests * heads * numbers, call_us)
        for heads in (2, 4)
        for requests, form, numbers, call_us in (
            (3, "", 512, None),
            (3, ", K and V of what is shared", 128, 1000 + 3 * heads * 128),
            (2, "", 512, None),
        )
    ]
    assert [row.get("reconstructed_pages") for row in rows] == [None, 19, None] * 2
    assert all(row["relative_error"] < 5e-3 for row in rows)
    assert tables.latent_forms(rows).count("| latents, ") == 4  # three requests are too few for K and V
    (row,) = latent.measure_all([WORKLOAD], Namespace(**vars(asked) | {"q_heads": [2], "float8": True}))
    assert (row["variant"], row.get("error"), row["unique_bytes"]) == ("2 q heads, float8", None, 360 * 656)
    assert row["relative_error"] < 5e-3


def test_a_table_has_both_forms_in_a_line_and_says_which_is_chosen() -> None:
    latents = {"name": "n", "heads": "16/1", "variant": "16 q heads", "kernel_us": 30.01, "roofline_us": 20.0}
    form = latents | {"variant": "16 q heads, K and V of what is shared", "kernel_us": 25.0, "chosen_pages": 4}
    float8 = latents | {"variant": "16 q heads, float8", "roofline_us": 10.0}
    for pages, chosen in ((4, "K and V, 1.25x"), (0, "latents, 1.51x")):
        lines = tables.latent_forms([latents, form | {"chosen_pages": pages}, float8]).split("\n")[2:]
        assert lines == [
            f"| 16 q heads, n | 30.1 | 25.0 | {chosen} | 20.0 | – |",
            "| 16 q heads, float8, n | 30.1 | – | latents, 3.01x | 10.0 | – |",
        ]


def test_what_failed_has_dashes_in_the_table() -> None:
    failed = {
        "name": "n",
        "heads": "16/1",
        "variant": "16 q heads",
        "kernel_us": None,
        "error": "e",
        "roofline_us": 20.0,
    }
    (line,) = tables.latent_forms([failed]).split("\n")[2:]
    assert line == "| 16 q heads, n | – | – | – | 20.0 | – |"
    form = failed | {"variant": "16 q heads, K and V of what is shared", "kernel_us": 25.0, "chosen_pages": 4}
    lines = tables.latent_forms([failed, form]).split("\n")[2:]
    assert lines == ["| 16 q heads, n | – | 25.0 | K and V, 1.25x | 20.0 | – |"]


def test_the_roofline_counts_a_latent_once_and_its_products_for_every_request() -> None:
    layouts = Layout(16, 1, 576), Layout(1 << 20, 1, 576)
    inputs = make_inputs(WORKLOAD, Layout(1, 1, 576))
    few, many = (latent.bounds_of(WORKLOAD, inputs, layout) for layout in layouts)
    assert few["unique_bytes"] == 360 * 576 * 2
    assert few["roofline_us"] == pytest.approx((360 * 1152 + 3 * 16 * 1088 * 2) / 4.52e6)
    assert many["roofline_us"] == pytest.approx(2 * 960 * (1 << 20) * 1088 / 700e6)
    # Of a root with many readers K and V are cheaper: 100 of them, 320 products a row and token.
    crowd = shared_root(300, 100, 1)
    inputs = make_inputs(crowd, Layout(1, 1, 576))
    both = latent.bounds_of(crowd, inputs, Layout(128, 1, 576))["roofline_us"]
    assert both == pytest.approx((300 * 128 * 640 + 100 * 1152 + 100 * 128 * 1088 * 2) / 4.52e6)
