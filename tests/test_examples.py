"""The examples that answer questions: their answers against dense attention, their reports, and what they refuse."""

import re
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import document_qa
import game24
import jax
import numpy as np
import pytest
import self_consistency
from checkpoints import write_checkpoint
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from codec_jax.nnx import Decoding, open_checkpoint

VOCAB, STOP, CONTEXT, MAX_NEW = 40, 5, 256, 40
DOCUMENTS = [" ".join(f"w{i}" for i in np.random.default_rng(d).integers(6, VOCAB, 100)) for d in range(2)]
QUESTIONS = ["w8 w7 w30", "w9", "w8 w10"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, "llama", vocab_size=VOCAB, stop=STOP, max_context=CONTEXT, deviation=2.0, seed=4)
    return directory


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """Every question of every document, as document_qa asks it."""
    tokenizer = open_checkpoint(model_dir).tokenizer
    return [
        tokenizer.encode(document_qa.PROMPT.format(document=document, question=question)).ids
        for document in DOCUMENTS
        for question in QUESTIONS
    ]


class Dense:
    """The most likely tokens by dense attention over one sequence at a time."""

    def __init__(self, model_dir: Path) -> None:
        graph, weights = nnx.split(open_checkpoint(model_dir).load("float32"))
        forward = jax.jit(lambda tokens: nnx.merge(graph, weights)(tokens))
        self.logits = lambda tokens: np.asarray(forward(np.pad(tokens, (0, CONTEXT - len(tokens)))[None])[0])

    def greedy(self, prompt: list[int], most: int) -> list[int]:
        context = list(prompt)
        while len(context) < len(prompt) + most and (len(context) == len(prompt) or context[-1] != STOP):
            context.append(int(self.logits(np.asarray(context, np.int32))[len(context) - 1].argmax()))
        return context[len(prompt) :]


@pytest.fixture(scope="module")
def dense(model_dir: Path) -> Dense:
    return Dense(model_dir)


