"""Draw result files: every drawing says which side is better, and writes the numbers that it claims.

    python -m benchmarks.plot --json benchmarks/results/attention_h200.json --out attention.svg
    python -m benchmarks.plot --json benchmarks/results/batch_h200.json --out batch.svg --figure batch

`python -m benchmarks.report --draw` draws all results, each by the function here that has the name of its table. Needs
matplotlib, which the extra `bench` installs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.pages import PAGES, Page
from benchmarks.rounding import at_least, at_most
from benchmarks.tables import PEERS, faster_of_vllm, gain, number, plain, steps_beside_vllm

#: Okabe and Ito's colours, which colour-blind readers can tell apart: one for each method, on all drawings. What is no
#: method, such as parts of a step, has some of Tol's.
OURS, ORANGE, GREEN, PINK, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
OTHER = INDIGO, OLIVE, WINE, CYAN, BROWN = "#332288", "#999933", "#882255", "#88CCEE", "#661100"
INK, GREY, PALE = "#222222", "#666666", "#8c8c8c"
#: Field -> label, marker and colour; ours last and on top. Reads of device memory are hollow.
Series = dict[str, tuple[str, str, str]]
TIMES: Series = {
    "cudnn_us": ("cuDNN over copies", "D", PALE),
    "flash_attention_us": ("FlashAttention-3 over copies", "v", GREEN),
    "flex_attention_us": ("FlexAttention", "P", RED),
    "flashinfer_decode_us": ("FlashInfer decode", "s", ORANGE),
    "flashinfer_cascade_us": ("FlashInfer cascade", "^", PINK),
    "kernel_us": ("codec_jax", "o", OURS),
}
BYTES: Series = {
    "unshared_bytes": ("contexts of all requests", "X", PALE),
    "flashinfer_decode_l2_to_sm_bytes": ("FlashInfer decode, from L2", "s", ORANGE),
    "flashinfer_cascade_l2_to_sm_bytes": ("FlashInfer cascade, from L2", "^", PINK),
    "l2_to_sm_bytes": ("codec_jax, from L2", "o", OURS),
    "flashinfer_decode_dram_read_bytes": ("FlashInfer decode, from memory", "s", ORANGE),
    "dram_read_bytes": ("codec_jax, from memory", "o", OURS),
}


def main() -> None:
    """Read the rows and write the drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    drawn = [name for name, page in PAGES.items() if page.table in globals()]
    parser.add_argument("--figure", choices=drawn, default="paper", help="the page whose title, axis and kind to use")
    arguments = parser.parse_args()
    draw(arguments.figure, json.loads(arguments.json.read_text())["rows"], arguments.out)


def draw(name: str, rows: list[dict], out: Path, source: str = "") -> None:
    """Write a page's drawing of rows, the same whenever it is drawn; `source` says inside of what it was drawn.

    Text stays text, which keeps it small. Raises ValueError if there is nothing to draw.
    """
    canvas = globals()[PAGES[name].table](rows, PAGES[name])
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "codec_jax"}):
        canvas.savefig(out, metadata={"Date": None, "Description": source})


def some(rows: list[dict], field: str) -> list[dict]:
    """Return the rows that have a field. Raises ValueError if there are none."""
    if not (having := [row for row in rows if row.get(field)]):
        raise ValueError(f"rows: expected at least one with {field} to draw, got none")
    return having


# ---------------------------------------------------------------------- parts of drawings


