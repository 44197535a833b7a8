"""Ratios as pages show them, never rounded in our favour: speed-ups down, what we take up."""

from __future__ import annotations

import math

_SLACK = 1e-6  # of the last digit: a mean of 4 and 4 may be a little less than 4


def at_least(value: float, digits: int) -> str:
    """Show a number that is better when it is larger, rounded down."""
    return f"{math.floor(value * 10**digits + _SLACK) / 10**digits:.{digits}f}"


def at_most(value: float, digits: int) -> str:
    """Show a number that is better when it is smaller, rounded up."""
    return f"{math.ceil(value * 10**digits - _SLACK) / 10**digits:.{digits}f}"
