"""How many KV pages fit into the memory of the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.kept import SHARE, pays
from codec_jax.nnx.parallel import Parallel

#: Of the memory that is free, what KV pages may take; the rest is for activations.
KV_SHARE = 0.8
#: KV pages where the device does not say how much memory it has.
DEFAULT_KV_GIB = 4.0
#: What commands call dtypes of the KV cache alone.
KV_DTYPES = {"fp8": jnp.float8_e4m3fn}
#: What commands say of their options, by the rules of `argparse`.
KV_DTYPE_HELP = "of the KV cache: fp8 takes one byte a number (default: as --dtype)"
KV_CACHE_HELP = (
    f"memory for KV pages (default: {KV_SHARE:.0%}% of what the weights leave free on the device, "
    f"{DEFAULT_KV_GIB:g} where it does not say)"
)


def pages_that_fit(
    config: DecoderConfig,
    page_size: int,
    *,
    gib: float | None = None,
    weights_to_come: int = 0,
    mesh: Mesh | None = None,
    max_requests: int = 1,
) -> int:
    """Return the KV pages of all layers that there is memory for.

    Args:
      config: sizes of the decoder.
      page_size: tokens in a page.
      gib: memory for KV pages; defaults to 80% of what is free on the device, 4 where it does not say.
      weights_to_come: bytes of weights that are not there yet, of the whole model.
      mesh: devices that divide weights and pages; `gib` is then of each, and the one with the least memory counts.
      max_requests: that decode at a time. Where so many make it worth keeping K and V beside latents, there is to be
        memory for these, too.

    Raises ValueError for a mesh of several processes without `gib`: they may not have the same memory left.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> from codec_jax.nnx.memory import pages_that_fit
    >>> pages_that_fit(config, 16, gib=1.0)
    524288
    """
    parallel = Parallel.of(mesh)
    if gib is None:
        if mesh is not None and mesh.is_multi_process:
            raise ValueError("num_pages: expected a number for a mesh of several processes, got None; choose one")
        devices = jax.devices()[:1] if mesh is None else mesh.local_devices
        memory = [stats for device in devices if (stats := device.memory_stats()) is not None]
        free = min((stats["bytes_limit"] - stats["bytes_in_use"] for stats in memory), default=None)
        gib = DEFAULT_KV_GIB if free is None else KV_SHARE * (free - weights_to_come / parallel.devices) / 2**30
    _, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
    page = page_size * config.kv_token_bytes * num_kv_heads // config.num_kv_heads
    if pays(config, parallel, max_requests):
        page = int(page * (1 + SHARE))
    return max(0, int(gib * 2**30 // page)) * parallel.context
