"""Find from which sharing on the shared path is faster than plain decode: a grid of prefixes, batches and groups.

    python -m benchmarks.crossover --peers --group 4 --own 256 --json crossover_group4_own256.json
    python -m benchmarks.crossover --draw benchmarks/results/crossover_*_h200.json --plot crossover.svg

Ours is forest_attention as users call it, with `implementation=None`. Plain decode is the fastest of the same kernels
on a forest in which every request has a path of its own, cuDNN over contiguous copies and, with `--peers`, FlashInfer's
batch decode over shared pages. Each is checked and timed as benchmarks.attention does it. The map shows the time of
plain decode over ours: where it is below 1, sharing costs. `--plot` needs matplotlib, which the extra `bench` installs.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float

from benchmarks.attention import bounds, collect, measure_cudnn, measure_ours
from benchmarks.inputs import Case, Inputs, Layout, make_inputs, reference, with_room
from benchmarks.peers import Peers
from benchmarks.rounding import at_least
from benchmarks.rows import RESUME, attempt, finish, measured_before
from benchmarks.timing import require_gpu
from benchmarks.workloads import flat, shared_root

PREFIXES, BATCHES, GROUPS, OWN = (0, 512, 2048, 8192, 32_768), (1, 2, 4, 8, 16, 32, 64), (1, 4, 8), (256, 2048)
QUICK_PREFIXES, QUICK_BATCHES, QUICK_OWN = (0, 2048, 32_768), (1, 8, 64), (256,)
PLAIN = ("unshared_us", "cudnn_us", "flashinfer_decode_us")
SAME_KERNELS = ("unshared_us",)
PAGED = (*SAME_KERNELS, "flashinfer_decode_us")  # these read the pages where they are
MOST_BEHIND = 1.03  # of the time of plain decode


def main() -> None:
    """Measure a grid, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="measure, and write the rows here")
    parser.add_argument("--group", type=int, nargs="+", default=list(GROUPS), help="q heads per kv head, of 32 q heads")
    parser.add_argument("--own", type=int, nargs="+", help="tokens of each request's own")
    parser.add_argument("--quick", action="store_true", help="a coarse grid")
    parser.add_argument("--peers", action="store_true", help="FlashInfer decode too")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--resume", action="store_true", help=RESUME)
    parser.add_argument("--draw", type=Path, nargs="+", help="draw these results instead of measuring")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    arguments = parser.parse_args()
    if (arguments.json is None) == (arguments.draw is None):
        parser.error("expected either --json, to measure, or --draw")
    if arguments.draw and not arguments.plot:
        parser.error("--plot: expected a file for --draw")
    if arguments.draw:
        rows = [row for path in arguments.draw for row in json.loads(path.read_text())["rows"]]
        print(summary(rows))
        draw(rows, arguments.plot)
        return
    require_gpu(parser)
    peers = Peers(["flashinfer_decode"]) if arguments.peers else None
    packages = ["torch", "flashinfer-python"] * arguments.peers
    cases = grid(arguments.group, arguments.own or (QUICK_OWN if arguments.quick else OWN), arguments.quick)
    before = measured_before(arguments.json, arguments.resume)
    measure_one = partial(measure, repeats=arguments.repeats, peers=peers)
    rows = collect(cases, measure_one, arguments.json, before, *packages)
    if peers:
        peers.close()
    print(summary(rows))
    finish(rows, arguments.json)
    if arguments.plot:
        draw(rows, arguments.plot)


