"""What the experts of a mixture make of tokens, in each of the ways that XLA has, against float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_calls import Sizes, exact, random_call
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from codec_jax.nnx import DecoderConfig, Mixture, expert_products
from codec_jax.nnx.expert_products import Chosen, Weights, map_densely, map_tokens
from codec_jax.nnx.experts import Experts
from codec_jax.nnx.parallel import Parallel

MANY = Sizes(400, 16, 2, 8, 12, bias=True)  # enough for tiles
WAYS = {
    "tiles": (map_tokens, MANY),
    "dense": (map_tokens, Sizes(9, 5, 2, 8, 12)),
    "dense, in parts": (map_densely, Sizes(600, 3, 2, 8, 12, bias=True)),
}


@pytest.mark.parametrize(("way", "sizes"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped"])
def test_random_routings_are_exact(
    way: Callable, sizes: Sizes, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    for name in ("_by_tiles", "map_densely"):
        monkeypatch.setattr(expert_products, name, noted(ran, name, getattr(expert_products, name)))
    run = jax.jit(partial(way, activation=activation))

    @settings(max_examples=6)
    @given(st.integers(0, 2), st.integers(0, 2**32 - 1))
    def check(popular: int, seed: int) -> None:
        x, chosen, weights = random_call(sizes, seed, jnp.float32, popular)
        np.testing.assert_allclose(run(x, chosen, weights), exact(x, chosen, weights, activation), atol=1e-4, rtol=1e-4)

    check()
    assert way is map_densely or ran == ["_by_tiles" if sizes is MANY else "map_densely"]


def noted(ran: list[str], name: str, run: Callable) -> Callable:
    def note(*arguments: Any) -> Any:
        ran.append(name)
        return run(*arguments)

    return note


@pytest.mark.parametrize("tokens", [400, 9])
def test_devices_of_a_mesh_add_what_their_experts_make(tokens: int) -> None:
    x, chosen, weights = random_call(MANY._replace(tokens=tokens), 0, jnp.float32, 1)
    mesh = Mesh(np.reshape(jax.devices("cpu")[:4], (2, 2)), ("context", "tensor"))
    parallel = Parallel.of(mesh)

    def local(x: Any, chosen: Chosen, weights: Weights) -> Any:
        here = chosen._replace(expert=parallel.here(chosen.expert, MANY.num_experts))
        return parallel.reduce(map_tokens(x, here, weights, "silu"))

    specs = PartitionSpec(), PartitionSpec(), PartitionSpec(("tensor", "context"))
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))(x, chosen, weights)
    np.testing.assert_allclose(got, exact(x, chosen, weights, "silu"), atol=1e-4, rtol=1e-4)


def test_a_router_that_likes_all_alike_chooses_the_first_and_decoding_is_what_training_sees() -> None:
    mixture = Mixture(16, 3, 12, bias=True)
    config = DecoderConfig(8, 8, 8, 1, 2, 1, 4, mixture=mixture, dtype=jnp.float32, param_dtype=jnp.float32)
    experts = Experts(config, mixture, nnx.Rngs(0))
    experts.router.kernel[...] = jnp.zeros((8, 16))
    x, _, weights = random_call(MANY, 0, jnp.float32)
    for name, value in zip(Weights._fields, weights, strict=True):
        getattr(experts, name)[...] = value
    chosen = Chosen(np.broadcast_to(np.arange(3), (400, 3)), np.full((400, 3), 1 / 3))
    want = exact(x, chosen, weights, "silu")
    for run in (experts, experts.decode):
        np.testing.assert_allclose(jax.jit(run)(x[None])[0], want, atol=1e-4, rtol=1e-4)
    assert np.isfinite(jax.jit(jax.grad(lambda x: experts(x).sum()))(x[None])).all()
