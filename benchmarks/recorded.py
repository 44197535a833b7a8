"""Trees that were recorded from runs of a search, as workloads; the file lists parents, lengths and leaves of each."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.workloads import Workload


def recorded_trees(path: Path, most: int | None = None) -> list[Workload]:
    """Read `{"trees": [{"parent": [...], "length": [...], "leaf": [...]}, ...]}`; `most` of them, evenly spread.

    Equal trees count once, and what no request reads is read by nobody. Raises ValueError for another file.
    """
    try:
        trees = json.loads(path.read_text())["trees"]
        found = {json.dumps([tree[field] for field in ("parent", "length", "leaf")]): i for i, tree in enumerate(trees)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a list `trees` of parent, length and leaf, got {error!r}") from None
    numbered = sorted((i, text) for text, i in found.items())
    if most is not None and most < len(numbered):
        numbered = [numbered[k * len(numbered) // most] for k in range(most)]
    return [Workload(f"{path.stem}, tree {i}", *json.loads(text)) for i, text in numbered]
