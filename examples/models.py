"""What answers in the examples about texts: a checkpoint on the disk, or a small decoder with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from codec_jax.nnx import Decoder, DecoderConfig, open_checkpoint


@dataclass(frozen=True)
class Model:
    """A decoder whose weights are still to come, and its tokens."""

    load: Callable[[], Decoder]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop_tokens: tuple[int, ...] = ()
    max_context: float = math.inf  # tokens of prompt and answer together


def from_checkpoint(directory: Path) -> Model:
    """Return the model of a checkpoint directory, in bfloat16 on a GPU. Raises ValueError for one that does not fit."""
    try:
        checkpoint = open_checkpoint(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: {error}") from error
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    return Model(
        load=partial(checkpoint.load, dtype, progress=True),
        encode=lambda text: checkpoint.tokenizer.encode(text).ids,
        decode=partial(checkpoint.tokenizer.decode, skip_special_tokens=True),
        stop_tokens=checkpoint.stop_tokens,
        max_context=checkpoint.max_context,
    )


def random_weights() -> Model:
    """Return a decoder of two layers with random weights, whose tokens are the bytes of a text."""
    # Sizes of vocabulary, hidden layer and MLP; numbers of layers, q heads and kv heads; head size.
    sizes = (256, 128, 384, 2, 8, 4, 64)
    config = DecoderConfig(*sizes, tied_embeddings=False, dtype=jnp.float32, param_dtype=jnp.float32)
    return Model(
        load=lambda: Decoder(config, nnx.Rngs(0)),
        encode=lambda text: list(text.encode()),
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    )


def read_text(name: str, file: Path) -> str:
    """Read a text; `name` says what it is for. Raises ValueError for a file that is missing, empty or not UTF-8."""
    try:
        text = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected a file of UTF-8 text, got {file}: {error}") from error
    if not text:
        raise ValueError(f"{name}: expected some text, got {file}, which is empty")
    return text
