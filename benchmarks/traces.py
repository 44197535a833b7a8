"""Forests from files: trees that were recorded, and batches of the arrivals of a request trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.inputs import Case
from benchmarks.workloads import Workload
from codec_jax.prefixes import shared_runs

_DATA = Path(__file__).parent / "data"
RECORDED, TRACE = _DATA / "tot_sorting128.json", _DATA / "mooncake_conversation_2000.jsonl"

MOST_TREES = 24  # of a file are measured, from the smallest to the largest
BLOCK_TOKENS = 512  # of a Mooncake trace
BATCHES, BATCHES_OF_A_SIZE = (16, 32, 64), 4


def recorded_trees(path: Path) -> list[Case]:
    """Return trees of a file, evenly spaced by their unique tokens; each is a batch of its own.

    Raises ValueError, with the place, for what is no list of trees; OSError if the file cannot be read.
    """
    try:
        listed = json.loads(path.read_text())["trees"]
        trees = [_tree(number, tree, path) for number, tree in enumerate(listed)]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a JSON object with a list 'trees', got {error!r}") from None
    if not trees:
        raise ValueError(f"{path}: expected at least one tree, got none")
    trees.sort(key=lambda tree: sum(tree.length))
    chosen = np.unique(np.linspace(0, len(trees) - 1, min(MOST_TREES, len(trees))).round().astype(int))
    return [Case(trees[i], series="one tree a batch", x=sum(trees[i].length)) for i in chosen]


def _tree(number: int, tree: dict, path: Path) -> Workload:
    """Check a tree. Raises ValueError with its number."""
    where = f"{path}: trees[{number}]"
    fields = [tree.get(name) if isinstance(tree, dict) else None for name in ("parent", "length", "leaf")]
    for name, values in zip(("parent", "length", "leaf"), fields, strict=True):
        if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
            raise ValueError(f"{where}: {name}: expected a list of integers, got {values!r:.60}")
    parent, length, leaf = fields
    if len(parent) != len(length) or min(length) < 0:
        raise ValueError(f"{where}: expected a length of 0 or more for each of {len(parent)} nodes, got {len(length)}")
    if any(not -1 <= above < node for node, above in enumerate(parent)):
        raise ValueError(f"{where}: parent: expected -1 or an earlier node for every node")
    if not all(0 <= node < len(parent) for node in leaf):
        raise ValueError(f"{where}: leaf: expected nodes below {len(parent)}")
    return Workload(f"tree {number}: {len(leaf)} requests, {sum(length)} tokens", parent, length, leaf)


class Arrival(NamedTuple):
    """A request of a trace: the tokens of its prompt, and one id for each block of them."""

    tokens: int
    blocks: list[int]


def read_trace(path: Path) -> list[Arrival]:
    """Return the requests of a trace in Mooncake's format, in the order of the file; empty lines do not count.

    Raises ValueError, with all bad lines by number, for lines that are no such request; OSError if the file cannot be
    read.
    """
    arrivals, bad = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            arrivals.append(_arrival(json.loads(line)))
        except ValueError as error:  # also what is not JSON, or not UTF-8
            bad.append(f"line {number}: {error}")
    if bad:
        more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(f"{path}: {'; '.join(bad[:5])}{more}")
    return arrivals


def _arrival(fields: object) -> Arrival:
    """Check one request. Raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {fields!r:.60}")
    tokens, blocks = fields.get("input_length"), fields.get("hash_ids")
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"input_length: expected a positive integer, got {tokens!r:.60}")
    if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise ValueError(f"hash_ids: expected a list of integers from 0 on, got {blocks!r:.60}")
    if len(blocks) != -(-tokens // BLOCK_TOKENS):
        raise ValueError(
            f"hash_ids: expected one for each {BLOCK_TOKENS} of {tokens} tokens, {-(-tokens // BLOCK_TOKENS)}, "
            f"got {len(blocks)}"
        )
    return Arrival(tokens, blocks)


def arrivals(path: Path) -> list[Case]:
    """Return batches of a trace as they arrive, and of the whole trace sorted by prefix, as a batcher with a long queue
    would group it. Batches of a size are evenly spaced.

    Raises ValueError for a bad trace, or one that is shorter than a batch; OSError if the file cannot be read.
    """
    trace = read_trace(path)
    if len(trace) < max(BATCHES):
        raise ValueError(f"{path}: expected at least {max(BATCHES)} requests, got {len(trace)}")
    cases = []
    orders = {"as they arrive": trace, "sorted by prefix": sorted(trace, key=lambda arrival: arrival.blocks)}
    for order, requests in orders.items():
        for size in BATCHES:
            for first in np.linspace(0, len(trace) - size, BATCHES_OF_A_SIZE).round().astype(int):
                name = f"{order}, {first} to {first + size - 1}"
                cases.append(Case(prompts_tree(name, requests[first : first + size])))
    return cases


def prompts_tree(name: str, requests: list[Arrival]) -> Workload:
    """Build the radix tree of prompts by their blocks; a last block that is not full is shared at equal length only."""
    # A block is its id together with its tokens.
    symbols = []
    for tokens, blocks in requests:
        own = np.asarray(blocks, np.int64) * (BLOCK_TOKENS + 1) + BLOCK_TOKENS
        own[-1] -= len(blocks) * BLOCK_TOKENS - tokens
        symbols.append(own)
    runs = shared_runs(symbols)
    nodes = zip(runs.source, runs.begin, runs.end, strict=True)
    length = [int((symbols[source][begin:end] % (BLOCK_TOKENS + 1)).sum()) for source, begin, end in nodes]
    return Workload(name, runs.parent, length, runs.leaf)
