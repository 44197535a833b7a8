"""Which query rows see which KV token: one definition for the planner, the XLA path and the kernels.

    row r sees token i of node n  if  lo(n) <= r < hi(n)             its request reads the node
                                 and  i < length(n)                  the token is there by now
                                 and  start(n) + i <= position(r)    it is not after the query token, with T > 1
                                 and  start(n) + i >= first(r)       it is in the query token's window, if there is one

Requests are in depth-first order, so the readers of a token are one interval of rows, and two row numbers say who sees
it: `first | end << 16`, or 0 for nobody. The candidates of a draft tree take the third line into the interval: those
who see one of them are fewer rows than read the node, and as consecutive. For the fourth line, a candidate's position
is the one that its depth gives. Everything here works on NumPy arrays, on JAX arrays and on registers of a kernel.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from pallas_kernels.heads import Window

#: Rows that a tile, or both tiles of a wide segment, may have: two row numbers share an int32.
MAX_ROWS = (1 << 15) - 1


def pack_readers(first: Any, end: Any) -> Any:
    """Write the interval of rows [first, end) as one number."""
    return first | end << 16


def unpack_readers(readers: Any) -> tuple[Any, Any]:
    """Return the first row of an interval, and the number of its rows."""
    first = readers & 0xFFFF
    return first, lax.shift_right_logical(readers, jnp.int32(16)) - first


def readers_of_token(readers: Any, token: Any, length: Any) -> Any:
    """Return the readers of a token from those of its node: nobody, past the node's end."""
    return jnp.where(token < length, readers, 0)


def is_reader(row: Any, first: Any, count: Any) -> Any:
    """Whether a row is in an interval, by one comparison: what lies before `first` wraps around."""
    return (row - first).astype(jnp.uint32) < count.astype(jnp.uint32)


def is_not_after(token_position: Any, query_position: Any) -> Any:
    """Whether causality lets a query token see a KV token."""
    return token_position <= query_position


def is_in_window(token_position: Any, first_position: Any) -> Any:
    """Whether a window lets a query token, which sees `first_position` and what follows, see a KV token."""
    return token_position >= first_position


def bounds(query_position: Any, causal: bool, window: Window | None) -> list[tuple[Any, Callable[[Any, Any], Any]]]:
    """List what bounds the positions of KV tokens that query tokens see, and what compares a KV token's with each."""
    found: list[tuple[Any, Callable[[Any, Any], Any]]] = [(query_position, is_not_after)] if causal else []
    return found if window is None else [*found, (window.first_position(query_position), is_in_window)]


def pages_seen(
    length: Int[np.ndarray, " n"],
    start: Int[np.ndarray, " n"],
    page_tokens: int,
    steps: int,
    query_positions: Int[np.ndarray, "2 n"] | None,
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"] | None]:
    """Count the pages of nodes, from the first on, that all of their readers see in full, and that some may see at all.

    This is the definition above for whole pages, while requests grow by up to `steps` tokens. `query_positions` are the
    first and the last of the query tokens, or None with T = 1, where every reader sees the whole node, and the second
    count is None. That a query token sees those before it is not relied on: they may be a draft tree.
    """
    whole = length // page_tokens
    if query_positions is None:
        return whole, None
    first, last = query_positions
    return np.minimum(whole, (first - start) // page_tokens), (last + steps - start) // page_tokens + 1


def pages_behind(
    length: Int[np.ndarray, " n"],
    start: Int[np.ndarray, " n"],
    page_tokens: int,
    first_positions: Int[np.ndarray, "2 n"],
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Count the pages of nodes, from the first on, that a window hides from all of their readers, and from some.

    `length` is what nodes may come to hold. `first_positions` are the smallest that a reader sees by now, and the
    greatest that one may come to see first. Both counts are negative where a node begins after them.
    """
    smallest, greatest = first_positions
    # The last page of a node may be hidden before its last slot is.
    hidden = np.where(smallest - start < length, (smallest - start) // page_tokens, -(-length // page_tokens))
    return hidden, -((start - greatest) // page_tokens)
