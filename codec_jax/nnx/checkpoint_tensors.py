"""Parameters from the tensors of a checkpoint's files, on the devices that keep them.

Source         which tensors a parameter is made of, and where they are
TensorFiles    the opened files: `parameter` reads what each device keeps, and arranges it there
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors import safe_open

from codec_jax.forest.kv_pages import MOST_SCALE
from codec_jax.nnx.fp8 import SCALES, Fp8, StoredTensors, spread
from codec_jax.nnx.shards import Cut, assembled
from codec_jax.nnx.tensors import MXFP4_NAN, TRANSPOSED, Layout, arranged


class Source(NamedTuple):
    """What a parameter is made of."""

    layout: Layout
    tensors: tuple[tuple[Path, str], ...]  # file and name of each
    scales: Mapping[str, Path]  # by the names of the tensors in float8, the files of their scales

    @property
    def files(self) -> set[Path]:
        """All that are read."""
        return {file for file, _ in self.tensors} | set(self.scales.values())


class TensorFiles:
    """Files with tensors, open until the context is left; a device of a mesh gets no more than what it keeps."""

    def __init__(self, sources: Collection[Source], mesh: Mesh | None) -> None:
        """Open all files."""
        self._mesh, self._stack, self._stored = mesh, ExitStack(), StoredTensors()
        files = {file for source in sources for file in source.files}
        self._opened = {file: self._stack.enter_context(safe_open(file, framework="numpy")) for file in files}

    def __enter__(self) -> TensorFiles:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close all files."""
        self._stack.close()

    def parameter(self, source: Source, shape: tuple[int, ...], dtype: DTypeLike, cut: Cut) -> Array:
        """Read a parameter of the given shape."""
        tensors = [self._read(source, number, cut) for number in range(_tensors_of_device(source, cut))]
        local = list(shape)
        local[cut.axis] = sum(cut.widths)
        placed = _place(tensors, source.layout, tuple(local), dtype, cut, self._mesh)
        # What is on all devices comes out as divided along no axis, which means the same and is not the same to jit.
        return placed if self._mesh is None else jax.device_put(placed, NamedSharding(self._mesh, cut.spec(cut.axis)))

    def _read(self, source: Source, number: int, cut: Cut) -> Array | np.ndarray | Fp8:
        """Read what devices get of their tensor of that number, to these devices."""
        # One for each device where these have experts of their own, and those need not be stored alike.
        alike = source.tensors[number :: _tensors_of_device(source, cut)]
        if len({self._opened[file].get_slice(name).get_dtype() for file, name in alike}) > 1:
            return self._sent(source, number, cut, partial(self._meant, source))
        if source.layout.startswith("mxfp4") and number:
            return self._sent(source, number, cut, self._exponents)
        if alike[0][1] not in source.scales:
            return self._sent(source, number, cut, lambda file, name: self._opened[file].get_slice(name))
        stored = self._sent(source, number, cut, self._stored.read)
        return Fp8(stored, self._sent(source, number, cut, partial(self._scales, source, cut)))

    def _sent(self, source: Source, number: int, cut: Cut, opened: Callable[[Path, str], Any]) -> Array | np.ndarray:
        """Send devices what they get of the tensors that `opened` returns."""
        devices, tensor = cut.parallel.devices, opened(*source.tensors[number])
        shape = list(tensor.shape if isinstance(tensor, np.ndarray) else tensor.get_shape())
        send = partial(assembled, self._mesh, cut)
        if devices == 1:
            return send(0, tuple(shape), lambda _: tensor[:])
        if source.layout == "experts":
            shape[0] *= devices
            count = _tensors_of_device(source, cut)
            return send(0, tuple(shape), lambda device: opened(*source.tensors[device * count + number])[:])
        axis, part = _axis(source.layout, cut), 0 if source.layout.startswith("mxfp4") else number
        unit = shape[axis] // cut.sizes[part]  # numbers of a head where heads are divided
        width = unit * cut.widths[part]
        shape[axis] = width * devices

        def block(device: int) -> np.ndarray:
            start = unit * cut.starts(device)[part]
            return tensor[(slice(None),) * axis + (slice(start, start + width),)]

        return send(axis, tuple(shape), block)

    def _meant(self, source: Source, file: Path, name: str) -> np.ndarray:
        """Read what a tensor means, float32, whether it is in float8 or not."""
        if name not in source.scales:
            return np.asarray(self._opened[file].get_tensor(name), np.float32)
        return np.asarray(Fp8(self._stored.read(file, name), self._scales_of(source, name)).decoded())

    def _scales_of(self, source: Source, name: str) -> np.ndarray:
        """Read the scales of a tensor, float32. Raises ValueError for any that make no numbers; 0 is of zeros."""
        file = source.scales[name]
        numbers: np.ndarray = self._opened[file].get_tensor(name + SCALES).astype(np.float32)
        wrong = numbers[~((numbers >= 0) & (numbers <= MOST_SCALE))]
        if wrong.size:
            raise ValueError(f"{file.name}: expected numbers from 0 to 2**100 as {name}{SCALES}, got {wrong[0]:g}")
        return numbers

    def _exponents(self, file: Path, name: str) -> np.ndarray:
        """Read the scales of a tensor in MXFP4, powers of two. Raises ValueError for those that are NaN."""
        exponents: np.ndarray = self._opened[file].get_tensor(name)
        if (exponents == MXFP4_NAN).any():
            raise ValueError(f"{file.name}: expected numbers from 0 to {MXFP4_NAN - 1} as {name}, got {MXFP4_NAN}: NaN")
        return exponents

    def _scales(self, source: Source, cut: Cut, file: Path, name: str) -> np.ndarray:
        """Read the scales of a tensor; where devices get parts of it, of each number along the axis that is divided."""
        scale = self._scales_of(source, name)
        if cut.parallel.devices == 1 or source.layout == "experts":
            return scale
        axis = _axis(source.layout, cut)
        return spread(scale, axis, self._stored.read(file, name).shape[axis])


def _tensors_of_device(source: Source, cut: Cut) -> int:
    """Return how many tensors a device gets something of: those of its own experts, or all."""
    return len(source.tensors) // (cut.parallel.devices if source.layout == "experts" else 1)


def _axis(layout: Layout, cut: Cut) -> int:
    """Return which axis of tensors becomes the one along which the parameter is divided."""
    return 1 - cut.axis if layout in TRANSPOSED else cut.axis


@partial(jax.jit, static_argnames=("layout", "local", "dtype", "cut", "mesh"))
def _place(
    tensors: list[Array | Fp8], layout: Layout, local: tuple[int, ...], dtype: DTypeLike, cut: Cut, mesh: Mesh | None
) -> Array:
    def place(tensors: list[Array | Fp8]) -> Array:
        decoded = [tensor.decoded() if isinstance(tensor, Fp8) else tensor for tensor in tensors]
        return arranged(layout, decoded, local, dtype)

    if mesh is None:
        return place(tensors)
    return jax.shard_map(place, mesh=mesh, in_specs=cut.spec(_axis(layout, cut)), out_specs=cut.spec(cut.axis))(tensors)
