"""What the commands share: numbers of options, with errors that say what was expected."""

import argparse
import math
from collections.abc import Callable


def number_parser(kind: type, expected: str, low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers with low <= number < high."""

    def parse(text: str) -> float:
        try:
            if low <= (number := kind(text)) < high:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


def gib_parser() -> Callable[[str], float]:
    """Return a parser of an amount of memory."""
    return number_parser(float, "a positive number of GiB", math.ulp(0.0), 2.0**33)


def count_parser() -> Callable[[str], float]:
    """Return a parser of how many there are to be."""
    return number_parser(int, "a positive whole number", 1, math.inf)
