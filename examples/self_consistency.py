"""Self-consistency: sample several chains of reasoning for each question, and take the answer that most of them reach.

The samples of a question share its prompt, which is prefilled once and read once per step for all of them. Without
--model, the questions are puzzles of Game of 24 that the small decoder of `game24_model` never saw. An answer is the
expression that a whole game amounts to, so games that make the same steps in another order vote for the same answer,
and a game with an illegal step answers nothing. Nobody tells the vote what is right; only the report is told. Since a
puzzle is a prompt of six tokens, these runs show what voting brings, not what sharing saves.

With --model, the questions are texts, one a line, and an answer is the last number that a sample mentions.

    python examples/self_consistency.py                             # 20 puzzles, 32 samples of each
    python examples/self_consistency.py --puzzles 100 --samples 8
    python examples/self_consistency.py --model DIR --questions questions.txt

The method: "Self-Consistency Improves Chain of Thought Reasoning in Language Models", ICLR 2023.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path

import game24
import game24_model
import jax.numpy as jnp
from tqdm import tqdm

from codec_jax import Forest
from codec_jax.nnx import Decoder, Sampler, open_checkpoint
from codec_jax.traffic import Traffic

PAGE_SIZE = 16
PROMPT = "Question: {question}\nAnswer: Let us think step by step."
NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


@dataclass(frozen=True)
class Task:
    """Questions, and how to read what a model says to them; its weights are still to come."""

    questions: list[str]
    prompts: list[list[int]]
    answer: Callable[[int, list[int]], str | None]  # of a question's number and a sample's tokens
    right: Callable[[int, str], bool] | None  # whether an answer is; None if nobody knows
    load: Callable[[], Decoder]
    stop_tokens: tuple[int, ...]
    max_new_tokens: int


def majority(answers: Sequence[str | None]) -> tuple[str | None, int]:
    """Return the answer that was given most often, the first such one, and how often it was given.

    None stands for no answer and gets no votes; (None, 0) if there is nothing else.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0] if votes else (None, 0)


def last_number(text: str) -> str | None:
    """Return the last number of a text in plain digits, so that 1,200 and 1200.0 are one answer; None without any.

    A model that was not taught to stop goes on with a question of its own, which does not count.
    """
    numbers = NUMBER.findall(text.split("\nQuestion:")[0])
    return format(Decimal(numbers[-1].replace(",", "")).normalize() + 0, "f") if numbers else None


def result_of_game(puzzle: game24.Puzzle, tokens: Sequence[int]) -> str | None:
    """Return what a game amounts to, such as (10 - 4) * (13 - 9); None if a step is illegal or missing."""
    state: game24.State = puzzle
    moves = []
    tokens = list(tokens)
    while len(state) > 1:
        end = tokens.index(game24.END_OF_STEP) + 1 if game24.END_OF_STEP in tokens else 0
        move = game24.read_step(state, tokens[:end])
        if move is None:
            return None
        moves.append(move)
        state, tokens = move.after, tokens[end:]
    return game24.expression(puzzle, moves)


def game24_task(count: int) -> Task:
    """Return puzzles that the shipped model never saw. Raises what `game24_model.load` raises."""
    puzzles = game24.split()[1][:count]
    return Task(
        questions=[" ".join(map(str, puzzle)) for puzzle in puzzles],
        prompts=[game24.encode_prompt(puzzle) for puzzle in puzzles],
        answer=lambda question, tokens: result_of_game(puzzles[question], tokens),
        right=lambda question, answer: game24.check(puzzles[question], answer),
        load=game24_model.load,
        stop_tokens=(game24.DONE,),
        max_new_tokens=72,  # more than any game takes
    )


