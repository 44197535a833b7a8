"""Tree of thoughts on Game of 24: reach 24 from four numbers, by breadth-first search with a small decoder.

All open states of all puzzles are requests of one forest. At each depth every kept state is forked into several
proposals, the model writes one step for each and is then asked whether 24 is still in reach; the best states of each
puzzle stay and the rest are pruned. Whatever states have in common is stored once, and read once per step. The
comparison spends the same number of generated tokens on independent attempts.

    python examples/tree_of_thoughts.py                        # 20 puzzles that the model never saw
    python examples/tree_of_thoughts.py --puzzles 100
    python examples/tree_of_thoughts.py --numbers "4 6 7 9"

The method: "Tree of Thoughts: Deliberate Problem Solving with Large Language Models", NeurIPS 2023.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import game24
import game24_model
import jax
import numpy as np

from codec_jax.nnx import Decoding, Sampler

STEP_TOKENS = 24  # more than any step takes
HOPELESS = 0.01  # states judged below this are not worth a proposal
ATTEMPT_TOKENS = 32  # about what a whole game takes
STOP = (game24.END_OF_STEP, game24.DONE)


@dataclass(eq=False)
class Thought:
    """A state of one puzzle's game, as a node of its search tree."""

    puzzle: game24.Puzzle
    state: game24.State
    moves: tuple[game24.Move, ...] = ()
    score: float = 1.0  # the model's probability that 24 is still in reach
    request: int = -1
    kept: bool = True
    children: list[Thought] = field(default_factory=list)

    @property
    def solved(self) -> bool:
        """Whether this is 24, by arithmetic and with each number used once."""
        return self.state == (game24.TARGET,) and game24.check(self.puzzle, game24.expression(self.puzzle, self.moves))


@dataclass
class Search:
    """What the tree search found."""

    roots: list[Thought]
    solutions: dict[game24.Puzzle, Thought]
    tokens: dict[game24.Puzzle, int]  # generated for each puzzle: steps, and one verdict for each thought
    decoding: Decoding


def tree_search(
    sampler: Sampler,
    puzzles: Sequence[game24.Puzzle],
    *,
    breadth: int,
    proposals: int,
    temperature: float,
    seed: int,
) -> Search:
    """Search all puzzles at once, keeping `breadth` states of each and proposing `proposals` steps from each."""
    decoding = sampler.start([game24.encode_prompt(puzzle) for puzzle in puzzles])
    roots = [Thought(puzzle, puzzle, request=i) for i, puzzle in enumerate(puzzles)]
    search = Search(roots, {}, dict.fromkeys(puzzles, 0), decoding)
    frontier = roots
    for depth in range(3):
        # The same number of steps at every depth, which means more of them from each state where few were kept.
        each = proposals * breadth if depth == 0 else proposals
        parents = [thought for thought in frontier for _ in range(each)]
        # The state itself carries the first of its proposals, so only the others need a fork.
        decoding, forks = sampler.fork(decoding, [thought.request for thought in frontier for _ in range(each - 1)])
        new = iter(forks)
        requests = [next(new) if i else thought.request for thought in frontier for i in range(each)]
        decoding, generated = sampler.decode(
            decoding, STEP_TOKENS, stop_tokens=STOP, temperature=temperature, seed=seed + depth
        )
        seen: set[tuple[game24.Puzzle, game24.State]] = set()
        for parent, request in zip(parents, requests, strict=True):
            tokens = generated.tokens[request]
            search.tokens[parent.puzzle] += len(tokens)
            move = game24.read_step(parent.state, tokens)
            if move is None or (parent.puzzle, move.after) in seen:
                continue
            seen.add((parent.puzzle, move.after))
            parent.children.append(Thought(parent.puzzle, move.after, (*parent.moves, move), request=request))
        children = [child for parent in frontier for child in parent.children]
        decoding = _judge(sampler, decoding, children)
        for child in children:
            search.tokens[child.puzzle] += 1  # the verdict
        frontier = _best(frontier, breadth, search.solutions)
        keep = {thought.request for thought in frontier}
        decoding = sampler.prune(decoding, [request for request in decoding.requests if request not in keep])
        if not frontier:
            break
    search.decoding = decoding
    return search


