"""The sweep of kernel sizes: what it tries, what it measures with, and what it finds."""

from collections.abc import Callable
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from benchmarks import tune
from benchmarks.inputs import Layout, attend_with
from benchmarks.workloads import Workload
from codec_jax import Forest, make_plan
from pallas_kernels import Heads
from pallas_kernels.hopper.tiling import BLOCKS, Block, stages_of, tiling

DEVICE = SimpleNamespace(core_count=132)


def in_force(head_dim: int) -> Block:
    """The block with which kernels would run now, whatever the work."""
    little, much = tiling(Heads(32, 8, head_dim, head_dim), DEVICE).block_tokens
    assert little == much
    return Block(little, stages_of((head_dim, head_dim), little, jnp.bfloat16))


def test_forests_that_are_tuned_on_have_much_and_little_work_and_every_kind_of_tile():
    layout, tables, kinds = Layout(), set(), set()
    for workload in tune.FORESTS:
        forest = Forest.from_nodes(*workload[1:], node_capacity=len(workload.parent))
        plan = make_plan(forest, **layout.heads, num_ctas=132, tile_rows=64, lanes=2)
        tables.add(tune.table_of(forest, layout, DEVICE))
        kinds.add((plan.arrays.num_tiles > 1, bool(plan.arrays.used_segments.is_wide.any())))
    assert tables == set(tune.TABLES)
    assert kinds == {(False, False), (True, False), (True, True)}


def test_a_forest_is_tuned_for_the_work_that_it_has():
    # 8 kv heads on 20 thread blocks: 16,000 tokens are little; 17 requests are two row tiles, which read them again.
    for tokens, requests, table in ((2000, 16, "SMALL"), (20_000, 16, "LARGE"), (2000, 17, "LARGE")):
        forest = Forest.from_nodes([-1], [tokens], [0] * requests)
        assert tune.table_of(forest, Layout(), SimpleNamespace(core_count=20)) == table


def test_the_blocks_that_are_tried_fit_and_include_those_in_force():
    assert all(set(BLOCKS[head_dim, head_dim]) <= set(tune.candidates(head_dim)) for head_dim in tune.HEAD_DIMS)
    # K and V, 64 tokens of 256 values of 2 bytes: 64 KiB a stage.
    assert tune.candidates(256) == [Block(64, 2), Block(64, 3)]


def test_every_block_is_measured_while_planning_and_kernels_find_it(monkeypatch):
    def found() -> dict:
        blocks.append(in_force(128))
        assert BLOCKS[64, 64] == before[64, 64]
        calls.append(attend_with("mosaic"))
        return {"kernel_us": 1.0}

    def interrupted() -> dict:
        raise KeyboardInterrupt

    blocks, calls, before = [], [attend_with("mosaic")], dict(BLOCKS)
    monkeypatch.setattr(tune, "prepared", lambda *_: (found, {"table": "SMALL"}))
    rows = list(tune.measure_all(tune.FORESTS[0], Layout(), []))
    assert [row.get("error") for row in rows] == [None] * len(rows)
    assert blocks == tune.candidates(128) == [Block(row["block_tokens"], row["stages"]) for row in rows]
    # No program is used twice, as its arguments do not tell for which sizes it was compiled.
    assert len({*calls, attend_with("mosaic")}) == len(rows) + 2
    with pytest.raises(KeyboardInterrupt):
        tune.measure(blocks[0], Layout(), lambda: (interrupted, {}))
    assert before == BLOCKS


def test_a_block_that_fails_on_a_forest_keeps_its_row_and_cannot_be_the_best(monkeypatch):
    def prepared(workload: Workload, layout: Layout) -> tuple[Callable[[], dict], dict]:
        def measure() -> dict:
            block = in_force(128)
            if (workload, block) == (second, Block(64, 2)):
                raise ValueError("too much shared memory\nand more")
            return {"kernel_us": slower[workload.name] * (block.stages + block.tokens / 64)}

        return measure, {"roofline_us": 1.0, "table": "SMALL"}

    first, second = tune.FORESTS[:2]
    slower = {first.name: 1.0, second.name: 4.0}
    monkeypatch.setattr(tune, "prepared", prepared)
    rows = [row for workload in (first, second) for row in tune.measure_all(workload, Layout(), [])]
    assert len(rows) == 2 * len(tune.candidates(128))
    (failed,) = (row for row in rows if row["kernel_us"] is None)
    assert (failed["name"], failed["block_tokens"], failed["stages"]) == (second.name, 64, 2)
    assert failed["error"] == "ValueError: too much shared memory"
    assert tune.best(rows, 128, "SMALL") == Block(64, 3)
    assert tune.best(rows, 128, "LARGE") is None
    # A resumed sweep measures what is missing.
    slower[first.name] = 2.0
    again = list(tune.measure_all(first, Layout(), rows[1:]))
    assert again == [rows[0] | {"kernel_us": 6.0}, *rows[1 : len(again)]]
