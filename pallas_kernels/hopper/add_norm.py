"""What is still to be added up, added to the hidden states, with the norms before and after that, in one kernel.

    one thread block for each row:

        part 0 [D], part 1 [D], ..., bias [D] ─┐
        or row of expert 0 [D] x share, ...  ──┴─► sum ─► norm, if there is one ─┬─► rounded ─┬──► hidden states
        hidden states [D] ───────────────────────────────────────────────────────┘            └─► norm, if ─► normed

A product whose weights are few has few tiles, so that its depth is divided among thread blocks, which leave a part
each. XLA has a kernel add them up and another one make each norm; here all parts of a row are asked for at once. Of
experts each token has some rows, which XLA gathers and adds up in a kernel of its own, or in two.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.addends import Parts, Shares
from pallas_kernels.compat import kernel_on_references, load, store
from pallas_kernels.hopper.head_rows import Norm
from pallas_kernels.hopper.tiling import SIXTEEN_BITS, why_not_on
from pallas_kernels.varying import NOWHERE, unvaried, vary_like

_THREADS = 128
#: Numbers that fit the registers of a thread block, and what a row is a multiple of: a thread loads 4 at once at most.
_MOST_NUMBERS, _MULTIPLE = 8192, 4


def why_not(width: int, dtype: Any, device: Any) -> str | None:
    """Say why the kernel cannot serve hidden states of a width on a device; None if it can."""
    if reason := why_not_on(device):
        return reason
    if dtype not in SIXTEEN_BITS or width % _MULTIPLE or not _THREADS <= width <= _MOST_NUMBERS:
        return (
            f"it takes multiples of {_MULTIPLE} numbers from {_THREADS} to {_MOST_NUMBERS}, bfloat16 or float16, got "
            f"{width} and {jnp.dtype(dtype)}"
        )
    return None


class Factors(NamedTuple):
    """What the norms around a sum multiply by, [D] each, as it is stored; None where there is no norm."""

    update: Float[Array, " D"] | None  # of what is added to the hidden states
    total: Float[Array, " D"] | None  # of the hidden states then


class Piece(NamedTuple):
    """Numbers of a row that follow each other."""

    begin: int
    size: int
    spread: Any  # their layout in registers
    again: int = 0  # of the first ones, which another piece has, too

    def load(self, row: Any) -> jax.Array:
        """Load them from a reference to a row."""
        return load(row.at[pl.ds(self.begin, self.size)], self.spread)

    def filled(self, value: jax.Array) -> jax.Array:
        """Repeat a number as often as there are numbers."""
        return plgpu.layout_cast(jnp.full((self.size,), value), self.spread)


Row = list[jax.Array]  # of each piece


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="norm")
@jax.enable_x64(False)  # the kernel counts in int32
def add_and_norm(
    x: Float[Array, "rows D"], update: Parts | Shares, factors: Factors, norm: Norm
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Return x plus what is to be added up for each row, and the norm of that; where there is none, the same twice.

    Args:
      x: bfloat16 or float16.
      update: parts of a product, [S, rows, D], or what experts made.
      factors: of the norms of the update, and of the result.
      norm: how both compute.
    """
    given = x, update, factors
    kernel = kernel_on_references(
        "add_norm",
        partial(_add_and_norm, norm=norm),
        out_type=out_types(x, factors),
        scratch_types=[],
        mesh=plgpu.Mesh(grid=(x.shape[0],), grid_names=("row",)),
    )
    results = kernel(*jax.tree.map(unvaried, given))
    return vary_like(results[0], given), vary_like(results[-1], given)


def out_types(x: Any, factors: Factors) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the hidden states, and of their norm if there is one."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=NOWHERE)] * (1 if factors.total is None else 2)


def _add_and_norm(x: Any, update: Parts | Shares, factors: Factors, *outs: Any, norm: Norm) -> None:
    """Do the row of one thread block."""
    do_row(lax.axis_index("row"), x, update, factors, outs, norm, _pieces(x.shape[1]))


