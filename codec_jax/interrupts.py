"""Ctrl-C in a long command, also where it gets lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Give a function that raises KeyboardInterrupt if there was one since.

    Python drops what is raised in callbacks of its garbage collector, and JAX has one, which runs often while programs
    are traced. For the main thread. A process that ignores Ctrl-C, as a script's commands in the background do, goes on
    doing so.

    >>> from codec_jax.interrupts import interrupts
    >>> with interrupts() as check:
    ...     check()  # nothing yet
    """
    seen = False

    def handle(_: int, __: FrameType | None) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield check
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
