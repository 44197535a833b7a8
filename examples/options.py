"""Command-line options that several examples have."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def command(description: str, temperature: float, least: float = 0.0) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(  # float32 holds no more than 3e38
        "--temperature", type=number(float, least, 1e30), default=temperature, help="default: %(default)s"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of all that is drawn")
    return parser


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            limits = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {noun} {limits}, got {text}")
        return value

    return parse


def new_file(text: str) -> Path:
    """Read a path to write to, so that a missing directory is known before any work."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing directory, got {text}")
    return Path(text)
