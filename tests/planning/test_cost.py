"""Cost models: tables, what lies between and beyond their points, files, and which one a plan gets."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from costs import cost_model
from hypothesis import given
from hypothesis import strategies as st

from codec_jax import CostModel, Forest, make_plan
from codec_jax.planning import cost
from codec_jax.planning.cost import HeadLayout

LAYOUT = HeadLayout(32, 8, 128, 16)
HEADS = LAYOUT._asdict() | {}
HEADS.pop("page_size")
MODEL = replace(
    cost_model(LAYOUT),
    tokens=(100, 400, 1000),
    memory_us=((2.0, 5.0, 11.0), (3.0, 8.0, 20.0)),
    cached_us=((1.0, 3.0, 6.0), (2.0, 6.0, 14.0)),
    versions=(("jax", "0.11.2"), ("python", "3.12.1")),
    date="2026-01-31",
)
FOREST = Forest.from_nodes([-1, 0, 0], [300, 20, 30], [1, 2])


@pytest.mark.parametrize(
    ("wide", "tokens", "memory", "cached"),
    [
        (False, 400, 5.0, 3.0),  # a point
        (True, 400, 8.0, 6.0),
        (False, 0, 0.0, 0.0),
        (False, 50, 1.0, 0.5),  # before the first
        (False, 250, 3.5, 2.0),  # between two
        (False, 1600, 17.0, 9.0),  # beyond the last, as between the last two
        (True, 1600, 32.0, 22.0),
    ],
)
def test_times_between_and_beyond_the_points(wide, tokens, memory, cached):
    assert MODEL.kv_us(wide, tokens, cached=False) == pytest.approx(memory)
    assert MODEL.kv_us(wide, tokens, cached=True) == pytest.approx(cached)
    np.testing.assert_allclose(MODEL.kv_us(np.full(3, wide), np.full(3, tokens), cached=True), cached)


rising = st.lists(st.integers(1, 10**5), min_size=2, max_size=5, unique=True).map(sorted)


@given(rising, st.data())
def test_times_never_fall_with_tiles_or_tokens(tokens, data):
    steps = st.lists(st.floats(0.01, 10.0), min_size=len(tokens), max_size=len(tokens))
    table = np.cumsum(np.cumsum([data.draw(steps) for _ in range(2)], axis=0), axis=1)
    times = tuple(map(tuple, table.tolist()))
    model = replace(MODEL, tokens=tuple(tokens), memory_us=times, cached_us=times)
    wide = np.asarray([[False], [True]])
    np.testing.assert_allclose(model.kv_us(wide, np.asarray(tokens), cached=True), table)
    grid = np.unique(np.concatenate([np.geomspace(1, 3e5, 25).astype(int), tokens]))
    estimated = model.kv_us(wide, grid, cached=False)
    assert np.isfinite(estimated).all()
    measured = estimated[:, grid <= tokens[-1]]
    assert (np.diff(measured, axis=0) >= -1e-9 * measured[:1]).all()
    assert (np.diff(estimated, axis=1) >= -1e-9 * estimated[:, :-1]).all()


def test_a_saved_model_comes_back(tmp_path):
    MODEL.save(tmp_path / "new" / "costs.json")
    assert CostModel.load(tmp_path / "new" / "costs.json") == MODEL
    assert os.listdir(tmp_path / "new") == ["costs.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("masked"), r"fields: expected .*'masked'"),
        (lambda d: d.update(unit="ms"), r"fields: .*'unit'"),
        (lambda d: d.update(format="flashinfer"), r"format: expected 'codec_jax cost model 3', got 'flashinfer'"),
        (lambda d: d.update(head_dim="128"), r"head_dim: expected an integer of at least 1, got '128'"),
        (lambda d: d.update(page_size=0), r"page_size: expected an integer of at least 1, got 0"),
        (lambda d: d.update(rows=[64, 16, 128]), r"rows: expected positive integers in ascending order"),
        (lambda d: d.update(tokens=[]), r"tokens: expected positive integers in ascending order"),
        (lambda d: d.update(tokens="many"), r"tokens: expected an integer of at least 1, got 'm'"),
        (lambda d: d.update(segment_us=[1.0, float("nan")]), r"segment_us: expected a finite number, got nan"),
        (lambda d: d.update(segment_us=[2.0, 1.5]), r"segment_us: expected 2 times that do not fall with more tiles"),
        (lambda d: d.update(segment_us=[-1.0, 1.5]), r"segment_us: expected 2 times that do not fall .* from 0 on"),
        (lambda d: d.update(segment_us=[1.0]), r"segment_us: expected 2 times"),
        (lambda d: d.update(masked=0.5), r"masked: expected a finite number of at least 1, got 0.5"),
        (lambda d: d.update(launch_us=None), r"launch_us: expected a finite number"),
        (lambda d: d["memory_us"].pop(), r"memory_us: expected 2 rows of 3 times"),
        (lambda d: d["cached_us"][1].pop(), r"cached_us: expected 2 rows of 3 times"),
        (lambda d: d["memory_us"].insert(0, 3), r"has no len"),
        (lambda d: d["memory_us"][0].__setitem__(1, -4.0), r"memory_us: expected positive times"),
        (lambda d: d["memory_us"][0].__setitem__(1, "4"), r"memory_us: expected a finite number, got '4'"),
        (lambda d: d["memory_us"][0].__setitem__(1, 40.0), r"memory_us: expected positive times that do not fall"),
        (lambda d: d.update(versions=[1]), r"no attribute 'items'"),
    ],
)
def test_a_damaged_or_foreign_file_raises_and_names_the_file_and_what_is_wrong(tmp_path, change, message):
    path = tmp_path / "costs.json"
    MODEL.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"costs.json: expected a cost model .*{message}.*codec_jax.profile"):
        CostModel.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"costs"', "\x00", "[" * 100_000])
def test_a_file_that_is_no_json_object_raises(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"costs.json: expected a cost model"):
        CostModel.load(tmp_path / "costs.json")
    (tmp_path / "costs.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"costs.json: expected a cost model"):
        CostModel.load(tmp_path / "costs.json")


def test_a_table_for_heads_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"cost_model: expected a table for head_dim = 128, got one for 64; .*profile"):
        make_plan(FOREST, **HEADS, cost_model=replace(MODEL, head_dim=64))
    for change in ({}, {"num_q_heads": 16}, {"num_kv_heads": 4}, {"page_size": 32}):
        model = replace(MODEL, **change)
        assert make_plan(FOREST, **HEADS, cost_model=model).cost_model == model


def test_a_roofline_is_bound_by_memory_in_narrow_segments_and_by_arithmetic_in_cached_wide_ones():
    model = CostModel.roofline(LAYOUT, bytes_per_us=4e6, flops_per_us=600e6, num_ctas=100)
    # 512 bytes a token at 40 kB/us; 64 rows x 512 operations a token at 6 MFLOP/us.
    assert model.kv_us(False, 1000, cached=False) == pytest.approx(12.8)
    assert model.kv_us(False, 1000, cached=True) == pytest.approx(64 * 512 * 1000 / 6e6)
    assert model.kv_us(True, 1000, cached=True) == pytest.approx(128 * 512 * 1000 / 6e6)


def test_latents_are_read_once_for_keys_and_values():
    latents, both = (CostModel.roofline(HeadLayout(128, 1, 576, 64), values_in_keys=x) for x in (True, False))
    rows = 128 * 4 * 576 * 132 / 650e6 * 1000
    for wide, tiles in ((False, 1), (True, 2)):
        least = rows * tiles / 2
        assert latents.kv_us(wide, 1000, cached=False) == pytest.approx(max(1000 * 2 * 576 * 132 / 4.5e6, least))
        assert both.kv_us(wide, 1000, cached=False) == pytest.approx(max(1000 * 4 * 576 * 132 / 4.5e6, least))
        assert latents.kv_us(wide, 1000, cached=True) == both.kv_us(wide, 1000, cached=True)


def test_a_plan_of_latents_on_a_gpu_with_kernels_for_them_counts_them_once(gpu):
    layout = HeadLayout(64, 1, 576, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody can measure costs of latents, so nobody is asked to
        plan = make_plan(FOREST, num_q_heads=64, num_kv_heads=1, head_dim=576, value_head_dim=512)
    assert plan.cost_model == CostModel.roofline(layout, values_in_keys=True)
    with pytest.warns(UserWarning, match="no measured costs"):
        plan = make_plan(FOREST, num_q_heads=64, num_kv_heads=64, head_dim=192, value_head_dim=128)
    assert plan.cost_model == CostModel.roofline(HeadLayout(64, 64, 192, 16))


# ---------------------------------------------------------------------- the default


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A default device that says it is a GPU, and an empty cache directory."""
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA X-1 (64 GB)", core_count=100, compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return device


