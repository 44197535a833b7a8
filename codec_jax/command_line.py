"""What the commands share: a model, options of an engine, and numbers, with errors that say what was expected."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from codec_jax.nnx.checkpoint import Checkpoint, open_checkpoint
from codec_jax.nnx.engine import INVARIANT_HELP
from codec_jax.nnx.memory import KV_CACHE_HELP, KV_DTYPE_HELP, KV_DTYPES
from codec_jax.nnx.replicas import PARALLEL_HELP


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a model is held, by how many devices, and how much it decodes at a time."""
    count = count_parser()
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help=KV_DTYPE_HELP)
    parser.add_argument(
        "--max-requests", type=count, default=128, help="decoded at a time, by each replica (default: 128)"
    )
    parser.add_argument("--kv-cache-gib", type=gib_parser(), help=KV_CACHE_HELP)
    parser.add_argument("--invariant", action="store_true", help=INVARIANT_HELP)
    for axis, text in PARALLEL_HELP.items():
        parser.add_argument(f"--{axis}-parallel", type=count, default=1, help=text)


def open_model(directory: Path) -> Checkpoint:
    """Open the checkpoint that `--model` names."""
    try:
        return open_checkpoint(directory)
    except NotADirectoryError as error:
        raise NotADirectoryError(str(error).replace("directory", "--model", 1)) from error


def number_parser(kind: type, expected: str, low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers with low <= number < high."""

    def parse(text: str) -> float:
        try:
            if low <= (number := kind(text)) < high:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


def gib_parser() -> Callable[[str], float]:
    """Return a parser of an amount of memory."""
    return number_parser(float, "a positive number of GiB", math.ulp(0.0), 2.0**33)


def count_parser() -> Callable[[str], float]:
    """Return a parser of how many there are to be."""
    return number_parser(int, "a positive whole number", 1, math.inf)
