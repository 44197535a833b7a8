"""Draw the rows of a result file, ours and the peers'.

    python -m benchmarks.plot --json benchmarks/results/attention.json --out benchmarks/results/attention.svg
    python -m benchmarks.plot --json benchmarks/results/batch_h200.json --out batch.svg --figure batch

Rows with a place in a chart are drawn as curves of time, a chart for each series; others as time over roofline, one
line for each forest. Needs matplotlib, which the extra `bench` installs.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from benchmarks.sweeps import FIGURES, Figure

#: Field, label, marker and colour (Okabe and Ito's, which colour-blind readers can tell apart), ours last and on top.
SERIES = [
    ("flashinfer_cascade_us", "FlashInfer cascade", "^", "#CC79A7"),
    ("flashinfer_decode_us", "FlashInfer decode", "s", "#E69F00"),
    ("cudnn_us", "cuDNN, unshared", "D", "#999999"),
    ("kernel_us", "codec_jax", "o", "#0072B2"),
]
TICKS = [1, 2, 5, 10, 20, 50, 100, 200]
COLUMNS = 3  # charts side by side, at most
MOST_TICKS, LABEL_WIDTH = 10, 0.14  # on the axis of a chart; of its width


def main() -> None:
    """Read the rows and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", choices=FIGURES, help="whose title and axis to use")
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text())["rows"]
    draw(rows, arguments.out, FIGURES[arguments.figure] if arguments.figure else None)


def draw(rows: list[dict], out: Path, figure: Figure | None = None) -> None:
    """Draw rows as curves where they have a place on an axis, else as a line of markers each.

    Raises ValueError if there are none to draw.
    """
    drawn = [row for row in rows if row.get("roofline_us")]
    if not drawn:
        raise ValueError(f"rows: expected at least one with a roofline to draw in {out}, got none")
    canvas = curves(drawn, figure) if "series" in drawn[0] else markers(drawn)
    if figure:
        canvas.legends[0].set_title(figure.title, prop={"size": 11})  # a title of the canvas would cross the legend
    canvas.supxlabel(conditions(drawn), x=0.99, ha="right", fontsize=9, color="#555555")
    save(canvas, out)


def save(canvas: Canvas, out: Path) -> None:
    """Write SVG in which text stays text and nothing depends on the hour: small, and the same when drawn again."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "codec_jax"}):
        canvas.savefig(out, metadata={"Date": None})


def markers(
    rows: list[dict],
    series: list[tuple[str, str, str, str]] = SERIES,
    unit: str = "roofline_us",
    axis: str = "kernel time / roofline (logarithmic)",
) -> Canvas:
    """Draw one line of markers for each row, fields over the unit's; what a row has no number for has no marker.

    Fields are drawn in the order of the series, ours last and larger.
    """
    canvas = Canvas(figsize=(8.4, 1.3 + 0.24 * len(rows)), layout="constrained", facecolor="white")
    axes = canvas.subplots()
    largest = 1.0
    for field, label, marker, colour in series:
        points = [(row[field] / row[unit], place) for place, row in enumerate(rows) if row.get(field)]
        if points:
            ours = field == series[-1][0]
            axes.scatter(
                *zip(*points, strict=True), s=46 if ours else 28, marker=marker, color=colour, label=label, zorder=3
            )
            largest = max(largest, *(ratio for ratio, _ in points))
    axes.axvline(1, color="#333333", linewidth=1.2, zorder=2)
    axes.set_xscale("log")
    ticks = [tick for tick in TICKS if tick <= largest * 1.3]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.9, largest * 1.3)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    tidy(axes)
    axes.set_xlabel(axis)
    add_legend(canvas, axes)
    return canvas


def curves(rows: list[dict], figure: Figure | None) -> Canvas:
    """Draw a chart of time for each series, all curves in it by place; a curve has gaps where a row has no time."""
    charts: dict[str, list[dict]] = {}
    for row in rows:
        charts.setdefault(row["series"], []).append(row)
    canvas, grid = chart_grid(len(charts), 8.4 if len(charts) == 1 else 4.2, 3.2, COLUMNS)
    for axes, (series, chart) in zip(grid, charts.items(), strict=True):
        chart.sort(key=lambda row: row["x"])
        places = [row["x"] for row in chart]
        axes.plot(places, [row["roofline_us"] for row in chart], "--", color="#333333", linewidth=1.2, label="roofline")
        for field, label, marker, colour in SERIES:
            times = [row.get(field) or math.nan for row in chart]
            style = {"marker": marker, "markersize": 5, "linewidth": 1.6, "color": colour}
            axes.plot(places, times, label=label if any(row.get(field) for row in rows) else None, **style)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        # Places that are doubled rather than stepped.
        doubled = places[0] > 0 and places[-1] >= 16 * places[0]
        if doubled:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        if len(places) <= MOST_TICKS:
            axes.set_xticks(places, tick_labels(places, doubled))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(series, fontsize=10)
        tidy(axes)
        if figure and figure.axis:
            axes.set_xlabel(figure.axis)
    canvas.supylabel("time of all kernels, μs", fontsize=10)
    add_legend(canvas, grid[0])
    return canvas


def chart_grid(count: int, width: float, height: float, most_columns: int = 2) -> tuple[Canvas, list[Axes]]:
    """Lay charts of so many inches out side by side, in lines of at most so many."""
    columns = min(count, most_columns)
    lines = math.ceil(count / columns)
    canvas = Canvas(figsize=(width * columns, 0.9 + height * lines), layout="constrained", facecolor="white")
    charts = list(canvas.subplots(lines, columns, squeeze=False).ravel())
    for axes in charts[count:]:
        axes.remove()
    return canvas, charts[:count]


def tick_labels(places: list[float], logarithmic: bool) -> list[str]:
    """Label places in ascending order, leaving out those for which the label after them has no room."""
    at = [math.log(place) if logarithmic else place for place in places]
    labels, last = [], math.inf
    for place, position in zip(reversed(places), reversed(at), strict=True):
        room = last - position >= LABEL_WIDTH * (at[-1] - at[0])
        labels.append(f"{place:g}" if room else "")
        last = position if room else last
    return labels[::-1]


def tidy(axes: Axes) -> None:
    """Draw a light grid behind the data and nothing around it."""
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[:].set_visible(False)


def add_legend(canvas: Canvas, axes: Axes) -> None:
    """Name what is drawn, ours first."""
    handles, labels = axes.get_legend_handles_labels()
    style = {"ncols": 5, "frameon": False, "handletextpad": 0.2, "alignment": "left"}
    canvas.legend(handles[::-1], labels[::-1], loc="outside upper left", **style)


def conditions(rows: list[dict]) -> str:
    """Say on what the rows were measured; heads only where they are the same for all."""
    row, said = rows[0], [rows[0]["device"]]
    if len({each["heads"] for each in rows}) == 1:
        q_heads, kv_heads = row["heads"].split("/")
        said += [f"{q_heads} q heads, {kv_heads} kv heads"]
    return ", ".join(
        [*said, f"head size {row['head_dim']}", row["dtype"], f"page size {row['page_size']}", row["date"]]
    )


if __name__ == "__main__":
    main()