def text_task(directory: Path, file: Path, max_new_tokens: int, dtype: str) -> Task:
    """Return the questions of a file for a checkpoint.

    Raises ValueError for a file that is missing or empty, or a question too long for the model, and what
    `open_checkpoint` raises.
    """
    try:
        questions = [line for line in map(str.strip, file.read_text("utf-8").splitlines()) if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--questions: expected a file of UTF-8 text, got {file}: {error}") from error
    if not questions:
        raise ValueError(f"--questions: expected a question in each line, got {file}, which has none")
    checkpoint = open_checkpoint(directory)
    prompts = [checkpoint.tokenizer.encode(PROMPT.format(question=question)).ids for question in questions]
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > checkpoint.max_context:
        raise ValueError(
            f"--questions: expected at most {checkpoint.max_context} tokens of question and answer, which the model "
            f"was made for, got {longest}; shorten the question, or --max-new-tokens"
        )

    def answer(_: int, tokens: list[int]) -> str | None:
        return last_number(checkpoint.tokenizer.decode(tokens, skip_special_tokens=True))

    load = partial(checkpoint.load, jnp.dtype(dtype), progress=True)
    return Task(questions, prompts, answer, None, load, checkpoint.stop_tokens, max_new_tokens)


def sample(task: Task, samples: int, temperature: float, seed: int) -> tuple[list[list[str | None]], Traffic]:
    """Return the answers of `samples` samples of each question, and what decoding them read."""
    prompts = [prompt for prompt in task.prompts for _ in range(samples)]
    pages_of_prompts = len(Forest.from_sequences(prompts, page_size=PAGE_SIZE).used_pages)
    sampler = Sampler(
        task.load(),
        max_requests=len(prompts),
        num_pages=pages_of_prompts + len(prompts) * -(-task.max_new_tokens // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_context=max(map(len, prompts)) + task.max_new_tokens,
    )
    state = sampler.start(prompts, progress=True)
    with tqdm(total=len(prompts), desc="decode", unit="sample") as bar:
        state, generated = sampler.decode(
            state,
            task.max_new_tokens,
            stop_tokens=task.stop_tokens,
            temperature=temperature,
            seed=seed,
            on_tokens=lambda _, new: bar.update(new[-1] in task.stop_tokens),
        )
        bar.update(len(prompts) - bar.n)  # those that ran into max_new_tokens
    answers = [
        [task.answer(question, generated.tokens[question * samples + i]) for i in range(samples)]
        for question in range(len(task.prompts))
    ]
    return answers, state.traffic


def add_task_arguments(parser: argparse.ArgumentParser, samples: int) -> None:
    """Add what says which questions are answered, by which model, how often and how."""
    held_out = len(game24.split()[1])
    parser.add_argument("--puzzles", type=int, default=20, help=f"held-out puzzles, up to {held_out} (default: 20)")
    parser.add_argument("--model", type=Path, help="directory of a checkpoint, to answer --questions instead")
    parser.add_argument("--questions", type=Path, help="text file with one question a line, for --model")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="tokens of a sample of --model (default: 256)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of --model")
    parser.add_argument("--samples", type=int, default=samples, help=f"samples of each question (default: {samples})")
    parser.add_argument("--temperature", type=float, default=0.5, help="default: 0.5")
    parser.add_argument("--seed", type=int, default=0)


def check_task_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Stop at what `add_task_arguments` cannot mean; which temperatures make sense is left to the caller."""
    held_out = len(game24.split()[1])
    if not 1 <= arguments.puzzles <= held_out:
        parser.error(f"--puzzles: expected 1 to {held_out}, got {arguments.puzzles}")
    for name in ("samples", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(arguments, name)}")
    if (arguments.model is None) != (arguments.questions is None):
        parser.error("--model: expected it together with --questions, got one without the other")


def task_of(arguments: argparse.Namespace) -> Task:
    """Return the puzzles or the questions that were asked for. Raises OSError or ValueError for files that are bad."""
    if arguments.model is None:
        return game24_task(arguments.puzzles)
    return text_task(arguments.model, arguments.questions, arguments.max_new_tokens, arguments.dtype)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser, samples=32)
    arguments = parser.parse_args(argv)
    check_task_arguments(parser, arguments)
    if not 0.0 < arguments.temperature < math.inf:
        # At 0 all samples of a question would be the same.
        parser.error(f"--temperature: expected a finite number above 0, got {arguments.temperature}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Sample, vote, and report."""
    arguments = parse(argv)
    try:
        task = task_of(arguments)
        answers, traffic = sample(task, arguments.samples, arguments.temperature, arguments.seed)
    except (OSError, ValueError) as error:
        sys.exit(f"self_consistency: {error}")

    votes = [majority(given) for given in answers]
    for question, (text, (winner, count)) in enumerate(zip(task.questions, votes, strict=True)):
        verdict = ""
        if task.right is not None and winner is not None:
            verdict = "  right" if task.right(question, winner) else "  wrong"
        print(f"{text:>12}   {count:3} of {arguments.samples}   {winner or 'no answer'}{verdict}")
    if task.right is not None:
        right = [
            [answer is not None and task.right(question, answer) for answer in given]
            for question, given in enumerate(answers)
        ]
        won = sum(winner is not None and task.right(question, winner) for question, (winner, _) in enumerate(votes))
        total = len(answers)
        print(
            f"\none sample      right on {sum(map(sum, right)) / arguments.samples:.1f} of {total}, on average"
            f"\nmajority vote   right on {won} of {total}"
            f"\nany sample      right on {sum(map(any, right))} of {total}, were there somebody to tell"
        )
    print(
        f"\nKV tokens read  {traffic.kv_tokens_read:,}; without sharing {traffic.kv_tokens_unshared:,} "
        f"({traffic.kv_tokens_unshared / traffic.kv_tokens_read:.2f}x)"
    )


if __name__ == "__main__":
    main()
