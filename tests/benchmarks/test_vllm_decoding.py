"""vLLM's decode steps, with an engine of a test in vLLM's place: what is timed, what is refused, what rows say."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import vllm_decoding
from benchmarks.step_parts import parts_of


class Core:
    """Gives every request a token a step, each of which takes a second of the test's clock."""

    def __init__(self, cached: bool = True, late: int = 0) -> None:
        self.cached, self.late, self.left, self.clock, self.prompts = cached, late, {}, 0.0, []

    def add_request(self, name: str, prompt: dict, params: Any) -> None:
        assert name not in self.left
        self.left[name] = params.max_tokens
        self.prompts.append(prompt["prompt_token_ids"])

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.clock += 1.0
        names = list(self.left)[: 1 if self.late else None]  # one of them begins before the others
        self.late -= bool(self.late)
        for name in names:
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        return [SimpleNamespace(num_cached_tokens=64 if self.cached else 16) for _ in names]


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core, fake = Core(), ModuleType("vllm")
    vars(fake).update(SamplingParams=lambda **options: SimpleNamespace(**options))
    fake.__spec__ = SimpleNamespace(name="vllm")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr("time.perf_counter", lambda: core.clock)
    monkeypatch.setattr(vllm_decoding, "kernels", lambda core, prompts: {"kernel_us": 5e5 * len(prompts)})
    monkeypatch.setattr(vllm_decoding, "provenance", lambda: {"device": "a test's"})
    monkeypatch.setattr(vllm_decoding, "start", lambda *_: SimpleNamespace(llm_engine=core))
    return core


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 50}))
    arguments = ["--model", str(folder), "--json", str(path := folder / "rows.json"), "--documents=64", *flags]
    monkeypatch.setattr(sys, "argv", ["vllm_decoding", *arguments])
    vllm_decoding.main()
    return path


def test_a_step_is_what_passes_between_two_tokens(tmp_path: Path, core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = json.loads(run(tmp_path, monkeypatch, "--requests", "1", "3").read_text())["rows"]
    assert [row["wall_us"] for row in plain] == [1e6, 1e6]
    assert not any("kernel_us" in row for row in plain)
    rows = json.loads(run(tmp_path, monkeypatch, "--requests", "1", "3", "--profile").read_text())["rows"]
    assert [(row["name"], row["wall_us"], row["kernel_us"]) for row in rows] == [
        ("1 over 64", 1e6, 5e5),
        ("3 over 64", 1e6, 15e5),
    ]
    assert {row["variant"] for row in rows} == {"vLLM"}
    assert len({tuple(prompt[:64]) for prompt in core.prompts}) == 1  # of a document
    asked = core.prompts[: len(core.prompts) // 2]  # by either of the two
    assert len({tuple(prompt[64:]) for prompt in asked}) == len(asked)  # by requests that differ


def test_requests_that_do_not_share_or_decode_together_are_no_row(
    tmp_path: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.cached = False
    with pytest.raises(RuntimeError, match="expected the document, 64, got 16"):
        run(tmp_path, monkeypatch, "--requests=2")
    core.cached, core.late, core.left = True, 20, {}
    with pytest.raises(RuntimeError, match="with a token of all 2 requests"):
        run(tmp_path, monkeypatch, "--requests=2")
    assert not (tmp_path / "rows.json").exists()


def test_more_requests_than_are_let_in_are_refused(
    tmp_path: Path, core: Core, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, "--requests", "16", "65")
    assert "expected at most 64" in capsys.readouterr().err
    assert not core.prompts


def test_kernels_of_both_engines_are_known_by_their_names() -> None:
    kernels = {
        "mosaic_gpu_hopper_pac_kernel": 1.0,
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>": 2.0,
        "void vllm::merge_attn_states_kernel<__nv_bfloat16>": 4.0,
        "nvjet_sm90_tst_64x8_64x16": 8.0,
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>": 16.0,
    }
    found = parts_of(kernels.items())
    assert (found["kernel_us"], found["attention_us"], found["products_us"], found["other_us"]) == (31, 7, 8, 16)
    with pytest.raises(RuntimeError, match="got none"):
        parts_of([("a", 1.0)])
