"""Measure the rates at which a GPU reads and multiplies at most: the ceilings that rooflines are made of.

    python -m benchmarks.ceilings --json benchmarks/results/ceilings_h200.json

Measures what XLA reaches on the default device. Rooflines use fixed numbers for each kind of GPU, so that rows of
different days compare.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks.rows import collect, provenance, publish
from benchmarks.timing import command, kernel_time, parse, read
from benchmarks.turns import GPU

READ_BYTES, SIZE, REPEATS = 8 << 30, 8192, 15


class Ceilings(NamedTuple):
    """Rates of one kind of GPU."""

    read_bytes_per_us: float
    flops_per_us: float  # of bfloat16 products


#: By `device_kind`. On an H200 attention over long contexts reads faster than XLA's maximum of an array does. Products
#: reach more than this where nothing else goes on.
CEILINGS = {"NVIDIA H200": Ceilings(4.52e6, 700e6), "NVIDIA H100 80GB HBM3": Ceilings(3.19e6, 700e6)}


def ceilings() -> Ceilings:
    """Return the rates of the default device; where it is no GPU, and nothing is measured, those of an H200.

    Raises ValueError for another GPU.
    """
    device = jax.devices()[0]
    kind = device.device_kind if device.platform == "gpu" else "NVIDIA H200"
    if kind not in CEILINGS:
        raise ValueError(
            f"device: expected {' or '.join(CEILINGS)}, got {kind}; measure it with `python -m benchmarks.ceilings` "
            f"and add it to CEILINGS there"
        )
    return CEILINGS[kind]


def main() -> None:
    """Measure and write a row."""
    parser = command(__doc__)
    arguments = parse(parser)
    with GPU.taken():
        row = provenance() | measure(READ_BYTES, SIZE)
    publish(arguments.json, collect([row], arguments.json))


def measure(read_bytes: int, size: int) -> dict:
    """Read an array, and multiply two square matrices of so many rows."""
    values = jnp.zeros(read_bytes // 4, jnp.int32)
    left, right = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (0, 1))
    reading = kernel_time(lambda: jax.block_until_ready(read(values)), REPEATS)[0]
    multiplying = kernel_time(lambda: jax.block_until_ready(_multiply(left, right)), REPEATS)[0]
    return {
        "name": f"{read_bytes >> 30} GiB read, {size} x {size} x {size} multiplied",
        "read_bytes_per_us": read_bytes / reading,
        "flops_per_us": 2 * size**3 / multiplying,
    }


@jax.jit
def _multiply(left: Float[Array, "M K"], right: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return left @ right


if __name__ == "__main__":
    main()
