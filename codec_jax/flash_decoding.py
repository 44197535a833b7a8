"""FlashDecoding's call over a paged cache: the public names of `codec_jax.attention.flash_decoding`."""

from codec_jax.attention.flash_decoding import flash_attn_with_kvcache, plans

__all__ = ["flash_attn_with_kvcache", "plans"]
