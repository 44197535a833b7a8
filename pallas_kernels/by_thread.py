"""Arrays with a number for each thread of a warpgroup, loaded from wherever in memory each thread is told."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

THREADS = 128
#: A number for each thread.
THREAD = plgpu.Layout.WG_STRIDED((THREADS,), 1)


def gather(ref: Any, index: jax.Array) -> jax.Array:
    """Load a number for each thread from an array in global memory.

    Args:
      ref: int32, float32, bfloat16 or float16 [n].
      index: int32 [128], each from 0 to n - 1.
    """
    is_signed = True if jnp.issubdtype(ref.dtype, jnp.integer) else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), THREAD), return_type=plgpu.ShapeDtypeStruct((THREADS,), ref.dtype, layout=THREAD)
    )
    def load(_: Any, ref: Any, index: Any) -> Any:
        element, memory = ir.MemRefType(ref.type).element_type, global_memory(ref)
        return by_thread(llvm.load(element, at_index(memory, [only(index)], element)), is_signed)

    return load(ref, index)


def page_and_token(page_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the page of a block, and the token of it, for each thread, int32 [128] each: a token for each thread."""
    index = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=THREAD)
    return lax.div(index, jnp.int32(page_tokens)), lax.rem(index, jnp.int32(page_tokens))


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
