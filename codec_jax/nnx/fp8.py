"""Tensors in float8 with a scale for each block of 128 x 128 numbers: how files have them, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from codec_jax.arrays import HostOrDevice

#: What safetensors calls the dtype, and what is added to the name of a tensor for that of its scales.
FP8, SCALES = "F8_E4M3", "_scale_inv"
_BLOCK = 128


class Fp8(NamedTuple):
    """A tensor and its scales: a number times the scale of its block is the number that is meant."""

    stored: Float[HostOrDevice, "outputs inputs"]  # float8_e4m3fn
    scale: Float[HostOrDevice, "output_blocks input_blocks"]

    def decoded(self) -> Float[Array, "outputs inputs"]:
        """Return the numbers that are meant, float32."""
        scale = jnp.asarray(self.scale, jnp.float32)
        for axis, size in enumerate(self.stored.shape):
            if scale.shape[axis] != size:  # or it is spread already
                scale = lax.slice_in_dim(scale.repeat(_BLOCK, axis), 0, size, axis=axis)
        return jnp.asarray(self.stored, jnp.float32) * scale


def is_fp8(quantisation: Any) -> bool:
    """Say whether quantization_config of config.json means this format."""
    return (
        isinstance(quantisation, Mapping)
        and quantisation.get("quant_method") == "fp8"
        and quantisation.get("fmt", "e4m3") == "e4m3"
        and quantisation.get("weight_block_size") == [_BLOCK, _BLOCK]
    )


def spread(scale: Float[np.ndarray, "rows columns"], axis: int, size: int) -> Float[np.ndarray, "rows columns"]:
    """Return scales along an axis as one for each of so many numbers instead of one for each block."""
    return np.take(scale, np.arange(size) // _BLOCK, axis)


def shape_of_scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor's scales; the last block of an axis may be a part of one."""
    return tuple(-(-size // _BLOCK) for size in shape)


class StoredTensors:
    """Tensors of files as they are stored: NumPy has no such dtype, and so safetensors does not return them."""

    def __init__(self) -> None:
        """Open nothing yet."""
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def read(self, file: Path, name: str) -> Float[np.ndarray, "outputs inputs"]:
        """Map a tensor of a file."""
        stored = self.bytes_of(file, name)
        return stored.view(jnp.float8_e4m3fn).reshape(self._headers[file][1][name]["shape"])

    def bytes_of(self, file: Path, name: str) -> UInt8[np.ndarray, " bytes"]:
        """Map the bytes of a tensor of a file."""
        if file not in self._headers:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                self._headers[file] = 8 + size, json.loads(opened.read(size))
        data, header = self._headers[file]
        start, end = header[name]["data_offsets"]
        return np.memmap(file, np.uint8, mode="r", offset=data + start, shape=end - start)
