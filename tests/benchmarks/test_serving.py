"""The benchmark of the engine under load: what it offers, and counts that follow from the lengths alone."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import plot, replay, serving, tables, vllm_serving
from benchmarks.churn import TINY
from benchmarks.offered import Offered, percentiles, questions, rollouts, trace
from benchmarks.pages import PAGES
from benchmarks.serving import VARIANTS, Case
from codec_jax.nnx import Decoder, random_decoder
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.params import SamplingParams

pytestmark = pytest.mark.usefixtures("_others_set_aside")

VOCAB, PAGE_SIZE, DOCUMENT, QUESTION = TINY.vocab_size, 16, 64, 9
LONGEST = DOCUMENT + 7  # of most loads, so that their engines have the same programs
SIZES = {"max_requests": 3, "num_pages": 48, "page_size": PAGE_SIZE, "prefill_tokens": 128, "steps": 4}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder(TINY)


# ---------------------------------------------------------------------- what is offered


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Three requests, two of which begin with the same 600 tokens; the last line came first."""
    rows = [(2000, 1200, 7, [4, 9, 2]), (3500, 600, 5, [4, 9]), (500, 520, 3, [7, 9])]
    fields = "timestamp", "input_length", "output_length", "hash_ids"
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows))
    return path


def test_a_trace_comes_in_order_of_arrival_and_equal_ids_are_equal_tokens(trace_file: Path) -> None:
    early, long, short = trace(trace_file, 10, 20.0, VOCAB)
    assert [each.at for each in (early, long, short)] == [0.025, 0.1, 0.175]
    assert [len(each.prompt) for each in (early, long, short)] == [520, 1200, 600]
    assert [each.new_tokens for each in (early, long, short)] == [3, 7, 5]
    assert (long.prompt[:600] == short.prompt).all()
    assert (early.prompt[512:] == long.prompt[512:520]).all()
    assert (early.prompt[:512] != long.prompt[:512]).any()
    assert [each.at for each in trace(trace_file, 10, float("inf"), VOCAB)] == [0.0] * 3
    assert all((each.prompt >= 0).all() and (each.prompt < VOCAB).all() for each in (early, long, short))
    assert [len(each.prompt) for each in trace(trace_file, 2, 1.0, VOCAB)] == [1200, 600]


def test_a_trace_that_lacks_blocks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [3]}))
    with pytest.raises(ValueError, match="expected a block for each 512 of 600 tokens, got 1"):
        trace(path, 1, 1.0, VOCAB)


def test_samples_have_one_prompt_and_streams_of_their_own_and_questions_take_turns() -> None:
    offered = rollouts(2, 3, 40, 6, VOCAB)
    assert [(each.prompt.tolist(), each.stream) for each in offered] == [
        (offered[3 * prompt].prompt.tolist(), stream) for prompt in range(2) for stream in range(3)
    ]
    assert {(each.at, len(each.prompt), each.new_tokens) for each in offered} == {(0.0, 40, 6)}
    assert (offered[0].prompt != offered[3].prompt).any()
    asked = questions(5, 2, DOCUMENT, QUESTION, 4, VOCAB)
    assert len({tuple(each.prompt) for each in asked}) == 5
    documents = [tuple(each.prompt[:DOCUMENT]) for each in asked]
    assert documents == [documents[i % 2] for i in range(5)]
    assert len(set(documents)) == 2
    assert {(len(each.prompt), each.new_tokens) for each in asked} == {(DOCUMENT + QUESTION, 4)}


# ---------------------------------------------------------------------- what is counted


