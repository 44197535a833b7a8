"""Token slots, page * page_size + offset: where tokens are in arrays of pages, read and written there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from codec_jax.arrays import HostOrDevice, to_int32

#: A token slot that is out of every pool's bounds: what is written to it is dropped.
NO_SLOT = np.iinfo(np.int32).max


def in_bounds(name: str, slots: HostOrDevice) -> Int[Array, "B T"]:
    """Return token slots as int32; negative ones, from where an index would count from the end, as NO_SLOT."""
    slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"{name}: expected token slots, integers, got {slots.dtype} of shape {slots.shape}")
    slots = jnp.asarray(to_int32(slots, minimum=-1))
    return jnp.where(slots < 0, NO_SLOT, slots)


def counted(so_far: Int[Array, " devices"], *more: Int[Array, ""]) -> Int[Array, " devices"]:
    """Add counts to those so far; from the greatest int32 on there are no more."""
    total = so_far + sum(more)
    return jnp.where(total < so_far, jnp.iinfo(jnp.int32).max, total)


def check_rows(name: str, slots: Int[Array, "B T"], rows: Float[Array, "B T K H"], heads: int, head_dim: int) -> None:
    """Raise ValueError unless there is a row for each slot, of so many heads and numbers of a head."""
    expected = (*slots.shape, heads, head_dim)
    if rows.shape != expected:
        raise ValueError(f"{name}: expected shape {expected}, a row for each slot, got {rows.shape}")


def stored(
    pages: Float[Array, "num_pages page_size K H"], slots: Int[Array, "B T"], rows: Float[Array, "B T K H"]
) -> Float[Array, "num_pages page_size K H"]:
    """Return pages with a row in each slot that is in bounds; `check_rows` has seen that there is one for each."""
    return _tokens(pages).at[slots].set(rows.astype(pages.dtype), mode="drop").reshape(pages.shape)


def both_in_bounds(source: HostOrDevice, target: HostOrDevice) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Return the slots to copy from and to as `in_bounds` does. Raises ValueError for slots of different shapes."""
    source, target = in_bounds("source", source), in_bounds("target", target)
    if source.shape != target.shape:
        raise ValueError(f"target: expected shape {source.shape}, that of source, got {target.shape}")
    return source, target


def copied(
    pages: Float[Array, "num_pages page_size K H"], source: Int[Array, "B T"], target: Int[Array, "B T"]
) -> Float[Array, "num_pages page_size K H"]:
    """Return pages in which tokens were copied where both slots are in bounds, all read before any was written."""
    tokens = _tokens(pages)
    rows = tokens.at[source].get(mode="fill", fill_value=0)
    to = jnp.where(source < tokens.shape[0], target, NO_SLOT)
    return tokens.at[to].set(rows, mode="drop").reshape(pages.shape)


def stored_scales(
    scales: Float[Array, "num_pages K page_size"], rows: Float[Array, "B T K"], slots: Int[Array, "B T"]
) -> Float[Array, "num_pages K page_size"]:
    """Return scales of tokens with those of a row in each slot that is in bounds."""
    return _scales_at(scales, slots).set(rows, mode="drop")


def copied_scales(
    scales: Float[Array, "num_pages K page_size"], source: Int[Array, "B T"], target: Int[Array, "B T"]
) -> Float[Array, "num_pages K page_size"]:
    """Return scales of tokens, copied as `copied` copies the tokens."""
    rows = _scales_at(scales, source).get(mode="fill", fill_value=1)
    exists = source < scales.shape[0] * scales.shape[2]
    return stored_scales(scales, rows, jnp.where(exists, target, NO_SLOT))


def _scales_at(scales: Float[Array, "num_pages K page_size"], slots: Int[Array, "B T"]) -> Any:
    """Refer to the scales of slots, [B, T, K]."""
    return scales.at[slots // scales.shape[2], :, slots % scales.shape[2]]


def _tokens(pages: Float[Array, "num_pages page_size K H"]) -> Float[Array, "slots K H"]:
    return pages.reshape(pages.shape[0] * pages.shape[1], *pages.shape[2:])  # not -1: there may be no numbers at all
