"""The pages of docs/results, as pages.toml lists them: the rows, the table and the drawing of each."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import tables, workloads

Load = Callable[[str], list[dict]]


class Page(NamedTuple):
    """A page of docs/results."""

    title: str
    about: str
    files: dict[str, str]  # result file -> command that measures it
    table: str = "times"
    forests: str = ""
    axis: str = ""  # of curves
    joined: bool = True  # points of a curve are of one kind of forest that grows
    drawn: bool = True

    def show(self, rows: list[dict]) -> str:
        """Return the table of rows."""
        return getattr(tables, self.table)(rows)

    def rows(self, load: Load) -> list[dict]:
        """Return the rows that were measured."""
        names = {each.name for each in getattr(workloads, self.forests)} if self.forests else None
        return [row for stem in self.files for row in load(stem) if names is None or row["name"] in names]


_LISTED = tomllib.loads(Path(__file__).with_name("pages.toml").read_text())
CLAIMS = _LISTED.pop("claims")  # the paper's claim -> the same quantity here
PAGES = {name: Page(**fields) for name, fields in _LISTED.items()}
