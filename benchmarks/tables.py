"""Rows of a result file as Markdown: tables, what they come to, and what they were measured on."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.ceilings import CEILINGS
from benchmarks.crossover import MOST_BEHIND, PAGED, PLAIN, SAME_KERNELS, gain
from benchmarks.planning import served_us
from benchmarks.rounding import at_least, at_most
from benchmarks.tune import by_config, score

#: Field of a time, and the column's head.
TIMES = {
    "kernel_us": "codec_jax",
    "roofline_us": "roofline",
    "cudnn_us": "cuDNN",
    "flashinfer_decode_us": "FlashInfer decode",
    "flashinfer_cascade_us": "FlashInfer cascade",
    "flash_attention_us": "FlashAttention-3",
    "flex_attention_us": "FlexAttention",
}
PEERS = {field: name for field, name in TIMES.items() if field not in ("kernel_us", "roofline_us")}
_ON_PROBES = "flash_attention_us", "flex_attention_us"
_IN_FIGURES = {field: name for field, name in PEERS.items() if field not in _ON_PROBES}
_VERSIONS = {"jax": "JAX", "flashinfer-python": "FlashInfer", "torch": "PyTorch", "fa3-fwd": "fa3-fwd"}


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Lay out a table."""
    rule = f"|{'---|' * len(head)}"
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    """Lay out a line of a table."""
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int = 1) -> str:
    """Show a number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def speedup(value: float | None) -> str:
    """Show a speed-up, or a dash where there is none."""
    return "–" if value is None else at_least(value, 2)


def times(rows: list[dict]) -> str:
    """Show kernel times in microseconds; below the table, what a peer could not run, and why."""
    shown = {field: name for field, name in TIMES.items() if any(field in row for row in rows)}
    head = ["forest", *shown.values()]
    return "\n\n".join(
        [markdown(head, [[row["name"], *(number(row.get(field)) for field in shown)] for row in rows]), *failures(rows)]
    )


def failures(rows: list[dict]) -> list[str]:
    """Say, a line for each peer, which rows it could not run, and why."""
    said = []
    for field, name in PEERS.items():
        reasons = [f"{row['name']} ({row[f'{field[:-3]}_error']})" for row in rows if row.get(f"{field[:-3]}_error")]
        if reasons:
            said.append(f"No time of {name}: {'; '.join(reasons)}.")
    return said


def over_peers(rows: list[dict]) -> str:
    """Say in geometric means how much faster we are than each peer, and how far over the roofline."""
    measured = [row for row in rows if row.get("kernel_us")]
    if not measured:
        return "No forest was measured."
    ratios = [row["kernel_us"] / row["roofline_us"] for row in measured]
    parts = [f"{at_most(statistics.geometric_mean(ratios), 2)}x the roofline"]
    for field, name in PEERS.items():
        gains = speedups(measured, field)
        if gains:
            mean, least, most = mean_and_range(gains)
            parts.append(f"{mean} faster than {name} ({least} to {most})")
    return f"Geometric means over {len(measured)} forests: {', '.join(parts)}."


def figures(rows_of: dict[str, list[dict]]) -> str:
    """Sum figures up, a line each: how many forests, and in geometric means how much longer each peer takes."""
    lines = []
    for title, rows in rows_of.items():
        gains = [speedups(rows, field) for field in _IN_FIGURES]
        said = ["{} ({} to {})".format(*mean_and_range(x)) if x else "–" for x in gains]
        lines.append([title, str(len([row for row in rows if row.get("kernel_us")])), *said])
    return markdown(["figure", "forests", *_IN_FIGURES.values()], lines)


def speedups(rows: list[dict], field: str) -> list[float]:
    """Return another time over ours, for every row that has both."""
    return [row[field] / row["kernel_us"] for row in rows if row.get(field) and row.get("kernel_us")]


def mean_and_range(gains: list[float]) -> tuple[str, ...]:
    """Show the geometric mean of speed-ups, the least and the greatest."""
    return tuple(f"{speedup(value)}x" for value in (statistics.geometric_mean(gains), min(gains), max(gains)))


def fastest(rows: list[dict]) -> list[str]:
    """Say, in a line if there is any, for how many rows each configuration of a peer was its fastest."""
    said = []
    for field, name in PEERS.items():
        timed = [
            {configuration: us for configuration, us in row[of].items() if not isinstance(us, str)}
            for row in rows
            if (of := f"{field[:-3]}_configurations") in row
        ]
        counted = Counter(min(each, key=each.__getitem__) for each in timed if each)
        if counted:
            shown = ", ".join(f"{configuration} ({count})" for configuration, count in counted.most_common())
            said.append(f"{name}: {shown}")
    return [f"Fastest configurations, and of how many forests: {'; '.join(said)}."] * bool(said)


def figure(rows: list[dict]) -> str:
    """Show a figure's times and what they come to."""
    return "\n\n".join([times(rows), over_peers(rows), *fastest(rows)])


