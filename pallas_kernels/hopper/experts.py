"""The experts of a mixture on Hopper GPUs: tokens in the order of the experts, and what those make of them."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_rows import rows_of_experts, tiles_of
from pallas_kernels.gates import Activation
from pallas_kernels.hopper.tiling import SIXTEEN_BITS, why_not_on
from pallas_kernels.varying import unvaried, vary_like

_MULTIPLE = 64  # of the numbers of a row: what a row of a block in shared memory has


def why_not(rows: Any, down: Any, device: Any) -> str | None:
    """Say why the kernel cannot serve rows [R, D] and weights [E, F, D] on a device; None if it can."""
    if reason := why_not_on(device):
        return reason
    if rows.dtype not in SIXTEEN_BITS or down.dtype != rows.dtype:
        return f"it takes bfloat16 or float16, the same for all, got {rows.dtype} and weights of {down.dtype}"
    if down.shape[1] % _MULTIPLE or down.shape[2] % _MULTIPLE:
        return (
            f"it takes hidden sizes and sizes of experts that are multiples of {_MULTIPLE}, got {down.shape[2]} and "
            f"{down.shape[1]}"
        )
    return None


# A step calls it in every layer: a jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("activation", "num_ctas"))
@jax.enable_x64(False)  # the kernels count in int32
def map_rows(
    x: Float[Array, "T D"],
    expert: Int[Array, "T chosen"],
    gate_up: Float[Array, "E D 2F"],
    down: Float[Array, "E F D"],
    gate_up_bias: Float[Array, "E 2F"] | None,
    down_bias: Float[Array, "E D"] | None,
    *,
    activation: Activation,
    num_ctas: int,
) -> tuple[Float[Array, "R D"], Int[Array, "T chosen"]]:
    """Return what its expert makes of each row, and which rows a token has, as `ExpertRows.place`.

    Rows that no token has may be anything.
    """
    # A JAX that was built without GPU support may not have their dialect.
    from pallas_kernels.hopper.arrange import arrange, pays
    from pallas_kernels.hopper.grouped import TILE_ROWS, grouped_product

    given = x, expert, gate_up, down, gate_up_bias, down_bias
    x, expert, gate_up, down, gate_up_bias, down_bias = jax.tree.map(unvaried, given)
    if pays(x, expert, len(down)):
        rows, place, tiles = arrange(x, expert, len(down))
    else:
        order = rows_of_experts(expert, len(down))
        rows, place, tiles = x[order.token], order.place, tiles_of(order, TILE_ROWS)
    hidden = grouped_product(rows, gate_up, gate_up_bias, tiles, activation=activation, num_ctas=num_ctas)
    made = grouped_product(hidden, down, down_bias, tiles, num_ctas=num_ctas)
    return vary_like(made, given), vary_like(place, given)
