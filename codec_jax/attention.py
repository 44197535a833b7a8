"""Attention of every request over its path in the forest, each shared token read once per row tile."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from codec_jax import mosaic, rows, xla
from codec_jax.drafts import DraftTrees, readers_of_tokens
from codec_jax.errors import PlanError
from codec_jax.forest import Forest
from codec_jax.plan import Plan

Residuals = tuple[Float[Array, "B T N"], Float[Array, "B T N"]]


@overload
def forest_attention(
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"],
    value_pages: Float[Array, "num_pages page_size K H"],
    forest: Forest,
    plan: Plan,
    *,
    drafts: DraftTrees | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_residuals: Literal[False] = False,
) -> Float[Array, "B T N H"]: ...


@overload
def forest_attention(
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"],
    value_pages: Float[Array, "num_pages page_size K H"],
    forest: Forest,
    plan: Plan,
    *,
    drafts: DraftTrees | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_residuals: Literal[True],
) -> tuple[Float[Array, "B T N H"], Residuals]: ...


def forest_attention(
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"],
    value_pages: Float[Array, "num_pages page_size K H"],
    forest: Forest,
    plan: Plan,
    *,
    drafts: DraftTrees | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_residuals: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Residuals]:
    """Attention of each request's last T tokens over its whole context (paper, section 4). Jittable.

    Args:
      query: [B, T, N, H] in the caller's request order, B = forest.request_capacity; float32, bfloat16 or float16.
        The T tokens are the last T of each request's context (their K and V are in the pages already) and see each
        other causally, or as `drafts` says.
      key_pages: [num_pages, page_size, K, H], N a multiple of K.
      value_pages: like key_pages; every value finite, also where nobody reads (`KVPages` sees to that).
      forest: the paths, in lengths that include the query tokens.
      plan: from `make_plan` for this forest, head layout and T.
      drafts: trees of the T tokens, which are candidates then, in depth-first order and in the request's own leaf: each
        sees the context before them, itself and its ancestors.
      scale: factor on the scores; defaults to 1 / sqrt(H).
      implementation: "mosaic" (kernels for Hopper GPUs: bfloat16 or float16, H 64, 128 or 256), "xla" (any device),
        or None for the fastest that this device and these shapes allow.
      return_residuals: also return the row maximum of the scaled scores and the row sum of their exponentials,
        float32 [B, T, N], so that further partials can be merged (`codec_jax.partial.por`).

    Returns [B, T, N, H] in the query's dtype; rows of free request slots are 0. Where lengths show on the device
    only, a plan for another forest or past its steps gives NaN everywhere, and so do drafts in a leaf that others read.
    Pages past num_pages, of a forest of another pool, are noticed on the host only.

    Raises ValueError for shapes, dtypes or names that do not fit, PlanError for a plan that does not.
    """
    query, key_pages, value_pages = (jnp.asarray(x) for x in (query, key_pages, value_pages))
    _check(query, key_pages, value_pages, forest, plan)
    if drafts is not None:
        drafts.check(forest, query.shape[1])
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    implementation = _choose(implementation, query, key_pages, plan)
    forest, plan, drafts = jax.tree.map(jnp.asarray, (forest, plan, drafts))

    readers = None
    if drafts is not None:
        readers = readers_of_tokens(drafts, forest, plan)
        # Where only the device knows that the drafts do not fit, the plan is taken for one that does not.
        plan = replace(plan, structure=jnp.where(drafts.fit(forest).all(), plan.structure, ~forest.structure))
    # Long pages are seen as several short ones.
    slots = (-1, plan.slot_tokens, *key_pages.shape[2:])
    key_pages, value_pages = key_pages.reshape(slots), value_pages.reshape(slots)
    if implementation == "mosaic":
        out, row_max, row_sum = mosaic.attend(query, key_pages, value_pages, forest, plan, scale, readers)
    else:
        tiled, position = rows.pack(query, forest, plan), rows.positions(forest, plan)
        partial = xla.attend(tiled, key_pages, value_pages, position, forest, plan, scale, readers)
        out, row_max, row_sum = rows.unpack(partial.out, forest, plan), partial.max, partial.sum
        out = _finish(out, 0.0, forest, plan).astype(query.dtype)
    if not return_residuals:
        return out
    row_max, row_sum = rows.unpack(row_max, forest, plan), rows.unpack(row_sum, forest, plan)
    return out, (_finish(row_max, -jnp.inf, forest, plan), _finish(row_sum, 0.0, forest, plan))


def _finish(values: Float[Array, "B T N *rest"], free: float, forest: Forest, plan: Plan) -> Array:
    """Fill free request slots, whose rows shared tiles with others, and spoil what a stale plan gave."""
    in_use = forest.active.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(plan.is_exact_for(forest), jnp.where(in_use, values, free), jnp.nan)


def _choose(implementation: str | None, query: Array, key_pages: Array, plan: Plan) -> str:
    """Return the implementation to run. Raises ValueError, with the reason, for one that cannot serve."""
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(f"implementation: expected 'mosaic', 'xla' or None, got {implementation!r}")
    if implementation == "xla":
        return "xla"
    reason = mosaic.why_not(query, key_pages, plan)
    if implementation == "mosaic" and reason:
        raise ValueError(f"implementation: 'mosaic' cannot serve: {reason}; pass 'xla' or None")
    return "xla" if reason else "mosaic"


def _check(query: Array, key_pages: Array, value_pages: Array, forest: Forest, plan: Plan) -> None:
    """Raise ValueError or PlanError for arguments that do not fit together; shapes and dtypes only."""
    if query.ndim != 4 or query.shape[0] != forest.request_capacity or query.shape[1] < 1:
        raise ValueError(
            f"query: expected [B, T, N, H] with B = {forest.request_capacity}, the forest's request_capacity, "
            f"got shape {query.shape}"
        )
    if key_pages.ndim != 4 or key_pages.shape[1] != forest.page_size or key_pages.shape[3] != query.shape[3]:
        raise ValueError(
            f"key_pages: expected [num_pages, {forest.page_size}, K, {query.shape[3]}], got shape {key_pages.shape}"
        )
    if value_pages.shape != key_pages.shape or value_pages.dtype != key_pages.dtype:
        raise ValueError(
            f"value_pages: expected {key_pages.dtype} of shape {key_pages.shape} like key_pages, "
            f"got {value_pages.dtype} of shape {value_pages.shape}"
        )
    for name, array in (("query", query), ("key_pages", key_pages)):
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"{name}: expected float32, bfloat16 or float16, got {array.dtype}")
    got = (query.shape[1], query.shape[2], key_pages.shape[2], query.shape[3])
    planned = (plan.query_tokens, plan.num_q_heads, plan.num_kv_heads, plan.head_dim)
    if got != planned:
        raise PlanError(
            f"plan: expected one for query_tokens, num_q_heads, num_kv_heads, head_dim = {got}, "
            f"which query and key_pages have, got one for {planned}"
        )
    plan.check(forest)
    if forest.is_host and forest.used_pages.size and forest.used_pages.max() >= key_pages.shape[0]:
        raise ValueError(
            f"key_pages: expected at least {forest.used_pages.max() + 1} pages, which the forest refers to, "
            f"got {key_pages.shape[0]}"
        )
