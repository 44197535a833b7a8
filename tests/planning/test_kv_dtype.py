"""Plans by the dtype of pages: cut for whoever serves the call, and for one byte a number as an H200 is fastest."""

from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import H200
from plan_cases import HEADS, num_wide

from codec_jax import Forest, make_plan, replan
from codec_jax.attention import backends
from pallas_kernels import FAMILIES, HOPPER, HOPPER_LATENT, Scores
from pallas_kernels import Heads as AllHeads
from pallas_kernels.compat import MIXES_EIGHT_BITS

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
A100 = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100", core_count=108)
SIZES = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def on(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [device])


def shared_root(root: int, requests: int, own: int) -> Forest:
    return Forest.from_nodes([-1] + [0] * requests, [root] + [own] * requests, range(1, requests + 1))


@pytest.mark.parametrize(
    ("forest", "of_16_bits", "of_8_bits"),
    [
        # Whether two tiles share segments, and the thread blocks. What an H200 was faster with, or as fast.
        (shared_root(8192, 64, 256), (True, 128), (False, 128)),
        (shared_root(12_288, 64, 256), (True, 128), (False, 128)),
        (shared_root(16_384, 32, 512), (True, 128), (False, 128)),
        (shared_root(4096, 256, 64), (True, 132), (False, 132)),  # arithmetic decides
        (shared_root(32_768, 64, 1024), (True, 128), (True, 132)),
        (shared_root(120_000, 32, 2048), (True, 128), (True, 132)),
        (shared_root(8192, 128, 256), (True, 128), (False, 132)),  # of narrow segments arithmetic decides
        (shared_root(120_000, 8, 2048), (False, 128), (False, 132)),  # one tile
        (shared_root(4096, 8, 256), (False, 128), (False, 132)),
    ],
)
def test_for_one_byte_a_number_tiles_share_segments_and_all_thread_blocks_work_where_there_is_more_to_read(
    forest: Forest, of_16_bits: tuple[bool, int], of_8_bits: tuple[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, H200)
    for kv_dtype, expected in (
        (None, of_16_bits), (jnp.float16, of_16_bits), (FLOAT8, of_8_bits), ("float8_e4m3fn", of_8_bits)
    ):  # fmt: skip
        plan = make_plan(forest, **SIZES, kv_dtype=kv_dtype)
        assert (num_wide(plan) > 0, plan.num_ctas) == expected
    asked = make_plan(forest, **SIZES, kv_dtype=FLOAT8, num_ctas=128, min_wide_tokens=1 << 20)
    assert (num_wide(asked), asked.num_ctas) == (0, 128)


@pytest.mark.parametrize(
    ("forest", "blocks", "masks"),
    [
        # With 16 bits and with 8: blocks, and the masks that count. By token those do; seven for each node with 8 bits.
        (shared_root(65_536, 8, 1024), (128, 128), (0, 7 / 8)),
        (shared_root(65_536, 8, 896), (128, 128), (0, 1)),
        (shared_root(65_536, 8, 4096), (128, 128), (0, 7 / 32)),
        (shared_root(65_536, 8, 4090), (128, 128), (1 / 32, 7 / 32)),  # the last page of each is not full
        (Forest.from_nodes([-1] * 8, [16_384] * 8, range(8)), (128, 128), (0, 7 / 128)),
        (Forest.from_nodes([-1] * 8, [16_383] * 8, range(8)), (128, 128), (1 / 128, 7 / 128)),
        (shared_root(32_768, 64, 1024), (128, 128), (0, 0)),  # two tiles share segments
        (shared_root(32_768, 16, 1024), (64, 128), (0, 7 / 8)),
        (shared_root(4096, 16, 256), (64, 64), (0, 1)),
    ],
)
def test_for_one_byte_a_number_blocks_are_longer_and_nodes_take_a_while_to_begin(
    forest: Forest, blocks: tuple[int, int], masks: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, H200)
    for kv_dtype, block_tokens, expected in zip((None, FLOAT8), blocks, masks, strict=True):
        plan = make_plan(forest, **SIZES, kv_dtype=kv_dtype)
        assert plan.arrays.block_tokens == block_tokens
        assert plan.host.estimates[0].token_masked == pytest.approx(expected)


@pytest.mark.parametrize("device", [H200, A100, None], ids=["H200", "A100", "CPU"])
def test_the_default_is_a_dtype_of_16_bits_whichever_it_is(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if device is not None:
        on(monkeypatch, device)
    forest = shared_root(4096, 32, 100)
    default, *given = (make_plan(forest, **SIZES, kv_dtype=each) for each in (None, jnp.bfloat16, jnp.float16))
    chex.assert_trees_all_equal(default, given[0])
    for plan in given:
        for leaf, expected in zip(jax.tree.leaves(plan), jax.tree.leaves(default), strict=True):
            np.testing.assert_array_equal(leaf, expected)
        assert plan.arrays.tile_rows == default.arrays.tile_rows


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.device_kind)
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float16, jnp.float32, FLOAT8, jnp.float8_e5m2])
@pytest.mark.parametrize("sizes", [(8, 2, 128, 128), (8, 4, 96, 96), (8, 8, 192, 128), (8, 1, 512, 512)])
def test_a_plan_suits_the_best_kernels_that_take_such_pages(
    sizes: tuple[int, ...], kv_dtype: Any, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are best for the heads of a call, before there is a plan, serve it with the plan, too."""
    on(monkeypatch, device)
    kv_dtype = jnp.dtype(kv_dtype)
    query_dtype = jnp.dtype(jnp.bfloat16) if kv_dtype.itemsize == 1 else kv_dtype
    heads = AllHeads(*sizes, query_dtype=query_dtype, kv_dtype=kv_dtype)
    names = ("num_q_heads", "num_kv_heads", "head_dim", "value_head_dim")
    plan = make_plan(shared_root(300, 4, 20), **dict(zip(names, sizes, strict=True)), kv_dtype=kv_dtype)
    best = next((family for family in FAMILIES if not family.why_not(heads, device)), backends.XLA)
    assert backends.choose(None, heads, Scores(0.1), plan.arrays) is best
    if best is backends.XLA:
        assert (plan.arrays.tile_rows, plan.arrays.lanes, plan.arrays.block_tokens) == (64, 2, 128)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_kernels_serve_pages_of_one_byte_by_plans_for_them(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, H200)
    for kv_dtype in (FLOAT8, jnp.dtype(jnp.float8_e5m2)) if MIXES_EIGHT_BITS else (FLOAT8,):
        plan = make_plan(shared_root(300, 4, 20), num_q_heads=8, num_kv_heads=2, head_dim=head_dim, kv_dtype=kv_dtype)
        heads = AllHeads(8, 2, head_dim, head_dim, kv_dtype=kv_dtype)
        assert backends.choose(None, heads, Scores(0.1), plan.arrays) is HOPPER


@pytest.mark.parametrize("kv_dtype", [None, FLOAT8])
def test_latents_of_one_byte_have_plans_of_the_kernels_for_them(kv_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200)
    sizes = {"num_q_heads": 64, "num_kv_heads": 1, "head_dim": 576, "value_head_dim": 512}
    plan = make_plan(shared_root(4096, 16, 100), **sizes, kv_dtype=kv_dtype)
    beside = {"kv_dtype": FLOAT8, "query_dtype": jnp.dtype(jnp.float32), "rotated_beside": 64}
    heads = AllHeads(*sizes.values(), values_in_keys=True, **(beside if kv_dtype else {}))
    assert backends.choose(None, heads, Scores(0.1), plan.arrays) is HOPPER_LATENT


def test_a_plan_that_is_made_again_is_for_the_same_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200)
    forest = shared_root(8192, 64, 256)
    for kv_dtype in (FLOAT8, jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        plan = make_plan(forest, **SIZES, kv_dtype=kv_dtype)
        again = replan(plan, forest)
        assert again.heads.kv_dtype == plan.heads.kv_dtype == kv_dtype
        assert num_wide(again) == num_wide(plan)
        chex.assert_trees_all_equal(again, plan)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float64, jnp.float8_e4m3b11fnuz], ids=str)
def test_a_dtype_that_pages_cannot_have_is_refused(dtype: Any) -> None:
    expected = r"^kv_dtype: expected float32, bfloat16, float8_e4m3fn, float8_e5m2 or float16, got "
    with pytest.raises(ValueError, match=expected):
        make_plan(Forest.from_nodes([-1], [40], [0]), **HEADS, kv_dtype=dtype)
