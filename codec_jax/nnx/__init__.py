"""Flax NNX modules over forests: attention, a Llama/Qwen3 decoder, and a sampler that shares prefixes."""

from codec_jax.nnx.decoder import Attention, Decoder, DecoderConfig
from codec_jax.nnx.sampler import Completion, Decoding, Generated, Sampler

__all__ = ["Attention", "Completion", "Decoder", "DecoderConfig", "Decoding", "Generated", "Sampler"]
