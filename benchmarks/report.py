"""Write the pages on what was measured, from the result files alone: docs/results, and what other pages quote.

    python -m benchmarks.report [--draw]
    python -m benchmarks.report --check

benchmarks/pages.toml lists the pages of docs/results. README.md and docs/evaluation.md quote them between the lines
`<!-- report: NAME -->` and `<!-- end of report -->`; the rows to quote may follow the name, as in
`<!-- report: NAME | row | row -->`. `--draw` draws all results anew, which needs matplotlib. `--check` writes nothing,
and exits with 1 and the names of the pages and drawings that are out of date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import zlib
from pathlib import Path

from benchmarks.pages import CLAIMS, PAGES, Load
from benchmarks.rounding import at_least, at_most
from benchmarks.rows import publish
from benchmarks.tables import BYTES, PEERS, gain, markdown, mean_and_range, notes, plain, speedups
from benchmarks.traces import recorded_trees
from codec_jax import Forest

ROOT = Path(__file__).parent.parent
QUOTING = ("README.md", "docs/evaluation.md")


def main() -> None:
    """Write the pages, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--draw", action="store_true", help="draw the results too")
    either.add_argument("--check", action="store_true", help="write nothing, say which pages are out of date")
    arguments = parser.parse_args()
    if arguments.check and (old := stale(ROOT)):
        sys.exit(f"out of date: {', '.join(old)}. `python -m benchmarks.report --draw` writes them anew")
    if arguments.draw:
        draw_all(ROOT)
    for path, page in {} if arguments.check else written(ROOT).items():
        (ROOT / path).write_text(page)


def loader(root: Path) -> Load:
    """Return what loads the rows of a result file, none where it is missing."""

    def load(stem: str) -> list[dict]:
        file = root / f"benchmarks/results/{stem}.json"
        return json.loads(file.read_text())["rows"] if file.exists() else []

    return load


def drawings(root: Path) -> dict[str, tuple[list[dict], str]]:
    """Return the rows of every drawing, and a checksum of them and of its page, which it says inside."""
    rows = {name: page.rows(loader(root)) for name, page in PAGES.items() if page.drawn}
    source = {name: zlib.crc32(json.dumps([PAGES[name], each]).encode()) for name, each in rows.items()}
    return {name: (each, f"of {source[name]:08x}") for name, each in rows.items() if each}


def conclude(name: str, rows: list[dict], path: Path, failed: list[str] | None = None) -> None:
    """End a command: print the table of its rows as a page shows it, and publish them unless something failed."""
    print(PAGES[name].show(rows), *notes(PAGES[name].table, rows), sep="\n\n")
    publish(path, rows, [row["name"] for row in rows if "error" in row] if failed is None else failed)


def draw_all(root: Path) -> None:
    """Draw all results that are there, and a recorded tree; needs matplotlib."""
    from benchmarks import plot

    for name, (rows, source) in drawings(root).items():
        plot.draw(name, rows, root / f"docs/results/{name}.svg", source)
    forest = Forest.from_nodes(*recorded_trees()[6].workload[1:])
    (root / "docs/results/forest_tree_of_thoughts.svg").write_text(forest.svg())


def stale(root: Path) -> list[str]:
    """Name the pages that `written` would change or does not make, and the drawings that are of other rows."""
    made = written(root)
    there = {str(path.relative_to(root)): path.read_text() for path in root.glob("docs/results/*")}
    there |= {path: (root / path).read_text() for path in QUOTING}
    old = [path for path in {**made, **there} if not path.endswith(".svg") and made.get(path) != there.get(path)]
    expected = {f"docs/results/{name}.svg": source for name, (_, source) in drawings(root).items()}
    return old + [path for path, source in expected.items() if source not in there.get(path, "")]


def written(root: Path) -> dict[str, str]:
    """Return the text of every page: those of docs/results, and those that quote them."""
    load = loader(root)
    index = [f"- [{page.title}]({name}.md)" for name, page in PAGES.items()]
    made = {"docs/results/README.md": "\n".join(["# Results", "", *index, ""])}
    made |= {f"docs/results/{name}.md": result_page(name, load) for name in PAGES}
    for path in QUOTING:
        results = os.path.relpath("docs/results", Path(path).parent)
        made[path] = render((root / path).read_text(), results, load)
    return made


def result_page(name: str, load: Load) -> str:
    """Return a page of docs/results."""
    page = PAGES[name]
    parts = [f"# {page.title}", page.about]
    if rows := page.rows(load):
        parts += [f"![{page.title}]({name}.svg)"] * page.drawn + [page.show(rows), *notes(page.table, rows)]
    else:
        parts.append("Not measured yet.")
    for stem, command in page.files.items():
        path, on = f"benchmarks/results/{stem}.json", measured_on(load(stem))
        parts.append(f"[{stem}.json](../../{path}): `python -m benchmarks.{command} --json {path}`, {on}")
    return "\n\n".join(parts) + "\n"


def measured_on(rows: list[dict]) -> str:
    """Say on what, with which versions and when rows were measured."""
    names = {"jax": "JAX", "flashinfer-python": "FlashInfer", "torch": "PyTorch", "fa3-fwd": "fa3-fwd"}
    said = [row["device"] for row in rows]
    said += [f"{name} {row['versions'][key]}" for key, name in names.items() for row in rows if key in row["versions"]]
    return ", ".join(dict.fromkeys([*said, *sorted(row["date"] for row in rows)])) or "not measured yet"


