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
#: KV tokens for each thread block from which on LARGE is faster.
LARGE_TOKENS = 4096
#: So is it from so many on that another row tile reads again: that is arithmetic which waits for no memory.
LARGE_AGAIN = 512


def is_large(num_tokens: int, again: int, heads_per_cta: float) -> bool:
    """Whether LARGE serves so many KV tokens, read again so often, with so many kv heads for each thread block."""
    return num_tokens * heads_per_cta >= LARGE_TOKENS or again * heads_per_cta >= LARGE_AGAIN


def config_for(head_dim: int, num_tokens: int, again: int, heads_per_cta: float) -> Config | None:
    """Choose the sizes for a head size and an amount of work; None for a head size that the kernels do not take."""
    return (LARGE if is_large(num_tokens, again, heads_per_cta) else SMALL).get(head_dim)


def config_of(head_dim: int, block_tokens: int) -> Config | None:
    """Return the sizes that go with blocks of some length, or None if the kernels do not take them."""
    found = (configs.get(head_dim) for configs in (LARGE, SMALL))
    return next((config for config in found if config and config.block_tokens == block_tokens), None)
