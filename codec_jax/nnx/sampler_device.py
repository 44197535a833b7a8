"""What a sampler runs on its devices: waves of prefill, and intervals of decoding.

The programs have the same shapes while the tree has up to 8 * max_requests nodes, and each compiles once; where chains
of forks have more, arrays grow, and they compile again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache as cached
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float
from tqdm import tqdm

from codec_jax.forest import Pages
from codec_jax.nnx.batch import Plans
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.intervals import Interval, Intervals
from codec_jax.nnx.kept import reconstruct
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.prefill import Wave
from codec_jax.nnx.sampling import RowOptions
from codec_jax.nnx.shards import PlacedDecoder, Program, everywhere, new_pages, program
from codec_jax.nnx.steps import decode_loop, prefill_step


class SamplerDevice:
    """The weights and the programs; KV pages and logits come with each call, and pages are updated in place."""

    def __init__(
        self,
        model: PlacedDecoder,
        intervals: Intervals,
        *,
        max_requests: int,
        num_pages: int,
        page_size: int,
        reconstructed_pages: int,
        implementation: str | None,
    ) -> None:
        """Nothing is allocated and nothing compiled before it is needed; intervals plan the waves."""
        self.model, self._intervals, self._max_requests = model, intervals, max_requests
        self._sizes = num_pages, page_size, reconstructed_pages
        described = model.graph, model.config, model.mesh, implementation
        self.prefill_program = _prefill_program(*described)
        # By the turns alone: to find it among those of all samplers takes a hash of the model's graph.
        self.decode_program = cached(partial(_decode_program, *described))

    def update_weights(self, model: Decoder | PlacedDecoder) -> None:
        """Take other weights for what comes. Raises ValueError for those of another model."""
        self.model = self.model.updated(model)

    def prefill(
        self, waves: Iterable[Wave], tokens: int, progress: bool
    ) -> tuple[tuple[Pages, ...], Float[Array, "B V"]]:
        """Return new pages with K and V of waves that have so many tokens, and the logits after each prompt."""
        config, mesh = self.model.config, self.model.mesh
        cache = new_pages(config, mesh, *self._sizes)
        logits = everywhere(mesh, jnp.zeros((self._max_requests, config.vocab_size), jnp.float32))
        with tqdm(total=tokens, desc="prefill", unit="token", leave=None, disable=not progress) as bar:
            for wave in waves:
                _, cache, logits = self.run(wave, cache, logits)
                bar.update(int(wave.store.sum()))
        return cache, logits

    def run(
        self, wave: Wave, cache: tuple[Pages, ...], logits: Float[Array, "B V"]
    ) -> tuple[Plans, tuple[Pages, ...], Float[Array, "B V"]]:
        """Plan and run a wave."""
        plan = self._intervals.plan(wave.chunks, wave.tokens.shape[1], wave.block_capacity)
        cache, logits = self.prefill_program(
            self.model.weights, cache, logits, wave.chunks, plan, wave.tokens, wave.store, wave.chunk_of_request
        )
        return plan, cache, logits

    def decode(
        self,
        interval: Interval,
        turns: int,
        cache: tuple[Pages, ...],
        logits: Float[Array, "B V"],
        options: RowOptions,
    ) -> tuple[tuple[Pages, ...], Float[Array, "B V"], list[Array]]:
        """Decode up to so many tokens; return pages, logits and what `decode_loop` tells, before they are there."""
        kept = reconstruct(self.model, cache, interval.pages, interval.places)
        cache, logits, *results = self.decode_program(turns)(
            self.model.weights, kept, logits, interval.growers, interval.plan, interval.remaining, options
        )
        return cache, logits, results


@lru_cache(maxsize=16)
def _prefill_program(
    graph: nnx.GraphDef[Decoder],
    config: DecoderConfig,
    mesh: Mesh | None,
    implementation: str | None,
) -> Program:
    """Return a jitted wave; samplers of one model have the same, so that a second one compiles nothing."""

    def prefill(model: Decoder, *rest: Any, parallel: Parallel) -> tuple:
        return prefill_step(model, implementation, *rest, parallel=parallel)

    return program(graph, config, mesh, prefill, donate=(1,))


@lru_cache(maxsize=16)
def _decode_program(
    graph: nnx.GraphDef[Decoder],
    config: DecoderConfig,
    mesh: Mesh | None,
    implementation: str | None,
    turns: int,
) -> Program:
    """Return a jitted loop of so many turns, the same for all samplers of one model."""

    def decode(model: Decoder, *rest: Any, parallel: Parallel) -> tuple:
        return decode_loop(model, turns, implementation, *rest, parallel=parallel)

    return program(graph, config, mesh, decode, donate=(1,))
