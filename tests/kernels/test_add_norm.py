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
from norm_calls import PLACEMENTS, check, factors_of, listed

from pallas_kernels.addends import Parts, Shares
from pallas_kernels.hopper.add_norm import Factors, add_and_norm, why_not
from pallas_kernels.hopper.head_rows import Norm

PLAIN, PLUS_ONE = Norm(1e-6, plus_one=False), Norm(1e-3, plus_one=True)


def random_call(
    rows: int, width: int, parts: int, placement: str, dtype: Any = jnp.bfloat16, kind: str = "parts"
) -> tuple[Any, ...]:
    """Hidden states, parts of a product or what experts made, and factors; rows are of different sizes."""
    rng = np.random.default_rng(rows)
    x, of_sum = rng.normal(size=(rows, width)), rng.normal(size=(parts, rows, width))
    x, of_sum = (each * np.exp2(rng.integers(-6, 6, (rows, 1))) for each in (x, of_sum))
    factors = factors_of(placement, *jnp.asarray(rng.uniform(0.5, 1.5, (2, width)), dtype))
    update: Parts | Shares = Parts(jnp.asarray(of_sum, jnp.float32))
    if kind == "bias":
        update = update._replace(bias=jnp.asarray(rng.normal(size=width), dtype))
    if kind == "experts":
        update = random_shares(rng, of_sum, dtype)
    return jnp.asarray(x, dtype), update, factors


def random_shares(rng: np.random.Generator, of_sum: np.ndarray, dtype: Any) -> Shares:
    """The parts as rows in any order; some experts are elsewhere, and rows that nobody has are not numbers."""
    parts, rows, width = of_sum.shape
    order = rng.permutation(parts * rows + 3)
    made = np.full((len(order) + 1, width), np.nan)  # the last one is nobody's
    place = order[: parts * rows].reshape(rows, parts).astype(np.int32)
    made[place] = of_sum.swapaxes(0, 1)
    elsewhere = rng.random(place.shape) < 0.2
    elsewhere[-1, -1] = True
    made[place[elsewhere]] = np.nan
    place[elsewhere] = len(made)
    return Shares(jnp.asarray(made, dtype), jnp.asarray(place), jnp.asarray(rng.random(place.shape), jnp.float32))


def check_call(x: Any, update: Parts | Shares, factors: Factors, norm: Norm) -> None:
    check(add_and_norm(x, update, factors, norm), x, listed(update)[:, None], factors, norm)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of JAX 0.10 knows no layouts")
@pytest.mark.parametrize(
    ("width", "parts", "norm", "placement", "kind"),
    [
        (512, 3, PLAIN, "before", "parts"), (256, 1, PLUS_ONE, "before", "bias"), (384, 2, PLAIN, "before", "experts"),
        (512, 2, PLUS_ONE, "both", "experts"), (384, 1, PLAIN, "after", "parts"), (320, 2, PLUS_ONE, "both", "bias"),
        (132, 3, PLAIN, "before", "experts"),
    ],
    ids=str,
)  # fmt: skip
def test_interpreted_sums_and_norms_equal_float64(
    width: int, parts: int, norm: Norm, placement: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Numbers that two pieces of a row have are the same twice, which the interpreter takes for a race.
    params = plgpu.InterpretGPUParams(detect_races=width % 128 == 0)
    monkeypatch.setattr(pl, "kernel", partial(pl.kernel, interpret=params))
    add_and_norm.clear_cache()
    call = random_call(3, width, parts, placement, kind=kind)
    check_call(*call, norm)
    add_and_norm.clear_cache()


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of JAX 0.10 knows no layouts")
def test_shares_that_are_no_numbers_are_seen_wherever_the_expert_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that gives NaN chooses experts that are nowhere, and nothing may look as if all were well."""
    monkeypatch.setattr(pl, "kernel", partial(pl.kernel, interpret=plgpu.InterpretGPUParams()))
    add_and_norm.clear_cache()
    x, shares, factors = random_call(3, 128, 2, "before", kind="experts")
    shares = shares._replace(place=shares.place.at[1].set(len(shares.made)), share=shares.share.at[1].set(jnp.nan))
    total, _ = add_and_norm(x, shares, factors, PLAIN)
    add_and_norm.clear_cache()
    assert np.isnan(np.asarray(total, np.float32)).any(axis=1).tolist() == [False, True, False]
    assert jnp.isnan(total[1]).all()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("width", "kind"), [(896, "parts"), (2560, "bias"), (2880, "experts")])
def test_it_is_one_kernel_also_inside_of_shard_map(width: int, kind: str, placement: str) -> None:
    call = jax.eval_shape(lambda: random_call(16, width, 4, placement, kind=kind))
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:1])
    run = partial(add_and_norm, norm=PLAIN)
    spec = PartitionSpec()
    for traced in (run, jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)):
        text = jax.jit(traced).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_what_it_does_not_take_is_said() -> None:
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    assert why_not(2560, jnp.bfloat16, device) is None
    assert why_not(2880, jnp.bfloat16, device) is None
    for width in (16_384, 2882, 124):
        assert str(width) in (why_not(width, jnp.bfloat16, device) or "")
    assert "float32" in (why_not(2560, jnp.float32, device) or "")
    assert "Hopper" in (why_not(2560, jnp.bfloat16, jax.devices("cpu")[0]) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("norm", [PLAIN, PLUS_ONE], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("rows", "width", "kind"),
    [
        (1, 128, "parts"), (16, 2560, "parts"), (64, 5120, "parts"), (17, 896, "bias"), (5, 8192, "parts"),
        (16, 2880, "bias"), (16, 2880, "experts"), (64, 2048, "experts"), (3, 132, "experts"),
    ],
)  # fmt: skip
def test_sums_and_norms_equal_float64(
    rows: int, width: int, kind: str, placement: str, parts: int, norm: Norm, dtype: Any
) -> None:
    call = random_call(rows, width, parts, placement, dtype, kind)
    check_call(*call, norm)
