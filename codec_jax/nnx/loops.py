"""The loop over the tokens of a call, which ends early only where the host need not wait to know that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def runs_to_its_end() -> bool:
    """Whether a loop always takes all its turns: on a GPU.

    There the host would have to ask the device before every turn, would wait for the answer, and the device then for
    the host. It could neither prepare what comes next meanwhile nor dispatch it.
    """
    return jax.default_backend() == "gpu"


def turns_for(tokens: int, most: int) -> int:
    """Return the turns of the loop that draws so many tokens, `most` at a time: one that ends early serves any number.

    Of one that runs to its end, what it takes beyond the tokens is lost. Powers of two are few programs.
    """
    return min(1 << max(tokens - 1, 0).bit_length(), most) if runs_to_its_end() else most


def repeat(
    step: Callable[[Any, tuple], tuple], carry: tuple, times: int, is_needed: Callable[[tuple], jax.Array]
) -> tuple:
    """Return what is carried after `times` turns of `carry = step(i, carry)`.

    A turn after which nothing is needed any more changes nothing that counts, and is left out where that is for free.
    """
    if runs_to_its_end():
        return lax.fori_loop(0, times, step, carry)

    def turn(state: tuple) -> tuple:
        i, carry = state
        return i + 1, step(i, carry)

    return lax.while_loop(lambda state: (state[0] < times) & is_needed(state[1]), turn, (jnp.int32(0), carry))[1]
