"""Which heads the kernel that splits them takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from codec_jax.nnx.decoder_config import DecoderConfig
from pallas_kernels.hopper import head_rows
from pallas_kernels.hopper.head_rows import HeadSizes, Norm


def served_heads(config: DecoderConfig, heads: tuple[int, int], rows: int) -> HeadSizes | None:
    """Describe the heads that a device attends with for the kernel; None if it does not take so many rows of them.

    Args:
      config: of the decoder.
      heads: q heads and kv heads of a device.
      rows: tokens of a step, of all batches.
    """
    is_plain = config.cache_dtype == jnp.dtype(config.dtype) and not (
        config.qk_norm and config.qk_norm_over == "projection"
    )
    norm = Norm(config.norm_epsilon, config.norm_plus_one) if config.qk_norm else None
    sizes = HeadSizes(*heads, config.head_dim, norm)
    is_served = is_plain and head_rows.why_not(sizes, rows, config.dtype, jax.devices()[0]) is None
    return sizes if is_served else None
