"""Parts of a sum, added to the hidden states and up, with the norms before and after that, in one kernel.

    one thread block for each row:

        part 0        [D] ─┐
        part 1        [D] ─┴─► sum ─► norm, if there is one ─┬─► rounded ─┬─────────────► hidden states
        hidden states [D] ───────────────────────────────────┘            └─► norm, if ─► normed

A product whose weights are few has few tiles, so that its depth is divided among thread blocks, which leave a part
each. XLA has a kernel add them up and another one make each norm; here all parts of a row are asked for at once.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.compat import kernel_on_references, load, store
from pallas_kernels.hopper.head_rows import Norm
from pallas_kernels.hopper.tiling import SIXTEEN_BITS, why_not_on
from pallas_kernels.varying import NOWHERE, unvaried, vary_like

_THREADS = 128
#: Numbers that fit the registers of a thread block.
_MOST_NUMBERS = 8192


def why_not(width: int, dtype: Any, device: Any) -> str | None:
    """Say why the kernel cannot serve hidden states of a width on a device; None if it can."""
    if reason := why_not_on(device):
        return reason
    if dtype not in SIXTEEN_BITS or width % _THREADS or width > _MOST_NUMBERS:
        return (
            f"it takes multiples of {_THREADS} numbers up to {_MOST_NUMBERS}, bfloat16 or float16, got {width} and "
            f"{dtype}"
        )
    return None


class Factors(NamedTuple):
    """What the norms around a sum multiply by, [D] each, as it is stored; None where there is no norm."""

    update: Float[Array, " D"] | None  # of what is added to the hidden states
    total: Float[Array, " D"] | None  # of the hidden states then


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="norm")
@jax.enable_x64(False)  # the kernel counts in int32
def add_and_norm(
    x: Float[Array, "rows D"], parts: Float[Array, "S rows D"], factors: Factors, norm: Norm
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Return x plus the sum of the parts, and the norm of that; where there is none, the same twice.

    Args:
      x: bfloat16 or float16.
      parts: float32, or one part like x.
      factors: of the norms of the parts' sum, and of the result.
      norm: how both compute.
    """
    given = x, parts, factors
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


def _add_and_norm(x: Any, parts: Any, factors: Factors, *outs: Any, norm: Norm) -> None:
    """Do the row of one thread block."""
    spread = plgpu.Layout.WG_STRIDED((x.shape[1],), math.gcd(x.shape[1] // _THREADS, 4))
    do_row(lax.axis_index("row"), x, parts, factors, outs, norm, spread)


def do_row(
    row: jax.Array,
    x: Any,
    parts: Any,
    factors: Factors,
    outs: tuple[Any, ...],
    norm: Norm,
    spread: Any,
    over_devices: Callable[[jax.Array], jax.Array] | None = None,
) -> None:
    """Add up the parts of a row [D], and add that to the hidden states, with the norms that there are.

    Args:
      row: its number.
      x, parts, factors, outs: references, to all rows.
      norm: how both norms compute.
      spread: the layout of a row in registers.
      over_devices: adds up the sums that several devices have; None for one device.
    """
    loaded = [load(parts.at[i, row], spread) for i in range(parts.shape[0])]  # all of them at once
    update = reduce(jnp.add, (part.astype(jnp.float32) for part in loaded))
    before = load(x.at[row], spread)
    of_update, of_total = (None if each is None else norm.factors(load(each, spread)) for each in factors)
    if over_devices is not None:
        update = over_devices(update)
    if of_update is not None:
        update = _normed(update, of_update, norm)
    total = (before.astype(jnp.float32) + update).astype(before.dtype)
    store(outs[0].at[row], total)
    if of_total is not None:
        store(outs[1].at[row], _normed(total.astype(jnp.float32), of_total, norm).astype(total.dtype))


def _normed(row: jax.Array, factors: jax.Array, norm: Norm) -> jax.Array:
    """Return the root mean square norm of a row [D], float32."""
    return row * lax.rsqrt(jnp.sum(row * row) / row.shape[0] + norm.epsilon) * factors
