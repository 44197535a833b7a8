"""Flax NNX modules over forests: attention, a Llama/Qwen3 decoder, its weights, and a sampler that shares prefixes."""

from codec_jax.nnx.checkpoint import Checkpoint, open_checkpoint
from codec_jax.nnx.configs import PUBLISHED, random_decoder
from codec_jax.nnx.decoder import Attention, Decoder, DecoderConfig
from codec_jax.nnx.rope import Llama3Scaling
from codec_jax.nnx.sampler import Sampler
from codec_jax.nnx.state import Completion, Decoding, Generated

__all__ = [
    "PUBLISHED",
    "Attention",
    "Checkpoint",
    "Completion",
    "Decoder",
    "DecoderConfig",
    "Decoding",
    "Generated",
    "Llama3Scaling",
    "Sampler",
    "open_checkpoint",
    "random_decoder",
]
