"""One kernel for heads on their way from a product to attention: norm, rotation, and K and V to their pages.

    one thread block for each (4 rows, head), one row a warp, whose parts it adds up:

        queries ─► norm ─► rotation ─────────────────────────► registers to the query
        keys    ─► norm ─► rotation ─► rows in shared memory ─► one copy a row, to its token slot
        values  ─► not finite: 0 ────► rows in shared memory ─► one copy a row, to its token slot

Where each device of a group has computed some of the heads, they exchange them right before they are stored, and a
thread block stores a head of each device (`between_devices.collect_heads`).

A head is two halves, [4, H / 2] in registers each, as rotation takes one number of either. Pages are written where
they are: the kernel gets references, and XLA passes the arrays on without a copy where the caller gives them up.
"""

from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.addends import Parts
from pallas_kernels.compat import kernel_on_references, load, store
from pallas_kernels.hopper.head_rows import BLOCK_ROWS, HeadSizes, Places, Scales
from pallas_kernels.in_place import run_in_place
from pallas_kernels.varying import NOWHERE
from pallas_kernels.warp_rows import broadcast, layout

Halves = tuple[jax.Array, jax.Array]


class Alone:
    """A device that has computed all heads itself; `between_devices.collect_heads` has the like of several."""

    devices = 1
    memory = ()  # that the kernel changes

    def begin(self, memory: Any, block: jax.Array) -> None:
        """Do what `collect` needs, while a thread block waits for what it loads."""

    def collect(self, memory: Any, block: jax.Array, begun: Any, halves: Halves, spread: Any) -> list[Halves]:
        """Return a head of each device."""
        return [halves]


ALONE = Alone()


