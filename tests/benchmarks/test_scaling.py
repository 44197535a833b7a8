"""The model of decode steps on several GPUs against sums made by hand, and its command on virtual devices."""

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import scaling, scaling_predictions, tables
from benchmarks.ceilings import Ceilings
from benchmarks.decode_floor import weight_bytes as bytes_of_model
from benchmarks.decode_step import SharedDocument
from benchmarks.report import ROOT
from benchmarks.scaling_model import (
    INFINIBAND,
    MACHINES,
    NVLINK,
    PLAIN_MODELS,
    Costs,
    Exchange,
    Link,
    Machine,
    calibrated,
    config_of,
    exchange_us,
    exchanges,
    group_times,
    groups,
    memory_bytes,
    step_us,
    weight_bytes,
    with_meetings,
    work,
)
from codec_jax.nnx import DecoderConfig, random_decoder
from codec_jax.nnx.parallel import ALONE, Parallel

FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
TINY = DecoderConfig(64, 32, 48, num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=16, **FLOAT32)
H200 = MACHINES["NVIDIA H200"]
COSTS = Costs(10.0, 1.5, 50.0, 0.5, 1e-4)

configs = st.sampled_from([TINY, *PLAIN_MODELS.values()])
cases = st.builds(SharedDocument, st.integers(1, 1 << 20), st.integers(1, 512), st.integers(0, 4096))
parallels = st.builds(Parallel, *[st.sampled_from([1, 2, 4, 8, 16])] * 2)


# ---------------------------------------------------------------------- counts


@pytest.mark.parametrize("tied", [True, False])
def test_a_device_alone_reads_the_weights_of_the_model(tied: bool) -> None:
    config = replace(TINY, tied_embeddings=tied)
    assert weight_bytes(config) == bytes_of_model(random_decoder(config))


@pytest.mark.parametrize(("model", "parameters"), [("qwen3-32b", 32_762_123_264), ("llama-3.1-70b", 70_553_706_496)])
def test_models_have_as_many_parameters_as_their_cards_say(model: str, parameters: int) -> None:
    empty = SharedDocument(document=0, requests=0)
    assert memory_bytes(PLAIN_MODELS[model], empty, ALONE) == 2 * parameters


@given(configs, cases, parallels)
def test_the_parts_of_all_devices_are_the_whole(
    config: DecoderConfig, case: SharedDocument, parallel: Parallel
) -> None:
    assume(parallel.tensor <= config.num_kv_heads)
    whole, part, devices = work(config, case, ALONE), work(config, case, parallel), parallel.devices
    size = jnp.dtype(config.param_dtype).itemsize
    norms = config.num_layers * (2 * config.hidden_size + 2 * config.head_dim * config.qk_norm) + config.hidden_size
    columns = config.hidden_size * sum(config.query_key_value_sizes) * size * (parallel.context - 1)  # of all groups
    repeated = config.num_layers * columns if columns // devices <= 64 << 20 else 0
    assert devices * part.weight_bytes == pytest.approx(whole.weight_bytes + (devices - 1) * size * norms + repeated)
    assert devices * part.kv_bytes == pytest.approx(whole.kv_bytes)
    assert devices * part.attention_flops == pytest.approx(whole.attention_flops)


def test_a_kv_head_on_several_devices_is_read_by_each_of_them_and_a_tile_is_not_full() -> None:
    case = SharedDocument(document=1000, requests=8, own=0)
    four, two = work(TINY, case, Parallel(tensor=4)), work(TINY, case, Parallel(tensor=2))
    assert four.kv_bytes == two.kv_bytes
    # One kv head with 16 or 32 rows of 8 requests: a tile of 64 either way; 8.5 own tokens of a request, by q head.
    assert two.attention_flops == 4 * (64 * 1000 + 4 * 8 * 8.5) * 16 * 2
    assert four.attention_flops == 4 * (64 * 1000 + 2 * 8 * 8.5) * 16 * 2
    keys_and_values = 4 * 2 * 32 * 32  # bytes of float32, D x (K and V of two heads) of a layer, which are there twice
    four_times = 4 * four.weight_bytes - 2 * two.weight_bytes
    assert four_times == 2 * keys_and_values + 2 * 4 * (2 * (2 * 32 + 2 * 16) + 32)


