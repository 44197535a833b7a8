"""The differences between the JAX versions that the kernels run on, 0.10.2 to the newest."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
_BEFORE_0_11, _BEFORE_0_12 = _VERSION < (0, 11), _VERSION < (0, 12)
#: Whether wgmma takes both kinds of 8 bits at once.
MIXES_EIGHT_BITS = not _BEFORE_0_11
#: Whether a kernel may write to another device's memory without waiting for that device before it begins.
REACHES_OTHER_DEVICES = not _BEFORE_0_11
#: Whether kernels are compiled to be linked, by libnvJitLink: warpgroups cannot give each other registers then.
LINKS_KERNELS = not _BEFORE_0_12


def transposed(ref: Any) -> Any:
    """View a two-dimensional reference with its dimensions swapped."""
    return plgpu.transpose_ref(ref, (1, 0)) if _BEFORE_0_11 else ref.transpose((1, 0))


def load(ref: Any, layout: Any, *, optimized: bool = False) -> jax.Array:
    """Load a whole reference into registers of the given layout; `optimized` refuses to be slow."""
    if _BEFORE_0_11:
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    load_ref: Any = plgpu.load  # the versions differ in its signature
    return load_ref(ref, layout=layout, optimized=optimized)


def store(ref: Any, value: jax.Array) -> None:
    """Store registers, even if bank conflicts or parts of a memory sector make it slow."""
    if _BEFORE_0_12:
        ref[...] = value
    else:
        store_ref: Any = vars(plgpu)["store"]  # the older versions have none
        store_ref(ref, value, optimized=False)


def kernel_on_references(
    name: str, body: Any, *, out_type: Any, scratch_types: list[Any], mesh: Any, reaches_others: bool = False
) -> Any:
    """Make a kernel that may be called with references, which it then changes in place.

    `plgpu.kernel` makes kernels that can be vectorised, and calls of those take no references before 0.11. One that
    reaches others may write to the memory of other devices, and does not wait for these: `REACHES_OTHER_DEVICES`.
    """

    def scoped(*refs: Any) -> None:
        axes = () if mesh.thread_name is None else mesh.thread_name
        pl.run_scoped(functools.partial(body, *refs), *scratch_types, collective_axes=axes)

    make_params: Any = plgpu.CompilerParams  # the versions differ in its fields
    # In the other semantics a reference to another device is lost. These have barriers where they need some.
    reaching = {
        "lowering_semantics": plgpu.LoweringSemantics.Lane,
        "skip_device_barrier": True,
        "unsafe_no_auto_barriers": True,
    }
    params = make_params(approx_math=True, **(reaching if reaches_others else {}))
    return pl.kernel(scoped, out_type=out_type, mesh=mesh, compiler_params=params, name=name)
