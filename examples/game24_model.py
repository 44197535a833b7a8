"""The small decoder that plays Game of 24, and the file its weights are shipped in."""

from pathlib import Path

import game24
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from codec_jax.nnx import Decoder, DecoderConfig

WEIGHTS = Path(__file__).parent / "game24.safetensors"


def config(dtype: DTypeLike = jnp.float32) -> DecoderConfig:
    """Return the model's sizes: 4.8 million weights."""
    return DecoderConfig(
        vocab_size=game24.VOCAB_SIZE,
        hidden_size=256,
        mlp_size=768,
        num_layers=6,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        param_dtype=jnp.float32,
    )


def save(model: Decoder, path: Path) -> None:
    """Write the weights as bfloat16."""
    tensors = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in _parameters(model).items()}
    save_file(tensors, path, metadata={"format": "codec-jax game24"})


def load(path: Path = WEIGHTS) -> Decoder:
    """Read weights for float32 inference. Raises FileNotFoundError, or ValueError for a file that does not fit."""
    if not path.is_file():
        raise FileNotFoundError(
            f"weights: expected a file at {path}, got none; "
            "restore it from the repository or run examples/train_game24.py"
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"weights: {path} is truncated or no safetensors file: {error}") from error
    model = nnx.eval_shape(lambda: Decoder(config(), nnx.Rngs(0)))
    expected = {name: value.shape for name, value in _parameters(model).items()}
    got = {name: value.shape for name, value in tensors.items()}
    if expected != got:
        wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
        details = ", ".join(f"{name} (expected {expected.get(name)}, got {got.get(name)})" for name in wrong)
        raise ValueError(f"weights: {path} does not fit the model: {details}")
    flat = nnx.to_flat_state(nnx.state(model))
    for path_in_model, variable in flat:
        variable.set_value(jnp.asarray(tensors[_name(path_in_model)], jnp.float32))
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def _parameters(model: Decoder) -> dict[str, np.ndarray]:
    return {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def _name(path: tuple) -> str:
    return ".".join(str(part) for part in path)