def test_exchanges_of_a_step_by_hand() -> None:
    # 3 requests; a device of 2 x 2 attends with 4 q heads and 1 kv head of 16 float32 numbers.
    assert exchanges(TINY, 3, Parallel(tensor=2, context=2)) == [
        Exchange("all_to_all", 2, 3 * 4 * (16 * 4 + 8), 2),
        Exchange("psum", 4, 3 * 32 * 4, 4),  # 96 words are not for a kernel
        Exchange("psum", 4, 3 * 32 * 4, 1),
        Exchange("all_to_all", 4, 64 * 4, 1),  # a row of logits to each of four, one of them of no request
        Exchange("psum", 4, 4 * 3 * 4, 1),
    ]
    assert [each.kind for each in exchanges(TINY, 3, Parallel(tensor=2))] == ["psum", "psum", "all_to_all", "psum"]
    assert exchanges(TINY, 3, ALONE) == []
    # 168 MB of weights of queries, keys and values: too many for four devices to read all of them.
    large, hidden = replace(PLAIN_MODELS["llama-3.1-70b"], num_layers=5), 4 * 8192 * 2
    columns, partials = 4 * (64 + 2 * 8) * 128 * 2, 4 * 64 * (128 * 2 + 8)
    drawn = [Exchange("all_to_all", 4, 4 * 128_256, 1), Exchange("psum", 4, 4 * 4 * 3, 1)]
    layers = [("collect", columns, 5), ("por", partials, 5), ("add_up", hidden, 10), ("psum", hidden, 1)]
    assert exchanges(large, 4, Parallel(context=4)) == [Exchange(kind, 4, *rest) for kind, *rest in layers] + drawn
    # By XLA's where kernels are not: told so, over several hosts, and for sums that are too large.
    kinds = ["all_gather", "all_to_all", "psum", "psum", "all_to_all", "psum"]
    assert [each.kind for each in exchanges(large, 4, Parallel(context=4), mailboxes=False)] == kinds
    assert [each.kind for each in exchanges(large, 4, Parallel(context=16))] == kinds
    assert exchanges(large, 512, Parallel(tensor=2))[0].kind == "psum"


def test_an_exchange_takes_its_latency_and_its_bytes_at_the_rate_of_the_slowest_link() -> None:
    machine = Machine(Ceilings(1.0, 1.0), 1.0, 8, Link(100.0, 7.0), 3.0, Link(10.0, 50.0))
    assert exchange_us(Exchange("all_gather", 8, 800, 1), machine) == 7 + 700 / 100
    assert exchange_us(Exchange("psum", 8, 800, 1), machine) == 7 + 1400 / 100
    assert exchange_us(Exchange("all_to_all", 16, 1600, 1), machine) == 50 + 1500 / 10
    # A kernel has a latency of its own, and sends all that it adds up to everyone.
    assert exchange_us(Exchange("add_up", 8, 800, 1), machine) == 3 + 5600 / 100
    assert exchange_us(Exchange("collect", 8, 800, 1), machine) == 3 + 700 / 100


# ---------------------------------------------------------------------- times


