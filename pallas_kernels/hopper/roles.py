"""The roles that a thread block's warpgroups have in PAC, and how they part."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

#: Registers that each thread begins with: 4 x 128 threads share 65,536.
_REGISTERS = 128


class Role(NamedTuple):
    """What some warpgroups do."""

    work: Callable[[Any], None]  # takes the warpgroup's pipeline
    registers: int  # of a thread
    warpgroups: int = 1


def take(roles: Sequence[Role], begin: Callable[[], Any]) -> None:
    """Let every warpgroup do its part: the roles have the warpgroups in order.

    Each begins by itself. Were the pipeline, and what it loads, made ahead of where they part, all of it would be kept
    for all of them, also where one has few registers, and they would spill.
    """
    warpgroup, first = lax.axis_index("warpgroup"), 0
    for role in roles:

        @pl.when((warpgroup >= first) & (warpgroup < first + role.warpgroups))
        def _work(role: Role = role) -> None:
            plgpu.set_max_registers(role.registers, action="increase" if role.registers > _REGISTERS else "decrease")
            role.work(begin())

        first += role.warpgroups