def grid(groups: Sequence[int], owns: Sequence[int], quick: bool) -> list[Case]:
    """Return the cells: a prefix that all requests of a batch share, and tokens of their own."""
    prefixes, batches = (QUICK_PREFIXES, QUICK_BATCHES) if quick else (PREFIXES, BATCHES)
    return [
        Case(
            shared_root(prefix, batch, own) if prefix else flat(batch, own),
            Layout(32, 32 // group),
            f"group {group}, {own} own",
            prefix,
        )
        for group, own, prefix, batch in itertools.product(groups, owns, prefixes, batches)
    ]


def measure(case: Case, repeats: int, peers: Peers | None) -> dict:
    """Check and time ours and plain decode on one cell; the reasons stand where there is no time."""
    inputs, layout = make_inputs(case.workload, case.layout), case.layout
    expected = reference(inputs)
    row = bounds(case.workload, inputs.forest, layout) | {"implementation": None}
    row |= attempt(partial(measure_ours, inputs, layout, expected, None, repeats), "kernel_us", "error")
    row |= attempt(partial(measure_unshared, inputs, layout, expected, repeats), "unshared_us", "unshared_error")
    row |= attempt(partial(measure_cudnn, inputs, layout, expected, repeats), "cudnn_us", "cudnn_error")
    if peers:
        row |= peers.measure(case.workload, layout, expected, repeats)
    return row


def measure_unshared(inputs: Inputs, layout: Layout, expected: Float[np.ndarray, "B N H"], repeats: int) -> dict:
    """Check and time our kernels on the same pages, read by every request for itself."""
    row = measure_ours(inputs._replace(forest=with_room(inputs.forest.unshared())), layout, expected, "mosaic", repeats)
    return {"unshared_us": row["kernel_us"], "unshared_relative_error": row["relative_error"]}


def gain(row: dict, fields: Sequence[str] = PLAIN) -> float | None:
    """Return the time of the fastest plain decode over ours; None unless both were measured."""
    plain = [row[field] for field in fields if row.get(field)]
    return min(plain) / row["kernel_us"] if plain and row.get("kernel_us") else None


def summary(rows: list[dict]) -> str:
    """List the cells in which ours is behind plain decode by more than is allowed, worst first."""
    gains = [(gain(row), row) for row in rows]
    measured = [(value, row) for value, row in gains if value]
    behind = sorted((value, row["name"], row["series"]) for value, row in measured if value * MOST_BEHIND < 1)
    return "\n".join(
        [
            f"{len(measured)} of {len(rows)} cells measured, {len(behind)} more than 3% behind plain decode",
            *(f"  {value:.3f} x plain decode's speed: {name}; {series}" for value, name, series in behind),
        ]
    )


def draw(rows: list[dict], out: Path) -> None:
    """Draw a map for each group and length of the requests' own tokens: batch by prefix, coloured by gain.

    Raises ValueError if no cell was measured.
    """
    from matplotlib.colors import TwoSlopeNorm

    from benchmarks.plot import chart_grid, conditions, save

    maps: dict[str, dict[tuple[int, int], float | None]] = {}
    for row in rows:
        maps.setdefault(row["series"], {})[row["x"], row["requests"]] = gain(row)
    if not any(value for cells in maps.values() for value in cells.values()):
        raise ValueError(f"rows: expected at least one cell with a time to draw in {out}, got none")
    canvas, charts = chart_grid(len(maps), 4.8, 2.9)
    for axes, (series, cells) in zip(charts, maps.items(), strict=True):
        prefixes, batches = (sorted({cell[i] for cell in cells}) for i in (0, 1))
        values = np.array([[cells.get((prefix, batch)) or np.nan for prefix in prefixes] for batch in batches])
        # White where both take equally long, on a scale of doublings.
        axes.pcolormesh(np.log2(values), cmap="RdBu", norm=TwoSlopeNorm(0.0, -1.0, 4.0), edgecolors="white")
        for (line, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                dark = value > 6 or value < 0.65
                text = at_least(value, 2 if value < 10 else 0)
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if dark else "black"}
                axes.text(column + 0.5, line + 0.5, text, **style)
        axes.set_xticks(np.arange(len(prefixes)) + 0.5, [str(prefix) for prefix in prefixes])
        axes.set_yticks(np.arange(len(batches)) + 0.5, [str(batch) for batch in batches])
        axes.set_title(series, fontsize=10)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    canvas.supxlabel("shared prefix, tokens", fontsize=10)
    canvas.supylabel("requests", fontsize=10)
    canvas.suptitle(f"Time of plain decode / time of codec_jax\n{conditions(rows)}", fontsize=10)
    save(canvas, out)


if __name__ == "__main__":
    main()
