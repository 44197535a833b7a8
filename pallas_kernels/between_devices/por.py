"""POR across devices: each has partials of all heads over its pages, and gets the merged rows of its own heads.

    one thread block per (merge group, some rows of its tile), as on one device:

        partials of the rows ─► merged here ─► the mailbox of the device whose heads they are
                                               with each row its maximum and sum, two words

    and where they are this device's:

        mailbox ─► device 0's row, device 1's, ... ─► w = l e^(m - M) ─► sum of w O over sum of w ─► rows of requests

Rows are packed alike on all devices, whatever their plans, so the same thread block has the same rows everywhere.
Thread blocks begin in the order of the grid, and not all of them at once. Those with rows for other devices come first,
and wait for nobody, so whoever waits has sent all that it has. Where the q heads of a kv head are divided, all devices
have the same order: of the first thread block that is not done anywhere, every device has its own running. The merge is
the paper's POR (section 4; doi 10.1145/3802028), in the order of the devices.
"""

import math
from functools import reduce
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import por_rows
from pallas_kernels.between_devices.mailbox import SCALAR, SCALAR_TYPE, Box, Memory, begin, only, splat
from pallas_kernels.between_devices.mailbox import call as call_between
from pallas_kernels.between_devices.numbers import Numbers, instruct, word, word_type
from pallas_kernels.between_devices.sizes import SHARED, Sizes
from pallas_kernels.by_thread import at_index, global_memory
from pallas_kernels.family import Call
from pallas_kernels.hopper.por import Place, Work, merge_here
from pallas_kernels.packing import TILE_ROWS
from pallas_kernels.por_grain import grain_of
from pallas_kernels.varying import NOWHERE


