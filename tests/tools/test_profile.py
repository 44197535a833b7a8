"""What `codec_jax.profile` measures, and what it makes of the times; the clock itself needs a GPU."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from costs import cost_model

from codec_jax import CostModel, profile
from codec_jax.planning.cost import HeadLayout, file_name
from codec_jax.profile import MASKED, ONE_TILE, SEVERAL, TOKENS, Task, Times
from pallas_kernels import AMPERE, HOPPER, Tiling
from pallas_kernels.plan_format import Page

LAYOUTS = [
    HeadLayout(32, 8, 128, 16),
    HeadLayout(28, 4, 128, 64),
    HeadLayout(16, 16, 64, 256),
    HeadLayout(32, 1, 256, 32),
]


def tiling(layout: HeadLayout) -> Tiling:
    """As on a Hopper GPU, with as many thread blocks as have work."""
    device = SimpleNamespace(core_count=profile.busy(layout, 132))
    return HOPPER.tiling(profile.heads_of(layout), device)


def ampere_tiling(layout: HeadLayout) -> Tiling:
    """As on an A100."""
    wanted = AMPERE.tiling(profile.heads_of(layout), SimpleNamespace(core_count=108, compute_capability="8.0"))
    return wanted._replace(num_ctas=profile.busy(layout, wanted.num_ctas))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tiling", [tiling, ampere_tiling])
def test_every_thread_block_has_the_work_of_the_task_and_reads_its_own_or_the_same(layout, tiling):
    wanted = tiling(layout)
    num_ctas = wanted.num_ctas
    assert num_ctas > 0.9 * 108
    for task in (task for task in profile.tasks(wanted.lanes) if task.tokens <= 4096):
        forest, plan = profile.plan_of(task, layout, wanted)
        segments = plan.arrays.used_segments
        assert len(segments.begin) == num_ctas * task.segments
        pages = Page(*np.moveaxis(plan.arrays.block_pages, -1, 0)).page_id
        read = [set(pages[lo:hi].reshape(-1).tolist()) for lo, hi in zip(segments.begin, segments.end, strict=True)]
        heads = [{i for i in range(len(read)) if segments.head[i] == head} for head in range(layout.num_kv_heads)]
        for of_head in heads:
            union = set().union(*(read[i] for i in of_head))
            assert len(union) == sum(len(read[i]) for i in of_head) / (len(of_head) if task.cached else 1)
        # All rows of all tiles belong to requests.
        assert plan.arrays.used_rows[0] == plan.arrays.num_tiles * plan.arrays.tile_rows
        assert forest.used_pages.max() < -(-max(TOKENS) // layout.page_size) * (num_ctas // layout.num_kv_heads)


def test_a_plan_with_other_work_is_not_timed(monkeypatch):
    monkeypatch.setattr(profile, "forest_of", lambda *_: profile.Forest.from_nodes([-1], [512], [0] * 16))
    with pytest.raises(RuntimeError, match=r"1 segment of .* tokens, their own: expected the same work"):
        profile.plan_of(Task(1, 512), LAYOUTS[0], tiling(LAYOUTS[0]))


POR_US = 4.0  # of the 10 that a call takes


def times_of(model: CostModel) -> dict[Task, Times]:
    """What a GPU of 128 thread blocks would take that follows a model exactly."""
    times = {}
    for task in profile.tasks(2):
        wide = task.tiles == 2
        cached = float(model.kv_us(wide, task.tokens, cached=True)) * (model.masked if task.masked else 1)
        memory = float(model.kv_us(wide, task.tokens, cached=False))
        per_segment = (cached if task.cached else memory) + model.segment_us[wide]
        merges = LAYOUTS[0].num_kv_heads if task.divided else 128 * task.segments * task.tiles
        por = POR_US + model.stream_us * (merges - LAYOUTS[0].num_kv_heads)
        times[task] = Times(model.launch_us - POR_US + task.segments * per_segment, por)
    return times


MODEL = cost_model(LAYOUTS[0], narrow=(2.0, 1.0), wide=(2.2, 1.8), masked=1.3, segment=(3.25, 7.5))


def test_the_costs_of_a_gpu_are_found_again_from_its_times():
    fitted = profile.fit(times_of(MODEL), LAYOUTS[0], "a GPU", 128, 2)
    for name in ("segment_us", "launch_us", "stream_us"):
        assert getattr(fitted, name) == pytest.approx(getattr(MODEL, name), abs=1e-3)
    assert fitted.masked == pytest.approx(MODEL.masked, abs=1e-3)
    for cached in (False, True):
        for wide in (False, True):
            np.testing.assert_allclose(
                fitted.kv_us(wide, np.asarray(TOKENS), cached=cached),
                MODEL.kv_us(wide, np.asarray(TOKENS), cached=cached),
                rtol=1e-3,
            )
    assert fitted.device == "a GPU"
    assert fitted.layout == LAYOUTS[0]
    assert {"python", "jax", "jaxlib"} <= dict(fitted.versions).keys()


def test_the_costs_of_kernels_with_one_lane_are_those_of_one_tile():
    times = {task: us for task, us in times_of(MODEL).items() if task in profile.tasks(1)}
    fitted = profile.fit(times, LAYOUTS[0], "a GPU", 128, 1)
    assert fitted.segment_us == pytest.approx((MODEL.segment_us[0],) * 2, abs=1e-3)
    for cached in (False, True):
        one = MODEL.kv_us(False, np.asarray(TOKENS), cached=cached)
        np.testing.assert_allclose(fitted.kv_us(False, np.asarray(TOKENS), cached=cached), one, rtol=1e-3)
        np.testing.assert_allclose(fitted.kv_us(True, np.asarray(TOKENS), cached=cached), 2 * one, rtol=1e-3)


def test_noise_does_not_spoil_a_table():
    draw = np.random.default_rng(0)
    for _ in range(20):
        noisy = {task: Times(*draw.uniform(0.7, 1.3, 2) * us) for task, us in times_of(MODEL).items()}
        profile.fit(noisy, LAYOUTS[0], "a GPU", 128, 2)


def test_columns_without_a_time_are_left_out_and_too_few_raise():
    times = times_of(MODEL)
    del times[Task(2, 512, cached=True)]
    assert profile.fit(times, LAYOUTS[0], "a GPU", 128, 2).tokens == TOKENS[1:]
    for lost in ([MASKED], *([task] for task in SEVERAL.values()), [ONE_TILE]):
        with pytest.raises(ValueError, match=r"times: .*tokens, "):
            profile.fit({key: us for key, us in times.items() if key not in lost}, LAYOUTS[0], "a GPU", 128, 2)
    with pytest.raises(ValueError, match=r"times: "):
        profile.fit({}, LAYOUTS[0], "a GPU", 128, 2)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU whose times follow the model, but for one measurement that fails."""

    class Clock:
        def __init__(self, layout: HeadLayout, tiling: Tiling) -> None:
            assert (layout, tiling.num_ctas) == (LAYOUTS[0], 132)
            self.num_ctas = 128

        def measure(self, task: Task) -> Times:
            if task == Task(1, 512):
                raise RuntimeError("out of luck")
            return times_of(MODEL)[task]

    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA X", core_count=132, compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(profile, "Clock", Clock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_command_prints_a_table_and_writes_it_where_it_is_found(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["profile", "--json", str(tmp_path / "mine.json")])
    profile.main()
    captured = capsys.readouterr()
    found = CostModel.default(LAYOUTS[0])
    assert found == CostModel.load(tmp_path / "mine.json")
    assert found.tokens == TOKENS[1:]
    assert (tmp_path / "codec_jax" / file_name("NVIDIA X", LAYOUTS[0])).exists()
    assert "out of luck" in captured.err + captured.out
    lines = captured.out.splitlines()
    at = lines.index("K and V of their own")
    assert lines[at + 1].split() == ["n_q", *map(str, TOKENS[1:])]
    assert lines[at + 3].split() == ["128", *(f"{us:.2f}" for us in found.memory_us[1])]


