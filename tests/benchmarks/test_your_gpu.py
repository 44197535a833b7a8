"""The command for a GPU that nobody has measured, as far as it shows without a GPU."""

import pytest

from benchmarks import attention, tables, your_gpu
from benchmarks.inputs import Layout
from benchmarks.workloads import shared_root

LAYOUT, FORESTS = Layout(4, 2, 64), [shared_root(300, 3, 20), shared_root(100, 2, 30)]
RATES = {"name": "rates", "read_bytes_per_us": 1e6, "flops_per_us": 100e6}


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that need no GPU: two kernels of a call, 3 and 1 microseconds."""
    monkeypatch.setattr(your_gpu, "measure_ceilings", lambda *_: RATES)
    monkeypatch.setattr(attention, "kernel_runs", lambda call, repeats: [[("pac", 3e-3), ("por", 1e-3)]] * repeats)
    monkeypatch.setattr(attention, "wall_time", lambda call: 5.0)


def test_every_forest_is_checked_and_timed_over_the_roofline_of_the_measured_rates() -> None:
    rates, *rows = your_gpu.measure_all(FORESTS, LAYOUT)
    assert rates.items() >= RATES.items()
    assert [row.get("error") for row in rows] == [None, None]
    assert [row["implementation"] for row in rows] == ["xla", "xla"]  # no family serves a CPU
    # 360 tokens of 2 kv heads, 64 numbers, K and V, 2 bytes; the query and the output, 3 x 4 heads; at 1 TB/s.
    assert rows[0]["roofline_us"] == pytest.approx((360 * 512 + 2 * 3 * 4 * 64 * 2) / 1e6)
    assert rows[0]["relative_error"] < 5e-3
    assert "1.00 TB/s read, 100.00 TFLOP/s" in tables.your_gpu([rates, *rows])


def test_a_wrong_result_has_no_time_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(your_gpu, "reference", lambda inputs: 1.0 + attention.reference(inputs))
    rates, row = your_gpu.measure_all(FORESTS[:1], LAYOUT)
    assert row["kernel_us"] is None
    assert "relative error" in row["error"]
    assert "relative error" in tables.your_gpu([rates, row])
