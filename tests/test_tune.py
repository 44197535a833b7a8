"""The sweep of kernel sizes: what it tries, what it measures with, and what it reports."""

import pytest

from benchmarks import tune
from benchmarks.inputs import Layout, attend_with
from benchmarks.workloads import Workload
from codec_jax import Forest, make_plan
from pallas_kernels.config import Config, config_for, config_of


@pytest.mark.parametrize("forests", [tune.FORESTS[: tune.QUICK], tune.FORESTS], ids=["quick", "all"])
def test_forests_that_are_tuned_on_use_both_tables_and_every_kind_of_tile(forests):
    layout, tables, kinds = Layout(), set(), set()
    for workload in forests:
        forest = Forest.from_nodes(*workload[1:], node_capacity=len(workload.parent))
        heads = {"num_q_heads": layout.num_q_heads, "num_kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim}
        plan = make_plan(forest, **heads, num_ctas=132, tile_rows=64, lanes=2)
        tables.add(tune.table_of(forest, layout, num_ctas=132))
        kinds.add((plan.num_tiles > 1, bool((plan.segments[:, 0] != plan.segments[:, 1]).any())))
    assert tables == set(tune.TABLES)
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize(
    ("tokens", "requests", "table"), [(2000, 16, "SMALL"), (20_000, 16, "LARGE"), (2000, 17, "LARGE")]
)
def test_a_forest_is_tuned_for_the_table_that_serves_it(tokens, requests, table):
    # 8 kv heads on 20 thread blocks; 17 requests are two row tiles.
    again = tokens if requests > 16 else 0
    forest = Forest.from_nodes([-1], [tokens], [0] * requests)
    assert tune.table_of(forest, Layout(), num_ctas=20) == table
    assert config_for(128, tokens, again, 8 / 20) == tune.TABLES[table][128]


@pytest.mark.parametrize("table", tune.TABLES)
@pytest.mark.parametrize("head_dim", tune.HEAD_DIMS)
def test_the_configs_that_are_tried_include_the_one_in_force(table, head_dim):
    assert tune.TABLES[table][head_dim] in tune.candidates(head_dim)


def test_rings_that_cannot_fit_are_not_tried():
    # K and V, 128 tokens of 256 values of 2 bytes: 128 KiB a stage.
    assert {config.block_tokens for config in tune.candidates(256)} == {64}
    assert max(config.stages for config in tune.candidates(256)) == 3


@pytest.fixture(params=tune.TABLES)
def swept(request) -> tuple[list[dict], str]:
    """Rows of two forests: 2 stages of 64 tokens are the fastest on the first and fail on the second."""
    rows = []
    for name, slower, roofline_us in (("first", 1.0, 1.0), ("second", 2.0, 0.5)):

        def measure(name: str = name, slower: float = slower) -> dict:
            config = config_for(128, 0, 0, 1.0)
            if (name, config) == ("second", Config(64, 2)):
                raise ValueError("too much shared memory\nand more")
            return {"kernel_us": slower * (config.stages + config.block_tokens / 64)}

        common = {"name": name, "roofline_us": roofline_us, "head_dim": 128, "table": request.param}
        rows += [common | row for row in tune.sweep(128, tune.candidates(128), measure)]
    return rows, request.param


def test_every_config_is_measured_while_planning_and_kernels_find_it():
    def found() -> dict:
        config = config_for(128, 0, 0, 1.0)
        assert config_for(128, 10**9, 0, 1.0) == config_of(128, config.block_tokens) == config
        assert config_for(64, 0, 0, 1.0) == before["SMALL"][64]
        calls.append(attend_with("mosaic"))
        return {"kernel_us": 1.0}

    def interrupted() -> dict:
        raise KeyboardInterrupt

    calls = [attend_with("mosaic")]
    before = {name: dict(table) for name, table in tune.TABLES.items()}
    rows = tune.sweep(128, tune.candidates(128), found)
    # No program is used twice, as its arguments do not tell for which sizes it was compiled.
    assert len({*calls, attend_with("mosaic")}) == len(rows) + 2
    assert [row.get("error") for row in rows] == [None] * len(rows)
    assert [Config(row["block_tokens"], row["stages"]) for row in rows] == tune.candidates(128)
    with pytest.raises(KeyboardInterrupt):
        tune.sweep(128, tune.candidates(128), interrupted)
    assert before == tune.TABLES


def test_a_resumed_sweep_measures_the_configs_that_are_missing(monkeypatch):
    def prepare(workload: Workload, layout: Layout) -> tuple[tune.Measure, dict]:
        return lambda: calls.append(config_for(256, 0, 0, 1.0)) or {"kernel_us": float(len(calls))}, {"requests": 16}

    calls: list[Config] = []
    monkeypatch.setattr(tune, "prepare", prepare)
    layout, first, second = Layout(head_dim=256), *tune.FORESTS[:2]
    whole = tune.measured(first, layout, [])
    assert calls == tune.candidates(256)
    assert tune.measured(first, layout, whole[1:]) == [whole[0] | {"kernel_us": 3.0}, whole[1]]
    assert calls == [*tune.candidates(256), tune.candidates(256)[0]]
    assert tune.measured(first, layout, whole) == whole
    assert len(calls) == 3
    assert [row["name"] for row in tune.measured(second, layout, whole)] == [second.name] * 2
    assert len(calls) == 5


def test_a_config_that_does_not_compile_keeps_its_row_and_cannot_be_the_best(swept):
    rows, table = swept
    assert len(rows) == 2 * len(tune.candidates(128))
    failed = [row for row in rows if row["kernel_us"] is None]
    assert [(row["name"], row["block_tokens"], row["stages"]) for row in failed] == [("second", 64, 2)]
    assert failed[0]["error"] == "ValueError: too much shared memory"
    assert tune.best(rows, 128, table) == Config(64, 3)
    assert tune.best([row | {"kernel_us": None} for row in rows], 128, table) is None


def test_a_report_shows_times_scores_failures_and_the_best(swept):
    rows, table = swept
    lines = tune.report(rows, 128, table).split("\n")
    shown = {tuple(line.split()[:2]): line.split()[2:] for line in lines[2:-1]}
    # 4 x roofline on the first forest, 16 x on the second.
    assert shown["64", "3"] == ["4.0", "8.0", "8.000"]
    assert shown["128", "3"] == ["5.0", "10.0", "10.000"]
    assert shown["64", "2"][:3] == ["3.0", "-", "ValueError:"]
    assert lines[-1] == f"best: {Config(64, 3)}, at present {tune.TABLES[table][128]}"
