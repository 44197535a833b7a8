"""The example about documents: its answers against dense attention, what it counts, and what it refuses."""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from xml.etree import ElementTree

import document_qa
import numpy as np
import pytest
from models import read_text

import codec_jax.nnx
from codec_jax.nnx import Decoding, Engine

MAX_NEW = 40
DOCUMENTS = [" ".join(f"w{i}" for i in np.random.default_rng(d).integers(6, 40, 100)) for d in range(2)]
QUESTIONS = ["w8 w7 w30", "w9", "w8 w10"]


@pytest.fixture(scope="module", autouse=True)
def _one_size_of_chunks() -> Iterator[None]:
    """The engine has fewer programs to compile."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(codec_jax.nnx, "Engine", partial(Engine, prefill_tokens=128))
        yield


@pytest.fixture(scope="module")
def prompts(small) -> list[list[int]]:
    """Every question of every document, as the example asks it."""
    tokenizer = small.checkpoint.tokenizer
    return [
        tokenizer.encode(document_qa.PROMPT.format(document=document, question=question)).ids
        for document in DOCUMENTS
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def expected(small, prompts) -> list[list[int]]:
    tokens = [small.greedy(prompt, MAX_NEW) for prompt in prompts]
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
    (directory / "questions.txt").write_text("\n\n ".join(QUESTIONS) + "\n")
    return [
        *("--documents", str(directory / "left.txt"), str(directory / "right.txt")),
        *("--questions", str(directory / "questions.txt")),
    ]


@dataclass
class Run:
    """What the example printed, and what its two decodings, with and without sharing, came to."""

    output: str
    answers: list[document_qa.Answers]


@pytest.fixture(scope="module")
def run(small, files) -> Run:
    """One run for all tests of what it says and does."""
    output, answers, answer = StringIO(), [], document_qa.answer

    def watched(sampler, state: Decoding, *rest, **sampling) -> document_qa.Answers:
        answers.append(answer(sampler, state, *rest, **sampling))
        return answers[-1]

    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(output):
        monkeypatch.setattr(document_qa, "answer", watched)
        document_qa.main(["--model", str(small.directory), "--max-new-tokens", str(MAX_NEW), *files])
    return Run(output.getvalue(), answers)


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


def test_answers_with_and_without_sharing_are_those_of_dense_attention(run, small, prompts, expected):
    assert [answers.generated.tokens for answers in run.answers] == [expected, expected]
    for answers in run.answers:
        for prompt, tokens, logprobs in zip(prompts, expected, answers.generated.logprobs, strict=True):
            dense = small.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
            np.testing.assert_allclose(logprobs, dense[np.arange(len(tokens)), tokens], atol=1e-4)


def test_a_run_prints_every_answer_the_forest_and_what_was_read(run, prompts, expected):
    printed = re.findall(r"^(left|right): (.*)\n(.*)\n", run.output, re.MULTILINE)
    assert printed == [
        (*asked, " ".join(f"w{token}" for token in tokens if token != 5))
        for asked, tokens in zip([(d, q) for d in ("left", "right") for q in QUESTIONS], expected, strict=True)
    ]
    # What is stored once is as many tokens as there are different prefixes.
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    stored, total = numbers(r"([\d,]+) tokens in .*; without sharing ([\d,]+) tokens", run.output)
    assert (stored, total) == (len(prefixes), sum(map(len, prompts)))
    shared, apart = numbers(r"KV tokens read +([\d,]+) +([\d,]+) ", run.output)
    assert apart == unshared_reads(prompts, expected)
    assert shared < apart / 2
    assert numbers(r"(\d+) of (\d+) the same in every token", run.output) == [len(prompts), len(prompts)]
    assert "noise" not in run.output


def test_questions_that_come_later_find_their_document(run, prompts):
    """All whole pages that one before them began with; the last token of a prompt is always computed."""
    pages = [
        sum(any(prompt[:end] == other[:end] for other in prompts[:i]) for end in range(16, len(prompt), 16))
        for i, prompt in enumerate(prompts)
    ]
    found = numbers(r"([\d,]+) of ([\d,]+) tokens were in the cache", run.output)
    assert found == [16 * sum(pages), sum(map(len, prompts)) - len(prompts)]
    assert pages.count(0) == len(DOCUMENTS)


def test_without_a_model_the_answers_are_called_noise_and_the_forest_is_drawn(files, capsys, tmp_path):
    document_qa.main(["--max-new-tokens", "3", "--svg", str(tmp_path / "forest.svg"), *files])
    output = capsys.readouterr().out
    assert "the answers are noise" in output
    assert numbers(r"(\d+) of (\d+) the same in every token", output) == [6, 6]
    # A rectangle for each node says how many tokens it has: as many as there are different prefixes, in all.
    titles = ElementTree.parse(tmp_path / "forest.svg").findall(".//{*}title")
    texts = [document_qa.PROMPT.format(document=d, question=q) for d in DOCUMENTS for q in QUESTIONS]
    drawn = [int(title.text.split()[2].replace(",", "")) for title in titles]
    assert sum(drawn) == len({text[:end] for text in texts for end in range(1, len(text) + 1)})


def test_the_shipped_documents_are_long_and_the_questions_many():
    arguments = document_qa.parse([])
    words = [len(read_text("--documents", file).split()) for file in arguments.documents]
    assert len(words) == 2
    assert min(words) > 1400
    assert len(read_text("--questions", arguments.questions).splitlines()) == 8


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "expected a file of UTF-8 text"),
        (b" \n", "expected some text"),
        (b"\xff\xfe", "expected a file of UTF-8"),
    ],
)
@pytest.mark.parametrize("flag", ["--documents", "--questions"])
def test_files_that_hold_no_text_are_refused_by_name(tmp_path, files, flag, content, problem):
    file = tmp_path / "other.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit, match=rf"{flag}: {problem}") as refusal:
        document_qa.main([*files, flag, str(file)])
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-new-tokens", "0"),
        ("--max-new-tokens", "3000000000"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "1e39"),  # which float32 does not hold
        ("--seed", "-1"),
        ("--svg", "none/forest.svg"),
    ],
    ids=" ".join,
)
def test_options_that_cannot_be_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        document_qa.main(list(flags))
    assert f"{flags[0]}: expected" in capsys.readouterr().err


def test_prompts_longer_than_the_model_was_made_for_are_refused(small, files):
    with pytest.raises(SystemExit, match=rf"--documents: expected at most {small.max_context} tokens"):
        document_qa.main(["--model", str(small.directory), "--max-new-tokens", str(small.max_context), *files])


def test_a_missing_checkpoint_is_refused(tmp_path, files):
    with pytest.raises(SystemExit, match=r"document_qa: --model: directory: expected one with config\.json"):
        document_qa.main(["--model", str(tmp_path / "none"), *files])
