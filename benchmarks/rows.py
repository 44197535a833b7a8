"""Rows of a result file: the device and versions they hold for, failures as fields, a draft that outlives the run."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks.drafts import draft_of, write_rows
from benchmarks.inputs import Layout
from codec_jax.profile import versions

_PACKAGES = ["jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"]


def provenance(*packages: str) -> dict:
    """Say on what a row is measured, and when; `packages` are further ones whose versions matter."""
    found, date = dict(versions(*_PACKAGES, *packages)), datetime.date.today().isoformat()
    flags = {"xla_flags": given} if (given := os.environ.get("XLA_FLAGS")) else {}
    return {"device": jax.devices()[0].device_kind, "versions": found, "date": date} | flags


def conditions(layout: Layout, *packages: str) -> dict:
    """Say what the rows of a run have in common."""
    return provenance(*packages) | {
        "heads": f"{layout.num_q_heads}/{layout.num_kv_heads}",
        "head_dim": layout.head_dim,
        "page_size": layout.page_size,
        "dtype": "bfloat16",
    }


def attempt(measure: Callable[[], dict], field: str, error_field: str) -> dict:
    """Return the fields of a measurement or, where it fails, the reason, since other fields are still worth having."""
    try:
        return measure()
    except Exception as error:
        return {field: None, error_field: reason(error)}


def reason(error: BaseException) -> str:
    """Say in one line what went wrong."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def line(row: dict) -> str:
    """Show what a row measured, and why what is missing is missing."""
    numbers = [f"{field} {value:.4g}" for field, value in row.items() if isinstance(value, float)]
    reasons = [f"{field}: {row[field]}" for field in row if field.endswith("error") and isinstance(row[field], str)]
    named = [row[field] for field in ("name", "variant", "model", "implementation", "composition") if row.get(field)]
    return "  ".join([", ".join(named), *numbers, *reasons])


def collect(
    rows: Iterable[dict], path: Path, before: Sequence[dict] = (), line: Callable[[dict], str] = line
) -> list[dict]:
    """Take rows as they are measured: each is in the draft of `path`, and shown, before the next one begins.

    Those measured `before` that have not come yet stay behind them in the draft: this run may be interrupted, too.
    """
    kept: list[dict] = []
    for row in rows:
        kept.append(row)
        write_rows(draft_of(path), [*kept, *(each for each in before if each not in kept)])
        tqdm.write(line(row))
    return kept


def measured_before(path: Path, resume: bool) -> list[dict]:
    """Return the rows of an interrupted run that need not be measured again; none unless it is to be resumed.

    Those that have no time of ours need, and those in which a peer failed: it may find memory now, if it found none
    beside other commands. A ValueError says what is not possible at all, and so would say it again.

    Raises ValueError for a draft that is not one.
    """
    if not resume or not draft_of(path).exists():
        return []
    try:
        rows = json.loads(draft_of(path).read_text())["rows"]
        return [row for row in rows if all(reason.startswith("ValueError") for reason in _reasons(row))]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{draft_of(path)}: expected rows of an interrupted run; remove it to begin anew") from None


def _reasons(row: dict) -> Iterator[str]:
    """Yield why a row lacks a time of ours, of a peer, or of a configuration of a peer."""
    for name, value in row.items():
        peer = name.removesuffix("_error")
        if name == "error":
            yield f"ours: {value}"
        elif name.endswith("_configurations"):
            yield from (reason for reason in value.values() if isinstance(reason, str))
        elif peer != name and isinstance(value, str) and f"{peer}_configurations" not in row:  # errors are numbers too
            yield value


def find(rows: list[dict], fields: dict) -> dict | None:
    """Return the first row that has these fields, whatever its date, and no flags of XLA but those among them."""
    wanted = [(name, value) for name, value in ({"xla_flags": None} | fields).items() if name != "date"]
    return next((row for row in rows if all(row.get(name) == value for name, value in wanted)), None)


def found_or_measured(before: list[dict], known: dict, measure: Callable[[], dict]) -> dict:
    """Return the row that was measured before with these fields, whatever its date, or measure it."""
    return find(before, known) or known | attempt(measure, "kernel_us", "error")


def publish(path: Path, rows: Sequence[dict], failed: Sequence[str] = ()) -> None:
    """Put rows in the place of the last result; where something failed, exit and leave it and the draft as they are.

    The draft then goes, unless it has rows measured before that were not asked for this time.
    """
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}. The rows are in {draft_of(path)}, {path} is as it was")
    others = json.loads(draft_of(path).read_text())["rows"][len(rows) :]
    write_rows(path, rows)
    if others:
        write_rows(draft_of(path), others)
    else:
        draft_of(path).unlink()
