"""Cut the prompts of a forest into work for prefill: every token of every node once, whoever shares it.

A chunk is up to T tokens of one node. Chunks are requests of a forest of their own (`Forest.chunks`), so prefill is
the same attention as decoding with more query rows: a chunk reads its ancestors' pages beside all other chunks that
read them. Ancestors come in the same wave or in an earlier one; within a wave every layer stores all K and V before
it attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from codec_jax.arrays import Integers
from codec_jax.capacity import bucket
from codec_jax.forest import Forest
from codec_jax.order import NO_NODE
from codec_jax.pages import NO_SLOT

#: A chunk is at most this many tokens of one node, and a wave at most this many tokens of all.
MOST_CHUNK_TOKENS, MOST_WAVE_TOKENS = 128, 4096


class Wave(NamedTuple):
    """The chunks of one call."""

    chunks: Forest  # one request per chunk
    tokens: Int[np.ndarray, "chunks T"]  # right-aligned
    store: Bool[np.ndarray, "chunks T"]  # false for what fills up a row to the left of its chunk
    chunk_of_request: Int[np.ndarray, " B"]  # the row that a request's prompt ends with, -1 if not in this wave


def prefill_waves(forest: Forest, prompts: Sequence[Integers]) -> list[Wave]:
    """Cut the forest of these prompts (request i is prompt i) into waves of one shape."""
    longest, chunk = int(forest.length.max()), forest.page_size
    while chunk < longest and 2 * chunk <= MOST_CHUNK_TOKENS:
        chunk *= 2
    view, node_of_chunk = forest.chunks(chunk)
    num_chunks = len(node_of_chunk)
    positions = np.maximum(view.positions(chunk), 0)
    reader = forest.request_of_row[forest.row_lo[node_of_chunk]]  # a request that passes through the chunk
    last_chunk = np.zeros(forest.node_capacity, np.int64)
    last_chunk[node_of_chunk] = np.arange(num_chunks)
    chunk_of_request = np.where(forest.active, last_chunk[forest.leaf], -1)

    size = min(bucket(num_chunks), max(1, MOST_WAVE_TOKENS // chunk))
    waves = []
    for first in range(0, num_chunks, size):
        wave = np.arange(first, min(first + size, num_chunks))
        leaf = np.full(size, NO_NODE)
        leaf[: len(wave)] = wave
        tokens = np.zeros((size, chunk), np.int32)
        for row, i in enumerate(wave):
            tokens[row] = np.asarray(prompts[reader[i]])[positions[i]]
        chunks = view.rebuild(leaf=leaf)
        row_of_request = chunk_of_request - first
        row_of_request[(row_of_request < 0) | (row_of_request >= size)] = -1
        # Rows are filled up to the left with tokens of other nodes, which other chunks store.
        store = chunks.slots(chunk) != NO_SLOT
        waves.append(Wave(chunks, tokens, store, row_of_request.astype(np.int32)))
    return waves
