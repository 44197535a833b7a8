"""Drawings of results that have other axes than benchmarks.plot: memory traffic, decode steps, ablation, planning.

Each takes the rows of result files and an SVG file to write, and raises ValueError if there is nothing to draw.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from benchmarks.planning import BATCHES, LAYERS, STEPS, served_us
from benchmarks.plot import chart_grid, conditions, markers, save, tidy

#: Field, label, marker and colour, ours last and on top, as in benchmarks.plot.
BYTES = [
    ("unshared_bytes", "every request's own context", "D", "#999999"),
    ("l2_to_sm_bytes", "codec_jax, L2 to SMs", "s", "#56B4E9"),
    ("dram_read_bytes", "codec_jax, device memory", "o", "#0072B2"),
]
PEER_BYTES = [
    ("flashinfer_cascade_l2_to_sm_bytes", "FlashInfer cascade, L2 to SMs", "^", "#CC79A7"),
    ("flashinfer_decode_l2_to_sm_bytes", "FlashInfer decode, L2 to SMs", "s", "#E69F00"),
    ("l2_to_sm_bytes", "codec_jax, L2 to SMs", "o", "#0072B2"),
]
#: What a decode step is made of; the rest of its time are gaps between kernels.
STEP = {
    "attention_us": ("attention", "#0072B2"),
    "products_us": ("products with weights", "#E69F00"),
    "other_us": ("other kernels", "#CC79A7"),
    "gap": ("gaps", "#cccccc"),
}
LEGEND = {"frameon": False, "handletextpad": 0.4}
CURVES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]


def traffic(rows: list[dict], out: Path) -> None:
    """Draw bytes over the unique KV bytes, a line of markers for each forest; with peers those sent to SMs only."""
    peers = any("flashinfer_decode_l2_to_sm_bytes" in row for row in rows)
    counted = _some(rows, "l2_to_sm_bytes", out)
    canvas = markers(counted, PEER_BYTES if peers else BYTES, "unique_bytes", "bytes / unique KV bytes (logarithmic)")
    canvas.supxlabel(conditions(counted), x=0.99, ha="right", fontsize=9, color="#555555")
    save(canvas, out)


def decoding(rows: list[dict], out: Path) -> None:
    """Draw a chart for each case: a bar of a step's parts for each way of attention, and a line at the floor."""
    measured = _some(rows, "kernel_us", out)
    cases: dict[tuple[str, int, int], list[dict]] = {}
    for row in measured:
        cases.setdefault((row["model"], row["requests"], row["document_tokens"]), []).append(row)
    canvas, charts = chart_grid(len(cases), 5.2, 1.7)
    for axes, ((model, requests, document), variants) in zip(charts, cases.items(), strict=True):
        for place, row in enumerate(variants):
            times = row | {"gap": max(row["wall_us"] - row["kernel_us"], 0.0)}
            left = 0.0
            for field, (label, colour) in STEP.items():
                width = times[field] / 1e3
                axes.barh(place, width, 0.7, left, color=colour, label=None if place else label)
                left += width
        floor = variants[0]["floor_us"] / 1e3
        axes.axvline(floor, color="#333333", linewidth=1.2, linestyle="--", label="weights and unique KV read once")
        axes.set_yticks(range(len(variants)), [row["variant"] for row in variants])
        axes.invert_yaxis()
        axes.set_title(f"{model}, {requests} requests over {document} tokens", fontsize=10)
        tidy(axes)
    canvas.supxlabel(f"milliseconds for a token of every request; {conditions(measured)}", fontsize=9)
    handles, labels = charts[0].get_legend_handles_labels()
    canvas.legend(handles[1:] + handles[:1], labels[1:] + labels[:1], **LEGEND, loc="outside upper left", ncols=5)
    save(canvas, out)


