"""Requests to query rows and back: rows are requests in depth-first order x query tokens x q heads of a kv head."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from codec_jax.forest import Forest
from codec_jax.plan import Plan


def pack(query: Float[Array, "B T N H"], forest: Forest, plan: Plan) -> Float[Array, "tiles K R H"]:
    """Return the rows of every tile; rows past the last request are 0."""
    batch, tokens, _, head_dim = query.shape
    rows = query.reshape(batch, tokens, plan.num_kv_heads, plan.group, head_dim)[forest.request_of_row]
    rows = rows.transpose(0, 1, 3, 2, 4).reshape(-1, plan.num_kv_heads, head_dim)  # [B x T x G, K, H]
    rows = jnp.pad(rows, ((0, _padding(plan)), (0, 0), (0, 0)))
    return rows.reshape(plan.num_tiles, plan.tile_rows, plan.num_kv_heads, head_dim).transpose(0, 2, 1, 3)


def unpack(tiles: Float[Array, "tiles K R *rest"], forest: Forest, plan: Plan) -> Float[Array, "B T N *rest"]:
    """Return the rows of every request, in the caller's order."""
    rest, requests = tiles.shape[3:], (plan.request_capacity, plan.query_tokens)
    rows = jnp.moveaxis(tiles, 1, 2).reshape(-1, plan.num_kv_heads, *rest)
    rows = rows[: rows.shape[0] - _padding(plan)].reshape(*requests, plan.group, plan.num_kv_heads, *rest)
    return jnp.moveaxis(rows[forest.query_order], 2, 3).reshape(*requests, plan.num_q_heads, *rest)


def positions(forest: Forest, plan: Plan) -> Int[Array, "tiles R"]:
    """Return the position of every row's query token in its request's context; -1 for rows past the last request."""
    rows = jnp.repeat(forest.positions(plan.query_tokens)[forest.request_of_row].reshape(-1), plan.group)
    return jnp.pad(rows, (0, _padding(plan)), constant_values=-1).reshape(plan.num_tiles, plan.tile_rows)


def _padding(plan: Plan) -> int:
    return plan.num_tiles * plan.tile_rows - plan.request_capacity * plan.query_tokens * plan.group
