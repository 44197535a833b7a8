"""Train the Game of 24 decoder from scratch: a few minutes on one GPU.

    python examples/train_game24.py --output game24.safetensors

The data are random games: half of the moves keep 24 in reach and half are any legal move, so that what the model
proposes is broad; half of the games are broken off to ask whether 24 is still in reach. The model thus learns to
propose steps and to judge states. The held-out puzzles are never prompts.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial

import game24
import numpy as np
from options import new_file, number
from tqdm import tqdm


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=new_file, required=True, help="examples/game24.safetensors are shipped")
    parser.add_argument("--steps", type=number(int, 1), default=4500, help="default: %(default)s")
    parser.add_argument("--batch", type=number(int, 1), default=2048, help="games in a step (default: %(default)s)")
    parser.add_argument("--games", type=number(int, 1), default=3_000_000, help="default: %(default)s")
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), default=0, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    steps, start = arguments.steps, time.perf_counter()
    print(f"train_game24: makes {arguments.games:,} random games and trains for {steps:,} steps", flush=True)
    import jax
    import optax
    from flax import nnx
    from game24_model import config, loss_of, save, train_step

    from codec_jax.nnx import Decoder

    training, held_out = game24.split()
    play = partial(game24.trajectories, np.random.default_rng(arguments.seed), explore=0.5, ask=0.5)
    with tqdm(total=arguments.games, desc="games", unit="game") as bar:
        parts = []
        while bar.n < arguments.games:
            parts.append(play(min(100_000, arguments.games - bar.n), training, unsolvable=0.1).astype(np.uint8))
            bar.update(len(parts[-1]))
    games, tests = jax.numpy.asarray(np.concatenate(parts)), play(min(4096, arguments.games), held_out, unsolvable=0.0)
    model = Decoder(config(dtype=jax.numpy.bfloat16), nnx.Rngs(arguments.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 20, steps)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))
    optimizer, key = nnx.Optimizer(model, adam, wrt=nnx.Param), jax.random.key(arguments.seed)
    evaluate = nnx.jit(loss_of)
    for step in (progress := tqdm(range(steps), desc="training", unit="step")):
        rows = jax.random.randint(jax.random.fold_in(key, step), arguments.batch, 0, len(games))
        loss = train_step(model, optimizer, games, rows)
        if step % 500 == 0 or step == steps - 1:
            progress.write(f"step {step}  loss {loss:.4f}  held-out puzzles {evaluate(model, tests):.4f}")
    save(model, arguments.output)
    print(f"wrote {arguments.output} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