def test_a_cpu_gets_proportions_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small, usual = CostModel.default(HeadLayout(4, 2, 8, 16)), CostModel.default(LAYOUT)
    for cached in (False, True):
        assert small.kv_us(False, 256, cached=cached) == usual.kv_us(False, 256, cached=cached)


def test_an_unknown_gpu_gets_a_roofline_and_is_told_once(gpu):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        first = make_plan(FOREST, **HEADS)
        for _ in range(3):
            make_plan(FOREST, **HEADS)
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "no measured costs for NVIDIA X-1 (64 GB) with head_dim = 128"
    ]
    assert first.cost_model == CostModel.roofline(LAYOUT)


def test_a_measured_table_is_found_by_device_and_layout_and_read_again_when_it_changes(gpu, monkeypatch):
    path = os.path.join(cost.user_folder(), cost.file_name(gpu.device_kind, LAYOUT))
    assert path.endswith("codec_jax/nvidia_x_1_64_gb-32q_8kv_128-page16-bfloat16.json")
    mine = replace(MODEL, device=gpu.device_kind)
    mine.save(path)
    assert make_plan(FOREST, **HEADS).cost_model == mine
    load = CostModel.load
    monkeypatch.setattr(CostModel, "load", lambda path: pytest.fail("it was read again"))
    assert make_plan(FOREST, **HEADS).cost_model == mine
    monkeypatch.setattr(CostModel, "load", load)
    replace(mine, segment_us=(12.25, 13.5)).save(path)
    assert make_plan(FOREST, **HEADS).cost_model.segment_us == (12.25, 13.5)
    with open(path, "w") as file:
        file.write("{}")
    with pytest.raises(ValueError, match=r"nvidia_x_1_64_gb-.*json: expected a cost model"):
        make_plan(FOREST, **HEADS)


