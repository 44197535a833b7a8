"""GRPO: reinforce the decoder that plays Game of 24 by Tunix' learner, on rollouts by the engine.

    python examples/grpo_game24.py                     # 16 steps of 12 puzzles, 16 games of each
    python examples/grpo_game24.py --rollout vanilla   # the same learner on Tunix' own sampler

The decoder has learned from random games to play by the rules, and little more: half of their moves were any legal
ones. Now a game that reaches 24 is worth 1 and any other 0, and the learner makes games more likely that earn more than
the others of their puzzle. No puzzle comes twice, so rewards rise only if the decoder plays better in general.

The learner brings the engine new weights after each step. The first rollout compiles, the others do not. A prompt is
six tokens, which is little to share: here both ways of sampling are about as fast.

The method: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import game24
import numpy as np
from options import command, number
from tqdm import tqdm

if TYPE_CHECKING:
    from tunix.rl.grpo.grpo_learner import GRPOLearner

PROMPT_TOKENS, NEW_TOKENS = game24.PROMPT_TOKENS, game24.MAX_TOKENS - game24.PROMPT_TOKENS
LEARNING_RATE = 1e-4
PAGE_SIZE = 8


class Words:
    """A tokenizer as Tunix takes them: every symbol of `game24.text` is a token."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [game24.VOCABULARY.index(symbol) for symbol in text.replace("/", " / ").split()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return game24.text(tokens)

    def bos_id(self) -> int:
        """Return the token that Tunix puts before prompts."""
        return game24.BOS

    def eos_id(self) -> int:
        """Return the token that ends a game."""
        return game24.DONE

    def pad_id(self) -> int:
        """Return the token that fills rows up."""
        return game24.PAD


def prompt_of(puzzle: game24.Puzzle) -> str:
    """Return the text that poses a puzzle, `4 9 10 13 :`."""
    return game24.text(game24.encode_prompt(puzzle)[1:])


def rewards_of(prompts: Sequence[str], games: Sequence[str]) -> list[float]:
    """Return 1 for a game whose steps are correct and reach 24, 0 for any other."""
    puzzles = [tuple(map(int, prompt.split()[:-1])) for prompt in prompts]
    return [float(game24.solves(puzzle, Words().encode(game))) for puzzle, game in zip(puzzles, games, strict=True)]


class Report:
    """Times each rollout, and prints a row when its games have been rewarded."""

    def __init__(self) -> None:
        """Print the head of the table."""
        self.rewards: list[float] = []  # of each step, on average
        self._seconds = 0.0
        print("step   mean reward   seconds of rollout")

    def timed(self, generate: Callable) -> Callable:
        """Return a rollout's `generate` that notes how long it takes."""

        def generate_and_note(*arguments: object) -> object:
            start = time.perf_counter()
            output = generate(*arguments)
            self._seconds = time.perf_counter() - start
            return output

        return generate_and_note

    def reward(self, prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
        """Return the reward of each game, as the learner asks for it."""
        rewards = rewards_of(prompts, completions)
        self.rewards.append(sum(rewards) / len(rewards))
        tqdm.write(f"{len(self.rewards):4}   {self.rewards[-1]:11.3f}   {self._seconds:18.2f}")
        return rewards


def batches(puzzles: int, steps: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the prompts of each step; no puzzle comes twice."""
    posed = game24.split()[0]
    random.Random(seed).shuffle(posed)
    for step in range(steps):
        yield {"prompts": np.array([prompt_of(puzzle) for puzzle in posed[step * puzzles :][:puzzles]])}


def new_learner(arguments: argparse.Namespace, report: Report) -> GRPOLearner:
    """Return a learner of Tunix that begins with the shipped weights."""
    import game24_model
    import jax
    import optax
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from codec_jax.rollout import EngineRollout, Policy

    mesh = jax.sharding.Mesh(jax.devices()[:1], "fsdp")
    sizes = {"max_requests": arguments.puzzles * arguments.samples, "page_size": PAGE_SIZE}
    cluster_config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
        rollout_engine="vanilla" if arguments.rollout == "vanilla" else partial(EngineRollout, **sizes),
        rollout_config=RolloutConfig(
            max_prompt_length=PROMPT_TOKENS,
            max_tokens_to_generate=NEW_TOKENS,
            kv_cache_size=PROMPT_TOKENS + NEW_TOKENS,
            temperature=arguments.temperature,
            seed=arguments.seed,
        ),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE)),
            max_steps=arguments.steps,
            eval_every_n_steps=arguments.steps + 1,  # never
        ),
    )
    cluster = RLCluster(actor=Policy.of(game24_model.load()), tokenizer=Words(), cluster_config=cluster_config)
    cluster.rollout.generate = report.timed(cluster.rollout.generate)
    # Without a penalty for leaving the model of the beginning, there is no need to have that as well.
    return GRPOLearner(cluster, GRPOConfig(num_generations=arguments.samples, beta=0.0), report.reward)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print what each step earned."""
    parser = command(__doc__, temperature=1.0, least=0.01)
    parser.add_argument("--rollout", choices=("engine", "vanilla"), default="engine", help="default: %(default)s")
    parser.add_argument("--steps", type=number(int, 1, 50), default=16, help="default: %(default)s")
    parser.add_argument("--puzzles", type=number(int, 1, 25), default=12, help="of each step (default: %(default)s)")
    parser.add_argument("--samples", type=number(int, 2, 1000), default=16, help="games of each (default: %(default)s)")
    arguments = parser.parse_args(argv)
    games = arguments.puzzles * arguments.samples
    print(f"grpo_game24: plays {games} games a step, trains on them, and does so {arguments.steps} times", flush=True)
    report = Report()
    try:
        learner = new_learner(arguments, report)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "tunix":
            raise
        sys.exit("grpo_game24: needs Tunix: pip install codec-jax[rollout]")
    except (OSError, ValueError) as error:
        sys.exit(f"grpo_game24: {error}")
    learner.train(batches(arguments.puzzles, arguments.steps, arguments.seed))


if __name__ == "__main__":
    main()
