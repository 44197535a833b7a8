"""An interrupt that Python drops is not lost."""

import gc
import signal

import pytest

from codec_jax.interrupts import interrupts


def test_an_interrupt_in_a_callback_of_the_garbage_collector_is_raised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = []

    def interrupted(phase: str, _: dict) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("sys.unraisablehook", dropped.append)
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as check:
        check()
        gc.callbacks.append(interrupted)
        try:
            gc.collect(0)
        finally:
            gc.callbacks.remove(interrupted)
        assert [each.exc_type for each in dropped] == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_interrupts_goes_on_doing_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts() as check:
            signal.raise_signal(signal.SIGINT)
            check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
