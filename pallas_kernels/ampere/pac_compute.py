"""Products and softmax of PAC on GPUs since Ampere: the blocks of a segment, and a partial of each tile at its end.

Blocks that need no mask are read from shared memory once for both tiles of a wide segment, the others once for each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ampere import products
from pallas_kernels.ampere.pac_load import Ahead, awaited, copy_block, copy_query, keep_rows, wait_for_block
from pallas_kernels.ampere.pac_mask import Seen, keep_planes, mask_by_row, mask_by_token
from pallas_kernels.ampere.pac_softmax import State, init_state, row_sum, weigh
from pallas_kernels.ampere.pac_work import Numbers, Tile, Work
from pallas_kernels.plan_format import Segment
from pallas_kernels.row_registers import all_rows, broadcast_rows
from pallas_kernels.softmax import tanh
from pallas_kernels.token_pages import entries_of, look_up, planes_of

_TWO_LOOPS = 128  # columns of a head, at most, for unmasked blocks to have a loop of their own
#: Columns of values times tokens, of which two tiles have scores at once: registers have no room for more.
_AT_ONCE = 128 * 32


def compute(work: Work, segment: Segment, ahead: Ahead) -> Ahead:
    """Work off the blocks of a segment; return what is copied next."""
    first, second = Tile(0, segment.tile0, segment.partial0), Tile(1, segment.tile1, segment.partial1)
    if work.sizes.lanes == 1:
        return _compute(work, segment, [first], ahead)
    wide, narrow = (partial(_compute, work, segment, tiles) for tiles in ([first, second], [first]))
    return lax.cond(segment.is_wide, wide, narrow, ahead)


def _compute(work: Work, segment: Segment, tiles: list[Tile], ahead: Ahead) -> Ahead:
    """Work off the blocks of a segment for the tiles that it serves."""
    # Two loops need registers for the addresses of both, which accumulators of 256 columns leave for one.
    middle = segment.begin if work.sizes.value_columns > _TWO_LOOPS else segment.first_masked
    refs, sizes = work.refs, work.sizes
    # Asked for ahead of all else: what a mask needs takes two trips to memory.
    entries = entries_of(refs, sizes, middle)
    copy_query(work, segment.head, tiles)
    planes = planes_of(look_up(refs, sizes, entries))
    following = entries_of(refs, sizes, middle + 1)
    in_use = refs.used_rows[0] - segment.tile0 * sizes.packing.tile_rows
    in_use = products.has_rows(in_use, work.warp)

    def whole(_: jax.Array, carry: tuple) -> tuple:
        states, ahead = carry
        number = awaited(work, ahead)
        wait_for_block(work, number)
        ahead = copy_block(work, ahead)
        if len(tiles) > 1:  # the rows of the first one are all in use
            states = _add_to_both(work, tiles, number, states)
        else:
            states = lax.switch(in_use, [_unchanged, partial(_add, work, tiles, number)], states)
        keep_rows(work, ahead)
        return states, ahead

    def masked(block: jax.Array, carry: tuple) -> tuple:
        states, ahead, following = carry
        number = awaited(work, ahead)
        wait_for_block(work, number)
        ahead = copy_block(work, ahead)
        planes = planes_of(look_up(refs, sizes, following))
        following = entries_of(refs, sizes, block + 2)
        # One by one: masks of two tiles take registers that there are not.
        states = [_add_masked(work, tile, number, state) for tile, state in zip(tiles, states, strict=True)]
        keep_rows(work, ahead)
        keep_planes(work, number + 1, planes)
        return states, ahead, following

    states = [init_state(work.sizes.value_columns) for _ in tiles]
    if work.sizes.value_columns <= _TWO_LOOPS:
        states, ahead = lax.fori_loop(segment.begin, middle, whole, (states, ahead))
    keep_planes(work, awaited(work, ahead), planes)
    states, ahead, _ = lax.fori_loop(middle, segment.end, masked, (states, ahead, following))
    for tile, state in zip(tiles, states, strict=True):
        _write(work, tile.partial, state)
    return ahead


def _unchanged(states: list[State]) -> list[State]:
    """Leave a block out."""
    return states


def _add_to_both(work: Work, tiles: list[Tile], number: jax.Array, states: list[State]) -> list[State]:
    """Add a block to two tiles, some of its tokens after the others."""
    tokens = min(_AT_ONCE // work.sizes.value_columns, work.sizes.block)
    for begin in range(0, work.sizes.block, tokens):
        states = _add(work, tiles, number, states, pl.ds(begin, tokens))
    return states


def _add_masked(work: Work, tile: Tile, number: jax.Array, state: State) -> State:
    """Add a block to a tile, in those warps whose rows see some of it."""

    def by_token(states: list[State]) -> list[State]:
        return _add(work, [tile], number, states, mask=partial(mask_by_token, work, tile, number))

    def by_row(states: list[State]) -> list[State]:
        return _add(work, [tile], number, states, visible=mask_by_row(work, tile, number))

    seen = products.seen(work.numbers(Numbers.READERS, number), work.sizes.block, work.warp, work.first_row(tile.place))
    ways = {Seen.NOTHING: _unchanged, Seen.BY_TOKEN: by_token, Seen.BY_ROW: by_row}
    if work.sizes.has_positions or work.sizes.token_planes:
        seen = jnp.minimum(seen, Seen.BY_TOKEN)
        del ways[Seen.BY_ROW]
    (state,) = lax.switch(seen, [ways[which] for which in sorted(ways)], [state])
    return state


def _add(
    work: Work,
    tiles: list[Tile],
    number: jax.Array,
    states: list[State],
    tokens: Any = slice(None),
    *,
    mask: Callable[[jax.Array], jax.Array] = lambda scores: scores,
    visible: jax.Array | None = None,
) -> list[State]:
    """Add block `number` of the thread block, or some of its tokens, to the states of tiles."""
    refs, sizes, stage = work.refs, work.sizes, work.stage(number)
    visible = all_rows() if visible is None else visible
    queries = [refs.query_tiles.at[tile.place] for tile in tiles]
    of_tiles = products.multiply_keys(queries, refs.key_ring.at[stage].at[tokens])  # [64, tokens] each
    weighed, operands = [], []
    for state, scores in zip(states, of_tiles, strict=True):
        scores = scores if sizes.cap_factor is None else tanh(scores * sizes.cap_factor)
        state, weights = weigh(state, mask(scores), sizes.factor, visible)
        weighed.append(state)
        operands.append(products.as_operands(weights, sizes.dtype))
    accs = products.multiply_values([state.accs for state in weighed], operands, refs.value_ring.at[stage].at[tokens])
    return [state._replace(accs=of_tile) for state, of_tile in zip(weighed, accs, strict=True)]


def _write(work: Work, partial: jax.Array, state: State) -> None:
    """Write a partial, normalised by its own sum."""
    refs, sums = work.refs, row_sum(state)
    inverse = 1.0 / broadcast_rows(jnp.maximum(sums, 1e-30), 64)
    for i, acc in enumerate(state.accs):
        refs.out.at[partial, :, pl.ds(i * 64, 64)][...] = acc * inverse
    refs.max.at[partial][...] = state.reference
    refs.sum.at[partial][...] = sums
