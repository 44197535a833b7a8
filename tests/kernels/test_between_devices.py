"""Kernels of several GPUs that write to each other's memory: lowered here, and held to float64 on GPUs."""

import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import (
    AXES,
    FIRST,
    each,
    every_mesh_here,
    gathers_on,
    heads_on,
    members,
    merges_on,
    mesh_of,
    norms_on,
    share_of,
    sums_on,
)
from head_calls import check_heads, random_call, sizes_of
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from merge_calls import Rows, partials_of
from norm_calls import PLACEMENTS, check, factors_of, listed

from codec_jax.nnx import mailboxes
from codec_jax.nnx.mailboxes import Mailbox
from pallas_kernels.addends import Parts, Shares
from pallas_kernels.between_devices.sizes import of_arrays, of_columns, of_heads, of_merges, of_rows
from pallas_kernels.compat import REACHES_OTHER_DEVICES
from pallas_kernels.hopper.head_rows import Norm, Places

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
CALLS = 11
MOST = 0  # rows, see `with_rows`
needs_jax_0_11 = pytest.mark.skipif(not REACHES_OTHER_DEVICES, reason="a kernel of JAX 0.10 waits for others first")


#: A program in which only the first device sends.
LOST = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir.dialects import arith
from pallas_kernels.between_devices import mailbox, numbers

sys.path += sys.argv[1:]
from exchanges import mesh_of, sums_on

send = mailbox.Box._send
def send_from_the_first(box, own, *arguments):
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, own, numbers.word(0))):
        send(box, own, *arguments)

mailbox.Box._send, mailbox._MOST_LOOKS = send_from_the_first, 1 << 16
devices = len(jax.devices())
try:
    print("sums:", np.asarray(sums_on(mesh_of(1, devices))(np.ones((devices, 3, 16, 1, 2560), jnp.bfloat16))))
except jax.errors.JaxRuntimeError as error:
    print("error:", error)
