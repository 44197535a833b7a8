"""The pages are what the report makes of the committed results; what is missing says so."""

import json
from pathlib import Path

import pytest

from benchmarks import report, tables
from benchmarks.claims import CLAIMS, claims_table
from benchmarks.report import PAGES, RESULTS, SOURCES, SUMMARIES, render
from benchmarks.rounding import at_least, at_most
from benchmarks.workloads import PAPER, PROBE

COMMON = {"device": "NVIDIA H200", "date": "2026-01-02", "versions": {"jax": "0.11.2"}, "heads": "32/8"}


def write(results: Path, stem: str, *rows: dict) -> None:
    (results / f"{stem}.json").write_text(json.dumps({"rows": [COMMON | row for row in rows]}))


def page(name: str) -> str:
    return f"before\n<!-- report: {name} -->\nold\n<!-- end of report -->\nafter\n"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_committed_pages_are_what_the_report_makes_of_the_committed_results(path):
    assert render(path.read_text(), path.parent, RESULTS) == path.read_text()


def test_every_source_has_a_place_in_a_page():
    text = "".join(path.read_text() for path in PAGES)
    assert [name for name in [*SUMMARIES, *SOURCES] if f"<!-- report: {name} -->" not in text] == []


def test_what_is_not_measured_says_so_with_its_command(tmp_path):
    for name, source in SOURCES.items():
        made = render(page(name), tmp_path, tmp_path)
        assert made == (
            f"before\n<!-- report: {name} -->\n\nNot measured yet: `python -m {source.command} "
            f"--json benchmarks/results/{source.stems[0]}.json`\n\n<!-- end of report -->\nafter\n"
        )
    claims = render(page("claims"), tmp_path, tmp_path)
    assert claims.count("not measured yet") == len(CLAIMS)
    assert "\nNot measured yet.\n" in render(page("figures"), tmp_path, tmp_path)


def test_a_region_fills_in_when_its_result_file_is_there_and_the_rest_of_the_page_stays(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    first = {"name": "one", "kernel_us": 2.0, "roofline_us": 1.0, "cudnn_us": 5.04, "flashinfer_decode_us": None}
    first["flashinfer_decode_error"] = "out of luck"
    second = {"name": "two", "kernel_us": 8.0, "roofline_us": 1.0, "cudnn_us": 20.0, "flashinfer_decode_us": 4.0}
    write(results, "batch_h200", first, second)
    made = render(page("batch"), tmp_path, results)
    assert made.startswith("before\n")
    assert made.endswith("<!-- end of report -->\nafter\n")
    assert "old" not in made
    for shown in (
        "| forest | codec_jax | roofline | cuDNN | FlashInfer decode |\n|---|---|---|---|---|\n",
        "| one | 2.0 | 1.0 | 5.0 | – |",
        "| two | 8.0 | 1.0 | 20.0 | 4.0 |",
        "No time of FlashInfer decode: one (out of luck).",
        "Geometric means over 2 forests: 4.00x the roofline, 2.50x faster than cuDNN (2.50x to 2.52x), "
        "0.50x faster than FlashInfer decode (0.50x to 0.50x).",
        "From [batch_h200.json](results/batch_h200.json): NVIDIA H200, JAX 0.11.2, 2026-01-02.",
    ):
        assert shown in made
    assert "![" not in made
    assert render(made, tmp_path, results) == made
    (results / "batch_h200.svg").touch()
    assert "![batch](results/batch_h200.svg)" in render(page("batch"), tmp_path, results)


@pytest.mark.parametrize(
    ("value", "down", "up"),
    [(1.0376, "1.03", "1.04"), (1.0301, "1.03", "1.04"), (4 * (1 - 1e-15), "4.00", "4.00"), (0.29, "0.29", "0.29")],
)
def test_ratios_are_never_rounded_in_our_favour(value, down, up):
    assert (at_least(value, 2), at_most(value, 2)) == (down, up)


def test_figures_are_summed_up_in_a_line_each(tmp_path):
    write(tmp_path, "batch_h200", *({"kernel_us": 2.0, "cudnn_us": us} for us in (4.0, 16.0)), {"kernel_us": None})
    write(tmp_path, "depth_h200", {"kernel_us": 2.0, "cudnn_us": None, "flashinfer_decode_us": 3.0})
    lines = render(page("figures"), tmp_path, tmp_path).split("\n")
    assert lines[5:7] == [
        "| [Attention time and batch size](batch_h200.json) | 2 | 4.00x (2.00x to 8.00x) | – | – |",
        "| [Attention time and depth of the tree](depth_h200.json) | 1 | – | 1.50x (1.50x to 1.50x) | – |",
    ]
    assert "On NVIDIA H200, JAX 0.11.2, 2026-01-02." in lines


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "<!-- report: nothing -->\n<!-- end of report -->",
            "expected a region of claims, figures, probes, .*, got nothing",
        ),
        ("<!-- report: batch -->\nold", "expected '<!-- end of report -->' after every"),
        ("<!-- report: batch -->\n<!-- report: depth -->\n<!-- end of report -->", "expected '<!-- end of report -->'"),
    ],
)
def test_a_region_that_cannot_be_made_is_an_error(tmp_path, text, error):
    with pytest.raises(ValueError, match=error):
        render(text, tmp_path, tmp_path)


