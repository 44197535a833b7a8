"""A model of a decode step on several GPUs: what a device reads, multiplies and sends, and how long that takes.

    device    1 / S of the weights, S = C T; 1 / C of the unique KV of 1 / T of the heads
    step      weights and KV read once, arithmetic that reading does not hide, exchanges, a fixed time for each layer

Rates are those of benchmarks.ceilings. `calibrated` fits what a step takes beyond them to rows that benchmarks.decoding
measured on one GPU, and `with_meetings` what devices wait for each other to rows of several. Devices of the axis
"context" are next to each other, so that it is inside of a host unless it has more devices than a host.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ceilings import CEILINGS, Ceilings
from benchmarks.decode_step import STEPS, SharedDocument
from codec_jax.nnx import PUBLISHED, DecoderConfig
from codec_jax.nnx.parallel import ALONE, Parallel, repeated_bytes
from codec_jax.nnx.shards import check_sizes
from pallas_kernels.between_devices.sizes import Sizes, of_arrays, of_columns, of_merges

#: Published models of which what a device reads and multiplies is counted: those without windows and mixtures.
PLAIN_MODELS = {
    name: config for name, config in PUBLISHED.items() if config.mixture is None and config.windows_used == (None,)
}
#: Of a GPU's memory, what weights and KV may take.
MEMORY_SHARE = 0.9
#: Query rows of a tile of attention, which takes as long when it is not full.
TILE_ROWS = 64


class Link(NamedTuple):
    """The way between two GPUs."""

    bytes_per_us: float  # each way
    latency_us: float  # of an exchange by itself, whatever its size


#: As gathers of logits and small exchanges were measured.
NVLINK = Link(270e3, 12.0)
#: Assumed: the published rate of a port of 400 Gbit/s for each GPU, and a latency.
INFINIBAND = Link(50e3, 30.0)


#: Also those of a process, between which kernels exchange.
GPUS_OF_A_HOST = 8


@dataclass(frozen=True)
class Machine:
    """GPUs in hosts, as in DGX H100 and DGX H200."""

    rates: Ceilings
    memory_bytes: float
    gpus_per_host: int = GPUS_OF_A_HOST
    inside: Link = NVLINK
    kernel_latency_us: float = 4.0  # of an exchange by a kernel, inside
    between: Link = INFINIBAND


#: By `device_kind`; memory by the data sheets.
MACHINES = {
    "NVIDIA H200": Machine(CEILINGS["NVIDIA H200"], 141e9),
    "NVIDIA H100 80GB HBM3": Machine(CEILINGS["NVIDIA H100 80GB HBM3"], 80e9),
}


# ---------------------------------------------------------------------- what a device does in a step


class Work(NamedTuple):
    """What one device reads and multiplies in a step."""

    weight_bytes: float
    product_flops: float
    kv_bytes: float
    attention_flops: float


def work(config: DecoderConfig, case: SharedDocument, parallel: Parallel) -> Work:
    """Count the mean step of a call: half of the tokens that it generates are there, and the new one is."""
    own = case.requests * (case.own + (STEPS + 1) / 2)
    num_q_heads, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
    rows = math.ceil(case.requests * num_q_heads / num_kv_heads / TILE_ROWS) * TILE_ROWS * num_kv_heads
    scores = rows * case.document + num_q_heads * own
    weights = weight_bytes(config, parallel)
    return Work(
        weight_bytes=weights,
        product_flops=2 * weights / jnp.dtype(config.param_dtype).itemsize * case.requests,
        kv_bytes=_kv_bytes(config, case.document + own, num_kv_heads) / parallel.context,
        attention_flops=4 * scores * config.head_dim * config.num_layers / parallel.context,
    )


def weight_bytes(config: DecoderConfig, parallel: Parallel = ALONE) -> float:
    """Return the bytes of weights that a device reads in a step: its part of the products, and all norms.

    An embedding counts as the head that it may be: looking tokens up reads a few of its rows.
    """
    width, (query, key, value) = config.hidden_size, config.query_key_value_sizes
    copies = max(parallel.tensor // config.num_kv_heads, 1)  # of each kv head
    layer = width * (query + (key + value) * copies) + query * width + 3 * width * config.mlp_size
    norms = config.num_layers * (2 * width + 2 * config.head_dim * config.qk_norm) + width
    divided = config.num_layers * layer + config.vocab_size * width
    repeated = config.num_layers * repeated_bytes(config, parallel)
    return jnp.dtype(config.param_dtype).itemsize * (divided / parallel.devices + norms) + repeated


def memory_bytes(config: DecoderConfig, case: SharedDocument, parallel: Parallel) -> float:
    """Return the bytes of weights and of KV, at the end of a call, that a device holds."""
    table = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    tokens = case.document + case.requests * (case.own + STEPS)
    _, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
    return (
        weight_bytes(config, parallel)
        + jnp.dtype(config.param_dtype).itemsize * table / parallel.devices
        + _kv_bytes(config, tokens, num_kv_heads) / parallel.context
    )


def _kv_bytes(config: DecoderConfig, tokens: float, num_kv_heads: int) -> float:
    """Return the bytes of K and V of so many tokens, some of the kv heads, all layers."""
    return tokens * config.kv_token_bytes * num_kv_heads / config.num_kv_heads


# ---------------------------------------------------------------------- what devices tell each other


class Exchange(NamedTuple):
    """One kind of exchange of a step."""

    #: psum, all_gather, all_to_all; by kernels between devices add_up, collect, por. Heads that are whole are
    #: collected while they are split, which takes as many bytes, and no kernel of its own.
    kind: str
    devices: int
    bytes: int  # on a device: of what is summed, of all that is gathered, of all that is sent around
    times: int  # in a step

    @property
    def is_kernel(self) -> bool:
        """Whether it is by a kernel between devices."""
        return self.kind in ("add_up", "collect", "por")


def exchanges(config: DecoderConfig, requests: int, parallel: Parallel, mailboxes: bool = True) -> list[Exchange]:
    """List the exchanges of a step; `codec_jax.nnx.parallel` says what each is for.

    Without mailboxes all are XLA's.
    """
    num_q_heads, num_kv_heads = parallel.heads(config.num_q_heads, config.num_kv_heads)
    size, layers = jnp.dtype(config.dtype).itemsize, config.num_layers
    parallel = _meeting(parallel, mailboxes)
    rows = math.ceil(requests / parallel.devices) * parallel.devices  # each device draws for as many
    columns = parallel.columns(config)
    gathers = 0 if repeated_bytes(config, parallel) else layers

    def by(kernel: str, collective: str, sizes_of: Callable[..., Sizes | None], devices: int, *shape: int) -> str:
        like = jax.ShapeDtypeStruct((requests, 1, *shape), config.dtype)
        return kernel if parallel.stride and sizes_of(like, devices=devices) else collective

    own = [size // parallel.context for size in columns]
    gathering = by("collect", "all_gather", partial(of_columns, parts=own), parallel.context, sum(own))
    of_heads = partial(of_merges, num_kv_heads=num_kv_heads, value_dim=config.head_dim)
    merging = by("por", "all_to_all", of_heads, parallel.context, num_q_heads, config.head_dim)
    adding = by("add_up", "psum", of_arrays, parallel.devices, config.hidden_size)
    hidden = requests * config.hidden_size * size
    listed = [
        Exchange(gathering, parallel.context, requests * sum(columns) * size, gathers),
        Exchange(merging, parallel.context, partial_bytes(config, requests, parallel), layers),
        Exchange(adding, parallel.devices, hidden, 2 * layers),  # after attention, after the MLP
        Exchange("psum", parallel.devices, hidden, 1),  # of the embedding
        Exchange("all_to_all", parallel.devices, 4 * rows * config.vocab_size // parallel.devices, 1),
        Exchange("psum", parallel.devices, 4 * rows * 3, 1),  # of each token drawn three numbers
    ]
    return [each for each in listed if each.devices > 1 and each.times]


def _meeting(parallel: Parallel, mailboxes: bool) -> Parallel:
    """Say that devices exchange by kernels, if there are mailboxes and all are of one host."""
    return replace(parallel, stride=1 if mailboxes and parallel.devices <= GPUS_OF_A_HOST else None)


def partial_bytes(config: DecoderConfig, requests: int, parallel: Parallel) -> int:
    """Return the bytes of a device's partials of a layer: output, and row maximum and row sum in float32."""
    num_q_heads, _ = parallel.heads(config.num_q_heads, config.num_kv_heads)
    return requests * num_q_heads * (config.head_dim * jnp.dtype(config.dtype).itemsize + 8)