def rows_of(model: Decoder, offered: list[Offered], **sizes: int) -> dict[str, dict]:
    """Run a load in every variant."""
    case = Case("load", lambda vocab_size: offered)
    rows = list(serving.measure_all(model, [case], list(VARIANTS), SIZES | sizes))
    assert [row["variant"] for row in rows] == ["engine", "no cache", "unshared"]
    for row in rows:
        assert "error" not in row
        assert row["requests"] == len(offered)
        assert row["prompt_tokens"] == sum(len(each.prompt) for each in offered)
        assert row["generated_tokens"] == sum(each.new_tokens for each in offered)
        assert row["output_tokens_per_second"] == pytest.approx(row["generated_tokens"] / row["seconds"])
        assert row["total_tokens_per_second"] - row["output_tokens_per_second"] == pytest.approx(
            row["prompt_tokens"] / row["seconds"]
        )
        assert 0.0 < row["first_token_median_seconds"] <= row["first_token_p99_seconds"] <= row["seconds"]
        assert 0.0 <= row["between_tokens_median_seconds"] <= row["between_tokens_p99_seconds"] <= row["seconds"]
        assert 0.0 <= row["host_share"] <= 1.0
        assert 1.0 <= row["rows_a_step"] <= row["engine"]["max_requests"]
        assert row["compiled"] == 0
        assert row["engine"]["num_pages"] == SIZES["num_pages"]
    return {row["variant"]: row for row in rows}


def test_of_questions_one_by_one_all_documents_but_the_first_are_found(model: Decoder) -> None:
    rows = rows_of(model, questions(6, 2, DOCUMENT, QUESTION, 5, VOCAB), max_requests=1)
    for variant in ("engine", "unshared"):
        assert rows[variant]["hit_rate"] == 4 * DOCUMENT / (6 * (DOCUMENT + QUESTION))
        assert rows[variant]["computed_tokens"] == 2 * DOCUMENT + 6 * (QUESTION - 1)
    assert rows["no cache"]["hit_rate"] == 0.0
    assert rows["no cache"]["computed_tokens"] == 6 * (DOCUMENT + QUESTION - 1)
    # Each is alone, so there is nothing to read together.
    assert {(row["rows_a_step"], row["sharing_factor"], row["preempted"]) for row in rows.values()} == {(1.0, 1.0, 0)}


def test_samples_of_a_prompt_are_inside_together_and_share_without_a_cache(model: Decoder) -> None:
    rows = rows_of(model, rollouts(2, 3, DOCUMENT + 1, 6, VOCAB))
    for row in rows.values():
        assert row["computed_tokens"] == 2 * DOCUMENT
    assert rows["engine"]["sharing_factor"] > 1.2
    assert rows["unshared"]["sharing_factor"] == 1.0


def test_a_trace_is_offered_as_it_arrives(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []
    submit = Engine.submit

    def watched(engine: Engine, prompt: np.ndarray, *arguments: object, **options: object) -> object:
        submitted.append((replay.time.perf_counter(), len(prompt)))
        return submit(engine, prompt, *arguments, **options)

    monkeypatch.setattr(Engine, "submit", watched)
    offered = [Offered(at, np.arange(size) % VOCAB, 4) for at, size in ((0.0, 30), (0.01, 67), (0.3, 30), (0.3, 20))]
    row = rows_of(model, offered)["engine"]
    assert [size for _, size in submitted] == [30, 67, 30, 20] * 3
    begin = submitted[0][0]
    assert all(at - begin >= each.at - 1e-3 for (at, _), each in zip(submitted, offered, strict=False))
    assert row["seconds"] >= 0.3
    assert row["no_load_seconds"] / row["seconds"] + row["host_share"] <= 1.0


def test_requests_that_get_less_than_they_should_are_an_error(model: Decoder) -> None:
    engine = Engine(model, max_context=LONGEST, **SIZES)
    with pytest.raises(ValueError, match="prompt: expected at most max_context = 71"):
        replay.replay(engine, rollouts(1, 1, LONGEST, 1, VOCAB))
    submit = engine.submit
    engine.submit = lambda prompt, params, **_: submit(prompt, params, on_update=lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match=r"expected 6 tokens of each, got Request\(\d+, 8 tokens"):
        replay.replay(engine, rollouts(1, 1, 8, 6, VOCAB))
    case = Case("no such pages", lambda vocab_size: rollouts(1, 1, 8, 1, vocab_size))
    (row,) = serving.measure_all(model, [case], ["engine"], SIZES | {"page_size": 12})
    assert (row["seconds"], row["error"].split(":")[0]) == (None, "ValueError")


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_variants_generate_what_the_model_says(model: Decoder, variant: str) -> None:
    graph, weights = nnx.split(model)
    logits = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))
    offered = rollouts(1, 3, DOCUMENT + 1, 6, VOCAB)
    prompts = [each.prompt for each in offered]
    prompts[1] = np.concatenate([prompts[0][:32], [5, 6]])
    engine = Engine(model, max_context=LONGEST, **SIZES)
    with VARIANTS[variant](engine, offered):
        requests = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0))
    for request in requests:
        context = np.zeros((1, LONGEST), np.int32)
        context[0, : len(request.prompt) + 6] = request.context
        best = np.asarray(logits(weights, context)[0]).argmax(axis=-1)
        assert request.tokens == best[len(request.prompt) - 1 : len(request.prompt) + 5].tolist()


