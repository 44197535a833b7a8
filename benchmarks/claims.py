"""What the paper claims, beside the same quantity in our results."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.planning import LAYERS, STEPS, served_us
from benchmarks.rounding import at_least, at_most
from benchmarks.tables import markdown, speedups
from benchmarks.workloads import PAPER

#: Rows of result files, by their names without suffix.
Load = Callable[[tuple[str, ...]], list[dict]]

#: Result files of whole decode steps, one for each document.
DECODING = tuple(f"decoding_{tokens}_h200" for tokens in (120_000, 32_768))

_SWEEPS = {each.name for each in PAPER}


def claims_table(load: Load) -> str:
    """Lay the paper's claims beside ours; what was not measured says so."""
    lines = [[claim, where, ours(load) or "not measured yet"] for claim, where, ours in CLAIMS]
    return markdown(["the paper", "on", "here, on an H200"], lines)


def over_decode(load: Load) -> str | None:
    """Compare with decode that reads shared pages once for every request."""
    gains = speedups([row for row in load(("attention_h200",)) if row["name"] in _SWEEPS], "flashinfer_decode_us")
    if not gains:
        return None
    geometric, arithmetic = at_least(statistics.geometric_mean(gains), 2), at_least(statistics.mean(gains), 2)
    return (
        f"{geometric}x in the geometric mean ({arithmetic}x in the arithmetic) of {len(gains)} forests "
        f"and up to {at_least(max(gains), 1)}x over FlashInfer decode, {at_least(min(gains), 2)}x at least"
    )


def memory_reads(load: Load) -> str | None:
    """Compare bytes that the SMs were sent, and bytes read from device memory."""
    said = []
    for field, name in (("l2_to_sm_bytes", "sent from L2 to SMs"), ("dram_read_bytes", "read from device memory")):
        rows = [
            row for row in load(("traffic_peers_h200",)) if row.get(f"flashinfer_decode_{field}") and row.get(field)
        ]
        gains = [row[f"flashinfer_decode_{field}"] / row[field] for row in rows]
        if gains:
            mean, most = at_least(statistics.geometric_mean(gains), 1), at_least(max(gains), 1)
            said.append(f"bytes {name} down {mean}x on average, {most}x at most")
    return "; ".join(said) or None


def long_context(load: Load) -> str | None:
    """Compare the attention of a layer over 50,000 shared tokens."""
    for row in load(("length_h200",)):
        if row["x"] == 50_000 and row.get("flashinfer_decode_us") and row.get("kernel_us"):
            ours, theirs = row["kernel_us"] / 1e3, row["flashinfer_decode_us"] / 1e3
            gain = at_least(theirs / ours, 1)
            return f"{gain}x ({ours:.3f} against {theirs:.3f} ms), {row['name']}, FlashInfer decode"
    return None


def reduction(load: Load) -> str | None:
    """Compare the merge of partials with partial attention."""
    shares = [
        row["por_us"] / (row["kernel_us"] - row["por_us"])
        for row in load(("attention_h200",))
        if row["name"] in _SWEEPS and row.get("por_us") and row.get("kernel_us")
    ]
    if not shares:
        return None
    median, most = (at_most(100 * share, 1) for share in (statistics.median(shares), max(shares)))
    return f"{median}% of PAC in the median of {len(shares)} forests, {most}% at most"


def planning(load: Load) -> str | None:
    """Say how long planning for 64 requests takes, alone and of the attention that a plan serves."""
    rows = [row for row in load(("planning",)) if row["requests"] == 64]
    if not rows:
        return None
    said = []
    for row in rows:
        alone = [f"{row[field] / 1e3:.2f} ms" for field in ("plan_us", "replan_us")]
        share = [f"{at_most(100 * row[field] / served_us(row), 2)}%" for field in ("plan_us", "replan_us")]
        said.append(
            f"{alone[0]} for {row['name']}, {alone[1]} when its leaves have grown: {share[0]} and {share[1]} of what "
            f"attention takes at least in the {STEPS} tokens and {LAYERS} layers that a plan serves"
        )
    return "; ".join(said)


def division(load: Load) -> str | None:
    """Compare the default division with the best number of slices for every stream, and with one."""
    forests: dict[str, dict[str, float]] = {}
    for row in load(("ablation_h200",)):
        if row["part"] == "fixed" and row.get("kernel_us"):
            forests.setdefault(row["name"], {})[row["variant"]] = row["kernel_us"]
    over_best, over_one = [], []
    for times in forests.values():
        fixed = [us for variant, us in times.items() if variant != "aligned"]
        if "aligned" in times and "1 slice" in times:
            over_best.append(min(fixed) / times["aligned"])
            over_one.append(times["1 slice"] / times["aligned"])
    if not over_best:
        return None
    return (
        f"{at_least(min(over_best), 2)}x to {at_least(max(over_best), 2)}x over the best fixed division of "
        f"{len(over_best)} forests, {at_least(min(over_one), 1)}x to {at_least(max(over_one), 1)}x over none"
    )


def token_latency(load: Load) -> str | None:
    """Compare whole decode steps with and without sharing."""
    steps: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in load(DECODING):
        if row.get("wall_us"):
            case = row["model"], row["requests"], row["document_tokens"]
            steps.setdefault(case, {})[row["variant"]] = row["wall_us"]
    said = []
    for (model, requests, document), times in steps.items():
        others = [f"{at_least(times[kind] / times['shared'], 1)}x over {kind}" for kind in times if kind != "shared"]
        if "shared" in times and others:
            said.append(f"{model}, {requests} over {document}: {', '.join(others)}")
    return "; ".join(said) or None


#: What the paper says, on which GPU, and the same quantity here.
CLAIMS: list[tuple[str, str, Callable[[Load], str | None]]] = [
    ("attention 1.9x faster on average and up to 3.6x than FlashDecoding", "A100", over_decode),
    ("global-memory reads down 120.9x on average", "A100", memory_reads),
    ("4.7x at 50K context (2.094 against 9.900 ms)", "H800", long_context),
    ("parallel reduction (POR) under 10% of PAC", "A100", reduction),
    ("planning 1.3% to 2.5% of attention time when a plan is reused, tens of ms for 64 requests", "A100", planning),
    ("division 1.02x to 1.04x over the best fixed split, 3.2x to 4.4x over no split", "A100", division),
    ("time per output token 3.8x better than vLLM 0.6.6, Qwen3-4B", "A100", token_latency),
]
