"""Tree of thoughts on Game of 24: reach 24 from four numbers, by breadth-first search with a small decoder.

    python examples/tree_of_thoughts.py                        # 20 puzzles that the model never saw; half a minute
    python examples/tree_of_thoughts.py --puzzles 100
    python examples/tree_of_thoughts.py --numbers 4 6 7 9

All open states of all puzzles are requests of one forest. At each depth every kept state is forked into several
proposals, the model writes one step for each and is then asked whether 24 is still in reach; the best states of each
puzzle stay and the rest are pruned. The comparison spends the same number of generated tokens on independent attempts.

The method: "Tree of Thoughts: Deliberate Problem Solving with Large Language Models", NeurIPS 2023.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import game24
import numpy as np
from options import command, new_file, number

if TYPE_CHECKING:
    from codec_jax.nnx import Decoding, Sampler

STEP_TOKENS = 24  # more than any step takes
HOPELESS = 0.01  # states judged below this are not worth a proposal
GAME_TOKENS = 32  # about what a whole game takes
STEPS = 4  # tokens between two looks at the proposals
STOP = (game24.END_OF_STEP, game24.DONE)


@dataclass(eq=False)
class Thought:
    """A state of one puzzle's game, as a node of its search tree."""

    puzzle: game24.Puzzle
    state: game24.State
    steps: list[int] = field(default_factory=list)  # tokens that lead to it, the prompt left out
    solved: bool = False
    score: float = 1.0  # the model's probability that 24 is still in reach
    request: int = -1
    kept: bool = True
    children: list[Thought] = field(default_factory=list)


@dataclass
class Search:
    """What the tree search found."""

    roots: list[Thought]
    tokens: dict[game24.Puzzle, int]  # generated for each puzzle: steps, and one verdict for each thought
    decoding: Decoding
    solutions: dict[game24.Puzzle, Thought] = field(default_factory=dict)


def tree_search(
    sampler: Sampler, puzzles: Sequence[game24.Puzzle], *, breadth: int, proposals: int, temperature: float, seed: int
) -> Search:
    """Search all puzzles at once, keeping `breadth` states of each and proposing `proposals` steps from each."""
    decoding = sampler.start([game24.encode_prompt(puzzle) for puzzle in puzzles])
    frontier = [Thought(puzzle, puzzle, request=i) for i, puzzle in enumerate(puzzles)]
    search = Search(frontier, dict.fromkeys(puzzles, 0), decoding)
    for depth in range(3):
        # The same number of steps at every depth, which means more of them from each state where few were kept.
        each = proposals * breadth if depth == 0 else proposals
        # The state itself carries the first of its proposals, so only the others need a fork.
        decoding, forks = sampler.fork(decoding, [thought.request for thought in frontier for _ in range(each - 1)])
        new = iter(forks)
        proposed = [(thought, next(new) if i else thought.request) for thought in frontier for i in range(each)]
        sampling = {"stop_tokens": STOP, "temperature": temperature, "seed": (seed + depth) % 2**32}
        decoding, generated = sampler.decode(decoding, STEP_TOKENS, **sampling)
        thoughts: dict[tuple[game24.Puzzle, game24.State], Thought] = {}
        for parent, request in proposed:
            step = generated.tokens[request]
            search.tokens[parent.puzzle] += len(step)
            move = game24.read_step(parent.state, step)
            if move is not None and (parent.puzzle, move.after) not in thoughts:
                solved = move.after == (game24.TARGET,)
                thought = Thought(parent.puzzle, move.after, parent.steps + step, solved, request=request)
                thoughts[parent.puzzle, move.after] = thought
                parent.children.append(thought)
        # The question leaves no trace in the forest.
        decoding, logits = sampler.peek(decoding, {thought.request: [game24.ASK] for thought in thoughts.values()})
        live, dead = np.asarray(logits, np.float64)[:, [game24.LIVE, game24.DEAD]].T
        for thought in thoughts.values():
            thought.score = float(1 / (1 + np.exp(dead[thought.request] - live[thought.request])))
            search.tokens[thought.puzzle] += 1  # the verdict
        frontier = _best(frontier, breadth, search.solutions)
        print(
            f"step {depth + 1} of 3: {len(proposed):,} proposed, {len(thoughts):,} correct and different, "
            f"{len(frontier):,} kept; {len(search.solutions)} of {len(puzzles)} puzzles solved",
            flush=True,
        )
        keep = {thought.request for thought in frontier}
        decoding = sampler.prune(decoding, [request for request in decoding.requests if request not in keep])
        if not frontier:
            break
    search.decoding = decoding
    return search


def _best(parents: list[Thought], breadth: int, solutions: dict[game24.Puzzle, Thought]) -> list[Thought]:
    """Choose the states to go on from: the best of each puzzle that is not solved yet. Notes solutions."""
    children: dict[game24.Puzzle, list[Thought]] = {}
    for parent in parents:
        children.setdefault(parent.puzzle, []).extend(parent.children)
    frontier = []
    for puzzle, thoughts in children.items():
        thoughts.sort(key=lambda thought: -thought.score)
        chosen = [thought for thought in thoughts if thought.solved][:1]
        if chosen:
            solutions[puzzle] = chosen[0]
        else:
            playable = [thought for thought in thoughts if game24.moves(thought.state)]
            # A puzzle that looks hopeless altogether goes on with its best state.
            chosen = [thought for thought in playable if thought.score > HOPELESS][:breadth] or playable[:1]
            frontier += chosen
        for thought in thoughts:
            thought.kept = thought in chosen
    return frontier