def _judge(sampler: Sampler, decoding: Decoding, thoughts: list[Thought]) -> Decoding:
    """Ask the model of every thought whether 24 is still in reach; the question leaves no trace in the forest."""
    decoding, logits = sampler.peek(decoding, {thought.request: [game24.ASK] for thought in thoughts})
    verdicts = np.asarray(jax.nn.softmax(logits[:, [game24.LIVE, game24.DEAD]]))
    for thought in thoughts:
        thought.score = float(verdicts[thought.request, 0])
    return decoding


def _best(parents: list[Thought], breadth: int, solutions: dict[game24.Puzzle, Thought]) -> list[Thought]:
    """Choose the states to go on from: the best of each puzzle that is not solved yet. Notes solutions."""
    children: dict[game24.Puzzle, list[Thought]] = {}
    for parent in parents:
        children.setdefault(parent.puzzle, []).extend(parent.children)
    frontier = []
    for puzzle, thoughts in children.items():
        thoughts.sort(key=lambda thought: -thought.score)
        for thought in thoughts:
            thought.kept = False
            if thought.solved:
                solutions.setdefault(puzzle, thought)
        if puzzle in solutions:
            solutions[puzzle].kept = True
            continue
        open_thoughts = [thought for thought in thoughts if game24.moves(thought.state)]
        # A puzzle that looks hopeless altogether goes on with its best state.
        open_thoughts = [thought for thought in open_thoughts if thought.score > HOPELESS][:breadth] or open_thoughts[
            :1
        ]
        for thought in open_thoughts:
            thought.kept = True
        frontier.extend(open_thoughts)
    return frontier


