"""The Game of 24 example: its rules, its token format, its training data, and the check of its answers."""

import hashlib
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import game24
import numpy as np
import pytest
from game24 import ASK, BOS, DEAD, DONE, END_OF_STEP, LIVE, MAX_NUMBER, PAD, VOCAB_SIZE, Move, Number, Puzzle, State

Choices = Callable[[State], tuple[Move, ...]]

OPERATORS: dict[str, Callable[[Number, Number], Number]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "÷": Fraction,
}
SOLVABLE = [puzzle for puzzle in game24.puzzles() if game24.solvable(puzzle)]


def tokens_of(line: str) -> list[int]:
    """The inverse of `game24.text` for a line in which fraction bars stand apart too."""
    return [game24.VOCABULARY.index(symbol) for symbol in line.split()]


def random_game(dice: random.Random, puzzle: Puzzle, choices: Choices = game24.moves) -> list[Move]:
    """Random moves from the puzzle for as long as there are any."""
    game: list[Move] = []
    while options := choices(game[-1].after if game else puzzle):
        game.append(dice.choice(options))
    return game


def random_states(dice: random.Random, puzzles: int) -> list[State]:
    """Every state of one random game from each of so many puzzles, dead ends included."""
    states: list[State] = []
    for puzzle in dice.sample(game24.puzzles(), puzzles):
        states += [puzzle, *(move.after for move in random_game(dice, puzzle))]
    return states


@pytest.fixture
def dice() -> random.Random:
    return random.Random(0)


# --- The game -----------------------------------------------------------------------------------------------


@cache
def reaches_24(numbers: tuple[Fraction, ...]) -> bool:
    """Plain exhaustive search without a bound and with negative numbers."""
    if len(numbers) == 1:
        return numbers[0] == 24
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i == j:
                continue
            rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
            results = [a - b] if i > j else [a + b, a * b, a - b]
            if b != 0:
                results.append(a / b)
            if any(reaches_24(tuple(sorted([*rest, result]))) for result in results):
                return True
    return False


def test_known_counts() -> None:
    assert len(game24.puzzles()) == len(set(game24.puzzles())) == 1820
    assert len(SOLVABLE) == 1362


def test_bound_and_sign_rule_change_no_verdict(dice: random.Random) -> None:
    for state in {*game24.puzzles(), *random_states(dice, 100)}:
        assert game24.solvable(state) == reaches_24(tuple(map(Fraction, state)))


def test_bound_is_tight() -> None:
    # (13 * 13 - 1) ÷ 7 is the only way, so the bound cannot be lower than 169.
    (first,) = game24.solving_moves((1, 7, 13, 13))
    assert (first.operator, first.result) == ("*", MAX_NUMBER)


def test_moves_are_legal_distinct_and_complete(dice: random.Random) -> None:
    for state in random_states(dice, 200):
        legal = game24.moves(state)
        assert len(set(legal)) == len(legal)
        for move in legal:
            assert move.result == OPERATORS[move.operator](move.left, move.right)
            assert move.result >= 0
            assert max(move.result.numerator, move.result.denominator) <= MAX_NUMBER
            assert list(move.after) == sorted(move.after)
            assert sorted([*move.after, move.left, move.right]) == sorted([*state, move.result])


def test_moves_of_small_states() -> None:
    def listed(state: State) -> list[str]:
        return [f"{m.left}{m.operator}{m.right}={m.result}" for m in game24.moves(state)]

    assert listed((3, 8)) == ["8+3=11", "8-3=5", "8*3=24", "8÷3=8/3", "3÷8=3/8"]
    assert listed((4, 4)) == ["4+4=8", "4-4=0", "4*4=16", "4÷4=1"]
    assert listed((0, 5)) == ["5+0=5", "5-0=5", "5*0=0", "0÷5=0"]
    assert listed((0, 0)) == ["0+0=0", "0-0=0", "0*0=0"]
    assert listed((2, MAX_NUMBER)) == ["169-2=167", "169÷2=169/2", "2÷169=2/169"]
    assert listed((24,)) == []
    assert len(game24.moves((5, 5, 5, 5))) == 4