def independent_attempts(
    sampler: Sampler, budget: dict[game24.Puzzle, int], *, temperature: float, seed: int
) -> tuple[set[game24.Puzzle], int]:
    """Sample games of each puzzle until its budget is spent. Returns the puzzles solved, and the tokens spent."""
    solved, left = set(), dict(budget)
    while waiting := [puzzle for puzzle in budget if left[puzzle] > 0]:
        for completion in sampler.generate(
            [game24.encode_prompt(puzzle) for puzzle in waiting],
            samples=min(1 + max(left.values()) // GAME_TOKENS, sampler.max_requests // len(waiting)),
            max_new_tokens=3 * STEP_TOKENS,
            stop_tokens=[game24.DONE],
            temperature=temperature,
            seed=seed,
        ):
            puzzle = waiting[completion.prompt]
            if left[puzzle] > 0:
                left[puzzle] -= len(completion.tokens)
                if game24.solves(puzzle, completion.tokens):
                    solved.add(puzzle)
        seed = (seed + 1) % 2**32
    return solved, sum(budget.values()) - sum(left.values())


def draw(thought: Thought, prefix: str = "", last: bool = True) -> str:
    """Draw a search tree: what was proposed, how the model judged it, and what was pruned; the best comes first."""
    line, below = f"{' '.join(map(str, thought.puzzle))}\n", ""
    if thought.steps:
        *_, step = game24.text(thought.steps).rstrip(" ;").split(";")
        step, numbers = step.split(",")
        mark = "24!" if thought.solved else f"{thought.score:4.0%}{'' if thought.kept else '  pruned'}"
        line = f"{prefix}{'└─' if last else '├─'} {step.strip():<16} → {numbers.strip():<12} {mark}\n"
        below = prefix + ("   " if last else "│  ")
    children = sorted(thought.children, key=lambda child: (not child.kept, -child.score))
    return line + "".join(draw(child, below, child is children[-1]) for child in children)


def new_sampler(puzzles: int, breadth: int, proposals: int) -> Sampler:
    """Return a sampler of the shipped model for so large a search. Raises what `game24_model.load` raises."""
    import game24_model

    from codec_jax.nnx import Sampler

    requests = max(8, puzzles * breadth * proposals)
    sizes = {"max_requests": requests, "num_pages": requests * 8, "page_size": 16, "max_context": 128}
    return Sampler(game24_model.load(), **sizes, steps=STEPS)


def main(argv: Sequence[str] | None = None) -> None:
    """Play, and report."""
    parser = command(__doc__, temperature=0.7)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--puzzles", type=number(int, 1, game24.HELD_OUT), default=20, help="held-out, up to 100")
    what.add_argument("--numbers", type=number(int, 1, 13), nargs=4, help="play this puzzle instead")
    parser.add_argument("--breadth", type=number(int, 1, 100), default=5, help="states of a puzzle kept at each depth")
    parser.add_argument("--proposals", type=number(int, 1, 100), default=4, help="steps proposed from each kept state")
    parser.add_argument("--json", type=new_file, help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    print("tree_of_thoughts: searches for ways to 24, then spends as many tokens on independent attempts", flush=True)
    import jax

    puzzles = [tuple(sorted(arguments.numbers))] if arguments.numbers else game24.split()[1][: arguments.puzzles]
    try:
        sampler = new_sampler(len(puzzles), arguments.breadth, arguments.proposals)
    except (OSError, ValueError) as error:
        sys.exit(f"tree_of_thoughts: {error}")
    sampling = {"temperature": arguments.temperature, "seed": arguments.seed}
    options = {"breadth": arguments.breadth, "proposals": arguments.proposals, **sampling}
    start = time.perf_counter()
    search = tree_search(sampler, puzzles, **options)
    seconds = time.perf_counter() - start
    print("as many tokens for independent attempts ...\n", flush=True)
    baseline, baseline_tokens = independent_attempts(sampler, search.tokens, **sampling)

    for root in search.roots:
        found = search.solutions.get(root.puzzle)
        solution = f"{game24.answer_of_game(root.puzzle, found.steps)} = 24" if found else "no solution found"
        print(f"{' '.join(map(str, root.puzzle)):>12}   {solution}")
    trees = [draw(root) for root in search.roots if root.puzzle in search.solutions]
    print("\n" + max(trees or [draw(search.roots[0])], key=len))
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
        "options": options,
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }
    print(
        f"tree of thoughts      solved {len(search.solutions)} of {len(puzzles)} with {sum(search.tokens.values()):,} "
        f"generated tokens\nindependent attempts  solved {len(baseline)} of {len(puzzles)} with {baseline_tokens:,}\n"
        f"KV tokens read        {traffic.kv_tokens_read:,}; without sharing {traffic.kv_tokens_unshared:,} "
        f"({traffic.kv_tokens_unshared / traffic.kv_tokens_read:.2f}x)"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
