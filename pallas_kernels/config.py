"""Sizes of the kernels by head size; `python -m benchmarks.tune` measures the alternatives."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """What is fastest among that which fits the shared memory of a multiprocessor, 227 KiB."""

    block_tokens: int  # KV tokens of a block
    stages: int  # blocks in flight


#: Much work for each thread block: long blocks keep the tensor cores busy.
LARGE = {64: Config(128, stages=3), 128: Config(128, stages=2), 256: Config(64, stages=2)}
#: Little work for each: short blocks, which can be dealt out more evenly and are done sooner after the last load.
SMALL = {64: Config(128, stages=3), 128: Config(64, stages=2), 256: Config(64, stages=2)}
#: KV tokens for each thread block from which on LARGE is faster,
LARGE_TOKENS = 4096
#: or how often they are read again, by another row tile: that is arithmetic which waits for no memory.
LARGE_AGAIN = 512


def is_large(tokens_per_cta: float, again_per_cta: float) -> bool:
    """Whether LARGE serves so many KV tokens, read again so often by other row tiles than the first."""
    return tokens_per_cta >= LARGE_TOKENS or again_per_cta >= LARGE_AGAIN


def config_for(head_dim: int, tokens_per_cta: float, again_per_cta: float) -> Config | None:
    """Choose the sizes for a head size and an amount of work; None for a head size that the kernels do not take."""
    return (LARGE if is_large(tokens_per_cta, again_per_cta) else SMALL).get(head_dim)


def config_of(head_dim: int, block_tokens: int) -> Config | None:
    """Return the sizes that go with blocks of some length, or None if the kernels do not take them."""
    found = (configs.get(head_dim) for configs in (LARGE, SMALL))
    return next((config for config in found if config and config.block_tokens == block_tokens), None)
