"""The online softmax of PAC: the state of a row tile, and two ways to add the scores of a block to it.

Weights of a row are relative to a number, its reference, and any will do that lets none overflow, as outputs and sums
are divided by each other in the end. `_add_exactly` takes the maximum so far: weights wait for the maximum of their
block, and what is added up already is scaled for every block. `_add_by_reference` keeps a reference until a block has
weights far above 1, and adds that block again, by its maximum. Weights follow the scores at once then, and
accumulators are left alone. A row takes a new reference for its own scores alone, never for those of other rows.

Scores and references are in units of log2, since exp2 is what the hardware computes. One maximum for all rows, and a
second try where weights overflow, are in FlashDecoding++ (https://arxiv.org/abs/2311.01282).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_warp
from pallas_kernels.hopper import pac_cap
from pallas_kernels.hopper.pac_mask import clear_other_rows
from pallas_kernels.hopper.pac_pipeline import Sizes
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.row_registers import all_rows, broadcast_rows, filled, over_rows
from pallas_kernels.softmax import FEW_TERMS, MASK_VALUE, MIN_ROW_MAX, tanh_over

#: By reference, weights are added up by columns 8 apart, which threads do by themselves.
_SUMS = 8
#: Far above 1: a sum of weights for which a row takes a new reference. Float16 has room for 64 times as much.
_FAR = 1024.0

#: Scores of a block: products or others [64, block], and a factor, by number, by row or by score.
_Try = Callable[[], tuple[jax.Array, float | jax.Array]]


class State(NamedTuple):
    """Softmax of a tile so far, not normalised."""

    accs: list[jax.Array]  # [64, columns] each
    reference: jax.Array  # [64]: the maximum, or up to 10 less
    sums: jax.Array  # of weights, [64], or by reference [64, 8]


class Scores(NamedTuple):
    """Products of a tile with a block of keys, masked, and what makes scores of them."""

    products: jax.Array  # [64, block]
    factor: float | jax.Array  # or [64]
    visible: jax.Array  # [64], the rows that see the block at all
    value_scale: jax.Array | None  # [block], factors on values; weights have them when they are multiplied


def init_state(sizes: Sizes, by_reference: bool) -> State:
    """Return the state of a tile that has seen nothing, for one of the two ways."""
    return State(
        accs=[filled(0, TILE_ROWS, sizes.acc_columns)] * (sizes.value_head_dim // sizes.acc_columns),
        reference=filled(MIN_ROW_MAX if by_reference else MASK_VALUE, TILE_ROWS),
        sums=filled(0, TILE_ROWS, _SUMS) if by_reference else filled(0, TILE_ROWS),
    )


def score_factor(sizes: Sizes, row_scale: jax.Array | None) -> float | jax.Array:
    """Return what makes scores of products, capped ones if scores are: a number, or one of each row, [64]."""
    return sizes.factor if row_scale is None or sizes.cap_factor is not None else sizes.factor * row_scale


def add_masked(sizes: Sizes, state: State, scores: Scores, is_new: jax.Array) -> tuple[jax.Array, State]:
    """Return a block's weights [64, block], rounded, and the state without their products with values.

    Args:
      sizes: of the kernel; they say which way.
      state: so far.
      scores: those of the block, capped.
      is_new: whether the rows of a warp that see the block have seen nothing yet.
    """
    return (_add_by_reference if sizes.by_reference else _add_exactly)(sizes, state, scores, is_new)


def add_unmasked(
    sizes: Sizes,
    state: State,
    products: jax.Array,
    row_scale: jax.Array | None,
    value_scale: jax.Array | None,
    is_new: jax.Array,
    by_reference: bool,
) -> tuple[jax.Array, State]:
    """Do as `add_masked` for products [64, block] that all rows see, not capped yet, in one of the two ways.

    By reference, the first try takes all capped scores for small ones, and a warp that has others skips it.
    """
    cap_factor = sizes.cap_factor
    scores = Scores(products, score_factor(sizes, row_scale), all_rows(), value_scale)
    if cap_factor is None or sizes.invariant or not by_reference:
        scores = scores._replace(products=pac_cap.capped(sizes, products, row_scale, apart=False))
        return (_add_by_reference if by_reference else _add_exactly)(sizes, state, scores, is_new)
    products = pac_cap.of_row(products, row_scale)
    most = pac_cap.greatest(products)  # [64, 8]

    def of_small() -> tuple[jax.Array, float | jax.Array]:
        return products, tanh_over(products, cap_factor, FEW_TERMS, sizes.factor)

    def of_any() -> tuple[jax.Array, float | jax.Array]:
        return pac_cap.scores(sizes, cap_factor, products, most), 1.0

    is_new |= pac_cap.is_beyond(FEW_TERMS, cap_factor, most) == 1
    return _add_in_two_tries(sizes, state, scores, is_new, of_small, of_any)


def are_new(sizes: Sizes, state: State, visible: jax.Array) -> jax.Array:
    """Say of each warp whether its rows that see a block, [64], if there are any, have seen nothing yet."""
    if not sizes.by_reference:
        return jnp.bool_(False)  # which makes no difference
    return by_warp.any_row(visible & (state.reference > MIN_ROW_MAX)) == 0


def row_sum(state: State) -> jax.Array:
    """Return the sum of a row's weights, [64]."""
    return state.sums if state.sums.ndim == 1 else state.sums.sum(axis=1)