def test_solving_moves_are_those_that_stay_solvable(dice: random.Random) -> None:
    for state in random_states(dice, 100):
        solving = game24.solving_moves(state)
        assert list(solving) == [move for move in game24.moves(state) if game24.solvable(move.after)]
        assert game24.solvable(state) == (bool(solving) or state == (24,))


def test_split_is_disjoint_complete_and_fixed() -> None:
    training, held_out = game24.split()
    assert len(held_out) == 100
    assert sorted(training + held_out) == SOLVABLE
    assert (training, held_out) == game24.split()
    assert held_out != game24.split(seed=25)[1]
    # Published results name this very set, so it must not drift with Python, numpy or the hash seed.
    assert hashlib.sha256(repr(held_out).encode()).hexdigest()[:16] == "a72ff1b29f29acae"


# --- Tokens -------------------------------------------------------------------------------------------------


def test_vocabulary() -> None:
    assert len(game24.VOCABULARY) == len(set(game24.VOCABULARY)) == VOCAB_SIZE
    named = (BOS, DONE, ASK, LIVE, DEAD, END_OF_STEP)
    assert [game24.VOCABULARY[token] for token in named] == ["<bos>", "<done>", "?", "<live>", "<dead>", ";"]
    assert PAD == 0


def test_format() -> None:
    move = next(m for m in game24.moves((1, 3, 8, 9)) if m.result == Fraction(8, 3))
    assert game24.text([*game24.encode_prompt((1, 3, 8, 9)), PAD]) == "<bos> 1 3 8 9 :"
    assert game24.text(game24.encode_move(move)) == "8 ÷ 3 = 8/3 , 1 8/3 9 ;"


def test_every_move_survives_the_round_trip(dice: random.Random) -> None:
    for state in random_states(dice, 200):
        for move in game24.moves(state):
            assert game24.read_step(state, game24.encode_move(move)) == move


def test_only_sums_and_products_commute() -> None:
    state = (3, 8, 9)
    for step in ("3 + 8 = 11 , 9 11 ;", "8 + 3 = 11 , 9 11 ;", "3 * 8 = 24 , 9 24 ;", "8 - 3 = 5 , 5 9 ;"):
        assert game24.read_step(state, tokens_of(step)) in game24.moves(state)
    for step in ("3 - 8 = 5 , 5 9 ;", "3 ÷ 8 = 8 / 3 , 8 / 3 9 ;"):
        assert game24.read_step(state, tokens_of(step)) is None


@pytest.mark.parametrize(
    "step",
    [
        "8 + 3 = 12 , 9 12 ;",  # wrong sum
        "8 ÷ 3 = 2 , 2 9 ;",  # rounded
        "8 + 4 = 12 , 9 12 ;",  # an operand that is not there
        "8 + 8 = 16 , 9 16 ;",  # one number used twice
        "8 + 3 = 11 , 9 ;",  # the result is missing
        "8 + 3 = 11 , 11 ;",  # the other number is missing
        "8 + 3 = 11 , 9 11 11 ;",  # one number too many
        "8 + 3 = 11 , 3 9 11 ;",  # an operand kept
        "8 + 3 = 11 , 11 9 ;",  # not sorted
        "8 + 3 = 11 , 9 12 ;",  # the result changed
        "8 + 3 = 11 , 9 11",  # not finished
        "8 + 3 = 11 , 9 11 ; ;",  # goes on
        "8 + 3 = 22 / 2 , 9 11 ;",  # not in lowest terms
        "8 + 3 11 , 9 11 ;",
        "+ 8 3 = 11 , 9 11 ;",
        "<dead>",
        "<done>",
        ";",
        "",
    ],
)
def test_wrong_steps_are_rejected(step: str) -> None:
    assert game24.read_step((3, 8, 9), tokens_of(step)) is None