def exchange_us(exchange: Exchange, machine: Machine) -> float:
    """Return the time of one exchange by itself.

    A ring moves (n - 1) / n of the bytes, and twice as much to add them up. A kernel sends all that it adds up to
    everyone.
    """
    link = machine.inside if exchange.devices <= machine.gpus_per_host else machine.between
    moved = exchange.bytes * (exchange.devices - 1) / exchange.devices
    moved *= {"psum": 2, "add_up": exchange.devices}.get(exchange.kind, 1)
    return (machine.kernel_latency_us if exchange.is_kernel else link.latency_us) + moved / link.bytes_per_us


# ---------------------------------------------------------------------- how long a step takes


_FITS = 4  # after which the costs of an H200 change no more


@dataclass(frozen=True)
class Costs:
    """What a step takes beyond reading at the ceiling; the last three on several GPUs only."""

    attention_layer_us: float  # a layer's call, beyond reading or arithmetic, whichever takes longer
    attention_flops_factor: float  # attention's arithmetic, over what it takes at the ceiling
    other_layer_us: float  # the rest of a layer: products beyond reading, norms, rotation, storing K and V, gaps
    products_flops_factor: float  # what shows of products' arithmetic beside reading, over what it takes at the ceiling
    other_value_us: float  # the rest, for each hidden value of each request, in a layer
    collective_us: float = 0.0  # of one of XLA's exchanges beyond its own time, since devices wait for each other
    kernel_us: float = 0.0  # the same, of one by a kernel
    meeting_doubling_us: float = 0.0  # of either, for every time that two devices are doubled

    def meeting(self, exchange: Exchange) -> float:
        """Return what a step waits at an exchange."""
        alone = self.kernel_us if exchange.is_kernel else self.collective_us
        return alone + self.meeting_doubling_us * math.log2(exchange.devices / 2)


