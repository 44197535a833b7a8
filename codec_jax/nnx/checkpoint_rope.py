"""Rotary positions of a Hugging Face checkpoint, or why the decoder cannot honour them.

transformers writes rope_parameters since version 5, and wrote rope_theta and rope_scaling before. In models whose
layers with a window turn otherwise, rope_parameters has an object for each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from codec_jax.nnx.checkpoint_values import number, require, shown
from codec_jax.nnx.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


class Rope(NamedTuple):
    """The fields of `DecoderConfig`; a base that could not be read is 1."""

    theta: float
    scaling: RopeScaling | None
    window_theta: float | None


def read_rope(given: Mapping[str, Any], window_theta: str | None, problems: list[str]) -> Rope:
    """Read the base and the scaling.

    `window_theta` is the key of the base of layers with a window, in families where these turn otherwise.
    """
    place = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    rope = given.get(place) or {}
    if not isinstance(rope, dict):
        problems.append(f"config.json: expected an object as {place}, got {shown(rope)}")
        return Rope(1.0, None, None)
    if window_theta is None:
        return Rope(*_read(given, rope, place, problems), None)
    if place == "rope_scaling":
        base = number(given, window_theta, problems, default=given[window_theta], whole=False)
        return Rope(*_read(given, rope, place, problems), base)
    full, windowed = rope.get("full_attention"), rope.get("sliding_attention")
    if not isinstance(full, dict) or not isinstance(windowed, dict) or len(rope) > 2:
        problems.append(
            f"config.json: expected objects full_attention and sliding_attention in {place}, got {shown(rope)}"
        )
        return Rope(1.0, None, None)
    base, scaling = _read(
        {**given, "rope_theta": given[window_theta]}, windowed, f"{place}.sliding_attention", problems
    )
    if scaling is not None:
        problems.append(
            f"config.json: expected {place}.sliding_attention of type default, which the decoder computes, "
            f"got {shown(windowed)}"
        )
    return Rope(*_read(given, full, f"{place}.full_attention", problems), base)


def _read(
    given: Mapping[str, Any], rope: Mapping[str, Any], place: str, problems: list[str]
) -> tuple[float, RopeScaling | None]:
    """Read one object; what it does not have may stand beside it."""
    both = {**given, **rope}
    theta = number(both, "rope_theta", problems, default=10_000.0, whole=False) or 1.0
    require(both, "partial_rotary_factor", 1.0, problems)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values()):
        return theta, None
    read = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}.get(kind if isinstance(kind, str) else "")
    if read is None:
        problems.append(
            f"config.json: expected {place} of type default, linear, llama3 or yarn, which the decoder computes, "
            f"got {shown(rope)}"
        )
        return theta, None
    known = len(problems)
    if rope.get("original_max_position_embeddings") is not None:
        # Where both are given, transformers takes this one.
        require(given, "original_max_position_embeddings", rope["original_max_position_embeddings"], problems)
    scaling = read(rope, f"{place}.", problems)
    if len(problems) > known:
        return theta, None
    try:
        return theta, scaling()
    except ValueError as error:
        problems.append(f"config.json: {place}.{error}")
        return theta, None


def _linear(rope: Mapping[str, Any], place: str, problems: list[str]) -> Any:
    factor = number(rope, "factor", problems, whole=False, place=place)
    return lambda: LinearScaling(factor)


def _llama3(rope: Mapping[str, Any], place: str, problems: list[str]) -> Any:
    factor, low, high = (
        number(rope, name, problems, whole=False, place=place)
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = number(rope, "original_max_position_embeddings", problems, place=place)
    return lambda: Llama3Scaling(factor, low, high, context)


def _yarn(rope: Mapping[str, Any], place: str, problems: list[str]) -> Any:
    factor = number(rope, "factor", problems, whole=False, place=place)
    # As the paper recommends: what is stretched more is sharpened more. Some divide it between positions and scores.
    default = sharpening(factor or 1.0)
    if None in (rope.get("mscale"), rope.get("mscale_all_dim")):
        for name in ("mscale", "mscale_all_dim"):
            require(rope, name, None, problems)
    else:
        amount, of_scores = (
            number(rope, name, problems, whole=False, place=place) or 1.0 for name in ("mscale", "mscale_all_dim")
        )
        default = sharpening(factor or 1.0, amount) / sharpening(factor or 1.0, of_scores)
    context = number(rope, "original_max_position_embeddings", problems, place=place)
    attention = number(rope, "attention_factor", problems, default=default, whole=False, place=place)
    fast, slow = (
        number(rope, name, problems, default=default, whole=False, place=place)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        problems.append(f"config.json: expected true or false as {place}truncate, got {shown(truncate)}")
    return lambda: YarnScaling(factor, context, attention, fast, slow, truncate)


def sharpening(factor: float, amount: float = 1.0) -> float:
    """Return what YaRN multiplies queries and keys by, for positions that are stretched by a factor."""
    return 0.1 * amount * math.log(max(factor, 1.0)) + 1.0
