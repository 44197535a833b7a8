"""Checks of arguments that describe forests; each error names the argument, what was expected, and what came."""

import numpy as np
from jaxtyping import Int

from codec_jax.arrays import Integers


def int_vector(name: str, value: Integers) -> Int[np.ndarray, " n"]:
    """Return `value` as an int64 vector, or raise ValueError if it is not one-dimensional and integer."""
    array = np.asarray(value)
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name}: expected a list of integers, got {array.dtype} of shape {array.shape}")
    # int32 is what the arrays of a forest hold.
    if array.size and max(abs(int(array.min())), abs(int(array.max()))) >= 2**31:
        raise ValueError(f"{name}: expected integers below 2**31, got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def positive(name: str, value: int) -> None:
    """Raise ValueError unless the value is a positive integer."""
    if not isinstance(value, int | np.integer) or value <= 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def page_size(value: int) -> None:
    """Raise ValueError unless the value can be a page size."""
    if not isinstance(value, int | np.integer) or value <= 0 or value % 8:
        raise ValueError(f"page_size: expected a positive multiple of 8, got {value}")


def tree(parent: Int[np.ndarray, " n"], length: Int[np.ndarray, " n"], leaf: Int[np.ndarray, " requests"]) -> None:
    """Raise ValueError unless parents come before children, lengths fit them, and every leaf is a node."""
    if len(parent) != len(length):
        raise ValueError(
            f"length: expected one number for each of the {len(parent)} nodes in parent, got {len(length)}"
        )
    late = parent >= np.arange(len(parent))
    if late.any():
        node = int(np.argmax(late))
        raise ValueError(
            f"parent: expected every parent before its child, got parent[{node}] = {parent[node]} "
            "(a child before its parent, or a cycle); number the nodes from the roots down"
        )
    if (parent < -1).any():
        raise ValueError(f"parent: expected -1 for a root or the index of a node, got {parent.min()}")
    if (length < 0).any():
        node = int(np.argmin(length))
        raise ValueError(f"length: expected no negative lengths, got length[{node}] = {length[node]}")
    if not leaf.size:
        raise ValueError("leaf: expected at least one request, got none")
    wrong = (leaf < 0) | (leaf >= len(parent))
    if wrong.any():
        request = int(np.argmax(wrong))
        raise ValueError(
            f"leaf: expected nodes in [0, {len(parent)}), got leaf[{request}] = {leaf[request]}, which does not exist"
        )


def block_table(table: np.ndarray, lens: Int[np.ndarray, " B"], tokens_per_page: int) -> None:
    """Raise ValueError unless every row of the table holds the pages that its length needs."""
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or len(table) != len(lens):
        raise ValueError(
            f"block_table: expected integers of shape [{len(lens)}, max_pages] to go with context_lens, "
            f"got {table.dtype} of shape {table.shape}"
        )
    if not lens.any():
        raise ValueError("context_lens: expected at least one row with a context, got lengths that are all 0")
    room = table.shape[1] * tokens_per_page
    if (lens < 0).any() or (lens > room).any():
        row = int(np.argmax((lens < 0) | (lens > room)))
        raise ValueError(
            f"context_lens: expected lengths in [0, {room}], which is what {table.shape[1]} pages of "
            f"{tokens_per_page} tokens hold, got context_lens[{row}] = {lens[row]}"
        )
    needed = np.arange(table.shape[1]) < -(-lens // tokens_per_page)[:, None]
    # Token slots (page * page_size + offset) are int32 too.
    most = (2**31 - 1) // tokens_per_page - 1
    wrong = needed & ((table < 0) | (table > most))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"block_table: expected page ids, got block_table[{row}, {column}] = {table[row, column]}; "
            f"pages of {tokens_per_page} tokens are numbered 0 to {most} at most"
        )


def requests_in_use(requests: Integers, leaf: Int[np.ndarray, " B"]) -> Int[np.ndarray, " n"]:
    """Return `requests` as a vector, or raise ValueError if one of them is not a request in use."""
    wanted = int_vector("requests", requests)
    inside = (wanted >= 0) & (wanted < len(leaf))
    in_use = inside & (leaf[np.where(inside, wanted, 0)] >= 0)
    if not in_use.all():
        raise ValueError(
            f"requests: expected requests in use, {np.flatnonzero(leaf >= 0).tolist()}, got {wanted[~in_use].tolist()}"
        )
    return wanted


def tokens(name: str, value: Int[np.ndarray, " n"], vocab_size: int) -> None:
    """Raise ValueError unless every token is in the vocabulary."""
    wrong = (value < 0) | (value >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"{name}: expected tokens in [0, {vocab_size}), got {value[at]} at index {at}")
