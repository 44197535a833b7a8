"""Tables of rows in Markdown, and what stands below them; numbers are never rounded in our favour."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

from benchmarks.ceilings import CEILINGS
from benchmarks.rounding import at_least, at_most

#: Field of a time, and the name of what takes it; the rival that shares as well comes before those that do not.
PEERS = {
    "flashinfer_cascade_us": "FlashInfer cascade",
    "flashinfer_decode_us": "FlashInfer decode",
    "cudnn_us": "cuDNN",
    "flash_attention_us": "FlashAttention-3",
    "flex_attention_us": "FlexAttention",
}
PLAIN = ("unshared_us", "cudnn_us", "flashinfer_decode_us")
BYTES = {"dram_read_bytes": "from device memory", "l2_to_sm_bytes": "from L2"}
MAX_BEHIND = 1.03  # of the time of plain decode
Fill = Callable[[dict], str]


def plain(name: str) -> str:
    """Spell a forest's name out: who shares what, and how much each has of its own."""
    name = re.sub(r"(\d+) shared, (\d+) x (\d+)", r"\2 requests: \1 shared, \3 each", name)
    name = re.sub(r"no sharing, (\d+) x (\d+)", r"\1 requests: none shared, \2 each", name)
    return re.sub(r"\d{4,}", lambda digits: f"{int(digits[0]):,}", re.sub(r"\b1 (request|prompt)s\b", r"1 \1", name))


def speedups(rows: Iterable[dict], theirs: str, ours: str = "kernel_us") -> list[float]:
    """Return another's number over ours, for every row that has both."""
    return [row[theirs] / row[ours] for row in rows if row.get(theirs) and row.get(ours)]


def mean_and_range(gains: list[float]) -> str:
    """Show the geometric mean of speed-ups, the least and the greatest. Raises ValueError where there is none."""
    mean, least, most = (at_least(x, 2) for x in (statistics.geometric_mean(gains), min(gains), max(gains)))
    return f"{mean}x ({least}x to {most}x)"


def gain(row: dict, fields: Iterable[str] = PLAIN) -> float | None:
    """Return the least of other times over ours; None unless both were measured."""
    return min((over for field in fields for over in speedups([row], field)), default=None)


