"""Train the Game of 24 decoder from scratch: a few minutes on one GPU.

The data are random games: half of the moves keep 24 in reach and half are any legal move, so that what the model
proposes is broad; half of the games are broken off to ask whether 24 is still in reach. The model thus learns to
propose steps and to judge states. The held-out puzzles are never prompts.

    python examples/train_game24.py --output examples/game24.safetensors
"""

import argparse
import time
from pathlib import Path

import game24
import game24_model
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from codec_jax.nnx import Decoder

PROMPT_TOKENS = len(game24.encode_prompt((1, 2, 3, 4)))


def loss_of(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of everything after the prompt."""
    logits = model(tokens[:, :-1])
    target = tokens[:, 1:]
    position = jnp.arange(target.shape[1])
    counted = (target != game24.PAD) & (position >= PROMPT_TOKENS - 1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    return jnp.where(counted, losses, 0.0).sum() / counted.sum()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: Decoder, optimizer: nnx.Optimizer, games: jax.Array, key: jax.Array, batch: jax.Array):
    """One AdamW step on a random batch of the games."""
    rows = jax.random.randint(key, batch.shape, 0, games.shape[0])
    loss, gradient = nnx.value_and_grad(loss_of)(model, games[rows].astype(jnp.int32))
    optimizer.update(model, gradient)
    return loss


def main() -> None:
    """Train and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=game24_model.WEIGHTS)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--games", type=int, default=3_000_000)
    parser.add_argument("--explore", type=float, default=0.5, help="share of moves that are random")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    training, held_out = game24.split()
    rng = np.random.default_rng(arguments.seed)
    start = time.perf_counter()
    parts = [
        game24.trajectories(rng, 100_000, training, unsolvable_share=0.1, explore=arguments.explore, ask=0.5).astype(
            np.uint8
        )
        for _ in tqdm(range(max(1, arguments.games // 100_000)), desc="games", unit_scale=0.1, unit="M")
    ]
    games = jnp.asarray(np.concatenate(parts))
    tests = jnp.asarray(
        game24.trajectories(rng, 4096, held_out, unsolvable_share=0.0, explore=arguments.explore, ask=0.5)
    )

    model = Decoder(game24_model.config(dtype=jnp.bfloat16), nnx.Rngs(arguments.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, arguments.learning_rate, arguments.steps // 20, arguments.steps)
    optimizer = nnx.Optimizer(
        model,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05)),
        wrt=nnx.Param,
    )
    batch, key = jnp.zeros(arguments.batch), jax.random.key(arguments.seed)
    evaluate = nnx.jit(loss_of)
    progress = tqdm(range(arguments.steps), desc="training")
    for step in progress:
        loss = train_step(model, optimizer, games, jax.random.fold_in(key, step), batch)
        if step % 500 == 0 or step == arguments.steps - 1:
            progress.write(f"step {step}  loss {loss:.4f}  held-out puzzles {evaluate(model, tests):.4f}")
    game24_model.save(model, arguments.output)
    print(f"wrote {arguments.output} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