def with_heads(rows: list[dict]) -> str:
    """Show a figure's times with the heads of each row, and what else is not as in most."""
    usual = {"head_dim": ("head size", 128), "page_size": ("pages of", 16)}
    named = []
    for row in rows:
        unusual = [f"{said} {row[field]}" for field, (said, value) in usual.items() if row[field] != value]
        named.append(row | {"name": f"{row['name']} ({', '.join([row['heads'], *unusual])})"})
    return figure(named)


def traffic(rows: list[dict]) -> str:
    """Show what each call read from device memory and sent from L2 to SMs, over the unique KV bytes."""
    callers = {"": "codec_jax", "flashinfer_decode_": "FlashInfer decode", "flashinfer_cascade_": "FlashInfer cascade"}
    fields = {"dram_read_bytes": "DRAM", "l2_to_sm_bytes": "L2 to SM"}
    columns = {
        f"{prefix}{field}": f"{name}, {what}"
        for prefix, name in callers.items()
        for field, what in fields.items()
        if any(f"{prefix}dram_read_bytes" in row for row in rows)
    }
    lines = [
        [
            row["name"],
            f"{row['unique_bytes'] / 1e6:.0f}",
            at_least(row["unshared_bytes"] / row["unique_bytes"], 2),
            *(
                (at_most if field in fields else at_least)(row[field] / row["unique_bytes"], 3)
                if row.get(field)
                else number(None)
                for field in columns
            ),
        ]
        for row in rows
    ]
    return markdown(["forest", "unique KV, MB", "without sharing", *columns.values()], lines)


def crossover(rows: list[dict]) -> str:
    """Show plain decode's time over ours: a table for each group and length of own tokens, batch by prefix."""
    maps: dict[str, dict[tuple[int, int], float | None]] = {}
    for row in rows:
        maps.setdefault(row["series"], {})[row["x"], row["requests"]] = gain(row)
    tables = []
    for series, cells in maps.items():
        prefixes, batches = (sorted({cell[i] for cell in cells}) for i in (0, 1))
        lines = [[str(batch), *(speedup(cells.get((prefix, batch))) for prefix in prefixes)] for batch in batches]
        tables.append(f"{series}:\n\n{markdown(['requests', *(f'{prefix} shared' for prefix in prefixes)], lines)}")
    behind = []
    for what, fields in (
        ("plain decode", PLAIN),
        ("plain decode that reads the same pages", PAGED),
        ("the same kernels without sharing", SAME_KERNELS),
    ):
        gains = [value for row in rows if (value := gain(row, fields))]
        if gains:
            number_behind = sum(value * MOST_BEHIND < 1 for value in gains)
            behind.append(f"{number_behind} of {len(gains)} are behind {what} ({at_least(min(gains), 2)}x at least)")
    tables += [f"Cells more than 3% behind: {'; '.join(behind)}.", *fastest(rows)]
    return "\n\n".join(tables)


def decoding(rows: list[dict]) -> str:
    """Show the time of a decode step in milliseconds: a line for each case, a column for each way of attention.

    Beside it stands what the kernels of the step with sharing do.
    """
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    cases: dict[tuple[str, int, int], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["requests"], row["document_tokens"]), {})[row["variant"]] = row
    lines = [
        [
            f"{model}, {requests} requests over {document} tokens",
            *(number(milliseconds(of_case.get(variant, {}).get("wall_us")), 3) for variant in variants),
            number(milliseconds(next(iter(of_case.values())).get("floor_us")), 3),
            *(number(milliseconds(of_case.get("shared", {}).get(f"{part}_us")), 3) for part in STEP_PARTS),
        ]
        for (model, requests, document), of_case in cases.items()
    ]
    parts = [f"shared: {said}" for said in STEP_PARTS.values()]
    return markdown(["decode step, ms", *variants, "weights and unique KV read once", *parts], lines)


#: Fields of a step's kernels, and the columns' heads.
STEP_PARTS = {"attention": "attention", "products": "products with weights", "other": "other kernels"}


