"""Kernels in the GPU interpreter of Pallas (since JAX 0.11): what serves meanwhile, and what is said of races."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from kernel_calls import attend

from codec_jax.attention import backends
from codec_jax.attention.xla import XLA
from pallas_kernels import Family

# Copies that share one of the simulated threads of the copy engine hide each other's races.
PARAMS = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
RACE = "RACE DETECTED"


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, family: Family) -> Iterator[None]:
    """Let a family that is simulated serve on this machine, and nothing that was compiled before or is now."""
    monkeypatch.setattr(backends, "BACKENDS", (family._replace(why_not=lambda *_: None), XLA))
    for jitted in (attend, family.attend):
        jitted.clear_cache()
    yield
    family.attend.clear_cache()


def said_of(call: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a call that has races, and return what the interpreter says."""
    try:
        jax.block_until_ready(call())
        return capsys.readouterr().out
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12 raises what the versions before it print
        return str(error)
