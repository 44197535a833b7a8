"""Instructions that every NVIDIA GPU since Ampere has: warp-level products, cp.async, and loads and stores by thread.

Pallas copies by cp.async before Hopper only, and by TMA from there on. Here it is cp.async everywhere, so that there is
one program. A thread copies 16 bytes at a time from the row that it is told, to where products read them: tiles of 8
rows and 64 columns, in which the 16-byte chunks of row r are exchanged by the bits of r (the 128-byte swizzle).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.by_thread import THREAD, THREADS, at_index, by_thread, first_of, global_memory, only
from pallas_kernels.shared_memory import swizzled

#: How shared memory holds what products read.
TILED = swizzled(jnp.bfloat16, 64)  # of any numbers of 2 bytes

_CHUNK = 8  # numbers of 2 bytes in 16 bytes


def place_of_chunk(row: Any, chunk: Any, columns: int) -> Any:
    """Return where a chunk of a row lies in shared memory, in numbers from the first row on. Takes any integers."""
    tile, row_of_tile = row // 8 * (columns // 64) + chunk // 8, row % 8
    return tile * 512 + row_of_tile * 64 + (chunk % 8 ^ row_of_tile) * _CHUNK


def keep(ref: Any, numbers: jax.Array) -> None:
    """Store numbers, int32 [128] by thread, in shared memory, int32 [n]; those past n - 1 are left out.

    Threads that read them wait for all others first.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), THREAD))
    def store(_: Any, ref: Any, numbers: Any) -> None:
        number, thread = ir.IntegerType.get_signless(32), mgpu.utils.thread_idx()
        exists = arith.cmpi(arith.CmpIPredicate.ult, thread, mgpu.c(ref.type.shape[0], number))
        with mgpu.when(exists):
            llvm.store(only(numbers), at_index(mgpu.utils.memref_ptr(ref), [thread], number))

    store(ref, numbers)


def copy_rows(rows: Any, *copies: tuple[Any, Any]) -> None:
    """Begin to copy rows from global to shared memory.

    Args:
      rows: int32 [S or more] in shared memory, the rows of each source.
      copies: sources [n, H], of numbers of 2 bytes, H a multiple of 8, and their targets [S, H or more], in `TILED`
        shared memory; columns past H become 0.
    """

    # One operation for all copies of a thread: the time to find layouts grows with the number of operations.
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(plgpu.RefType(), plgpu.RefType(TILED)) * len(copies)))
    def copy(_: Any, rows: Any, *refs: Any) -> None:
        # All row numbers are asked for before the first copy, as the compiler moves no load ahead of one.
        pairs = zip(refs[::2], refs[1::2], copies, strict=True)
        for begin in [_loaded(source, rows, to, target.shape) for source, to, (_, target) in pairs]:
            begin()

    copy(rows, *(ref for pair in copies for ref in pair))


def _loaded(source: Any, rows: Any, target: Any, shape: tuple[int, int]) -> Callable[[], None]:
    """Load what a thread needs to copy its part of rows; return what begins to."""
    word, long = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    element, (_, head_dim), (count, columns) = source.type.element_type, source.type.shape, shape
    chunks = columns // _CHUNK
    from_, rows_, to = global_memory(source), mgpu.utils.memref_ptr(rows), mgpu.utils.memref_ptr(target)
    thread = by_thread(mgpu.utils.thread_idx(), is_signed=False)
    row_of_thread, chunk = thread // chunks, thread % chunks
    column, size = arith.extui(long, only(chunk * _CHUNK)), None
    if head_dim < columns:
        exists = arith.cmpi(arith.CmpIPredicate.ult, only(chunk), mgpu.c(head_dim // _CHUNK, word))
        column = arith.select(exists, column, mgpu.c(0, long))
        size = arith.select(exists, mgpu.c(2 * _CHUNK, word), mgpu.c(0, word))  # the rest is filled with 0
    own = [row_of_thread + begin // chunks for begin in range(0, count * columns // _CHUNK, THREADS)]
    numbers = [llvm.load(word, at_index(rows_, [only(row)], row.mlir_dtype)) for row in own]

    def begin() -> None:
        for row, number in zip(own, numbers, strict=True):
            first = arith.muli(arith.extui(long, number), mgpu.c(head_dim, long))
            nvvm.cp_async_shared_global(
                at_index(to, [only(place_of_chunk(row, chunk, columns))], element),
                at_index(from_, [arith.addi(first, column)], element),
                2 * _CHUNK,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=size,
            )

    return begin


def commit_copies() -> None:
    """Make one group of all copies that have begun since the last group."""

    @plgpu.inline_mgpu()
    def commit(_: Any) -> None:
        nvvm.cp_async_commit_group()

    commit()


def wait_for_copies(in_flight: int) -> None:
    """Wait until only the last `in_flight` groups are on their way, in every thread, so that all see what has arrived.

    All threads have done all that comes before, too.
    """

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        nvvm.cp_async_wait_group(in_flight)
        mgpu.utils.warpgroup_barrier()

    wait()


def wait_for_threads() -> None:
    """Wait until all threads have done all that comes before."""

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    wait()


def store_rows(target: Any, places: jax.Array, rows: jax.Array, layout: Any) -> None:
    """Store rows in global memory, each at a place of its own.

    Args:
      target: [n, V], V a multiple of 8.
      places: int32 [rows, V or more], the row of `target`, the same in all columns; -1 for rows that are not stored.
      rows: [rows, V or more]; what is past V is left out.
      layout: that both have.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store(_: Any, target: Any, places: Any, rows: Any) -> None:
        element, long = ir.MemRefType(target.type).element_type, ir.IntegerType.get_signless(64)
        number, head_dim = ir.IntegerType.get_signless(32), target.type.shape[1]
        indices = layout.to_mgpu().thread_idxs(rows.shape)
        registers = zip(places.registers.flat, rows.registers.flat, strict=True)
        for (_, column), (place, row) in zip(indices, registers, strict=True):
            at, column = first_of(place), arith.index_castui(long, column)
            exists = arith.cmpi(arith.CmpIPredicate.sge, at, mgpu.c(0, number))
            if head_dim < rows.shape[1]:
                within = arith.cmpi(arith.CmpIPredicate.ult, column, mgpu.c(head_dim, long))
                exists = arith.andi(exists, within)
            with mgpu.when(exists):
                first = arith.muli(arith.extui(long, at), mgpu.c(head_dim, long))
                first = arith.addi(first, column)
                llvm.store(row, at_index(global_memory(target), [first], element))

    store(target, places, rows)
