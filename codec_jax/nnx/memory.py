"""How many KV pages fit into the memory of the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from codec_jax.nnx.decoder import DecoderConfig

#: Of the memory that is free, what KV pages may take; the rest is for activations.
KV_SHARE = 0.8
#: KV pages where the device does not say how much memory it has.
DEFAULT_KV_GIB = 4.0
#: What commands say of the option, by the rules of `argparse`.
KV_CACHE_HELP = (
    f"memory for KV pages (default: {KV_SHARE:.0%}% of what the weights leave free on the device, "
    f"{DEFAULT_KV_GIB:g} where it does not say)"
)


def pages_that_fit(config: DecoderConfig, page_size: int, *, gib: float | None = None, weights_to_come: int = 0) -> int:
    """Return the KV pages of all layers that there is memory for.

    Args:
      config: sizes of the decoder.
      page_size: tokens in a page.
      gib: memory for KV pages; defaults to 80% of what is free on the device, 4 where it does not say.
      weights_to_come: bytes of weights that are not on the device yet.

    >>> config = DecoderConfig(64, 32, 64, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
    >>> from codec_jax.nnx.memory import pages_that_fit
    >>> pages_that_fit(config, 16, gib=1.0)
    524288
    """
    if gib is None:
        memory = jax.devices()[0].memory_stats()
        gib = DEFAULT_KV_GIB
        if memory is not None:
            gib = KV_SHARE * (memory["bytes_limit"] - memory["bytes_in_use"] - weights_to_come) / 2**30
    page = 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return max(0, int(gib * 2**30 // page))
