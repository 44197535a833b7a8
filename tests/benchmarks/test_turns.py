"""Commands that measure on one GPU at the same time take turns."""

import fcntl
import threading

import pytest

from benchmarks import turns
from benchmarks.turns import Turns


@pytest.fixture
def pair(tmp_path):
    """The locks of two commands; files that are open twice exclude each other within a process too."""
    return Turns(tmp_path / "lock"), Turns(tmp_path / "lock")


def test_a_command_waits_until_the_other_gives_the_gpu_away_and_gets_it_back_after(pair):
    mine, other = pair
    done = threading.Event()

    def measure() -> None:
        with other.taken():
            done.set()

    thread = threading.Thread(target=measure)
    with mine.taken():
        thread.start()
        assert not done.wait(0.2)
        with mine.given():
            assert done.wait(10)
        with pytest.raises(BlockingIOError):
            _try(other)
    thread.join()
    _try(other)


@pytest.mark.parametrize("other", ["1", "0,1", "GPU-4f", None])
def test_commands_have_one_lock_whichever_gpus_they_see(other, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    alone = turns._lock_file("gpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if other is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", other)
    assert turns._lock_file("gpu") == alone != turns._lock_file("ncu")


def _try(turns: Turns) -> None:
    """Take the lock if it is free, or raise BlockingIOError."""
    with turns._path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
