"""Arguments that several commands read; without JAX, since those that measure vLLM run where there is none."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.drafts import draft_of


def rows_file(text: str) -> Path:
    """Read where rows are to go, for a parser: what cannot be written is refused before all is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a path in a folder that there is, got {text!r}")
    if draft_of(path) == path:
        raise argparse.ArgumentTypeError(f"expected another suffix than that of drafts, .part, got {text!r}")
    return path