def _pieces(width: int) -> tuple[Piece, ...]:
    """Divide a row: what threads share equally, and, if something is left, as many as there are threads at its end."""
    each, rest = divmod(width, _THREADS)
    most = Piece(0, width - rest, plgpu.Layout.WG_STRIDED((width - rest,), math.gcd(each, _MULTIPLE)))
    if not rest:
        return (most,)
    end = Piece(width - _THREADS, _THREADS, plgpu.Layout.WG_STRIDED((_THREADS,), 1), _THREADS - rest)
    return most, end


def do_row(
    row: jax.Array,
    x: Any,
    update: Parts | Shares,
    factors: Factors,
    outs: tuple[Any, ...],
    norm: Norm,
    pieces: tuple[Piece, ...],
    over_devices: Callable[[jax.Array], jax.Array] | None = None,
) -> None:
    """Add up what there is for a row [D], and add that to the hidden states, with the norms that there are.

    Args:
      row: its number.
      x, update, factors, outs: references, to all rows.
      norm: how both norms compute.
      pieces: of a row.
      over_devices: adds up the sums that several devices have; None for one device.
    """
    addends = _addends(update, row, pieces)  # all of them at once
    before = [piece.load(x.at[row]) for piece in pieces]
    stored = (None if each is None else [piece.load(each) for piece in pieces] for each in factors)
    of_update, of_total = (None if each is None else list(map(norm.factors, each)) for each in stored)
    sums = [reduce(jnp.add, each) for each in zip(*addends, strict=True)]
    if over_devices is not None:
        sums = [over_devices(each) for each in sums]
    if of_update is not None:
        sums = _normed(sums, of_update, norm, pieces)
    total = [(old.astype(jnp.float32) + new).astype(old.dtype) for old, new in zip(before, sums, strict=True)]
    _store(outs[0].at[row], total, pieces)
    if of_total is not None:
        exact = [each.astype(jnp.float32) for each in total]
        _store(outs[1].at[row], _normed(exact, of_total, norm, pieces), pieces)


def _addends(update: Parts | Shares, row: jax.Array, pieces: tuple[Piece, ...]) -> list[Row]:
    """Load all that is added up for a row, float32."""
    if isinstance(update, Parts):
        parts: list[Any] = [update.parts.at[i, row] for i in range(update.parts.shape[0])]
        parts += [] if update.bias is None else [update.bias]
        loaded = [[piece.load(part) for piece in pieces] for part in parts]
        return [[numbers.astype(jnp.float32) for numbers in each] for each in loaded]
    made, here = update.made, range(update.place.shape[1])
    places, shares = ([ref[row, i] for i in here] for ref in (update.place, update.share))
    rows = [made.at[jnp.minimum(place, made.shape[0] - 1)] for place in places]
    loaded = [[piece.load(each) for piece in pieces] for each in rows]
    of_each = zip(loaded, places, shares, strict=True)
    return [
        [
            jnp.where(piece.filled(place < made.shape[0]), numbers.astype(jnp.float32), 0.0) * share
            for piece, numbers in zip(pieces, each, strict=True)
        ]
        for each, place, share in of_each
    ]


def _normed(row: Row, factors: Row, norm: Norm, pieces: tuple[Piece, ...]) -> Row:
    """Return the root mean square norm of a row, float32."""
    squares = sum(_sum_of_squares(numbers, piece) for numbers, piece in zip(row, pieces, strict=True))
    scale = lax.rsqrt(squares / (pieces[-1].begin + pieces[-1].size) + norm.epsilon)
    return [numbers * scale * factor for numbers, factor in zip(row, factors, strict=True)]


def _sum_of_squares(numbers: jax.Array, piece: Piece) -> jax.Array:
    squares = numbers * numbers
    if piece.again:
        index = plgpu.broadcasted_iota(jnp.int32, squares.shape, 0, layout=piece.spread)
        squares = jnp.where(index < piece.again, 0.0, squares)
    return jnp.sum(squares)


def _store(out: Any, row: Row, pieces: tuple[Piece, ...]) -> None:
    """Store a row, rounded; what two pieces have is the same in both."""
    for numbers, piece in zip(row, pieces, strict=True):
        store(out.at[pl.ds(piece.begin, piece.size)], numbers.astype(out.dtype))
