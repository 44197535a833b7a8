"""What every command has in common."""

import importlib
import sys
from pathlib import Path

import pytest

import benchmarks

COMMANDS = [
    "codec_jax.generate",
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
