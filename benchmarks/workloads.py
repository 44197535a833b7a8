"""Prefix forests to measure on: the paper's sweeps, and trees that probe one thing each."""

import random
from typing import NamedTuple


class Workload(NamedTuple):
    """The arguments of `Forest.from_nodes`, with a name."""

    name: str
    parent: list[int]
    length: list[int]
    leaf: list[int]


def shared_root(root: int, requests: int, own: int) -> Workload:
    """One document and a tail of its own for every request."""
    name = f"{root} shared, {requests} x {own}"
    return Workload(name, [-1] + [0] * requests, [root] + [own] * requests, list(range(1, requests + 1)))


def flat(requests: int, length: int) -> Workload:
    """Nothing is shared."""
    name = f"no sharing, {requests} x {length}"
    return Workload(name, [-1] * requests, [length] * requests, list(range(requests)))


def k_ary(children: int, depth: int, length: int) -> Workload:
    """A full tree with requests at its leaves."""
    parent, level = [-1], [0]
    for _ in range(depth - 1):
        below = [(len(parent) + i, node) for i, node in enumerate(n for n in level for _ in range(children))]
        parent += [node for _, node in below]
        level = [index for index, _ in below]
    return Workload(f"{children}-ary, depth {depth}, {length} a node", parent, [length] * len(parent), level)


def degenerate(depth: int, length: int) -> Workload:
    """A chain from which one request branches off at every level."""
    parent, leaf, spine = [-1], [], 0
    for _ in range(1, depth):
        leaf.append(len(parent) + 1)
        parent += [spine, spine]
        spine = len(parent) - 2
    return Workload(f"degenerate, depth {depth}, {length} a node", parent, [length] * len(parent), [*leaf, spine])


def shared_ratio(ratio: float, shared: int, context: int = 120_000, requests: int = 16) -> Workload:
    """Sixteen contexts of one length with a varying share in common."""
    return shared_root(shared, requests, context - shared)._replace(name=f"shared ratio {ratio}")


def share_of_context(share: float, context: int = 32_768, requests: int = 16) -> Workload:
    """Contexts of one length, of which the first part is common to all; rounded to pages of 16 tokens."""
    shared = round(share * context / 16) * 16
    workload = shared_root(shared, requests, context - shared) if shared else flat(requests, context)
    return workload._replace(name=f"{share:.0%} of each context shared")


def narrow_then_wide(own: int) -> Workload:
    """A binary tree of depth 4 with tiny inner nodes below its root."""
    length = [4096] + [16] * 6 + [own] * 8
    parent = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    return Workload(f"4096 root, 16 a node, 8 x {own}", parent, length, list(range(7, 15)))


def random_lengths(children: int, depth: int) -> Workload:
    """A full tree of nodes of 16 to 256 tokens, few of which fill their last page."""
    tree, draw = k_ary(children, depth, 0), random.Random(depth)
    length = [draw.randint(16, 256) for _ in tree.length]
    return tree._replace(name=f"{children}-ary, depth {depth}, 16 to 256 a node", length=length)


def random_tree(requests: int, spread: int) -> Workload:
    """A deep tree of nodes of 16 to 256 tokens, each under one of the `spread` before it; requests at its leaves."""
    draw, parent, leaf = random.Random(spread), [-1], {0}
    while len(leaf) < requests:
        node = len(parent)
        parent.append(draw.randrange(max(0, node - spread), node))
        leaf = leaf - {parent[node]} | {node}
    length = [draw.randint(16, 256) for _ in parent]
    return Workload(f"random, {requests} requests, 16 to 256 a node", parent, length, sorted(leaf))


#: The paper's sweeps over batch size, depth, shared ratio, branching and length.
PAPER = [
    *(shared_root(120_000, requests, 2048) for requests in (4, 8, 16, 32, 64)),
    *(k_ary(2, depth, 1024) for depth in (2, 3, 4, 5, 6)),
    *(shared_ratio(*r) for r in ((0.05, 54_848), (0.1, 76_800), (0.2, 96_000), (0.5, 112_928), (0.8, 118_144))),
    *(k_ary(children, 3, 1024) for children in (3, 4, 5)),
    degenerate(6, 4096),
    *(narrow_then_wide(own) for own in (512, 2048, 8192)),
]

#: Sizes at which memory, arithmetic, latency or the lack of sharing decides.
PROBE = [
    shared_root(120_000, 16, 1024),
    shared_root(32_768, 64, 1024),
    shared_root(32_768, 16, 1024),
    shared_root(4096, 16, 256),
    k_ary(2, 5, 8192),
    degenerate(8, 16_384),
    flat(32, 8192),
]

#: Many requests over many small nodes, one long request, long requests that share nothing.
SHAPES = [
    random_lengths(2, 11),
    random_tree(1024, spread=64),
    flat(1, 500_000),
    flat(16, 65_536),
]

#: Roots of several lengths under several requests, and no sharing: for latents, of which a token has few bytes.
LATENT = [
    *(shared_root(root, requests, 256) for root in (4096, 32_768, 120_000) for requests in (16, 64, 256)),
    *(flat(requests, length) for requests, length in ((16, 32_768), (64, 8192), (256, 4096))),
]
LATENT_PROBE = [
    shared_root(4096, 256, 256),
    shared_root(32_768, 64, 256),
    shared_root(120_000, 16, 256),
    flat(64, 8192),
]