def test_drawings_are_made_of_the_results_that_are_there(tmp_path):
    shape = {"head_dim": 128, "dtype": "bfloat16", "page_size": 16}
    row = {"name": "n", "kernel_us": 2.0, "unshared_us": 3.0, "roofline_us": 1.0, "requests": 4} | shape
    write(tmp_path, "batch_h200", row | {"series": "s", "x": 4})
    write(tmp_path, "crossover_group1_own256_h200", row | {"series": "group 1, 256 own", "x": 0})
    report.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["batch_h200.svg", "crossover_h200.svg"]


# ---------------------------------------------------------------------- tables


def test_traffic_is_shown_over_the_unique_bytes():
    row = {"name": "n", "unique_bytes": 10**8, "unshared_bytes": 3 * 10**8, "dram_read_bytes": 101 * 10**6}
    row |= {"l2_to_sm_bytes": 2 * 10**8, "flashinfer_decode_dram_read_bytes": None}
    assert tables.traffic([row]).split("\n") == [
        "| forest | unique KV, MB | without sharing | codec_jax, DRAM | codec_jax, L2 to SM | FlashInfer decode, DRAM "
        "| FlashInfer decode, L2 to SM |",
        "|---|---|---|---|---|---|---|",
        "| n | 100 | 3.00 | 1.010 | 2.000 | – | – |",
    ]


def test_the_crossover_has_a_table_for_each_group_and_counts_what_is_behind():
    rows = [
        {"series": "group 4, 256 own", "x": x, "requests": requests, "kernel_us": 10.0, "unshared_us": us}
        for x, requests, us in ((0, 8, 9.6), (0, 1, 9.8), (512, 8, 25.0), (512, 1, None))
    ]
    rows[1]["flashinfer_decode_us"] = 9.5
    assert tables.crossover(rows) == "\n".join(
        [
            "group 4, 256 own:",
            "",
            "| requests | 0 shared | 512 shared |",
            "|---|---|---|",
            "| 1 | 0.95 | – |",
            "| 8 | 0.96 | 2.50 |",
            "",
            "Cells more than 3% behind: 2 of 3 are behind plain decode (0.95x at least); "
            "2 of 3 are behind plain decode that reads the same pages (0.95x at least); "
            "1 of 3 are behind the same kernels without sharing (0.96x at least).",
        ]
    )


def test_the_fastest_configurations_of_a_peer_are_counted():
    decode = [
        {"a": 2.0, "b": 1.0},
        {"a": 3.0, "b": "ValueError: no kernel"},
        {"a": 5.0, "b": 4.0},
        {"a": "out of luck"},
    ]
    rows = [{"kernel_us": 1.0, "flashinfer_decode_configurations": each} for each in decode]
    rows += [{"flashinfer_cascade_configurations": {"fa2": 1.0}}, {"kernel_us": 2.0}]
    assert tables.fastest(rows) == [
        "Fastest configurations, and of how many forests: FlashInfer decode: b (2), a (1); FlashInfer cascade: fa2 (1)."
    ]
    assert tables.fastest(rows[-1:]) == []


def test_block_sizes_have_a_line_for_every_config_that_serves_all_forests():
    common = {"head_dim": 64, "table": "SMALL", "block_tokens": 128, "roofline_us": 2.0}
    times = {("a", 2): 4.0, ("b", 2): 16.0, ("a", 3): 8.0, ("b", 3): None}
    rows = [common | {"name": name, "stages": stages, "kernel_us": us} for (name, stages), us in times.items()]
    other = {"head_dim": 128, "table": "LARGE", "name": "a", "stages": 2, "kernel_us": 3.0}
    assert tables.tuning([*rows, common | other]).split("\n")[2:] == [
        "| 64 | SMALL | 128 | 2 | 4.000 |",
        "| 128 | LARGE | 128 | 2 | 1.500 |",
    ]


def test_decode_steps_stand_beside_each_other_in_milliseconds():
    case = {"model": "qwen3-4b", "requests": 16, "document_tokens": 100, "floor_us": 1500.0}
    shared = case | {"variant": "shared", "wall_us": 2000.0, "attention_us": 900.0, "products_us": 700.0}
    rows = [shared, case | {"variant": "cudnn", "wall_us": None, "attention_us": 5.0}]
    assert tables.decoding(rows).split("\n")[2:] == [
        "| qwen3-4b, 16 requests over 100 tokens | 2.000 | – | 1.500 | 0.900 | 0.700 | – |"
    ]


def test_ceilings_stand_beside_the_rates_of_rooflines():
    row = {"device": "NVIDIA H200", "read_bytes_per_us": 4.294e6, "flops_per_us": 816.6e6}
    assert tables.ceilings([row]).split("\n")[2:] == ["| NVIDIA H200 | 4.29 | 817 | 4.52 | 700 |"]


