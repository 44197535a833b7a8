"""The benchmark of attention's variants, as far as it shows without a GPU."""

from argparse import Namespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import scores, tables
from benchmarks.inputs import Layout, Variant, make_inputs
from benchmarks.scores import VARIANTS
from benchmarks.workloads import shared_root
from codec_jax import make_plan

pytestmark = pytest.mark.usefixtures("_little_room")
LAYOUT, WORKLOAD = Layout(4, 2, 64), shared_root(300, 3, 20)


def test_every_variant_is_measured_and_shown_beside_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "kernel_time", lambda call, repeats: (float(jnp.asarray(call()).size), 2))
    monkeypatch.setitem(VARIANTS, "window 1024", Variant(window=100))
    planned: list[Any] = []
    monkeypatch.setattr(
        scores, "make_plan", lambda *args, **options: planned.append(make_plan(*args, **options)) or planned[-1]
    )
    asked = Namespace(variants=list(VARIANTS), heads="4/2", head_dim=64, implementation="xla", repeats=1, peers=False)
    rows = list(scores.measure_all([WORKLOAD], asked, []))
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert [row.get("error") for row in rows] == [None] * len(rows)
    assert all(row["relative_error"] < 5e-3 for row in rows)
    assert [plan.heads.kv_dtype for plan in planned] == [variant.kv_dtype for variant in VARIANTS.values()]
    by_name = {row["variant"]: row for row in rows}
    assert by_name["float8_e4m3fn"]["unique_bytes"] * 2 == by_name["plain"]["unique_bytes"] == 360 * 512
    # The last 100 tokens of each request: its own 20, and the same 80 of the root.
    assert by_name["window 1024"]["unique_tokens"] == 80 + 3 * 20
    assert by_name["window 1024"]["total_tokens"] == 300
    assert tables.score_variants(rows).count("μs") == len(rows)
    before = [row | {"date": "earlier"} for row in rows[:2]]
    again = list(scores.measure_all([WORKLOAD], asked, before))
    assert again[:2] == before
    assert [row | {"date": ""} for row in again[2:]] == [row | {"date": ""} for row in rows[2:]]


@pytest.mark.parametrize("variant", [Variant(softcap=2.0), Variant(sinks=True), Variant(window=30)], ids=str)
def test_results_of_another_variant_are_not_taken(variant: Variant) -> None:
    inputs = make_inputs(WORKLOAD, LAYOUT)
    plain, other = scores.reference(inputs, Variant()), scores.reference(inputs, variant)
    with pytest.raises(ValueError, match="out: expected a relative error"):
        scores.check(plain, other)
    np.testing.assert_allclose(
        scores.reference(inputs, variant._replace(window=500)),
        scores.reference(inputs, variant._replace(window=None)),
    )


class FakePeers:
    """Peers that take what they are held to for what they give."""

    def __init__(self, names: tuple[str, ...]) -> None:
        assert names == ("flashinfer_decode", "flashinfer_cascade")
        self.closed = False

    def measure(self, workload: Any, layout: Layout, expected: Any, repeats: int, variant: Variant) -> dict:
        plain = scores.reference(make_inputs(workload, layout), Variant())
        told = float(np.abs(expected - plain).max())
        return {"flashinfer_decode_us": 1000 + told, "flashinfer_cascade_us": None, "asked": variant, "told": told}

    def close(self) -> None:
        self.closed = True


def test_peers_are_held_to_the_same_attention_and_shown_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "kernel_time", lambda call, repeats: (1.0, 2))
    monkeypatch.setattr(scores, "Peers", FakePeers)
    monkeypatch.setattr(scores, "conditions", lambda layout, *packages: {"versions": packages})
    monkeypatch.setitem(VARIANTS, "window 1024", Variant(window=100))
    asked = Namespace(variants=list(VARIANTS), heads="4/2", head_dim=64, implementation="xla", repeats=1, peers=True)
    rows = list(scores.measure_all([WORKLOAD], asked, []))
    assert [row["asked"] for row in rows] == list(VARIANTS.values())
    assert {row["versions"] for row in rows} == {("torch", "flashinfer-python")}
    assert [row["told"] > 1e-5 for row in rows] == [False, True, True, True, True]
    assert tables.score_variants(rows).count("; 1,000.") == len(rows)
