"""Requests to query rows and back: rows are requests in depth-first order x query tokens x q heads of a kv head."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.plan_format import ForestArrays, PlanArrays


def to_tiles(query: Float[Array, "B T N H"], forest: ForestArrays, plan: PlanArrays) -> Float[Array, "tiles K R H"]:
    """Return the rows of every tile; rows past the last request are 0."""
    batch, tokens, _, head_dim = query.shape
    rows = query.reshape(batch, tokens, plan.heads.num_kv_heads, plan.heads.group, head_dim)[forest.request_of_row]
    rows = rows.transpose(0, 1, 3, 2, 4).reshape(-1, plan.heads.num_kv_heads, head_dim)  # [B x T x G, K, H]
    rows = jnp.pad(rows, ((0, _padding(plan)), (0, 0), (0, 0)))
    return rows.reshape(plan.num_tiles, plan.tile_rows, plan.heads.num_kv_heads, head_dim).transpose(0, 2, 1, 3)


def to_requests(
    tiles: Float[Array, "tiles K R *rest"], forest: ForestArrays, plan: PlanArrays
) -> Float[Array, "B T N *rest"]:
    """Return the rows of every request, in the caller's order."""
    rest, requests, heads = tiles.shape[3:], (plan.request_capacity, plan.query_tokens), plan.heads
    rows = jnp.moveaxis(tiles, 1, 2).reshape(-1, heads.num_kv_heads, *rest)
    rows = rows[: rows.shape[0] - _padding(plan)].reshape(*requests, heads.group, heads.num_kv_heads, *rest)
    return jnp.moveaxis(rows[forest.row_of_request], 2, 3).reshape(*requests, heads.num_q_heads, *rest)


def positions(query_position: Int[Array, "B T"], forest: ForestArrays, plan: PlanArrays) -> Int[Array, "tiles R"]:
    """Return the position of every row's query token in its request's context; -1 for rows past the last request."""
    rows = jnp.repeat(query_position[forest.request_of_row].reshape(-1), plan.heads.group)
    return jnp.pad(rows, (0, _padding(plan)), constant_values=-1).reshape(plan.num_tiles, plan.tile_rows)


def _padding(plan: PlanArrays) -> int:
    return plan.num_tiles * plan.tile_rows - plan.request_capacity * plan.query_tokens * plan.heads.group
