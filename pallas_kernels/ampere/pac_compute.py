"""Products and softmax of PAC: scores, masks, online softmax, values, and a partial at a segment's end."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread
from pallas_kernels.ampere import instructions, products
from pallas_kernels.ampere.pac_load import Ahead, awaited, copy_block, copy_query, keep_rows, wait_for_block
from pallas_kernels.ampere.pac_work import Numbers, Work
from pallas_kernels.ampere.products import PRODUCTS, ROWS
from pallas_kernels.compat import load
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.plan_format import Page, Segment
from pallas_kernels.softmax import MASK_VALUE, MIN_ROW_MAX, tanh
from pallas_kernels.token_mask import is_in_window, is_not_after, is_reader, readers_of_token, unpack_readers

_TWO_LOOPS = 128  # columns of a head, at most, for unmasked blocks to have a loop of their own


class _State(NamedTuple):
    """Softmax of a tile's rows so far, not normalised; maximum in units of log2."""

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
    in_use = work.refs.used_rows[0] - segment.tile0 * work.sizes.packing.tile_rows
    in_use = products.has_rows(in_use, work.warp)

    def whole(_: jax.Array, carry: tuple) -> tuple:
        state, ahead = carry
        number = awaited(work, ahead)
        wait_for_block(work, number)
        ahead = copy_block(work, ahead)
        state = _add_block(work, segment, number, state, in_use, masked=False)
        keep_rows(work, ahead)
        return state, ahead

    def masked(block: jax.Array, carry: tuple) -> tuple:
        state, ahead, following = carry
        number = awaited(work, ahead)
        wait_for_block(work, number)
        ahead = copy_block(work, ahead)
        planes, following = _mask_planes(work, following), _entries_of(work, block + 2)
        seen = products.has_readers(work.numbers(Numbers.READERS, number), work.sizes.block, work.warp)
        state = _add_block(work, segment, number, state, seen, masked=True)
        keep_rows(work, ahead)
        _keep_mask(work, number + 1, planes)
        return state, ahead, following

    state = _init_state(work)
    if work.sizes.value_columns <= _TWO_LOOPS:
        state, ahead = lax.fori_loop(segment.begin, middle, whole, (state, ahead))
    _keep_mask(work, awaited(work, ahead), planes)
    state, ahead, _ = lax.fori_loop(middle, segment.end, masked, (state, ahead, following))
    _write(work, segment.partial0, state)
    return ahead


def _init_state(work: Work) -> _State:
    zeros = plgpu.layout_cast(jnp.full((TILE_ROWS, 64), 0, jnp.float32), PRODUCTS)
    return _State(
        accs=[zeros] * (work.sizes.value_columns // 64),
        max=plgpu.layout_cast(jnp.full((TILE_ROWS,), MIN_ROW_MAX, jnp.float32), ROWS),
        sum=plgpu.layout_cast(jnp.full((TILE_ROWS,), 0, jnp.float32), ROWS),
    )


def _add_block(
    work: Work, segment: Segment, number: jax.Array, state: _State, is_wanted: jax.Array, masked: bool
) -> _State:
    """Add block `number` of the thread block to a state, in those warps that want it (1, not 0)."""

    def unchanged(state: _State) -> _State:
        return state

    def added(state: _State) -> _State:
        refs, sizes, stage = work.refs, work.sizes, work.stage(number)
        scores = products.multiply_keys(refs.query_tile, refs.key_ring.at[stage])  # [64, block]
        scores = scores if sizes.cap_factor is None else tanh(scores * sizes.cap_factor)
        scores = _mask_by_token(work, segment, number, scores) if masked else scores
        row_max = jnp.maximum(state.max, scores.max(axis=1) * sizes.factor)
        alpha = jnp.exp2(state.max - row_max)
        weights = jnp.exp2(scores * sizes.factor - _broadcast_rows(row_max, scores.shape[1]))
        row_sum = state.sum * alpha + weights.sum(axis=1)
        accs = [acc * _broadcast_rows(alpha, 64) for acc in state.accs]
        return _State(products.multiply_values(accs, weights, refs.value_ring.at[stage]), row_max, row_sum)

    return lax.switch(is_wanted, [unchanged, added], state)


def _entries_of(work: Work, block: jax.Array) -> _Entries:
    """Load what a mask of a block begins with, a token in each thread."""
    refs, sizes = work.refs, work.sizes
    at = jnp.minimum(block, sizes.num_blocks - 1)
    page, token = work.token_of_thread()
    if sizes.token_planes:
        of_block = at * sizes.block + page * sizes.page_tokens + token
        return [by_thread.gather(getattr(refs, name), of_block) for name in sizes.token_planes]
    entry = _Entry(*(work.page_field(at, page, Page._fields.index(name)) for name in _Entry._fields))
    return entry._replace(token=entry.token + token)


def _mask_planes(work: Work, entries: _Entries) -> list[jax.Array]:
    """Readers (and positions) of each token of a block; no reader, past the end of its node."""
    if isinstance(entries, list):
        return entries
    refs = work.refs
    length = by_thread.gather(refs.node_length, entries.node)
    planes = [readers_of_token(entries.readers, entries.token, length)]
    if work.sizes.has_positions:
        planes.append(by_thread.gather(refs.node_start, entries.node) + entries.token)
    return planes


def _keep_mask(work: Work, number: jax.Array, planes: list[jax.Array]) -> None:
    """Store the mask of block `number` beside the one of the block before it, which threads may still read."""
    for which, plane in zip((Numbers.READERS, Numbers.POSITIONS), planes, strict=False):
        instructions.keep(work.numbers(which, number), plane)


def _mask_by_token(work: Work, segment: Segment, number: jax.Array, scores: jax.Array) -> jax.Array:
    """Lower the scores of tokens that a row does not see."""
    sizes, refs = work.sizes, work.refs

    def plane(which: Numbers) -> jax.Array:
        of_block = load(work.numbers(which, number).at[pl.ds(0, sizes.block)], PRODUCTS.reduce(0))
        return lax.broadcast_in_dim(of_block, scores.shape, [1])  # [64, block]

    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=PRODUCTS)
    visible = is_reader(row, *unpack_readers(plane(Numbers.READERS)))
    scores = jnp.where(visible, scores, MASK_VALUE)
    first = segment.tile0 * sizes.packing.tile_rows
    bounds: list[tuple[Any, Any]] = [(refs.query_position, is_not_after)] if sizes.causal else []
    bounds += [(refs.first_position, is_in_window)] if sizes.windowed else []
    for ref, is_within in bounds:
        bound = load(ref.at[pl.ds(first, TILE_ROWS)], ROWS)  # [64]
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
