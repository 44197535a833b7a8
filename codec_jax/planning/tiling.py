"""How plans cut the work where the caller does not say: as the kernels of the device want it, or any device's XLA."""

from dataclasses import replace

import jax

from pallas_kernels import BY_NAME, FAMILIES, Heads, Tiling


def default_tiling(heads: Heads) -> Tiling:
    """Return the tiling of the best family of kernels that serves the default device, or else that of the XLA path."""
    device = jax.devices()[0]
    # Values that are shorter than keys may be their first numbers; plans do not say.
    heads = replace(heads, values_in_keys=heads.value_head_dim < heads.head_dim)
    families = (family for family in (*FAMILIES, *BY_NAME) if family.why_not(heads, device) is None)
    return next((family.tiling(heads, device) for family in families), any_device(heads, device))


def any_device(heads: Heads, device: jax.Device) -> Tiling:
    """Return the tiling of the XLA path, which takes all.

    The tensor cores of a GPU work on 64 rows; a CPU pays for every row of padding.
    """
    if device.platform == "gpu":
        return Tiling(device.core_count, tile_rows=64, lanes=2, block_tokens=(128, 128))
    return Tiling(num_ctas=16, tile_rows=16, lanes=1, block_tokens=(256, 256))
