"""Forests from files: trees that were recorded, and batches of the arrivals of a request trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.inputs import Case
from benchmarks.offered import BLOCK_TOKENS, TRACE
from benchmarks.workloads import Workload
from codec_jax.forest.radix_tree import shared_tokens

RECORDED = TRACE.with_name("tot_sorting128.json")

MAX_TREES = 24  # of a file are measured, from the smallest to the largest
BATCHES, BATCHES_OF_A_SIZE = (16, 32, 64), 4


def recorded_trees(path: Path = RECORDED) -> list[Case]:
    """Return trees of a file, evenly spaced by their unique tokens; each is a batch of its own."""
    listed = [(tree["parent"], tree["length"], tree["leaf"]) for tree in json.loads(path.read_text())["trees"]]
    trees = [
        Workload(f"tree {number}: {len(leaf)} requests, {sum(length)} tokens", parent, length, leaf)
        for number, (parent, length, leaf) in enumerate(listed)
    ]
    trees.sort(key=lambda tree: sum(tree.length))
    chosen = np.unique(np.linspace(0, len(trees) - 1, min(MAX_TREES, len(trees))).round().astype(int))
    return [Case(trees[i], series="one tree a batch", x=sum(trees[i].length)) for i in chosen]


class Arrival(NamedTuple):
    """A request of a trace: the tokens of its prompt, and one id for each block of them."""

    tokens: int
    blocks: list[int]


def arrivals(path: Path = TRACE) -> list[Case]:
    """Return batches of a trace as they arrive, and of the whole trace sorted by prefix, as a batcher with a long queue
    would group it. Batches of a size are evenly spaced. The file is in Mooncake's format, a request a line.
    """
    fields = [json.loads(line) for line in path.read_text().splitlines()]
    trace = [Arrival(each["input_length"], each["hash_ids"]) for each in fields]
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
    tree = shared_tokens(symbols, page_size=16)
    parent, blocks, leaf = (values.tolist() for values in (tree.parent, tree.length, tree.leaf))
    length = [0] * len(parent)
    for own, node in zip(symbols, leaf, strict=True):
        tokens, end = own % (BLOCK_TOKENS + 1), len(own)
        while node >= 0:
            begin = end - blocks[node]
            length[node] = int(tokens[begin:end].sum())
            node, end = parent[node], begin
    return Workload(name, parent, length, leaf)
