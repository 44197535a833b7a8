"""Attention of every request over its path in the forest, each shared token read once per row tile."""

from __future__ import annotations

import math
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from codec_jax import mosaic, xla
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
    scale: float | None = None,
    implementation: str | None = None,
    return_residuals: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Residuals]:
    """Attention of each request's last T tokens over its whole context (paper, section 4). Jittable.

    Args:
      query: [B, T, N, H] in the caller's request order, B = forest.request_capacity; float32, bfloat16 or float16.
        The T tokens are the last T of each request's context (their K and V are in the pages already) and see each
        other causally.
      key_pages: [num_pages, page_size, K, H], N a multiple of K; every value finite.
      value_pages: like key_pages.
      forest: the paths, in lengths that include the query tokens.
      plan: from `make_plan` for this forest, head layout and T.
      scale: factor on the scores; defaults to 1 / sqrt(H).
      implementation: "mosaic" (kernels for Hopper GPUs: bfloat16 or float16, H 64 or 128, T = 1), "xla" (any device),
        or None for the fastest that this device and these shapes allow.
      return_residuals: also return the row maximum of the scaled scores and the row sum of their exponentials,
        float32 [B, T, N], so that further partials can be merged (`codec_jax.partial.por`).

    Returns [B, T, N, H] in the query's dtype; rows of free request slots are 0. Where lengths show on the device
    only, a plan for another forest or past its steps gives NaN everywhere.

    Raises ValueError for shapes, dtypes or names that do not fit, PlanError for a plan that does not.
    """
    query, key_pages, value_pages = (jnp.asarray(x) for x in (query, key_pages, value_pages))
    _check(query, key_pages, value_pages, forest, plan)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    implementation = _choose(implementation, query, key_pages, plan)
    forest, plan = jax.tree.map(jnp.asarray, (forest, plan))

    batch, tokens, _, head_dim = query.shape
    group, num_kv_heads = plan.group, plan.num_kv_heads
    rows = batch * tokens * group
    padding = plan.num_tiles * plan.tile_rows - rows
    row_of, request_of = forest.query_order, forest.request_of_row

    # Requests to rows: [B, T, K, G, H] -> [B x T x G, K, H] in depth-first order -> [tiles, K, R, H].
    packed = query.reshape(batch, tokens, num_kv_heads, group, head_dim)[request_of]
    packed = packed.transpose(0, 1, 3, 2, 4).reshape(rows, num_kv_heads, head_dim)
    packed = jnp.pad(packed, ((0, padding), (0, 0), (0, 0)))
    tiled = packed.reshape(plan.num_tiles, plan.tile_rows, num_kv_heads, head_dim).transpose(0, 2, 1, 3)
    position = jnp.repeat(forest.positions(tokens)[request_of].reshape(-1), group)
    position = jnp.pad(position, (0, padding), constant_values=-1).reshape(plan.num_tiles, plan.tile_rows)

    if implementation == "mosaic":
        partial = mosaic.attend(tiled, key_pages, value_pages, forest, plan, scale)
    else:
        partial = xla.attend(tiled, key_pages, value_pages, position, forest, plan, scale)

    def unpack(tiles: Array) -> Array:
        """Rows back to requests: [tiles, K, R, *] -> [B, T, N, *]."""
        flat = jnp.moveaxis(tiles, 1, 2).reshape(plan.num_tiles * plan.tile_rows, num_kv_heads, *tiles.shape[3:])
        split = flat[:rows].reshape(batch, tokens, group, *flat.shape[1:])[row_of]
        return jnp.moveaxis(split, 2, 3).reshape(batch, tokens, plan.num_q_heads, *tiles.shape[3:])

    in_use, exact = forest.active, plan.is_exact_for(forest)

    def finished(tiles: Array, free: float) -> Array:
        """Fill free request slots, whose rows shared tiles with others, and spoil what a stale plan gave."""
        rows = unpack(tiles)
        rows = jnp.where(in_use.reshape(-1, *[1] * (rows.ndim - 1)), rows, free)
        return jnp.where(exact, rows, jnp.nan)

    out = finished(partial.out, 0.0).astype(query.dtype)
    residuals = finished(partial.max, -jnp.inf), finished(partial.sum, 0.0)
    return (out, residuals) if return_residuals else out


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
