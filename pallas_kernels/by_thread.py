"""Arrays with a number for each thread of a warpgroup, loaded from wherever in memory each thread is told."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

THREADS, WARP = 128, 32
#: A number for each thread.
THREAD = plgpu.Layout.WG_STRIDED((THREADS,), 1)


def gather(ref: Any, index: jax.Array) -> jax.Array:
    """Load a number for each thread from an array in global memory.

    Args:
      ref: int32, float32, bfloat16 or float16, of n numbers in any shape.
      index: int32 [128], each from 0 to n - 1, in row-major order.
    """
    is_signed = True if jnp.issubdtype(ref.dtype, jnp.integer) else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), THREAD), return_type=plgpu.ShapeDtypeStruct((THREADS,), ref.dtype, layout=THREAD)
    )
    def load(_: Any, ref: Any, index: Any) -> Any:
        element, memory = ir.MemRefType(ref.type).element_type, global_memory(ref)
        return by_thread(llvm.load(element, at_index(memory, [only(index)], element)), is_signed)

    return load(ref, index)


def same_in_warp(numbers: jax.Array) -> jax.Array:
    """Say whether all threads of a warp have the same number, int32 [128], by 1 or 0."""

    @plgpu.inline_mgpu(arg_types=(THREAD,), return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=THREAD))
    def vote(_: Any, numbers: Any) -> Any:
        word, number = ir.IntegerType.get_signless(32), only(numbers)
        whole_warp, zero = mgpu.c(0xFFFFFFFF, word), mgpu.c(0, word)
        first = nvvm.shfl_sync(whole_warp, number, zero, mgpu.c(WARP - 1, word), nvvm.ShflKind.idx)
        same = nvvm.vote_sync(whole_warp, arith.cmpi(arith.CmpIPredicate.eq, number, first), "all")
        return by_thread(arith.extui(word, same), True)

    return vote(numbers)


def publish() -> None:
    """Let copies and wgmma see what this thread has written to shared memory; whoever starts them must wait for it.

    So does `plgpu.commit_smem`, which also waits for all threads of the warpgroup.
    """

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()


def at_index(pointer: Any, index: list[Any], element: Any) -> Any:
    """Return the pointer to an element of what a pointer points to."""
    return mgpu.utils.getelementptr(pointer, index, element)


def global_memory(ref: Any) -> Any:
    """Return the pointer to an array in global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))


def first_of(register: Any) -> Any:
    """Return the first number of a register."""
    zero = mgpu.c(0, ir.IntegerType.get_signless(32))
    return llvm.extractelement(register, zero)


def only(array: Any) -> Any:
    """Return the number that a thread has of an array with one for each."""
    (register,) = array.registers.flat
    return first_of(register)


def by_thread(number: Any, is_signed: bool | None = None) -> Any:
    """Return an array that has a number of each thread."""
    vector = llvm.mlir_undef(ir.VectorType.get((1,), number.type))
    register = llvm.insertelement(vector, number, mgpu.c(0, ir.IntegerType.get_signless(32)))
    registers = np.full((1,), register, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=THREAD.to_mgpu(), _is_signed=is_signed)
