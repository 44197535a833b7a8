"""FlashAttention-3 on contiguous caches: the kernels of FlashDecoding on Hopper, as the package fa3-fwd has them.

That package is built without paged caches, so each request has a copy of its whole context, as for cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.inputs import check_copies, padded_slots
from codec_jax import Forest

if TYPE_CHECKING:
    import torch


def copies(forest: Forest, pages: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy K and V of every request, [B, S, K, H] in depth-first order, and say how long each context is, int32 [B].

    Raises ValueError where the copies would take too much memory.
    """
    import torch

    slots = padded_slots(forest)[forest.request_of_row].astype(np.int64)
    check_copies(2 * slots.size * pages[0][0, 0].nbytes)
    device = pages[0].device
    index = torch.from_numpy(slots).to(device)
    lengths = forest.request_length[forest.request_of_row].astype(np.int32)
    key, value = (x.view(-1, *x.shape[2:])[index] for x in pages)
    return key, value, torch.from_numpy(lengths).to(device)


def attend(
    forest: Forest, query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], planned: bool
) -> Callable[[], torch.Tensor]:
    """Make the call for a query [B, N, H] in depth-first order; `planned` leaves scheduling out of it."""
    from fa3_fwd_interface import flash_attn_with_kvcache, get_scheduler_metadata

    key, value, lengths = copies(forest, pages)
    (rows, num_q_heads, head_dim), num_kv_heads = query.shape, key.shape[2]
    metadata = None
    if planned:
        metadata = get_scheduler_metadata(rows, 1, key.shape[1], num_q_heads, num_kv_heads, head_dim, lengths)
    query = query[:, None]
    return lambda: flash_attn_with_kvcache(query, key, value, cache_seqlens=lengths, scheduler_metadata=metadata)[:, 0]
