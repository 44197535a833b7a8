"""The kernel that copies tokens to rows of their experts on a Hopper GPU, against lists."""

from functools import partial

import jax
import pytest
from expert_calls import check_rows, random_choices
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.hopper.arrange import arrange


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(64, 128, 8, 2048), (16, 32, 4, 2880), (128, 256, 8, 128), (1, 8, 2, 64), (37, 60, 4, 192)], ids=str
)
def test_tokens_get_their_rows(sizes: tuple[int, ...]) -> None:
    run = jax.jit(partial(arrange, num_experts=sizes[1]))

    @settings(max_examples=12)
    @given(st.integers(0, 2**32 - 1))
    def check_one(seed: int) -> None:
        x, expert = random_choices(*sizes, seed)
        check_rows(x, expert, sizes[1], run(x, expert))

    check_one()
