"""Self-consistency: sample several games of each puzzle, and take the answer that most of them reach.

    python examples/self_consistency.py                             # 20 puzzles of Game of 24, 32 samples of each
    python examples/self_consistency.py --puzzles 100 --samples 8

The samples of a puzzle share its prompt. And as long as two samples happen to say the same, they are one path of the
forest, too: after every few tokens, of those that are alike one goes on, and is forked into as many as there were. A
fork draws random numbers of its own, so the samples are as independent as ever.

An answer is the expression that a whole game amounts to; a game with a wrong step answers nothing. Nobody tells the
vote what is right; only the report is told.

The method: "Self-Consistency Improves Chain of Thought Reasoning in Language Models", ICLR 2023.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import game24
from options import command, number
from tqdm import tqdm

if TYPE_CHECKING:
    from codec_jax.nnx import Sampler
    from codec_jax.traffic import Traffic

PAGE_SIZE = 8
MAX_TOKENS = 72  # more than any game takes
INTERVAL = 4  # tokens after which samples that are alike become one path


def majority(answers: Sequence[str | None]) -> tuple[str | None, int]:
    """Return the answer that was given most often, the first such one, and how often; None stands for no answer."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0] if votes else (None, 0)


def sample(
    sampler: Sampler, puzzles: Sequence[game24.Puzzle], samples: int, temperature: float, seed: int
) -> tuple[list[list[list[int]]], Traffic]:
    """Return the tokens of `samples` games of each puzzle, and what decoding them read."""
    state = sampler.start([game24.encode_prompt(puzzle) for puzzle in puzzles for _ in range(samples)])
    games: list[list[list[int]]] = [[] for _ in puzzles]
    said = {request: (request // samples, ()) for request in state.requests}  # number of the puzzle, tokens so far
    with tqdm(total=len(said), desc="decode", unit="sample") as bar:
        for left in range(MAX_TOKENS, 0, -INTERVAL):  # a multiple of the interval
            state, new = sampler.decode(state, INTERVAL, stop_tokens=[game24.DONE], temperature=temperature, seed=seed)
            leaving, alike = [], defaultdict(list)
            for request in state.requests:
                puzzle, tokens = said[request]
                said[request] = puzzle, (*tokens, *new.tokens[request])
                if new.stopped[request] or left == INTERVAL:
                    games[puzzle].append(list(said[request][1]))
                    leaving.append(request)
                else:
                    alike[said[request]].append(request)
            bar.update(len(leaving))
            if not alike:
                break
            twins = [(one, twin) for one, *others in alike.values() for twin in others]
            state = sampler.prune(state, [*leaving, *(twin for _, twin in twins)])
            state, forks = sampler.fork(state, [one for one, _ in twins])
            said |= {fork: said[one] for fork, (one, _) in zip(forks, twins, strict=True)}
    return games, state.traffic


def main(argv: Sequence[str] | None = None) -> None:
    """Sample, vote, and report."""
    parser = command(__doc__, temperature=0.5, least=0.01)  # at 0 all samples of a puzzle would be the same
    parser.add_argument("--puzzles", type=number(int, 1, game24.HELD_OUT), default=20, help="held-out, up to 100")
    parser.add_argument("--samples", type=number(int, 1, 1000), default=32, help="games of each puzzle (default: 32)")
    arguments = parser.parse_args(argv)
    print(f"self_consistency: plays each puzzle {arguments.samples} times and takes a vote", flush=True)
    import game24_model

    from codec_jax.nnx import Sampler

    puzzles = game24.split()[1][: arguments.puzzles]
    requests = len(puzzles) * arguments.samples
    # A fork begins with a page of its own, so a path may take a page for every few tokens.
    num_pages = requests * (MAX_TOKENS // INTERVAL + 2)
    sizes = {"max_requests": requests, "num_pages": num_pages, "page_size": PAGE_SIZE, "max_context": 80}
    try:
        sampler = Sampler(game24_model.load(), **sizes, steps=INTERVAL)
    except (OSError, ValueError) as error:
        sys.exit(f"self_consistency: {error}")
    games, traffic = sample(sampler, puzzles, arguments.samples, arguments.temperature, arguments.seed)

    right, wins = [], 0
    for puzzle, played in zip(puzzles, games, strict=True):
        answers = [game24.answer_of_game(puzzle, tokens) for tokens in played]
        true = [answer for answer, tokens in zip(answers, played, strict=True) if game24.solves(puzzle, tokens)]
        winner, count = majority(answers)
        right.append(len(true))
        wins += winner in true
        verdict = f"{winner}  {'right' if winner in true else 'wrong'}" if winner else "no answer"
        print(f"{' '.join(map(str, puzzle)):>12}   {count:3} of {arguments.samples}   {verdict}")
    print(
        f"\none sample      right on {sum(right) / arguments.samples:.1f} of {len(puzzles)}, on average"
        f"\nmajority vote   right on {wins} of {len(puzzles)}"
        f"\nany sample      right on {len(right) - right.count(0)} of {len(puzzles)}, were there somebody to tell"
        f"\nKV tokens read  {traffic.kv_tokens_read:,}; without sharing {traffic.kv_tokens_unshared:,} "
        f"({traffic.kv_tokens_unshared / traffic.kv_tokens_read:.2f}x)"
    )


if __name__ == "__main__":
    main()