# ---------------------------------------------------------------------- clocks


def test_a_device_is_idle_between_steps_that_were_dispatched_too_late() -> None:
    spans = [(1.0, 3.0), (2.0, 4.0), (4.5, 5.0), (4.75, 6.0)]  # the second begins when the first has finished
    assert replay.idle_seconds(spans, 0.5, 7.0) == 0.5 + 0.5 + 1.0
    assert replay.idle_seconds([], 0.0, 2.0) == 2.0


def test_tokens_that_come_together_share_the_time_that_has_passed() -> None:
    between = replay._between([(1.0, 3), (2.0, 4), (4.0, 1)])
    assert between.tolist() == [0.25] * 4 + [2.0]
    assert replay._between([(1.0, 3)]).size == 0
    assert percentiles("a", between) == {"a_median_seconds": 0.25, "a_p99_seconds": pytest.approx(1.93)}
    assert percentiles("a", between[:0]) == {"a_median_seconds": None, "a_p99_seconds": None}


# ---------------------------------------------------------------------- the command, its page and its drawing


def test_the_command_tries_a_tiny_model_anywhere(tmp_path, monkeypatch, capsys) -> None:
    path, flags = tmp_path / "rows.json", ["--tiny", "--variants", "engine", "--new-tokens", "4"]
    flags += [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    load = ["--workload", "rollouts", "--prompts", "2", "--samples", "2", "--prompt-tokens", "40", "67"]
    monkeypatch.setattr("sys.argv", ["serving", "--json", str(path), *flags, *load])
    serving.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["2 prompts of 40, 2 samples", "2 prompts of 67, 2 samples"]
    assert {(row["workload"], row["model"], row["generated_tokens"]) for row in rows} == {("rollouts", "tiny", 16)}
    assert {"device", "versions", "date", "heads", "page_size"} <= rows[0].keys()
    assert "| 2 prompts of 67, 2 samples | engine |" in capsys.readouterr().out


def test_workloads_have_the_cases_that_were_asked_for(trace_file: Path) -> None:
    def offered(*flags: str) -> dict[str, list[Offered]]:
        arguments = serving._parser().parse_args(["--json", "rows.json", *flags])
        return {case.name: case.load(VOCAB) for case in serving.cases(arguments)}

    loads = offered("--trace", str(trace_file), "--requests", "2", "--speed", "inf")
    assert {name: [len(each.prompt) for each in load] for name, load in loads.items()} == {
        "2 requests of a trace, all at once": [1200, 600]
    }
    assert list(offered("--trace", str(trace_file))) == ["1000 requests of a trace, 20 times as fast"]
    (load,) = offered("--workload", "questions", "--document-tokens", "96").values()
    assert (len(load), len(load[0].prompt), load[0].new_tokens) == (256, 96 + 64, 128)
    lengths = {name: (len(load), load[0].new_tokens) for name, load in offered("--workload", "rollouts").items()}
    assert lengths == {f"64 prompts of {tokens}, 16 samples": (1024, 512) for tokens in (1024, 8192, 32_768)}


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        *(("--speed", value, "a positive number or inf") for value in ("nan", "-2", "0", "fast")),
        *(("--requests", value, "a positive whole number") for value in ("0", "-1", "1.5")),
        *((f"--{name}", "0", "a positive whole number") for name in ("documents", "prompts", "samples", "new-tokens")),
    ],
)
def test_a_load_of_nothing_is_refused(flag, value, expected, capsys) -> None:
    with pytest.raises(SystemExit):
        serving._parser().parse_args(["--json", "rows.json", f"{flag}={value}"])
    assert f"argument {flag}: expected {expected}, got {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize("module", [serving, vllm_serving])