def por(
    partials: tuple[jax.Array, ...], call: Call, mailbox: Memory, sizes: Sizes
) -> tuple[Memory, tuple[jax.Array, jax.Array, jax.Array]]:
    """Merge the partials of `pac` on all devices of a group.

    Args:
      partials: output, maximum, sum and violations, as `hopper.por` takes them, of this device's pages.
      call: what they are partials of.
      mailbox: of `mailbox.empty`.
      sizes: of `sizes.of_merges`.

    Returns the mailbox for the next call, and of this device's heads out [B, T, n, V] in the query's dtype, 0 for free
    request slots, and maximum (natural log) and sum, float32 [B, T, n].
    """
    (batch, tokens, num_q_heads, _), dtype = call.query.shape, call.query.dtype
    num_groups, head_dim = call.plan.merge_ptr.shape[0] - 1, partials[0].shape[2]
    heads = num_q_heads // sizes.devices
    work = Work.of(partials[0], call, grain_of(num_groups, head_dim, least=4 // dtype.itemsize), heads)
    grid = {"group": num_groups, "part": TILE_ROWS // work.grain.rows}
    assert sizes.blocks == math.prod(grid.values())
    out, row_max, row_sum, violations = partials
    inputs = por_rows.inputs_of(out, row_max, row_sum, violations, call)
    names = [*inputs, "slots", "counts", "out", "max", "sum"]

    def body(*refs: Any) -> None:
        _merge(SimpleNamespace(**dict(zip(names, refs, strict=True))), work, sizes, heads)

    rows = (batch * tokens, heads)
    out_type = [
        jax.ShapeDtypeStruct(shape, of, manual_axis_type=NOWHERE)
        for shape, of in (((*rows, head_dim), dtype), (rows, jnp.float32), (rows, jnp.float32))
    ]
    mailbox, merged = call_between("por_between_devices", body, mailbox, [*inputs.values()], out_type, sizes, grid)
    merged_out, merged_max, merged_sum = (each.reshape(batch, tokens, *each.shape[1:]) for each in merged)
    return mailbox, (merged_out, merged_max, merged_sum)


def _merge(refs: Any, work: Work, sizes: Sizes, heads: int) -> None:
    """Merge the rows of one thread block here, then those of all devices."""
    own, part = _own_number(refs.slots, refs.counts, sizes), lax.axis_index("part")
    group = _in_order(lax.axis_index("group"), lax.axis_size("group"), own, work.num_kv_heads, sizes.devices)
    block = group * (TILE_ROWS // work.grain.rows) + part
    begun = begin(refs.slots, refs.counts, block, sizes)
    places, rows = merge_here(refs, work, group, part)
    _exchange(refs, work, sizes, heads, (block, begun), places, rows)


def _in_order(number: jax.Array, groups: int, own: jax.Array, num_kv_heads: int, devices: int) -> jax.Array:
    """Return the group that is a number in the grid: those of the next device's heads first, of this one's last."""
    if num_kv_heads % devices:
        return number
    of_device, each = jnp.int32(groups // devices), jnp.int32(num_kv_heads // devices)
    device = lax.rem(own + 1 + lax.div(number, of_device), jnp.int32(devices))
    rest = lax.rem(number, of_device)
    return lax.div(rest, each) * num_kv_heads + device * each + lax.rem(rest, each)


def _own_number(slots: Any, counts: Any, sizes: Sizes) -> jax.Array:
    """Return the number of this device in its group."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=SCALAR_TYPE)
    def own(context: Any, slots: Any, counts: Any) -> Any:
        return splat(Box(sizes, slots, counts).own(context))

    return own(slots, counts)


def _exchange(
    refs: Any,
    work: Work,
    sizes: Sizes,
    heads: int,
    of_box: tuple[jax.Array, list[jax.Array]],
    places: list[Place],
    rows: tuple[jax.Array, jax.Array, jax.Array],
) -> None:
    """Send rows to the devices whose heads they are; of those for this one merge what all sent, and store it."""
    layout, grain = work.merge.layout, work.grain
    # Each piece goes to one device, and there to rows of [B x T x n] from one on; -1 if it is no rows of the query's.
    to = [lax.div(place.q_head, jnp.int32(heads)) for place in places]
    first = [
        jnp.where(place.exists, place.entry * heads + lax.rem(place.q_head, jnp.int32(heads)), -1) for place in places
    ]
    types = (layout, work.merge.of_rows, work.merge.of_rows), (plgpu.RefType(),) * 5
    scalars = *of_box, to, first

    @plgpu.inline_mgpu(arg_types=(*types[0], *types[1], *jax.tree.map(lambda _: SCALAR, scalars)))
    def exchange(
        context: Any, merged: Any, row_max: Any, row_sum: Any, slots: Any, counts: Any, out: Any, out_max: Any,
        out_sum: Any, block: Any, *lists: Any,
    ) -> None:  # fmt: skip
        begun, recipient_of, first_of = (list(map(only, each)) for each in lists)
        box = Box(sizes, slots, counts, only(block))
        stored = Numbers(mgpu.utils.dtype_to_ir_type(jnp.dtype(refs.out.dtype)), sizes.width)
        one = Numbers(ir.F32Type.get(), 1)
        row, column = _row_and_column(grain, work.merge.head_dim)
        of_row = sizes.chunks * grain.together // grain.rows  # chunks of a row
        words, shared, recipients, targets = [], [], [], []
        for i, chunk in enumerate(merged.registers.flat):
            words += stored.to_words(chunk)
            for softmax in (row_max, row_sum):
                shared += one.to_words(softmax.registers.flat[i // of_row])
            piece = i // of_row * (grain.together // work.piece), row
            recipients.append(_of_piece(recipient_of, *piece, work.piece, grain.together))
            first_row = _of_piece(first_of, *piece, work.piece, grain.together)
            targets.append((first_row, arith.addi(first_row, arith.remui(row, word(work.piece)))))
        come = list(box.exchange(context, words, shared, begun, recipients))
        own = box.own(context)
        for i, (first_row, target) in enumerate(targets):
            at = slice(i * sizes.width, (i + 1) * sizes.width), slice(i * SHARED, (i + 1) * SHARED)
            parts = [(stored.from_words(words[at[0]]), *map(_as_float, shared[at[1]])) for words, shared in come]
            number, greatest, total = _merged(stored, parts)
            is_here = arith.andi(
                arith.cmpi(arith.CmpIPredicate.eq, recipients[i], own),
                arith.cmpi(arith.CmpIPredicate.sge, first_row, word(0)),
            )
            with mgpu.when(is_here):
                columns = word(i % of_row * grain.columns(work.merge.head_dim))
                place = arith.addi(arith.muli(target, word(work.merge.head_dim)), arith.addi(column, columns))
                stored.store(number, out, arith.divui(place, word(4 // jnp.dtype(refs.out.dtype).itemsize)))
                if i % of_row == 0:
                    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, column, word(0))):
                        for ref, value in ((out_max, greatest), (out_sum, total)):
                            llvm.store(value, at_index(global_memory(ref), [target], ir.F32Type.get()))

    exchange(*rows, refs.slots, refs.counts, refs.out, refs.max, refs.sum, *scalars)


def _row_and_column(grain: Any, head_dim: int) -> tuple[Any, Any]:
    """Return the row of this thread, of those that all warps have at a time, and its first column."""
    thread = mgpu.utils.thread_idx()
    row = arith.divui(thread, word(grain.threads))
    return row, arith.muli(arith.remui(thread, word(grain.threads)), word(grain.numbers(head_dim)))


def _of_piece(numbers: list[Any], first: int, row: Any, rows: int, together: int) -> Any:
    """Return the number of the piece that a row is in, of those from the first one on."""
    number = numbers[first]
    for i in range(1, together // rows):
        is_later = arith.cmpi(arith.CmpIPredicate.uge, row, word(i * rows))
        number = arith.select(is_later, numbers[first + i], number)
    return number


def _merged(stored: Numbers, parts: list[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    """Merge output, maximum and sum of all devices."""
    outs, maxima, sums = zip(*parts, strict=True)
    greatest = reduce(arith.maximumf, maxima)
    weights = [arith.mulf(each, _exponential(own, greatest)) for own, each in zip(maxima, sums, strict=True)]
    total = reduce(arith.addf, weights)
    # Shares first: of a partial beside rows that see nothing it is 1, so that not a bit of it changes.
    is_nothing, nothing = arith.cmpf(arith.CmpFPredicate.OEQ, total, _float(0.0)), _float(0.0)
    shares = [arith.select(is_nothing, nothing, arith.divf(weight, total)) for weight in weights]
    return reduce(arith.addf, [stored.times(*each) for each in zip(outs, shares, strict=True)]), greatest, total


def _exponential(number: Any, greatest: Any) -> Any:
    """Return exp(number - greatest), 0 where both are -inf."""
    sees_nothing = arith.cmpf(arith.CmpFPredicate.OEQ, greatest, _float(-math.inf))
    difference = arith.subf(number, arith.select(sees_nothing, _float(0.0), greatest))
    power = arith.mulf(difference, _float(1 / math.log(2)))
    [bits] = instruct("ex2.approx.ftz.f32 $0, $1;", llvm.bitcast(word_type(), power), results=1)
    return _as_float(bits)


def _float(number: float) -> Any:
    return mgpu.c(number, ir.F32Type.get())


def _as_float(bits: Any) -> Any:
    return llvm.bitcast(ir.F32Type.get(), bits)