def test_a_step_by_hand() -> None:
    case, config = SharedDocument(document=100_000, requests=4, own=8), PLAIN_MODELS["qwen3-0.6b"]
    parts = step_us(config, case, ALONE, Machine(Ceilings(1e6, 1e9), 1e11), COSTS)
    layer = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    weights = 28 * layer + 151_936 * 1024 + 28 * (2 * 1024 + 2 * 128) + 1024
    tokens = 100_000 + 4 * 16.5
    assert parts == pytest.approx(
        {
            "reading KV": tokens * 2 * 2 * 8 * 128 * 28 / 1e6,
            "reading weights": 2 * weights / 1e6,
            "arithmetic of products": 0.5 * 2 * weights * 4 / 1e9,
            "exchanges": 0.0,
            "other work on rows": 28 * 4 * 1024 * 1e-4,
            "fixed time of layers": 28 * 60.0,
        }
    )
    slow = step_us(config, case, ALONE, Machine(Ceilings(1e6, 1e7), 1e11), COSTS)
    # 4 requests of 2 q heads for each kv head are a tile of 64 rows over the document.
    scores = 8 * 64 * 100_000 + 16 * 4 * 16.5
    assert slow["arithmetic of attention"] == pytest.approx(1.5 * 4 * scores * 128 * 28 / 1e7)


@given(configs, cases, parallels, st.floats(1.0, 100.0), st.floats(1.0, 100.0))
def test_faster_memory_arithmetic_or_links_never_make_a_step_slower(
    config: DecoderConfig, case: SharedDocument, parallel: Parallel, faster: float, closer: float
) -> None:
    def time(*factors: float) -> float:
        read, multiply, link, latency = factors
        inside, between = (Link(each.bytes_per_us * link, each.latency_us / latency) for each in (NVLINK, INFINIBAND))
        rates = Ceilings(H200.rates.read_bytes_per_us * read, H200.rates.flops_per_us * multiply)
        machine = Machine(rates, 1e11, 8, inside, H200.kernel_latency_us / latency, between)
        return math.fsum(step_us(config, case, parallel, machine, COSTS).values())

    usual = time(1, 1, 1, 1)
    assert usual > 0
    for i in range(4):
        assert time(*[faster if i == j else 1 for j in range(4)]) <= usual * (1 + 1e-9)
    assert time(faster, 1, closer, 1) <= time(1, 1, closer, 1) * (1 + 1e-9)


def test_costs_that_rows_were_made_of_are_found_again() -> None:
    rows, (read, multiply) = [], H200.rates
    cases = [(120_000, 16), (120_000, 64), (32_768, 16), (32_768, 128), (120_000, 256)]
    for (document, requests), (model, layers) in product(cases, [("qwen3-4b", 36), ("qwen3-32b", 8)]):
        row = {"model": model, "layers": layers}
        row |= {"document_tokens": document, "requests": requests, "own_tokens": 128}
        each = work(config := config_of(row), SharedDocument(document, requests, 128), ALONE)
        attention = layers * 10.0 + max(each.kv_bytes / read, 1.5 * each.attention_flops / multiply)
        row["wall_us"] = attention + layers * 50.0 + each.weight_bytes / read + 0.5 * each.product_flops / multiply
        row["wall_us"] += 1e-4 * layers * requests * config.hidden_size
        rows.append(row | ({"attention_us": attention} if layers == 36 else {}))
    found = calibrated(rows, H200)
    assert list(vars(found).values()) == pytest.approx(list(vars(COSTS).values()))


def test_what_devices_wait_is_found_again_whatever_the_model_says_of_one() -> None:
    waiting, hosts = replace(COSTS, collective_us=5.0, kernel_us=3.0, meeting_doubling_us=2.0), []
    config = replace(PLAIN_MODELS["qwen3-32b"], num_layers=8)
    for slower, mailboxes in ((1.0, True), (1.25, False)):  # than the model says of a step, exchanges apart
        case, rows = SharedDocument(32_768, 16, 128), []
        for group in (ALONE, Parallel(tensor=2), Parallel(context=2, tensor=2), Parallel(tensor=8)):
            parts = step_us(config, case, group, H200, waiting, mailboxes)
            us = parts.pop("exchanges") + slower * math.fsum(parts.values())
            row = {"model": "qwen3-32b", "layers": 8, "document_tokens": 32_768, "requests": 16, "own_tokens": 128}
            row |= {"mailboxes": True} if mailboxes else {}
            rows.append(row | {"gpus": group.devices, "tensor": group.tensor, "context": group.context, "wall_us": us})
        hosts.append(rows)
    found = with_meetings(hosts, H200, COSTS)
    waits = [found.meeting(Exchange(kind, count, 1, 1)) for kind in ("psum", "add_up") for count in (2, 4, 8)]
    assert waits == pytest.approx([5.0, 7.0, 9.0, 3.0, 5.0, 7.0])
    assert list(vars(found).values()) == pytest.approx(list(vars(waiting).values()))


