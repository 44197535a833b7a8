"""Attention over forests: the call, the paths that run a plan, and calls in the terms of other libraries."""

from codec_jax.attention.call import forest_attention

__all__ = ["forest_attention"]
