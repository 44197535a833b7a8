"""The kernel that chooses the experts of each token on a Hopper GPU, against float64, and what it refuses."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from expert_calls import check_choice, random_scores

from pallas_kernels.hopper import choose


@pytest.mark.gpu
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "chosen", "dtype"),
    [
        (64, 128, 8, jnp.bfloat16),
        (17, 32, 4, jnp.bfloat16),
        (1, 64, 1, jnp.float16),
        (3000, 256, 6, jnp.float16),
        (6, 512, 10, jnp.bfloat16),
        (4, 32, 32, jnp.bfloat16),
    ],
)
def test_the_greatest_scores_are_chosen(
    tokens: int, num_experts: int, chosen: int, dtype: Any, normalised: bool
) -> None:
    run = jax.jit(partial(choose.choose, chosen=chosen, normalised=normalised))
    for seed in range(4):
        scores = random_scores(tokens, num_experts, seed, dtype)
        assert choose.why_not(scores, jax.devices()[0]) is None
        check_choice(scores, chosen, normalised, run(scores))


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "reason"),
    [
        ((1, 128), jnp.bfloat16, "gpu", None),
        ((8, 96), jnp.bfloat16, "gpu", "it takes .* 64, 128, .* experts, bfloat16 or float16, got 96 and bfloat16"),
        ((8, 128), jnp.float32, "gpu", "got 128 and float32"),
        ((8, 128), jnp.bfloat16, "cpu", "it needs a Hopper GPU .*, .* is a test's device"),
    ],
)
def test_why_not_names_what_the_kernel_does_not_take(
    shape: tuple[int, int], dtype: Any, device: str, reason: str | None
) -> None:
    here = SimpleNamespace(platform=device, compute_capability="9.0", device_kind="a test's device")
    got = choose.why_not(jax.ShapeDtypeStruct(shape, dtype), here)
    assert got is None if reason is None else re.search(reason, got or "")
