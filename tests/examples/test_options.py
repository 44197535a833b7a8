"""What the examples say before JAX is imported: help, and what they are about to do."""

import subprocess
import sys
from pathlib import Path

import pytest
import tree_of_thoughts

EXAMPLES = Path(tree_of_thoughts.__file__).parent
WITHOUT_JAX = """
import sys
sys.modules["jax"] = None  # from here on, importing it raises ImportError
import {name}
try:
    {name}.main({arguments})
except ImportError:
    sys.exit(3)
"""


@pytest.mark.parametrize("name", ["document_qa", "self_consistency", "speculative", "train_game24", "tree_of_thoughts"])
@pytest.mark.parametrize(
    ("arguments", "code", "output"), [(["--help"], 0, "usage:"), (["--seed", "1"], 3, "{name}: ")], ids=str
)
def test_examples_speak_before_jax_is_imported(name: str, arguments: list[str], code: int, output: str) -> None:
    if name == "train_game24":
        arguments = [*arguments, "--output", "weights.safetensors"]
    command = [sys.executable, "-c", WITHOUT_JAX.format(name=name, arguments=arguments)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(output.format(name=name))
    if "--help" in arguments:
        assert f"python examples/{name}.py" in done.stdout
