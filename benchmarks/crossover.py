"""Find from which sharing on the shared path is faster than plain decode: a grid of prefixes, batches and groups.

    python -m benchmarks.crossover --peers --group 4 --own 256 --json crossover_group4_own256.json

Ours is forest_attention as users call it, with `implementation=None`. Plain decode is the fastest of the same kernels
on a forest in which every request has a path of its own, cuDNN over contiguous copies and, with `--peers`, FlashInfer's
batch decode over shared pages. Each is checked and timed as benchmarks.attention does it. The tables show the time of
plain decode over ours: where it is below 1, sharing costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from benchmarks.arguments import how_many
from benchmarks.attention import measure, measure_all
from benchmarks.inputs import Case, Layout
from benchmarks.report import conclude
from benchmarks.timing import command, parse
from benchmarks.workloads import flat, shared_root

PREFIXES, BATCHES, GROUPS, OWN = (0, 512, 2048, 8192, 32_768), (1, 2, 4, 8, 16, 32, 64), (1, 4, 8), (256, 2048)


def main() -> None:
    """Measure a grid."""
    parser = command(__doc__, resumes=True)
    parser.add_argument("--group", type=how_many, nargs="+", default=GROUPS, help="q heads per kv head, of 32 q heads")
    parser.add_argument("--own", type=how_many, nargs="+", default=OWN, help="tokens of each request's own")
    parser.add_argument("--peers", action="store_true", help="FlashInfer decode too")
    parser.add_argument("--repeats", type=how_many, default=15)
    parser.set_defaults(implementation=None)  # what a call takes by itself
    arguments = parse(parser)
    measure_one = partial(measure, implementation=arguments.implementation, repeats=arguments.repeats, unshared=True)
    rows = measure_all(
        grid(arguments.group, arguments.own), measure_one, ["flashinfer_decode"] * arguments.peers, arguments
    )
    conclude("crossover", rows, arguments.json)


def grid(groups: Sequence[int], owns: Sequence[int]) -> list[Case]:
    """Return the cells: a prefix that all requests of a batch share, and tokens of their own."""
    cases = []
    for group, own, prefix, batch in product(groups, owns, PREFIXES, BATCHES):
        workload = shared_root(prefix, batch, own) if prefix else flat(batch, own)
        cases.append(Case(workload, Layout(32, 32 // group), f"group {group}, {own} own", prefix))
    return cases


if __name__ == "__main__":
    main()
