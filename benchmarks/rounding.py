"""Numbers as pages and drawings show them, never rounded in our favour: what others take down, what we take up."""

from __future__ import annotations

import math

_SLACK = 1e-6  # of the last digit: a mean of 4 and 4 may be a little less than 4


def at_least(value: float | None, digits: int) -> str:
    """Show a number that is better for us when it is larger, rounded down; a dash where there is none."""
    return "–" if value is None else f"{math.floor(value * 10**digits + _SLACK) / 10**digits:,.{digits}f}"


def at_most(value: float | None, digits: int) -> str:
    """Show a number that is better for us when it is smaller, rounded up; a dash where there is none."""
    return "–" if value is None else f"{math.ceil(value * 10**digits - _SLACK) / 10**digits:,.{digits}f}"
