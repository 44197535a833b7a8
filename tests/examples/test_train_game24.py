"""The training of the model for Game of 24: its loss against a plain count, and weights that it writes."""

import re

import game24
import game24_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_game24
from flax import nnx

from codec_jax.nnx import Decoder, DecoderConfig


@pytest.fixture
def small_config(monkeypatch) -> None:
    """Sizes that train in no time; in float32, as JAX's own attention mixes dtypes, which tests refuse."""
    config = DecoderConfig(game24.VOCAB_SIZE, 64, 128, 1, 2, 1, 32, dtype=jnp.float32, param_dtype=jnp.float32)
    monkeypatch.setattr(game24_model, "config", lambda dtype=None: config)


def test_the_loss_is_the_mean_of_what_follows_the_prompts(small_config) -> None:
    training, _ = game24.split()
    games = game24.trajectories(np.random.default_rng(0), 6, training, unsolvable=0.2, explore=0.5, ask=0.5)
    model = Decoder(game24_model.config(), nnx.Rngs(0))
    losses = []
    for row, logits in zip(
        games, np.asarray(nnx.jit(type(model).__call__)(model, jnp.asarray(games)), np.float64), strict=True
    ):
        text = row[row != game24.PAD]
        chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        losses += [-np.log(chance[place - 1, text[place]]) for place in range(6, len(text))]
    assert float(nnx.jit(game24_model.loss_of)(model, jnp.asarray(games))) == pytest.approx(np.mean(losses), rel=1e-4)


def test_training_lowers_the_loss_and_writes_weights_that_load(small_config, tmp_path, capsys) -> None:
    file = tmp_path / "weights.safetensors"
    with jax.numpy_dtype_promotion("standard"):  # the optimizer mixes dtypes, which other tests refuse
        train_game24.main(["--output", str(file), "--steps", "60", "--batch", "16", "--games", "500"])
    output = capsys.readouterr()
    losses = [float(loss) for loss in re.findall(r"held-out puzzles ([\d.]+)", output.out)]
    assert losses[0] == pytest.approx(np.log(game24.VOCAB_SIZE), abs=0.6)  # knows nothing yet
    assert losses[-1] < losses[0] - 0.5
    _, held_out = game24.split()
    games = game24.trajectories(np.random.default_rng(5), 500, held_out, unsolvable=0.0, explore=0.5, ask=0.5)
    loss = float(nnx.jit(game24_model.loss_of)(game24_model.load(file), jnp.asarray(games)))
    assert loss == pytest.approx(losses[-1], abs=0.1)


@pytest.mark.parametrize("flags", [("--steps", "0"), ("--batch", "x"), ("--output", "none/w")], ids=" ".join)
def test_options_that_cannot_be_are_refused(flags, capsys) -> None:
    with pytest.raises(SystemExit):
        train_game24.main(["--output", "w", *flags])
    assert f"{flags[0]}: expected" in capsys.readouterr().err
