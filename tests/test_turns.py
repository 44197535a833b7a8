"""Commands that measure on one GPU at the same time take turns."""

import fcntl
import subprocess
import sys
import threading

import pytest

from benchmarks import counters
from benchmarks.turns import Turns


@pytest.fixture
def pair(tmp_path):
    """The locks of two commands; files that are open twice exclude each other within a process too."""
    return Turns(tmp_path / "lock"), Turns(tmp_path / "lock")


def test_a_command_waits_until_the_other_gives_the_gpu_away_and_gets_it_back_after(pair):
    mine, other = pair
    events: list[str] = []
    done = threading.Event()

    def measure() -> None:
        with other.taken():
            events.append("other begins")
            events.append("other ends")
        done.set()

    thread = threading.Thread(target=measure)
    with mine.taken():
        thread.start()
        assert not done.wait(0.2)
        events.append("mine compiles")
        with mine.given():
            assert done.wait(10)
        events.append("mine goes on")
        with pytest.raises(BlockingIOError):
            _try(other)
    thread.join()
    _try(other)
    assert events == ["mine compiles", "other begins", "other ends", "mine goes on"]


def test_giving_away_what_is_not_taken_does_nothing_and_a_failure_frees_the_gpu(pair):
    mine, other = pair
    with mine.given():
        _try(other)
    with pytest.raises(RuntimeError), mine.taken():
        raise RuntimeError("measurement")
    _try(other)


def test_a_turn_that_takes_too_long_ends_the_process_and_waits_do_not_count(tmp_path):
    script = f"""
import pathlib, threading, time
from benchmarks.turns import Turns
path = pathlib.Path({str(tmp_path / "lock")!r})
mine = Turns(path)
def hold(taken):
    with Turns(path).taken():
        taken.set()
        time.sleep(1)
def held():
    taken = threading.Event()
    threading.Thread(target=hold, args=[taken]).start()
    taken.wait()
held()
with mine.taken(at_most=0.7):
    with mine.given():
        held()
time.sleep(1)
with mine.taken():
    time.sleep(1)
print("in time", flush=True)
with mine.taken(at_most=0.7):
    with mine.given():
        time.sleep(50)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "in time\n")
    said = "ended after 0:00:00.700000 without a wait for the GPU"
    assert counters.last_words(ended.stdout, ended.stderr) == said


def _try(turns: Turns) -> None:
    """Take the lock if it is free, or raise BlockingIOError."""
    with turns._path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