def independent_attempts(
    sampler: Sampler, budget: dict[game24.Puzzle, int], *, temperature: float, seed: int
) -> tuple[set[game24.Puzzle], int]:
    """Sample whole games of each puzzle until its budget of tokens is spent; the last attempt may overrun it.

    Returns the puzzles that some attempt solved, and the tokens generated in the attempts that counted.
    """
    solved: set[game24.Puzzle] = set()
    spent = dict.fromkeys(budget, 0)
    attempt_seed = seed
    while waiting := [puzzle for puzzle in budget if spent[puzzle] < budget[puzzle]]:
        missing = max(budget[puzzle] - spent[puzzle] for puzzle in waiting)
        attempts = min(1 + missing // ATTEMPT_TOKENS, sampler.max_requests // len(waiting))
        for completion in sampler.generate(
            [game24.encode_prompt(puzzle) for puzzle in waiting],
            samples=attempts,
            max_new_tokens=3 * STEP_TOKENS,
            stop_tokens=[game24.DONE],
            temperature=temperature,
            seed=attempt_seed,
        ):
            puzzle = waiting[completion.prompt]
            if spent[puzzle] < budget[puzzle]:
                spent[puzzle] += len(completion.tokens)
                if _reaches_target(puzzle, completion.tokens):
                    solved.add(puzzle)
        attempt_seed += 1
    return solved, sum(spent.values())


def _reaches_target(puzzle: game24.Puzzle, tokens: list[int]) -> bool:
    """Whether the tokens are legal steps that end in 24."""
    thought = Thought(puzzle, puzzle)
    while tokens and not thought.solved:
        end = tokens.index(game24.END_OF_STEP) + 1 if game24.END_OF_STEP in tokens else len(tokens)
        move = game24.read_step(thought.state, tokens[:end])
        if move is None:
            return False
        thought = Thought(puzzle, move.after, (*thought.moves, move))
        tokens = tokens[end:]
    return thought.solved


def draw(thought: Thought, prefix: str = "", last: bool = True) -> str:
    """Draw a search tree: what was proposed, how the model judged it, and what was pruned."""
    numbers = " ".join(str(number) for number in thought.state)
    if not thought.moves:
        line, below = f"{numbers}\n", ""
    else:
        move = thought.moves[-1]
        step = f"{move.left} {move.operator} {move.right} = {move.result}"
        mark = "24!" if thought.solved else f"{thought.score:4.0%}{'' if thought.kept else '  pruned'}"
        line = f"{prefix}{'└─' if last else '├─'} {step:<16} → {numbers:<12} {mark}\n"
        below = prefix + ("   " if last else "│  ")
    return line + "".join(
        draw(child, below, i == len(thought.children) - 1) for i, child in enumerate(thought.children)
    )


def size(thought: Thought) -> int:
    """Count the states of a search tree."""
    return 1 + sum(size(child) for child in thought.children)


def parse_numbers(text: str) -> game24.Puzzle:
    """Read four numbers from 1 to 13. Raises argparse.ArgumentTypeError for anything else."""
    try:
        numbers = sorted(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        numbers = []
    if len(numbers) != 4 or not all(1 <= number <= 13 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected four whole numbers from 1 to 13, got {text!r}")
    return (numbers[0], numbers[1], numbers[2], numbers[3])


def main() -> None:
    """Play, and report."""
    held_out = game24.split()[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--puzzles", type=int, default=20, help="how many held-out puzzles to play, up to 100")
    what.add_argument("--numbers", type=parse_numbers, help='play this puzzle instead, such as "4 6 7 9"')
    parser.add_argument("--breadth", type=int, default=5, help="states of a puzzle that are kept at each depth")
    parser.add_argument("--proposals", type=int, default=4, help="steps that are proposed from each kept state")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, default=game24_model.WEIGHTS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if not 1 <= arguments.puzzles <= len(held_out):
        parser.error(f"--puzzles: expected 1 to {len(held_out)}, got {arguments.puzzles}")
    for name in ("breadth", "proposals"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(arguments, name)}")
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json: expected a file in an existing directory, got {arguments.json}")
    try:
        model = game24_model.load(arguments.weights)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"tree_of_thoughts: {error}")

    puzzles = [arguments.numbers] if arguments.numbers else held_out[: arguments.puzzles]
    max_requests = max(8, len(puzzles) * arguments.breadth * arguments.proposals)
    sampler = Sampler(
        model,
        max_requests=max_requests,
        num_pages=max_requests * 8,
        page_size=16,
        max_context=128,
        steps=8,
    )
    start = time.perf_counter()
    search = tree_search(
        sampler,
        puzzles,
        breadth=arguments.breadth,
        proposals=arguments.proposals,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    seconds = time.perf_counter() - start
    baseline, baseline_tokens = independent_attempts(
        sampler, search.tokens, temperature=arguments.temperature, seed=arguments.seed
    )

    solved_roots = [root for root in search.roots if root.puzzle in search.solutions]
    print(draw(max(solved_roots or search.roots, key=size)))
    for puzzle in puzzles:
        numbers = " ".join(map(str, puzzle))
        if puzzle in search.solutions:
            print(f"{numbers:>12}   {game24.expression(puzzle, search.solutions[puzzle].moves)} = 24")
        else:
            print(f"{numbers:>12}   no solution found")
    traffic = search.decoding.traffic
    figures = {
        "solved": len(search.solutions),
        "total": len(puzzles),
        "baseline_solved": len(baseline),
        "generated_tokens": sum(search.tokens.values()),
        "baseline_generated_tokens": baseline_tokens,
        "kv_tokens_read": traffic.kv_tokens_read,
        "kv_tokens_unshared": traffic.kv_tokens_unshared,
        "seconds": round(seconds, 3),
        "options": {name: getattr(arguments, name) for name in ("breadth", "proposals", "temperature", "seed")},
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }
    print(
        f"\ntree of thoughts     solved {figures['solved']} of {figures['total']}"
        f" with {figures['generated_tokens']} generated tokens, {seconds:.1f} s"
        f"\nindependent attempts solved {figures['baseline_solved']} of {figures['total']}"
        f" with {figures['baseline_generated_tokens']} generated tokens"
        f"\nKV tokens read       {figures['kv_tokens_read']:,}; without sharing {figures['kv_tokens_unshared']:,}"
        f" ({figures['kv_tokens_unshared'] / figures['kv_tokens_read']:.2f}x)"
    )
    if arguments.json:
        # A file of its own first, so that an interruption leaves no half-written result.
        draft = arguments.json.with_suffix(".part")
        draft.write_text(json.dumps(figures, indent=2) + "\n")
        draft.replace(arguments.json)


if __name__ == "__main__":
    main()
