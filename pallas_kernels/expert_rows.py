"""Tokens in the order of their experts, so that each expert multiplies its own rows only.

    expert    [T, chosen]   the experts of each token
    place     [T, chosen]   the row that a token has for each of them
    token     [R]           the token of each row
                            └─ expert 0 ─┴─ expert 1 ─┴─ ...   each begins at a multiple of `group`
    tiles                   runs of up to so many rows of one expert

All sizes are fixed: R and the number of tiles are the most that T tokens can need. There is no sort, as XLA would not
keep one in the CUDA graph of a loop: a token's place among those of its expert is how many tokens before it chose that
one, since no token chooses an expert twice.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int

#: Rows of an expert begin at a multiple of this for kernels, which copy rows in groups of as many.
ROW_GROUP = 8


class ExpertRows(NamedTuple):
    """Rows in the order of their experts."""

    token: Int[jax.Array, " R"]  # of each row; of a row that fills a group, any
    place: Int[jax.Array, "T chosen"]  # R where the expert is out of bounds
    first: Int[jax.Array, " E"]  # row of each expert
    num_rows: Int[jax.Array, " E"]  # of each expert


class Tiles(NamedTuple):
    """Runs of consecutive rows of one expert, in the order of the rows."""

    expert: Int[jax.Array, " tiles"]
    first: Int[jax.Array, " tiles"]  # row
    rows: Int[jax.Array, " tiles"]  # 0 past the last tile
    end: Int[jax.Array, " E"]  # tiles up to the last one of each expert; of the last expert, all that there are


def most_tiles(chosen: int, num_experts: int, tile_rows: int) -> int:
    """Return how many tiles there can be: all but one of an expert's are full.

    Args:
      chosen: rows, without those that fill groups.
      num_experts: E.
      tile_rows: rows of a tile, at most.

    >>> from pallas_kernels.expert_rows import most_tiles
    >>> most_tiles(chosen=6, num_experts=4, tile_rows=2)  # 3 + 1 + 1 + 1 rows, for instance
    5
    """
    used = min(chosen, num_experts)
    return (chosen - used) // tile_rows + used


def rows_of_experts(expert: Int[jax.Array, "T chosen"], num_experts: int, group: int = ROW_GROUP) -> ExpertRows:
    """Put tokens in the order of their experts. Jittable.

    Args:
      expert: the experts of each token, all different; those out of bounds get no row.
      num_experts: E.
      group: rows of an expert begin at multiples of this.

    >>> from pallas_kernels.expert_rows import rows_of_experts
    >>> rows = rows_of_experts(jnp.asarray([[2, 0], [2, 1], [0, 2]]), num_experts=3, group=2)
    >>> rows.place.tolist(), rows.num_rows.tolist(), rows.first.tolist()
    ([[4, 0], [5, 2], [1, 6]], [2, 1, 3], [0, 2, 4])
    >>> rows.token.tolist()
    [0, 2, 1, 0, 0, 1, 2, 0]
    """
    tokens, experts = expert.shape[0], jnp.arange(num_experts, dtype=jnp.int32)
    chose = (expert[:, :, None] == experts[None, None]).any(axis=1)  # [T, E]
    upto = jnp.cumsum(chose, axis=0, dtype=jnp.int32)  # [T, E], tokens that chose it, up to each one
    count = upto[-1]
    filled = -(-count // group) * group
    # A sum over all experts before it is one kernel; a cumulative one is several.
    first = jnp.where(experts[None] < experts[:, None], filled[None], 0).sum(axis=1, dtype=jnp.int32)
    size = most_tiles(expert.size, num_experts, group) * group
    is_here = (expert >= 0) & (expert < num_experts)
    place = jnp.take_along_axis(first[None] + upto - 1, expert.clip(0, num_experts - 1), axis=1)
    place = jnp.where(is_here, place, size)
    # Otherwise XLA counts again for every number of every row that is gathered by its place.
    place = lax.optimization_barrier(place)
    token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], expert.shape)
    return ExpertRows(jnp.zeros(size, jnp.int32).at[place].set(token, mode="drop"), place, first, count)


def tiles_of(rows: ExpertRows, tile_rows: int) -> Tiles:
    """Cut the rows of each expert into tiles. Jittable.

    Args:
      rows: of all experts.
      tile_rows: rows of a tile, at most.

    >>> from pallas_kernels.expert_rows import rows_of_experts, tiles_of
    >>> rows = rows_of_experts(jnp.asarray([[2, 0], [2, 1], [0, 2]]), num_experts=3, group=2)
    >>> tiles = tiles_of(rows, tile_rows=2)
    >>> tiles.expert.tolist(), tiles.first.tolist(), tiles.rows.tolist(), tiles.end.tolist()
    ([0, 1, 2, 2], [0, 2, 4, 6], [2, 1, 2, 1], [1, 2, 4])
    """
    experts = jnp.arange(rows.num_rows.shape[0], dtype=jnp.int32)
    of_expert = -(-rows.num_rows // tile_rows)
    end = jnp.where(experts[None] <= experts[:, None], of_expert[None], 0).sum(axis=1, dtype=jnp.int32)
    begin = end - of_expert
    number = jnp.arange(most_tiles(rows.place.size, len(experts), tile_rows), dtype=jnp.int32)[:, None]
    # Sums over experts, of which one counts, are one kernel together; looking the expert's numbers up is another.
    is_its = (begin[None] <= number) & (number < end[None])  # [tiles, E]
    done = (number - begin[None]) * tile_rows  # rows of the expert before the tile

    def of_tile(values: jax.Array) -> jax.Array:
        return jnp.where(is_its, values, 0).sum(axis=1, dtype=jnp.int32)

    left = jnp.minimum(rows.num_rows[None] - done, tile_rows)
    return Tiles(of_tile(experts[None]), of_tile(rows.first[None] + done), of_tile(left), end)
