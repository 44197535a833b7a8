"""Write the tables of README.md and docs/evaluation.md anew, from the result files alone.

    python -m benchmarks.report
    python -m benchmarks.report --draw

A page says where a table goes by the lines `<!-- report: NAME -->` and `<!-- end of report -->`; what stands between
them is replaced. A table whose result file is not there says so, with the command that makes it. `--draw` also draws
the result files as SVG beside them, which needs matplotlib; pages show the drawings that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from benchmarks import tables
from benchmarks.claims import DECODING, claims_table
from benchmarks.sweeps import FIGURES
from benchmarks.workloads import PAPER, PROBE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", ROOT / "docs/evaluation.md"]
_REGION = re.compile(r"(<!-- report: (\S+) -->\n)((?:(?!<!-- report: ).)*?)(<!-- end of report -->)", re.DOTALL)


class Source(NamedTuple):
    """Result files by their names without suffix, the command that makes the first, their table and their drawing."""

    stems: tuple[str, ...]
    command: str
    table: Callable[[list[dict]], str]
    drawing: str | None = None


def _named(names: set[str], table: Callable[[list[dict]], str]) -> Callable[[list[dict]], str]:
    """Return the table of the rows of these names."""
    return lambda rows: table([row for row in rows if row["name"] in names])


def _figure(name: str) -> Source:
    """Return the source of a figure of benchmarks.figure."""
    table = tables.with_heads if name in ("variants", "models") else tables.figure
    return Source((f"{name}_h200",), f"benchmarks.figure {name} --peers", table, f"{name}_h200")


PROBES, SWEEPS = {each.name for each in PROBE}, {each.name for each in PAPER}
CROSSOVER = tuple(f"crossover_group{group}_own{own}_h200" for group in (4, 1, 8) for own in (256, 2048))
ABLATION = "ablation_h200", "ablation_policies_h200", "ablation_predicted_h200"
LAYOUTS = (
    "attention_page64_h200",
    "attention_shapes_h200",
    *(f"attention_{name}_h200" for name in ("32_32", "16_8", "64_8", "16_1", "head64", "head256")),
)
TUNED = tuple(f"tune_head{head_dim}_h200" for head_dim in (128, 64, 256))
TIMED = ("attention_h200",), "benchmarks.attention --peers"

#: Regions of more than one source.
SUMMARIES = ("claims", "figures")

SOURCES = {
    "probes": Source(*TIMED, _named(PROBES, tables.times)),
    "paper": Source(*TIMED, _named(SWEEPS, tables.figure), "attention_h200"),
    "layouts": Source(LAYOUTS, "benchmarks.attention --quick --page-size 64", tables.with_heads),
    **{name: _figure(name) for name in FIGURES},
    "others": Source(("attention_others_h200",), "benchmarks.attention --quick --others", tables.figure),
    "h100": Source(("attention_h100",), "benchmarks.attention --peers", tables.figure, "attention_h100"),
    "decoding_h100": Source(("decoding_32768_h100",), "benchmarks.decoding --documents 32768", tables.decoding),
    "ceilings": Source(("ceilings_h200", "ceilings_h100"), "benchmarks.ceilings", tables.ceilings),
    "traffic": Source(("traffic_h200", "traffic_shapes_h200"), "benchmarks.traffic", tables.traffic, "traffic_h200"),
    "traffic_peers": Source(
        ("traffic_peers_h200",), "benchmarks.traffic --peers", tables.traffic, "traffic_peers_h200"
    ),
    "crossover": Source(
        CROSSOVER, "benchmarks.crossover --peers --group 4 --own 256", tables.crossover, "crossover_h200"
    ),
    "decoding": Source(DECODING, "benchmarks.decoding --documents 120000", tables.decoding, "decoding_h200"),
    "invariance": Source(
        ("invariance_h200", "invariance_xla_h200"),
        "benchmarks.invariance --implementations mosaic",
        tables.invariance,
    ),
    "planning": Source(("planning",), "benchmarks.planning", tables.planning, "planning_overhead"),
    "tuning": Source(TUNED, "benchmarks.tune --head-dim 128", tables.tuning),
    "ablation": Source(ABLATION, "benchmarks.ablation --part sharing fixed", tables.ablation, "ablation_h200"),
}


def main() -> None:
    """Rewrite the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the result files too")
    if parser.parse_args().draw:
        draw(RESULTS)
    for page in PAGES:
        page.write_text(render(page.read_text(), page.parent, RESULTS))


def draw(results: Path) -> None:
    """Draw every result file that is there and has a drawing."""
    from benchmarks import charts, crossover, plot

    others = {
        "crossover": crossover.draw,
        "traffic": charts.traffic,
        "traffic_peers": charts.traffic,
        "decoding": charts.decoding,
        "ablation": charts.ablation,
        "planning": charts.planning,
    }
    for name, source in SOURCES.items():
        rows = load(source.stems, results)
        if rows and source.drawing:
            out = results / f"{source.drawing}.svg"
            others[name](rows, out) if name in others else plot.draw(rows, out, FIGURES.get(name))


def load(stems: tuple[str, ...], results: Path) -> list[dict]:
    """Return the rows of the result files that are there, in order."""
    files = [results / f"{stem}.json" for stem in stems]
    return [row for file in files if file.exists() for row in json.loads(file.read_text())["rows"]]


def render(text: str, folder: Path, results: Path) -> str:
    """Return a page with every region made anew; links are relative to the folder of the page.

    Raises ValueError for a region that nothing makes, or that has no end.
    """
    if text.count("<!-- report: ") != len(_REGION.findall(text)):
        raise ValueError("text: expected '<!-- end of report -->' after every '<!-- report: NAME -->'")
    return _REGION.sub(lambda match: f"{match[1]}\n{region(match[2], folder, results)}\n\n{match[4]}", text)


def region(name: str, folder: Path, results: Path) -> str:
    """Return what stands in a region. Raises ValueError for a name that nothing makes."""
    if name == "claims":
        return claims_table(partial(load, results=results))
    if name == "figures":
        return figures(folder, results)
    if name not in SOURCES:
        raise ValueError(f"report: expected a region of {', '.join([*SUMMARIES, *SOURCES])}, got {name}")
    source = SOURCES[name]
    rows = load(source.stems, results)
    if not rows:
        return f"Not measured yet: `python -m {source.command} --json benchmarks/results/{source.stems[0]}.json`"
    parts = [source.table(rows)]
    drawing = results / f"{source.drawing}.svg"
    if drawing.exists():
        parts.append(f"![{name}]({link(drawing, folder)})")
    files = [results / f"{stem}.json" for stem in source.stems]
    links = [f"[{file.name}]({link(file, folder)})" for file in files if file.exists()]
    return "\n\n".join([*parts, f"From {', '.join(links)}: {tables.measured_on(rows)}."])


def figures(folder: Path, results: Path) -> str:
    """Sum up the figures that were measured."""
    rows_of = {
        f"[{figure.title}]({link(results / f'{name}_h200.json', folder)})": rows
        for name, figure in FIGURES.items()
        if (rows := load((f"{name}_h200",), results))
    }
    if not rows_of:
        return "Not measured yet."
    return "\n\n".join([tables.figures(rows_of), f"On {tables.measured_on([*chain(*rows_of.values())])}."])


def link(file: Path, folder: Path) -> str:
    """Return the path of a file as a page in a folder refers to it."""
    return Path(os.path.relpath(file, folder)).as_posix()


if __name__ == "__main__":
    main()
