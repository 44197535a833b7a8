"""Flax NNX modules over forests: a decoder, its weights, an engine that serves it, and a sampler."""

from codec_jax.nnx.async_engine import AsyncEngine, Following, StoppedError
from codec_jax.nnx.batch import Batch
from codec_jax.nnx.chat import ChatTemplate
from codec_jax.nnx.checkpoint import Checkpoint, open_checkpoint
from codec_jax.nnx.configs import PUBLISHED, random_decoder
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig, Latent, Mixture
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.latent_attention import MultiHeadLatentAttention
from codec_jax.nnx.params import Matcher, SamplingParams
from codec_jax.nnx.replicas import Replicas
from codec_jax.nnx.request import Request, Update
from codec_jax.nnx.rope import LinearScaling, Llama3Scaling, YarnScaling
from codec_jax.nnx.sampler import Sampler
from codec_jax.nnx.search import Beam, beam_search, best_of
from codec_jax.nnx.self_attention import Attention
from codec_jax.nnx.shards import PlacedDecoder
from codec_jax.nnx.state import Completion, Decoding, Generated
from codec_jax.nnx.stats import Stats
from codec_jax.nnx.text import TextStream
from pallas_kernels.addends import Parts

__all__ = [
    "PUBLISHED",
    "AsyncEngine",
    "Attention",
    "Batch",
    "Beam",
    "ChatTemplate",
    "Checkpoint",
    "Completion",
    "Decoder",
    "DecoderConfig",
    "Decoding",
    "Engine",
    "Following",
    "Generated",
    "Latent",
    "LinearScaling",
    "Llama3Scaling",
    "Matcher",
    "Mixture",
    "MultiHeadLatentAttention",
    "Parts",
    "PlacedDecoder",
    "Replicas",
    "Request",
    "Sampler",
    "SamplingParams",
    "Stats",
    "StoppedError",
    "TextStream",
    "Update",
    "YarnScaling",
    "beam_search",
    "best_of",
    "open_checkpoint",
    "random_decoder",
]
