"""Products and softmax of PAC: scores, masks, online softmax, values, and a partial at a segment's end."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ampere import instructions, products
from pallas_kernels.ampere.pac_load import Ahead, awaited, copy_block, copy_query, keep_rows, wait_for_block
from pallas_kernels.ampere.pac_work import Numbers, Work
from pallas_kernels.ampere.products import PRODUCTS, ROWS
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.plan_format import Page, Segment
from pallas_kernels.softmax import MASK_VALUE, MIN_ROW_MAX, tanh
from pallas_kernels.token_mask import is_in_window, is_not_after, is_reader, readers_of_token, unpack_readers

_TWO_LOOPS = 128  # columns of a head, at most, for unmasked blocks to have a loop of their own


class _State(NamedTuple):
    """Softmax of a slab so far, as `products` has them, not normalised; maximum in units of log2."""

    accs: list[jax.Array]  # [64, 64] each
    max: jax.Array  # [64]
    sum: jax.Array  # [64]


class _Entry(NamedTuple):
    """The token of each thread, as the mask needs it, int32 [128]."""

    node: jax.Array
    token: jax.Array  # index within the node
    readers: jax.Array


_Entries = _Entry | list[jax.Array]  # or the planes of the mask, where those are given


def compute(work: Work, segment: Segment, ahead: Ahead) -> Ahead:
    """Work off the blocks of a segment; return what is copied next."""
    # Two loops need registers for the addresses of both, which accumulators of 256 columns leave for one.
    middle = segment.begin if work.sizes.value_columns > _TWO_LOOPS else segment.first_masked
    # Asked for ahead of all else: what a mask needs takes two trips to memory.
    entries = _entries_of(work, middle)
    copy_query(work, segment)
    planes = _mask_planes(work, entries)
    following = _entries_of(work, middle + 1)
    split = work.sizes.split
    in_use = work.refs.used_rows[0] - segment.tile0 * work.sizes.packing.tile_rows
    in_use = products.slabs_in_use(in_use, split, work.warp)

    def whole(_: jax.Array, carry: tuple) -> tuple:
        states, ahead = carry
        number = awaited(work, ahead)
        wait_for_block(work, number)
        ahead = copy_block(work, ahead)
        states = _add_block(work, segment, number, states, in_use, masked=False)
        keep_rows(work, ahead)
        return states, ahead

    def masked(block: jax.Array, carry: tuple) -> tuple:
        states, ahead, following = carry
        number = awaited(work, ahead)
        wait_for_block(work, number)
        ahead = copy_block(work, ahead)
        planes, following = _mask_planes(work, following), _entries_of(work, block + 2)
        readers = work.numbers(Numbers.READERS, number)
        seen = products.slabs_of_readers(readers, work.sizes.block, split, work.warp)
        states = _add_block(work, segment, number, states, seen, masked=True)
        keep_rows(work, ahead)
        _keep_mask(work, number + 1, planes)
        return states, ahead, following

    states = [_init_state(work) for _ in range(split)]
    if work.sizes.value_columns <= _TWO_LOOPS:
        states, ahead = lax.fori_loop(segment.begin, middle, whole, (states, ahead))
    _keep_mask(work, awaited(work, ahead), planes)
    states, ahead, _ = lax.fori_loop(middle, segment.end, masked, (states, ahead, following))
    _write(work, segment.partial0, states[0] if split == 1 else _merge(work, *states))
    return ahead


def _init_state(work: Work) -> _State:
    zeros = plgpu.layout_cast(jnp.full((TILE_ROWS, 64), 0, jnp.float32), PRODUCTS)
    return _State(
        accs=[zeros] * (work.sizes.value_columns // 64),
        max=plgpu.layout_cast(jnp.full((TILE_ROWS,), MIN_ROW_MAX, jnp.float32), ROWS),
        sum=plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), ROWS),
    )


def _add_block(
    work: Work, segment: Segment, number: jax.Array, states: list[_State], which: jax.Array, masked: bool
) -> list[_State]:
    """Add block `number` of the thread block to those slabs of a warp that bits of `which` name.

    It would change nothing in the others. A warp without any goes on at once, to wait for the rest.
    """

    def add_to(slabs: list[int]) -> Callable[[list[_State]], list[_State]]:
        def add(states: list[_State]) -> list[_State]:
            added = _step(work, segment, number, [states[slab] for slab in slabs], slabs, masked)
            return [added[slabs.index(slab)] if slab in slabs else state for slab, state in enumerate(states)]

        return add

    subsets = [[slab for slab in range(len(states)) if bits >> slab & 1] for bits in range(1 << len(states))]
    return lax.switch(which, [add_to(slabs) if slabs else lambda states: states for slabs in subsets], states)


def _step(
    work: Work, segment: Segment, number: jax.Array, states: list[_State], slabs: list[int], masked: bool
) -> list[_State]:
    """Add a block to some slabs."""
    refs, sizes, warps = work.refs, work.sizes, (work.sizes.split, work.warp)
    stage = work.stage(number)
    products_of = products.multiply_keys(refs.query_tile, refs.key_ring.at[stage], slabs, *warps)
    scaled, weights_of = [], []
    for slab, state, scores in zip(slabs, states, products_of, strict=True):  # scores [64, block / split]
        scores = scores if sizes.cap_factor is None else tanh(scores * sizes.cap_factor)
        scores = _mask_by_token(work, segment, number, scores, slab) if masked else scores
        row_max = jnp.maximum(state.max, scores.max(axis=1) * sizes.factor)
        alpha = jnp.exp2(state.max - row_max)
        weights = jnp.exp2(scores * sizes.factor - _broadcast_rows(row_max, scores.shape[1]))
        row_sum = state.sum * alpha + weights.sum(axis=1)
        scaled.append(_State([acc * _broadcast_rows(alpha, 64) for acc in state.accs], row_max, row_sum))
        weights_of.append(weights)
    accs_of = products.multiply_values([state.accs for state in scaled], weights_of, refs.value_ring.at[stage], *warps)
    return [state._replace(accs=accs) for state, accs in zip(scaled, accs_of, strict=True)]


def _merge(work: Work, low: _State, high: _State) -> _State:
    """Merge what both halves of the tokens gave, for the rows of the tile in order; always in one order."""

    def halves(low: jax.Array, high: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
        # Warps 0 and 1 have the first half of the tokens, and keep the lower rows of the tile; 2 and 3 the other ones.
        row = plgpu.broadcasted_iota(jnp.int32, low.shape, 0, layout=layout)
        kept, sent = (jnp.where(row < TILE_ROWS // 2, x, y) for x, y in ((low, high), (high, low)))
        received = products.swap_halves(work.refs.query_tile, sent, layout)
        first, second = (jnp.where(row < TILE_ROWS // 2, x, y) for x, y in ((kept, received), (received, kept)))
        return first, second

    first_max, second_max = halves(low.max, high.max, ROWS)
    first_sum, second_sum = halves(low.sum, high.sum, ROWS)
    row_max = jnp.maximum(first_max, second_max)
    first_alpha, second_alpha = jnp.exp2(first_max - row_max), jnp.exp2(second_max - row_max)

    def merge(first: jax.Array, second: jax.Array) -> jax.Array:
        return first * _broadcast_rows(first_alpha, 64) + second * _broadcast_rows(second_alpha, 64)

    accs = [merge(*halves(*accs, PRODUCTS)) for accs in zip(low.accs, high.accs, strict=True)]
    return _State(accs, row_max, first_sum * first_alpha + second_sum * second_alpha)


def _entries_of(work: Work, block: jax.Array) -> _Entries:
    """Load what a mask of a block begins with, a token in each thread."""
    refs, sizes = work.refs, work.sizes
    at = jnp.minimum(block, sizes.num_blocks - 1)
    page, token = work.token_of_thread()
    if sizes.token_planes:
        of_block = at * sizes.block + page * sizes.page_tokens + token
        return [instructions.gather(getattr(refs, name), of_block) for name in sizes.token_planes]
    entry = _Entry(*(work.page_field(at, page, Page._fields.index(name)) for name in _Entry._fields))
    return entry._replace(token=entry.token + token)


def _mask_planes(work: Work, entries: _Entries) -> list[jax.Array]:
    """Readers (and positions) of each token of a block; no reader, past the end of its node."""
    if isinstance(entries, list):
        return entries
    refs = work.refs
    length = instructions.gather(refs.node_length, entries.node)
    planes = [readers_of_token(entries.readers, entries.token, length)]
    if work.sizes.has_positions:
        planes.append(instructions.gather(refs.node_start, entries.node) + entries.token)
    return planes


def _keep_mask(work: Work, number: jax.Array, planes: list[jax.Array]) -> None:
    """Store the mask of block `number` beside the one of the block before it, which threads may still read."""
    for which, plane in zip((Numbers.READERS, Numbers.POSITIONS), planes, strict=False):
        instructions.keep(work.numbers(which, number), plane)


def _mask_by_token(work: Work, segment: Segment, number: jax.Array, scores: jax.Array, slab: int) -> jax.Array:
    """Lower the scores of tokens that a row of a slab does not see."""
    sizes, refs = work.sizes, work.refs

    def plane(which: Numbers) -> jax.Array:
        of_block = work.numbers(which, number).at[pl.ds(0, sizes.block)]
        return products.load_tokens(of_block, sizes.split, work.warp)  # [64, block / split]

    row = products.row_of_tile(slab, sizes.split, scores.shape[1])
    visible = is_reader(row, *unpack_readers(plane(Numbers.READERS)))
    scores = jnp.where(visible, scores, MASK_VALUE)
    first = segment.tile0 * sizes.packing.tile_rows
    bounds: list[tuple[Any, Any]] = [(refs.query_position, is_not_after)] if sizes.causal else []
    bounds += [(refs.first_position, is_in_window)] if sizes.windowed else []
    for ref, is_within in bounds:
        bound = products.load_rows(ref, first, slab, sizes.split)  # [64]
        within = is_within(plane(Numbers.POSITIONS), _broadcast_rows(bound, scores.shape[1]))
        scores = jnp.where(within, scores, MASK_VALUE)
    return scores


def _write(work: Work, partial: jax.Array, state: _State) -> None:
    """Write a partial, normalised by its own sum."""
    refs = work.refs
    inverse_sum = 1.0 / _broadcast_rows(jnp.maximum(state.sum, 1e-30), 64)
    for i, acc in enumerate(state.accs):
        refs.out.at[partial, :, pl.ds(i * 64, 64)][...] = acc * inverse_sum
    refs.max.at[partial][...] = state.max
    refs.sum.at[partial][...] = state.sum


def _broadcast_rows(rows: jax.Array, width: int) -> jax.Array:
    """Repeat a value of each row along the columns."""
    return lax.broadcast_in_dim(rows, (TILE_ROWS, width), [0])
