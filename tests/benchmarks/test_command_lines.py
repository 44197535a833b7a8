"""Commands explain themselves anywhere, say at once that they need a GPU, and what is no command says so."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import COMMANDS

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
def test_a_command_explains_itself_anywhere_and_asks_for_a_gpu(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out
    if name not in ANYWHERE:
        monkeypatch.setattr("jax.default_backend", lambda: "cpu")
        monkeypatch.setattr(sys, "argv", [name, *["batch"] * (name == "figure"), "--json", "absent/rows.json"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 2
        assert "expected a GPU, the default backend is cpu" in capsys.readouterr().err


def test_a_process_for_ncu_is_no_command():
    ended = run("benchmarks.counters")
    assert ended.returncode == 1
    assert "benchmarks.traffic" in ended.stderr
    assert "Traceback" not in ended.stderr