def test_damaged_steps_are_rejected(dice: random.Random) -> None:
    for state in random_states(dice, 50):
        correct = {tuple(game24.encode_move(move)) for move in game24.moves(state)}
        for tokens in correct:
            for length in range(len(tokens)):
                assert game24.read_step(state, tokens[:length]) is None
            damaged = list(tokens)
            damaged[dice.randrange(len(tokens))] = dice.randrange(VOCAB_SIZE)
            # One change may turn 2 + 2 = 4 into 2 * 2 = 4, but it cannot swap two operands.
            assert game24.read_step(state, damaged) is None or tuple(damaged) in correct


def test_garbage_is_rejected(dice: random.Random) -> None:
    for state in random_states(dice, 50):
        for _ in range(50):
            garbage = [dice.randint(-5, VOCAB_SIZE + 5) for _ in range(dice.randrange(30))]
            assert game24.read_step(state, garbage) is None


def test_games_in_another_order_amount_to_the_same_and_wrong_ones_to_nothing() -> None:
    def answer(steps: str) -> str | None:
        return game24.answer_of_game((4, 9, 10, 13), tokens_of(steps))

    first, second, third = "13 - 9 = 4 , 4 4 10 ;", "10 - 4 = 6 , 4 6 ;", "6 * 4 = 24 , 24 ;"
    assert answer(f"{first} {second} {third} <done>") == "(10 - 4) * (13 - 9)"
    assert answer(f"10 - 4 = 6 , 6 9 13 ; 13 - 9 = 4 , 4 6 ; {third}") == "(10 - 4) * (13 - 9)"
    assert answer(f"{first} {second} 6 + 4 = 10 , 10 ;") == "(10 - 4) + (13 - 9)"
    for wrong in (f"{first} {second}", f"{first} 10 - 4 = 5 , 4 5 ; {third}", f"{first} {second} {third[:-2]}", ""):
        assert answer(wrong) is None
    assert game24.solves((4, 9, 10, 13), tokens_of(f"{first} {second} {third} <done>"))
    assert not game24.solves((4, 9, 10, 13), tokens_of(f"{first} {second} 6 + 4 = 10 , 10 ;"))
    assert not game24.solves((4, 9, 10, 13), tokens_of(f"{first} {second}"))


def test_a_game_is_read_up_to_its_first_wrong_or_unfinished_step(dice: random.Random) -> None:
    for puzzle in dice.sample(game24.puzzles(), 100):
        game = random_game(dice, puzzle)
        steps = [game24.encode_move(move) for move in game]
        for whole in range(len(steps) + 1):
            right = [token for step in steps[:whole] for token in step]
            for rest in ([], [END_OF_STEP], [game24.BOS, END_OF_STEP], *(step[:-1] for step in steps[whole:][:1])):
                assert game24.read_game(puzzle, [*right, *rest]) == (game[:whole], list(rest))


# --- Answers ------------------------------------------------------------------------------------------------


def value(answer: str) -> Fraction:
    """The exact value of an expression."""
    return eval(re.sub(r"(\d+)", r"Fraction(\1)", answer), {"Fraction": Fraction})


def test_expressions_are_worth_what_the_games_end_with_and_use_each_number_once(dice: random.Random) -> None:
    won = 0
    for puzzle in game24.puzzles():
        choices = dice.choice([game24.moves, game24.solving_moves]) if puzzle in SOLVABLE else game24.moves
        game = random_game(dice, puzzle, choices)
        if len(game) == 3:
            tokens = [token for move in game for token in game24.encode_move(move)]
            answer = game24.answer_of_game(puzzle, tokens)
            assert value(answer) == game[-1].result
            assert sorted(map(int, re.findall(r"\d+", answer))) == list(puzzle)
            assert game24.solves(puzzle, tokens) == (value(answer) == 24)
            won += value(answer) == 24
    assert len(SOLVABLE) / 3 < won < len(SOLVABLE)


def test_expression_reads_naturally() -> None:
    puzzle = (4, 9, 10, 13)
    state: State = puzzle
    game = []
    for step in ("13 - 9 = 4 , 4 4 10 ;", "10 - 4 = 6 , 4 6 ;", "6 * 4 = 24 , 24 ;"):
        move = game24.read_step(state, tokens_of(step))
        assert move is not None
        game.append(move)
        state = move.after
    assert game24.expression(puzzle, game) == "(10 - 4) * (13 - 9)"


