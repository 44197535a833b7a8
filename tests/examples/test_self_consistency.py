"""The example that takes votes: its games against a report counted anew, and what their decoding read."""

import re
from collections import Counter

import game24
import pytest
import self_consistency
from hypothesis import given
from hypothesis import strategies as st

from codec_jax.nnx import Sampler

SAMPLES = 12


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


def test_puzzles_are_voted_on_and_the_report_counts_what_arithmetic_confirms(game_sampler, monkeypatch, capsys):
    played, sample = [], self_consistency.sample

    def with_game_sampler(sampler: Sampler, *rest):
        assert sampler.max_requests == 3 * SAMPLES
        assert sampler.num_pages * sampler.page_size > sampler.max_requests * 78
        played.append(sample(game_sampler, *rest))
        return played[-1]

    monkeypatch.setattr(self_consistency, "sample", with_game_sampler)
    self_consistency.main(["--puzzles", "3", "--samples", str(SAMPLES)])
    output = capsys.readouterr().out
    ((games, traffic),) = played
    puzzles = game24.split()[1][:3]
    votes = re.findall(r"^ *(\d+ \d+ \d+ \d+) +(\d+) of 12   (.+?)  (right|wrong)$", output, re.MULTILINE)
    assert [puzzle for puzzle, *_ in votes] == [" ".join(map(str, puzzle)) for puzzle in puzzles]
    right = []
    for puzzle, samples, (_, count, winner, verdict) in zip(puzzles, games, votes, strict=True):
        answers = [answer for answer in (game24.answer_of_game(puzzle, tokens) for tokens in samples) if answer]
        assert len(samples) == SAMPLES
        assert len({tuple(tokens) for tokens in samples}) > SAMPLES / 2  # forks draw numbers of their own
        assert len(answers) > SAMPLES / 2  # the model knows the rules
        assert Counter(answers)[winner] == int(count) == max(Counter(answers).values())
        assert sorted(map(int, re.findall(r"\d+", winner))) == list(puzzle)
        assert (verdict == "right") == (abs(eval(winner) - 24) < 1e-9)
        right.append(sum(abs(eval(answer) - 24) < 1e-9 for answer in answers if "/ 0" not in answer))
    assert f"one sample      right on {sum(right) / SAMPLES:.1f} of 3" in output
    assert f"majority vote   right on {[verdict for *_, verdict in votes].count('right')} of 3" in output
    assert f"any sample      right on {sum(map(bool, right))} of 3" in output
    # Without sharing, a token reads the prompt of six, those before it and itself.
    lengths = [len(tokens) for samples in games for tokens in samples]
    assert traffic.generated_tokens == sum(lengths)
    assert traffic.kv_tokens_unshared == sum(6 * length + length * (length + 1) // 2 for length in lengths)
    assert traffic.kv_tokens_read < traffic.kv_tokens_unshared / 1.2


def test_samples_that_are_alike_say_what_one_of_them_says_alone(small, monkeypatch):
    """At next to no temperature all samples are alike, and go on from one path after every few tokens."""
    prompts = {0: [7, 8, 9, 10, 11, 12], 1: [7, 8, 9, 10, 30, 31]}
    monkeypatch.setattr(game24, "encode_prompt", prompts.__getitem__)
    monkeypatch.setattr(game24, "DONE", small.stop)
    sampler = Sampler(small.decoder, max_requests=6, num_pages=300, page_size=8, steps=4)
    games, traffic = self_consistency.sample(sampler, [0, 1], 3, 1e-5, 0)
    most = self_consistency.MAX_TOKENS
    assert games == [[small.greedy(prompts[puzzle], most)] * 3 for puzzle in (0, 1)]
    assert traffic.kv_tokens_read < traffic.kv_tokens_unshared / 2


@pytest.mark.parametrize(
    "flags",
    [
        ("--samples", "0"),
        ("--samples", "3000000000"),
        ("--puzzles", "0"),
        ("--puzzles", "101"),
        ("--temperature", "0"),
        ("--temperature", "nan"),
    ],
    ids=" ".join,
)
def test_options_that_cannot_be_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        self_consistency.main(list(flags))
    assert f"{flags[0]}: expected" in capsys.readouterr().err
