"""Exchanges between the devices of a mesh by kernels, as functions of what each device has in each of several calls."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from merge_calls import Rows, partials_of

from codec_jax.nnx.mailboxes import Mailbox
from pallas_kernels.addends import Parts
from pallas_kernels.hopper.head_rows import HeadSizes, Norm

AXES = ("context", "tensor")
FIRST = np.int32(0)  # what a mailbox is made of


def mesh_of(context: int, tensor: int, axes: tuple[str, str] = AXES, devices: Any = None) -> Mesh:
    shape = (context, tensor) if axes == AXES else (tensor, context)
    devices = (jax.devices() if devices is None else devices)[: context * tensor]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2, devices=devices)


def every_mesh_here() -> list[Mesh]:
    """Of all GPUs, those with a context axis, in both orders; the last has no other."""
    count = len(jax.devices())
    shapes = [(context, count // context) for context in range(2, count + 1) if count % context == 0]
    return [mesh_of(*shape, axes) for shape in shapes for axes in (AXES, AXES[::-1])]


def each(mesh: Mesh, mailbox_of: Callable[[Any], Any], exchange: Callable[[Mailbox, Any], Any]) -> Any:
    """A jitted function of arrays [S, calls, ...], each device's: what each call gave, one call after another."""

    def local(parts: Any) -> Any:
        parts = jax.tree.map(lambda x: x[0], parts)
        mailbox = mailbox_of(jax.tree.map(lambda x: x[0], parts))
        assert mailbox is not None
        met = lax.psum(mailbox.opened, mesh.axis_names)  # nobody sends before

        def step(_: Any, part: Any) -> Any:
            return None, exchange(mailbox, jax.tree.map(lambda x: x + met.astype(x.dtype), part))

        return jax.tree.map(lambda x: x[None], lax.scan(step, None, parts)[1])

    divided = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=divided, out_specs=divided))


def sums_on(mesh: Mesh) -> Any:
    return each(mesh, lambda x: Mailbox.for_arrays(FIRST, x, mesh.size), lambda mailbox, x: mailbox.add_up(x))


def norms_on(mesh: Mesh, norm: Norm) -> Any:
    """Of hidden states, what each device has to add up, and factors."""

    def of(part: Any) -> Mailbox | None:
        return Mailbox.for_rows(FIRST, part[0], mesh.size)

    def run(mailbox: Mailbox, part: Any) -> Any:
        x, update, factors = part
        rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
        if isinstance(update, Parts):
            update = update._replace(parts=update.parts.reshape(len(update.parts), -1, width))
        return tuple(made.reshape(x.shape) for made in mailbox.add_up_and_norm(rows, update, factors, norm))

    return each(mesh, of, run)


def group_of(mesh: Mesh) -> tuple[int, int]:
    """The devices along context, and the way from one to the next."""
    return mesh.shape["context"], 1 if mesh.axis_names[1] == "context" else mesh.shape["tensor"]


def members(mesh: Mesh) -> np.ndarray:
    """The numbers of the devices of each group, one group after another."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    return numbers.T if mesh.axis_names == AXES else numbers


def gathers_on(mesh: Mesh, parts: tuple[int, ...]) -> Any:
    of = partial(Mailbox.for_columns, FIRST, parts=parts)
    return each(mesh, lambda x: of(x, devices=group_of(mesh)[0], stride=group_of(mesh)[1]), partial(collect, parts))


def collect(parts: tuple[int, ...], mailbox: Mailbox, x: Any) -> Any:
    return mailbox.collect(x, parts)


def heads_on(mesh: Mesh, heads: HeadSizes) -> Any:
    """Of columns, scales and places of each device; heads are those of all devices of a group."""
    devices, stride = group_of(mesh)

    def of(part: Any) -> Mailbox | None:
        columns, _, places = part
        own = columns.parts.shape[1], 1, heads.share(devices).num_heads, heads.head_dim
        return Mailbox.for_heads(FIRST, jax.ShapeDtypeStruct(own, places.key_pages.dtype), devices, stride)

    return each(mesh, of, lambda mailbox, part: mailbox.split_heads(*part, heads))


def share_of(columns: Parts, heads: HeadSizes, devices: int, device: int) -> Parts:
    """The columns of the heads that a device of a group computes: of queries, keys and values its share of each."""

    def own(columns: Any) -> np.ndarray:
        by_head = np.asarray(columns).reshape(*columns.shape[:-1], heads.num_heads, heads.head_dim)
        of_parts = np.split(by_head, np.cumsum([heads.num_q_heads, heads.num_kv_heads]).tolist(), axis=-2)
        shares = [np.split(part, devices, axis=-2)[device] for part in of_parts]
        return np.concatenate(shares, axis=-2).reshape(*columns.shape[:-1], -1)

    return jax.tree.map(own, columns)


def merges_on(mesh: Mesh, num_kv_heads: int, used: int | None = None) -> Any:
    """POR of rows, of which each device has one partial a tile and kv head; so many requests are not free."""
    devices, stride = group_of(mesh)

    def of(rows: Rows) -> Mailbox | None:
        return Mailbox.for_merges(FIRST, rows.out, num_kv_heads, devices, stride)

    def run(mailbox: Mailbox, rows: Rows) -> Any:
        from pallas_kernels.between_devices.por import por

        partials, call = partials_of(rows, num_kv_heads, used)
        return mailbox._run(lambda memory, sizes: por(partials, call, memory, sizes))

    return each(mesh, of, run)