def sheet(
    page: Page, better: str, rows: list[dict], size: tuple[float, float], grid: tuple[int, int] = (1, 1), names: int = 1
) -> tuple[Canvas, list[Axes]]:
    """Lay charts out on white: below a title, what is better and lines of names, above what the rows were measured on.

    `size` is that of all charts, in inches.
    """
    width, header, footer, said = size[0], 0.6 + 0.24 * names, 0.3, [rows[0]["device"]]
    canvas = Canvas(figsize=(width, height := size[1] + header + footer), layout="constrained", facecolor="white")
    canvas.get_layout_engine().set(rect=(0, footer / height, 1, 1 - (header + footer) / height), h_pad=0.08, w_pad=0.1)
    for field, form in {"heads": "{} heads", "head_dim": "head size {}", "page_size": "pages of {}"}.items():
        values = {row[field] for row in rows if field in row}
        said += [form.format(*values)] if len(values) == 1 else []
    said, left = ", ".join([*said, max(row["date"] for row in rows)]), 0.12 / width
    canvas.text(left, 1 - 0.1 / height, page.title, fontsize=13, weight="bold", color=INK, va="top")
    canvas.text(left, 1 - 0.36 / height, better, fontsize=10, color=GREY, va="top")
    canvas.text(1 - left, 0.1 / height, said, fontsize=8, color=GREY, ha="right")
    charts = list(canvas.subplots(*grid, squeeze=False).ravel())
    for axes in charts:
        axes.tick_params(length=0, labelcolor=INK)
        axes.set_axisbelow(True)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[:].set_visible(False)
    return canvas, charts


def legend(canvas: Canvas, axes: Axes, columns: int = 6, ours_last: bool = True) -> Canvas:
    """Name what is drawn below the title, ours first."""
    handles, labels = (each[::-1] if ours_last else each for each in axes.get_legend_handles_labels())
    place = {"loc": "upper left", "bbox_to_anchor": (0.06 / canvas.get_figwidth(), 1 - 0.58 / canvas.get_figheight())}
    style = {"frameon": False, "handletextpad": 0.4, "columnspacing": 1.4, "labelcolor": INK, "borderaxespad": 0.0}
    canvas.legend(handles, labels, ncols=columns, **place, **style)
    return canvas


def logarithmic(axes: Axes, axis: str, values: np.ndarray | list[float], unit: str = "") -> None:
    """Scale an axis by decades with ticks at 1, 2 and 5, and room beside both ends."""
    low, high = np.nanmin(values) / (1.3 if axis == "y" else 1.15), np.nanmax(values) * (1.5 if axis == "y" else 1.25)
    ticks = [step * 10.0**decade for decade in range(-1, 6) for step in (1, 2, 5)]
    axes.set(**{f"{axis}scale": "log", f"{axis}lim": (low, high)})
    which = getattr(axes, f"{axis}axis")
    which.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    which.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,g}{unit}"))
    which.set_minor_locator(NullLocator())


