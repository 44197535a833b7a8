"""Try the sizes of the Hopper kernels' blocks, and say which are the fastest: pallas_kernels/hopper/tiling.py.

    python -m benchmarks.tune --json benchmarks/results/tune.json

Every block whose ring fits shared memory is timed on a few forests as benchmarks.attention does it, each result held
to float32 attention first. The best one for little work (SMALL) and for much (LARGE) has the least geometric mean of
time over roofline on the forests where a thread block has so much to do. One that does not compile, since a kernel
keeps more in shared memory than its ring, or is wrong on any of them is out, and its rows say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from unittest.mock import patch

import jax
from tqdm import tqdm

from benchmarks.attention import bounds, measure_ours
from benchmarks.inputs import Layout, forget_programs, make_inputs, reference
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, conditions, find, measured_before
from benchmarks.tables import scores
from benchmarks.timing import command, parse
from benchmarks.turns import GPU
from benchmarks.workloads import Workload, flat, k_ary, shared_root
from codec_jax import Forest
from codec_jax.planning.streams import count_kv_tokens
from pallas_kernels import Heads
from pallas_kernels.hopper.tiling import BLOCKS, Block, tiling

TABLES = ("SMALL", "LARGE")  # in the order of a head size's blocks

#: Little work and much, requests of one tile and of several, nodes that pairs of tiles read.
FORESTS = [
    shared_root(4096, 16, 256),
    shared_root(120_000, 16, 1024),
    shared_root(32_768, 64, 1024),
    flat(32, 8192),
    k_ary(2, 3, 1024),
    shared_root(32_768, 16, 1024),
    k_ary(2, 6, 1024),
    shared_root(120_000, 64, 2048),
]

HEAD_DIMS = [64, 128, 256]
BLOCK_TOKENS = [64, 128]  # wgmma takes multiples of 64, the mask at most 128
STAGES = range(2, 9)
SHARED_MEMORY_BYTES = 227 << 10
REPEATS = 15


def main() -> None:
    """Sweep, write the rows, and print the scores and the best."""
    parser = command(__doc__, resumes=True)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    arguments = parse(parser)
    before = measured_before(arguments.json, arguments.resume)
    cases = product(arguments.head_dim, FORESTS)
    measured = (row for head_dim, each in cases for row in measure_all(each, Layout(head_dim=head_dim), before))
    rows = collect(measured, arguments.json, before)
    tables = [(head_dim, table, best(rows, head_dim, table)) for head_dim in arguments.head_dim for table in TABLES]
    for head_dim, table, block in tables:
        print(
            f"head size {head_dim}, {table}: best {block}, at present {BLOCKS[head_dim, head_dim][TABLES.index(table)]}"
        )
    unserved = [
        f"no block serves all forests of head size {head_dim}, {table}" for head_dim, table, b in tables if not b
    ]
    conclude("tuning", rows, arguments.json, unserved)


def measure_all(workload: Workload, layout: Layout, before: list[dict]) -> Iterator[dict]:
    """Yield a row for each block on a forest: one measured before, or a new one."""
    common, prepare = conditions(layout), cache(partial(prepared, workload, layout))
    for block in tqdm(candidates(layout.head_dim), desc=f"{workload.name}, head size {layout.head_dim}"):
        known = {"name": workload.name, "block_tokens": block.tokens, "stages": block.stages} | common
        with GPU.taken():
            row = find(before, known) or measure(block, layout, prepare) | known
        yield row


def prepared(workload: Workload, layout: Layout) -> tuple[Callable[[], dict], dict]:
    """Draw inputs and the expected result; return what times the block in force, and the fields that all share."""
    inputs = make_inputs(workload, layout)
    common = bounds(workload, inputs.forest, layout) | {"implementation": "mosaic"}
    common["table"] = table_of(inputs.forest, layout, jax.devices()[0])
    return partial(measure_ours, inputs, layout, reference(inputs), "mosaic", REPEATS), common


def measure(block: Block, layout: Layout, prepare: Callable[[], tuple[Callable[[], dict], dict]]) -> dict:
    """Measure one block, while planning and the kernels find it for any work; then put back what was there."""
    timed, common = prepare()
    try:
        with patch.dict(BLOCKS, {(layout.head_dim, layout.head_dim): (block, block)}):
            forget_programs()
            return common | attempt(timed, "kernel_us", "error")
    finally:
        forget_programs()


def table_of(forest: Forest, layout: Layout, device: jax.Device) -> str:
    """Say whether a thread block has little to do on a forest, or much."""
    heads = Heads(layout.num_q_heads, layout.num_kv_heads, layout.head_dim, layout.head_dim)
    either = tiling(heads, device)._replace(block_tokens=(0, 1))
    return TABLES[either.block_for(heads.num_kv_heads, *count_kv_tokens(forest, heads.group, either.tile_rows))]


def candidates(head_dim: int) -> list[Block]:
    """List the blocks whose ring of K and V fits shared memory."""
    blocks = [Block(tokens, stages) for tokens in BLOCK_TOKENS for stages in STAGES]
    return [each for each in blocks if 2 * 2 * each.tokens * head_dim * each.stages <= SHARED_MEMORY_BYTES]


def best(rows: list[dict], head_dim: int, table: str) -> Block | None:
    """Return the block of the least score, or None if none serves all forests."""
    served = {key: score for key, score in scores(rows).items() if score and key[:2] == (head_dim, table)}
    return Block(*min(served, key=served.__getitem__)[2:]) if served else None


if __name__ == "__main__":
    main()
