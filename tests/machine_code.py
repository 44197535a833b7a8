"""Kernels as machine code of an H200, without one: what its compiler says of registers and spills."""

import os
import re
import subprocess
import sys
from pathlib import Path


def compiled(script: str, target: str, kernels: int) -> str:
    """Run a script that compiles so many kernels, and return what it and the compiler say.

    The script finds the description of the GPU in its first argument.
    """
    environment = os.environ | {
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, target], env=environment, capture_output=True, text=True, timeout=600
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert len(re.findall(r"Used (\d+) registers", said)) == kernels
    return said


def check_on_hopper(script: str, target: str, kernels: int) -> str:
    """Check that of so many kernels that a script compiles none spills, nor has products that wait for each other.

    Arguments and result are those of `compiled`.
    """
    said = compiled(script, target, kernels)
    assert set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)) == {("0", "0")}
    # ptxas says C7510 where it makes wgmma wait for each other.
    assert "C7510" not in said
    assert "serialized" not in said
    return said