def test_groups_fit_the_memory_and_divide_the_model() -> None:
    config = PLAIN_MODELS["qwen3-4b"]
    assert {(each.tensor, each.context) for each in groups(config, 4)} == {(1, 4), (2, 2), (4, 1)}
    assert groups(config, 3) == groups(config, 64) == []
    long = SharedDocument(document=1 << 20, requests=16)  # 155 GB of KV
    assert group_times(config, long, 1, H200, COSTS) == {}
    times = group_times(config, long, 2, H200, COSTS)
    assert set(times) == {Parallel(tensor=2), Parallel(context=2)}
    # Context sends partials around in each of 36 layers, and computes all queries, keys and values on both devices.
    partials, weights = 16 * 32 * (128 * 2 + 8), 2560 * (32 + 2 * 8) * 128 // 2
    more = 36 * (4.0 + partials / 2 / 270e3)
    more += 36 * (2 * weights / H200.rates[0] + COSTS.products_flops_factor * 2 * weights * 16 / H200.rates[1])
    assert times[Parallel(context=2)] - times[Parallel(tensor=2)] == pytest.approx(more)


# ---------------------------------------------------------------------- the command


def test_predictions_agree_with_committed_rows_and_count_groups() -> None:
    rows = list(scaling_predictions.predict_all())
    kinds = [f"{gpus}{when}" for when in ("", ", afterwards", ", since") for gpus in ("one GPU", "several GPUs")]
    over = {
        variant: [row["predicted_us"] / row["wall_us"] for row in rows if row["variant"] == variant]
        for variant in ("parts", *kinds)
    }
    assert [len(each) for each in over.values()] == [6, 27, 79, 8, 16, 11, 33]
    assert max(abs(each - 1) for each in over["parts"]) < 0.05
    # Of the others none is among what its prediction was fitted to. The longest are of 256 requests.
    assert max(abs(each - 1) for kind in ("one GPU", "one GPU, since") for each in over[kind]) < 0.1
    assert max(over["several GPUs"] + over["several GPUs, since"]) < 1.2
    assert min(over["several GPUs"] + over["several GPUs, since"]) > 0.9
    assert max(abs(each - 1) for kind in over if "afterwards" in kind for each in over[kind]) < 0.1
    for row in rows:
        if row["variant"] == "one group":
            assert row["gpus"] == row["context"] * row["tensor"]
            assert sum(row["parts_us"].values()) == pytest.approx(row["predicted_us"], abs=1)
            assert row["device_bytes"] <= 0.9 * 141e9
            assert 0 < row["efficiency"] <= 1
        if row["variant"] == "groups":
            assert row["gpus"] == row["data"] * row["context"] * row["tensor"]
            assert row["tokens_per_second"] == pytest.approx(row["data"] * row["requests"] / row["predicted_us"] * 1e6)
    assert {row["device"] for row in rows} == {"model"}


def test_what_the_page_on_scaling_quotes_is_in_the_tables() -> None:
    page, results = ((ROOT / name).read_text() for name in ("docs/scaling.md", "docs/results/scaling.md"))
    quoted = re.findall(r"\d+\.\d\d \(\d+ x \d+\)|\d+%, [\w ]+\w|\d,\d{3},\d{3}", page)
    assert len(quoted) > 30
    assert [each for each in quoted if each not in results] == []


