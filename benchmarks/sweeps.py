"""The cases of each figure: workloads and layouts, in the charts and at the places where they are drawn.

Where the paper's text and its released code give a sweep in different forms, a figure has a chart of each.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.inputs import Case, Layout
from benchmarks.traces import arrivals, recorded_trees
from benchmarks.workloads import (
    Workload,
    degenerate,
    flat,
    k_ary,
    narrow_then_wide,
    random_lengths,
    random_tree,
    share_of_context,
    shared_ratio,
    shared_root,
)

#: q heads and kv heads of published models, all of head size 128.
MODELS = {
    "Qwen3 0.6B, 1.7B": Layout(16, 8),
    "Qwen3 4B, 8B, Llama 3 8B": Layout(32, 8),
    "Qwen3 14B": Layout(40, 8),
    "Qwen3 32B, Llama 3 70B": Layout(64, 8),
}


def line(series: str, workload: Callable[[int], Workload], places: tuple[int, ...]) -> list[Case]:
    """Return a chart of one workload at several sizes."""
    return [Case(workload(x), series=series, x=x) for x in places]


def length() -> list[Case]:
    """Sequence length: what is shared grows, or what is not."""
    roots = (1024, 2048, 4096, 8192, 16_384, 32_768, 50_000, 65_536, 120_000)
    owns = (128, 512, 1024, 2048, 4096, 8192, 16_384)
    return [
        *line("one root of this length, 16 x 1024", lambda n: shared_root(n, 16, 1024), roots),
        *line("4096 root, 16 a node, 8 x this length", narrow_then_wide, owns),
    ]


def batch() -> list[Case]:
    """Batch size under one document: a long one, and one that fits the cache."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    return [
        *line("120000 shared, 2048 each", lambda n: shared_root(120_000, n, 2048), sizes),
        *line("4096 shared, 256 each", lambda n: shared_root(4096, n, 256), sizes),
    ]


def depth() -> list[Case]:
    """Depth of full and of degenerate trees."""
    return [
        *line("2-ary, 1024 a node", lambda n: k_ary(2, n, 1024), (2, 3, 4, 5, 6, 7)),
        *line("degenerate, 4096 a node", lambda n: degenerate(n, 4096), (2, 4, 6, 8, 12, 16)),
    ]


def ratio() -> list[Case]:
    """Shared ratio: of the unique tokens, or of every context."""
    of_unique = ((0.05, 54_848), (0.1, 76_800), (0.2, 96_000), (0.5, 112_928), (0.8, 118_144))
    return [
        *(
            Case(shared_ratio(*each), series="shared / unique tokens, 16 contexts of 120000", x=each[0])
            for each in of_unique
        ),
        *(
            Case(share_of_context(each), series="shared / context, 16 contexts of 32768", x=each)
            for each in (0.0, 0.25, 0.5, 0.75, 0.9, 0.97)
        ),
    ]


def shape() -> list[Case]:
    """Tree shapes: two levels, full trees, chains, random trees, and what shares nothing."""
    trees = [
        *(shared_root(*sizes) for sizes in ((4096, 16, 256), (32_768, 16, 1024), (32_768, 64, 1024))),
        *(k_ary(children, 3, length) for length in (1024, 8192) for children in (2, 3, 4, 5)),
        *(degenerate(*sizes) for sizes in ((6, 4096), (8, 16_384))),
        *(narrow_then_wide(own) for own in (512, 2048, 8192)),
        random_lengths(2, 11),
        random_tree(1024, spread=64),
        flat(32, 8192),
    ]
    return [Case(tree) for tree in trees]


def variants() -> list[Case]:
    """Multi-head, grouped-query and multi-query attention: 1 to 32 of 32 q heads for each kv head."""
    trees = (shared_root(32_768, 16, 1024), k_ary(2, 5, 2048), flat(16, 8192))
    return [
        Case(tree._replace(name=f"{tree.name}, group {group}"), Layout(32, 32 // group), tree.name, group)
        for tree in trees
        for group in (1, 2, 4, 8, 16, 32)
    ]


def models() -> list[Case]:
    """Heads of published models."""
    trees = (shared_root(120_000, 16, 2048), shared_root(4096, 16, 256), k_ary(2, 5, 1024))
    return [
        Case(tree._replace(name=f"{model}: {tree.name}"), layout) for tree in trees for model, layout in MODELS.items()
    ]


FIGURES: dict[str, Callable[[], list[Case]]] = {
    **{each.__name__: each for each in (length, batch, depth, ratio, shape, variants, models, arrivals)},
    "recorded": recorded_trees,
}