def render(page: str, results: str, load: Load) -> str:
    """Return a page with every region made anew; `results` is the way from it to docs/results.

    Raises ValueError for a region that nothing makes or that has no end, and for a row that is not there.
    """
    pattern = r"(<!-- report: ([^\n]+) -->\n)(?:(?!<!-- report: ).)*?(<!-- end of report -->)"

    def made(match: re.Match) -> str:
        try:
            said = region(*match[2].split(" | "), results=results, load=load)
        except KeyError as error:
            raise ValueError(f"report: {match[2]}: expected a page or a summary, and its rows, got {error}") from None
        return f"{match[1]}\n{said}\n\n{match[3]}"

    rendered, count = re.subn(pattern, made, page, flags=re.DOTALL)
    if count != page.count("<!-- report: "):
        raise ValueError("page: expected '<!-- end of report -->' after every '<!-- report: NAME -->'")
    return rendered


def region(name: str, *quoted: str, results: str, load: Load) -> str:
    """Return what stands in a region: a summary, or the table of a page, of all rows or of those that are quoted."""
    if name == "chart":
        return chart(PAGES["probes"].rows(load), *quoted)
    if name in ("claims", "figures"):
        return claims(load) if name == "claims" else figures(load, results)
    name, headline = ("paper", True) if name == "headline" else (name, False)
    page, rows = PAGES[name], PAGES[name].rows(load)
    if missing := set(quoted) - {row.get("name") for row in rows}:
        raise KeyError(", ".join(sorted(missing)))
    said = [] if headline else [page.show([row for row in rows if not quoted or row["name"] in quoted])]
    said += notes(page.table, rows)[: 0 if quoted else 1]
    return "\n\n".join([*said, f"[{page.title}]({results}/{name}.md): {measured_on(rows)}."])


def chart(rows: list[dict], part: str) -> str:
    """Draw the times of the row whose name has this part, in letters. Raises KeyError unless there is one."""
    if len(found := [row for row in rows if part in row["name"]]) != 1:
        raise KeyError(part)
    row, names = found[0], {"kernel_us": "codec_jax", **PEERS}
    times = {name: row[field] for field, name in names.items() if row.get(field)}
    said = [f"{plain(row['name'])}; one attention call, {row['device']}, {row['date']}; μs, less is better", ""]
    for name, us in times.items():
        rounded = (at_most if name == "codec_jax" else at_least)(us, 1)
        said.append(f"{name:<19} {'█' * max(1, round(50 * us / max(times.values())))} {rounded}")
    return "\n".join(["```text", *said, "```"])


def figures(load: Load, results: str) -> str:
    """Sum up the figures of benchmarks.figure: how much longer others take, in geometric means."""
    names = {name: load(f"{name}_h200") for name in PAGES if f"figure {name}" in str(PAGES[name].files)}
    columns = {"figure": lambda name: f"[{PAGES[name].title}]({results}/{name}.md)"}
    columns["forests"] = lambda name: str(len(names[name]))
    for field in list(PEERS)[:3]:
        gains = {name: speedups(rows, field) for name, rows in names.items()}
        columns[PEERS[field]] = lambda name, gains=gains: mean_and_range(gains[name]) if gains[name] else "–"
    return markdown(columns, [name for name, rows in names.items() if rows])


def claims(load: Load) -> str:
    """Lay the paper's claims, in pages.toml, beside our numbers."""
    paper, reads = PAGES["paper"].rows(load), load("traffic_peers_h200")
    said = {kind: mean_and_range(speedups(paper, f"flashinfer_{kind}_us")) for kind in ("decode", "cascade")}
    said |= {field: mean_and_range(speedups(reads, f"flashinfer_decode_{field}", field)) for field in BYTES}
    (long,) = (row for row in load("length_h200") if row["x"] == 50_000)
    said["long"] = f"{at_least(gain(long, ['flashinfer_decode_us']), 1)}x"
    said |= {"ours": at_most(long["kernel_us"], 0), "theirs": at_least(long["flashinfer_decode_us"], 0)}
    por = [100 * row["por_us"] / (row["kernel_us"] - row["por_us"]) for row in paper if row.get("por_us")]
    said |= {"median_por": f"{at_most(statistics.median(por), 1)}%", "max_por": f"{at_most(max(por), 1)}%"}
    (plan,) = (row for row in load("planning") if row["requests"] == 64)
    said["plan"] = f"{at_most(plan['plan_us'] / 1e3, 2)} ms"
    said["plan_share"] = f"{at_most(100 * plan['plan_us'] / plan['attention_us'], 2)}%"
    fixed: dict[str, dict[str, float]] = {}
    for row in load("ablation_h200"):
        if row["part"] == "fixed":
            fixed.setdefault(row["name"], {})[row["variant"]] = row["kernel_us"]
    split = [min(us for name, us in each.items() if name != "aligned") / each["aligned"] for each in fixed.values()]
    said["split"] = mean_and_range(split)
    said["none"] = mean_and_range([each["1 slice"] / each["aligned"] for each in fixed.values()])
    for row in load("decoding_120000_h200"):
        said[f"{row['variant']}_{row['requests']}"] = row["wall_us"]
    for requests in (16, 64):
        said[f"step_{requests}"] = f"{at_least(said[f'unshared_{requests}'] / said[f'shared_{requests}'], 1)}x"
    columns = {"the paper": lambda claim: claim[0], "here, on an H200": lambda claim: claim[1].format(**said)}
    return markdown(columns, CLAIMS.items())


if __name__ == "__main__":
    main()