@pytest.fixture(scope="module")
def expected(dense: Dense, prompts: list[list[int]]) -> list[list[int]]:
    tokens = [dense.greedy(prompt, MAX_NEW) for prompt in prompts]
    assert len({tuple(each) for each in tokens}) == len(tokens)
    # Some go on to the end, some stop in the first interval and some in a later one.
    first, second, *_, last = sorted(map(len, tokens))
    assert first <= document_qa.STEPS < second < last == MAX_NEW
    return tokens


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name two documents and the questions."""
    directory = tmp_path_factory.mktemp("files")
    for name, text in zip(("left.txt", "right.txt"), DOCUMENTS, strict=True):
        (directory / name).write_text(text + "\n")
    (directory / "questions.txt").write_text("\n\n".join(QUESTIONS) + "\n")
    return [
        *("--documents", str(directory / "left.txt"), str(directory / "right.txt")),
        *("--questions", str(directory / "questions.txt")),
    ]


@dataclass
class Run:
    """What document_qa printed, and what its two decodings, with and without sharing, began with and came to."""

    output: str
    states: list[Decoding]
    answers: list[document_qa.Answers]
    intervals: list[tuple[list[list[int]], list[int]]]  # what both were told of, tokens and who goes on


@pytest.fixture(scope="module")
def run(model_dir: Path, files: list[str]) -> Run:
    """One run for all tests of what it says and does."""
    output, run, answer = StringIO(), Run("", [], [], []), document_qa.answer

    def watched(sampler, state, max_new_tokens, on_interval, **sampling):
        def watch(tokens: list[list[int]], running: list[int]) -> None:
            run.intervals.append(([list(each) for each in tokens], list(running)))
            on_interval(tokens, running)

        run.states.append(state)
        run.answers.append(answer(sampler, state, max_new_tokens, watch, **sampling))
        return run.answers[-1]

    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(output):
        monkeypatch.setattr(document_qa, "answer", watched)
        document_qa.main(["--model", str(model_dir), "--dtype", "float32", "--max-new-tokens", str(MAX_NEW), *files])
    run.output = output.getvalue()
    return run


def unshared_reads(prompts: list[list[int]], answers: list[list[int]]) -> int:
    """KV tokens of all steps: each reads the whole context of all requests that run at the start of its interval."""
    total = 0
    for begin in range(0, MAX_NEW, document_qa.STEPS):
        running = [
            (len(prompt) + begin, min(len(tokens) - begin, document_qa.STEPS))
            for prompt, tokens in zip(prompts, answers, strict=True)
            if len(tokens) > begin
        ]
        steps = max(new for _, new in running)
        total += sum(length + min(step, new) for length, new in running for step in range(1, steps + 1))
    return total


def numbers(pattern: str, output: str) -> list[int]:
    """The groups of the only match, as integers."""
    (groups,) = re.findall(pattern, output)
    return [int(number.replace(",", "")) for number in groups]


# --- Questions about documents ------------------------------------------------------------------------------------


def test_answers_with_and_without_sharing_are_those_of_dense_attention(run, expected):
    assert [answers.tokens for answers in run.answers] == [expected, expected]
    assert all(answers.seconds > 0 for answers in run.answers)


def test_answers_are_told_of_at_every_interval_until_they_end(run, expected):
    told = []
    for end in range(document_qa.STEPS, MAX_NEW + document_qa.STEPS, document_qa.STEPS):
        goes_on = [i for i, tokens in enumerate(expected) if len(tokens) > end]
        told.append(([tokens[:end] for tokens in expected], goes_on))
    assert run.intervals == told + told


def test_a_run_prints_every_answer_and_what_was_read_for_them(run, prompts, expected):
    output = run.output
    printed = re.findall(r"^(left|right): (.*)\n(.*)\n", output, re.MULTILINE)
    assert [(title, question) for title, question, _ in printed] == [
        (title, question) for title in ("left", "right") for question in QUESTIONS
    ]
    assert [answer for *_, answer in printed] == [
        " ".join(f"w{token}" for token in tokens if token != STOP) for tokens in expected
    ]
    # What is stored once is as many tokens as there are different prefixes.
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert numbers(r"(\d+) prompts of ([\d,]+) tokens, stored as ([\d,]+)", output) == [
        len(prompts),
        sum(map(len, prompts)),
        len(prefixes),
    ]
    shared, apart = numbers(r"KV tokens read +([\d,]+) with sharing, ([\d,]+) without", output)
    assert apart == unshared_reads(prompts, expected)
    assert shared < apart / 2
    assert numbers(r"the same answers +(\d+) of (\d+)", output) == [len(prompts), len(prompts)]
    assert re.search(r"time per output token +[\d.]+ ms with sharing, [\d.]+ ms without", output)
    assert "noise" not in output


def test_without_a_model_the_answers_are_called_noise(files, capsys):
    document_qa.main(["--max-new-tokens", "3", *files])
    output = capsys.readouterr().out
    assert "the answers are noise, and only the times mean something" in output
    assert [len(answer) for *_, answer in re.findall(r"^(left|right): (.*)\n(.*)\n", output, re.MULTILINE)] == [3] * 6
    assert numbers(r"the same answers +(\d+) of (\d+)", output) == [6, 6]


def test_the_shipped_documents_are_long_and_the_questions_many():
    arguments = document_qa.parse([])
    words = [len(document_qa.read("--documents", file).split()) for file in arguments.documents]
    assert len(words) == 2
    assert min(words) > 1400
    assert len(document_qa.read("--questions", arguments.questions).splitlines()) == 8


@given(st.lists(st.text(max_size=9), min_size=1, max_size=4), st.data())
def test_answers_are_printed_in_order_whole_and_without_control_characters(texts, data):
    """Whatever the intervals at which they grow and end; the tokens are bytes, so characters may come in halves."""
    tokens = [list(text.encode()) for text in texts]
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            "builtins.print", lambda *words, end="\n", flush=False: printed.append("".join(words) + end)
        )
        printer = document_qa.Printer(
            [f"<{i}>" for i in range(len(texts))], lambda part: bytes(part).decode("utf-8", "replace")
        )
        ends = [0] * len(texts)
        running = list(range(len(texts)))
        while running:
            ends = [data.draw(st.integers(end, len(part))) for end, part in zip(ends, tokens, strict=True)]
            running = [i for i in running if ends[i] < len(tokens[i])]
            printer([part[:end] for part, end in zip(tokens, ends, strict=True)], running)
    safe = ["".join(character if character.isprintable() else " " for character in text) for text in texts]
    assert "".join(printed) == "".join(f"\n<{i}>\n{text}\n" for i, text in enumerate(safe))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "expected a file of UTF-8 text"), (b" \n", "which is empty"), (b"\xff\xfe", "expected a file of UTF-8")],
)
@pytest.mark.parametrize("flag", ["--documents", "--questions"])
def test_files_that_hold_no_text_are_refused_by_name(tmp_path, files, flag, content, problem):
    file = tmp_path / "other.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit, match=rf"{flag}: {problem}|{flag}: expected some text, got .*{problem}") as refusal:
        document_qa.main([*files, flag, str(file)])
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize(
    "flags", [("--max-new-tokens", "0"), ("--temperature", "-1"), ("--temperature", "nan"), ("--temperature", "inf")]
)
def test_document_qa_refuses_numbers_out_of_range(flags, capsys):
    with pytest.raises(SystemExit):
        document_qa.main(list(flags))
    assert f"{flags[0]}: expected" in capsys.readouterr().err


def test_prompts_longer_than_the_model_was_made_for_are_refused(model_dir, files):
    with pytest.raises(SystemExit, match=rf"--documents: expected at most {CONTEXT} tokens"):
        document_qa.main(["--model", str(model_dir), "--max-new-tokens", str(CONTEXT), *files])


def test_a_missing_checkpoint_is_refused(tmp_path, files):
    with pytest.raises(SystemExit, match=r"document_qa: directory: expected one with config\.json"):
        document_qa.main(["--model", str(tmp_path / "none"), *files])


# --- Self-consistency ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["7", "9", "7"], ("7", 2)),
        (["9", "7", "7", "9"], ("9", 2)),  # as many votes: the first to be given
        ([None, None, "3"], ("3", 1)),  # no answer is no vote
        ([None, None], (None, 0)),
        ([], (None, 0)),
    ],
)
def test_the_majority_is_what_most_samples_answer(answers, winner):
    assert self_consistency.majority(answers) == winner


@given(st.lists(st.sampled_from(["1", "2", "3", None]), max_size=12))
def test_nothing_is_given_more_often_than_the_majority(answers):
    winner, count = self_consistency.majority(answers)
    given_answers = [answer for answer in answers if answer is not None]
    assert count == max(map(given_answers.count, given_answers), default=0)
    assert given_answers.count(winner) == count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7, so 7 apples.", "7"),
        ("It costs $1,200.", "1200"),
        ("1200.00", "1200"),
        ("-0.50 degrees", "-0.5"),
        ("from 3-5", "5"),  # a dash between numbers is no sign
        ("1,2,3", "3"),
        ("-0", "0"),
        ("It is 4.\nQuestion: What is 2 + 3?", "4"),
        ("none at all", None),
    ],
)
def test_the_answer_of_a_text_is_its_last_number(text, number):
    assert self_consistency.last_number(text) == number


def test_games_in_another_order_have_the_same_result_and_wrong_ones_none():
    def result(steps: str) -> str | None:
        return self_consistency.result_of_game(
            (4, 9, 10, 13), [game24.VOCABULARY.index(word) for word in steps.split()]
        )

    first, second, third = "13 - 9 = 4 , 4 4 10 ;", "10 - 4 = 6 , 4 6 ;", "6 * 4 = 24 , 24 ;"
    assert result(f"{first} {second} {third} <done>") == "(10 - 4) * (13 - 9)"
    assert result(f"10 - 4 = 6 , 6 9 13 ; 13 - 9 = 4 , 4 6 ; {third}") == "(10 - 4) * (13 - 9)"
    assert result(f"{first} {second} 6 + 4 = 10 , 10 ;") == "(10 - 4) + (13 - 9)"
    assert result(f"{first} {second}") is None
    assert result(f"{first} 10 - 4 = 5 , 4 5 ; {third}") is None
    assert result("") is None


def test_puzzles_are_voted_on_and_the_report_counts_what_arithmetic_confirms(monkeypatch, capsys):
    sampled = []
    read = self_consistency.result_of_game
    monkeypatch.setattr(
        self_consistency, "result_of_game", lambda *game: sampled.append((game[0], read(*game))) or sampled[-1][1]
    )
    self_consistency.main(["--puzzles", "4", "--samples", "12"])
    output = capsys.readouterr().out
    votes = re.findall(r"^ *(\d+ \d+ \d+ \d+) +(\d+) of 12   (.+?)  (right|wrong)$", output, re.MULTILINE)
    assert len(sampled) == 48
    puzzles = [" ".join(map(str, puzzle)) for puzzle in game24.split()[1][:4]]
    assert [puzzle for puzzle, *_ in votes] == puzzles
    for puzzle, count, winner, verdict in votes:
        given_answers = Counter(answer for of, answer in sampled if " ".join(map(str, of)) == puzzle)
        assert given_answers[winner] == int(count) == max(n for answer, n in given_answers.items() if answer)
        assert sorted(re.findall(r"\d+", winner), key=int) == puzzle.split()
        assert (verdict == "right") == (abs(eval(winner) - 24) < 1e-9)
    right = [(of, abs(eval(answer) - 24) < 1e-9) for of, answer in sampled if answer]
    assert f"one sample      right on {sum(ok for _, ok in right) / 12:.1f} of 4" in output
    assert f"majority vote   right on {[verdict for *_, verdict in votes].count('right')} of 4" in output
    assert f"any sample      right on {len({of for of, ok in right if ok})} of 4" in output


def test_samples_of_a_checkpoint_vote_by_their_last_number(model_dir, dense, tmp_path, capsys):
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(QUESTIONS))
    # So little temperature that all samples are the most likely text.
    flags = ["--samples", "3", "--temperature", "1e-5", "--max-new-tokens", "20", "--dtype", "float32"]
    self_consistency.main(["--model", str(model_dir), "--questions", str(file), *flags])
    output = capsys.readouterr().out
    tokenizer = open_checkpoint(model_dir).tokenizer
    for question in QUESTIONS:
        tokens = dense.greedy(tokenizer.encode(self_consistency.PROMPT.format(question=question)).ids, 20)
        last = [token for token in tokens if token != STOP][-1]
        assert re.search(rf"^ *{question}   +3 of 3   {last}$", output, re.MULTILINE)
    assert "right" not in output


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--samples", "0"], "--samples: expected at least 1, got 0"),
        (["--puzzles", "0"], "--puzzles: expected 1 to 100, got 0"),
        (["--puzzles", "101"], "--puzzles: expected 1 to 100, got 101"),
        (["--max-new-tokens", "-1"], "--max-new-tokens: expected at least 1, got -1"),
        (["--temperature", "0"], "--temperature: expected a finite number above 0"),
        (["--temperature", "nan"], "--temperature: expected a finite number above 0"),
        (["--model", "x"], "--model: expected it together with --questions"),
        (["--questions", "x"], "--model: expected it together with --questions"),
    ],
)
def test_self_consistency_refuses_options_that_cannot_be(flags, problem, capsys):
    with pytest.raises(SystemExit):
        self_consistency.main(flags)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "flags", "problem"),
    [
        (None, (), "--questions: expected a file of UTF-8 text"),
        ("\n \n", (), "--questions: expected a question in each line"),
        ("w6", ("--max-new-tokens", str(CONTEXT)), f"--questions: expected at most {CONTEXT} tokens"),
        ("w6", ("--model", "/none"), "directory: expected one with config.json"),
    ],
)
def test_questions_that_a_checkpoint_cannot_answer_are_refused(model_dir, tmp_path, content, flags, problem):
    file = tmp_path / "questions.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=re.escape(f"self_consistency: {problem}")):
        self_consistency.main(["--model", str(model_dir), "--questions", str(file), *flags])
