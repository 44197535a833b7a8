"""vLLM's benchmark, with something in vLLM's place: the loads are those of the engine, and rows say what came back."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import serving, vllm_serving
from benchmarks.loads import cases


class LLM:
    """Gives every request its tokens, or one less."""

    missing = 0

    def __init__(self, **options: Any) -> None:
        self.options = options

    def generate(self, prompts: list[dict], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.options.setdefault("batches", []).append([each["prompt_token_ids"] for each in prompts])
        tokens = [[0] * (each.max_tokens - self.missing) for each in params]
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=each)],
                metrics=SimpleNamespace(first_token_latency=0.25),
                num_cached_tokens=2,
            )
            for each in tokens
        ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    found: list[LLM] = []
    fake: Any = ModuleType("vllm")
    fake.LLM = lambda **options: found.append(LLM(**options)) or found[0]
    fake.SamplingParams = lambda **options: SimpleNamespace(**options)
    fake.__spec__ = SimpleNamespace(name="vllm")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(vllm_serving, "provenance", lambda: {"device": "a test's"})
    monkeypatch.setattr(LLM, "missing", 0)
    return found


LOAD = ["--workload=questions", "--questions=4", "--documents=2", "--document-tokens=30", "--new-tokens=3"]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 50}))
    path = folder / "rows.json"
    monkeypatch.setattr(sys, "argv", ["vllm_serving", "--model", str(folder), "--json", str(path), *LOAD])
    vllm_serving.main()
    return path


def test_requests_are_those_of_the_engine(tmp_path: Path, started: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = json.loads(run(tmp_path, monkeypatch).read_text())["rows"]
    (case,) = cases(serving._parser().parse_args(["--json", "rows.json", *LOAD]))
    offered = case.load(50)
    (engine,) = started
    warm_up, asked = engine.options["batches"]
    assert asked == [each.prompt.tolist() for each in offered]
    assert len(warm_up) == 64
    assert engine.options["max_model_len"] > max(len(each.prompt) + each.new_tokens for each in offered)
    assert engine.options["enable_prefix_caching"]
    assert (row["name"], row["variant"], row["requests"], row["generated_tokens"]) == (case.name, "vLLM", 4, 12)
    assert row["hit_rate"] == 4 * 2 / row["prompt_tokens"]
    assert row["output_tokens_per_second"] == pytest.approx(12 / row["seconds"])
    assert row["first_token_median_seconds"] == 0.25


def test_requests_that_get_less_than_they_should_are_an_error(
    tmp_path: Path, started: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "missing", 1)
    with pytest.raises(RuntimeError, match="expected 1280 tokens, got 1216"):
        run(tmp_path, monkeypatch)
    assert not (tmp_path / "rows.json").exists()
    assert len(started) == 1


def test_an_environment_without_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch)
    assert "vllm: expected a package of this environment, got none" in capsys.readouterr().err
