"""The kernel between the product for queries, keys and values and attention: interpreted, lowered, and on a GPU."""

import re
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from head_calls import check_heads, random_call, sizes_of
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.addends import Parts
from pallas_kernels.hopper.head_rows import HeadSizes, Norm, Places, split_heads

PLAIN, PLUS_ONE = Norm(1e-6, plus_one=False), Norm(1e-3, plus_one=True)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of JAX 0.10 knows no layouts")
@pytest.mark.parametrize(
    ("rows", "sizes", "parts", "bias"),
    [
        (6, sizes_of(2, 1, PLUS_ONE), 1, False),
        (4, sizes_of(1, 1, None), 2, True),
        (4, sizes_of(1, 1, None, 64), 1, False),
        (5, sizes_of(1, 1, PLAIN, 256), 4, True),
    ],
    ids=str,
)
def test_interpreted_heads_equal_float64_without_races(
    rows: int,
    sizes: HeadSizes,
    parts: int,
    bias: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rows that two thread blocks write are the same twice, which the interpreter takes for a race.
    params = plgpu.InterpretGPUParams(detect_races=rows % 4 == 0)
    monkeypatch.setattr(pl, "kernel", partial(pl.kernel, interpret=params))
    split_heads.clear_cache()
    call = random_call(rows, sizes, parts=parts, bias=bias)
    check_heads(split_heads(*call, sizes), *call, sizes)
    split_heads.clear_cache()
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("norm", [PLAIN, None], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_are_one_kernel_that_keeps_pages_where_they_are(head_dim: int, norm: Norm | None) -> None:
    sizes = sizes_of(32, 8, norm, head_dim)
    call = jax.eval_shape(lambda: random_call(64, sizes))
    text = split_heads.trace(*call, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert len(re.findall(r"output_operand_alias<", text)) == 2  # keys and values


def test_on_a_mesh_each_device_keeps_its_pages_where_they_are() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    whole, each = sizes_of(32, 8, PLAIN), sizes_of(16, 4, PLAIN)
    columns, heads = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor")
    in_specs = Parts(PartitionSpec(None, *columns)), PartitionSpec(), Places(*(PartitionSpec(),) * 3, heads, heads)
    split = jax.shard_map(
        partial(split_heads, sizes=each), mesh=mesh, in_specs=in_specs, out_specs=(columns, heads, heads)
    )
    call = jax.eval_shape(lambda: random_call(64, whole))
    text = jax.jit(split).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert len(re.findall(r"output_operand_alias<", text)) == 2  # keys and values


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", [
    sizes_of(32, 8, PLAIN), sizes_of(12, 4, PLUS_ONE), sizes_of(8, 8, None), sizes_of(64, 8, None, 64),
    sizes_of(16, 8, PLUS_ONE, 256),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    ("rows", "parts", "bias"),
    [(4, 1, False), (16, 4, True), (17, 1, True), (64, 2, False), (511, 1, False), (512, 1, False), (2055, 1, False)],
)
def test_heads_equal_float64(rows: int, parts: int, bias: bool, sizes: HeadSizes, dtype: jnp.dtype) -> None:
    call = random_call(rows, sizes, dtype, parts, bias)
    check_heads(split_heads(*call, sizes), *call, sizes)


@pytest.mark.gpu
def test_pages_may_be_some_of_an_array_which_stays_as_it_is() -> None:
    sizes = sizes_of(8, 4, PLAIN)
    columns, scales, places = random_call(16, sizes)
    stacks = [jnp.stack([pages + 1, pages, pages - 1]) for pages in (places.key_pages, places.value_pages)]

    def run(stacks: list[jax.Array], i: jax.Array) -> tuple[jax.Array, ...]:
        return split_heads(columns, scales, Places(*places[:3], *(pages[i] for pages in stacks)), sizes)

    def run_all(stacks: list[jax.Array]) -> tuple[jax.Array, ...]:
        return lax.scan(
            lambda _, pages: (None, split_heads(columns, scales, Places(*places[:3], *pages), sizes)), None, stacks
        )[1]

    before = [np.asarray(pages) for pages in stacks]
    for i in (1, jnp.int32(1)):  # known when it is compiled, and not
        made = jax.jit(run, static_argnums=() if isinstance(i, jax.Array) else 1)(stacks, i)
        check_heads(made, columns, scales, places, sizes)
        for pages, old in zip(stacks, before, strict=True):
            np.testing.assert_array_equal(np.asarray(pages), old)
    made = jax.jit(run_all)(stacks)
    for i in range(3):
        of_one = Places(*places[:3], *(jnp.asarray(pages[i]) for pages in before))
        check_heads([x[i] for x in made], columns, scales, of_one, sizes)
