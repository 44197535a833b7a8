"""Time the engine under load on a GPU: a request trace, rollouts of prompts, questions about documents.

    python -m benchmarks.serving --workload trace --json benchmarks/results/serving_trace.json
    python -m benchmarks.serving --workload questions --json rows.json --tiny --document-tokens 128 --new-tokens 8

Weights are random, and every request generates as many tokens as it is said to. Each case is run by the engine as it
is, and with one thing taken from it:

    engine     as it is
    no cache   what nobody inside reads is forgotten at once; requests that are inside at the same time still share, so
               this says what it is worth to keep prefixes for later ones
    unshared   who decodes reads a path of its own; pages are stored once, and prompts computed once, as before, so this
               says what it is worth to read shared pages once

`--tiny` takes a tiny model on any device, to try the command: its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.arguments import how_many
from benchmarks.churn import TINY
from benchmarks.decode_step import layout_of
from benchmarks.loads import Case, add_arguments, cases, parse_load
from benchmarks.offered import Offered
from benchmarks.replay import replay
from benchmarks.report import conclude
from benchmarks.rows import attempt, collect, conditions
from benchmarks.timing import command, parse
from benchmarks.turns import GPU
from codec_jax.forest import Forest, PrefixCache
from codec_jax.nnx import PUBLISHED, Decoder, random_decoder
from codec_jax.nnx.engine import Engine
from codec_jax.nnx.intervals import EXPECTED_DEPTH, Intervals
from codec_jax.nnx.scheduler import Running

#: Sizes of the engine; without a number of pages it takes those that fit, without a context the longest of all cases.
SIZES = {
    "max_requests": 64, "num_pages": None, "page_size": 16, "prefill_tokens": 2048, "steps": 8, "max_context": None
}  # fmt: skip


def main() -> None:
    """Measure and write the rows."""
    parser = _parser()
    arguments = parse_load(parser)
    if not arguments.tiny:
        parse(parser)
    models = {"tiny": TINY} if arguments.tiny else {name: PUBLISHED[name] for name in arguments.model_sizes}
    sizes = {name: getattr(arguments, name) for name in SIZES}
    rows = (
        {"workload": arguments.workload, "model": name} | row
        for name, config in models.items()
        for row in measure_all(random_decoder(config, progress=True), cases(arguments), arguments.variants, sizes)
    )
    conclude("serving", collect(rows, arguments.json), arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = command(__doc__)
    add_arguments(parser)
    parser.add_argument("--model-sizes", nargs="+", choices=PUBLISHED, default=["qwen3-4b"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any device; choose a small load, too")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=how_many, default=size, help="of the engine")
    return parser


def measure_all(model: Decoder, cases: list[Case], variants: list[str], sizes: dict) -> Iterator[dict]:
    """Yield a row for every variant of every case; one that fails says why, and does not end it."""
    common = conditions(layout_of(model.config)._replace(page_size=sizes["page_size"]))
    common["dtype"] = jnp.dtype(model.config.dtype).name
    loads = [case.load(model.config.vocab_size) for case in cases]
    # The longest of all cases: so their engines share what is compiled.
    longest = max(len(each.prompt) + each.new_tokens for offered in loads for each in offered)
    sizes = sizes | {"max_context": sizes.get("max_context") or longest}
    for case, offered in zip(cases, loads, strict=True):
        for variant in tqdm(variants):
            with GPU.taken():
                row = attempt(partial(measure, model, offered, variant, sizes), "seconds", "error")
            yield {"name": case.name, "variant": variant} | row | common


def measure(model: Decoder, offered: list[Offered], variant: str, sizes: dict) -> dict:
    """Run one variant of one case."""
    gc.collect()  # the pages of the engine before: its patches made cycles
    engine = Engine(model, **sizes)
    with VARIANTS[variant](engine, offered):
        engine.warm_up()
        row = replay(engine, offered)
    return row | {"engine": sizes | {"num_pages": engine.stats.free_pages + engine.stats.cached_pages}}


@contextmanager
def _without_cache(engine: Engine, _: list[Offered]) -> Iterator[None]:
    """Forget what nobody reads whenever somebody leaves."""
    scheduler = engine._scheduler
    leave = scheduler._leave

    def left(leaving: list[Running]) -> None:
        leave(leaving)
        if leaving:
            scheduler.cache = scheduler.cache.evict(scheduler.cache.num_cached)

    with patch.object(scheduler, "_leave", left):
        yield


@contextmanager
def _unshared(engine: Engine, offered: list[Offered]) -> Iterator[None]:
    """Show the device each request that decodes with a path of its own, in arrays that hold the longest together."""
    device, page_size, shared = engine._device, engine._page_size, PrefixCache.view
    rows, contexts = device._rows, sorted(len(each.prompt) + each.new_tokens for each in offered)
    mean = -(-sum(contexts[-rows:]) // rows)
    pages = rows * (-(-mean // page_size) + EXPECTED_DEPTH)
    blocks = Intervals(engine.config, 1, pages, page_size).block_capacity(rows, mean)

    def view(cache: PrefixCache, requests: list[int], *, node_capacity: int, page_capacity: int) -> Forest:
        page_capacity = max(page_capacity, pages)
        return shared(cache, requests, node_capacity=node_capacity, page_capacity=page_capacity).unshared()

    with patch.object(PrefixCache, "view", view), patch.object(device, "_blocks", max(device._blocks, blocks)):
        yield


VARIANTS: dict[str, Callable[[Engine, list[Offered]], AbstractContextManager]] = {
    "engine": lambda *_: nullcontext(),
    "no cache": _without_cache,
    "unshared": _unshared,
}


if __name__ == "__main__":
    main()