def test_more_requests_than_a_trace_has_are_refused(module, trace_file: Path, tmp_path, monkeypatch, capsys) -> None:
    there = len(trace_file.read_text().splitlines())
    flags = ["--trace", str(trace_file), "--speed=inf", f"--requests={there + 1}"]
    flags += ["--model=m"] * (module is vllm_serving)
    monkeypatch.setattr("sys.argv", ["serving", "--json", str(tmp_path / "rows.json"), *flags])
    with pytest.raises(SystemExit):
        module.main()
    assert f"--requests: expected at most the {there} of the trace, got {there + 1}" in capsys.readouterr().err


def row(variant: str, **fields: float | None) -> dict:
    conditions = {"device": "NVIDIA H200", "heads": "32/8", "head_dim": 128, "page_size": 16, "date": "2026-01-02"}
    return conditions | {"name": "64 prompts of 8192, 16 samples", "variant": variant, "model": "m"} | fields


def test_rows_become_a_table_and_a_drawing() -> None:
    fields = {f"{kind}_tokens_per_second": 1999.5 for kind in ("output", "total")}
    fields |= {
        f"{kind}_{which}_seconds": 0.5004 for kind in ("first_token", "between_tokens") for which in ("median", "p99")
    }
    fields |= {"hit_rate": 0.75, "computed_tokens": 30, "prompt_tokens": 120, "rows_a_step": 8.0, "sharing_factor": 4.0}
    rows = [row("engine", host_share=0.0123, **fields), row("no cache", host_share=0.5, **fields), row("unshared")]
    shown = [[cell.strip() for cell in line.strip("| ").split("|")] for line in tables.serving(rows).split("\n")[2:]]
    name = "64 prompts of 8,192, 16 samples"
    assert shown[0] == [
        name,
        "engine",
        "1,999",
        "1,999",
        "0.51",
        "0.51",
        "500.4",
        "500.4",
        "75.0",
        "25.0",
        "8.0",
        "4.00",
        "1.3",
    ]
    assert shown[1][2:6] == ["2,000", "2,000", "0.50", "0.50"]
    assert shown[2] == [name, "unshared"] + ["–"] * 11
    # What is measured and none is no dash, and a share is not rounded in our favour, whoever it is of.
    shares = fields | {"hit_rate": 0.0, "computed_tokens": 1, "prompt_tokens": 3, "host_share": 0.0}
    others = shares | {"hit_rate": 1 / 3, "host_share": 1 / 3}
    rows_of_shares = [row("engine", **shares), row("vLLM", **others)]
    lines = tables.serving(rows_of_shares).split("\n")[2:]
    assert [line.strip("| ").split(" | ")[8:10] for line in lines] == [["0.0", "33.4"], ["33.4", "33.3"]]
    assert [line.strip("| ").split(" | ")[-1] for line in lines] == ["0.0", "33.3"]
    canvas = plot.serving(rows, PAGES["serving"])
    (axes,) = canvas.axes
    assert [bar.get_width() for bar in axes.patches] == [1999.5, 1999.5]
    assert [text.get_text() for text in axes.texts] == [name, "1,999", "2,000"]
    canvas.draw_without_rendering()
    assert "better" in canvas.texts[1].get_text()
    with pytest.raises(ValueError, match="to draw, got none"):
        plot.serving([row("engine")], PAGES["serving"])