def test_batches_of_other_composition_say_how_far_they_are_apart():
    agree = {"tokens": 64, "tokens_before_the_first_difference": [64, 7, 64]}
    row = agree | {"model": "m", "implementation": "mosaic", "composition": "all"}
    row |= {"logits_difference": 0.012, "logprob_difference": 0.25}
    assert tables.invariance([row]).split("\n") == [
        "| model | path | batches | prompts with the same 64 tokens | tokens agree for, at least | logits apart "
        "| log-probabilities apart |",
        "|---|---|---|---|---|---|---|",
        "| m | mosaic | all | 2 of 3 | 7 | 1.2e-02 | 2.5e-01 |",
    ]


def test_plans_that_could_not_be_extended_are_marked():
    row = {"name": "n", "requests": 4, "nodes": 5, "plan_us": 1200.0, "replan_us": 1500.0, "roofline_us": 100.0}
    row |= {"replan_extends": False, "most_load": 3.0, "mean_load": 2.0}
    assert tables.planning([row, row | {"replan_us": 300.0, "replan_extends": True}]).split("\n")[2:] == [
        "| n | 4 | 5 | 1.20 | 1.50 (anew) | 2.09% | 1.500 |",
        "| n | 4 | 5 | 1.20 | 0.30 | 2.09% | 1.500 |",
    ]


def test_ablation_has_a_table_for_each_part_and_the_error_of_predictions():
    rows = [
        {"part": part, "name": name, "variant": variant, "kernel_us": us, "predicted_us": predicted}
        for part, name, variant, us, predicted in (
            ("sharing", "tree", "neither", 30.0, 60.0),
            ("sharing", "tree", "both", 10.0, 11.0),
            ("fixed", "chain", "1 slice", None, 9.0),
            ("fixed", "chain", "aligned", 20.0, 19.0),
        )
    ]
    sharing, fixed = (each.split("\n")[2:] for each in tables.ablation(rows).split("\n\n")[1:4:2])
    assert sharing == ["| tree | 30.0 | 10.0 |"]
    assert fixed == ["| chain | – | 20.0 |"]
    assert tables.ablation(rows).endswith("an error of 10.0% at most over 2 forests, 7.5% in the median.")


# ---------------------------------------------------------------------- claims


def test_claims_are_set_beside_what_was_measured():
    names = [each.name for each in PAPER[:3]]
    times = [(10.0, 1.0, 40.0), (20.0, 2.0, 20.0), (10.0, None, None)]
    rows = {
        "attention_h200": [
            {"name": name, "kernel_us": ours, "por_us": por, "flashinfer_decode_us": theirs}
            for name, (ours, por, theirs) in zip(names, times, strict=True)
        ]
        # Not in the paper's sweeps, so it does not count.
        + [{"name": PROBE[0].name, "kernel_us": 1.0, "por_us": 0.5, "flashinfer_decode_us": 1000.0}],
        "traffic_peers_h200": [{"l2_to_sm_bytes": 2, "flashinfer_decode_l2_to_sm_bytes": 18}],
        "length_h200": [
            {"name": "short", "x": 1024, "kernel_us": 1.0, "flashinfer_decode_us": 1.0},
            {"name": "long", "x": 50_000, "kernel_us": 100.0, "flashinfer_decode_us": 450.0},
        ],
        "planning": [{"name": "many", "requests": 64, "plan_us": 1234.0, "replan_us": 321.0, "roofline_us": 100.0}],
        "ablation_h200": [
            {"part": part, "name": name, "variant": variant, "kernel_us": us}
            for part, name, variant, us in (
                ("fixed", "tree", "1 slice", 300.0),
                ("fixed", "tree", "8 slices", 110.0),
                ("fixed", "tree", "aligned", 100.0),
                ("fixed", "chain", "1 slice", 200.0),
                ("fixed", "chain", "8 slices", 98.0),
                ("fixed", "chain", "aligned", 100.0),
                ("fixed", "unfinished", "1 slice", 200.0),
                ("sharing", "tree", "both", 100.0),
            )
        ],
        "decoding_120000_h200": [
            {"model": "m", "requests": 16, "document_tokens": 100, "variant": variant, "wall_us": us}
            for variant, us in (("shared", 10.0), ("unshared", 35.0), ("cudnn", None))
        ],
    }
    table = claims_table(lambda stems: [row for stem in stems for row in rows.get(stem, [])])
    for shown in (
        "2.00x in the geometric mean (2.50x in the arithmetic) of 2 forests and up to 4.0x over FlashInfer decode, "
        "1.00x at least",
        "bytes sent from L2 to SMs down 9.0x on average, 9.0x at most |",
        "4.5x (0.100 against 0.450 ms), long, FlashInfer decode",
        "11.2% of PAC in the median of 2 forests, 11.2% at most",
        # Of 57,600 us.
        "1.23 ms for many, 0.32 ms when its leaves have grown: 2.15% and 0.56% of what attention takes",
        "0.98x to 1.10x over the best fixed division of 2 forests, 2.0x to 3.0x over none",
        "m, 16 over 100: 3.5x over unshared |",
    ):
        assert shown in table
    assert "not measured yet" not in table
