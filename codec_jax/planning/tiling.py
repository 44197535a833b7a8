"""How plans cut the work where the caller does not say: as the kernels of the device want it, or any device's XLA."""

from collections.abc import Iterator
from dataclasses import replace

import jax

from pallas_kernels import FAMILIES, Heads, Tiling
from pallas_kernels.family import Family


def default_tiling(heads: Heads) -> Tiling:
    """Return the tiling of the best family of kernels that serves the default device, or else that of the XLA path."""
    device = jax.devices()[0]
    found = (family.tiling(served, device) for family, served in _serving(heads, device))
    return next(found, any_device(heads, device))


def values_in_keys(heads: Heads) -> bool:
    """Say whether the kernels of the default device take the values of such heads to be the keys' first numbers."""
    return next((served.values_in_keys for _, served in _serving(heads, jax.devices()[0])), False)


def _serving(heads: Heads, device: jax.Device) -> Iterator[tuple[Family, Heads]]:
    """Yield the families that serve a device, the best one first, and the heads as they take them.

    Plans know the dtype of pages. Kernels take a query of the same, or of 16 bits over one byte a number. Values that
    are shorter than keys may have pages of their own, or be the keys' first numbers, and with one byte a number the
    others have pages of their own then (`LatentPages`); plans do not say.
    """
    is_one_byte = heads.kv_dtype.itemsize == 1
    heads = heads if is_one_byte else replace(heads, query_dtype=heads.kv_dtype)
    beside = heads.head_dim - heads.value_head_dim
    in_keys = replace(heads, values_in_keys=True, rotated_beside=beside if is_one_byte else 0)
    for each in (heads, in_keys) if beside > 0 else (heads,):
        yield from ((family, each) for family in FAMILIES if not family.why_not(each, device))


def any_device(heads: Heads, device: jax.Device) -> Tiling:
    """Return the tiling of the XLA path, which takes all.

    The tensor cores of a GPU work on 64 rows; a CPU pays for every row of padding.
    """
    if device.platform == "gpu":
        return Tiling(device.core_count, tile_rows=64, lanes=2, block_tokens=(128, 128))
    return Tiling(num_ctas=16, tile_rows=16, lanes=1, block_tokens=(256, 256))