def test_a_layout_that_the_kernels_do_not_take_is_refused(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["profile", "--head-dim", "320"])
    with pytest.raises(SystemExit):
        profile.main()
    assert "it takes head sizes 64, 72, 80, 88, 96, 104, 112, 120, 128, 256" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["profile"])
    with pytest.raises(SystemExit):
        profile.main()
    assert "expected a GPU" in capsys.readouterr().err


def test_kernels_of_the_flush_are_not_counted(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    ran: list[tuple[str, float]] = []
    ms = iter([9.0, 9.0, 9.0, 0.004, 0.002, 0.003])  # warming up, the call alone, warming up again, and three runs

    def measure(call, aggregate, iterations=1):
        call()
        runs = []
        for _ in range(iterations):
            ran.clear()
            call()
            runs.append(list(ran))
        return lambda: (None, runs if iterations > 1 else runs[0])

    monkeypatch.setattr(profiler, "measure", measure)
    monkeypatch.setattr(profile, "REPEATS", 3)
    call, flush = (lambda: ran.extend([("pac", next(ms)), ("por", 0.001)])), (lambda: ran.append(("max", 0.1)))
    assert profile.kernel_times(call, flush) == pytest.approx((3.0, 1.0))
    ms = iter([1.0] * 9)
    with pytest.raises(RuntimeError, match=r"CUPTI: expected more kernels"):
        profile.kernel_times(call, lambda: None)
    with pytest.raises(RuntimeError, match=r"CUPTI: expected the kernels of a call, got none"):
        profile.kernel_times(lambda: None, flush)
