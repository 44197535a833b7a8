"""Parts of a sum, added to the hidden states and up, and the root mean square norm of that, in one kernel.

    one thread block for each row:

        hidden states [D] ─┐
        part 0        [D] ─┼─► sum ─► rounded ─┬──────────────────────► hidden states
        part 1        [D] ─┘                   └─► mean of squares ─┬─► normed
                                  learned factors [D] ──────────────┘

A product whose weights are few has few tiles, so that its depth is divided among thread blocks, which leave a part
each. XLA has a kernel add them up and another one make the norm; here all parts of a row are asked for at once.
"""

import math
from functools import partial, reduce
from typing import Any

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


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames="norm")
@jax.enable_x64(False)  # the kernel counts in int32
def add_and_norm(
    x: Float[Array, "rows D"], parts: Float[Array, "S rows D"], factors: Float[Array, " D"], norm: Norm
) -> tuple[Float[Array, "rows D"], Float[Array, "rows D"]]:
    """Return x plus the sum of the parts, and the norm of that.

    Args:
      x: bfloat16 or float16.
      parts: float32.
      factors: of the norm, as they are stored.
      norm: how it computes.
    """
    given = x, parts, factors
    kernel = kernel_on_references(
        "add_norm",
        partial(_add_and_norm, norm=norm),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=NOWHERE)] * 2,
        scratch_types=[],
        mesh=plgpu.Mesh(grid=(x.shape[0],), grid_names=("row",)),
    )
    total, normed = kernel(*map(unvaried, given))
    return vary_like(total, given), vary_like(normed, given)


def _add_and_norm(x: Any, parts: Any, factors: Any, total: Any, normed: Any, norm: Norm) -> None:
    """Do the row of one thread block."""
    row, width = lax.axis_index("row"), x.shape[1]
    spread = plgpu.Layout.WG_STRIDED((width,), math.gcd(width // _THREADS, 4))
    added = sum_of([x.at[row], *(parts.at[i, row] for i in range(parts.shape[0]))], spread)
    store_norm(added, norm.factors(load(factors, spread)), norm, total.at[row], normed.at[row])


def sum_of(refs: list[Any], spread: Any) -> jax.Array:
    """Load rows, all of them at once, and add them up; [D] in registers, float32."""
    return reduce(jnp.add, (each.astype(jnp.float32) for each in [load(ref, spread) for ref in refs]))


def store_norm(added: jax.Array, factors: jax.Array, norm: Norm, total: Any, normed: Any) -> None:
    """Round a row [D], store it, and store its norm."""
    rounded = added.astype(total.dtype)
    store(total, rounded)
    exact = rounded.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(exact * exact) / added.shape[0] + norm.epsilon)
    store(normed, (exact * scale * factors).astype(normed.dtype))