def calibrated(rows: Sequence[dict], machine: Machine) -> Costs:
    """Fit costs to steps of one GPU, by `benchmarks.decoding` and `benchmarks.scaling`, whatever their models.

    Four numbers by least squares of how far a prediction is off as a share of the step. Rows of the former also say
    what attention takes by itself. Reading must decide in the attention of some rows and arithmetic in that of others,
    and requests and layers must differ.
    """
    configs = [config_of(row) for row in rows]
    works = [work(config, case_of(row), ALONE) for row, config in zip(rows, configs, strict=True)]
    wall = np.array([row["wall_us"] for row in rows])
    layers = np.array([config.num_layers for config in configs], float)
    values = layers * [row["requests"] * config.hidden_size for row, config in zip(rows, configs, strict=True)]
    weights, keys_and_values = (
        np.array([each[which] for each in works]) / machine.rates.read_bytes_per_us for which in (0, 2)
    )
    products, attention = (np.array([each[which] for each in works]) / machine.rates.flops_per_us for which in (1, 3))
    factor = 1.0
    for _ in range(_FITS):  # which of the two decides depends on the factor, which depends on that
        reading = keys_and_values > factor * attention
        counts = np.stack([layers, np.where(reading, 0.0, attention), products, values], axis=1)
        left = wall - weights - np.where(reading, keys_and_values, 0.0)
        layer, factor, products_factor, value = map(float, np.linalg.lstsq(counts / wall[:, None], left / wall)[0])
    attending = np.maximum(keys_and_values, factor * attention)
    calls = [
        (row["attention_us"] - us) / n
        for row, us, n in zip(rows, attending, layers, strict=True)
        if "attention_us" in row
    ]
    attention_layer = statistics.fmean(calls)
    return Costs(attention_layer, factor, layer - attention_layer, products_factor, value)


def with_meetings(hosts: Sequence[Sequence[dict]], machine: Machine, costs: Costs) -> Costs:
    """Fit what devices wait for each other to rows of steps by `benchmarks.scaling`, of one GPU and several of a host.

    What the model says of a case on one GPU need not be right: its share of a step on several is corrected by that.
    What is off by a share of a step counts the same in long steps and in short ones.
    """
    counts, left = [], []
    alone = [{case_of(row): row["wall_us"] for row in rows if row["gpus"] == 1} for rows in hosts]
    for host, row in ((host, row) for host, rows in enumerate(hosts) for row in rows if row["gpus"] > 1):
        config, case, group = config_of(row), case_of(row), Parallel(row["tensor"], row["context"])
        parts, one = (step_us(config, case, each, machine, costs, by_kernels(row)) for each in (group, ALONE))
        exchanged, wall = parts.pop("exchanges"), row["wall_us"]
        right = alone[host][case] / math.fsum(one.values())
        listed = exchanges(config, case.requests, group, by_kernels(row))
        of_kernels = sum(each.times for each in listed if each.is_kernel)
        doublings = math.fsum(each.times * math.log2(each.devices / 2) for each in listed)
        counts.append(
            [count / wall for count in (sum(each.times for each in listed) - of_kernels, of_kernels, doublings)]
        )
        left.append((wall - exchanged - right * math.fsum(parts.values())) / wall)
    collective, kernel, doubling = map(float, np.linalg.lstsq(np.array(counts), np.array(left))[0])
    return replace(costs, collective_us=collective, kernel_us=kernel, meeting_doubling_us=doubling)