def test_a_table_has_measured_times_and_groups_of_predictions() -> None:
    row = {"model": "m", "requests": 16, "document_tokens": 32_768, "variant": "one group", "decides": "exchanges"}
    row |= {"predicted_us": 2001.0, "efficiency": 0.499}
    rows = [
        {"variant": "step", "name": "n", "wall_us": 2001.0, "predicted_us": 1000.0},
        {"variant": "step", "name": "failed", "wall_us": None, "predicted_us": 1000.0, "error": "no"},
        row | {"gpus": 1, "context": 1, "tensor": 1, "efficiency": 1.0},
        row | {"gpus": 4, "context": 2, "tensor": 2},
        row | {"variant": "groups", "gpus": 1024, "context": 2, "tensor": 2, "tokens_per_second": 1999.9},
    ]
    lines = tables.scaling(rows).split("\n")
    for line in (
        "| n | 2.01 | 1.00 | 0.500 |",
        "| failed | – | 1.00 | – |",
        "|  | 1 GPU | 4 GPUs |",
        "| 16 requests over 32,768 | 2.01 (1 x 1) | 2.01 (2 x 2) |",
        "| 16 requests over 32,768 | 100%, exchanges | 49%, exchanges |",
        "| m, 16 requests over 32,768, groups of 2 x 2 | 1,999 |",
    ):
        assert line in lines


def test_a_table_counts_the_tokens_of_all_meshes() -> None:
    row = {
        "variant": "step",
        "model": "m",
        "layers": 2,
        "requests": 16,
        "document_tokens": 32_768,
        "predicted_us": 2001.0,
    }
    meshes = [(1, 1, 1, 6000.0), (1, 4, 1, 2000.0), (2, 2, 1, 4000.0)]
    rows = [
        row | {"data": data, "context": context, "tensor": tensor, "gpus": data * context * tensor, "wall_us": us}
        for data, context, tensor, us in meshes
    ]
    line = tables.scaling_measured(rows).split("\n")[-1]
    cells = ("6.00, 1.00x; predicted 2.01", "2.00, 3.00x; predicted 2.01", "4.00, 3.00x; predicted 2.01")
    assert line == f"| m, 2 layers, 16 requests over 32,768 | {' | '.join(cells)} |"


