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

import ast
import operator
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import combinations, combinations_with_replacement

import numpy as np

Number = int | Fraction  # an integral value is an int, which also hashes much faster than a Fraction
State = tuple[Number, ...]
Puzzle = tuple[int, ...]

TARGET = 24
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

MAX_TOKENS = 56  # no trajectory is longer


# --- The game -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """One legal step: `left operator right = result`, which leaves the numbers `after`."""

    left: Number
    operator: str
    right: Number
    result: Number
    after: State


def puzzles() -> list[Puzzle]:
    """All 1820 puzzles, each sorted, of which 1362 can be solved."""
    return list(combinations_with_replacement(range(1, 14), 4))


@cache
def moves(state: State) -> tuple[Move, ...]:
    """The legal moves from a sorted state, each listed once even where numbers repeat.

    There may be none: two awkward fractions can exceed MAX_NUMBER whichever way they are combined.
    """
    found = []
    for low, high in dict.fromkeys(combinations(state, 2)):
        rest = list(state)
        rest.remove(low)
        rest.remove(high)
        for left, symbol, right, result in _operations(low, high):
            found.append(Move(left, symbol, right, result, tuple(sorted([*rest, result]))))
    return tuple(found)


@cache
def _operations(low: Number, high: Number) -> list[tuple[Number, str, Number, Number]]:
    """What a pair can become. No difference is negative: a solution never needs one that is."""
    candidates: list[tuple[Number, str, Number, Number]] = [
        (high, "+", low, high + low),
        (high, "-", low, high - low),
        (high, "*", low, high * low),
    ]
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
    return any(solvable(move.after) for move in moves(state))


def solving_moves(state: State) -> tuple[Move, ...]:
    """The legal moves that keep 24 within reach."""
    return tuple(move for move in moves(state) if solvable(move.after))


def split(held_out: int = 100, seed: int = 24) -> tuple[list[Puzzle], list[Puzzle]]:
    """The solvable puzzles as (training, held out): the same for a seed on any machine."""
    # Random.random is the one draw that Python promises never to change, so it alone sets the order.
    dice = random.Random(seed)
    shuffled = sorted(filter(solvable, puzzles()), key=lambda _: dice.random())
    return shuffled[held_out:], shuffled[:held_out]


# --- Tokens -------------------------------------------------------------------------------------------------


def encode_prompt(puzzle: Puzzle) -> list[int]:
    """The tokens that pose a sorted puzzle, up to and including ":"."""
    return [BOS, *_encode_numbers(puzzle), END_OF_PROMPT]


def encode_move(move: Move) -> list[int]:
    """The tokens of one step, up to and including ";"."""
    return [
        *_encode_numbers([move.left]),
        _TOKEN[move.operator],
        *_encode_numbers([move.right]),
        _TOKEN["="],
        *_encode_numbers([move.result]),
        _TOKEN[","],
        *_encode_numbers(move.after),
        END_OF_STEP,
    ]


def _encode_numbers(numbers: Iterable[Number]) -> list[int]:
    tokens = []
    for number in numbers:
        tokens.append(_TOKEN[str(number.numerator)])
        if number.denominator != 1:
            tokens += [_TOKEN["/"], _TOKEN[str(number.denominator)]]
    return tokens


def text(tokens: Iterable[int]) -> str:
    """The tokens for a reader, without padding and with fractions closed up: `8 ÷ 3 = 8/3 , 1 8/3 9 ;`."""
    return " ".join(VOCABULARY[token] for token in tokens if token != PAD).replace(" / ", "/")


def read_step(state: State, tokens: Sequence[int]) -> Move | None:
    """The move that a generated step, ";" included, makes from the state; None unless it is exactly right.

    A sum or a product may name its operands in either order.
    """
    return _readings(state).get(tuple(tokens))


@cache
def _readings(state: State) -> dict[tuple[int, ...], Move]:
    """Every correct step from the state. They are so few that listing them is simpler than a parser."""
    readings = {}
    for move in moves(state):
        readings[tuple(encode_move(move))] = move
        if move.operator in "+*":
            swapped = replace(move, left=move.right, right=move.left)
            readings[tuple(encode_move(swapped))] = move
    return readings


