"""Arguments that several commands read; without JAX, since those that measure vLLM run where there is none."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.drafts import draft_of


def how_many(text: str) -> int:
    """Read how many there are to be, as `count_parser` of codec_jax.command_line does, which needs JAX."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def speed(text: str) -> float:
    """Read how many times as fast something is to go, which may be infinite."""
    try:
        if (number := float(text)) > 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a positive number or inf, got {text!r}")


def rows_file(text: str) -> Path:
    """Read where rows are to go, for a parser: what cannot be written is refused before all is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a path in a folder that there is, got {text!r}")
    if draft_of(path) == path:
        raise argparse.ArgumentTypeError(f"expected another suffix than that of drafts, .part, got {text!r}")
    return path