def doubling(axes: Axes) -> None:
    """Scale the places of a chart by doublings."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / 1024:g}k" if at >= 1024 else f"{at:g}"))


def markers(
    rows: list[dict], page: Page, better: str, series: Series, unit: str, columns: dict[str, Callable[[dict], str]]
) -> Canvas:
    """Draw a line of markers for each row, fields over the unit's, and columns of numbers beside them."""
    series = {field: series[field] for field in series if any(row.get(field) for row in rows)}
    canvas, (axes,) = sheet(page, better, rows, (9.6, 0.55 + 0.235 * len(rows)), names=1 + (len(series) > 4))
    values = np.asarray([[row[field] / row[unit] if row.get(field) else math.nan for row in rows] for field in series])
    axes.hlines(range(len(rows)), np.nanmin(values, 0), np.nanmax(values, 0), color="#d5d5d5", linewidth=1.4, zorder=2)
    for ratios, (label, marker, colour) in zip(values, series.values(), strict=True):
        hollow, size = "memory" in label, 55 if colour == OURS else 38
        face, edge = ("none", colour) if hollow else (colour, "white")
        style = {"marker": marker, "facecolor": face, "edgecolor": edge, "zorder": 3 + (colour == OURS)}
        axes.scatter(ratios, range(len(rows)), 95 if hollow else size, label=label, linewidths=0.9, **style)
    logarithmic(axes, "x", [1.0, *values.ravel()], "×")
    axes.axvline(1, color=INK, linewidth=1.2, zorder=1)
    axes.set_yticks(range(len(rows)), [plain(row["name"]) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    for i, (head, fill) in enumerate(columns.items()):
        style = {"color": OURS if "codec_jax" in head else GREY, "ha": "right", "va": "center", "fontsize": 8.5}
        style |= {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "annotation_clip": False}
        for place, said in enumerate([head, *map(fill, rows)], -1):
            axes.annotate(said, (1, place - 0.2 * (place < 0)), (54 + 66 * i, 0), **style)
    return legend(canvas, axes, 3 if len(series) > 4 else 6)


def bars(axes: Axes, groups: dict[str, list[tuple[str, list[float], str]]], parts: dict[str, str]) -> None:
    """Draw groups of bars, each a label, the widths of its parts and what stands at its end; parts have colours."""
    ticks, place = [], 0.0
    for group, of_group in groups.items():
        axes.text(0, place, group, fontsize=9.5, weight="bold", color=INK, va="center")
        for label, widths, said in of_group:
            place += 1
            for i, (part, colour) in enumerate(parts.items()):
                axes.barh(place, widths[i], 0.72, sum(widths[:i]), color=colour, label=None if ticks else part)
            style = {"textcoords": "offset points", "va": "center", "fontsize": 9.5, "color": INK}
            axes.annotate(said, (sum(widths), place), (5, 0), **style)
            ticks.append((place, label))
        place += 1.6
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(place - 0.8, -0.7)
    axes.margins(x=0.14)
    axes.grid(axis="y", visible=False)


# ---------------------------------------------------------------------- drawings


def times(rows: list[dict], page: Page) -> Canvas:
    """Draw kernel times: curves where rows have a place on an axis, else a line of markers each."""
    drawn = some(rows, "roofline_us")
    if "series" in drawn[0]:
        return curves(drawn, page)
    columns = {"codec_jax,\nμs": number("kernel_us", rounded=at_most)}
    columns["next best\ntakes"] = lambda row: f"{at_least(gain(row, PEERS), 2)}×"
    better = "one attention call: time over that of reading each KV token once (or of its products); left is better"
    return markers(drawn, page, better, TIMES, "roofline_us", columns)


def curves(rows: list[dict], page: Page) -> Canvas:
    """Draw a chart of time for each series, all curves in it by place; a curve has gaps where a row has no time."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    better = "time of all kernels of one attention call, μs; lower is better; numbers at ours and at the right end"
    canvas, charts = sheet(page, better, rows, (max(9.6, 3.6 * len(names)), 3.7), (1, len(names)))
    fields = [field for field in TIMES if any(row.get(field) for row in rows)]
    for axes, series in zip(charts, names, strict=True):
        chart = sorted((row for row in rows if row["series"] == series), key=lambda row: row["x"])
        places = [row["x"] for row in chart]
        for field in ("roofline_us", *fields):
            label, marker, colour = TIMES.get(field, ("roofline", "" if page.joined else "_", INK))
            line = "" if not page.joined else "-" if field in TIMES else "--"
            style = {"markersize": 5.5, "markeredgecolor": "white" if field in TIMES else INK, "markeredgewidth": 0.6}
            us = [row.get(field) or math.nan for row in chart]
            axes.plot(places, us, color=colour, label=label, linewidth=1.5, linestyle=line, marker=marker, **style)
        logarithmic(axes, "y", [row.get(field) or math.nan for row in chart for field in ("roofline_us", *fields)])
        if places[0] > 0 and places[-1] > 16 * places[0]:  # doubled rather than stepped
            doubling(axes)
        write_times(axes, chart[: None if page.joined else 0], chart[-1])
        axes.set_title(plain(series), fontsize=10, color=INK)
        axes.set_xlabel(page.axis, color=GREY)
    charts[0].set_ylabel("μs", color=GREY)
    return legend(canvas, charts[0])


def write_times(axes: Axes, chart: list[dict], last: dict) -> None:
    """Write our times below their points, and all times of the last row beside it, apart where they would touch."""
    style = {"textcoords": "offset points", "fontsize": 8, "va": "center", "annotation_clip": False}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.75}
    for row in chart[:-1]:
        if row.get("kernel_us"):
            place = row["x"], row["kernel_us"]
            axes.annotate(at_most(place[1], 0), place, (0, -10), ha="center", color=OURS, bbox=box, **style)
    (low, high), at = np.log(axes.get_ylim()), -math.inf
    for us, field in sorted((last[field], field) for field in TIMES if last.get(field)):
        at = max(math.log(us), at + 0.045 * (high - low))
        rounded, weight = (at_most, "bold") if field == "kernel_us" else (at_least, "normal")
        axes.annotate(rounded(us, 0), (last["x"], math.exp(at)), (8, 0), color=TIMES[field][2], weight=weight, **style)


def traffic(rows: list[dict], page: Page) -> Canvas:
    """Draw bytes over the unique KV bytes: those that multiprocessors were sent, and those read from device memory."""
    counted, columns = some(rows, "l2_to_sm_bytes"), {}
    for prefix, name, rounded in (("", "codec_jax", at_most), ("flashinfer_decode_", "decode", at_least)):
        for field, said in (("dram_read_bytes", "memory"), ("l2_to_sm_bytes", "L2")):
            if f"{prefix}{field}" in counted[0]:
                columns[f"{name}\n{said}"] = number(prefix + field, 2, "unique_bytes", rounded)
    better = "bytes that one call reads over those of the unique KV tokens; left is better"
    return markers(counted, page, better, BYTES, "unique_bytes", columns)


def decoding(rows: list[dict], page: Page) -> Canvas:
    """Draw a bar of a step's parts for each way of attention, all cases on one scale."""
    measured, groups = some(rows, "kernel_us"), {}
    ways = {"shared": "codec_jax, shared", "unshared": "same kernels, unshared", "cudnn": "cuDNN over copies"}
    ways |= {"vLLM": "vLLM", "vLLM, cascade": "vLLM, cascade"}
    named = {"attention": "attention", "products": "products with weights", "experts": "experts"}
    named["other"] = "other kernels"
    parts = [part for part in named if any(row.get(f"{part}_us") for row in measured)]
    models = list(dict.fromkeys(row["model"] for row in measured))
    for row in measured:
        gap = max(row["wall_us"] - row["kernel_us"], 0.0)
        ms = [us / 1e3 for us in (*(row.get(f"{part}_us", 0.0) for part in parts), gap)]
        said = (at_most if row["variant"] == "shared" else at_least)(row["wall_us"] / 1e3, 1)
        case = f"{row['model']}, " * (len(models) > 1)
        case += f"{row['requests']} requests over {row['document_tokens']:,} tokens"
        case += f" (weights and unique KV read once: {at_least(row['floor_us'] / 1e3, 1)} ms)"
        groups.setdefault(case, []).append((ways[row["variant"]], ms, f"{said} ms"))
    better = f"milliseconds for a token of every request, {', '.join(models)}; left is better"
    canvas, (axes,) = sheet(page, better, measured, (9.6, 0.4 + 0.28 * (len(measured) + 1.6 * len(groups))))
    colours = dict(zip(named, (INDIGO, OLIVE, CYAN, WINE), strict=True))
    bars(axes, groups, {named[part]: colours[part] for part in parts} | {"gaps": "#c8c8c8"})
    return legend(canvas, axes, ours_last=False)


def decoding_vllm(rows: list[dict], page: Page) -> Canvas:
    """Draw our steps beside vLLM's faster way of each, as `decoding` does."""
    shown = []
    for step in steps_beside_vllm(rows):
        ours = step["codec_jax"]
        shown += [ours, faster_of_vllm(step) | {"floor_us": ours["floor_us"]}]
    return decoding(shown, page)


def serving(rows: list[dict], page: Page) -> Canvas:
    """Draw a bar of the tokens that each variant of the engine generates in a second, all loads on one scale."""
    measured, groups = some(rows, "output_tokens_per_second"), {}
    for row in measured:
        said = (at_least if row["variant"] == "engine" else at_most)(row["output_tokens_per_second"], 0)
        bar = {"engine": "codec_jax"}.get(row["variant"], row["variant"]), [row["output_tokens_per_second"]], said
        groups.setdefault(plain(row["name"]), []).append(bar)
    better = f"generated tokens per second, {measured[0]['model']}; right is better"
    canvas, (axes,) = sheet(page, better, measured, (9.6, 0.4 + 0.28 * (len(measured) + 1.6 * len(groups))), names=0)
    bars(axes, groups, {"": OURS})
    return canvas


def ablation(rows: list[dict], page: Page) -> Canvas:
    """Draw what sharing and division do apart, and fixed divisions over the default one by their number of slices."""
    measured = some([row for row in rows if row["part"] in ("fixed", "sharing")], "kernel_us")
    better = "left: milliseconds of one attention call; right: time over that of the default division; less is better"
    canvas, (sharing, fixed) = sheet(page, better, measured, (11.2, 4.0), (1, 2), names=0)
    apart: dict[str, list] = {}
    forests: dict[str, dict[str, float]] = {}
    for row in measured:
        bar = row["variant"], [row["kernel_us"] / 1e3], at_most(row["kernel_us"] / 1e3, 2)
        apart.setdefault(row["name"], []).extend([bar] * (row["part"] == "sharing"))
        forests.setdefault(row["name"], {}).update({row["variant"]: row["kernel_us"]} if row["part"] == "fixed" else {})
    bars(sharing, {name: of_forest for name, of_forest in apart.items() if of_forest}, {"": OURS})
    over = {name: [us / each["aligned"] for us in each.values()] for name, each in forests.items() if each}
    for (name, ratios), colour in zip(over.items(), OTHER, strict=False):
        slices = [int(variant.split()[0]) for variant in forests[name] if variant != "aligned"]
        label = f"{plain(name)}: {at_least(min(ratios[:-1]), 2)}× at best"
        fixed.plot(slices, ratios[:-1], "o-", markersize=4.5, linewidth=1.6, color=colour, label=label)
    logarithmic(fixed, "y", [1, *chain(*over.values())], "×")
    doubling(fixed)
    fixed.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    fixed.set_xlabel("equal slices of every stream", color=GREY)
    fixed.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return canvas


def crossover(rows: list[dict], page: Page) -> Canvas:
    """Draw a map for each group and length of the requests' own tokens: batch by prefix, coloured by gain."""
    drawn, maps = some([row | {"gain": gain(row)} for row in rows], "gain"), {}
    for row in drawn:
        group, own = map(int, re.findall(r"\d+", row["series"]))
        maps.setdefault((own, group), {})[row["x"], row["requests"]] = row["gain"]
    columns = len({group for _, group in maps})
    grid = -(-len(maps) // columns), columns
    better = "time of the fastest plain decode over ours: above 1, in blue, sharing pays; below 1, in red, it costs"
    canvas, charts = sheet(page, better, drawn, (max(3.6 * columns, 7.2), 2.9 * grid[0]), grid, names=0)
    for axes, ((own, group), cells) in zip(charts, sorted(maps.items()), strict=False):
        prefixes, batches = (sorted({cell[i] for cell in cells}) for i in (0, 1))
        values = np.array([[cells.get((prefix, batch), math.nan) for prefix in prefixes] for batch in batches])
        # White where both take equally long, on a scale of doublings.
        axes.pcolormesh(np.log2(values), cmap="RdBu", norm=TwoSlopeNorm(0.0, -1.0, 4.0), edgecolors="white")
        for (line, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "white" if value > 6 else INK}
                axes.text(column + 0.5, line + 0.5, at_least(value, 2 if value < 10 else 0), **style)
        axes.set_xticks(np.arange(len(prefixes)) + 0.5, [f"{prefix:,}" for prefix in prefixes])
        axes.set_yticks(np.arange(len(batches)) + 0.5, [str(batch) for batch in batches])
        axes.grid(visible=False)
        axes.set_title(f"{group}:1 q to kv heads, {own:,} own tokens", fontsize=10, color=INK)
        axes.set_xlabel("tokens of the shared prefix", color=GREY)
        axes.set_ylabel("requests", color=GREY)
    return canvas


if __name__ == "__main__":
    main()
