"""Values of a checkpoint's JSON files: taken if they are what is expected, or else a problem that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def require(given: Mapping[str, Any], name: str, honoured: Any, problems: list[str]) -> None:
    """Say so if a key has another value than the only one that `Decoder` computes."""
    if given.get(name) not in (None, honoured):
        problems.append(
            f"config.json: expected {name} = {shown(honoured)}, which is what the decoder computes, "
            f"got {shown(given[name])}"
        )


def number(
    given: Mapping[str, Any],
    name: str,
    problems: list[str],
    *,
    default: float | None = None,
    whole: bool = True,
    least: int = 1,
    place: str = "",
) -> Any:
    """Return a positive number, of whole ones at least `least`, or None and say why there is none."""
    value: Any = given.get(name)
    if value is None and default is not None:
        return default
    # Within int32 and float32. A bool is an int, but no number here.
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    low, high, kind = (least, 2**31 - 1, "whole number") if whole else (1e-37, 1e37, "number")
    if type(value) in kinds and low <= value <= high:
        return value
    problems.append(f"config.json: expected a {kind} from {low} to {high} as {place}{name}, got {shown(value)}")
    return None


def flag(given: Mapping[str, Any], name: str, problems: list[str]) -> bool:
    """Return whether a key is true; one that is not there is not. What is neither counts as true."""
    value = given.get(name)
    if not isinstance(value, bool | None):
        problems.append(f"config.json: expected true or false as {name}, got {shown(value)}")
    return bool(value)


def shown(value: Any) -> str:
    """Return a value as JSON, or as much of it as a message has room for."""
    try:
        return json.dumps(value)[:1000]
    except RecursionError:
        return "something nested too deeply"
