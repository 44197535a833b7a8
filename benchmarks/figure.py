"""Measure a figure: attention time on its cases, as benchmarks.attention times each.

    python -m benchmarks.figure batch --peers --json benchmarks/results/batch_h200.json

`recorded` and `arrivals` are of the files in benchmarks/data.
"""

from __future__ import annotations

from benchmarks.attention import add_arguments, run
from benchmarks.sweeps import FIGURES
from benchmarks.timing import command, parse


def main() -> None:
    """Measure and publish the rows."""
    parser = command(__doc__, resumes=True)
    parser.add_argument("figure", choices=FIGURES)
    add_arguments(parser)
    arguments = parse(parser)
    run(arguments.figure, FIGURES[arguments.figure](), arguments)


if __name__ == "__main__":
    main()
