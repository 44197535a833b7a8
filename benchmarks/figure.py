"""Measure a figure: attention time on its cases, as benchmarks.attention times each.

    python -m benchmarks.figure batch --json benchmarks/results/batch_h200.json --plot benchmarks/results/batch_h200.svg
    python -m benchmarks.figure recorded --peers --json benchmarks/results/recorded_h200.json

`recorded` and `arrivals` are of the files in benchmarks/data, or others: a JSON file with a list `trees`, each with
`parent` (-1 for a root), `length` and `leaf` as Forest.from_nodes takes them; a request trace in Mooncake's format,
JSON lines with `input_length` and `hash_ids`, one for each 512 tokens, equal where requests begin with the same.
`--plot` needs matplotlib, which the extra `bench` installs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.attention import add_arguments, run
from benchmarks.sweeps import FIGURES, ends_of_charts
from benchmarks.timing import require_gpu


def main() -> None:
    """Measure, publish the rows, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--file", type=Path, help="other recorded trees, or another request trace")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--quick", action="store_true", help="the ends of every chart")
    add_arguments(parser)
    arguments = parser.parse_args()
    figure = FIGURES[arguments.figure]
    if arguments.file and not figure.file:
        parser.error(f"--file: expected none for {arguments.figure}")
    if arguments.plot:
        from benchmarks.plot import draw  # before anything is measured: it may be missing
    try:
        cases = figure.cases(arguments.file or figure.file) if figure.file else figure.cases()
    except (OSError, ValueError) as error:
        parser.error(f"--file: {error}")
    require_gpu(parser)
    rows = run(ends_of_charts(cases) if arguments.quick else cases, arguments)
    if arguments.plot:
        draw(rows, arguments.plot, figure)


if __name__ == "__main__":
    main()
