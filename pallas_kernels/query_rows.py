"""Requests to query rows and back: rows are requests in depth-first order x query tokens x q heads of a kv head."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.family import Call
from pallas_kernels.plan_format import PlanArrays


def to_tiles(call: Call) -> Float[Array, "tiles K R H"]:
    """Return the query's rows of every tile; rows past the last request are 0."""
    plan, heads, head_dim = call.plan, call.plan.heads, call.query.shape[3]
    rows = call.query.reshape(*call.query.shape[:2], heads.num_kv_heads, heads.group, head_dim)
    rows = rows[call.forest.request_of_row].transpose(0, 1, 3, 2, 4).reshape(-1, heads.num_kv_heads, head_dim)
    rows = jnp.pad(rows, ((0, _padding(plan)), (0, 0), (0, 0)))  # [tiles x R, K, H]
    return rows.reshape(plan.num_tiles, plan.tile_rows, heads.num_kv_heads, head_dim).transpose(0, 2, 1, 3)


def to_requests(tiles: Float[Array, "tiles K R *rest"], call: Call) -> Float[Array, "B T N *rest"]:
    """Return the rows of every request, in the caller's order."""
    plan, heads, rest = call.plan, call.plan.heads, tiles.shape[3:]
    requests = (plan.request_capacity, plan.query_tokens)
    rows = jnp.moveaxis(tiles, 1, 2).reshape(-1, heads.num_kv_heads, *rest)
    rows = rows[: rows.shape[0] - _padding(plan)].reshape(*requests, heads.group, heads.num_kv_heads, *rest)
    return jnp.moveaxis(rows[call.forest.row_of_request], 2, 3).reshape(*requests, heads.num_q_heads, *rest)


def by_row(position: Int[Array, "B T"], call: Call) -> Int[Array, "tiles R"]:
    """Return the position that is given for the query token of every row; -1 for rows past the last request."""
    plan = call.plan
    rows = jnp.repeat(position[call.forest.request_of_row].reshape(-1), plan.heads.group)
    return jnp.pad(rows, (0, _padding(plan)), constant_values=-1).reshape(plan.num_tiles, plan.tile_rows)


def _padding(plan: PlanArrays) -> int:
    return plan.num_tiles * plan.tile_rows - plan.request_capacity * plan.query_tokens * plan.heads.group
