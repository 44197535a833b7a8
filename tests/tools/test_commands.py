"""What every command has in common."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import benchmarks
from codec_jax import __main__

COMMANDS = [
    "codec_jax.generate",
    "codec_jax.serve",
    "codec_jax.profile",
    *(
        f"benchmarks.{path.stem}"
        for path in sorted(Path(benchmarks.__file__).parent.glob("*.py"))
        if "ArgumentParser(description" in path.read_text()
    ),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(name, monkeypatch, capsys):
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: ")
    assert f"python -m {name}" in said


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_package_lists_its_commands(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["codec-jax", *arguments])
    __main__.main()
    said = capsys.readouterr().out
    assert all(f"codec-jax {name} " in said for name in __main__.COMMANDS)


@pytest.mark.parametrize("name", __main__.COMMANDS)
def test_the_package_runs_its_commands_with_their_arguments(name, monkeypatch):
    given = []
    monkeypatch.setattr(importlib.import_module(f"codec_jax.{name}"), "main", lambda: given.extend(sys.argv))
    monkeypatch.setattr(sys, "argv", ["codec-jax", name, "--some", "thing"])
    __main__.main()
    assert given == [f"codec-jax {name}", "--some", "thing"]


@pytest.mark.parametrize(("given", "taken"), [(None, "0.9"), ("0.5", "0.5")])
@pytest.mark.parametrize("command", [["generate", "--prompts", "p", "--output", "o/o"], ["serve"]])
def test_a_command_takes_most_of_the_gpu(command, given, taken, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given or "")
    if given is None:
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    name, *rest = command
    with pytest.raises(SystemExit, match=f"codec_jax.{name}: "):
        importlib.import_module(f"codec_jax.{name}").main(["--model", str(tmp_path / "none"), *rest])
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == taken


def test_a_command_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["codec-jax", "generates"])
    with pytest.raises(SystemExit, match="expected a command, generate, serve or profile, got 'generates'"):
        __main__.main()


def test_the_console_script_is_there():
    project = tomllib.loads((Path(benchmarks.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["codec-jax"].split(":")
    assert getattr(importlib.import_module(module), function) is __main__.main


def test_the_package_has_nnx_and_does_not_import_flax_before_it_is_asked_for():
    code = (
        "import sys, codec_jax; assert 'flax' not in sys.modules; codec_jax.nnx.Sampler; assert 'flax' in sys.modules; "
        "assert not hasattr(codec_jax, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
