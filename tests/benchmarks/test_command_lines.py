"""Commands explain themselves anywhere, say at once that they need a GPU, and what is no command says so."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import COMMANDS, timing, vllm_engine

ROOT = Path(__file__).parents[2]
ANYWHERE = ("churn", "planning", "plot", "report", "vllm_decoding", "vllm_serving")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


def test_all_modules_that_can_be_run_are_listed():
    runnable = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__name__ ==" in path.read_text()}
    assert runnable == {*COMMANDS, "counters"}
    listed = run("benchmarks").stdout.splitlines()
    assert [line.split()[2] for line in listed] == [f"benchmarks.{name}" for name in COMMANDS]
    assert all(len(line.split()) > 5 for line in listed)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself_anywhere_and_asks_for_a_gpu(name, monkeypatch, capsys, tmp_path):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out
    if name not in ANYWHERE:
        monkeypatch.setattr("jax.default_backend", lambda: "cpu")
        figure = ["batch"] * (name == "figure")
        monkeypatch.setattr(sys, "argv", [name, *figure, "--json", str(tmp_path / "rows.json")])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 2
        assert "expected a GPU, the default backend is cpu" in capsys.readouterr().err


@pytest.mark.parametrize("command", [timing.command, vllm_engine.parser_of], ids=["ours", "vLLM's"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("absent/rows.json", "a path in a folder that there is"),
        (".", "a path in a folder that there is"),
        ("rows.part", "another suffix than that of drafts, .part"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(command, path, expected, capsys):
    with pytest.raises(SystemExit):
        command("").parse_args(["--json", path, *["--model", "m"] * (command is vllm_engine.parser_of)])
    assert f"--json: expected {expected}, got {path!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("attention", "--page-size"), ("crossover", "--own"), ("decoding", "--documents"), ("latent", "--q-heads"),
        ("scaling", "--gpus"), ("experts", "--tokens"), ("scores", "--repeats"),
        ("serving", "--steps"), ("vllm_decoding", "--requests"), ("your_gpu", "--head-dim"),
    ],
)  # fmt: skip
def test_numbers_of_things_are_positive(name, option, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    for text in ("0", "-1", "1.5"):
        monkeypatch.setattr(sys, "argv", [name, f"{option}={text}"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 2
        assert f"{option}: expected a positive whole number, got {text!r}" in capsys.readouterr().err


def test_a_process_for_ncu_is_no_command():
    ended = run("benchmarks.counters")
    assert ended.returncode == 1
    assert "benchmarks.traffic" in ended.stderr
    assert "Traceback" not in ended.stderr
