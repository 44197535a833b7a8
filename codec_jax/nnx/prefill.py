"""Cut the prompts of a forest into work for prefill: every token of every node once, whoever shares it.

A chunk is up to T tokens of one node. Chunks are requests of a forest of their own (`Forest.chunks`), so prefill is
the same attention as decoding with more query rows: a chunk reads its ancestors' pages beside all other chunks that
read them. Ancestors come in the same wave or in an earlier one; within a wave every layer stores all K and V before
it attends. Waves have few shapes, whatever the prompts: each is a program to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax.arrays import padded
from codec_jax.forest import NO_NODE, NO_SLOT, Forest

#: Tokens of a chunk, at most, and of all chunks of a wave.
MAX_CHUNK_TOKENS, MAX_WAVE_TOKENS = 128, 4096
#: A wave has room for so many chunks, or four times as many; its plan for so many blocks, or four or sixteen times ...
_MIN_CHUNKS, _MIN_BLOCKS, _STEP = 8, 1024, 4


class Wave(NamedTuple):
    """The chunks of one call."""

    chunks: Forest  # one request per chunk
    block_capacity: int | None  # for the plan
    tokens: Int[np.ndarray, "chunks T"]  # right-aligned
    store: Bool[np.ndarray, "chunks T"]  # false for what fills up a row to the left of its chunk
    chunk_of_request: Int[np.ndarray, " B"]  # the row that a request's prompt ends with, -1 if not in this wave


def prefill_waves(
    forest: Forest,
    prompts: Sequence[Int[np.ndarray, " tokens"]],
    num_pages: int,
    blocks_of_chunks: Callable[[Int[np.ndarray, " chunks"], int], int],
    *,
    one_shape: bool = False,
) -> Iterator[Wave]:
    """Cut the forest of these prompts, one for each request, into waves; a function bounds the blocks of plans.

    Waves have few shapes, or the largest of them only.
    """
    chunk = chunk_tokens(forest.page_size)
    view, node_of_chunk = forest.chunks(chunk)
    num_chunks, end = len(node_of_chunk), view.start + view.length
    reader = forest.request_of_row[forest.row_lo[node_of_chunk]]  # a request that passes through the chunk
    last_chunk = np.zeros(forest.node_capacity, np.int64)
    last_chunk[node_of_chunk] = np.arange(num_chunks)
    chunk_of_request = np.where(forest.active, last_chunk[forest.leaf], -1)

    most = max(1, MAX_WAVE_TOKENS // chunk)
    size = most if one_shape else min(_grown(_MIN_CHUNKS, num_chunks), most)
    for first in range(0, num_chunks, size):
        wave = np.arange(first, min(first + size, num_chunks))
        # No chunk is without tokens, so there are no more of them than pages.
        chunks = Forest.build(
            view.tree._replace(leaf=padded(wave, size, NO_NODE)), node_capacity=num_pages, page_capacity=num_pages
        )
        tokens = np.zeros((size, chunk), np.int32)
        for row, i in enumerate(wave.tolist()):
            text = prompts[reader[i]][max(end[i] - chunk, 0) : end[i]]
            tokens[row, chunk - len(text) :] = text
        row_of_request = np.where(
            (chunk_of_request >= first) & (chunk_of_request <= wave[-1]), chunk_of_request - first, -1
        )
        # Rows are filled up to the left with tokens of other nodes, which other chunks store.
        store = chunks.slots(chunk) != NO_SLOT
        blocks = _grown(_MIN_BLOCKS, blocks_of_chunks(end[wave], chunk))
        yield Wave(chunks, blocks, tokens, store, row_of_request.astype(np.int32))


def append_waves(
    forest: Forest, new: Mapping[int, Int[np.ndarray, " tokens"]], *, one_shape: bool = False
) -> Iterator[Wave]:
    """Cut what requests are to get into waves, of few shapes or of one; the forest has room for it."""
    lengths = np.zeros(forest.request_capacity, np.int32)
    lengths[list(new)] = [len(tokens) for tokens in new.values()]
    for first in range(0, int(lengths.max()), MAX_CHUNK_TOKENS):
        counts = np.clip(lengths - first, 0, MAX_CHUNK_TOKENS)
        growing = np.flatnonzero(counts)
        # Rows hold a power of two tokens, so that few lengths are compiled; tokens are at their right end.
        width = 1 << (MAX_CHUNK_TOKENS - 1 if one_shape else int(counts.max()) - 1).bit_length()
        tokens = np.zeros((len(counts), width), np.int32)
        for request in growing.tolist():
            tokens[request, width - counts[request] :] = new[request][first : first + counts[request]]
        store = np.arange(width) >= width - counts[:, None]
        row_of_request = np.where(counts > 0, np.arange(len(counts)), -1).astype(np.int32)
        chunks = forest.extend(np.minimum(lengths, first + MAX_CHUNK_TOKENS)).only(growing)
        yield Wave(chunks, None, tokens, store, row_of_request)


def chunk_tokens(page_size: int) -> int:
    """Return the tokens of a chunk: as many whole pages as there is room for."""
    return max(MAX_CHUNK_TOKENS // page_size, 1) * page_size


def _grown(capacity: int, size: int) -> int:
    """Multiply a capacity until it holds a size."""
    while capacity < size:
        capacity *= _STEP
    return capacity
