"""Time decode steps, their exchanges and attention alone on several GPUs of a host, beside what a model predicts.

    python -m benchmarks.scaling --json benchmarks/results/scaling_h200.json
    python -m benchmarks.scaling --predict --json benchmarks/results/scaling_predicted.json

The step is that of benchmarks.decoding, on one GPU and on every mesh of the axes "context" and "tensor" that there are
GPUs for; its first logits are held to those of one GPU. With `--data` there are as many such meshes as there are GPUs
for, each with a document of its own, and all decode at once. Attention and exchanges are timed in loops on the device;
of that of an exchange, the time of the same loop without it is taken off. Those that kernels make here are timed beside
XLA's collectives in their place. `--predict` needs no GPU: it writes what
benchmarks.scaling_predictions says.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array
from tqdm import tqdm

from benchmarks.arguments import how_many
from benchmarks.decode_step import (
    SharedDocument,
    free_bytes,
    layout_of,
    paged,
    plans_of,
    random_pages,
    random_pages_on,
)
from benchmarks.decoding import DOCUMENTS, REQUESTS, difference, wall
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, conditions
from benchmarks.scaling_model import (
    MACHINES,
    PLAIN_MODELS,
    Exchange,
    Machine,
    exchange_us,
    exchanges,
    groups,
    layer_attention_us,
    memory_bytes,
    step_us,
    weight_bytes,
)
from benchmarks.scaling_predictions import costs_of_an_h200, predict_all
from benchmarks.timing import command, parse, wall_time
from benchmarks.turns import GPU, compiled
from codec_jax import Forest, make_plan
from codec_jax.attention import forest_attention
from codec_jax.attention.call import attention_by
from codec_jax.mesh import CONTEXT, TENSOR
from codec_jax.nnx import Decoder, DecoderConfig, random_decoder
from codec_jax.nnx.mailboxes import Mailbox, stride_of
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.shards import everywhere
from pallas_kernels import Call, Family, Scores

#: Tokens of documents over which attention is timed alone.
ROOTS = (120_000, 1 << 20)

#: Of attention and exchanges, so many in a loop; of each loop and step, rounds of calls, each as long as that at most.
IN_A_LOOP, CALLS, ROUNDS, ROUND_SECONDS = 100, 10, 3, 0.3

#: The heads whose partials are exchanged.
_Q_HEADS, _KV_HEADS, _HEAD = 32, 8, 128


def main() -> None:
    """Measure or predict, and write the rows."""
    parser = command(__doc__)
    parser.add_argument("--predict", action="store_true", help="write what the model says of published models")
    parser.add_argument("--model", choices=PLAIN_MODELS, default="qwen3-4b")
    parser.add_argument(
        "--documents",
        type=how_many,
        nargs="*",
        default=DOCUMENTS,
        help="tokens that all requests share; none: no steps",
    )
    parser.add_argument("--roots", type=how_many, nargs="*", default=ROOTS, help="the same, for attention alone")
    parser.add_argument("--requests", type=how_many, nargs="+", default=REQUESTS)
    parser.add_argument("--layers", type=how_many, help="how many to keep; all that fit by default")
    parser.add_argument(
        "--gpus", type=how_many, nargs="+", help="of a mesh; by default all numbers that divide those here"
    )
    parser.add_argument("--data", action="store_true", help="as many meshes at once as there are GPUs for")
    parser.add_argument("--no-exchanges", action="store_true", help="steps and attention only")
    if parser.parse_args().predict:
        arguments, measured = parser.parse_args(), predict_all()
    else:
        arguments = parse(parser)
        cases, roots = (
            [SharedDocument(*each) for each in product(documents, arguments.requests)]
            for documents in (arguments.documents, arguments.roots)
        )
        config = PLAIN_MODELS[arguments.model]
        config = cut_to_fit(replace(config, num_layers=arguments.layers or config.num_layers), cases)
        common = {"model": arguments.model, "layers": config.num_layers} | conditions(layout_of(config))
        count = len(jax.devices())
        sizes = arguments.gpus or [size for size in range(1, count + 1) if count % size == 0]
        if unfit := [size for size in sizes if count % size]:
            parser.error(f"--gpus: expected numbers that divide the {count} GPUs here, got {unfit}")
        meshes = [group for size in sizes for group in groups(config, size)]
        exchanged = [] if arguments.no_exchanges else cases
        measured = (row | common for row in measure_all(config, meshes, cases, roots, exchanged, arguments.data))
    conclude("scaling", collect(measured, arguments.json), arguments.json)


def cut_to_fit(config: DecoderConfig, cases: list[SharedDocument]) -> DecoderConfig:
    """Leave out layers until one GPU holds the rest: weights, another half of them on their way, and the largest KV."""

    def size(layers: int) -> float:
        of = replace(config, num_layers=layers)
        return max((memory_bytes(of, case, ALONE) for case in cases), default=0.0) + weight_bytes(of) / 2

    room = 0.8 * free_bytes()
    layers = next((n for n in range(config.num_layers, 0, -1) if size(n) <= room), None)
    if layers is None:
        raise ValueError(f"documents: expected KV of one layer in {room / 1e9:.0f} GB, got more; make them shorter")
    return replace(config, num_layers=layers)


def measure_all(
    config: DecoderConfig,
    meshes: list[Parallel],
    cases: list[SharedDocument],
    roots: list[SharedDocument],
    exchanged: list[SharedDocument],
    data: bool = False,
) -> Iterator[dict]:
    """Yield rows of steps, of attention over long roots, and of each exchange that the steps of some cases make.

    The first mesh is the one that the logits of the others are held to.
    """
    machine, costs = machine_here(), costs_of_an_h200()
    yield from measure_steps(config, meshes, cases, data)
    whole_heads = [group for group in meshes if group.tensor <= config.num_kv_heads]
    for case, group in tqdm(list(product(roots, whole_heads))):
        expected = layer_attention_us(config, case, group, machine, costs)
        row = described(case, group, "attention of a layer over ") | {"variant": "attention", "predicted_us": expected}
        yield row | taken(partial(measure_attention, config, case, group))
    kinds = {False, all(has_mailboxes(group) for group in meshes if group != ALONE)}
    listed = [
        exchanges(config, case.requests, group, mailboxes)
        for case, group, mailboxes in product(exchanged, meshes, sorted(kinds))
    ]
    for each in dict.fromkeys(exchange._replace(times=1) for every in listed for exchange in every):
        name = f"{each.kind} of {each.bytes} bytes, {each.devices} GPUs"
        row = {"name": name, "variant": "exchange", "gpus": each.devices, "bytes": each.bytes}
        yield row | {"predicted_us": exchange_us(each, machine)} | taken(partial(measure_exchange, each))


def measure_steps(
    config: DecoderConfig,
    meshes: list[Parallel],
    cases: list[SharedDocument],
    data: bool = False,
) -> Iterator[dict]:
    """Yield rows of steps, on one mesh or on as many as there are devices for.

    The model is there until the last of them only: its memory is for long roots then.
    """
    if not cases:
        return
    machine, costs = machine_here(), costs_of_an_h200()
    model, references = random_decoder(config, progress=True), dict[SharedDocument, np.ndarray]()
    for case, group in tqdm(list(product(cases, meshes))):
        count = len(jax.devices()) // group.devices if data else 1
        mailboxes = has_mailboxes(group, count)
        expected = sum(step_us(config, case, group, machine, costs, mailboxes).values())
        row = described(case, group, count=count) | {"variant": "step", "predicted_us": expected}
        row |= {"mailboxes": mailboxes} if group != ALONE else {}
        yield row | taken(partial(measure_step, model, case, group, count, references))


def described(case: SharedDocument, group: Parallel, what: str = "", count: int = 1) -> dict:
    """Name the requests of a document, the document and the mesh, of which there are so many."""
    times = f"{count} x " if count > 1 else ""
    return {
        "name": f"{what}{times}{case.name}, context {group.context} x tensor {group.tensor}",
        "document_tokens": case.document,
        "own_tokens": case.own,
        "requests": case.requests,
        "gpus": count * group.devices,
        "data": count,
        "tensor": group.tensor,
        "context": group.context,
    }


def machine_here() -> Machine:
    """Return what the model knows of the GPUs; where there are none, an H200."""
    kind = jax.devices()[0].device_kind
    return MACHINES[kind] if jax.default_backend() == "gpu" else MACHINES["NVIDIA H200"]


def taken(measure: Callable[[], dict]) -> dict:
    """Measure with the GPUs in hand; where it fails, say why."""
    with GPU.taken():
        return attempt(measure, "wall_us", "error")


def mesh_of(group: Parallel, number: int = 0) -> Mesh:
    """Return the mesh with that number of those that devices are enough for: neighbours along "context"."""
    devices = jax.devices()[number * group.devices :][: group.devices]
    sizes = group.tensor, group.context
    return jax.make_mesh(sizes, (TENSOR, CONTEXT), axis_types=(AxisType.Auto,) * 2, devices=devices)


def has_mailboxes(group: Parallel, count: int = 1) -> bool:
    """Whether the devices of the first so many meshes exchange by kernels."""
    return all(stride_of(mesh_of(group, number)) is not None for number in range(count))


def measure_step(
    model: Decoder,
    case: SharedDocument,
    group: Parallel,
    count: int,
    references: dict[SharedDocument, np.ndarray],
) -> dict:
    """Compare the first logits with those of one GPU, and time a token of every request, on so many meshes at once."""
    meshes = [None] if group == ALONE and count == 1 else [mesh_of(group, number) for number in range(count)]
    steps = [paged(model, case, share=True, mesh=mesh) for mesh in meshes]
    first = [np.asarray(step(tokens=1)) for step in steps]
    reference = references.setdefault(case, first[0])
    return {
        "compile_seconds": sum(step.compile_seconds for step in steps),
        "logits_difference": max(difference(each, reference) for each in first),
        "wall_us": wall(lambda **options: [step(**options) for step in steps], seconds=ROUND_SECONDS),
    }


def measure_attention(config: DecoderConfig, case: SharedDocument, group: Parallel) -> dict:
    """Time a call of `forest_attention` on pages of one layer: in a loop, as the host takes as long to call it."""
    mesh = None if group == ALONE else mesh_of(group)
    forest, num_pages = case.forest(group.context)
    plan = plans_of(config, forest, num_pages, group)
    pages = random_pages(config, case, 0) if mesh is None else random_pages_on(config, case, 0, mesh)
    query = jax.random.normal(jax.random.key(0), (case.requests, 1, config.num_q_heads, config.head_dim), config.dtype)
    query, forest, plan = everywhere(mesh, (query, forest, plan))

    def loop(query: Array, *rest: Any) -> Array:
        return lax.fori_loop(0, IN_A_LOOP, lambda _, query: forest_attention(query, *rest, mesh=mesh), query)

    return {"wall_us": median_time(partial(jax.jit(loop), query, pages.key, pages.value, forest, plan)) / IN_A_LOOP}


def measure_exchange(exchange: Exchange) -> dict:
    """Time an exchange in a loop, without what the loop takes by itself."""
    times = [median_time(loop_of(exchange, alone=alone)) / IN_A_LOOP for alone in (False, True)]
    return {"wall_us": times[0] - times[1], "loop_us": times[1]}


def loop_of(exchange: Exchange, *, alone: bool) -> partial[Array]:
    """Return the call of a loop that exchanges arrays of these sizes again and again, or, alone, does all but that."""
    count = exchange.devices
    devices = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    numbers = -(-exchange.bytes // 2 // count) * count  # of 2 bytes
    if exchange.kind == "por":  # heads have 8 bytes more each
        numbers = exchange.bytes // (2 * _HEAD + 8) * _HEAD

    def run(x: Array) -> Array:
        exchanged, x = _exchange(exchange, x, alone=alone) if exchange.kind == "por" or not alone else (lambda x: x, x)

        def step(_: Array, x: Array) -> Array:
            return exchanged(x) * (0.5 / count) + 1  # stays finite

        return lax.fori_loop(0, IN_A_LOOP, step, x)

    loop = jax.shard_map(run, mesh=devices, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False)
    total = numbers if exchange.kind in ("all_gather", "collect") else numbers * count
    array = jax.device_put(jnp.ones(total, jnp.bfloat16), jax.NamedSharding(devices, PartitionSpec("x")))
    return partial(jax.jit(loop), array)


def _exchange(exchange: Exchange, x: Array, *, alone: bool) -> tuple[Callable[[Array], Array], Array]:
    """Return what exchanges arrays like x, and x, which is there when all devices are ready to.

    Alone, attention is the same without its exchange.
    """
    count = exchange.devices
    collectives = {
        "psum": lambda x: lax.psum(x, "x"),
        "all_gather": lambda x: lax.all_gather(x, "x").max(axis=0),
        "all_to_all": lambda x: lax.all_to_all(x.reshape(count, -1), "x", 0, 0).reshape(-1),
    }
    if exchange.kind in collectives:
        return collectives[exchange.kind], x
    if exchange.kind == "por":
        return _merging(x, count, alone=alone)
    of = partial(Mailbox.for_columns, parts=x.shape) if exchange.kind == "collect" else Mailbox.for_arrays
    mailbox = of(jnp.ravel(x)[0].astype(jnp.int32), x, devices=count)
    assert mailbox is not None  # the model says that it is for the kernel

    def collect(x: Array) -> Array:
        return mailbox.collect(x, x.shape).reshape(count, -1).max(axis=0)

    exchanged = collect if exchange.kind == "collect" else mailbox.add_up
    return exchanged, x + lax.psum(mailbox.opened, "x").astype(x.dtype)


def _merging(x: Array, count: int, *, alone: bool) -> tuple[Callable[[Array], Array], Array]:
    """Return attention of queries x to a token each, which POR merges among devices or, alone, not; and x as above."""
    query = x.reshape(-1, 1, _Q_HEADS, _HEAD)
    forest = Forest.from_nodes([-1] * len(query), [1] * len(query), range(len(query)))
    heads = {"num_q_heads": _Q_HEADS, "num_kv_heads": _KV_HEADS, "head_dim": _HEAD}
    plan, pages = make_plan(forest, **heads), jnp.ones((len(query), forest.page_size, _KV_HEADS, _HEAD), x.dtype)
    mailbox = Mailbox.for_merges(jnp.ravel(x)[0].astype(jnp.int32), query, _KV_HEADS, devices=count)
    assert mailbox is not None

    def run(family: Family, call: Call, scores: Scores) -> tuple[Array, Array, Array]:
        return family.attend(call, scores) if alone else mailbox.attend(family, call, scores)

    def attend(x: Array) -> Array:
        out, _ = attention_by(run, x.reshape(query.shape), pages, pages, forest, plan)
        return jnp.tile(out[:, :, : _Q_HEADS // count].reshape(-1), count)

    return attend, x + lax.psum(mailbox.opened, "x").astype(x.dtype)


def median_time(loop: partial[Array]) -> float:
    """Compile a jitted call, and return the median of rounds of calls that are queued one after another, in us."""
    call = partial(compiled(loop.func, *loop.args), *loop.args)
    calls = max(1, min(CALLS, int(ROUND_SECONDS * 1e6 / wall_time(call, 1))))
    return statistics.median(wall_time(call, calls) for _ in range(ROUNDS))


if __name__ == "__main__":
    main()