def test_the_command_measures_steps_attention_and_exchanges_on_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kv heads on four devices of an axis, too; values are large, so that a page in a wrong place would show."""
    monkeypatch.setattr(scaling, "IN_A_LOOP", 4)
    monkeypatch.setattr(scaling, "CALLS", 2)
    monkeypatch.setattr("benchmarks.decoding.MAX_CALLS", 1)
    monkeypatch.setattr("benchmarks.decoding.MAX_DIFFERENCE", 1e-4)
    case = SharedDocument(document=1100, requests=3, own=9)  # 69 pages: long enough to be cut in two
    meshes = [ALONE, Parallel(tensor=2), Parallel(context=2), Parallel(tensor=4, context=2)]
    config = replace(TINY, num_layers=1)
    rows = list(scaling.measure_all(config, meshes, [case], [case._replace(requests=2)], [case]))
    assert [row.get("error") for row in rows] == [None] * len(rows)
    steps, attention, found = (
        [row for row in rows if row["variant"] == variant] for variant in ("step", "attention", "exchange")
    )
    assert [(row["context"], row["tensor"]) for row in steps] == [(1, 1), (1, 2), (2, 1), (2, 4)]
    assert steps[0]["logits_difference"] == 0.0
    assert all(0.0 < row["logits_difference"] < 1e-4 for row in steps[1:])
    assert [row["gpus"] for row in attention] == [1, 2, 2]  # no pages for one kv head on two devices
    assert all(row["wall_us"] > 0 for row in steps + attention)
    every = {each._replace(times=1) for mesh in meshes for each in exchanges(config, 3, mesh, mailboxes=False)}
    assert {(row["bytes"], row["gpus"]) for row in found} == {(each.bytes, each.devices) for each in every}
    assert len(found) == len(every)
    assert all(row["loop_us"] > 0 for row in found)
    assert all(row["predicted_us"] > 0 for row in rows)


def test_meshes_decode_documents_of_their_own_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.decoding.MAX_CALLS", 1)
    monkeypatch.setattr("benchmarks.decoding.MAX_DIFFERENCE", 1e-4)
    case = SharedDocument(document=1100, requests=3, own=9)
    config, count = replace(TINY, num_layers=1), len(jax.devices())
    rows = list(scaling.measure_steps(config, [ALONE, Parallel(context=2, tensor=2)], [case], data=True))
    assert [row.get("error") for row in rows] == [None] * 2
    assert [(row["data"], row["gpus"]) for row in rows] == [(count, count), (count // 4, count)]
    used = [scaling.mesh_of(Parallel(context=2, tensor=2), number).devices.ravel() for number in range(count // 4)]
    assert sorted(device.id for each in used for device in each) == list(range(count))
    assert 0.0 < rows[1]["logits_difference"] < 1e-4


def test_the_command_keeps_so_many_layers_and_measures_no_steps_without_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = {}

    def measure_all(config: DecoderConfig, *rest: list) -> list[dict]:
        asked["layers"], (asked["meshes"], asked["cases"], asked["roots"], *_) = config.num_layers, rest
        return [{"name": "a row"}]

    monkeypatch.setattr(scaling, "measure_all", measure_all)
    monkeypatch.setattr(scaling, "conclude", lambda name, rows, path: asked.update(rows=rows))
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    arguments = ["--layers", "2", "--requests", "3", "--documents", "--roots", "4096", "--json", str(tmp_path / "rows")]
    monkeypatch.setattr("sys.argv", ["scaling", *arguments])
    scaling.main()
    assert (asked["layers"], asked["cases"], asked["roots"]) == (2, [], [SharedDocument(4096, 3)])
    assert asked["meshes"][0] == ALONE
    assert [(row["name"], row["layers"]) for row in asked["rows"]] == [("a row", 2)]
    assert list(scaling.measure_steps(TINY, [ALONE], [])) == []


@pytest.mark.parametrize("kind", ["psum", "all_gather", "all_to_all"])
def test_a_loop_does_what_it_is_timed_for(kind: str) -> None:
    exchange = Exchange(kind, 4, 2 * 24, 1)
    with_it, without = (scaling.loop_of(exchange, alone=alone) for alone in (False, True))
    named = {"psum": "all-reduce", "all_gather": "all-gather", "all_to_all": "all-to-all"}[kind]
    for loop, expected in ((with_it, True), (without, False)):
        assert (named in loop.func.lower(*loop.args).compile().as_text()) is expected
    out = with_it()
    assert out.shape == (24 if kind == "all_gather" else 24 * 4,)
    assert bool(jnp.isfinite(out).all())


def test_layers_are_left_out_until_a_gpu_holds_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    config, case = PLAIN_MODELS["qwen3-4b"], SharedDocument(document=120_000, requests=64)
    assert scaling.cut_to_fit(config, [case]) == config
    monkeypatch.setattr(scaling, "free_bytes", lambda: 20e9)
    cut = scaling.cut_to_fit(config, [case])
    for layers, fits in ((cut.num_layers, True), (cut.num_layers + 1, False)):
        of = replace(config, num_layers=layers)
        assert (memory_bytes(of, case, ALONE) + weight_bytes(of) / 2 <= 16e9) is fits
    monkeypatch.setattr(scaling, "free_bytes", lambda: 1e6)
    with pytest.raises(ValueError, match="documents: expected KV of one layer in 0 GB, got more; make them shorter"):
        scaling.cut_to_fit(config, [case])
