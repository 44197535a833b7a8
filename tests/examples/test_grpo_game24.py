"""The example that reinforces: its tokens and rewards against the rules, and its table against what the learner saw."""

import importlib.util
import re
import sys

import game24
import grpo_game24
import jax
import numpy as np
import pytest
from grpo_game24 import Words

PUZZLES = [(4, 9, 10, 13), (3, 3, 8, 8)]
WON = "13 - 9 = 4 , 4 4 10 ; 10 - 4 = 6 , 4 6 ; 6 * 4 = 24 , 24 ;"


def test_words_are_the_tokens_of_games():
    games = game24.trajectories(np.random.default_rng(0), 50, PUZZLES, unsolvable=0.0, explore=1.0, ask=0.0)
    for row in games:
        tokens = row[row != game24.PAD].tolist()
        assert Words().encode(Words().decode(tokens)) == tokens


def test_a_game_is_worth_1_if_it_reaches_24_by_the_rules():
    prompts = [grpo_game24.prompt_of(PUZZLES[0])] * 4
    assert [Words().bos_id(), *Words().encode(prompts[0])] == game24.encode_prompt(PUZZLES[0])
    wrong = [WON.replace("10 - 4 = 6 , 4 6", "10 - 4 = 5 , 4 5"), WON.replace("6 * 4 = 24 , 24 ;", ""), "? <live>"]
    assert grpo_game24.rewards_of(prompts, [WON, *wrong]) == [1.0, 0.0, 0.0, 0.0]
    third = "8 ÷ 3 = 8/3 , 8/3 3 8 ;"
    assert grpo_game24.rewards_of([grpo_game24.prompt_of(PUZZLES[1])], [third]) == [0.0]


def test_no_puzzle_is_posed_twice_or_held_out():
    posed = [prompt for batch in grpo_game24.batches(25, 50, seed=3) for prompt in batch["prompts"]]
    assert len(posed) == len(set(posed)) == 1250
    assert not {grpo_game24.prompt_of(puzzle) for puzzle in game24.split()[1]} & set(posed)


def test_the_table_has_what_the_games_earned(capsys):
    report, prompt = grpo_game24.Report(), grpo_game24.prompt_of(PUZZLES[0])
    assert report.timed(lambda one, two: one + two)(1, 2) == 3
    assert report.reward(prompts=[prompt] * 4, completions=[WON, "", WON, WON], mode="train") == [1.0, 0.0, 1.0, 1.0]
    report.reward(prompts=[prompt], completions=[""])
    rows = re.findall(r"^ +(\d+) +(\d\.\d{3}) +\d+\.\d\d$", capsys.readouterr().out, re.MULTILINE)
    assert rows == [("1", "0.750"), ("2", "0.000")]


@pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="google-tunix is not installed")
@pytest.mark.filterwarnings("default")  # Tunix' own
@pytest.mark.parametrize("rollout", ["engine", "vanilla"])
def test_both_rollouts_train(rollout, capsys):
    before = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # Tunix mixes dtypes, in threads of its own, too
    jax.config.update("jax_numpy_rank_promotion", "allow")
    try:
        grpo_game24.main(["--rollout", rollout, "--steps", "2", "--puzzles", "2", "--samples", "3"])
    finally:
        jax.config.update("jax_numpy_dtype_promotion", before[0])
        jax.config.update("jax_numpy_rank_promotion", before[1])
    rows = re.findall(r"^ +(\d) +(\d\.\d{3}) ", capsys.readouterr().out, re.MULTILINE)
    assert [step for step, _ in rows] == ["1", "2"]
    assert all(float(reward) * 6 == pytest.approx(round(float(reward) * 6), abs=0.01) for _, reward in rows)


def test_without_tunix_it_is_said_how_to_get_it(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tunix"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tunix", None)  # importing it raises ModuleNotFoundError
    with pytest.raises(SystemExit, match=r"pip install codec-jax\[rollout\]"):
        grpo_game24.main([])


@pytest.mark.parametrize(
    "flags", [("--steps", "0"), ("--samples", "1"), ("--samples", "3000000000"), ("--rollout", "other")], ids=" ".join
)
def test_options_that_cannot_be_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        grpo_game24.main(list(flags))
    assert flags[0] in capsys.readouterr().err
