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
from norm_calls import PLACEMENTS, check, factors_of

from pallas_kernels.hopper.add_norm import Factors, add_and_norm, why_not
from pallas_kernels.hopper.head_rows import Norm

PLAIN, PLUS_ONE = Norm(1e-6, plus_one=False), Norm(1e-3, plus_one=True)


def random_call(rows: int, width: int, parts: int, placement: str, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Hidden states, parts of a product, and factors; rows are of different sizes."""
    rng = np.random.default_rng(rows)
    x, of_sum = rng.normal(size=(rows, width)), rng.normal(size=(parts, rows, width))
    x, of_sum = (each * np.exp2(rng.integers(-6, 6, (rows, 1))) for each in (x, of_sum))
    factors = factors_of(placement, *jnp.asarray(rng.uniform(0.5, 1.5, (2, width)), dtype))
    return jnp.asarray(x, dtype), jnp.asarray(of_sum, jnp.float32), factors


def check_call(x: Any, parts: Any, factors: Factors, norm: Norm) -> None:
    check(add_and_norm(x, parts, factors, norm), x, parts[:, None], factors, norm)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of JAX 0.10 knows no layouts")
@pytest.mark.parametrize(
    ("width", "parts", "norm", "placement"),
    [
        (512, 3, PLAIN, "before"), (256, 1, PLUS_ONE, "before"), (384, 2, PLAIN, "before"),
        (512, 2, PLUS_ONE, "both"), (384, 1, PLAIN, "after"),
    ],
    ids=str,
)  # fmt: skip
def test_interpreted_sums_and_norms_equal_float64(
    width: int, parts: int, norm: Norm, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl, "kernel", partial(pl.kernel, interpret=plgpu.InterpretGPUParams(detect_races=True)))
    add_and_norm.clear_cache()
    call = random_call(3, width, parts, placement)
    check_call(*call, norm)
    add_and_norm.clear_cache()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("width", [896, 2560, 4096])
def test_it_is_one_kernel_also_inside_of_shard_map(width: int, placement: str) -> None:
    call = jax.eval_shape(lambda: random_call(16, width, 4, placement))
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
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (16, 2560), (64, 5120), (17, 896), (5, 8192)])
def test_sums_and_norms_equal_float64(
    rows: int, width: int, placement: str, parts: int, norm: Norm, dtype: Any
) -> None:
    call = random_call(rows, width, parts, placement, dtype)
    check_call(*call, norm)