def config_of(row: dict) -> DecoderConfig:
    """Return the model of a row, with the layers that it kept."""
    config = PLAIN_MODELS[row["model"]]
    return replace(config, num_layers=row.get("layers", config.num_layers))


def by_kernels(row: dict) -> bool:
    """Whether the devices of a row exchanged by kernels; older rows say nothing of it, and did not."""
    return row.get("mailboxes", False)


def case_of(row: dict) -> SharedDocument:
    """Return the requests and the document of a row."""
    return SharedDocument(row["document_tokens"], row["requests"], row["own_tokens"])


def attention_us(each: Work, machine: Machine, costs: Costs) -> tuple[str, float]:
    """Say what decides in attention, and how long that takes in all layers."""
    reading = each.kv_bytes / machine.rates.read_bytes_per_us
    multiplying = costs.attention_flops_factor * each.attention_flops / machine.rates.flops_per_us
    return ("reading KV", reading) if reading > multiplying else ("arithmetic of attention", multiplying)


def step_us(
    config: DecoderConfig,
    case: SharedDocument,
    parallel: Parallel,
    machine: Machine,
    costs: Costs,
    mailboxes: bool = True,
) -> dict[str, float]:
    """Return the parts of a step, in microseconds; their sum is its time. Without mailboxes exchanges are XLA's."""
    done, layers = work(config, case, _meeting(parallel, mailboxes)), config.num_layers
    attention, attending = attention_us(done, machine, costs)
    fixed = layers * (costs.attention_layer_us + costs.other_layer_us)
    listed = exchanges(config, case.requests, parallel, mailboxes)
    return {
        attention: attending,
        "reading weights": done.weight_bytes / machine.rates.read_bytes_per_us,
        "arithmetic of products": costs.products_flops_factor * done.product_flops / machine.rates.flops_per_us,
        "exchanges": sum(each.times * (exchange_us(each, machine) + costs.meeting(each)) for each in listed),
        "other work on rows": costs.other_value_us
        * layers
        * case.requests
        * config.hidden_size,  # each device has all of them
        "fixed time of layers": fixed,
    }


def layer_attention_us(
    config: DecoderConfig, case: SharedDocument, parallel: Parallel, machine: Machine, costs: Costs
) -> float:
    """Return the time of one call of `forest_attention`, which gives every device of a group all of its heads."""
    merge = parallel.context * partial_bytes(config, case.requests, parallel)
    merging = exchange_us(Exchange("all_gather", parallel.context, merge, 1), machine) if parallel.context > 1 else 0.0
    _, attending = attention_us(work(config, case, parallel), machine, costs)
    return attending / config.num_layers + costs.attention_layer_us + merging


# ---------------------------------------------------------------------- which devices


def groups(config: DecoderConfig, devices: int) -> list[Parallel]:
    """List the divisions of a model among so many devices that `codec_jax.nnx` accepts."""

    def divides(parallel: Parallel) -> bool:
        try:
            check_sizes(config, parallel)
        except ValueError:
            return False
        return True

    tensors = [tensor for tensor in range(1, devices + 1) if devices % tensor == 0]
    return [each for tensor in tensors if divides(each := Parallel(tensor, devices // tensor))]


def group_times(
    config: DecoderConfig, case: SharedDocument, devices: int, machine: Machine, costs: Costs
) -> dict[Parallel, float]:
    """Return the time of a step on each group of so many devices that holds the weights and the KV, in microseconds."""
    room = MEMORY_SHARE * machine.memory_bytes
    fitting = [each for each in groups(config, devices) if memory_bytes(config, case, each) <= room]
    return {each: math.fsum(step_us(config, case, each, machine, costs).values()) for each in fitting}
