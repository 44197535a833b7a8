"""Draw time over roofline for every forest of a result file, ours and the peers'.

    python -m benchmarks.plot --json benchmarks/results/attention.json --out benchmarks/results/attention.svg

Needs matplotlib, which the extra `bench` installs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

#: Field, label, marker and colour (Okabe and Ito's, which colour-blind readers can tell apart), ours last and on top.
SERIES = [
    ("flashinfer_cascade_us", "FlashInfer cascade", "^", "#CC79A7"),
    ("flashinfer_decode_us", "FlashInfer decode", "s", "#E69F00"),
    ("cudnn_us", "cuDNN, unshared", "D", "#999999"),
    ("kernel_us", "codec_jax", "o", "#0072B2"),
]
TICKS = [1, 2, 5, 10, 20, 50, 100, 200]


def main() -> None:
    """Read the rows and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw(json.loads(arguments.json.read_text())["rows"], arguments.out)


def draw(rows: list[dict], out: Path) -> None:
    """Draw one line of markers for each row, in the rows' order; what a row has no time for has no marker."""
    rows = [row for row in rows if row.get("roofline_us")]
    figure = Figure(figsize=(8.4, 1.3 + 0.24 * len(rows)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    largest = 1.0
    for field, label, marker, colour in SERIES:
        points = [(row[field] / row["roofline_us"], place) for place, row in enumerate(rows) if row.get(field)]
        if points:
            ours = field == "kernel_us"
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
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("kernel time / roofline (logarithmic)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper left", ncols=4, frameon=False, handletextpad=0.2)
    figure.supxlabel(conditions(rows[0]), x=0.99, ha="right", fontsize=9, color="#555555")
    # Text stays text and nothing depends on the hour, so that the file is small and drawing it again changes nothing.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "codec_jax"}):
        figure.savefig(out, metadata={"Date": None})


def conditions(row: dict) -> str:
    """Say on what the rows were measured."""
    q_heads, kv_heads = row["heads"].split("/")
    heads = f"{q_heads} q heads, {kv_heads} kv heads, head size {row['head_dim']}"
    return f"{row['device']}, {heads}, {row['dtype']}, page size {row['page_size']}, {row['date']}"


if __name__ == "__main__":
    main()