# --- Training data ------------------------------------------------------------------------------------------


def parsed(row: list[int]) -> tuple[Puzzle, list[State], list[int]]:
    """The puzzle, every state after it, and the ending of one row, each step asserted to be legal."""
    end = row.index(PAD)
    assert not any(row[end:])
    colon = row.index(game24.END_OF_PROMPT)
    puzzle = tuple(int(game24.VOCABULARY[token]) for token in row[1:colon])
    assert row[: colon + 1] == game24.encode_prompt(puzzle)
    states: list[State] = [puzzle]
    start = colon + 1
    while END_OF_STEP in row[start:end]:
        stop = row.index(END_OF_STEP, start) + 1
        move = game24.read_step(states[-1], row[start:stop])
        assert move is not None
        states.append(move.after)
        start = stop
    return puzzle, states, row[start:end]


def make(
    seed: int = 0, count: int = 3000, unsolvable: float = 0.1, explore: float = 0.3, ask: float = 0.5
) -> np.ndarray:
    training, _ = game24.split()
    rng = np.random.default_rng(seed)
    return game24.trajectories(rng, count, training, unsolvable=unsolvable, explore=explore, ask=ask)


def test_trajectories_are_legal_with_right_verdicts() -> None:
    training, held_out = (set(part) for part in game24.split())
    tokens = make()
    assert tokens.shape == (3000, game24.MAX_TOKENS)
    assert tokens.dtype == np.int32
    for row in tokens.tolist():
        puzzle, states, ending = parsed(row)
        assert puzzle not in held_out
        assert (puzzle in training) == game24.solvable(puzzle)
        if ending == [DONE]:
            assert not game24.moves(states[-1])
        else:
            assert ending == [ASK, LIVE if game24.solvable(states[-1]) else DEAD]


def test_trajectories_follow_their_seed() -> None:
    assert np.array_equal(make(seed=1, count=200), make(seed=1, count=200))
    assert not np.array_equal(make(seed=1, count=200), make(seed=2, count=200))


def test_without_exploration_every_solvable_game_is_won() -> None:
    for row in make(unsolvable=0, explore=0, ask=0).tolist():
        _, states, ending = parsed(row)
        assert ending == [DONE]
        assert states[-1] == (24,)


def test_shares_are_those_asked_for() -> None:
    tokens = make(count=4000, unsolvable=0.25, explore=0, ask=1)
    assert (tokens == DEAD).any(axis=1).mean() == pytest.approx(0.25, abs=0.03)
    assert (make(count=4000, ask=0.3) == ASK).any(axis=1).mean() == pytest.approx(0.3, abs=0.03)
    # Half of the first moves are drawn from all legal ones, so the dead ends among them are lost games.
    training = game24.split()[0]
    lost = np.mean([1 - len(game24.solving_moves(puzzle)) / len(game24.moves(puzzle)) for puzzle in training])
    games = [parsed(row)[1] for row in make(count=4000, unsolvable=0, explore=0.5, ask=0).tolist()]
    assert np.mean([not game24.solvable(states[1]) for states in games]) == pytest.approx(0.5 * lost, abs=0.03)


def test_questions_come_after_any_number_of_steps() -> None:
    asked = [len(parsed(row)[1]) - 1 for row in make(count=4000, ask=1).tolist()]
    for steps in range(4):
        assert asked.count(steps) / len(asked) == pytest.approx(0.25, abs=0.03)


def test_max_tokens_holds_the_longest_trajectory() -> None:
    longest: dict[State, int] = {}

    def step_tokens(state: State) -> int:
        if state not in longest:
            following = (len(game24.encode_move(move)) + step_tokens(move.after) for move in game24.moves(state))
            longest[state] = max(following, default=0)
        return longest[state]

    most = max(len(game24.encode_prompt(puzzle)) + step_tokens(puzzle) + 2 for puzzle in game24.puzzles())
    assert most <= game24.MAX_TOKENS
    assert game24.MAX_TOKENS % 8 == 0