# --- Answers ------------------------------------------------------------------------------------------------


def expression(puzzle: Puzzle, moves: Iterable[Move]) -> str:
    """A full sequence of moves as one expression, such as `(10 - 4) * (13 - 9)`.

    Raises ValueError where the moves do not fit the puzzle or do not use all of it.
    """
    numbers: list[Number] = list(puzzle)
    written = [str(number) for number in puzzle]

    def take(number: Number) -> str:
        place = numbers.index(number)
        del numbers[place]
        return written.pop(place)

    for move in moves:
        written.append(f"({take(move.left)} {move.operator} {take(move.right)})")
        numbers.append(move.result)
    if len(written) != 1:
        raise ValueError(f"the moves leave {len(written)} numbers of {puzzle} where one should remain")
    return written[0][1:-1].replace("÷", "/")


_ARITHMETIC: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def check(puzzle: Puzzle, answer: str) -> bool:
    """Whether the answer uses exactly the puzzle's numbers and equals 24; safe on any string.

    It shares nothing with the moves and the token format above, so that it can vouch for both.
    """
    # Only arithmetic reaches Python's parser, and not so much of it that the parser could overflow.
    if not re.fullmatch(r"[-+*/() 0-9]{1,100}", answer):
        return False
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                used.append(number)
                return Fraction(number)
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](value(left), value(right))
        raise ValueError(f"{type(node).__name__} is not arithmetic")

    try:
        result = value(ast.parse(answer, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return result == TARGET and sorted(used) == sorted(puzzle)


# --- Training data ------------------------------------------------------------------------------------------


def trajectories(
    rng: np.random.Generator,
    count: int,
    puzzles: Sequence[Puzzle],
    *,
    unsolvable_share: float,
    explore: float,
    ask: float,
) -> np.ndarray:
    """Random games as int32 tokens [count, MAX_TOKENS], padded with PAD.

    A game poses one of `puzzles` or, with probability `unsolvable_share`, one that has no solution. Each
    step is a uniformly random legal move with probability `explore`, otherwise a uniformly random one that
    keeps 24 in reach, where there is one. With probability `ask` the game is broken off after a random number
    of steps for a verdict; otherwise it is played to its end, won or lost.
    """
    # Held-out puzzles are never posed, but games from other puzzles may pass through the same three numbers.
    # That is meant: what is held out is the puzzle, not the arithmetic that lies beneath it.
    dice = random.Random(int(rng.integers(2**63)))  # for single draws, far faster than a Generator
    tokens = np.full((count, MAX_TOKENS), PAD, dtype=np.int32)
    for row in tokens:
        puzzle = dice.choice(_unsolvable_puzzles() if dice.random() < unsolvable_share else puzzles)
        game = _play(dice, puzzle, explore, dice.randrange(4) if dice.random() < ask else None)
        row[: len(game)] = game
    return tokens


def _play(dice: random.Random, puzzle: Puzzle, explore: float, steps: int | None) -> list[int]:
    """Play to the end, or for so many steps and then ask for the verdict."""
    tokens = encode_prompt(puzzle)
    state: State = puzzle
    for _ in range(3 if steps is None else steps):
        if choices := _steps(state, dice.random() >= explore):
            step, state = dice.choice(choices)
            tokens += step
    return [*tokens, DONE] if steps is None else [*tokens, ASK, LIVE if solvable(state) else DEAD]


@cache
def _steps(state: State, solving: bool) -> list[tuple[list[int], State]]:
    """The encoded moves from a state and where each leads, kept because a million games repeat them."""
    choices = solving_moves(state) if solving and solvable(state) else moves(state)
    return [(encode_move(move), move.after) for move in choices]


@cache
def _unsolvable_puzzles() -> list[Puzzle]:
    return [puzzle for puzzle in puzzles() if not solvable(puzzle)]
