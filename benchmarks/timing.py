"""Clocks: the kernels of a call by CUPTI, with the L2 cache flushed before it, and calls queued one after another."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from benchmarks.arguments import rows_file

#: Several times the L2 cache of any GPU.
_FLUSH_BYTES = 256 << 20


def command(doc: str | None, resumes: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a command that measures rows, and may go on with those of an interrupted run."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=doc)
    parser.add_argument("--json", type=rows_file, required=True, help="where the rows go")
    if resumes:
        parser.add_argument("--resume", action="store_true", help="keep what an interrupted run has measured")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the arguments of a command, and end it where there is no GPU to measure on."""
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"expected a GPU, the default backend is {jax.default_backend()}")
    return arguments


@jax.jit
def read(values: jax.Array) -> jax.Array:
    """Read an array and write a single number."""
    return values.max()


class Opaque(jax.stages.Wrapped):
    """A call that the profiler must not compile: it may be several programs, or donate its inputs."""

    def __init__(self, call: Callable[[], object]) -> None:
        """Wrap the call."""
        self.call = call

    def __call__(self) -> object:
        """Call."""
        return self.call()

    def trace(self) -> None:
        """Refuse: there is no single program to trace."""
        raise NotImplementedError("expected one program, a call may be several")

    lower = trace


class Flushed(Opaque):
    """A call after a flush of the L2 cache.

    The flush reads, since an array written instead would leave the cache full of lines that are yet to be written to
    memory, and the measured kernels would pay for that. Reading is also what a decoder does before attention: most of
    what the cache then holds are weights.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        """Take the memory that every flush reads."""
        super().__init__(call)
        self.junk = jnp.zeros(_FLUSH_BYTES // 4, jnp.int32)

    def __call__(self) -> object:
        """Flush, then call; the flush is waited for, since a call may use a stream of its own."""
        jax.block_until_ready(read(self.junk))
        return super().__call__()


@functools.cache
def flush_kernels() -> tuple[str, ...]:
    """Return the names of the kernels of a flush, in order, as seen when there is nothing else.

    Raises RuntimeError where CUPTI does not report kernels, as under another profiler.
    """
    _, kernels = profiler.measure(Flushed(lambda: None), aggregate=False)()
    if not kernels:
        raise RuntimeError("CUPTI: expected the kernels of a flush, got none; run without another profiler")
    return tuple(name for name, _ in kernels)


def kernel_runs(call: Callable[[], object], repeats: int) -> list[list[tuple[str, float]]]:
    """Return name and milliseconds of all kernels of each of several calls, L2 flushed before each.

    Kernels count whatever launched them; a call that JAX does not know of waits for its own.

    Raises ValueError for fewer than 2 repeats, RuntimeError if the flush does not come first or nothing comes after it.
    """
    if repeats < 2:
        raise ValueError(f"repeats: expected at least 2, got {repeats}")
    flush = flush_kernels()
    _, runs = profiler.measure(Flushed(call), aggregate=False, iterations=repeats)()
    own = []
    for run in runs:
        names = tuple(name for name, _ in run)
        if names[: len(flush)] != flush or names == flush:
            raise RuntimeError(f"call: expected kernels after those of the flush, {flush}, got {names}")
        own.append(run[len(flush) :])
    return own


def kernel_time(call: Callable[[], object], repeats: int) -> tuple[float, int]:
    """Return the median time of all kernels of a call in microseconds, and their number, by `kernel_runs`.

    Launches and the gaps between kernels do not count.
    """
    own = kernel_runs(call, repeats)
    return 1e3 * statistics.median(sum(ms for _, ms in run) for run in own), len(own[0])


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Return name and microseconds of every kernel of a call, which is made twice; nothing is flushed.

    Raises RuntimeError where CUPTI does not report kernels.
    """
    if jax.default_backend() != "gpu":  # where CUPTI is, without a driver, it ends the process
        raise RuntimeError(f"CUPTI: expected a GPU, the default backend is {jax.default_backend()}")
    _, kernels = profiler.measure(Opaque(call), aggregate=False)()
    if not kernels:
        raise RuntimeError("CUPTI: expected the kernels of a call, got none; run without another profiler")
    return [(name, 1e3 * ms) for name, ms in kernels]


def wall_time(call: Callable[[], object], calls: int = 50) -> float:
    """Return the time of a call in microseconds when many are queued one after another."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(calls):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls * 1e6
