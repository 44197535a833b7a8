"""Tokens in the order of their experts, against lists."""

import jax
import jax.numpy as jnp
import numpy as np
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
    rows, tiles = jax.tree.map(np.asarray, rows_and_tiles(np.asarray(routing, np.int32)))
    tokens_of = [[token for token, chosen in enumerate(routing) if expert in chosen] for expert in range(EXPERTS)]
    assert rows.num_rows.tolist() == list(map(len, tokens_of))
    first = 0
    for expert, tokens in enumerate(tokens_of):
        assert rows.first[expert] == first
        assert rows.token[first : first + len(tokens)].tolist() == tokens
        first += -(-len(tokens) // GROUP) * GROUP
    assert first <= len(rows.token)
    for token, chosen in enumerate(routing):
        for expert, place in zip(chosen, rows.place[token], strict=True):
            is_here = 0 <= expert < EXPERTS
            want = rows.first[expert] + tokens_of[expert].index(token) if is_here else len(rows.token)
            assert place == want
    cut = [
        (expert, rows.first[expert] + done, min(TILE, len(tokens) - done))
        for expert, tokens in enumerate(tokens_of)
        for done in range(0, len(tokens), TILE)
    ]
    assert list(zip(*(field[: len(cut)] for field in tiles[:3]), strict=True)) == cut
    assert tiles.end[-1] == len(cut)
    assert not tiles.rows[len(cut) :].any()


def test_there_is_room_for_the_most_that_routings_can_need() -> None:
    """One row more than full groups for as many experts as possible."""
    expert = jnp.asarray([0] * 5 + [1, 2, 3])[:, None]
    rows = rows_of_experts(expert, num_experts=4, group=4)
    tiles = tiles_of(rows, tile_rows=4)
    assert len(rows.token) == 5 * 4
    assert len(tiles.rows) == tiles.end[-1] == 5
