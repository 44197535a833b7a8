"""The online softmax of PAC on GPUs since Ampere: the state of a row tile, and how scores of a block become weights.

Weights of a row are relative to a number, its reference, and any will do that lets none overflow, as outputs and sums
are divided by each other in the end. A warp keeps the references of its rows until a score is far above one of them;
so for most blocks nothing is scaled, and no thread asks another one for a maximum or a sum. A row takes a new reference
for its own scores alone, never for those of other rows. All is in units of log2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_kernels import by_warp
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.row_registers import broadcast_rows, filled
from pallas_kernels.softmax import MASK_VALUE, MIN_ROW_MAX

#: Weights are added up by columns 8 apart, which threads do by themselves.
_SUMS = 8
#: Far above: a weight of 1024. Float16 has room for 64 times as much.
_FAR = 10.0


class State(NamedTuple):
    """Softmax of a tile's rows so far, not normalised."""

    accs: list[jax.Array]  # [64, 64] each
    reference: jax.Array  # [64]: the maximum, or up to 10 less
    sums: jax.Array  # of weights, [64, 8]


def init_state(columns: int) -> State:
    """Return the state of a tile that has seen nothing, for values of so many columns."""
    accs = [filled(0, TILE_ROWS, 64)] * (columns // 64)
    return State(accs, filled(MIN_ROW_MAX, TILE_ROWS), filled(0, TILE_ROWS, _SUMS))


def row_sum(state: State) -> jax.Array:
    """Return the sum of each row's weights, [64]."""
    return state.sums.sum(axis=1)


def weigh(state: State, scores: jax.Array, factor: float, visible: jax.Array) -> tuple[State, jax.Array]:
    """Return the state without the products of a block's weights with its values, and the weights, [64, tokens].

    Args:
      state: so far.
      scores: float32 [64, tokens], lowered where a row does not see a token.
      factor: from scores to units of log2.
      visible: bool [64], the rows that see the block at all.
    """
    most = by_warp.fold_columns(arith.maximumf, scores)  # [64, 8]
    most = jnp.where(broadcast_rows(visible, _SUMS), most, MASK_VALUE)

    def keep(state: State) -> State:
        return state

    def renew(state: State) -> State:
        row_max = most.max(axis=1) * factor  # [64]
        reference = jnp.where(row_max > state.reference + _FAR, row_max, state.reference)
        alpha = jnp.exp2(state.reference - reference)
        accs = [acc * broadcast_rows(alpha, 64) for acc in state.accs]
        return State(accs, reference, state.sums * broadcast_rows(alpha, _SUMS))

    above = most * factor - broadcast_rows(state.reference, _SUMS)
    state = lax.switch(by_warp.any_above(above, _FAR), [keep, renew], state)
    weights = jnp.exp2(scores * factor - broadcast_rows(state.reference, scores.shape[1]))
    weights = jnp.where(broadcast_rows(visible, scores.shape[1]), weights, 0.0)
    return state._replace(sums=state.sums + by_warp.fold_columns(arith.addf, weights)), weights
