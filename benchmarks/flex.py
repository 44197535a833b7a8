"""PyTorch's FlexAttention on a forest: the pool of pages is one long context, of which a mask says who reads what.

    one batch   requests in depth-first order are the rows of one batch, so that a block of tokens meets all its readers
    by request  every request is a batch of its own, which lists the blocks that it reads, as torch's paged cache does

Where a block is read by some rows only, or is not full, each token's readers are looked up: an interval of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax import Forest
from codec_jax.arrays import expand

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS = 128
_BLOCK_ROWS = 128  # with fewer rows torch takes a kernel for decoding, in which all of them are one block

_COMPILING = threading.Lock()


class BlockLists(NamedTuple):
    """The blocks of tokens that a block of rows reads: those of which a mask is needed, and those read as a whole."""

    masked: Int[np.ndarray, "row_blocks blocks"]
    masked_count: Int[np.ndarray, " row_blocks"]
    whole: Int[np.ndarray, "row_blocks blocks"]
    whole_count: Int[np.ndarray, " row_blocks"]


def readers(forest: Forest, num_slots: int) -> tuple[Int[np.ndarray, " slots"], Int[np.ndarray, " slots"]]:
    """Return the interval of rows that reads each token slot, empty where there is no token."""
    lo, hi = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
    for node in np.flatnonzero(forest.row_hi > forest.row_lo):
        slots = forest.pages_of(node)[:, None] * forest.page_size + np.arange(forest.page_size)
        own = slots.ravel()[: int(forest.length[node])]
        lo[own], hi[own] = forest.row_lo[node], forest.row_hi[node]
    return lo, hi


def block_lists(
    lo: Int[np.ndarray, " slots"], hi: Int[np.ndarray, " slots"], num_rows: int, rows_per_block: int
) -> BlockLists:
    """List blocks of tokens for each block of rows, by the tokens' readers."""
    short = -len(lo) % BLOCK_TOKENS
    lo, hi = (np.pad(x, (0, short)).reshape(-1, BLOCK_TOKENS) for x in (lo, hi))
    masked, whole = [], []
    for start in range(0, num_rows, rows_per_block):
        end = min(start + rows_per_block, num_rows)
        some = ((lo < end) & (hi > start)).any(1)
        all_rows = ((lo <= start) & (hi >= end)).all(1)
        masked.append(np.flatnonzero(some & ~all_rows))
        whole.append(np.flatnonzero(all_rows))
    return BlockLists(*_table(masked, len(lo)), *_table(whole, len(lo)))


def _table(lists: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Lay lists out as the rows of a table, and count what each has."""
    counts = np.asarray([len(entries) for entries in lists], np.int32)
    table = np.zeros((len(lists), width), np.int32)
    table[expand(counts)] = np.concatenate(lists)
    return table, counts


def attend(
    forest: Forest,
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    by_request: bool,
    most_rows: int | None = None,
) -> Callable[[], torch.Tensor]:
    """Compile the call for a query [B, N, H] in depth-first order; it returns the output in the same order.

    The decoding kernel has all rows in one block, or at most so many, a power of two.

    Raises ValueError where it has no more than so many.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    num_rows, num_q_heads, _ = query.shape
    key, value = (x.view(-1, *x.shape[2:]).transpose(0, 1)[None] for x in pages)  # [1, K, slots, H]
    intervals = readers(forest, key.shape[2])
    lists = block_lists(*intervals, num_rows, 1 if by_request else _BLOCK_ROWS)
    lo, hi, *tables = (torch.from_numpy(x).to(query.device) for x in (*intervals, *lists))
    # Row blocks are batches, or blocks of the rows of one batch: [batch, heads, row blocks, ...].
    masked, masked_count, whole, whole_count = (x[:, None, None] if by_request else x[None, None] for x in tables)

    def reads(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        reader = batch if by_request else row
        return (lo[slot] <= reader) & (reader < hi[slot])

    rows = 1 if by_request else num_rows
    decoding_rows = rows * num_q_heads // key.shape[1]  # those of all q heads of a kv head are one block
    if most_rows and (rows >= _BLOCK_ROWS or decoding_rows <= most_rows):
        raise ValueError(f"expected more than {most_rows} rows of a decoding kernel, got {decoding_rows}")
    rows_per_block = _BLOCK_ROWS if rows >= _BLOCK_ROWS else max(_BLOCK_ROWS, 1 << (decoding_rows - 1).bit_length())
    options = {"BLOCK_M": most_rows} if most_rows else None
    mask = BlockMask.from_kv_blocks(
        masked_count,
        masked,
        whole_count,
        whole,
        BLOCK_SIZE=(rows_per_block, BLOCK_TOKENS),
        mask_mod=reads,
        seq_lengths=(rows, key.shape[2]),
    )
    batched = query[:, :, None] if by_request else query.transpose(0, 1)[None]  # [batch, N, rows, H]
    call = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")

    def run() -> torch.Tensor:
        out = call(batched, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)
        return out[:, :, 0] if by_request else out[0].transpose(0, 1)

    with _COMPILING:
        torch._dynamo.reset()  # a call that has been compiled for several shapes is not compiled for more of them
        run()
    return run