def invariance(rows: list[dict]) -> str:
    """Show what batches of different composition make of the same prompts."""
    lines = []
    for row in rows:
        agree = row["tokens_before_the_first_difference"]
        lines.append([
            row["model"],
            row["implementation"],
            row["composition"],
            f"{agree.count(row['tokens'])} of {len(agree)}",
            str(min(agree)),
            f"{row['logits_difference']:.1e}",
            f"{row['logprob_difference']:.1e}",
        ])  # fmt: skip
    same = f"prompts with the same {rows[0]['tokens']} tokens"
    apart = "logits apart", "log-probabilities apart"
    return markdown(["model", "path", "batches", same, "tokens agree for, at least", *apart], lines)


def milliseconds(us: float | None) -> float | None:
    """Convert microseconds."""
    return None if us is None else us / 1e3


def planning(rows: list[dict]) -> str:
    """Show the times of make_plan, and of replan where only leaves grew, in milliseconds on the CPU.

    Beside them make_plan's part of the least time of the attention that a plan serves.
    """
    lines = [
        [
            row["name"],
            str(row["requests"]),
            str(row["nodes"]),
            number(milliseconds(row["plan_us"]), 2),
            f"{number(milliseconds(row['replan_us']), 2)}{'' if row['replan_extends'] else ' (anew)'}",
            f"{at_most(100 * row['plan_us'] / served_us(row), 2)}%",
            number(row["most_load"] / row["mean_load"], 3),
        ]
        for row in rows
    ]
    head = [
        "forest",
        "requests",
        "nodes",
        "make_plan, ms",
        "replan, ms",
        "make_plan, of attention",
        "most load over mean",
    ]
    return markdown(head, lines)


def ablation(rows: list[dict]) -> str:
    """Show kernel times with and without sharing and division, by number of slices and by policy; and predictions."""
    shown = []
    for part, said in ABLATIONS.items():
        of_part = [row for row in rows if row["part"] == part]
        variants = list(dict.fromkeys(row["variant"] for row in of_part))
        forests = dict.fromkeys(row["name"] for row in of_part)
        times = {(row["name"], row["variant"]): row.get("kernel_us") for row in of_part}
        lines = [[name, *(number(times.get((name, variant))) for variant in variants)] for name in forests]
        if lines:
            shown.append(f"{said}\n\n{markdown(['forest, μs', *variants], lines)}")
    errors = prediction_errors(rows)
    if errors:
        shown.append(
            "The plan's cost model predicts these times of the default plan with an error of "
            f"{at_most(100 * max(errors), 1)}% at most over {len(errors)} forests, "
            f"{at_most(100 * statistics.median(errors), 1)}% in the median."
        )
    return "\n\n".join(shown)


#: Parts of `benchmarks.ablation`, and what stands above the table of each.
ABLATIONS = {
    "sharing": "Sharing and division apart:",
    "fixed": "Fixed numbers of slices of every stream, and the default:",
    "policies": "Policies of division:",
}


def prediction_errors(rows: list[dict]) -> list[float]:
    """Return how far the predicted time of the default plan is from the measured one, once for every forest."""
    default = {row["name"]: row for row in rows if row["variant"] in ("aligned", "both") and row.get("kernel_us")}
    return [abs(row["predicted_us"] / row["kernel_us"] - 1) for row in default.values()]


def ceilings(rows: list[dict]) -> str:
    """Show what XLA reads and multiplies at most on each GPU, and the rates that its rooflines are made of."""
    head = ["GPU", "XLA reads, TB/s", "XLA multiplies, TFLOP/s", "roofline reads, TB/s", "roofline multiplies, TFLOP/s"]
    lines = []
    for row in rows:
        rates = (row["read_bytes_per_us"], row["flops_per_us"], *CEILINGS[row["device"]])
        lines.append(
            [row["device"], *(number(rate / 1e6, digits) for rate, digits in zip(rates, (2, 0, 2, 0), strict=True))]
        )
    return markdown(head, lines)


def tuning(rows: list[dict]) -> str:
    """Show, for each head size, the geometric mean of time over roofline of every config that all forests allow."""
    lines = []
    for head_dim, table in sorted({(row["head_dim"], row["table"]) for row in rows}):
        scores = {config: score(forests) for config, forests in by_config(rows, head_dim, table).items()}
        lines += [
            [str(head_dim), table, str(config.block_tokens), str(config.stages), f"{value:.3f}"]
            for config, value in scores.items()
            if value is not None
        ]
    return markdown(["head size", "forests", "tokens of a block", "blocks in flight", "times the roofline"], lines)


def measured_on(rows: list[dict]) -> str:
    """Say on what, with which versions and when rows were measured."""
    said = [row["device"] for row in rows]
    said += [
        f"{name} {row['versions'][package]}"
        for package, name in _VERSIONS.items()
        for row in rows
        if package in row["versions"]
    ]
    return ", ".join(dict.fromkeys([*said, *sorted(row["date"] for row in rows)]))
