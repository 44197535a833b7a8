"""The cost model: how long one thread block takes for a segment (paper, section 5, C_est).

    segment   segment_us[tiles] + time of its query rows over n KV tokens
    time      cached_us[tiles, n]   K and V come from the L2 cache: arithmetic decides
              memory_us[tiles, n]   every thread block reads K and V of its own: the memory's bandwidth decides

Which of the two holds depends on what all thread blocks do together: see `estimate`. Tables are measured by `python -m
codec_jax.profile`, and hold for any number of heads of their size; where there is none, a roofline serves. Paper: doi
10.1145/3802028.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from codec_jax import checks
from codec_jax.planning.published_rates import Rates, published_rates
from pallas_kernels.packing import TILE_ROWS

_FORMAT = "codec_jax cost model 3"
_ONE_BYTE = "float8_e4m3fn"
_MEASURE_AGAIN = "measure again with `python -m codec_jax.profile`"
_SHIPPED = os.path.join(os.path.dirname(__file__), "costs")
_FAR = 1 << 32  # tokens past the last of a table up to which curves go on straight

Table = tuple[tuple[float, ...], ...]


class HeadLayout(NamedTuple):
    """Heads and pages that a table of costs was measured with. It holds for all heads of this size."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


@dataclass(frozen=True)
class CostModel:
    """Times in microseconds of one thread block while all thread blocks of the device are busy.

    `memory_us[i][j]` is what the query rows of i + 1 tiles need for `tokens[j]` KV tokens of one kv head, on top of an
    empty segment. Times grow with tiles and tokens. Raises ValueError for fields that make no table.

    >>> from codec_jax.planning.cost import HeadLayout
    >>> layout = HeadLayout(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16)
    >>> model = CostModel.shipped("NVIDIA H200", layout)
    >>> model.check_layout(layout)  # raises nothing: the table is for heads of this size
    >>> model.kv_us(wide=[False, True], tokens=4096, cached=False).tolist()
    [59.232, 59.232]
    >>> model.save("costs.json")
    >>> CostModel.load("costs.json") == model
    True

    Source: CoDec, section 5, C_est.
    """

    device: str  # `device_kind` of the JAX device, or what else the numbers are for
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    rows: tuple[int, ...]  # of one tile, and of two
    tokens: tuple[int, ...]  # ascending
    memory_us: Table  # [2, tokens], every thread block reads K and V of its own
    cached_us: Table  # [2, tokens], all read the same, so that it comes from the L2 cache
    masked: float  # time of cached KV tokens that need a mask of their own over that of others
    segment_us: tuple[float, float]  # a segment of one tile, of two: query rows, the way to its first block, partials
    launch_us: float  # a call of one row tile, beyond what its busiest thread block does: the start of PAC, and POR
    stream_us: float  # one more merge of POR: each row tile has one for each kv head
    versions: tuple[tuple[str, str], ...] = ()
    date: str = ""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in HeadLayout._fields:
            checks.integer(name, getattr(self, name))
        for name in ("masked", "launch_us", "stream_us"):
            minimum = 1.0 if name == "masked" else 0.0
            if not checks.number(name, value := getattr(self, name)) >= minimum:
                raise ValueError(f"{name}: expected a finite number of at least {minimum:g}, got {value}")
        opening = self.segment_us
        if len(opening) != 2 or (np.diff([0.0, *(checks.number("segment_us", us) for us in opening)]) < 0).any():
            raise ValueError(f"segment_us: expected 2 times that do not fall with more tiles, from 0 on, got {opening}")
        for name, values in (("rows", self.rows), ("tokens", self.tokens)):
            if len(values) < 2 or (np.diff([0, *(checks.integer(name, value) for value in values)]) <= 0).any():
                raise ValueError(f"{name}: expected positive integers in ascending order, two at least, got {values}")
        for name, table in (("memory_us", self.memory_us), ("cached_us", self.cached_us)):
            if [len(row) for row in table] != [len(self.tokens)] * 2:
                raise ValueError(f"{name}: expected 2 rows of {len(self.tokens)} times, got {table}")
            times = np.asarray([[checks.number(name, time) for time in row] for row in table])
            if (times <= 0).any() or (np.diff(times, axis=0) < 0).any() or (np.diff(times, axis=1) < 0).any():
                raise ValueError(
                    f"{name}: expected positive times that do not fall with more rows or tokens, got {table}"
                )

    @property
    def layout(self) -> HeadLayout:
        """Heads and pages that the table was measured with."""
        return HeadLayout(*(getattr(self, name) for name in HeadLayout._fields))

    def check_layout(self, layout: HeadLayout) -> None:
        """Raise ValueError for heads of another size, or a GPU that the table was not measured on.

        Args:
          layout: that of the plan. How many heads there are, and the size of pages, may be others than in the table:
            a row tile is 64 rows of one kv head in any case.
        """
        if self.head_dim != layout.head_dim:
            raise ValueError(
                f"cost_model: expected a table for head_dim = {layout.head_dim}, got one for {self.head_dim}; costs "
                "do not carry over to heads of another size: pass None, or measure these with "
                "`python -m codec_jax.profile`"
            )
        device = jax.devices()[0]
        if device.platform == "gpu" and self.date and self.device != device.device_kind:
            raise ValueError(
                f"cost_model: expected a table measured on {device.device_kind!r}, got one of {self.device!r}; "
                f"{_MEASURE_AGAIN}"
            )

    # ------------------------------------------------------------------ estimates

    @property
    def is_one_byte(self) -> bool:
        """Whether the costs are those of pages of one byte a number."""
        return self.dtype == _ONE_BYTE

    def of_one_byte(self) -> CostModel:
        """Return costs over pages of one byte, given those of 16 bits: half as much to read, as much to compute.

        >>> from codec_jax.planning.cost import HeadLayout
        >>> model = CostModel.roofline(HeadLayout(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16))
        >>> model.of_one_byte().token_us[0, 0] / model.token_us[0, 0]
        np.float64(0.5)
        """
        if self.is_one_byte:
            return self
        memory = np.maximum(np.asarray(self.memory_us) / 2, self.cached_us)
        return replace(self, memory_us=_frozen(memory.tolist()), dtype=_ONE_BYTE)

    def kv_us(self, wide: Any, tokens: Any, *, cached: bool) -> Float[np.ndarray, "*n"]:
        """Return the time of one tile, or of two, over KV tokens beyond that of an empty segment.

        Linear in the tokens between measured ones, from 0 on and past the last: what a block costs does not depend on
        how many there are, so that this is exact where a logarithmic axis would not be.

        Args:
          wide: whether two tiles read the tokens, or one; a bool or an array.
          tokens: KV tokens, a number or an array.
          cached: whether K and V come from the L2 cache.
        """
        grid, curves = self._curves
        narrow_us, wide_us = (np.interp(tokens, grid, curves[tiles, int(cached)]) for tiles in (0, 1))
        return np.where(wide, wide_us, narrow_us)

    @functools.cached_property
    def token_us(self) -> Float[np.ndarray, "2 2"]:
        """Microseconds that a token takes in a long task, as [narrow or wide, from memory or cached]."""
        return np.stack([self.memory_us, self.cached_us], axis=1)[:, :, -1] / self.tokens[-1]

    @functools.cached_property
    def _curves(self) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, "2 2 points"]]:
        """Return tokens from 0 to so many that nobody has more, and times: [narrow or wide, from memory or cached]."""
        table = np.stack([self.memory_us, self.cached_us], axis=1)
        slope = (table[..., -1] - table[..., -2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = (table[..., -1] + slope * _FAR)[..., None]
        grid = np.asarray((0, *self.tokens, self.tokens[-1] + _FAR), float)
        return grid, np.concatenate([np.zeros_like(beyond), table, beyond], axis=-1)

    # ------------------------------------------------------------------ files and origins

    def save(self, path: str | os.PathLike) -> None:
        """Write the model as JSON; the file appears whole or not at all.

        Args:
          path: the file; folders that are missing are made.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        content = {"format": _FORMAT} | asdict(self) | {"versions": dict(self.versions)}
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostModel:
        """Read a model that `save` wrote.

        Args:
          path: the file.

        Raises ValueError, with the path, for anything else.
        """
        try:
            content = json.loads(Path(path).read_text())
            if (found := content.pop("format", None)) != _FORMAT:
                raise ValueError(f"format: expected {_FORMAT!r}, got {found!r}")
            if (names := {field.name for field in fields(cls)}) != content.keys():
                raise ValueError(f"fields: expected {sorted(names)}, got {sorted(content)}")
            content["versions"] = list(content["versions"].items())
            return cls(**{name: _frozen(value) for name, value in content.items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:  # of a file that holds something else
            raise ValueError(
                f"{path}: expected a cost model of codec_jax, got a damaged or foreign file: {error}; {_MEASURE_AGAIN}"
            ) from None

    @classmethod
    def roofline(
        cls,
        layout: HeadLayout,
        *,
        device: str = "roofline",
        num_ctas: int = 132,
        bytes_per_us: float = 4.5e6,
        flops_per_us: float = 650e6,
        values_in_keys: bool = False,
    ) -> CostModel:
        """Return what bandwidth and arithmetic alone would cost, by default those of an H200 with two-byte K and V.

        Plans depend on how costs compare with each other, so it serves other devices too, if less well.

        Args:
          layout: `codec_jax.planning.cost.HeadLayout`: q heads, kv heads, head size and page size.
          device: a name for it.
          num_ctas: thread blocks that share the bandwidth and the arithmetic.
          bytes_per_us: bandwidth of the memory.
          flops_per_us: arithmetic.
          values_in_keys: whether values are numbers of the keys, as of latents, and are read with them.

        Raises ValueError for rates that are not positive numbers.

        >>> from codec_jax.planning.cost import HeadLayout
        >>> model = CostModel.roofline(HeadLayout(8, 2, 64, 16), device="another GPU", bytes_per_us=2e6)
        >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[1000, 20, 5], leaf=[1, 2])
        >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64, cost_model=model)
        """
        num_ctas = checks.integer("num_ctas", num_ctas)
        for name, rate in (("bytes_per_us", bytes_per_us), ("flops_per_us", flops_per_us)):
            if not checks.number(name, rate) > 0:
                raise ValueError(f"{name}: expected a positive number, got {rate}")
        rows, tokens = (TILE_ROWS, 2 * TILE_ROWS), (128, 32768)
        cached = [[4.0 * r * n * layout.head_dim * num_ctas / flops_per_us for n in tokens] for r in rows]
        moved = layout.head_dim * num_ctas / bytes_per_us  # a byte for each number of a head, in all thread blocks
        read = [(2.0 if values_in_keys else 4.0) * n * moved for n in tokens]
        return cls(
            device=device,
            **layout._asdict(),
            dtype="bfloat16",
            rows=rows,
            tokens=tokens,
            memory_us=tuple(tuple(map(max, row, read)) for row in cached),
            cached_us=_frozen(cached),
            masked=1.2,
            # A few trips to memory, the query of a tile, and a partial of each: four bytes a number, slower to write.
            segment_us=(3.0 + 7.0 * TILE_ROWS * moved, 3.0 + 12.0 * TILE_ROWS * moved),
            launch_us=5.0,
            stream_us=8.0 * TILE_ROWS * moved / num_ctas,  # a partial is read, and others wait for it
        )

    @classmethod
    def default(cls, layout: HeadLayout, *, values_in_keys: bool = False) -> CostModel:
        """Return the model for the default device: measured by the user, shipped, or else a roofline.

        Where there is no table for a layout, one of other heads of this size serves, the most alike; one of those that
        cannot be read is left out, with a warning. The roofline is of the GPU's published rates, or else of an H200.
        Where a GPU has no table for it, a warning says so, once; not for values in keys, of which there are none. Files
        are read again only when they change.

        Args:
          layout: as in `roofline`.
          values_in_keys: as in `roofline`.

        Raises ValueError, with the path, for a table of this layout that cannot be read or holds something else.

        >>> from codec_jax.planning.cost import HeadLayout
        >>> CostModel.default(HeadLayout(8, 2, 64, 16)).head_dim
        64
        """
        device = jax.devices()[0]
        if device.platform != "gpu":
            # Costs only shape a plan: as on a GPU, however small the heads are.
            return _roofline(layout, 128, values_in_keys)
        for find in (_found, _found_alike):
            for folder in (user_folder(), _SHIPPED):
                if model := find(folder, device.device_kind, layout):
                    return model
        if not values_in_keys:
            # The registry of `warnings` shows a text once per process and line.
            warnings.warn(
                f"no measured costs for {device.device_kind} with head_dim = {layout.head_dim}: plans are balanced by "
                "a roofline; `python -m codec_jax.profile` measures them",
                stacklevel=1,
            )
        rates = published_rates(device.device_kind)
        return _roofline(layout, layout.head_dim, values_in_keys, rates, device.core_count)

    @classmethod
    def shipped(cls, device: str, layout: HeadLayout) -> CostModel | None:
        """Return the table that comes with the package for a device, on whatever device this runs; None if none does.

        Args:
          device: `device_kind` of the JAX device.
          layout: as in `roofline`.
        """
        return _found(_SHIPPED, device, layout)


def user_folder() -> str:
    """Return where `codec_jax.profile` keeps tables: codec_jax in $XDG_CACHE_HOME, or in ~/.cache."""
    return os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "codec_jax"
    )


def file_name(device: str, layout: HeadLayout, dtype: str = "bfloat16") -> str:
    """Return the name of the table for a device and a layout.

    The kernels take two-byte numbers only and treat them alike, so that `make_plan` looks for one dtype.
    """
    heads = f"{layout.num_q_heads}q_{layout.num_kv_heads}kv_{layout.head_dim}"
    return f"{_plain(device)}-{heads}-page{layout.page_size}-{dtype}.json"


def _plain(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def _found(folder: str, device: str, layout: HeadLayout) -> CostModel | None:
    path = os.path.join(folder, file_name(device, layout))
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _loaded(path, status.st_mtime_ns, status.st_size)


def _found_alike(folder: str, device: str, layout: HeadLayout) -> CostModel | None:
    """Find a table of other heads of this size, the most similar in pages, q heads for a kv head, and kv heads."""
    number = "([1-9][0-9]*)"
    name = re.compile(rf"{_plain(device)}-{number}q_{number}kv_({layout.head_dim})-page{number}-bfloat16\.json")
    try:
        files = os.listdir(folder)
    except OSError:
        return None
    found = [HeadLayout(*map(int, match.groups())) for file in files if (match := name.fullmatch(file))]

    def sizes(of: HeadLayout) -> tuple[float, ...]:
        return of.page_size, of.num_q_heads / of.num_kv_heads, of.num_kv_heads

    def unlike(other: HeadLayout) -> tuple[float, ...]:
        return *(abs(math.log(a / b)) for a, b in zip(sizes(layout), sizes(other), strict=True)), *other

    for other in sorted(found, key=unlike):
        try:
            if model := _found(folder, device, other):
                return model
        except ValueError as error:
            warnings.warn(f"{error}; or remove it: plans for other heads do without it", stacklevel=1)
    return None


@functools.lru_cache(maxsize=16)
def _loaded(path: str, mtime_ns: int, size: int) -> CostModel:
    del mtime_ns, size  # of another file, which is read anew
    try:
        model = CostModel.load(path)
    except OSError as error:
        raise ValueError(f"{path}: expected a file that can be read, got {error}; {_MEASURE_AGAIN}") from None
    if (name := file_name(model.device, model.layout, model.dtype)) != os.path.basename(path):
        raise ValueError(f"{path}: expected the table that its name says, got {name}; {_MEASURE_AGAIN}")
    return model


@functools.lru_cache(maxsize=16)
def _roofline(
    layout: HeadLayout, head_dim: int, values_in_keys: bool, rates: Rates | None = None, num_ctas: int = 0
) -> CostModel:
    known = {} if rates is None else {"num_ctas": num_ctas, **rates._asdict()}
    model = CostModel.roofline(layout._replace(head_dim=head_dim), values_in_keys=values_in_keys, **known)
    return replace(model, head_dim=layout.head_dim)


def _frozen(value: Any) -> Any:
    """Return nested lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
