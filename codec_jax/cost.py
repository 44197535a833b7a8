"""The cost model: how long one thread block takes for its part of a plan (paper, section 5, C_est).

    segment   segment_us + merge_us x tiles + time of n_q query rows over n KV tokens
    time      cached_us[n_q, n]   K and V come from the L2 cache: arithmetic decides
              memory_us[n_q, n]   every thread block reads K and V of its own: the memory's bandwidth decides

Which of the two holds depends on what all thread blocks do together, so a plan has one number for it
(`Estimate.waiting`). Tables are measured by `python -m codec_jax.profile`; where there is none, a roofline serves.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import warnings
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.packing import TILE_ROWS

_FORMAT = "codec_jax cost model 2"
_AGAIN = "measure again with `python -m codec_jax.profile`"
_LAYOUT = ("num_q_heads", "num_kv_heads", "head_dim", "page_size")
_TABLES = ("memory_us", "cached_us")
_TIMES = ("masked", "segment_us", "merge_us", "launch_us", "stream_us")

_SHIPPED = os.path.join(os.path.dirname(__file__), "costs")
_FAR = 1 << 32  # tokens past the last of a table up to which curves go on straight

#: Share of the wait for memory that shows in narrow blocks however much bandwidth others leave them: a thread block has
#: two blocks in flight, too few to hide all of it.
_LEAST_WAITING = 0.3

Table = tuple[tuple[float, ...], ...]


class Layout(NamedTuple):
    """What the entries of a table hold for."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