def scores(rows: list[dict]) -> dict[tuple[int, str, int, int], float | None]:
    """Return the geometric mean of time over roofline of every head size, table, block and number of stages.

    None where a forest has no time.
    """
    grouped: dict[tuple, list[float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("head_dim", "table", "block_tokens", "stages"))
        grouped.setdefault(key, []).append((row["kernel_us"] or 0) / row["roofline_us"])
    return {key: statistics.geometric_mean(each) if all(each) else None for key, each in sorted(grouped.items())}


def markdown(columns: dict[str, Callable], lines: Iterable) -> str:
    """Lay out a table: the head of each column, and how a line fills it; what is short stands to the right."""
    cells = [[fill(line) for fill in columns.values()] for line in lines]
    short = [i > 0 and all(len(line[i]) < 30 for line in cells) for i in range(len(columns))]
    cells = [list(columns), ["---:" if right else "---" for right in short], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def number(field: str, digits: int = 1, unit: float | str = 1.0, rounded: Callable = at_least) -> Fill:
    """Return what fills a column with a field over a unit, a number or another field."""
    return lambda row: rounded(row[field] / row.get(unit, unit) if row.get(field) is not None else None, digits)


def text(**columns: str) -> dict[str, Fill]:
    """Return columns of fields as they are."""
    return {head: lambda row, field=field: plain(str(row[field])) for head, field in columns.items()}


def pivot(rows: list[dict], line: str, column: str, fill: Fill) -> str:
    """Lay out a table with a line and a column for each value of two fields, in the order of the rows."""
    cells = {(row[line], row[column]): fill(row) for row in rows}
    heads = dict.fromkeys(row[column] for row in rows)
    columns = {str(head): lambda of, head=head: cells.get((of, head), "–") for head in heads}
    return markdown({"": lambda of: plain(str(of))} | columns, dict.fromkeys(row[line] for row in rows))


def times(rows: list[dict]) -> str:
    """Show kernel times in microseconds, and what they come to; heads where they differ, other sizes than usual."""
    differ = len({row["heads"] for row in rows}) > 1

    def name(row: dict) -> str:
        said = [f"{row['heads']} heads"] * differ
        said += [f"head size {row['head_dim']}"] * (row["head_dim"] != 128)
        said += [f"pages of {row['page_size']}"] * (row["page_size"] != 16)
        return plain(row["name"]) + f" ({', '.join(said)})" * bool(said)

    columns = {"forest, μs": name, "codec_jax": number("kernel_us", rounded=at_most), "roofline": number("roofline_us")}
    columns |= {peer: number(field) for field, peer in PEERS.items() if any(field in row for row in rows)}
    return markdown(columns, rows)


def summary(rows: list[dict]) -> str:
    """Say what a call takes over the roofline, and how much of its time others take, in geometric means."""
    ratios = [1 / ratio for ratio in speedups(rows, "roofline_us")]
    if not ratios:
        return "No forest was measured."
    over = [row["kernel_us"] - row["roofline_us"] for row in rows if row.get("kernel_us")]
    gains = {name: speedups(rows, field) for field, name in PEERS.items()}
    others = ", ".join(f"{name} {mean_and_range(each)}" for name, each in gains.items() if each) or "none"
    return (
        f"Geometric means over {len(over)} forests: {at_most(statistics.geometric_mean(ratios), 2)}x the roofline, "
        f"{at_most(min(over), 1)} to {at_most(max(over), 1)} μs over it. Others' time over ours: {others}."
    )


def notes(table: str, rows: list[dict]) -> list[str]:
    """Say what stands below a table, the most important first."""
    first = {"times": summary, "ablation": predictions}.get(table)
    return ([first(rows)] if first and rows else []) + peculiarities(rows)


def peculiarities(rows: list[dict]) -> list[str]:
    """Say which configuration of a peer was its fastest on how many forests, and where a peer has no time, and why."""
    fastest, failed = [], []
    for field, name in PEERS.items():
        peer = field.removesuffix("_us")
        tried = [row.get(f"{peer}_configurations", {}) for row in rows]
        timed = [{which: us for which, us in each.items() if not isinstance(us, str)} for each in tried]
        counted = Counter(min(each, key=each.__getitem__) for each in timed if each).most_common()
        fastest += [f"{name}: {', '.join(f'{which} ({count})' for which, count in counted)}"] * bool(counted)
        reasons = [f"{row['name']} ({row[f'{peer}_error']})" for row in rows if row.get(f"{peer}_error")]
        failed += [f"No time of {name}: {'; '.join(reasons)}."] * bool(reasons)
    return [f"Fastest configurations, and of how many forests: {'; '.join(fastest)}."] * bool(fastest) + failed


def traffic(rows: list[dict]) -> str:
    """Show what each call read from device memory and was sent by L2, over the unique KV bytes."""
    columns = text(forest="name") | {"unique KV, MB": number("unique_bytes", 0, 1e6)}
    for caller, name in {"": "codec_jax", **{field[:-2]: name for field, name in PEERS.items()}}.items():
        for field, said in BYTES.items():
            if any(caller + field in row for row in rows):
                columns[f"{name} {said}"] = number(caller + field, 2, "unique_bytes", at_least if caller else at_most)
    return markdown(columns | {"all contexts": number("unshared_bytes", 2, "unique_bytes")}, rows)


def crossover(rows: list[dict]) -> str:
    """Show plain decode's time over ours: a table for each group and length of own tokens, batch by prefix."""
    rows = [row for row in rows if "requests" in row]
    rows.sort(key=lambda row: (row["series"], row["requests"], row["x"]))
    parts = []
    for series in dict.fromkeys(row["series"] for row in rows):
        cells = [row for row in rows if row["series"] == series]
        cells = [
            row | {"batch": plain(f"{row['requests']} requests:")[:-1], "shared": f"{row['x']:,} shared"}
            for row in cells
        ]
        parts.append(f"{series}:\n\n{pivot(cells, 'batch', 'shared', lambda row: at_least(gain(row), 2))}")
    kinds = ("plain decode", PLAIN), ("plain decode of the same pages", PLAIN[::2]), ("our kernels unshared", PLAIN[:1])
    for kind, fields in kinds:
        if gains := [value for row in rows if (value := gain(row, fields))]:
            behind = f"{sum(value * MAX_BEHIND < 1 for value in gains)} of {len(gains)} cells are more than 3% behind"
            parts.append(f"{behind} {kind}, which takes {at_least(min(gains), 2)}x at least.")
    return "\n\n".join(parts)


def decoding(rows: list[dict]) -> str:
    """Show the time of a decode step in milliseconds, ways of attention beside each other; parts of ours."""
    steps: dict[str, dict] = {}
    several = len({row.get("model") for row in rows}) > 1
    for row in rows:
        case = f"{row.get('model')}, " * several
        case += f"{row['requests']} requests over {row['document_tokens']} tokens"
        row = {field: value for field, value in row.items() if value or field != "experts_us"}  # of those without any
        fields = {f"{row['variant']} {field}": value for field, value in row.items()}
        steps.setdefault(case, {"case": case}).update(fields)
    columns = text(**{"decode step, ms": "case"})
    for variant in dict.fromkeys(row["variant"] for row in rows):
        columns[variant] = number(f"{variant} wall_us", 2, 1e3, at_most if variant == "shared" else at_least)
    columns["weights and unique KV read once"] = number("shared floor_us", 2, 1e3)
    mixtures = any(row.get("experts_us") for row in rows)
    for part in ("attention", "products", *["experts"] * mixtures, "other"):
        columns[f"shared: {part}"] = number(f"shared {part}_us", 2, 1e3, at_most)
    return markdown(columns, steps.values())


def steps_beside_vllm(rows: list[dict]) -> list[dict[str, dict]]:
    """Return of each case our row, as "codec_jax", and of vLLM's ways one with the least times of their runs."""
    cases: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        way = "codec_jax" if row["variant"] == "shared" else row["variant"]
        seen = cases.setdefault((row["document_tokens"], row["requests"]), {}).setdefault(way, dict(row))
        seen["wall_us"] = min(seen["wall_us"], row["wall_us"])
        if row.get("kernel_us", math.inf) < seen.get("kernel_us", math.inf):
            seen |= {field: us for field, us in row.items() if field.endswith("_us") and field != "wall_us"}
    return [cases[case] for case in sorted(cases)]


def decoding_vllm(rows: list[dict]) -> str:
    """Show the time of a decode step in milliseconds, ours beside vLLM's, and the kernels of each."""
    steps = steps_beside_vllm(rows)
    ways = dict.fromkeys(way for step in steps for way in step)
    columns = {"decode step, ms": lambda step: _case(step["codec_jax"])}
    for way in ways:
        for field, said in (("wall_us", ""), ("kernel_us", ": kernels"), ("attention_us", ": attention")):
            fill = number(field, 2, 1e3, at_most if way == "codec_jax" else at_least)
            columns[way + said] = lambda step, way=way, fill=fill: fill(step.get(way, {}))
    columns["vLLM's faster way over codec_jax"] = lambda step: (
        f"{at_least(faster_of_vllm(step)['wall_us'] / step['codec_jax']['wall_us'], 2)}x"
    )
    return markdown(columns, steps)


def faster_of_vllm(step: dict[str, dict]) -> dict:
    """Return the row of vLLM's faster way of a case of `steps_beside_vllm`."""
    return min((row for way, row in step.items() if way != "codec_jax"), key=lambda row: row["wall_us"])


def invariance(rows: list[dict]) -> str:
    """Show what batches of different composition make of the same prompts."""
    agree = "tokens_before_the_first_difference"
    columns = text(model="model", path="implementation")
    columns |= {"policy": lambda row: row.get("policy", "aligned")} | text(batches="composition")
    columns["prompts with the same tokens"] = lambda row: f"{row[agree].count(row['tokens'])} of {len(row[agree])}"
    columns["tokens agree for, at least"] = lambda row: f"{min(row[agree])} of {row['tokens']}"
    columns["logits apart"] = lambda row: f"{row['logits_difference']:.1e}"
    columns["log-probabilities apart"] = lambda row: f"{row['logprob_difference']:.1e}"
    columns["prompts with the same bits"] = lambda row: (
        f"{sum(row['same_bits'])} of {len(row['same_bits'])}" if "same_bits" in row else "–"
    )
    return markdown(columns, rows)


def score_variants(rows: list[dict]) -> str:
    """Show the time of every variant of attention on each forest, how often its roofline that is, and FlashInfer's."""

    def fill(row: dict) -> str:
        if not row["kernel_us"]:
            return "–"
        peers = [us for peer in ("decode", "cascade") if (us := row.get(f"flashinfer_{peer}_us"))]
        beside = f"; {at_least(min(peers), 1)} μs" if peers else ""
        return f"{at_most(row['kernel_us'], 1)} μs, {at_most(row['kernel_us'] / row['roofline_us'], 2)}x{beside}"

    return pivot(rows, "name", "variant", fill)


def latent_forms(rows: list[dict]) -> str:
    """Show attention over latents and over K and V of what is shared, which is chosen, and FlashInfer's."""
    by_heads = {(row["variant"].partition(",")[0], row["name"]): row for row in rows if "chosen_pages" in row}

    def other(row: dict) -> dict:
        return by_heads.get((row["variant"], row["name"]), {})

    def chosen(row: dict) -> str:
        form, of = ("K and V", other(row)) if other(row).get("chosen_pages") else ("latents", row)
        return f"{form}, {at_most(of['kernel_us'] / row['roofline_us'], 2)}x" if of["kernel_us"] else "–"

    columns = {
        "forest, μs": lambda row: f"{row['variant']}, {plain(row['name'])}",
        "latents": number("kernel_us", rounded=at_most),
        "K and V of what is shared": lambda row: number("kernel_us", rounded=at_most)(other(row)),
        "chosen, over the roofline": chosen,
        "roofline": number("roofline_us"),
        "FlashInfer MLA": number("flashinfer_mla_us"),
    }
    return markdown(columns, [row for row in rows if "chosen_pages" not in row])


def your_gpu(rows: list[dict]) -> str:
    """Show what a GPU reads and multiplies, then the time of every implementation on each forest over its roofline."""

    def fill(row: dict) -> str:
        if not row.get("kernel_us"):
            return row["error"][:60]
        return f"{at_most(row['kernel_us'], 1)} μs, {at_most(row['kernel_us'] / row['roofline_us'], 2)}x"

    rates, *measured = rows
    read, multiplied = (at_least(rates[name] / 1e6, 2) for name in ("read_bytes_per_us", "flops_per_us"))
    said = f"{rates['device']}: {read} TB/s read, {multiplied} TFLOP/s of bfloat16 products"
    return f"{said}\n\n{pivot(measured, 'name', 'implementation', fill)}"


def planning(rows: list[dict]) -> str:
    """Show the time of make_plan, its part of the attention that a plan serves, and how even the work is."""
    columns = text(forest="name", requests="requests", nodes="nodes") | {
        "make_plan, ms": number("plan_us", 2, 1e3, at_most)
    }
    columns["of its attention, %"] = lambda row: at_most(100 * row["plan_us"] / row["attention_us"], 2)
    for policy, said in {"aligned": "max / mean load", "paper": "the paper's policy", "1": "not divided"}.items():
        columns[said] = lambda row, policy=policy: at_most(row["max_over_mean_load"][policy], 3)
    return markdown(columns, rows)


def ablation(rows: list[dict]) -> str:
    """Show kernel times with and without sharing and division, by number of slices and by policy; and predictions."""
    parts = {"sharing": "Sharing and division apart", "fixed": "Equal slices of every stream", "policies": "Policies"}
    shown = []
    for part, said in parts.items():
        if of_part := [row for row in rows if row["part"] == part]:
            shown.append(f"{said}, μs:\n\n{pivot(of_part, 'name', 'variant', number('kernel_us', rounded=at_most))}")
    return "\n\n".join(shown)


def predictions(rows: list[dict]) -> str:
    """Say how far the times that the cost model predicts of the default plan are off."""
    default = {row["name"]: row for row in rows if row["variant"] in ("aligned", "both") and row.get("kernel_us")}
    errors = [100 * abs(row["predicted_us"] / row["kernel_us"] - 1) for row in default.values()]
    median, most = (at_most(f(errors), 1) if errors else "–" for f in (statistics.median, max))
    return f"The cost model is {median}% off in the median of {len(errors)} forests, {most}% at most."


def serving(rows: list[dict]) -> str:
    """Show what an engine under load gives, how long one waits for it, and what it need not compute or read."""

    def fill(field: str, digits: int, unit: float, ours: Callable, theirs: Callable) -> Fill:
        return lambda row: number(field, digits, unit, ours if row["variant"] == "engine" else theirs)(row)

    columns = text(load="name", variant="variant")
    for kind in ("output", "total"):
        columns[f"{kind} tokens/s"] = fill(f"{kind}_tokens_per_second", 0, 1.0, at_least, at_most)
    for field, said, digits, unit in (
        ("first_token", "first token, s", 2, 1.0),
        ("between_tokens", "next, ms", 1, 1e-3),
    ):
        for which in ("median", "p99"):
            columns[f"{said}: {which}"] = fill(f"{field}_{which}_seconds", digits, unit, at_most, at_least)
    columns["prompts found, %"] = fill("hit_rate", 1, 0.01, at_least, at_most)
    columns["prompts computed, %"] = lambda row: fill(
        "computed_tokens", 1, row.get("prompt_tokens", 1) / 100, at_most, at_least
    )(row)
    columns["rows a step"] = number("rows_a_step", 1)
    columns["tokens attended over tokens read"] = number("sharing_factor", 2)
    columns["device waits for the host, %"] = fill("host_share", 1, 0.01, at_most, at_least)
    return markdown(columns, rows)


def churn(rows: list[dict]) -> str:
    """Show the memory of a process after warm-up and later, and what else stays behind."""
    columns = text(run="name") | {"requests/s": number("requests", 0, "seconds")}
    for field, said in {"first": "after warm-up", "last": "at the end", "max": "at most"}.items():
        columns[f"{said}, MiB"] = number(f"{field}_rss_bytes", 1, 2**20, at_most)
    for field, said in {"live_arrays": "arrays of JAX", "objects": "Python objects"}.items():
        columns[f"{said}, from to"] = lambda row, field=field: " to ".join(
            f"{row['samples'][i][field]:,}" for i in (0, -1)
        )
    return markdown(columns | text(**{"pages lost": "leaked_pages"}), rows)


def ceilings(rows: list[dict]) -> str:
    """Show what XLA reads and multiplies at most on each GPU, and the rates that its rooflines are made of."""
    columns = text(device="device")
    for field, unit, digits in (("read_bytes_per_us", "TB/s", 2), ("flops_per_us", "TFLOP/s", 0)):
        fill = number(field, digits, 1e6)
        columns[f"XLA, {unit}"] = fill
        columns[f"rooflines, {unit}"] = lambda row, fill=fill: fill(CEILINGS[row["device"]]._asdict())
    return markdown(columns, rows)


def tuning(rows: list[dict]) -> str:
    """Show the score of every size of blocks that serves all forests."""
    heads = "head size", "work of a thread block", "tokens of a block", "blocks in flight"
    columns = {head: lambda each, i=i: str(each[0][i]).lower() for i, head in enumerate(heads)}
    columns["time over roofline"] = lambda each: at_most(each[1], 3)
    return markdown(columns, [each for each in scores(rows).items() if each[1]])


def scaling(rows: list[dict]) -> str:
    """Show measured beside predicted times, then what is predicted of groups of GPUs, and of many such groups."""
    measured = [row for row in rows if "wall_us" in row]
    columns = text(measured="name") | {
        "measured, ms": number("wall_us", 2, 1e3, at_most),
        "predicted, ms": number("predicted_us", 2, 1e3, at_most),
        "predicted over measured": lambda row: f"{row['predicted_us'] / row['wall_us']:.3f}" if row["wall_us"] else "–",
    }
    for field, said in {"attention": "attention over roofline", "products": "products over roofline"}.items():
        if any(f"{field}_over_roofline" in row for row in measured):
            columns[said] = number(f"{field}_over_roofline", 2, rounded=at_most)
    parts = [markdown(columns, measured)] * bool(measured)

    def group(row: dict) -> str:
        return f"{at_most(row['predicted_us'] / 1e3, 2)} ({row['context']} x {row['tensor']})"

    def worth(row: dict) -> str:
        return f"{at_least(100 * row['efficiency'], 0)}%, {row['decides']}"

    predicted = [
        row | {"case": _case(row), "of": f"{row['gpus']} GPU{'s' * (row['gpus'] > 1)}"}
        for row in rows
        if "decides" in row
    ]
    for model in dict.fromkeys(row["model"] for row in predicted):
        alone = [row for row in predicted if row["model"] == model and row["variant"] == "one group"]
        parts.append(f"{model}, a step in ms, predicted, and context x tensor:\n\n{pivot(alone, 'case', 'of', group)}")
        parts.append(f"{model}, efficiency, and what decides:\n\n{pivot(alone, 'case', 'of', worth)}")
    if many := [row for row in predicted if row["variant"] == "groups"]:
        many = [
            row | {"case": f"{row['model']}, {row['case']}, groups of {row['context']} x {row['tensor']}"}
            for row in many
        ]
        rate = pivot(many, "case", "of", number("tokens_per_second", 0))
        parts.append(f"Tokens per second, predicted, with the fastest group of a host for each document:\n\n{rate}")
    return "\n\n".join(parts)


def scaling_measured(rows: list[dict]) -> str:
    """Show steps and attention on meshes, how many times as fast as on one GPU, and what exchanges take."""
    parts, rows = [], [{"data": 1} | row for row in rows]  # earlier rows do not say so
    for variant, what, unit, digits in (
        ("step", "a step in ms", 1e3, 2),
        ("attention", "attention of a layer in μs", 1, 1),
    ):
        chosen = [
            row
            | {
                "case": f"{row['model']}, " + f"{row['layers']} layers, " * (variant == "step") + _case(row),
                "of": f"{row['data']} of " * (row["data"] > 1) + f"{row['context']} x {row['tensor']}",
            }
            for row in rows
            if row["variant"] == variant
        ]
        alone: dict[str, float] = {}
        for row in chosen:  # those of one GPU come first, of each host
            if row["gpus"] == 1:
                alone[row["case"]] = row["wall_us"]
            row["faster"] = row["data"] * alone[row["case"]] / row["wall_us"]

        def fill(row: dict, unit: float = unit, digits: int = digits) -> str:
            predicted = f"predicted {at_most(row['predicted_us'] / unit, digits)}"
            return f"{at_most(row['wall_us'] / unit, digits)}, {at_least(row['faster'], 2)}x; {predicted}"

        if chosen:
            parts.append(f"{what.capitalize()}, context x tensor:\n\n{pivot(chosen, 'case', 'of', fill)}")
    if found := {row["name"]: row for row in rows if row["variant"] == "exchange"}:
        columns = text(exchange="name") | {
            "measured, μs": number("wall_us", 1, rounded=at_most),
            "predicted, μs": number("predicted_us", 1, rounded=at_most),
        }
        parts.append(markdown(columns, found.values()))
    return "\n\n".join(parts)


def _case(row: dict) -> str:
    """Say how many requests share how much."""
    return f"{row['requests']} requests over {row['document_tokens']:,}"
