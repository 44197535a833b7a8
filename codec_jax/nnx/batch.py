"""Batches that run through the layers together: their tokens are rows of one array, and part where they attend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from codec_jax.attention import forest_attention
from codec_jax.forest import NO_SLOT, DraftTrees, Forest, KVPages
from codec_jax.nnx.parallel import Parallel
from codec_jax.planning import Plan

#: How rows attend whose K and V are in the pages already.
Attend = Callable[[Float[Array, "B T N H"], KVPages], Float[Array, "B T N H"]]


class Batch(NamedTuple):
    """The last T tokens of each request of a forest, whose room is taken already (`Forest.extend`)."""

    tokens: Int[Array, "B T"]  # with drafts they are candidates, in depth-first order
    forest: Forest
    plan: Plan
    store: Bool[Array, "B T"] | bool = True  # false for tokens that are computed but not stored
    drafts: DraftTrees | None = None


class Rows(NamedTuple):
    """What layers need to know of the tokens of all batches; [B, T] of a single one, [rows, 1] of several."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    slots: Int[Array, "B T"]


def joined(*batches: Batch) -> Rows:
    """Return the rows of all batches, those of the first one first."""
    return Rows(*(_join(parts) for parts in zip(*map(_rows_of, batches), strict=True)))


def parted(rows: Array, batches: Sequence[Batch]) -> list[Array]:
    """Return what each batch has of an array of rows, as [B, T, ...]."""
    shapes = [batch.tokens.shape for batch in batches]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
    parts = jnp.split(rows.reshape(-1, *rows.shape[2:]), ends)
    return [part.reshape(*shape, *rows.shape[2:]) for part, shape in zip(parts, shapes, strict=True)]


def attend(
    batches: Sequence[Batch],
    implementation: str | None,
    parallel: Parallel,
    query: Float[Array, "B T N H"],
    pages: KVPages,
) -> Float[Array, "B T n H"]:
    """Attend in each batch over its own forest and plan; of several devices each gets its part of the heads."""
    partials = [
        forest_attention(
            part, pages.key, pages.value, batch.forest, batch.plan.local(), drafts=batch.drafts,
            implementation=implementation, return_residuals=True,
        )
        for part, batch in zip(parted(query, batches), batches, strict=True)
    ]  # fmt: skip
    out, (row_max, row_sum) = jax.tree.map(lambda *parts: _join(parts), *partials)
    return parallel.merge(out, row_max, row_sum)


def _rows_of(batch: Batch) -> Rows:
    """Return the rows of one batch; tokens that are not in the request's own leaf are not stored."""
    forest, drafts, tokens = batch.forest, batch.drafts, jnp.asarray(batch.tokens)
    positions = forest.positions(tokens.shape[1]) if drafts is None else drafts.positions(forest)
    return Rows(tokens, jnp.asarray(positions), jnp.where(batch.store, forest.slots(tokens.shape[1]), NO_SLOT))


def _join(parts: Sequence[Array]) -> Array:
    """Return arrays [B, T, ...] as one; of several arrays each token is a row of its own."""
    if len(parts) == 1:
        return parts[0]
    return jnp.concatenate([part.reshape(-1, 1, *part.shape[2:]) for part in parts])
