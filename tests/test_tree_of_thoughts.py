import json
import re
import sys
from collections import Counter

import game24
import game24_model
import pytest
import tree_of_thoughts
from safetensors.numpy import load_file, save_file


def play(monkeypatch, capsys, tmp_path, *flags):
    """Run the example as its command line does; returns its figures and what it printed."""
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["tree_of_thoughts.py", "--json", str(path), *flags])
    tree_of_thoughts.main()
    return json.loads(path.read_text()), capsys.readouterr().out


def answers(output):
    """Parse the printed solutions; none may be printed that is not one."""
    found = re.findall(r"^ *(\d+) (\d+) (\d+) (\d+)   (.+) = 24$", output, re.MULTILINE)
    for *numbers, expression in found:
        assert abs(eval(expression) - 24) < 1e-9
        assert Counter(re.findall(r"\d+", expression)) == Counter(numbers)
    return found


def test_held_out_puzzles_are_solved_by_search_more_often_than_by_as_many_tokens_of_attempts(
    monkeypatch, capsys, tmp_path
):
    figures, output = play(monkeypatch, capsys, tmp_path, "--puzzles", "50")
    assert figures["total"] == 50
    assert figures["solved"] == len(answers(output)) >= 38
    assert figures["solved"] > figures["baseline_solved"]
    assert figures["baseline_generated_tokens"] >= figures["generated_tokens"]
    assert figures["kv_tokens_read"] < figures["kv_tokens_unshared"]
    assert figures["seconds"] > 0


def test_a_puzzle_can_be_named_its_tree_is_drawn_and_the_same_seed_plays_the_same_game(monkeypatch, capsys, tmp_path):
    first, output = play(monkeypatch, capsys, tmp_path, "--numbers", "4 6 7 9", "--seed", "3")
    assert first["total"] == 1
    assert "4 6 7 9" in output
    assert "└─" in output
    second, again = play(monkeypatch, capsys, tmp_path, "--numbers", "4 6 7 9", "--seed", "3")
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert answers(output) == answers(again)
    assert output.partition("tree of thoughts  ")[0] == again.partition("tree of thoughts  ")[0]  # the tree, too


@pytest.mark.parametrize("numbers", ["4 6 7", "0 1 2 3", "1 2 3 14", "a b c d", ""])
def test_numbers_that_are_no_puzzle_are_refused(monkeypatch, capsys, tmp_path, numbers):
    with pytest.raises(SystemExit):
        play(monkeypatch, capsys, tmp_path, "--numbers", numbers)
    assert "four whole numbers from 1 to 13" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--puzzles", "0"), ("--puzzles", "101"), ("--breadth", "0")])
def test_counts_out_of_range_are_refused(monkeypatch, capsys, tmp_path, flags):
    with pytest.raises(SystemExit):
        play(monkeypatch, capsys, tmp_path, *flags)
    assert f"{flags[0]}: expected" in capsys.readouterr().err


def test_a_result_file_in_a_missing_directory_is_refused_before_any_work(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        play(monkeypatch, capsys, tmp_path, "--json", str(tmp_path / "missing" / "figures.json"))
    assert "existing directory" in capsys.readouterr().err


def test_missing_weights_stop_the_example_with_the_way_out(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit, match=r"expected a file at .*none\.safetensors.*train_game24"):
        play(monkeypatch, capsys, tmp_path, "--weights", str(tmp_path / "none.safetensors"))


def test_truncated_weights_are_refused(tmp_path):
    path = tmp_path / "short.safetensors"
    path.write_bytes(game24_model.WEIGHTS.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="truncated"):
        game24_model.load(path)


def test_weights_of_another_model_are_refused_with_everything_that_differs(tmp_path):
    path, tensors = tmp_path / "other.safetensors", load_file(game24_model.WEIGHTS)
    tensors["norm.scale"] = tensors["norm.scale"][:-1].copy()
    del tensors["embedding.embedding"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"embedding\.embedding.*norm\.scale \(expected \(256,\), got \(255,\)\)"):
        game24_model.load(path)


def test_weights_survive_saving(tmp_path):
    path = tmp_path / "copy.safetensors"
    game24_model.save(game24_model.load(), path)
    original, copy = load_file(game24_model.WEIGHTS), load_file(path)
    assert original.keys() == copy.keys()
    assert all((original[name] == copy[name]).all() for name in original)


def test_a_solution_must_use_its_own_numbers():
    thought = tree_of_thoughts.Thought((1, 1, 1, 1), (game24.TARGET,))
    with pytest.raises(ValueError, match="moves"):
        _ = thought.solved
