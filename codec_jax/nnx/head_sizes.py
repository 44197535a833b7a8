"""The heads of a decoder as the kernel that splits them knows them, and which of them it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from codec_jax.nnx.decoder_config import DecoderConfig
from pallas_kernels.hopper import head_rows
from pallas_kernels.hopper.head_rows import HeadSizes, Norm


def sizes_of(config: DecoderConfig, heads: tuple[int, int]) -> HeadSizes:
    """Describe the heads of a device.

    Args:
      config: of the decoder.
      heads: q heads and kv heads that the device attends with.
    """
    norm = Norm(config.norm_epsilon, config.norm_plus_one) if config.qk_norm else None
    return HeadSizes(*heads, config.head_dim, norm)


def takes_heads(config: DecoderConfig, heads: tuple[int, int], rows: int) -> bool:
    """Whether the kernel takes so many rows of these heads.

    Args:
      config, heads: as in `sizes_of`.
      rows: tokens of a step, of all batches.
    """
    is_plain = config.cache_dtype == jnp.dtype(config.dtype) and not (
        config.qk_norm and config.qk_norm_over == "projection"
    )
    return is_plain and head_rows.why_not(sizes_of(config, heads), rows, config.dtype, jax.devices()[0]) is None