@dataclass(frozen=True)
class CostModel:
    """Times in microseconds of one thread block while all thread blocks of the device are busy.

    `memory_us[i][j]` is what `rows[i]` packed query rows need for `tokens[j]` KV tokens of one kv head, on top of an
    empty segment. Times grow with rows and tokens. Raises ValueError for fields that make no table.
    """

    device: str  # `device_kind` of the JAX device, or what else the numbers are for
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    rows: tuple[
        int, ...
    ]  # n_q, ascending; fewer rows cost what the least number of them does: tiles are computed whole
    tokens: tuple[int, ...]  # n, ascending
    memory_us: Table  # [rows, tokens], every thread block reads K and V of its own
    cached_us: Table  # [rows, tokens], all read the same, so that it comes from the L2 cache
    masked: float  # time of cached KV tokens that need a mask of their own over that of others
    segment_us: float  # one more segment: its query rows, and the way to its first block
    merge_us: float  # a partial, to write it; a segment has one for each of its tiles
    launch_us: float  # a call of one row tile, beyond what its busiest thread block does: the start of PAC, and POR
    stream_us: float  # one more merge of POR: each row tile has one for each kv head
    versions: tuple[tuple[str, str], ...] = ()
    date: str = ""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in _LAYOUT:
            _expect(isinstance(value := getattr(self, name), int) and value > 0, name, "a positive integer", value)
        for name in ("rows", "tokens"):
            values = getattr(self, name)
            rising = all(isinstance(x, int) for x in values) and all(a < b for a, b in pairwise((0, *values)))
            _expect(len(values) > 0 and rising, name, "positive integers in ascending order", values)
        for name in _TIMES:
            value = getattr(self, name)
            least = 1.0 if name == "masked" else 0.0
            _expect(_is_number(value) and value >= least, name, f"a finite number of at least {least:g}", value)
        for name in _TABLES:
            table = getattr(self, name)
            shape = [len(row) for row in table]
            expected = [len(self.tokens)] * len(self.rows)
            _expect(shape == expected, name, f"{len(self.rows)} rows of {len(self.tokens)} times", f"rows of {shape}")
            for row in table:
                _expect(all(_is_number(time) and time > 0 for time in row), name, "finite times above 0", row)
            values = np.asarray(table)
            grow = (np.diff(values, axis=0) >= 0).all() and (np.diff(values, axis=1) >= 0).all()
            _expect(bool(grow), name, "times that do not fall with more rows or tokens", table)

    @property
    def layout(self) -> Layout:
        """Heads and pages that the table holds for."""
        return Layout(*(getattr(self, name) for name in _LAYOUT))

    def check_layout(self, layout: Layout) -> None:
        """Raise ValueError for another head layout or page size, or a GPU that the table was not measured on."""
        if self.layout != layout:
            raise ValueError(
                f"cost_model: expected a table for {', '.join(_LAYOUT)} = {tuple(layout)}, got one for "
                f"{tuple(self.layout)}; costs do not carry over to other layouts: pass None, or measure this one with "
                "`python -m codec_jax.profile`"
            )
        device = jax.devices()[0]
        if device.platform == "gpu" and self.date and self.device != device.device_kind:
            raise ValueError(
                f"cost_model: expected a table measured on {device.device_kind!r}, got one of {self.device!r}; {_AGAIN}"
            )

    # ------------------------------------------------------------------ estimates

    def kv_us(
        self, rows: Int[np.ndarray, "*n"] | int, tokens: Float[np.ndarray, "*n"] | int, *, cached: bool = False
    ) -> Float[np.ndarray, "*n"]:
        """Return the time of query rows over KV tokens beyond that of an empty segment, from memory or cached.

        Linear in the tokens between measured ones, from 0 on and past the last: what a block costs does not depend on
        how many there are, so that this is exact where a logarithmic axis would not be. Linear in the logarithm of the
        rows between measured ones, constant below the first, proportional past the last.
        """
        rows, tokens = np.broadcast_arrays(np.asarray(rows, float), np.asarray(tokens, float))
        grid, table = self._curves(cached)
        by_row = np.stack([np.interp(tokens, grid, times) for times in table])  # [rows of the table, *n]
        known = np.log(np.asarray(self.rows, float))
        place = np.interp(np.log(np.maximum(rows, 1)), known, np.arange(len(known)))
        low = np.minimum(place.astype(int), max(len(known) - 2, 0))
        high = np.minimum(low + 1, len(known) - 1)
        first, second = (np.take_along_axis(by_row, i[None], axis=0)[0] for i in (low, high))
        return (first + (place - low) * (second - first)) * np.maximum(rows / self.rows[-1], 1.0)

    def task_us(self, rows: int, tokens: int) -> float:
        """Return C_est(n_q, n): one segment of n_q query rows over n KV tokens, all thread blocks reading their own."""
        tiles = -(-rows // TILE_ROWS)
        return float(self.kv_us(rows, tokens)) + self.segment_us + self.merge_us * tiles

    @functools.cached_property
    def token_us(self) -> Float[np.ndarray, "2 2"]:
        """Time of a token in a long task: [narrow or wide, from memory or cached]."""
        most = self.tokens[-1]
        rows = np.asarray([TILE_ROWS, 2 * TILE_ROWS])
        return np.stack([self.kv_us(rows, most, cached=cached) / most for cached in (False, True)], axis=1)

    def _curves(self, cached: bool) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, "rows points"]]:
        """Return each row of a table as a curve from 0 tokens to so many that nobody has more."""
        grid = np.asarray((0, *self.tokens, self.tokens[-1] + _FAR), float)
        table = np.pad(np.asarray(self.cached_us if cached else self.memory_us, float), ((0, 0), (1, 0)))
        slope = (table[:, -1] - table[:, -2]) / (grid[-2] - grid[-3])
        return grid, np.column_stack([table, table[:, -1] + slope * _FAR])

    @functools.cached_property
    def tiles(self) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, "2 2 points"]]:
        """Times of one tile and of two over tokens: the tokens, and curves [narrow or wide, from memory or cached]."""
        grid, _ = self._curves(False)
        kinds = [[self.kv_us(TILE_ROWS * k, grid, cached=cached) for cached in (False, True)] for k in (1, 2)]
        return grid, np.asarray(kinds)

    # ------------------------------------------------------------------ files and origins

    def save(self, path: str | os.PathLike) -> None:
        """Write the model as JSON; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(
            json.dumps({"format": _FORMAT} | asdict(self) | {"versions": dict(self.versions)}, indent=1) + "\n"
        )
        draft.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostModel:
        """Read a model that `save` wrote. Raises ValueError, with the path, for anything else."""
        try:
            content = json.loads(Path(path).read_text())
            _expect(isinstance(content, dict), "content", "a JSON object", type(content).__name__)
            _expect((found := content.pop("format", None)) == _FORMAT, "format", repr(_FORMAT), found)
            names = {field.name for field in fields(cls)}
            missing, extra = sorted(names - content.keys()), sorted(content.keys() - names)
            _expect(not missing and not extra, "fields", f"also {missing}" if missing else "no others", extra)
            for name in ("device", "dtype", "date"):
                _expect(isinstance(content[name], str), name, "a string", content[name])
            versions = content["versions"]
            _expect(isinstance(versions, dict), "versions", "an object", versions)
            for name in ("rows", "tokens", *_TABLES):
                _expect(isinstance(content[name], list), name, "a list", content[name])
            for name in _TABLES:
                content[name] = tuple(tuple(row) if isinstance(row, list) else () for row in content[name])
            rest = {"rows": tuple(content["rows"]), "tokens": tuple(content["tokens"])}
            return cls(**content | rest | {"versions": tuple((k, str(v)) for k, v in versions.items())})
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: expected a cost model of codec_jax, got a damaged or foreign file: {error}; {_AGAIN}"
            ) from None

    @classmethod
    def roofline(
        cls,
        layout: Layout,
        *,
        device: str = "roofline",
        num_ctas: int = 132,
        bytes_per_us: float = 4.5e6,
        flops_per_us: float = 650e6,
    ) -> CostModel:
        """Return what bandwidth and arithmetic alone would cost, by default those of an H200 with two-byte K and V.

        Plans depend on how costs compare with each other, so it serves other devices too, if less well.
        """
        rows, tokens = (TILE_ROWS, 2 * TILE_ROWS), (128, 32768)
        cached = [[4.0 * r * n * layout.head_dim * num_ctas / flops_per_us for n in tokens] for r in rows]
        read = [4.0 * n * layout.head_dim * num_ctas / bytes_per_us for n in tokens]
        return cls(
            device=device,
            **layout._asdict(),
            dtype="bfloat16",
            rows=rows,
            tokens=tokens,
            memory_us=tuple(tuple(map(max, row, read)) for row in cached),
            cached_us=tuple(tuple(row) for row in cached),
            masked=1.2,
            segment_us=2.0,
            merge_us=1.0,
            launch_us=5.0,
            stream_us=0.03,
        )

    @classmethod
    def default(cls, layout: Layout) -> CostModel:
        """Return the model for the default device: measured by the user, shipped, or else a roofline.

        Where a GPU has no table, a warning says so, once. Files are read again only when they change.
        """
        device = jax.devices()[0]
        if device.platform != "gpu":
            return _proportions(layout)
        for folder in (user_folder(), _SHIPPED):
            if model := _found(folder, device.device_kind, layout):
                return model
        # The registry of `warnings` shows a text once per process and line.
        warnings.warn(
            f"no measured costs for {device.device_kind} with {', '.join(_LAYOUT)} = {tuple(layout)}: plans are "
            "balanced by a roofline; `python -m codec_jax.profile` measures them",
            stacklevel=1,
        )
        return _roofline(layout)

    @classmethod
    def shipped(cls, device: str, layout: Layout) -> CostModel | None:
        """Return the table that comes with the package for a device, on whatever device this runs."""
        return _found(_SHIPPED, device, layout)


class Estimate(NamedTuple):
    """Costs of the blocks and segments of one plan."""

    model: CostModel
    block_tokens: int
    waiting: int  # thousandths of the wait for memory that show in narrow blocks: at 1000 each reads its own
    by_token: int = 1000  # thousandths of the masked blocks that are masked by token; a mask by row costs nothing

    @classmethod
    def of(
        cls,
        model: CostModel,
        block_tokens: int,
        narrow: tuple[float, float],
        wide: tuple[float, float],
        unique: float,
        by_token: float = 1.0,
    ) -> Estimate:
        """Estimate how long blocks wait when so many (unmasked, masked) narrow and wide ones are worked off together.

        All of them take as long as memory or as arithmetic, whichever takes longer, so what memory needs beyond the
        arithmetic is waiting. `unique` of the blocks come from memory, the others from the L2 cache. `by_token` is the
        share of the masked ones whose tokens do not all have the same readers.
        """
        share = round(1000 * by_token)
        fast, slow = (cls(model, block_tokens, waiting, share).block_us for waiting in (0, 1000))
        reading = unique * slow[0, 0]
        computing = float((np.asarray([narrow, wide]) * fast).sum())
        most = float((np.asarray(narrow) * (slow - fast)[0]).sum())
        waiting = min(max((reading - computing) / most, _LEAST_WAITING), 1.0) if most > 0 else 1.0
        return cls(model, block_tokens, round(1000 * waiting), share)

    @property
    def masked(self) -> float:
        """Time of a cached masked block over that of another."""
        return 1.0 + (self.model.masked - 1.0) * self.by_token / 1000

    @property
    def block_us(self) -> Float[np.ndarray, "2 2"]:
        """Time of one of many blocks: [narrow or wide, unmasked or masked]."""
        memory, cached = self.model.token_us.T[:, :, None] * self.block_tokens
        cached = cached * np.asarray([1.0, self.masked])
        return cached + self._shown(np.asarray([[False], [True]])) * np.maximum(memory - cached, 0.0)

    def _shown(self, wide: Any) -> Any:
        """Return the share of the wait that shows: all of it in wide blocks, whichever memory brings them."""
        return np.where(wide, 1.0, self.waiting / 1000)

    def segment_us(self, wide: Any) -> Any:
        """Return what a segment costs beyond its blocks."""
        return self.model.segment_us + self.model.merge_us * (1 + wide)

    @property
    def opening_us(self) -> Float[np.ndarray, " 2"]:
        """Cost of a segment, narrow or wide, beyond blocks that cost what one of many does: the first take longer."""
        grid, curves = self.model.tiles
        memory, cached = (curves[:, :, 1] - self.model.token_us * grid[1]).T
        wide = np.asarray([False, True])
        return self.segment_us(wide) + np.maximum(cached + self._shown(wide) * (memory - cached), 0.0)

    def segments(
        self, wide: Int[np.ndarray, " n"], unmasked: Int[np.ndarray, " n"], masked: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """Return the cost of each segment from its kind and its blocks, in microseconds."""
        blocks = unmasked + masked
        grid, curves = self.model.tiles
        memory, cached = (
            np.where(wide, *(np.interp(blocks * self.block_tokens, grid, curves[kind, source]) for kind in (1, 0)))
            for source in (0, 1)
        )
        cached = cached * (1 + (self.masked - 1) * masked / np.maximum(blocks, 1))
        return self.segment_us(wide) + cached + self._shown(wide) * np.maximum(memory - cached, 0.0)


def user_folder() -> str:
    """Return where `codec_jax.profile` keeps tables: codec_jax in $XDG_CACHE_HOME, or in ~/.cache."""
    return os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "codec_jax"
    )


def file_name(device: str, layout: Layout, dtype: str = "bfloat16") -> str:
    """Return the name of the table for a device and a layout.

    The kernels take two-byte numbers only and treat them alike, so that `make_plan` looks for one dtype.
    """
    device = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    heads = f"{layout.num_q_heads}q_{layout.num_kv_heads}kv_{layout.head_dim}"
    return f"{device}-{heads}-page{layout.page_size}-{dtype}.json"


def _found(folder: str, device: str, layout: Layout) -> CostModel | None:
    path = os.path.join(folder, file_name(device, layout))
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _loaded(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=16)
def _loaded(path: str, mtime_ns: int, size: int) -> CostModel:
    return CostModel.load(path)


@functools.lru_cache(maxsize=16)
def _roofline(layout: Layout) -> CostModel:
    return CostModel.roofline(layout)


@functools.lru_cache(maxsize=16)
def _proportions(layout: Layout) -> CostModel:
    """Return costs that only shape a plan: segments and blocks compare as on a GPU, however small the heads are."""
    return replace(_roofline(layout._replace(head_dim=128)), head_dim=layout.head_dim)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _expect(holds: bool, name: str, expected: object, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")
