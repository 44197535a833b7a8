"""Commands that measure on one GPU at the same time take turns."""

import fcntl
import threading

import pytest

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


def _try(turns: Turns) -> None:
    """Take the lock if it is free, or raise BlockingIOError."""
    with turns._path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