def _add_exactly(sizes: Sizes, state: State, scores: Scores, _is_new: jax.Array) -> tuple[jax.Array, State]:
    products, factor, visible, _ = scores
    block_max = jnp.where(visible, products.max(axis=1) * factor, MASK_VALUE)  # [64]
    row_max = jnp.maximum(jnp.maximum(state.reference, block_max), MIN_ROW_MAX)
    alpha = jnp.exp2(state.reference - row_max)
    weights = jnp.exp2(_scaled(products, factor) - broadcast_rows(row_max, sizes.block))  # [64, block]
    accs = [acc * broadcast_rows(alpha, sizes.acc_columns) for acc in state.accs]
    return _rounded(sizes, scores, weights), State(
        accs, row_max, state.sums * alpha + jnp.where(visible, weights.sum(axis=1), 0.0)
    )


def _add_by_reference(sizes: Sizes, state: State, scores: Scores, is_new: jax.Array) -> tuple[jax.Array, State]:
    def same() -> tuple[jax.Array, float | jax.Array]:
        return scores.products, scores.factor

    return _add_in_two_tries(sizes, state, scores, is_new, same, same)


def _add_in_two_tries(
    sizes: Sizes, state: State, scores: Scores, skip: jax.Array, first: _Try, second: _Try
) -> tuple[jax.Array, State]:
    """Add a block by the reference so far, or where weights are far above 1, or with `skip`, by their maximum."""
    visible = scores.visible

    def relative_to(reference: jax.Array, products: jax.Array, factor: Any) -> tuple[jax.Array, jax.Array]:
        weights = jnp.exp2(_scaled(products, factor) - broadcast_rows(reference, sizes.block))  # [64, block]
        sums = functools.reduce(operator.add, (weights[:, at : at + _SUMS] for at in range(0, sizes.block, _SUMS)))
        sums = jnp.where(broadcast_rows(visible, _SUMS), sums, 0.0)  # [64, 8]
        return _rounded(sizes, scores, weights), sums

    def unknown(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = jnp.where(broadcast_rows(visible, _SUMS), jnp.inf, 0.0)
        return filled(0, TILE_ROWS, sizes.block).astype(sizes.dtype), sums

    def keep(state: State, weights: jax.Array, sums: jax.Array) -> tuple[jax.Array, State]:
        return weights, state._replace(sums=state.sums + sums)

    def renew(state: State, _: jax.Array, sums: jax.Array) -> tuple[jax.Array, State]:
        products, factor = second()
        row_max = jnp.maximum(state.reference, products.max(axis=1) * factor)  # [64]
        is_near = sums.max(axis=1) <= _FAR  # not so of NaN
        reference = jnp.where(is_near, state.reference, row_max)
        alpha = jnp.exp2(state.reference - reference)
        weights, sums = relative_to(reference, products, factor)
        accs = [acc * broadcast_rows(alpha, sizes.acc_columns) for acc in state.accs]
        return weights, State(accs, reference, state.sums * broadcast_rows(alpha, _SUMS) + sums)

    # Rows that have seen nothing have no reference worth a try. Weights that are NaN are as they would be by any other:
    # rows of no request, which may hold anything, do not make a tile add every block twice.
    weights, sums = lax.cond(skip, unknown, lambda reference: relative_to(reference, *first()), state.reference)
    is_far = by_warp.any_above(sums, _FAR)
    return lax.switch(is_far, [keep, renew], state, weights, sums)


def _rounded(sizes: Sizes, scores: Scores, weights: jax.Array) -> jax.Array:
    """Return weights [64, block] as they are multiplied, 0 in rows that do not see the block."""
    weights = weights if scores.value_scale is None else weights * over_rows(scores.value_scale)
    return clear_other_rows(scores.visible, weights.astype(sizes.dtype))


def _scaled(products: jax.Array, factor: float | jax.Array) -> jax.Array:
    """Multiply [64, block] by a number, by one of each row, or by as many."""
    if isinstance(factor, float) or factor.shape == products.shape:
        return products * factor
    return products * broadcast_rows(factor, products.shape[1])