def ablation(rows: list[dict], out: Path) -> None:
    """Draw fixed divisions over the default one, by the number of slices, and what sharing and division do apart."""
    measured = _some([row for row in rows if row["part"] in ("fixed", "sharing")], "kernel_us", out)
    canvas, (fixed, sharing) = chart_grid(2, 5.2, 3.6)
    times: dict[str, dict[str, float]] = {}
    for row in measured:
        if row["part"] == "fixed":
            times.setdefault(row["name"], {})[row["variant"]] = row["kernel_us"]
    for (name, of_forest), colour in zip(times.items(), CURVES, strict=False):
        default = of_forest.pop("aligned")
        slices = [int(variant.split()[0]) for variant in of_forest]
        over = [us / default for us in of_forest.values()]
        fixed.plot(slices, over, marker="o", markersize=4, linewidth=1.6, color=colour, label=name)
    fixed.axhline(1, color="#333333", linewidth=1.2, linestyle="--", label="the default")
    fixed.set_xscale("log", base=2)
    fixed.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    fixed.set_yscale("log")
    fixed.set_yticks(ticks := [1, 2, 5, 10], [f"{tick}×" for tick in ticks])
    fixed.yaxis.set_minor_locator(NullLocator())
    fixed.legend(**LEGEND, fontsize=8)
    fixed.set_xlabel("slices of every stream")
    fixed.set_title("time over the default's", fontsize=10)
    apart = [row for row in measured if row["part"] == "sharing"]
    names = list(dict.fromkeys(row["name"] for row in apart))
    places = [i + names.index(row["name"]) for i, row in enumerate(apart)]  # a gap between forests
    for place, row in zip(places, apart, strict=True):
        sharing.barh(place, row["kernel_us"] / 1e3, 0.7, color=CURVES[names.index(row["name"])])
        sharing.text(row["kernel_us"] / 1e3, place, f" {row['kernel_us'] / 1e3:.2f}", va="center", fontsize=8)
    sharing.set_yticks(places, [row["variant"] for row in apart])
    sharing.invert_yaxis()
    sharing.set_xscale("log")
    sharing.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    sharing.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    sharing.xaxis.set_minor_locator(NullLocator())
    sharing.margins(x=0.15)
    sharing.set_title("milliseconds, sharing and division apart", fontsize=10)
    for axes in (fixed, sharing):
        tidy(axes)
    canvas.supxlabel(conditions(measured), x=0.99, ha="right", fontsize=9, color="#555555")
    save(canvas, out)


def planning(rows: list[dict], out: Path) -> None:
    """Draw planning by the number of requests over one root: milliseconds, and of the attention that a plan serves."""
    place = {workload.name: len(workload.leaf) for workload in BATCHES}
    measured = sorted(
        _some([row for row in rows if row["name"] in place], "plan_us", out), key=lambda row: place[row["name"]]
    )
    requests = [place[row["name"]] for row in measured]
    canvas, (alone, share) = chart_grid(2, 5.2, 2.8)
    for field, label, colour in (("plan_us", "make_plan", "#0072B2"), ("replan_us", "replan", "#E69F00")):
        style = {"marker": "o", "markersize": 4, "linewidth": 1.6, "color": colour, "label": label}
        alone.plot(requests, [row[field] / 1e3 for row in measured], **style)
        share.plot(requests, [100 * row[field] / served_us(row) for row in measured], **style)
    alone.set_title("milliseconds on the CPU", fontsize=10)
    share.set_title(f"% of attention's least time, {STEPS} tokens in {LAYERS} layers", fontsize=10)
    for axes in (alone, share):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_ylim(bottom=0)
        tidy(axes)
    alone.legend(**LEGEND, fontsize=8)
    canvas.supxlabel(
        f"requests over one root of 120,000 tokens; {measured[0]['device']}, {measured[0]['date']}", fontsize=9
    )
    save(canvas, out)


def _some(rows: list[dict], field: str, out: Path) -> list[dict]:
    """Return the rows that have a field. Raises ValueError if there are none."""
    drawn = [row for row in rows if row.get(field)]
    if not drawn:
        raise ValueError(f"rows: expected at least one with {field} to draw in {out}, got none")
    return drawn
