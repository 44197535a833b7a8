"""Turns on the GPUs: commands that run at the same time compile side by side, and measure one after another.

A measurement must have the GPU to itself, but most of a command's time goes into tracing and compiling on the host.
A command takes its turn for each case and leaves the GPU to others while it compiles. The lock is a file, so that it
goes when its process does.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

Signature = tuple[jax.tree_util.PyTreeDef, tuple[jax.ShapeDtypeStruct, ...]]


class Turns:
    """A lock of this process: on the GPUs of the host, or on what needs it in a way of its own."""

    def __init__(self, path: Path) -> None:
        """Use a lock file, which need not be there."""
        self._path, self._file = path, -1

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the GPU and keep it; must not be nested."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Leave the GPU to others meanwhile, if it is taken."""
        if self._file < 0:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def _give(self) -> None:
        os.close(self._file)
        self._file = -1


def _lock_file(what: str) -> Path:
    """Return one file for all GPUs: which of them a process sees can be said in many ways, and they share the host."""
    return Path(tempfile.gettempdir()) / f"codec_jax-benchmarks-{os.getuid()}-{what}.lock"


GPU = Turns(_lock_file("gpu"))
#: For ncu, which waits for another one even with the GPU in hand: to be taken before the GPU is.
NCU = Turns(_lock_file("ncu"))


def compiled(call: Callable, *arguments: object, tuned: bool = False) -> jax.stages.Compiled:
    """Compile a jitted call for these arguments while others have the GPU.

    `tuned` lets XLA choose its kernels by timing them, for which it needs the GPU: others have it while tracing only.
    """
    with GPU.given():
        lowered = call.lower(*arguments)
        if not tuned:
            return lowered.compile({"xla_gpu_autotune_level": 0})
    return lowered.compile()


def compiled_once(call: Callable, *arguments: object, tuned: bool = False) -> jax.stages.Compiled:
    """Compile as `compiled` does, or return what was compiled for arguments of the same shapes.

    For calls that live as long as the process.
    """
    leaves, tree = jax.tree.flatten(arguments)
    return _compiled_for(call, (tree, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)), tuned)


def forget_compiled() -> None:
    """Compile anew from here on, since something that programs depend on besides their arguments has changed."""
    _compiled_for.cache_clear()


@functools.cache
def _compiled_for(call: Callable, signature: Signature, tuned: bool) -> jax.stages.Compiled:
    return compiled(call, *jax.tree.unflatten(*signature), tuned=tuned)
