"""Tables say what rows say, never rounded in our favour, and committed pages are those of committed results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import report, tables
from benchmarks.pages import CLAIMS, PAGES
from benchmarks.report import ROOT
from benchmarks.rounding import at_least, at_most
from benchmarks.workloads import PAPER, PROBE

COMMON = {"device": "NVIDIA H200", "date": "2026-01-02", "versions": {"jax": "0.11.2"}}
COMMON |= {"heads": "32/8", "head_dim": 128, "page_size": 16}


def cells(text: str) -> list[list[str]]:
    """Return the cells of all tables of a text, a list for each line below a head."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n") if line.startswith("|")]
    rules = [i for i, line in enumerate(lines) if line[0] == "---"]
    return [line for i, line in enumerate(lines) if i not in rules and i + 1 not in rules]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with pages that quote a row of a figure, and no results."""
    for folder in ("benchmarks/results", "docs/results"):
        (tmp_path / folder).mkdir(parents=True)
    for page in report.QUOTING:
        (tmp_path / page).write_text("before\n<!-- report: batch | two -->\nold\n<!-- end of report -->\nafter\n")
    return tmp_path


def write(root: Path, stem: str, rows: list[dict]) -> None:
    (root / f"benchmarks/results/{stem}.json").write_text(json.dumps({"rows": [COMMON | row for row in rows]}))


# ---------------------------------------------------------------------- numbers


def test_numbers_are_never_rounded_in_our_favour():
    values = {1.0376: ("1.03", "1.04"), 1.0301: ("1.03", "1.04"), 4 * (1 - 1e-15): ("4.00", "4.00"), None: ("–", "–")}
    assert {value: (at_least(value, 2), at_most(value, 2)) for value in values} == values


TIMES = [
    {"name": "120000 shared, 16 x 1024", "kernel_us": 2.01, "roofline_us": 1.0, "cudnn_us": 5.09},
    {"name": "two", "kernel_us": 8.0, "roofline_us": 1.0, "cudnn_us": 20.0, "flashinfer_decode_us": 4.0},
    {"name": "three", "kernel_us": None, "error": "failed"},
]
TIMES = [COMMON | row for row in TIMES]


def test_times_are_ours_up_and_others_down_and_means_are_geometric():
    assert cells(tables.times(TIMES)) == [
        ["16 requests: 120,000 shared, 1,024 each", "2.1", "1.0", "–", "5.0"],
        ["two", "8.0", "1.0", "4.0", "20.0"],
        ["three", "–", "–", "–", "–"],
    ]
    # (2.01 x 8) ** 0.5 of the roofline, 1.01 to 7 us over it; (5.09 / 2.01 x 2.5) ** 0.5 of our time.
    assert numbers(tables.summary(TIMES)) == [2, 4.01, 1.1, 7.0, 0.5, 0.5, 0.5, 2.51, 2.5, 2.53]
    unlike = [TIMES[1] | {"head_dim": 64}, TIMES[1] | {"heads": "16/8", "page_size": 64}]
    assert [line[0] for line in cells(tables.times(unlike))] == [
        "two (32/8 heads, head size 64)",
        "two (16/8 heads, pages of 64)",
    ]


def test_the_fastest_configurations_of_a_peer_are_counted_and_failures_named():
    decode = [{"a": 2.0, "b": 1.0}, {"a": 3.0, "b": "ValueError: no"}, {"a": 5.0, "b": 4.0}, {"a": "out of luck"}]
    rows = [{"name": "n", "flashinfer_decode_configurations": each} for each in decode]
    fastest, failed = tables.peculiarities([*rows, {"name": "m", "cudnn_error": "no room"}])
    assert "FlashInfer decode: b (2), a (1)" in fastest
    assert "cuDNN: m (no room)" in failed


def test_the_crossover_is_the_fastest_plain_decode_over_ours_and_counts_what_is_behind():
    row = {"kernel_us": 10.0, "unshared_us": 30.0, "cudnn_us": 20.0}
    assert [tables.gain(row | more) for more in ({}, {"cudnn_us": None}, {"flashinfer_decode_us": 5.0})] == [2, 3, 0.5]
    assert tables.gain(row | {"kernel_us": None}) is tables.gain({"kernel_us": 10.0, "cudnn_us": None}) is None
    rows = [
        {"series": "group 4, 256 own", "x": x, "requests": requests, "kernel_us": 10.0, "unshared_us": us}
        for x, requests, us in ((0, 8, 9.6), (0, 1, 9.8), (512, 8, 25.0), (512, 1, None))
    ]
    rows[1]["flashinfer_decode_us"] = 9.5
    said = tables.crossover([*rows, {"name": "failed", "kernel_us": None}])
    assert cells(said) == [["1 request", "0.95", "–"], ["8 requests", "0.96", "2.50"]]
    # How many of how many are behind by more than 3%, and what the other takes at least.
    assert [numbers(line) for line in said.split("\n\n")[2:]] == [[2, 3, 3, 0.95], [2, 3, 3, 0.95], [1, 3, 3, 0.96]]


def test_traffic_and_decode_steps_stand_beside_each_other():
    row = {"name": "n", "unique_bytes": 10**8, "unshared_bytes": 3 * 10**8, "dram_read_bytes": 101 * 10**6}
    row |= {"l2_to_sm_bytes": 2 * 10**8, "flashinfer_decode_dram_read_bytes": None}
    row |= {"flashinfer_decode_l2_to_sm_bytes": 1_409_000_000}
    assert cells(tables.traffic([row])) == [["n", "100", "1.01", "2.00", "–", "14.09", "3.00"]]
    case = {"requests": 16, "document_tokens": 1000, "floor_us": 1509.0}
    shared = case | {"variant": "shared", "wall_us": 2001.0, "attention_us": 900.0, "products_us": 700.0}
    rows = [shared, case | {"variant": "unshared", "wall_us": 7009.0}, case | {"variant": "cudnn", "wall_us": None}]
    assert cells(tables.decoding(rows)) == [
        ["16 requests over 1,000 tokens", "2.01", "7.00", "–", "1.50", "0.90", "0.70", "–"]
    ]
    models = [shared | {"model": "a", "experts_us": 0.0}, shared | {"model": "b", "experts_us": 401.0}]
    assert cells(tables.decoding(models)) == [
        [f"{model}, 16 requests over 1,000 tokens", "2.01", "1.50", "0.90", "0.70", experts, "–"]
        for model, experts in (("a", "–"), ("b", "0.41"))
    ]


def test_of_vllms_runs_the_least_time_and_kernels_stand_beside_ours():
    def step(variant: str, requests: int, **us: float) -> dict:
        return {"variant": variant, "requests": requests, "document_tokens": 1000, **us}

    rows = [
        step("shared", 64, wall_us=5001.0, kernel_us=4501.0, attention_us=2001.0),
        step("shared", 16, wall_us=4000.0, kernel_us=3900.0, attention_us=1000.0),
        step("vLLM", 16, wall_us=4409.0),
        step("vLLM", 64, wall_us=9009.0),
        step("vLLM, cascade", 64, wall_us=7009.0, kernel_us=6509.0, attention_us=3509.0),
        step("vLLM, cascade", 64, wall_us=8009.0, kernel_us=6409.0, attention_us=3409.0),
        step("vLLM", 16, wall_us=4509.0, kernel_us=4209.0, attention_us=1509.0),
    ]
    assert cells(tables.decoding_vllm(rows)) == [
        ["16 requests over 1,000", "4.00", "3.90", "1.00", "4.40", "4.20", "1.50", "–", "–", "–", "1.10x"],
        ["64 requests over 1,000", "5.01", "4.51", "2.01", "9.00", "–", "–", "7.00", "6.40", "3.40", "1.40x"],
    ]


def test_ablation_has_a_line_for_each_forest_and_the_error_of_predictions():
    variants = [("sharing", "tree", "neither", 30.0, 60.0), ("sharing", "tree", "both", 10.0, 11.0)]
    variants += [("fixed", "chain", "1 slice", None, 9.0), ("fixed", "chain", "aligned", 20.0, 19.0)]
    fields = "part", "name", "variant", "kernel_us", "predicted_us"
    rows = [dict(zip(fields, each, strict=True)) for each in variants]
    assert cells(tables.ablation(rows)) == [["tree", "30.0", "10.0"], ["chain", "–", "20.0"]]
    assert numbers(tables.predictions(rows)) == [7.5, 2, 10.0]


def test_plans_ceilings_batches_and_blocks_have_a_line_each():
    plan = {"name": "n", "requests": 4, "nodes": 5, "plan_us": 1201.0, "attention_us": 57_600.0}
    plan |= {"max_over_mean_load": {"aligned": 1.0001, "paper": 1.5, "1": 16.5}}
    assert cells(tables.planning([plan])) == [["n", "4", "5", "1.21", "2.09", "1.001", "1.500", "16.500"]]
    ceiling = {"device": "NVIDIA H200", "read_bytes_per_us": 4.299e6, "flops_per_us": 816.6e6}
    assert cells(tables.ceilings([ceiling])) == [["NVIDIA H200", "4.29", "4.52", "816", "700"]]
    batch = {"tokens": 64, "tokens_before_the_first_difference": [64, 7, 64], "composition": "all"}
    batch |= {"model": "m", "implementation": "xla", "logits_difference": 0.012, "logprob_difference": 0.25}
    expected = ["m", "xla", "aligned", "all", "2 of 3", "7 of 64", "1.2e-02", "2.5e-01", "–"]
    assert cells(tables.invariance([batch])) == [expected]
    batch |= {"policy": "invariant", "same_bits": [True, False, True]}
    assert cells(tables.invariance([batch])) == [[*expected[:2], "invariant", *expected[3:-1], "2 of 3"]]
    block = {"head_dim": 64, "table": "SMALL", "block_tokens": 128, "roofline_us": 2.0}
    times = {("a", 2): 4.0, ("b", 2): 16.0, ("a", 3): 8.0, ("b", 3): None}
    blocks = [block | {"name": name, "stages": stages, "kernel_us": us} for (name, stages), us in times.items()]
    assert cells(tables.tuning(blocks)) == [["64", "small", "128", "2", "4.000"]]


def test_figures_are_summed_up_in_a_line_each(root):
    write(root, "batch_h200", [{"kernel_us": 2.0, "cudnn_us": 4.0}, {"kernel_us": 2.0, "cudnn_us": 16.0}])
    write(root, "depth_h200", [{"kernel_us": 2.0, "flashinfer_decode_us": 3.0}])
    batch, depth = cells(report.figures(report.loader(root), "results"))
    assert batch[1:] == ["2", "–", "–", "4.00x (2.00x to 8.00x)"]
    assert depth[1:] == ["1", "–", "1.50x (1.50x to 1.50x)", "–"]


def test_claims_are_set_beside_what_was_measured(root):
    paper = {"name": PAPER[0].name, "kernel_us": 10.0, "por_us": 1.0, "flashinfer_decode_us": 40.0}
    paper |= {"flashinfer_cascade_us": 20.0}
    other = {"name": PAPER[1].name, "kernel_us": 20.0, "por_us": 2.0, "flashinfer_decode_us": 20.0}
    # A forest that is not in the paper's sweeps does not count.
    write(root, "attention_h200", [paper, other, paper | {"name": PROBE[0].name, "flashinfer_decode_us": 1000.0}])
    reads = {"l2_to_sm_bytes": 2, "dram_read_bytes": 10}
    write(root, "traffic_peers_h200", [reads | {f"flashinfer_decode_{field}": 18 for field in reads}])
    times = ((1024, 1.0), (50_000, 100.1))
    write(root, "length_h200", [{"x": x, "kernel_us": us, "flashinfer_decode_us": 450.9} for x, us in times])
    write(root, "planning", [{"requests": 64, "plan_us": 1234.0, "attention_us": 57_600.0}])
    fixed = [("tree", (300.0, 110.0, 100.0)), ("chain", (200.0, 98.0, 100.0))]
    variants = [(name, each) for name, us in fixed for each in zip(("1 slice", "8 slices", "aligned"), us, strict=True)]
    rows = [{"part": "fixed", "name": name, "variant": way, "kernel_us": us} for name, (way, us) in variants]
    write(root, "ablation_h200", [*rows, {"part": "sharing", "name": "tree", "variant": "both", "kernel_us": 1.0}])
    steps = {(16, "shared"): 10.0, (16, "unshared"): 35.9, (64, "shared"): 10.0, (64, "unshared"): 99.0}
    rows = [{"requests": requests, "variant": way, "wall_us": us} for (requests, way), us in steps.items()]
    write(root, "decoding_120000_h200", rows)
    expected = [
        {"cascade": "2.00x (2.00x to 2.00x)", "decode": "2.00x (1.00x to 4.00x)"},
        {"l2_to_sm_bytes": "9.00x (9.00x to 9.00x)", "dram_read_bytes": "1.80x (1.80x to 1.80x)"},
        {"long": "4.5x", "ours": "101", "theirs": "450"},
        {"median_por": "11.2%", "max_por": "11.2%"},
        {"plan": "1.24 ms", "plan_share": "2.15%"},
        {"split": "1.03x (0.98x to 1.10x)", "none": "2.44x (2.00x to 3.00x)"},
        {"step_16": "3.5x", "step_64": "9.9x"},
    ]
    made = cells(report.claims(report.loader(root)))
    assert [line[1] for line in made] == [
        claim.format(**values) for claim, values in zip(CLAIMS.values(), expected, strict=True)
    ]


# ---------------------------------------------------------------------- pages


def test_committed_pages_are_what_the_report_makes_of_the_committed_results():
    old = report.stale(ROOT)
    assert not old, f"{', '.join(old)}: run `python -m benchmarks.report --draw`"


def test_every_result_file_is_on_a_page_and_measured_by_a_command_that_there_is():
    files = {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    listed = {stem: command for page in PAGES.values() for stem, command in page.files.items()}
    assert {stem for stem in files if not stem.startswith("tree_of_thoughts")} == set(listed)
    assert all((ROOT / f"benchmarks/{command.split()[0]}.py").exists() for command in listed.values())


def test_a_page_follows_its_results_and_check_names_what_is_out_of_date(root, monkeypatch):
    def command(*options: str) -> None:
        monkeypatch.setattr("sys.argv", ["report", *options])
        report.main()

    monkeypatch.setattr(report, "ROOT", root)
    write(root, "batch_h200", [row | {"series": "s", "x": 4} for row in TIMES])
    command("--draw")
    command("--check")
    made = sorted(path.name for path in (root / "docs/results").glob("*.svg"))
    assert made == ["batch.svg", "forest_tree_of_thoughts.svg"]
    page, quoting = (root / "docs/results/batch.md").read_text(), (root / "README.md").read_text()
    assert cells(page)[1:2] == cells(quoting) == [["two", "8.0", "1.0", "4.0", "20.0"]]
    assert 4.01 in numbers(page)
    for shown in ("(batch.svg)", "figure batch --peers --json benchmarks/results/batch_h200.json", "NVIDIA H200"):
        assert shown in page
    assert quoting.startswith("before\n<!-- report: batch | two -->\n")
    assert quoting.endswith("<!-- end of report -->\nafter\n")
    assert "old" not in quoting

    (root / "docs/results/gone.md").write_text("of a page that is no more")
    (root / "README.md").write_text(quoting.replace("8.0", "7.0"))
    write(root, "batch_h200", [row | {"series": "s", "x": 5} for row in TIMES])  # which only the drawing shows
    wanted = r"README.md, docs/results/gone.md, docs/results/batch.svg\. `python -m benchmarks.report --draw`"
    with pytest.raises(SystemExit, match=wanted):
        command("--check")


def test_a_chart_in_letters_has_a_bar_for_each_method_and_says_what_is_better(root):
    write(root, "attention_h200", [TIMES[1] | {"name": PROBE[1].name}, TIMES[0] | {"name": PROBE[2].name}])
    said = report.region("chart", "64 x 1024", results="docs/results", load=report.loader(root))
    fence, title, _, *bars, end = said.split("\n")
    assert (fence, end) == ("```text", "```")
    assert "64 requests: 32,768 shared" in title
    assert "less is better" in title
    assert [(bar.split("█")[0].strip(), bar.count("█"), bar.split()[-1]) for bar in bars] == [
        ("codec_jax", 20, "8.0"),
        ("FlashInfer decode", 10, "4.0"),
        ("cuDNN", 50, "20.0"),
    ]


def test_a_region_that_cannot_be_made_is_an_error(root):
    begin, end = "<!-- report: batch{} -->\n", "<!-- end of report -->"
    wrong = {
        "es": "a page or a summary",
        " | no row": "and its rows, got 'no row'",
        " -->\n<!-- end of report -->\n<!-- report: chart | no row": "got 'no row'",
        " -->\n<!-- report: depth": "expected '<!-- end",
    }
    for text, error in wrong.items():
        with pytest.raises(ValueError, match=error):
            report.render(begin.format(text) + end, "results", report.loader(root))


def test_what_writes_nothing_draws_nothing(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("sys.argv", ["report", "--check", "--draw"])
    monkeypatch.setattr(report, "draw_all", lambda root: pytest.fail("drawn"))
    with pytest.raises(SystemExit):
        report.main()
    assert "not allowed with argument" in capsys.readouterr().err
