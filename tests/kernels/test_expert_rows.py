"""Tokens in the order of their experts, against lists."""

import jax
import jax.numpy as jnp
import numpy as np
from expert_calls import check_order
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.expert_rows import rows_of_experts, tiles_of

TOKENS, CHOSEN, EXPERTS, GROUP, TILE = 23, 3, 6, 4, 8


@jax.jit
def rows_and_tiles(expert: jax.Array) -> tuple:
    rows = rows_of_experts(expert, EXPERTS, GROUP)
    return rows, tiles_of(rows, TILE)


#: The experts of a token, some of them elsewhere; of many tokens, mostly the same.
choices = st.permutations([*range(EXPERTS), EXPERTS, EXPERTS, -1]).map(lambda order: order[:CHOSEN])
routings = st.lists(choices, min_size=1, max_size=TOKENS).map(lambda some: (some * TOKENS)[:TOKENS])


@settings(max_examples=50)
@given(routings)
def test_each_expert_has_its_tokens_in_order_and_tiles_have_each_row_once(routing: list[list[int]]) -> None:
    expert = np.asarray(routing, np.int32)
    rows, tiles = jax.tree.map(np.asarray, rows_and_tiles(expert))
    order = check_order(expert, EXPERTS, len(rows.token), rows.place, tiles, GROUP, TILE)
    assert rows.num_rows.tolist() == [len(tokens) for _, tokens in order]
    assert rows.first.tolist() == [first for first, _ in order]
    for first, tokens in order:
        assert rows.token[first : first + len(tokens)].tolist() == tokens


def test_there_is_room_for_the_most_that_routings_can_need() -> None:
    """One row more than full groups for as many experts as possible."""
    expert = jnp.asarray([0] * 5 + [1, 2, 3])[:, None]
    rows = rows_of_experts(expert, num_experts=4, group=4)
    tiles = tiles_of(rows, tile_rows=4)
    assert len(rows.token) == 5 * 4
    assert len(tiles.rows) == tiles.end[-1] == 5
