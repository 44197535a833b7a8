"""Files of rows, written such that one is whole whenever a command ends.

Without JAX, since the commands that measure vLLM run where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Return where rows stay until all of them are there."""
    return path.with_suffix(".part")


def write_rows(path: Path, rows: Sequence[dict]) -> None:
    """Write rows in the place of a file, which stays as it was if the disk is full or the process ends meanwhile."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
    beside.replace(path)
