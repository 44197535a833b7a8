"""Measure what thread blocks of the GPU take for their work, for `make_plan` to plan with.

    python -m codec_jax.profile [--heads 32/8] [--head-dim 128] [--page-size 16] [--json PATH]

Every time is that of one `forest_attention` call in which each thread block has the same work: one segment of so many
rows and tokens. Prints the table of the paper (Table 3: n_q by n) and writes it where `make_plan` looks for it, and to
PATH. Takes a minute or two on a GPU that nobody else uses. Kernels with one lane have no segments of two tiles: their
second rows are twice the first.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from codec_jax.attention import forest_attention
from codec_jax.command_line import count_parser
from codec_jax.forest import Forest
from codec_jax.planning import Plan, default_tiling, make_plan, pages_of_block
from codec_jax.planning.cost import CostModel, HeadLayout, file_name, user_folder
from pallas_kernels import FAMILIES, Heads, Tiling

TILE_ROWS = 64  # of a whole tile
TOKENS = (512, 1024, 4096, 16384)
MASKED_TOKENS = 4096
REPEATS = 9
_FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU


class Task(NamedTuple):
    """The work of every thread block in one measurement."""

    tiles: int  # row tiles of a segment: 1, narrow, or 2, wide
    tokens: int  # of a segment
    cached: bool = False  # all thread blocks read the same K and V in each kv head
    masked: bool = False  # every block needs a mask
    segments: int = 1  # of each thread block
    divided: bool = False  # the thread blocks of a kv head have a part each of one row tile's tokens

    def __str__(self) -> str:
        """Say it in words."""
        of_each = "1 segment" if self.segments == 1 else f"{self.segments} segments"
        origin = "the same for all" if self.cached else "their own"
        kind = ", masked" * self.masked + ", parts of one" * self.divided
        return f"{of_each} of {self.tiles * TILE_ROWS:3} rows x {self.tokens:5} tokens, {origin}{kind}"


class Times(NamedTuple):
    """Median times of the kernels of a call, in microseconds."""

    pac: float
    por: float


#: Segments of as many tokens as one of the grid, which shows what the further ones cost.
SEVERAL = {tiles: Task(tiles, 1024, segments=4) for tiles in (1, 2)}
MASKED = Task(1, MASKED_TOKENS, cached=True, masked=True)
#: What POR takes where there is one row tile; elsewhere every thread block has one of its own.
ONE_TILE = Task(1, 1024, divided=True)


def tasks(lanes: int) -> list[Task]:
    """Return all that is measured for kernels with so many lanes."""
    all_tiles = range(1, lanes + 1)
    grid = [Task(tiles, tokens, cached) for tiles in all_tiles for cached in (False, True) for tokens in TOKENS]
    return [*grid, MASKED, *(SEVERAL[tiles] for tiles in all_tiles), ONE_TILE]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(
        prog="codec-jax profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=_heads, default="32/8", help="q heads / kv heads (default: 32/8)")
    parser.add_argument("--head-dim", type=count_parser(), default=128, help="numbers of a head (default: 128)")
    parser.add_argument("--page-size", type=count_parser(), default=16, help="tokens of a page (default: 16)")
    parser.add_argument("--json", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"expected a GPU, the default backend is {jax.default_backend()}")
    q_heads, kv_heads = arguments.heads
    layout = HeadLayout(q_heads, kv_heads, arguments.head_dim, arguments.page_size)
    device, heads = jax.devices()[0], heads_of(layout)
    reasons = [reason for family in FAMILIES if (reason := family.why_not(heads, device))]
    if len(reasons) == len(FAMILIES) or heads.group > TILE_ROWS:
        parser.error(
            f"expected at most {TILE_ROWS} q heads for a kv head, and kernels that serve: {'; '.join(reasons)}"
        )
    tiling = default_tiling(heads)
    clock = Clock(layout, tiling)
    times: dict[Task, Times] = {}
    for task in tqdm(tasks(tiling.lanes), unit="measurement"):
        try:
            times[task] = clock.measure(task)
        except Exception as error:
            tqdm.write(f"{task}: {type(error).__name__}: {str(error).strip()[:300]}", file=sys.stderr)
        else:
            tqdm.write(f"{task}: PAC {times[task].pac:.2f} us, POR {times[task].por:.2f} us")
    try:
        model = fit(times, layout, device.device_kind, clock.num_ctas, tiling.lanes)
    except ValueError as error:
        sys.exit(f"failed: {error}; nothing was written")
    print(table(model))
    found = Path(user_folder()) / file_name(model.device, layout)
    for path in filter(None, (found, arguments.json)):
        model.save(path)
        print(f"written to {path}")


def _heads(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not int(numbers[2]) or not int(numbers[1]) or int(numbers[1]) % int(numbers[2]):
        raise argparse.ArgumentTypeError(f"expected q heads / kv heads, such as 32/8, got {text!r}")
    return int(numbers[1]), int(numbers[2])


# ---------------------------------------------------------------------- what is measured


def heads_of(layout: HeadLayout) -> Heads:
    """Return the heads of a layout."""
    return Heads(layout.num_q_heads, layout.num_kv_heads, layout.head_dim, layout.head_dim)


def busy(layout: HeadLayout, core_count: int) -> int:
    """Return how many thread blocks work: every node has one stream in each kv head."""
    return max(1, core_count // layout.num_kv_heads) * layout.num_kv_heads


def forest_of(task: Task, layout: HeadLayout, tiling: Tiling) -> Forest:
    """Build a forest whose streams are the task's segments for so many thread blocks.

    There is a node for each tile or pair of tiles, or one for all of them. The requests that fill the tiles end there,
    so that it does not grow and all rows see all tokens. Where masks are wanted, a chain of nodes that fill half a page
    of a block each takes the place of a node, so that every page needs one.
    """
    requests = task.tiles * (tiling.tile_rows // heads_of(layout).group)  # of a tile or pair
    nodes = tiling.num_ctas // layout.num_kv_heads * task.segments
    if task.masked:
        page_tokens, _ = pages_of_block(layout.page_size, tiling.block_tokens[1])
        chain = task.tokens // page_tokens
        length, leaves = [page_tokens // 2] * chain, [chain - 1] * (requests * nodes)
        return Forest.from_nodes(list(range(-1, chain - 1)), length, leaves, page_size=layout.page_size)
    if task.divided:
        return Forest.from_nodes([-1], [task.tokens * nodes], [0] * requests, page_size=layout.page_size)
    if task.cached:
        return Forest.from_nodes([-1], [task.tokens], [0] * (requests * nodes), page_size=layout.page_size)
    leaf = np.repeat(np.arange(nodes), requests)
    return Forest.from_nodes([-1] * nodes, [task.tokens] * nodes, leaf, page_size=layout.page_size)


def plan_of(task: Task, layout: HeadLayout, tiling: Tiling) -> tuple[Forest, Plan]:
    """Plan such that every stream is one segment, of two tiles even where that is not worth its costs.

    Raises RuntimeError if some thread block would have other work than the task.
    """
    forest = forest_of(task, layout, tiling)
    plan = make_plan(
        forest,
        num_q_heads=layout.num_q_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        num_ctas=tiling.num_ctas,
        tile_rows=tiling.tile_rows,
        block_tokens=tiling.block_tokens[1],
        lanes=tiling.lanes,
        min_wide_tokens=1 if task.tiles == 2 else 2**31 - 1,
        cost_model=CostModel.roofline(layout),
        policy=tiling.num_ctas // layout.num_kv_heads if task.divided else 1,
    )
    of_each, segments = np.diff(plan.arrays.cta_ptr), plan.arrays.used_segments
    as_wanted = (of_each == task.segments).all() and (segments.is_wide == (task.tiles == 2)).all()
    as_wanted &= ((segments.end - segments.begin) * plan.arrays.block_tokens == task.tokens).all()
    if not as_wanted or not (segments.first_masked == (segments.begin if task.masked else segments.end)).all():
        raise RuntimeError(f"{task}: expected the same work for all thread blocks, got a plan with other segments")
    return forest, plan


class Clock:
    """Random K and V for every task, and the time of the kernels of a call on them."""

    def __init__(self, layout: HeadLayout, tiling: Tiling) -> None:
        """Draw as many pages as the largest task reads."""
        self.layout, self.num_ctas = layout, busy(layout, tiling.num_ctas)
        self.tiling = tiling._replace(num_ctas=self.num_ctas)
        nodes = self.num_ctas // layout.num_kv_heads
        num_pages = -(-max(TOKENS) // layout.page_size) * nodes
        shape = (num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
        self.key, self.value = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
        self.junk = jnp.zeros(_FLUSH_BYTES // 4, jnp.int32)

    def measure(self, task: Task) -> Times:
        """Time the kernels of a call, the L2 cache flushed before each."""
        forest, plan = plan_of(task, self.layout, self.tiling)
        shape = (forest.request_capacity, 1, self.layout.num_q_heads, self.layout.head_dim)
        query = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
        arguments = jax.device_put((query, self.key, self.value, forest, plan))
        attend = jax.jit(lambda *args: forest_attention(*args))
        return kernel_times(lambda: attend(*arguments), lambda: _read(self.junk))


@jax.jit
def _read(values: jax.Array) -> jax.Array:
    """Read an array, which fills the L2 cache with what nobody wants; writing would leave lines to be written back."""
    return values.max()


class _Programs(jax.stages.Wrapped):
    """Several programs as one call, which the profiler must not compile into one."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self.calls = calls

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Call one after the other."""
        results = [jax.block_until_ready(call()) for call in self.calls]
        return results[-1]

    def trace(self, *_: Any, **__: Any) -> Any:
        """Refuse: there is no single program to trace."""
        raise NotImplementedError("there are several programs")

    lower = trace


def kernel_times(call: Callable[[], object], flush: Callable[[], object]) -> Times:
    """Time PAC and what comes after it in a call, after a flush, which comes first and does not count."""
    from jax.experimental.mosaic.gpu import profiler

    _, alone = profiler.measure(_Programs(call), aggregate=False)()
    if not alone:
        raise RuntimeError("CUPTI: expected the kernels of a call, got none; run without another profiler")
    _, runs = profiler.measure(_Programs(flush, call), aggregate=False, iterations=REPEATS)()
    if not runs or any(len(run) <= len(alone) for run in runs):
        raise RuntimeError("CUPTI: expected more kernels with a flush than without")
    own = [[1e3 * ms for _, ms in run[-len(alone) :]] for run in runs]
    return Times(statistics.median(run[0] for run in own), statistics.median(sum(run[1:]) for run in own))


# ---------------------------------------------------------------------- what it says


def fit(times: Mapping[Task, Times], layout: HeadLayout, device: str, num_ctas: int, lanes: int) -> CostModel:
    """Take calls and segments off PAC's times on the grid; what is left are rows over tokens.

    POR works for all thread blocks together, after the last of them: what it takes for one row tile is part of the time
    of a call. On the grid it has a merge for each of the `num_ctas` thread blocks. Columns of which a time is missing
    are left out. Raises ValueError if too much is missing.
    """
    all_tiles, each = range(1, lanes + 1), (False, True)
    tokens = [n for n in TOKENS if all(Task(tiles, n, cached) in times for tiles in all_tiles for cached in each)]
    severals = [SEVERAL[tiles] for tiles in all_tiles]
    wholes = [Task(several.tiles, several.tokens * several.segments) for several in severals]
    needed = [MASKED, MASKED._replace(masked=False), *severals, *wholes, ONE_TILE]
    missing = [task for task in needed if task not in times]
    if missing or len(tokens) < 2:
        raise ValueError(
            f"times: expected {len(tokens)} of at least 2 columns, and {', '.join(map(str, missing)) or 'no more'}"
        )

    pac = {task: measured.pac for task, measured in times.items()}
    # What a further segment costs, of one tile and of two; more tiles do not make it cheaper, nor does noise.
    further = [
        (pac[several] - pac[whole]) / (several.segments - 1) for several, whole in zip(severals, wholes, strict=True)
    ]
    segment = np.maximum.accumulate([0.0, *further])[1:]
    # PAC without tokens, by the two smallest numbers of them.
    first, second = (pac[Task(1, n)] for n in tokens[:2])
    empty = first - (second - first) * tokens[0] / (tokens[1] - tokens[0])
    start = max(min(empty - segment[0], first), 0.0)
    por, merges = times[ONE_TILE].por, num_ctas - layout.num_kv_heads
    more = statistics.median(times[Task(1, n)].por for n in tokens) - por

    def grid(cached: bool) -> np.ndarray:
        taken_off = start + segment[:, None]
        values = np.asarray([[pac[Task(tiles, n, cached)] for n in tokens] for tiles in all_tiles]) - taken_off
        values = values if lanes == 2 else values * np.asarray([[1.0], [2.0]])
        # Noise may not make more work take less time, nor work take none.
        values = np.maximum(values, 1e-6 * np.asarray(tokens))
        return np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)

    cached = grid(cached=True)
    memory = np.maximum(cached, grid(cached=False))
    plain, masked = (pac[MASKED._replace(masked=masked)] - start - segment[0] for masked in (False, True))
    return CostModel(
        device=device,
        **layout._asdict(),
        dtype="bfloat16",
        rows=(TILE_ROWS, 2 * TILE_ROWS),
        tokens=tuple(tokens),
        memory_us=tuple(tuple(row) for row in memory.round(4).tolist()),
        cached_us=tuple(tuple(row) for row in cached.round(4).tolist()),
        masked=round(max(masked / plain, 1.0), 4) if plain > 0 else 1.0,
        segment_us=tuple(np.resize(segment, 2).round(4).tolist()),
        launch_us=round(start + por, 4),
        stream_us=round(max(more, 0.0) / max(merges, 1), 4),
        versions=versions("codec-jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"),
        date=datetime.date.today().isoformat(),
    )


def versions(*packages: str) -> tuple[tuple[str, str], ...]:
    """List the versions of Python and of those packages that there are."""
    found = [("python", platform.python_version())]
    for package in packages:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def table(model: CostModel) -> str:
    """Lay the model out as the paper's Table 3: a line for each n_q, a column for each n; and what it has beside."""
    lines = [
        f"{model.device}, {model.num_q_heads} q heads, {model.num_kv_heads} kv heads, head size {model.head_dim}, "
        f"{model.dtype}, page size {model.page_size}, {model.date}",
        "microseconds of n_q rows over n KV tokens, all thread blocks busy",
    ]
    for title, values in (("K and V of their own", model.memory_us), ("the same K and V", model.cached_us)):
        lines += ["", f"{title}", f"{'n_q':>6}  " + "".join(f"{n:>10}" for n in model.tokens)]
        lines += [
            f"{rows:>6}  " + "".join(f"{us:10.2f}" for us in row) for rows, row in zip(model.rows, values, strict=True)
        ]
    lines += [
        "",
        f"a segment of one tile {model.segment_us[0]:.2f} us, of two {model.segment_us[1]:.2f} us, a call "
        f"{model.launch_us:.2f} us and {model.stream_us:.3f} us for each merge; masks take {model.masked:.2f} x as "
        "long, cached",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