def split_heads(
    columns: Parts, scales: Scales, places: Places, sizes: HeadSizes, group: Any = ALONE
) -> tuple[jax.Array, ...]:
    """Return the query and the pages, as `head_rows.split_heads` promises, and the memory of the group.

    Args:
      columns, scales, places, sizes: as in `head_rows.split_heads`; the columns are of the heads that this device has
        computed, in the same order, and the sizes of those of all devices.
      group: the devices among which heads are divided.
    """
    (parts, count, _), dtype, own = columns.parts.shape, places.key_pages.dtype, sizes.share(group.devices)
    inputs = {
        "columns": columns.parts.reshape(parts, count, own.num_heads, 2, own.half),
        "cos": places.cos,
        "sin": places.sin,
        "slots": places.slots,
    }
    if columns.bias is not None:
        inputs["bias"] = columns.bias.reshape(own.num_heads, 2, own.half)
    if scales is not None:
        inputs |= {"query_scales": scales[0].reshape(2, -1), "key_scales": scales[1].reshape(2, -1)}
    stored = {"key_pages": places.key_pages, "value_pages": places.value_pages}
    pages = {name: each.reshape(-1, *each.shape[2:]) for name, each in stored.items()}
    names, before = [*inputs, *pages, "query", "staged"], len(inputs) + len(pages)

    def body(*refs: Any) -> None:
        after = before + len(group.memory)
        named = dict(zip(names, refs[:before] + refs[after:], strict=True))
        _split(SimpleNamespace(**{"bias": None} | named, memory=refs[before:after]), sizes, group)

    kernel = kernel_on_references(
        "split_heads" if group.devices == 1 else "collect_heads",
        body,
        out_type=jax.ShapeDtypeStruct((count, sizes.num_q_heads, sizes.head_dim), dtype, manual_axis_type=NOWHERE),
        scratch_types=[plgpu.SMEM((group.devices * BLOCK_ROWS, 1, sizes.head_dim), dtype)],
        mesh=plgpu.Mesh(grid=(-(-count // BLOCK_ROWS), own.num_heads), grid_names=("rows", "heads")),
        reaches_others=group.devices > 1,
    )
    query, changed = run_in_place(kernel, [*inputs.values()], [*pages.values(), *group.memory])
    keys, values = (each.reshape(places.key_pages.shape) for each in changed[:2])
    return query, keys, values, *changed[2:]


def _split(refs: Any, sizes: HeadSizes, group: Any) -> None:
    """Do the rows and the head of one thread block."""
    parts, total = refs.columns.shape[:2]
    own = sizes.share(group.devices)
    block = lax.axis_index("rows") * own.num_heads + lax.axis_index("heads")
    # The last thread block has rows of the one before it, too: both write the same.
    first = jnp.minimum(lax.axis_index("rows") * BLOCK_ROWS, total - BLOCK_ROWS)
    rows, head = pl.ds(first, BLOCK_ROWS), lax.axis_index("heads")
    first_key, first_value = own.num_q_heads, own.num_q_heads + own.num_kv_heads
    spread = layout(sizes.half)

    def heads_of_all(finish: Callable[[Halves], Halves]) -> list[Halves]:
        """Add up the parts of the head, and finish it; return it, or those of all devices, [4, H / 2] each."""
        columns = [[load(refs.columns.at[i, rows, head, half], spread) for half in range(2)] for i in range(parts)]
        if refs.bias is not None:
            bias = (load(refs.bias.at[head, half], spread.reduce(0)) for half in range(2))  # [H / 2]
            columns.append([broadcast(each, 1, sizes.half) for each in bias])
        begun = group.begin(refs.memory, block)  # while the columns come
        left, right = (reduce(jnp.add, (x.astype(jnp.float32) for x in half)) for half in zip(*columns, strict=True))
        return group.collect(refs.memory, block, begun, finish((left, right)), spread)

    def store_rows(pages: Any, finish: Callable[[Halves], Halves], kv_head: jax.Array) -> None:
        slots = [refs.slots[first + i] for i in range(BLOCK_ROWS)]
        for device, each in enumerate(heads_of_all(finish)):
            _put(refs.staged.at[pl.ds(device * BLOCK_ROWS, BLOCK_ROWS), 0], each)
        plgpu.commit_smem()
        for i, slot in enumerate(slots):

            @pl.when((slot >= 0) & (slot < pages.shape[0]))
            def _copy(i: int = i, slot: jax.Array = slot) -> None:
                for device in range(group.devices):
                    place = pages.at[slot, pl.ds(device * own.num_kv_heads + kv_head, 1)]
                    plgpu.copy_smem_to_gmem(refs.staged.at[device * BLOCK_ROWS + i], place)

        plgpu.wait_smem_to_gmem(0)  # for all of them together

    @pl.when(head < first_key)
    def _query() -> None:
        for device, each in enumerate(heads_of_all(_Turning.of(refs, sizes, rows, "query_scales").turned)):
            _put(refs.query.at[rows, device * own.num_q_heads + head], each)

    @pl.when((head >= first_key) & (head < first_value))
    def _key() -> None:
        store_rows(refs.key_pages, _Turning.of(refs, sizes, rows, "key_scales").turned, head - first_key)

    @pl.when(head >= first_value)
    def _value() -> None:
        store_rows(refs.value_pages, lambda halves: _finite(halves, refs.value_pages.dtype), head - first_value)


class _Turning(NamedTuple):
    """What queries, or keys, of some rows are multiplied with; halves [4, H / 2] each, float32."""

    cos: jax.Array
    sin: jax.Array
    scales: Halves | None
    sizes: HeadSizes

    @classmethod
    def of(cls, refs: Any, sizes: HeadSizes, rows: Any, scales: str) -> "_Turning":
        """Load it, for queries or for keys."""
        spread = layout(sizes.half)
        cos, sin = load(refs.cos.at[rows], spread), load(refs.sin.at[rows], spread)
        if sizes.norm is None:
            return cls(cos, sin, None, sizes)
        stored = getattr(refs, scales)
        halves = (load(stored.at[half], spread.reduce(0)) for half in range(2))  # [H / 2]
        left, right = (broadcast(sizes.norm.factors(half), 1, sizes.half) for half in halves)
        return cls(cos, sin, (left, right), sizes)

    def turned(self, halves: Halves) -> Halves:
        """Return the norm of a head, rotated."""
        left, right = halves
        if self.sizes.norm is not None and self.scales is not None:
            mean = (jnp.sum(left * left, axis=1) + jnp.sum(right * right, axis=1)) / self.sizes.head_dim  # [4]
            factor = broadcast(lax.rsqrt(mean + self.sizes.norm.epsilon), 0, self.sizes.half)
            left, right = left * factor * self.scales[0], right * factor * self.scales[1]
        return left * self.cos - right * self.sin, right * self.cos + left * self.sin


def _finite(halves: Halves, dtype: Any) -> Halves:
    """Return numbers as they are in a dtype, and 0 for what is not finite there."""
    left, right = (half.astype(dtype).astype(jnp.float32) for half in halves)
    return jnp.where(jnp.abs(left) < jnp.inf, left, 0.0), jnp.where(jnp.abs(right) < jnp.inf, right, 0.0)


def _put(target: Any, halves: Halves) -> None:
    """Store a head of some rows, [4, H]."""
    for i, half in enumerate(halves):
        store(target.at[:, pl.ds(i * half.shape[1], half.shape[1])], half.astype(target.dtype))
