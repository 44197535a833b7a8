"""The small decoder that plays Game of 24: its sizes, the file of its weights, and a step of training."""

from pathlib import Path

import game24
import jax
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
    # Sizes of vocabulary, hidden layer and MLP; numbers of layers, q heads and kv heads; head size.
    sizes = (game24.VOCAB_SIZE, 256, 768, 6, 4, 2, 64)
    return DecoderConfig(*sizes, dtype=dtype, param_dtype=jnp.float32)


def save(model: Decoder, path: Path) -> None:
    """Write the weights as bfloat16."""
    values = {name: np.asarray(each.get_value().astype(jnp.bfloat16)) for name, each in parameters(model).items()}
    save_file(values, path, metadata={"format": "codec-jax game24"})


def load(path: Path = WEIGHTS) -> Decoder:
    """Read weights for float32 inference. Raises FileNotFoundError, or ValueError for a file that does not fit."""
    if not path.is_file():
        way_out = "restore it from the repository or run examples/train_game24.py"
        raise FileNotFoundError(f"weights: expected a file at {path}, got none; {way_out}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"weights: {path} is truncated or no safetensors file: {error}") from error
    model = nnx.eval_shape(lambda: Decoder(config(), nnx.Rngs(0)))
    expected = {name: each.get_value().shape for name, each in parameters(model).items()}
    got = {name: value.shape for name, value in tensors.items()}
    wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    if wrong:
        details = ", ".join(f"{name} (expected {expected.get(name)}, got {got.get(name)})" for name in wrong)
        raise ValueError(f"weights: {path} does not fit the model: {details}")
    for name, each in parameters(model).items():
        each.set_value(jnp.asarray(tensors[name], jnp.float32))
    return model


def loss_of(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of everything after the prompts of some games."""
    game, logprobs = tokens[:, game24.PROMPT_TOKENS :], jax.nn.log_softmax(model(tokens[:, :-1]))
    of_game = jnp.take_along_axis(logprobs[:, game24.PROMPT_TOKENS - 1 :], game[..., None], axis=2)[..., 0]
    return -jnp.mean(of_game, where=game != game24.PAD)


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: Decoder, optimizer: nnx.Optimizer, games: jax.Array, rows: jax.Array) -> jax.Array:
    """One step on some of the games. Returns their loss."""
    loss, gradient = nnx.value_and_grad(loss_of)(model, games[rows].astype(jnp.int32))
    optimizer.update(model, gradient)
    return loss


def parameters(model: Decoder) -> dict[str, nnx.Variable]:
    """Return the model's own variables by name."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model))}
