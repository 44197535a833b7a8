"""List the commands, each with what it does."""

import ast
from pathlib import Path

from benchmarks import COMMANDS

for name in COMMANDS:
    about = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text())) or ""
    print(f"python -m benchmarks.{name:<11} {about.splitlines()[0]}")
