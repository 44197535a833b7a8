"""The kernel for mixtures on a Hopper GPU, held to float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_calls import Sizes, exact, random_call
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.nnx.expert_products import map_tokens
from pallas_kernels.hopper import experts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("sizes", "activation", "dtype"),
    [
        (Sizes(1, 8, 2, 128, 64), "silu", jnp.bfloat16),
        (Sizes(37, 32, 4, 192, 320, bias=True), "clamped", jnp.bfloat16),
        (Sizes(300, 16, 4, 256, 192), "gelu_tanh", jnp.float16),
        (Sizes(1500, 5, 3, 320, 128, bias=True), "silu", jnp.bfloat16),
    ],
    ids=str,
)
def test_random_routings_are_exact(sizes: Sizes, activation: Any, dtype: Any) -> None:
    run = jax.jit(partial(map_tokens, activation=activation))

    @settings(max_examples=8)
    @given(st.integers(0, sizes.chosen), st.integers(0, 2**32 - 1))
    def check(popular: int, seed: int) -> None:
        x, chosen, weights = random_call(sizes, seed, dtype, popular)
        assert experts.why_not(x, weights.down, jax.devices()[0]) is None
        elsewhere = chosen.expert == seed % sizes.num_experts
        chosen = chosen._replace(expert=jnp.where(elsewhere, sizes.num_experts, chosen.expert))
        x = x.at[seed % (sizes.tokens + 1)].set(jnp.nan)  # a token, or none; it stays with it
        got, want = np.asarray(run(x, chosen, weights), np.float64), exact(x, chosen, weights, activation)
        spread = np.nanstd(want) if np.isfinite(want).any() else 1.0
        np.testing.assert_allclose(got, want, atol=0.03 * spread, rtol=0.03)

    check()


@pytest.mark.parametrize("tokens", [16, 2048])
def test_results_are_the_same_from_run_to_run(tokens: int) -> None:
    x, chosen, weights = random_call(Sizes(tokens, 64, 8, 512, 256), 0, jnp.bfloat16)
    run = jax.jit(partial(map_tokens, activation="silu"))
    once, *again = (np.asarray(run(x, chosen, weights), np.float32) for _ in range(4))
    assert all((once == result).all() for result in again)