sys.stdout.flush()
os._exit(0)  # nothing can be freed on such a GPU
"""


@needs_jax_0_11
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exchange_is_one_kernel_that_keeps_its_memory_where_it_is(dtype: Any) -> None:
    mesh = mesh_of(2, 4, devices=jax.devices("cpu"))
    out, rows = jax.ShapeDtypeStruct((8, 3, 5, 1, 8, 64), dtype), jax.ShapeDtypeStruct((8, 3, 5, 1, 8), jnp.float32)
    traced = [
        sums_on(mesh).trace(out),
        gathers_on(mesh, (48, 16)).trace(out),
        merges_on(mesh, 4).trace(Rows(out, rows, rows)),
    ]
    if dtype != jnp.float32:
        states, share = ((8, 3, *shape) for shape in ((16, 1, 2560), (4, 16, 1, 2560)))
        given = jax.ShapeDtypeStruct(states, dtype), Parts(jax.ShapeDtypeStruct(share, jnp.float32))
        factors = jax.ShapeDtypeStruct((8, 3, 2560), dtype)
        traced += [
            norms_on(mesh, Norm(1e-6, False)).trace((*given, factors_of(placement, factors, factors)))
            for placement in PLACEMENTS
        ]
    for exchange in traced:
        text = exchange.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # one makes the mailbox
        assert len(re.findall(r"output_operand_alias<", text)) == 2  # slots and counts


@needs_jax_0_11
@pytest.mark.parametrize("norm", [Norm(1e-6, False), None], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("axes", [AXES, AXES[::-1]], ids=str)
def test_heads_are_split_and_collected_by_one_kernel(axes: tuple[str, str], head_dim: int, norm: Norm | None) -> None:
    mesh, heads = mesh_of(2, 4, axes, jax.devices("cpu")), sizes_of(16, 4, norm, head_dim)
    columns, *rest = jax.eval_shape(lambda: random_call(18, heads, parts=4))
    columns = Parts(jax.ShapeDtypeStruct((4, 18, columns.parts.shape[2] // 2), jnp.float32))
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, 3, *x.shape), x.dtype), (columns, *rest))
    text = heads_on(mesh, heads).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # one makes the mailbox
    assert len(re.findall(r"output_operand_alias<", text)) == 4  # keys and values, slots and counts


@pytest.mark.parametrize(
    ("rows", "num_own_heads", "head_dim", "dtype", "devices"),
    [
        (3, 12, 128, jnp.bfloat16, 2),
        (16, 12, 192, jnp.bfloat16, 2),
        (16, 12, 128, jnp.float32, 2),
        (512, 9, 64, jnp.bfloat16, 2),  # 1,152 thread blocks
        (256, 8, 256, jnp.bfloat16, 2),  # 512 thread blocks, whose threads have many registers
        (256, 13, 128, jnp.bfloat16, 8),  # 5.7 MiB to others
    ],
    ids=str,
)
def test_heads_that_are_not_for_the_kernel_have_no_mailbox(
    rows: int, num_own_heads: int, head_dim: int, dtype: Any, devices: int
) -> None:
    assert of_heads(rows, num_own_heads, head_dim, dtype, devices) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "devices"),
    [
        ((5, 1, 100), jnp.bfloat16, 2),  # 250 words
        ((256, 1, 33), jnp.bfloat16, 2),  # half a word a row
        ((16, 1, 256), jnp.int32, 2),
        ((1027, 1, 256), jnp.bfloat16, 2),  # 1,027 thread blocks, of which two do not make one
        ((64, 1, 8192), jnp.bfloat16, 16),  # 15 MB to others
    ],
    ids=str,
)
def test_sums_that_are_not_for_the_kernel_have_no_mailbox(shape: tuple[int, ...], dtype: Any, devices: int) -> None:
    assert of_arrays(jax.ShapeDtypeStruct(shape, dtype), devices) is None


@given(st.integers(1, 1024), st.integers(1, 80), st.sampled_from(DTYPES), st.integers(2, 8))
def test_a_mailbox_has_all_words_in_so_many_thread_blocks(rows: int, of_128: int, dtype: Any, devices: int) -> None:
    x = jax.ShapeDtypeStruct((rows, 1, 128 * of_128), dtype)
    nbytes = math.prod(x.shape) * x.dtype.itemsize
    for sizes in filter(None, (of_arrays(x, devices), of_rows(x, devices), of_columns(x, [x.shape[2]], devices))):
        assert 4 * 128 * sizes.width * sizes.chunks * sizes.blocks == nbytes
        assert 1 <= sizes.blocks <= 1024
        assert nbytes * (devices - 1) <= 4 << 20


def test_thread_blocks_with_rows_all_run_at_once() -> None:
    """Two on each of 132 multiprocessors; more rows are summed by blocks with fewer registers."""
    shapes = [jax.ShapeDtypeStruct((rows, 1, 2560), jnp.bfloat16) for rows in (264, 268)]
    assert [of_rows(x, devices=2) is not None for x in shapes] == [True, False]
    assert of_arrays(shapes[1], devices=2) is not None


@pytest.mark.parametrize("of", [of_arrays, of_rows, partial(of_columns, parts=(4096, 512, 512))])
def test_two_devices_exchange_256_rows_by_kernels(of: Any) -> None:
    assert of(jax.ShapeDtypeStruct((256, 1, 5120), jnp.bfloat16), devices=2) is not None


@pytest.mark.parametrize(
    ("shape", "dtype", "devices"),
    [
        ((4, 1, 15, 128), jnp.bfloat16, 2),  # heads that two devices do not divide
        ((4, 1, 16, 48), jnp.bfloat16, 2),  # not heads of whole warps
        ((512, 1, 64, 128), jnp.bfloat16, 2),  # 2,048 thread blocks
        ((256, 1, 64, 256), jnp.bfloat16, 2),  # 4.3 MB to the other one
        ((16, 1, 32, 128), jnp.float64, 2),
    ],
    ids=str,
)
def test_merges_that_are_not_for_the_kernel_have_no_mailbox(shape: tuple[int, ...], dtype: Any, devices: int) -> None:
    assert of_merges(jax.ShapeDtypeStruct(shape, dtype), 5 if shape[2] == 15 else 8, shape[3], devices) is None


def test_why_devices_cannot_write_to_each_other_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a Hopper GPU" in (mailboxes.why_not(mesh_of(1, 2, devices=jax.devices("cpu"))) or "")
    monkeypatch.setattr(mailboxes, "why_not_on", lambda _: None)
    monkeypatch.setattr(mailboxes, "REACHES_OTHER_DEVICES", True)
    assert mailboxes.why_not(mesh_of(1, 2, devices=jax.devices("cpu"))) is None
    assert "in their order" in (mailboxes.why_not(mesh_of(1, 2, devices=jax.devices("cpu")[2:])) or "")
    monkeypatch.setattr(mailboxes.jax, "process_count", lambda: 2)
    assert "one process" in (mailboxes.why_not(mesh_of(1, 2, devices=jax.devices("cpu"))) or "")
    monkeypatch.setattr(mailboxes, "REACHES_OTHER_DEVICES", False)
    assert "JAX 0.11" in (mailboxes.why_not(mesh_of(1, 2, devices=jax.devices("cpu"))) or "")


def with_rows(shape: tuple[int, ...], dtype: Any, devices: int, most: int = 384) -> tuple[int, ...]:
    """In place of MOST, as many rows of 5,120 numbers as mailboxes take; two devices have several chunks a thread."""
    rows, *rest = shape
    return (min(768 // jnp.dtype(dtype).itemsize // (devices - 1), most) if rows == MOST else rows, *rest)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.skipif(len(jax.devices()) < 2, reason="several GPUs write to each other's memory; here is one")
class TestOnSeveralGPUs:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "shape", [(16, 1, 2560), (4, 1, 2880), (3, 1, 256), (64, 1, 5120), (5, 4, 128), (MOST, 1, 5120)], ids=str
    )
    def test_sums_equal_float64(self, shape: tuple[int, ...], dtype: Any) -> None:
        devices, rng = len(jax.devices()), np.random.default_rng(0)
        shape = with_rows(shape, dtype, devices)
        parts = rng.normal(size=(devices, CALLS, *shape)) * np.exp2(rng.integers(-8, 8, (devices, CALLS, *shape)))
        parts = np.array(jnp.asarray(parts, dtype))
        parts[rng.random(parts.shape) < 0.1] = -0.0
        parts[:, 3] = -0.0  # whole words
        totals = np.asarray(sums_on(mesh_of(1, devices))(parts), np.float64)
        exact = np.asarray(parts, np.float64)
        error = np.abs(totals - exact.sum(0)) / (np.abs(exact).sum(0) + 1e-30)
        assert error.max() <= 2.0 * float(jnp.finfo(dtype).eps)
        assert all((of_device == totals[0]).all() for of_device in totals)  # to the last bit

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize("norm", [Norm(1e-6, False), Norm(1e-3, True)], ids=str)
    @pytest.mark.parametrize("placement", PLACEMENTS)
    @pytest.mark.parametrize(
        ("shape", "parts"),
        [((16, 1, 2560), 8), ((3, 1, 256), 1), ((64, 1, 5120), 4), ((5, 4, 1024), 2), ((MOST, 1, 5120), 1)],
        ids=str,
    )
    def test_norms_of_sums_equal_float64(
        self, shape: tuple[int, ...], parts: int, placement: str, norm: Norm, dtype: Any
    ) -> None:
        devices, rng = len(jax.devices()), np.random.default_rng(0)
        shape = with_rows(shape, dtype, devices, most=256)
        x = np.broadcast_to(rng.normal(size=(CALLS, *shape)), (devices, CALLS, *shape))
        share = rng.normal(size=(devices, CALLS, parts, *shape)).astype(np.float32)
        share[:, 2] = -0.0  # whole words
        share[:, 3:5] = 0.0
        share[:, 3, 0, ..., 1::2] = -1e-8 if dtype == jnp.float16 else -1e-42  # which is rounded to -0.0
        of_norms = (
            np.broadcast_to(each, (devices, *each.shape)) for each in rng.uniform(0.5, 1.5, (2, CALLS, shape[-1]))
        )
        factors = factors_of(placement, *of_norms)
        x, factors = jax.tree.map(lambda each: np.asarray(jnp.asarray(each, dtype)), (x, factors))
        made = norms_on(mesh_of(1, devices), norm)((x, Parts(share), factors))
        by_part = np.moveaxis(share, 2, 0)
        each_row = jax.tree.map(lambda each: each[0].reshape(CALLS, *(1,) * (len(shape) - 1), -1), factors)
        check([of_devices[0] for of_devices in made], x[0], by_part, each_row, norm, sent=True)
        for of_devices in made:
            assert all((of_device == of_devices[0]).all() for of_device in of_devices)  # to the last bit

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_devices_add_up_what_their_experts_made(self, dtype: Any) -> None:
        """Each has some of the experts of a token; rows that nobody has are not numbers."""
        devices, rng, rows, chosen, width = len(jax.devices()), np.random.default_rng(0), 16, 4, 2560
        made = rng.normal(size=(devices, CALLS, rows * chosen + 1, width))
        made[:, :, -1] = np.nan
        place = np.broadcast_to(
            np.arange(rows * chosen, dtype=np.int32).reshape(rows, chosen), (devices, CALLS, rows, chosen)
        )
        elsewhere = rng.integers(0, devices, (CALLS, rows, chosen)) != np.arange(devices)[:, None, None, None]
        place = np.where(elsewhere, rows * chosen + 1, place)
        shares = Shares(np.asarray(jnp.asarray(made, dtype)), place, rng.random(place.shape).astype(np.float32))
        x, factor = (
            np.asarray(jnp.asarray(each, dtype)) for each in (rng.normal(size=(rows, 1, width)), rng.random(width))
        )
        factors, norm = factors_of("before", factor, factor), Norm(1e-6, False)
        given = jax.tree.map(lambda each: np.broadcast_to(each, (devices, CALLS, *each.shape)), (x, factors))
        results = norms_on(mesh_of(1, devices), norm)((given[0], shares, given[1]))
        for turn in range(CALLS):
            of_devices = [listed(jax.tree.map(lambda each: each[i, turn], shares)) for i in range(devices)]  # noqa: B023
            parts = np.stack(of_devices, axis=1)[:, :, :, None]  # [chosen, devices, rows, 1, D]
            check([of_devices[0, turn] for of_devices in results], x, parts, factors, norm, sent=True)

    def test_what_is_not_finite_stays_so(self) -> None:
        devices = len(jax.devices())
        parts = np.ones((devices, 4, 16, 1, 2560), jnp.bfloat16)
        parts[1, 1, 0, 0, :4] = [np.nan, -np.inf, np.inf, -np.nan]
        totals = np.asarray(sums_on(mesh_of(1, devices))(parts), np.float64)
        assert np.isnan(totals[:, 1, 0, 0, [0, 3]]).all()
        assert (totals[:, 1, 0, 0, [1, 2]] == [-np.inf, np.inf]).all()
        assert ((totals == devices).sum(axis=(1, 2, 3, 4)) == parts[0].size - 4).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("shape", "parts"),
        [
            ((16, 1, 2560), (2048, 256, 256)),
            ((3, 1, 256), (256,)),
            ((2, 3, 384), (64, 320)),
            ((MOST, 1, 5120), (4096, 512, 512)),
        ],
        ids=str,
    )
    def test_gathers_bring_what_the_group_has(self, shape: tuple[int, ...], parts: tuple[int, ...], dtype: Any) -> None:
        for mesh in every_mesh_here():
            shape = with_rows(shape, dtype, mesh.shape["context"])
            columns = np.array(jnp.asarray(np.random.default_rng(0).normal(size=(mesh.size, CALLS, *shape)), dtype))
            columns[:, 2] = -0.0
            gathered = np.asarray(gathers_on(mesh, parts)(columns))
            for group in members(mesh):
                of_parts = np.split(columns[group], np.cumsum(parts)[:-1], axis=-1)
                expected = np.concatenate([each for part in of_parts for each in part], axis=-1)
                for device in group:
                    np.testing.assert_array_equal(gathered[device], expected)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize(
        ("rows", "head_dim", "norm", "parts", "bias"),
        [
            (16, 128, Norm(1e-6, False), 1, False),
            (17, 128, Norm(1e-3, True), 4, True),
            (4, 64, None, 2, True),
            (23, 64, Norm(1e-6, False), 1, False),
            (18, 256, None, 1, False),
            (64, 256, Norm(1e-6, False), 2, False),
        ],
        ids=str,
    )
    def test_heads_of_a_group_equal_float64(
        self, rows: int, head_dim: int, norm: Norm | None, parts: int, bias: bool, dtype: Any
    ) -> None:
        """In every call rows have other columns, groups too; each device has slots and pages of its own."""
        for mesh in every_mesh_here():
            context, groups = mesh.shape["context"], members(mesh)
            heads = sizes_of(4 * context, 2 * context, norm, head_dim)
            columns, scales, places = jax.tree.map(np.asarray, random_call(rows, heads, dtype, parts, bias))
            calls = {}

            def call_of(device: int, turn: int, group: int, columns: Any = columns, places: Places = places) -> Any:
                own = [np.roll(x, device, axis=0) for x in (places.slots, places.key_pages, places.value_pages)]
                moved = columns._replace(parts=np.roll(columns.parts, 3 * turn + group, axis=1))
                return moved, Places(places.cos, places.sin, *own)

            for number, group in enumerate(groups):
                for i, device in enumerate(group):
                    of_turns = [call_of(device, turn, number) for turn in range(CALLS)]
                    calls[device] = [(share_of(x, heads, context, i), scales, where) for x, where in of_turns]
            given = [calls[device][turn] for device in range(mesh.size) for turn in range(CALLS)]
            given = jax.tree.map(lambda *each: np.stack(each).reshape(mesh.size, CALLS, *each[0].shape), *given)  # noqa: B023
            made = jax.tree.map(np.asarray, heads_on(mesh, heads)(given))
            for number, group in enumerate(groups):
                for device in group:
                    np.testing.assert_array_equal(made[0][device], made[0][group[0]])  # to the last bit
                    for turn in range(CALLS):
                        whole, where = call_of(device, turn, number)
                        check_heads([x[device, turn] for x in made], whole, scales, where, heads)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("shape", "kv_heads"),
        [
            ((16, 1, 32, 128), 8),
            ((4, 3, 8, 64), 4),
            ((2, 1, 16, 256), 4),
            ((64, 1, 64, 128), 8),
            ((100, 1, 32, 128), 8),
            ((1, 1, 4, 512), 4),
            ((5, 1, 16, 128), 1),  # a kv head whose q heads are of several devices
            ((3, 1, 12, 128), 2),  # six rows of a request, which warps have by two
            ((2, 1, 128, 64), 1),  # more q heads of a kv head than rows of a tile
        ],
        ids=str,
    )
    def test_merges_equal_float64(self, shape: tuple[int, ...], kv_heads: int, dtype: Any) -> None:
        for mesh in every_mesh_here():
            if shape[2] % mesh.shape["context"]:
                continue
            rng = np.random.default_rng(0)
            devices, heads = mesh.size, shape[2] // mesh.shape["context"]
            out = np.array(jnp.asarray(rng.normal(size=(devices, CALLS, *shape)), dtype))
            row_max = rng.normal(size=(devices, CALLS, *shape[:3])).astype(np.float32) * 10
            row_sum = rng.uniform(1, 100, row_max.shape).astype(np.float32)
            sees_none = rng.random(row_max.shape) < 0.2
            sees_none[:, :, 0, 0, :2] = True  # by no device
            row_max[sees_none], row_sum[sees_none], out[sees_none] = -np.inf, 0.0, 0.0
            merged = merges_on(mesh, kv_heads)(Rows(out, row_max, row_sum))
            for group in members(mesh):
                weights = np.exp(row_max[group].astype(np.float64)) * row_sum[group]
                total = weights.sum(0)
                exact = (weights[..., None] * out[group]).sum(0) / np.where(total == 0, 1, total)[..., None]
                for part, device in enumerate(group):
                    own = np.s_[..., part * heads : (part + 1) * heads]
                    got_out, got_max, got_sum = (np.asarray(x, np.float64)[device] for x in merged)
                    tolerance = max(2.0 * float(jnp.finfo(dtype).eps), 1e-5)
                    np.testing.assert_allclose(got_out, exact[..., own[1], :], atol=5 * tolerance, rtol=tolerance)
                    np.testing.assert_allclose(got_max, row_max[group].max(0)[own], rtol=1e-6)
                    shift = np.where(np.isfinite(got_max), got_max, 0)
                    np.testing.assert_allclose(got_sum * np.exp(shift), total[own], rtol=1e-4)

    def test_rows_that_one_device_sees_keep_every_bit(self) -> None:
        mesh = every_mesh_here()[-1]
        rng, shape = np.random.default_rng(1), (mesh.size, 3, 16, 1, 32)
        out = np.array(jnp.asarray(rng.normal(size=(*shape, 128)), jnp.bfloat16))
        row_max = rng.normal(size=shape).astype(np.float32)
        row_sum = rng.uniform(1, 100, shape).astype(np.float32)
        row_max[1:], row_sum[1:], out[1:] = -np.inf, 0.0, 0.0
        got = [np.asarray(x)[0] for x in merges_on(mesh, 8)(Rows(out, row_max, row_sum))]
        own = 32 // mesh.size
        for call, rows in enumerate(zip(out[0], row_max[0], row_sum[0], strict=True)):
            from pallas_kernels.hopper.por import por

            alone, _, _ = jax.jit(lambda rows: por(*(packed := partials_of(rows, 8))[0], packed[1]))(Rows(*rows))
            np.testing.assert_array_equal(got[0][call], np.asarray(alone)[..., :own, :])

    def test_free_requests_have_zeros(self) -> None:
        mesh = every_mesh_here()[-1]
        shape = (mesh.size, 3, 16, 1, 32)
        rows = Rows(np.ones((*shape, 128), jnp.bfloat16), np.ones(shape, np.float32), np.ones(shape, np.float32))
        out, row_max, row_sum = (np.asarray(x, np.float64) for x in merges_on(mesh, 8, used=14)(rows))
        free, taken = np.s_[:, :, :2], np.s_[:, :, 2:]  # the last rows are those of the first requests
        assert (out[free] == 0).all()
        assert (row_max[free] == -np.inf).all()
        assert (row_sum[free] == 0).all()
        assert (out[taken] == 1).all()
        np.testing.assert_allclose(row_sum[taken], mesh.size, rtol=1e-6)

    def test_what_one_device_could_not_compute_all_could_not(self) -> None:
        mesh = every_mesh_here()[-1]
        shape = (mesh.size, 3, 16, 1, 32)
        out, rows = np.ones((*shape, 128), jnp.bfloat16), np.ones(shape, np.float32)
        row_sum = rows.copy()
        row_sum[-1, 1] = np.nan
        out[-1, 1] = np.nan
        merged, *_ = (np.asarray(x, np.float64) for x in merges_on(mesh, 8)(Rows(out, rows, row_sum)))
        assert np.isfinite(merged[:, [0, 2]]).all()
        assert np.isnan(merged[:, 1]).all()

    def test_one_device_may_be_far_ahead_of_the_others(self) -> None:
        """Devices compute for different times between sums, so that each waits for the others in turn."""
        devices, calls = len(jax.devices()), 40

        def slowly(mailbox: Mailbox, part: Any) -> Any:
            turns, numbers = part
            waited = lax.fori_loop(0, turns, lambda _, x: x * 1.0 + 0.0, numbers)
            return mailbox.add_up(waited)

        run = each(mesh_of(1, devices), lambda part: Mailbox.for_arrays(FIRST, part[1], devices), slowly)
        turns = np.random.default_rng(0).choice([0, 1, 300], (devices, calls))
        numbers = np.broadcast_to(np.arange(1, calls + 1).reshape(-1, 1, 1, 1), (devices, calls, 16, 1, 2560))
        totals = np.asarray(run((turns, numbers.astype(jnp.bfloat16))), np.float64)
        assert (totals == devices * numbers).all()

    def test_who_waits_for_a_device_that_sends_nothing_ends_with_an_error(self) -> None:
        """It ends all that its process has on the GPU, so a process of its own does it."""
        command = [sys.executable, "-c", LOST, str(Path(__file__).parents[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.startswith("error:")
        assert "sums:" not in done.stdout
