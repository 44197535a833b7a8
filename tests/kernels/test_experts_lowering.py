"""The kernel for mixtures on any machine: what it lowers to for CUDA, alone and on a mesh, and what it refuses."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from codec_jax.nnx import DecoderConfig, Mixture, expert_products
from codec_jax.nnx.expert_products import Chosen, Weights, map_tokens
from codec_jax.nnx.experts import Experts
from codec_jax.nnx.parallel import Parallel
from pallas_kernels.hopper import experts

GPU = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a test's device", core_count=132)


def lower(sizes: tuple[int, ...], bias: bool, dtype: Any, activation: Any, around: Any = lambda run: run) -> Any:
    tokens, count, chosen, hidden, size = sizes
    struct = jax.ShapeDtypeStruct
    biases = (struct((count, 2 * size), dtype), struct((count, hidden), dtype)) if bias else (None, None)
    weights = Weights(struct((count, hidden, 2 * size), dtype), struct((count, size, hidden), dtype), *biases)
    each = Chosen(struct((tokens, chosen), jnp.int32), struct((tokens, chosen), jnp.float32))
    run = jax.jit(around(partial(map_tokens, activation=activation)))
    return run.trace(struct((tokens, hidden), dtype), each, weights).lower(lowering_platforms=("cuda",))


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices
    monkeypatch.setattr(expert_products.jax, "devices", lambda *kind: devices(*kind) if kind else [GPU])


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("sizes", "bias", "dtype", "activation", "wide"),
    [
        ((16, 128, 8, 2048, 768), False, jnp.bfloat16, "silu", True),
        ((5, 4, 2, 64, 192), True, jnp.float16, "clamped", False),
    ],
)
def test_a_mixture_lowers_for_cuda_as_three_kernels_without_sorts_and_loops(
    sizes: tuple[int, ...], bias: bool, dtype: Any, activation: Any, wide: bool
) -> None:
    with jax.enable_x64(wide):
        lowered = lower(sizes, bias, dtype, activation)
    assert (lowered.out_info.shape, lowered.out_info.dtype) == ((sizes[0], sizes[3]), dtype)
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
    # XLA keeps neither in the CUDA graph of a branch.
    assert "stablehlo.sort" not in text
    assert "stablehlo.while" not in text


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    "sizes",
    [(129, 8, 1, 64, 64), (65, 128, 8, 64, 64), (5, 129, 2, 64, 64), (5, 8, 2, 16_448, 64)],
    ids=["tokens", "choices", "experts", "numbers of a token"],
)
def test_more_than_one_launch_arranges_takes_two_kernels_after_those_of_xla(sizes: tuple[int, ...]) -> None:
    text = lower(sizes, False, jnp.bfloat16, "silu").as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(("of_each_group", "differentiable", "kernels"), [(1, False, 4), (2, False, 3), (1, True, 0)])
def test_a_router_chooses_by_a_kernel_unless_experts_have_groups_or_are_trained(
    of_each_group: int, differentiable: bool, kernels: int
) -> None:
    mixture = Mixture(32, 4, 64, groups=of_each_group, groups_per_token=1)
    config = DecoderConfig(8, 64, 64, 1, 2, 1, 32, mixture=mixture)

    def run(x: Any) -> Any:
        return Experts(config, mixture, nnx.Rngs(0)).decode(x, Parallel(differentiable=differentiable))

    text = jax.jit(run).trace(jax.ShapeDtypeStruct((3, 1, 64), config.dtype)).lower(lowering_platforms=("cuda",))
    assert text.as_text().count("stablehlo.custom_call @mosaic_gpu") == kernels
    assert ("top_k" in text.as_text()) is (kernels < 4)


@pytest.mark.usefixtures("_on_a_gpu")
def test_the_kernel_lowers_for_the_devices_of_a_mesh() -> None:
    mesh, spec = jax.sharding.Mesh(jax.devices("cpu")[:2], ("tensor",)), jax.sharding.PartitionSpec

    def around(run: Any) -> Any:
        def local(x: Any, chosen: Chosen, weights: Weights) -> Any:
            return jax.lax.psum(run(x, chosen, weights), "tensor")

        return jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec(), spec("tensor")), out_specs=spec())

    lowered = lower((5, 4, 2, 64, 64), False, jnp.bfloat16, "silu", around)
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"x": jnp.float16, "down": jnp.float16}, None),
        ({"x": jnp.float32, "down": jnp.float32}, "bfloat16 or float16, .*, got float32 and weights of float32"),
        ({"down": jnp.float16}, "got bfloat16 and weights of float16"),
        ({"shape": (8, 2880, 96)}, "multiples of 64, got 96 and 2880"),
        ({"shape": (8, 100, 64)}, "multiples of 64, got 64 and 100"),
        ({"device": SimpleNamespace(platform="cpu", device_kind="cpu")}, "it needs a Hopper GPU .*, .* is cpu"),
    ],
    ids=str,
)
def test_why_not_names_what_the_kernel_does_not_take(changed: dict[str, Any], reason: str | None) -> None:
    shape = changed.get("shape", (8, 192, 128))
    x = jax.ShapeDtypeStruct((5, shape[2]), changed.get("x", jnp.bfloat16))
    down = jax.ShapeDtypeStruct(shape, changed.get("down", jnp.bfloat16))
    got = experts.why_not(x, down, changed.get("device", GPU))
    assert got is None if reason is None else re.search(reason, got)


def test_a_gpu_without_the_kernel_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="a test's device")
    monkeypatch.setattr(expert_products.jax, "devices", lambda: [older])
    with pytest.warns(UserWarning, match=r"^mixtures run without a kernel, .* slow on a GPU; it needs a Hopper GPU"):
        lower((5, 4, 2, 64, 64), False, jnp.bfloat16, "silu")
