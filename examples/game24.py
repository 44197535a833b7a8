"""Game of 24 as a language that a small transformer can learn from scratch.

Four numbers from 1 to 13, each used once, are to be combined with + - * ÷ to reach 24. A state is the
sorted tuple of the numbers that remain; a move replaces two of them by their result. A number is one token,
or three (p / q, in lowest terms) where it is not whole:

    prompt  <bos> 4 9 10 13 :
    step    13 - 9 = 4 , 4 4 10 ;        two operands, their result, and every number that remains
    end     <done>                       after the last step
    verdict ? <live>  or  ? <dead>       in place of what would follow: can 24 still be reached from here?

A model of this language both proposes steps and, asked with "?", judges the states that they lead to.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

import numpy as np

Number = int | Fraction  # an integral value is an int, which also hashes much faster than a Fraction
State = tuple[Number, ...]
Puzzle = tuple[int, ...]

TARGET = 24
HELD_OUT = 100  # puzzles that training never poses
MAX_NUMBER = 169  # 13 * 13: the smallest bound on numerators and denominators that keeps all 1362 solvable

VOCABULARY: tuple[str, ...] = (
    *("<pad>", "<bos>", "<done>", "?", "<live>", "<dead>"),
    *(":", ";", ",", "=", "+", "-", "*", "÷", "/"),
    *(str(number) for number in range(MAX_NUMBER + 1)),
)
VOCAB_SIZE = len(VOCABULARY)
_TOKEN = {symbol: token for token, symbol in enumerate(VOCABULARY)}
PAD, BOS, DONE, ASK, LIVE, DEAD = range(6)  # the first six of the vocabulary
END_OF_PROMPT, END_OF_STEP = _TOKEN[":"], _TOKEN[";"]

PROMPT_TOKENS, MAX_TOKENS = 6, 56  # of every puzzle, and of the longest trajectory


class Move(NamedTuple):
    """One legal step: `left operator right = result`, which leaves the numbers `after`."""

    left: Number
    operator: str
    right: Number
    result: Number
    after: State


def puzzles() -> list[Puzzle]:
    """All 1820 puzzles, each sorted; 1362 can be solved."""
    return list(combinations_with_replacement(range(1, 14), 4))


@cache
def moves(state: State) -> tuple[Move, ...]:
    """The legal moves from a sorted state, each once. Of two awkward fractions there may be none below MAX_NUMBER."""
    found = []
    for low, high in dict.fromkeys(combinations(state, 2)):
        rest = list(state)
        rest.remove(low)
        rest.remove(high)
        found += [Move(*operation, tuple(sorted([*rest, operation[-1]]))) for operation in _operations(low, high)]
    return tuple(found)


@cache
def _operations(low: Number, high: Number) -> list[tuple[Number, str, Number, Number]]:
    """What a pair can become. No difference is negative: a solution never needs one that is."""
    candidates = [(high, "+", low, high + low), (high, "-", low, high - low), (high, "*", low, high * low)]
    if low != 0:
        candidates.append((high, "÷", low, Fraction(high, low)))
    if low != high:  # hence high is not 0
        candidates.append((low, "÷", high, Fraction(low, high)))
    return [
        (left, symbol, right, result.numerator if result.denominator == 1 else result)
        for left, symbol, right, result in candidates
        if max(result.numerator, result.denominator) <= MAX_NUMBER
    ]


@cache
def solvable(state: State) -> bool:
    """Whether some sequence of legal moves leads from the state to 24 alone."""
    if len(state) == 1:
        return state[0] == TARGET
    if len(state) == 2:  # most states that there are: without a move for each
        return any(result == TARGET for *_, result in _operations(*state))
    return any(solvable(move.after) for move in moves(state))


def solving_moves(state: State) -> tuple[Move, ...]:
    """The legal moves that keep 24 within reach."""
    return tuple(move for move in moves(state) if solvable(move.after))


def split(held_out: int = HELD_OUT, seed: int = 24) -> tuple[list[Puzzle], list[Puzzle]]:
    """The solvable puzzles as (training, held out): the same for a seed on any machine."""
    # Random.random is the one draw that Python promises never to change, so it alone sets the order.
    dice = random.Random(seed)
    shuffled = sorted(filter(solvable, puzzles()), key=lambda _: dice.random())
    return shuffled[held_out:], shuffled[:held_out]


def encode_prompt(puzzle: Puzzle) -> list[int]:
    """The tokens that pose a sorted puzzle, up to and including ":"."""
    return [BOS, *_encode_numbers(puzzle), END_OF_PROMPT]


def encode_move(move: Move) -> list[int]:
    """The tokens of one step, up to and including ";"."""
    left, right, result, after = map(_encode_numbers, ([move.left], [move.right], [move.result], move.after))
    return [*left, _TOKEN[move.operator], *right, _TOKEN["="], *result, _TOKEN[","], *after, END_OF_STEP]


def _encode_numbers(numbers: Iterable[Number]) -> list[int]:
    tokens = []
    for number in numbers:
        tokens.append(_TOKEN[str(number.numerator)])
        if number.denominator != 1:
            tokens += [_TOKEN["/"], _TOKEN[str(number.denominator)]]
    return tokens


def text(tokens: Iterable[int]) -> str:
    """The tokens for a reader, without padding: `8 ÷ 3 = 8/3 , 1 8/3 9 ;`."""
    return " ".join(VOCABULARY[token] for token in tokens if token != PAD).replace(" / ", "/")


def read_step(state: State, tokens: Sequence[int]) -> Move | None:
    """The move that a generated step, ";" included, makes from the state; None unless it is exactly right."""
    return _readings(state).get(tuple(tokens))


@cache
def _readings(state: State) -> dict[tuple[int, ...], Move]:
    """Every correct step from the state; sums and products may name their operands in either order."""
    readings = {}
    for move in moves(state):
        readings[tuple(encode_move(move))] = move
        if move.operator in "+*":
            readings[tuple(encode_move(move._replace(left=move.right, right=move.left)))] = move
    return readings


def read_game(puzzle: Puzzle, tokens: Sequence[int]) -> tuple[list[Move], list[int]]:
    """The correct steps that a game begins with, and its tokens from the first one that is not: wrong or unfinished."""
    game, rest = [], list(tokens)
    while END_OF_STEP in rest:
        end = rest.index(END_OF_STEP) + 1
        move = read_step(game[-1].after if game else puzzle, rest[:end])
        if move is None:
            break
        game, rest = [*game, move], rest[end:]
    return game, rest


def next_tokens(puzzle: Puzzle, tokens: Sequence[int]) -> Counter[int]:
    """What may follow a game so far by the rules, and in how many correct steps; nothing after a wrong one."""
    game, rest = read_game(puzzle, tokens)
    if len(game) == 3:
        return Counter([] if rest else [DONE])
    steps = _readings(game[-1].after if game else puzzle)
    return Counter(step[len(rest)] for step in steps if list(step[: len(rest)]) == rest and len(step) > len(rest))


def expression(puzzle: Puzzle, moves: Iterable[Move]) -> str:
    """Three moves from the puzzle as one expression, such as `(10 - 4) * (13 - 9)`."""
    numbers: list[Number] = list(puzzle)
    written = [str(number) for number in puzzle]

    def take(number: Number) -> str:
        place = numbers.index(number)
        del numbers[place]
        return written.pop(place)

    for move in moves:
        written.append(f"({take(move.left)} {move.operator} {take(move.right)})")
        numbers.append(move.result)
    return written[0][1:-1].replace("÷", "/")


def answer_of_game(puzzle: Puzzle, tokens: Sequence[int]) -> str | None:
    """What the tokens of a game amount to, such as `(10 - 4) * (13 - 9)`; None if a step is wrong or missing."""
    game, _ = read_game(puzzle, tokens)
    return expression(puzzle, game) if len(game) == 3 else None


def solves(puzzle: Puzzle, tokens: Sequence[int]) -> bool:
    """Whether the tokens of a game are correct steps to 24, each number used once."""
    game, _ = read_game(puzzle, tokens)
    return len(game) == 3 and game[-1].after == (TARGET,)


def trajectories(
    rng: np.random.Generator, count: int, posed: Sequence[Puzzle], *, unsolvable: float, explore: float, ask: float
) -> np.ndarray:
    """Random games as int32 tokens [count, MAX_TOKENS], padded with PAD.

    A game poses one of the puzzles `posed` or, with probability `unsolvable`, one that has no solution. Each step is a
    uniformly random legal move with probability `explore`, otherwise a uniformly random one that keeps 24 in reach,
    where there is one. With probability `ask` the game is broken off after a random number of steps for a verdict;
    otherwise it is played to its end, won or lost.
    """
    # Held-out puzzles are never posed, but games from other puzzles may pass through the same three numbers.
    # That is meant: what is held out is the puzzle, not the arithmetic that lies beneath it.
    dice = random.Random(int(rng.integers(2**63)))  # for single draws, far faster than a Generator
    hopeless = [puzzle for puzzle in puzzles() if not solvable(puzzle)]
    tokens = np.full((count, MAX_TOKENS), PAD, dtype=np.int32)
    for row in tokens:
        state: State = dice.choice(hopeless if dice.random() < unsolvable else posed)
        game, asked = encode_prompt(state), dice.random() < ask
        for _ in range(dice.randrange(4) if asked else 3):
            if choices := _steps(state, dice.random() >= explore):
                step, state = dice.choice(choices)
                game += step
        game += [ASK, LIVE if solvable(state) else DEAD] if asked else [DONE]
        row[: len(game)] = game
    return tokens


@cache
def _steps(state: State, solving: bool) -> list[tuple[list[int], State]]:
    """The encoded moves from a state and where each leads, kept because a million games repeat them."""
    choices = solving_moves(state) if solving and solvable(state) else moves(state)
    return [(encode_move(move), move.after) for move in choices]
