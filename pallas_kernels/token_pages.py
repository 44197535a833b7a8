"""The page of each token of a block, and the mask that follows from it: a token for each thread of a warpgroup.

    entries of block i + 1 (block_pages) ─► lengths of their nodes ─► readers (and positions) of each token

Threads past a block's last token repeat that token, so that what holds for all threads of a warp holds for its tokens.
`refs` has the arrays of `pac_arrays` by name.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import by_thread
from pallas_kernels.by_thread import THREAD, THREADS
from pallas_kernels.pac_arrays import PacSizes
from pallas_kernels.plan_format import Page
from pallas_kernels.token_mask import readers_of_token

Planes = list[jax.Array]  # of a mask, int32 [128] each


class Entry(NamedTuple):
    """The token of each thread, as the mask needs it, int32 [128]."""

    node: jax.Array
    token: jax.Array  # index within the node
    readers: jax.Array


class LookedUp(NamedTuple):
    """The token of each thread, and its node, int32 [128]."""

    entry: Entry
    length: jax.Array
    start: jax.Array | None  # with causal masks and windows


def field(refs: Any, sizes: PacSizes, block: jax.Array, name: str) -> jax.Array:
    """Load a field of `Page` for the tokens of a block of the plan, or of its last one past its end, int32 [128]."""
    page = _clipped(refs, block) * sizes.pages_per_block + lax.div(_token(sizes), jnp.int32(sizes.page_tokens))
    return by_thread.gather(refs.block_pages, page * len(Page._fields) + Page._fields.index(name))


def offset(sizes: PacSizes) -> jax.Array:
    """Return where in their pages the tokens of a block are, int32 [128]."""
    return lax.rem(_token(sizes), jnp.int32(sizes.page_tokens))


def entries_of(refs: Any, sizes: PacSizes, block: jax.Array) -> Entry | Planes:
    """Load what a mask of a block begins with, or the planes of it, where those are given."""
    if sizes.token_planes:
        token = _clipped(refs, block) * sizes.block + _token(sizes)
        return [by_thread.gather(getattr(refs, name), token) for name in sizes.token_planes]
    entry = Entry(*(field(refs, sizes, block, name) for name in Entry._fields))
    return entry._replace(token=entry.token + offset(sizes))


def look_up(refs: Any, sizes: PacSizes, entries: Entry | Planes) -> LookedUp | Planes:
    """Load the lengths (and positions) of the nodes that the tokens belong to."""
    if isinstance(entries, list):
        return entries
    start = by_thread.gather(refs.node_start, entries.node) if sizes.has_positions else None
    return LookedUp(entries, by_thread.gather(refs.node_length, entries.node), start)


def planes_of(looked_up: LookedUp | Planes) -> Planes:
    """Return readers (and positions) of each token of a block; no reader, past the end of its node."""
    if isinstance(looked_up, list):
        return looked_up
    (_, token, readers), length, start = looked_up
    readers = readers_of_token(readers, token, length)
    return [readers] if start is None else [readers, start + token]


def _clipped(refs: Any, block: jax.Array) -> jax.Array:
    return jnp.minimum(block, refs.block_pages.shape[0] - 1)


def _token(sizes: PacSizes) -> jax.Array:
    index = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=THREAD)
    return index if sizes.block == THREADS else jnp.minimum(index, sizes.block - 1)