def test_a_table_of_another_gpu_is_refused_on_a_gpu(gpu):
    with pytest.raises(
        ValueError, match=r"cost_model: expected a table measured on 'NVIDIA X-1 .*', got one of 'a test'"
    ):
        make_plan(FOREST, **HEADS, cost_model=MODEL)


def test_tables_are_kept_in_the_users_cache_directory(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cost.user_folder() == "/caches/codec_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cost.user_folder() == "/home/someone/.cache/codec_jax"


def test_tables_of_the_package_serve_their_device_unless_the_user_has_measured(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "_SHIPPED", str(tmp_path / "shipped"))
    shipped = replace(MODEL, device=gpu.device_kind)
    assert CostModel.shipped(gpu.device_kind, LAYOUT) is None
    shipped.save(tmp_path / "shipped" / cost.file_name(gpu.device_kind, LAYOUT))
    assert CostModel.default(LAYOUT) == CostModel.shipped(gpu.device_kind, LAYOUT) == shipped
    assert CostModel.shipped(gpu.device_kind, LAYOUT._replace(head_dim=64)) is None
    mine = replace(shipped, segment_us=(7.0, 7.0))
    mine.save(os.path.join(cost.user_folder(), cost.file_name(gpu.device_kind, LAYOUT)))
    assert CostModel.default(LAYOUT) == mine


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (LAYOUT, (32, 8, 128, 16)),
        (HeadLayout(64, 8, 128, 16), (32, 8, 128, 16)),  # others have other pages, or other kv heads
        (HeadLayout(16, 4, 128, 16), (32, 8, 128, 16)),
        (HeadLayout(16, 1, 128, 16), (64, 4, 128, 16)),
        (HeadLayout(64, 8, 128, 64), (64, 8, 128, 64)),
        (HeadLayout(32, 8, 128, 256), (64, 8, 128, 64)),
        (HeadLayout(2, 2, 96, 16), (12, 12, 96, 16)),
    ],
)
def test_where_there_is_no_table_that_of_the_most_similar_heads_of_this_size_serves(gpu, monkeypatch, layout, expected):
    folder = cost.user_folder()
    for measured in ((32, 8, 128, 16), (64, 4, 128, 16), (64, 8, 128, 64), (64, 8, 64, 16), (12, 12, 96, 16)):
        model = replace(MODEL, device=gpu.device_kind, **HeadLayout(*measured)._asdict())
        model.save(os.path.join(folder, cost.file_name(model.device, model.layout)))
    # Tables of other devices, of which one's name begins alike, and files that are no tables.
    for device in ("NVIDIA X-1 (64 GB) 2", "X-1 (64 GB)"):
        replace(MODEL, device=device).save(os.path.join(folder, cost.file_name(device, HeadLayout(64, 8, 128, 16))))
    with open(os.path.join(folder, "notes.json"), "w") as file:
        file.write("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = CostModel.default(layout)
    assert (model.layout, model.device) == (expected, gpu.device_kind)
    q_heads, kv_heads, head_dim, page_size = layout
    forest = Forest.from_nodes([-1], [300], [0], page_size=page_size)
    assert make_plan(forest, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim).cost_model == model


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{}"),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "codec_jax cost model 1"})),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text(path.read_text().replace("NVIDIA X-1 (64 GB)", "NVIDIA X-2")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["damaged", "older", "no text", "another GPU's", "a folder"],
)
def test_a_table_of_other_heads_that_cannot_be_read_is_left_out_with_a_warning(gpu, spoil):
    folder, layouts = Path(cost.user_folder()), (HeadLayout(40, 8, 128, 16), HeadLayout(8, 8, 128, 16))
    bad, good = (replace(MODEL, device=gpu.device_kind, **layout._asdict()) for layout in layouts)
    for model in (bad, good):
        model.save(folder / cost.file_name(model.device, model.layout))
    path = folder / cost.file_name(bad.device, bad.layout)
    spoil(path)
    for name in ("064q_8kv", "0q_8kv", "32q_0kv"):  # no names of tables
        (folder / path.name.replace("40q_8kv", name)).write_text("{}")
    with pytest.warns(UserWarning, match=rf"{path.name}: expected .*; or remove it: plans for other heads do without"):
        assert CostModel.default(LAYOUT) == good
    # A plan for just these heads does not do without what was measured for them.
    with pytest.raises(ValueError, match=rf"{path.name}: expected "):
        CostModel.default(bad.layout)


def test_a_table_of_these_heads_comes_before_what_the_user_measured_of_others(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "_SHIPPED", str(tmp_path / "shipped"))
    shipped, other = replace(MODEL, device=gpu.device_kind), replace(MODEL, device=gpu.device_kind, num_q_heads=64)
    shipped.save(tmp_path / "shipped" / cost.file_name(gpu.device_kind, shipped.layout))
    other.save(os.path.join(cost.user_folder(), cost.file_name(gpu.device_kind, other.layout)))
    assert CostModel.default(LAYOUT) == shipped
    assert CostModel.default(LAYOUT._replace(num_q_heads=40)) == other


def test_every_table_of_the_package_is_whole_and_named_for_what_it_holds():
    names = os.listdir(cost._SHIPPED) if os.path.isdir(cost._SHIPPED) else []
    for name in names:
        model = CostModel.load(os.path.join(cost._SHIPPED, name))
        assert name == cost.file_name(model.device, model.layout, model.dtype)
        assert model.date
