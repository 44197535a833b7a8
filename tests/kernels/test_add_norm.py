"""The kernel that adds parts of a product to hidden states and makes the norm: interpreted, lowered, and on a GPU."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.hopper.add_norm import add_and_norm, why_not
from pallas_kernels.hopper.head_rows import Norm

PLAIN, PLUS_ONE = Norm(1e-6, plus_one=False), Norm(1e-3, plus_one=True)


def random_call(rows: int, width: int, parts: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    """Hidden states, parts of a product, and factors; rows are of different sizes."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, width)) * np.exp2(rng.integers(-6, 6, (rows, 1)))
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(rng.normal(size=(parts, rows, width)), jnp.float32),
        jnp.asarray(rng.uniform(0.5, 1.5, width), dtype),
    )


def check(made: Any, x: jax.Array, parts: jax.Array, factors: jax.Array, norm: Norm) -> None:
    """Hold both results to float64; the norm is that of the rounded sum, as the next layer's hidden states are."""
    total, normed = (np.asarray(each, np.float64) for each in made)
    eps = float(jnp.finfo(x.dtype).eps)
    exact = np.asarray(x, np.float64) + np.asarray(parts, np.float64).sum(0)
    np.testing.assert_allclose(total, exact, rtol=eps, atol=1e-4)
    scale = 1 / np.sqrt((total * total).mean(-1, keepdims=True) + norm.epsilon)
    expected = total * scale * (np.asarray(factors, np.float64) + norm.plus_one)
    np.testing.assert_allclose(normed, expected, rtol=1.1 * eps, atol=1e-5)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of JAX 0.10 knows no layouts")
@pytest.mark.parametrize(("width", "parts", "norm"), [(512, 3, PLAIN), (256, 1, PLUS_ONE), (384, 2, PLAIN)], ids=str)
def test_interpreted_sums_and_norms_equal_float64(
    width: int, parts: int, norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl, "kernel", partial(pl.kernel, interpret=plgpu.InterpretGPUParams(detect_races=True)))
    add_and_norm.clear_cache()
    call = random_call(3, width, parts)
    check(add_and_norm(*call, norm), *call, norm)
    add_and_norm.clear_cache()


@pytest.mark.parametrize("width", [896, 2560, 4096])
def test_it_is_one_kernel_also_inside_of_shard_map(width: int) -> None:
    call = jax.eval_shape(lambda: random_call(16, width, 4))
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:1])
    run = partial(add_and_norm, norm=PLAIN)
    spec = PartitionSpec()
    for traced in (run, jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)):
        text = jax.jit(traced).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_what_it_does_not_take_is_said() -> None:
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    assert why_not(2560, jnp.bfloat16, device) is None
    assert "16384" in (why_not(16_384, jnp.bfloat16, device) or "")
    assert "2880" in (why_not(2880, jnp.bfloat16, device) or "")
    assert "float32" in (why_not(2560, jnp.float32, device) or "")
    assert "Hopper" in (why_not(2560, jnp.bfloat16, jax.devices("cpu")[0]) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("norm", [PLAIN, PLUS_ONE], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (16, 2560), (64, 5120), (17, 896), (5, 8192)])
def test_sums_and_norms_equal_float64(rows: int, width: int, parts: int, norm: Norm, dtype: Any) -> None:
    call = random_call(rows, width, parts, dtype)
    check(add_and_norm(*call, norm), *call, norm)
