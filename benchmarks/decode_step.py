"""The step that benchmarks.decoding times: the sampler's jitted loop over a document and its questions, in three ways.

    shared     the forest: the document is read once for all requests
    unshared   the same pages and kernels, but every request reads its own path, as FlashDecoding does
    cudnn      a contiguous copy of each request's K and V, attended by cuDNN

Weights and pages are random, and prefill is not what is measured. Time depends on them only where they decide which
experts tokens go through: the requests' own values are such that each goes its own way, as in a trained model. The
shared one may be divided among the devices of a mesh, as the sampler's is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from benchmarks.inputs import Layout, padded_slots
from benchmarks.turns import compiled
from codec_jax import Forest, KVPages, Window, make_plan
from codec_jax.forest import ROOT, Tree
from codec_jax.forest.homes import Homes
from codec_jax.mesh import CONTEXT, TENSOR
from codec_jax.nnx import Decoder, DecoderConfig
from codec_jax.nnx.batch import Plans, all_plans
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.nnx.params import SamplingParams
from codec_jax.nnx.sampling import RowOptions
from codec_jax.nnx.shards import PlacedDecoder, everywhere, program
from codec_jax.nnx.steps import decode_loop
from codec_jax.planning import default_tiling
from codec_jax.planning.even_runs import lasting_thread_blocks
from pallas_kernels import Heads

#: Tokens of a call: what `Sampler` generates by default between two plans.
STEPS = 16
PAGE_SIZE = 16

#: Deviations of what attention with equal weights takes of the document, and of a request's own. Scores of random keys
#: are nearly equal and average values away, so values are larger the more of them there are. The own part is the larger
#: one, or requests would become one and the same from layer to layer, and go through the same experts; without the
#: other, a missing document would not show.
_DOCUMENT_DEVIATION, _OWN_DEVIATION = 1.0, 2.0

#: The contiguous copies end at a multiple of this many tokens.
_CONTIGUOUS_TOKENS = 128

#: Room for the logits, the copy of a layer and XLA's own buffers.
_LEFT_FREE_BYTES = 5e9


class SharedDocument(NamedTuple):
    """Requests that continue one document, each with tokens of its own already."""

    document: int
    requests: int
    own: int = 128

    @property
    def name(self) -> str:
        """Say what is shared by whom."""
        return f"{self.requests} over {self.document}"

    def seen(self, window: Window | None) -> tuple[float, float]:
        """Return the tokens of the document, and of its own, that a request attends to: the mean of a call's steps."""
        position = self.document + self.own + np.arange(STEPS)
        first = np.zeros(STEPS) if window is None else np.maximum(window.first_position(position), 0)
        own = position + 1 - np.maximum(first, self.document)
        return float(np.maximum(self.document - first, 0).mean()), float(own.mean())

    def forest(self, devices: int = 1) -> tuple[Forest, int]:
        """Return the forest with room for the tokens of a call, and the pages that a pool needs for it.

        Pages are spread over so many devices.
        """
        forest = Forest.from_nodes(
            [-1] + [0] * self.requests,
            [self.document] + [self.own] * self.requests,
            np.arange(1, self.requests + 1),
            page_size=PAGE_SIZE,
            node_capacity=8 * self.requests,  # as in `Sampler`
        )
        num_pages = len(forest.used_pages) + self.requests * -(-STEPS // PAGE_SIZE)
        num_pages = -(-num_pages // devices) * devices
        forest, pool = forest.spread(num_pages, devices)
        return forest.reserve(pool, STEPS)[0], num_pages

    def contiguous(self) -> Forest:
        """Return a forest of which every request owns a run of consecutive pages with its whole context."""
        context = self.document + self.own
        pages = -(-(context + STEPS) // _CONTIGUOUS_TOKENS) * _CONTIGUOUS_TOKENS // PAGE_SIZE
        each = np.arange(self.requests)
        none, length, page_count = (np.full_like(each, value) for value in (ROOT, context, pages))
        return Forest.build(Tree(none, length, page_count, np.arange(self.requests * pages), each, PAGE_SIZE))


class Step:
    """The compiled loop on one forest. Every call starts from the same lengths and generates the same tokens."""

    def __init__(
        self,
        model: Decoder,
        forest: Forest,
        plan: Plans,
        cache: tuple[KVPages, ...],
        attention: Callable[..., Array] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Compile; `attention` takes the place of `attention_by` in every layer. `cache` is used up."""
        placed = PlacedDecoder.of(model, mesh)
        batch, vocab = forest.request_capacity, model.config.vocab_size
        logits = first_logits(model.config, batch)
        # Each call sends the parts of a plan to their devices, as the sampler's do.
        plan = plan if all_plans(plan)[0].is_spread else everywhere(mesh, plan)
        self._inputs = (placed.weights, *everywhere(mesh, (logits, forest)), plan)
        self._batch, self._vocab, self._cache = batch, vocab, cache

        def decode(model: Decoder, *rest: object, parallel: Parallel) -> tuple:
            return decode_loop(model, STEPS, None, *rest, parallel=parallel)

        loop = program(placed.graph, placed.config, mesh, decode, donate=(1,))
        start = time.perf_counter()
        other = patch("codec_jax.nnx.batch.attention_by", attention) if attention else nullcontext()
        with other:
            self._loop = loop._replace(jitted=compiled(loop, *self._arguments(), tuned=True))
        self.compile_seconds = time.perf_counter() - start

    def __call__(self, tokens: int = STEPS, temperature: float = 0.0, top_p: float = 1.0) -> Float[Array, "B V"]:
        """Generate `tokens` tokens, STEPS at most, of every request; returns the logits after the last one."""
        self._cache, logits, *_ = self._loop(*self._arguments(tokens, temperature, top_p))
        return logits

    def _arguments(self, tokens: int = STEPS, temperature: float = 0.0, top_p: float = 1.0) -> tuple:
        weights, logits, forest, plan = self._inputs
        remaining = np.full(self._batch, tokens, np.int32)
        options = _options(self._batch, self._vocab, temperature, top_p)
        return weights, self._cache, logits, forest, plan, remaining, options


def first_logits(config: DecoderConfig, batch: int) -> Float[Array, "B V"]:
    """Draw the logits that every call begins with."""
    return jax.random.normal(jax.random.key(1), (batch, config.vocab_size))


@lru_cache
def _options(batch: int, vocab: int, temperature: float, top_p: float) -> RowOptions:
    rows = [SamplingParams(temperature=temperature, top_p=top_p, stream=row) for row in range(batch)]
    return jax.device_put(RowOptions.of(rows, vocab))


def paged(model: Decoder, case: SharedDocument, share: bool, mesh: Mesh | None = None) -> Step:
    """Decode over the forest, or over the same pages with each request by itself."""
    forest, num_pages = case.forest(Parallel.of(mesh).context)
    forest = forest if share else forest.unshared()
    plan = plans_of(model.config, forest, num_pages, Parallel.of(mesh))
    if mesh is None:
        cache = random_cache(model.config, case)
    else:
        layers = range(model.config.num_layers)
        cache = tuple(random_pages_on(model.config, case, layer, mesh) for layer in layers)
    return Step(model, forest, plan, cache, mesh=mesh)


def plans_of(config: DecoderConfig, forest: Forest, num_pages: int, parallel: Parallel = ALONE) -> Plans:
    """Plan a call for the heads and the pages of each device, as the sampler: one for each of the model's windows."""
    shape = layout_of(config, parallel).heads
    heads = Heads(**shape, value_head_dim=shape["head_dim"], kv_dtype=config.cache_dtype)
    tiling, homes = default_tiling(heads), Homes(parallel.context, num_pages // parallel.context)
    options = shape | {"kv_dtype": config.cache_dtype, "steps": STEPS, "homes": homes}
    plans = tuple(
        make_plan(
            forest,
            **options,
            window=window,
            num_ctas=lasting_thread_blocks(tiling, heads, forest.request_capacity, window=window),
        )
        for window in config.windows_used
    )
    return plans if len(plans) > 1 else plans[0]


def contiguous(model: Decoder, case: SharedDocument, implementation: str = "cudnn") -> Step:
    """Decode over contiguous copies of the same K and V, attended by `jax.nn.dot_product_attention`.

    Raises ValueError for a model that attends in other ways, and if the copies do not fit the device's memory.
    """
    config = model.config
    if config.windows_used != (None,) or config.sinks or config.softcap is not None:
        raise ValueError("model: expected one without windows, sinks and softcap, whose attention is not cuDNN's alone")
    forest, _ = case.forest()
    own = case.contiguous()
    size, free = len(own.used_pages) * PAGE_SIZE * config.kv_token_bytes, free_bytes()
    if size > free - _LEFT_FREE_BYTES:
        raise ValueError(
            f"expected contiguous KV that fits {free / 1e9:.0f} GB of free memory, got {size / 1e9:.0f} GB"
        )
    slots = padded_slots(forest)
    slots = np.pad(slots, ((0, 0), (0, len(own.used_pages) * PAGE_SIZE // len(slots) - slots.shape[1])))
    # One layer at a time, so that no more than one is there twice.
    cache = tuple(
        jax.block_until_ready(_gather(random_pages(config, case, layer), slots)) for layer in range(config.num_layers)
    )

    def attention(
        _run: Any,
        query: Array,
        key_pages: Array,
        value_pages: Array,
        forest: Forest,
        *unused: object,
        **ignored: object,
    ) -> tuple[Array, tuple[Array, Array]]:
        key, value = (x.reshape(len(query), -1, *x.shape[2:]) for x in (key_pages, value_pages))
        out = jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=forest.request_length, implementation=implementation
        )
        no_residuals = jnp.zeros(out.shape[:-1])  # one device has nothing to merge
        return out, (no_residuals, no_residuals)

    return Step(model, own, plans_of(config, own, len(own.used_pages)), cache, attention)


#: Shared first: the others' logits are compared with its.
VARIANTS: dict[str, Callable[[Decoder, SharedDocument], Step]] = {
    "shared": partial(paged, share=True),
    "unshared": partial(paged, share=False),
    "cudnn": contiguous,
}


def layout_of(config: DecoderConfig, parallel: Parallel = ALONE) -> Layout:
    """Return the heads that a device has of a model, and the pages."""
    return Layout(*parallel.heads(config.num_q_heads, config.num_kv_heads), config.head_dim, PAGE_SIZE)


def random_cache(config: DecoderConfig, case: SharedDocument) -> tuple[KVPages, ...]:
    """Draw the pages of all layers; the same ones every time."""
    return tuple(random_pages(config, case, layer) for layer in range(config.num_layers))


def random_pages(config: DecoderConfig, case: SharedDocument, layer: int) -> KVPages:
    """Draw the pages of one layer, on one device."""
    forest, num_pages = case.forest()
    shape = (num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    key, value = (_draw(jax.random.key(2 * layer + i), shape, config.dtype) for i in range(2))
    of_document, of_own = case.seen(config.window_of(layer))
    # Of n numbers among m that are averaged with equal weights, the sum has a deviation of theirs times n ** 0.5 / m.
    total = of_document + of_own
    deviation = np.full((num_pages, 1, 1, 1), _OWN_DEVIATION * total / of_own**0.5)
    deviation[forest.pages_of(0)] = _DOCUMENT_DEVIATION * total / max(of_document, 1.0) ** 0.5
    return KVPages(key, _scaled(value, jnp.asarray(deviation, config.dtype)))


def random_pages_on(config: DecoderConfig, case: SharedDocument, layer: int, mesh: Mesh) -> KVPages:
    """Draw the same K and V for a mesh: each page on its device, and each head on all devices that attend with it."""
    parallel = Parallel.of(mesh)
    (here, _), (there, num_spread) = case.forest(), case.forest(parallel.context)
    source = np.zeros(num_spread, np.int32)
    for node in range(1 + case.requests):
        source[there.pages_of(node)] = here.pages_of(node)
    copies = max(parallel.tensor // config.num_kv_heads, 1)
    arranged = _arranged(random_pages(config, case, layer), source, copies)
    return jax.block_until_ready(
        jax.device_put(arranged, NamedSharding(mesh, PartitionSpec(CONTEXT, None, TENSOR, None)))
    )


_draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
_scaled = jax.jit(jnp.multiply, donate_argnums=0)


@partial(jax.jit, static_argnames="copies")
def _arranged(pages: KVPages, source: Int[Array, " pages"], copies: int) -> KVPages:
    return jax.tree.map(lambda x: jnp.repeat(x[source], copies, axis=2), pages)


@jax.jit
def _gather(pages: KVPages, slots: Int[Array, "B S"]) -> KVPages:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[slots].reshape(-1, *x.shape[1:]), pages)


def free_bytes() -> float:
    """Return the free memory of the default device, or infinity where it does not say."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else float("inf")
