"""Traffic by hardware counters and the crossover to plain decode, as far as they show without a GPU."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, counters, crossover, traffic
from benchmarks.inputs import MAX_RELATIVE_ERROR, Case, Layout, check, make_inputs, planned_call, reference
from benchmarks.workloads import flat, shared_root
from codec_jax.traffic import count_pass

SMALL = Layout(num_q_heads=8, num_kv_heads=2, head_dim=16, page_size=8)


# ---------------------------------------------------------------------- traffic


CASES = [Case(shared_root(100, 2, 10)), Case(flat(1, 50))]


@pytest.fixture
def counted(monkeypatch) -> list[dict]:
    """Rows of two forests: the cascade fails on the second."""

    def read(cases: list[Case], caller: str) -> list[dict[str, int] | str]:
        scale = {"mosaic": 1, "flashinfer_decode": 3, "flashinfer_cascade": 2}[caller]
        tokens = [scale * sum(case.workload.length) for case in cases]
        counts = [{"dram_read_bytes": 4096 * n, "dram_written_bytes": 0, "l2_to_sm_bytes": 8192 * n} for n in tokens]
        return [
            "no counters" if caller == "flashinfer_cascade" and n == 100 else counts[i] for i, n in enumerate(tokens)
        ]

    monkeypatch.setattr(traffic, "read_counters", read)
    return traffic.measured(CASES, list(counters.CONFIGURATIONS), [], [])


def test_counts_of_ours_and_the_peers_stand_beside_the_unique_bytes(counted):
    first, second = counted
    assert (first["unique_bytes"], first["unshared_bytes"]) == (120 * 4096, 220 * 4096)
    assert first["dram_read_bytes"] == 120 * 4096
    assert first["flashinfer_decode_l2_to_sm_bytes"] == 3 * 120 * 8192
    assert second["flashinfer_cascade_dram_read_bytes"] is None
    assert second["flashinfer_cascade_error"] == "no counters"
    assert "error" not in second


def test_what_was_counted_before_is_not_counted_again_and_what_cannot_be_says_why(counted, monkeypatch):
    asked = []

    def missing(cases: list[Case], caller: str) -> None:
        asked.extend(cases)
        raise FileNotFoundError("ncu")

    monkeypatch.setattr(traffic, "read_counters", missing)
    first, second = traffic.measured(CASES, [], [], counted[:1])
    assert first == counted[0]
    assert (second["name"], second["dram_read_bytes"]) == ("no sharing, 1 x 50", None)
    assert second["error"] == "FileNotFoundError: ncu"
    assert asked == CASES[1:]


def test_a_call_is_checked_before_it_is_counted(monkeypatch):
    case = Case(shared_root(40, 2, 10), SMALL)
    assert counters.prepare(case, "xla")().shape == (2, 1, 8, 16)
    wrong = lambda inputs, layout, caller: (lambda: jnp.zeros((2, 1, 8, 16)), 0)  # noqa: E731
    monkeypatch.setattr(counters, "planned_call", wrong)
    with pytest.raises(ValueError, match="relative error"):
        counters.prepare(case, "xla")


# ---------------------------------------------------------------------- the crossover


def test_the_grid_goes_from_no_sharing_to_much_in_every_group():
    cases = crossover.grid([1, 8], [256, 2048])
    assert len({(case.series, case.x, len(case.workload.leaf)) for case in cases}) == len(cases)
    for case in cases:
        group, own = map(int, re.fullmatch(r"group (\d+), (\d+) own", case.series).groups())
        assert case.layout.num_q_heads == group * case.layout.num_kv_heads == 32
        assert case.workload.length == [case.x] * bool(case.x) + [own] * len(case.workload.leaf)


def test_decoding_without_sharing_is_checked_like_ours(monkeypatch):
    """Our kernels are held to the same reference on the unshared forest."""
    inputs = make_inputs(shared_root(40, 3, 10), SMALL)
    seen = {}

    def measured(inputs: attention.Inputs, layout: Layout, expected: np.ndarray, *rest: object) -> dict:
        out, plan = planned_call(inputs, layout, "xla")
        seen["tokens"] = count_pass(inputs.forest, plan).kv_tokens_read
        return {"kernel_us": 3.0, "relative_error": check(out(), expected)}

    monkeypatch.setattr(attention, "measure_ours", measured)
    row = attention.measure_unshared(inputs, SMALL, reference(inputs), 2)
    assert row["unshared_us"] == 3.0
    assert 0 < row["unshared_relative_error"] < MAX_RELATIVE_ERROR
    assert seen["tokens"] == 3 * 50  # every request reads the 40 tokens that all share


def test_a_cell_has_ours_and_plain_decode_or_the_reasons(monkeypatch):
    monkeypatch.setattr(attention, "kernel_runs", lambda call, repeats: [[("a kernel", 0.004)]] * repeats)
    monkeypatch.setattr(attention, "wall_time", lambda call: 5.0)
    row = attention.measure(Case(shared_root(40, 3, 10), SMALL, "s", 40), None, None, 2, unshared=True)
    assert (row["kernel_us"], row["implementation"]) == (pytest.approx(4.0), None)
    assert (row["unique_tokens"], row["requests"]) == (70, 3)
    assert row["unshared_us"] is row["cudnn_us"] is None
    assert "'mosaic' cannot serve" in row["unshared_error"]  # heads of 16
    assert row["cudnn_error"]
    assert "error" not in row
