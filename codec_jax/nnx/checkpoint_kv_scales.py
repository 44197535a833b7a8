"""Scales of a KV cache of one byte a number, as a checkpoint in the format of compressed-tensors has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from codec_jax.forest.kv_pages import LEAST_SCALE, MOST_SCALE
from codec_jax.nnx.checkpoint_values import shown

#: What the format says of one scale for all keys of a layer, and one for all values, in float8.
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def has_kv_scales(given: Mapping[str, Any]) -> bool:
    """Say whether config.json promises scales of the KV cache; they must be all that is quantised."""
    quantisation = given.get("quantization_config")
    if not isinstance(quantisation, Mapping) or quantisation.get("quant_method") != "compressed-tensors":
        return False
    scheme = quantisation.get("kv_cache_scheme")
    return (
        not quantisation.get("config_groups")
        and isinstance(scheme, Mapping)
        and all(scheme.get(key) == value for key, value in _SCHEME.items())
    )


def is_kv_scale(name: str) -> bool:
    """Say whether a tensor is a scale of the KV cache, by its name."""
    return name.endswith((".self_attn.k_scale", ".self_attn.v_scale"))


def read_kv_scales(num_layers: int, files: Mapping[str, Path], problems: list[str]) -> tuple[tuple[float, float], ...]:
    """Return the scales of keys and of values of each layer, whose tensors are in these files."""
    names = [f"model.layers.{layer}.self_attn.{letter}_scale" for layer in range(num_layers) for letter in "kv"]
    problems.extend(f"{name}: expected this scale of the KV cache, got none" for name in names if name not in files)
    problems.extend(f"{files[name].name}: expected no {name}" for name in sorted(files.keys() - set(names)))
    scales = [_read(files[name], name, problems) for name in names if name in files]
    return tuple(zip(scales[::2], scales[1::2], strict=False))


def _read(file: Path, name: str, problems: list[str]) -> float:
    with safe_open(file, framework="numpy") as opened:
        if (kind := opened.get_slice(name).get_dtype()).startswith("F8"):
            problems.append(f"{file.name}: expected a number of 16 bits or more as {name}, got {kind}")
            return math.nan
        tensor = opened.get_tensor(name)
    scale = float(tensor.reshape(())) if tensor.size == 1 else math.nan
    if not LEAST_SCALE <= scale <= MOST_SCALE:
        problems.append(
            f"{file.name}: expected one number from 2**-100 to 2**100 as {name}, got {shown(tensor.tolist())}"
        )
    return scale
