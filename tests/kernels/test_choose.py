"""The kernel that chooses the experts of each token on a Hopper GPU, against float64, and what it refuses."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from expert_calls import check_choice, in_parts, random_scores

from pallas_kernels.addends import Parts
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
    run = jax.jit(partial(choose.choose, dtype=dtype, chosen=chosen, normalised=normalised))
    assert choose.why_not(num_experts, dtype, jax.devices()[0]) is None
    for seed in range(4):
        scores = random_scores(tokens, num_experts, seed, dtype)
        check_choice(scores, chosen, normalised, run(Parts(scores[None])))
        check_choice(scores, chosen, normalised, run(in_parts(scores, 1 << (seed + 1))))


@pytest.mark.parametrize(
    ("num_experts", "dtype", "device", "reason"),
    [
        (128, jnp.bfloat16, "gpu", None),
        (96, jnp.bfloat16, "gpu", "it takes .* 64, 128, .* experts, bfloat16 or float16, got 96 and bfloat16"),
        (128, jnp.float32, "gpu", "got 128 and float32"),
        (128, jnp.bfloat16, "cpu", "it needs a Hopper GPU .*, .* is a test's device"),
    ],
)
def test_why_not_names_what_the_kernel_does_not_take(
    num_experts: int, dtype: Any, device: str, reason: str | None
) -> None:
    here = SimpleNamespace(platform=device, compute_capability="9.0", device_kind="a test's device")
    got = choose.why_not(num_experts, dtype, here)
    assert got is None if reason is None else re.search(reason, got or "")
