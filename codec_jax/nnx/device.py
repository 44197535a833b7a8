"""Steps as the device takes them: pages, weights and what is carried from step to step live here.

Arrays have few shapes, so that few programs are compiled: one for decoding alone, and one for each number of chunks
and size of their plan.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, UInt16

from codec_jax.forest import PageSubset, PrefixCache
from codec_jax.nnx.batch import all_plans
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.engine_step import Carried, Chunks, Drawing, Outcome, run_step
from codec_jax.nnx.intervals import EXPECTED_DEPTH, Intervals, Planned
from codec_jax.nnx.kept import reconstruct
from codec_jax.nnx.loops import runs_to_its_end
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.request import Request, part_of_context
from codec_jax.nnx.sampling import History, RowOptions, allowed_words, num_words
from codec_jax.nnx.scheduler import Running, Step
from codec_jax.nnx.shards import PlacedDecoder, Program, everywhere, new_pages, program

#: Plans of chunks whose contexts are short have room for a part of what the longest ones need, if that is much.
_SHORT, _MANY_BLOCKS = 16, 1 << 14
#: Nodes that cost next to nothing, so that few requests may have deep trees.
_MIN_NODES = 256


class Device:
    """What the engine has on the device, and the programs that it runs there."""

    def __init__(
        self,
        model: PlacedDecoder,
        *,
        cache: PrefixCache,
        max_context: int,
        steps: int,
        chunks: int,
        chunk_tokens: int,
        reconstructed_pages: int,
        implementation: str | None,
    ) -> None:
        """Allocate pages, and say what to compile: with an invariant cache steps of two shapes only."""
        self._model, self._config, self._chunk_tokens = model, model.config, chunk_tokens
        self._rows, self._num_pages, page_size = len(cache.tree.leaf), cache.pool.num_pages, cache.tree.page_size
        #: Chunks that a step has room for: few, so that a short prompt costs little, or all.
        self._sizes = [chunks] if cache.invariant else sorted({max(chunks // 8, 1), chunks})
        self._max_context = min(max_context, self._num_pages * page_size)
        # A plan holds for what the step in flight may add, and for what the next one may.
        sizes = 2 * steps, self._num_pages, page_size
        self._intervals = intervals = Intervals(
            model.config, *sizes, Parallel.of(model.mesh), reconstructed_pages,
            max_context=self._max_context, invariant=cache.invariant,
        )  # fmt: skip
        self._blocks = intervals.block_capacity(self._rows, self._max_context)
        self._steps, self._fewest = steps, 1 if runs_to_its_end() and not cache.invariant else steps
        self._programs = {
            turns: _program(model.graph, model.config, model.mesh, turns, implementation) for turns in {1, steps}
        }
        same = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())
        self._set_history = jax.jit(History.set_row, donate_argnums=0, out_shardings=same)
        self._page_size, self._reconstructed_pages = page_size, reconstructed_pages
        self._windowed_pages = None if cache.windows is None else cache.windows.capacity
        self._options: tuple[tuple[int | None, ...], RowOptions] | None = None
        # Megabytes, which are the same for all rows without matchers.
        no_words = np.zeros((self._rows, num_words(model.config.vocab_size)), np.uint32)
        self._nothing_allowed = everywhere(model.mesh, no_words)
        self._saturated = 0
        self._allocate()
        self._is_in_doubt = False

    def _allocate(self) -> None:
        sizes = self._num_pages, self._page_size, self._reconstructed_pages, self._windowed_pages
        self._pages = new_pages(self._config, self._model.mesh, *sizes)
        self._saturated_before = self._saturated
        self.copies = self._intervals.no_copies  # K and V that are kept beside latents
        carried = Carried(
            token=jnp.zeros(self._rows, jnp.int32),
            stopped=jnp.zeros(self._rows, bool),
            grown=jnp.zeros(self._rows, jnp.int32),
            history=History.empty(self._rows, self._config.vocab_size),
        )
        self._carried = everywhere(self._model.mesh, carried)

    @property
    def saturated(self) -> int:
        """Numbers that were too large for their scale, as far as is known; it waits for the step in flight."""
        counts = [pages.quantisation.saturated for pages in self._pages if pages.quantisation is not None]
        with suppress(Exception):  # that of a step which failed: whoever takes it in says so
            here = jax.device_get([shard.data for count in counts for shard in count.addressable_shards])
            self._saturated = self._saturated_before + sum(int(of_device.sum()) for of_device in here)
        return self._saturated

    def restart(self) -> None:
        """Nothing is known of the arrays: a step took them and gave none back, or it gave some back and then failed."""
        self.copies, self._is_in_doubt = self._intervals.no_copies, True

    def _make_sure(self) -> None:
        """Allocate anew, after a restart, what holds no numbers. It waits for them, so that is for the next step."""
        if not self._is_in_doubt:
            return
        arrays = self._pages, self._carried
        try:
            jax.block_until_ready(arrays)
        except Exception:  # that of the step, of whatever kind it was, or that they are deleted
            for array in jax.tree.leaves(arrays):
                array.delete()
            self._allocate()
        self._is_in_doubt = False

    def placed(self, model: Decoder | PlacedDecoder) -> PlacedDecoder:
        """Return the weights of a model as they are kept here. Raises ValueError for those of another model."""
        return self._model.updated(model)

    def take_weights(self, placed: PlacedDecoder) -> None:
        """Take what `placed` returned, for the steps from here on."""
        self._model, self.copies = placed, self._intervals.no_copies

    def warm_up(self, cache: PrefixCache) -> None:
        """Compile all programs, and run each with nothing to do."""
        self._make_sure()
        nothing = Step([], {}, {}, [])
        drawing, _ = self._drawing(nothing, cache, None, behind=False)
        drawings = [drawing]
        if self._reconstructed_pages:
            none = PageSubset.of(np.zeros(0, int), self._num_pages, self._reconstructed_pages)
            drawings.append(drawing._replace(plan=self._intervals.plan(drawing.forest, 1, self._blocks, none)))
            self._pages = reconstruct(self._model, self._pages, *np.array([[0], [self._reconstructed_pages]]))
        kinds: list[tuple[int, Chunks | None]] = [(turns, None) for turns in {self._turns(0), self._steps}]
        for size in self._sizes:
            ends = [self._chunks(nothing, cache, size, end) for end in (1, self._max_context)]
            rooms = {all_plans(chunks.plan)[0].block_capacity: chunks for chunks in ends}  # of short contexts the same
            kinds += [(1, chunks) for chunks in rooms.values()]
        calls = [(turns, drawing, chunks) for turns, chunks in kinds for drawing in drawings]
        arguments = self._model.weights, self._pages, self._carried
        with ThreadPoolExecutor() as pool:  # compiling a program keeps little more than one core busy
            compiled = [
                pool.submit(self._programs[turns].lower(*arguments, drawing, chunks).compile)
                for turns, drawing, chunks in calls
            ]
        for each in compiled:
            each.result()
        for turns, drawing, chunks in calls:
            self._run(turns, drawing, chunks)
        vocab = self._config.vocab_size
        self._set_row(self._rows, np.zeros(vocab, bool), np.zeros(vocab, np.uint16))  # past the last row: of nobody
        jax.block_until_ready(self._pages)

    def dispatch(self, step: Step, cache: PrefixCache, *, behind: bool) -> Outcome:
        """Run a step, and return before it has finished; `behind` says that the one before has not landed."""
        self._make_sure()
        chunks, turns = None, self._turns(max(step.drawing.values(), default=0))
        if step.pieces:
            turns = 1
            size = next(size for size in self._sizes if size >= len(step.pieces))
            chunks = self._chunks(step, cache, size, max(piece.end for piece in step.pieces))
        for running in step.first:
            self._begin_history(running)
        drawing, planned = self._drawing(step, cache, chunks, behind=behind)
        self._pages = reconstruct(self._model, self._pages, planned.pages, planned.places)
        self.copies = planned.copies
        return self._run(turns, drawing, chunks)

    def _run(self, turns: int, drawing: Drawing, chunks: Chunks | None) -> Outcome:
        arguments = self._model.weights, self._pages, self._carried, drawing, chunks
        self._pages, self._carried, outcome = self._programs[turns](*arguments)
        return outcome

    def _turns(self, tokens: int) -> int:
        """Return the turns of a step that draws so many tokens: of a loop that runs to its end, few would be used."""
        return self._fewest if tokens <= 1 else self._steps

    def _drawing(
        self, step: Step, cache: PrefixCache, chunks: Chunks | None, *, behind: bool
    ) -> tuple[Drawing, Planned]:
        """Plan for the requests that draw, beside these chunks; the others have no place in the forest."""
        allowed, first = np.zeros(self._rows, np.int32), np.full(self._rows, -1, np.int32)
        for running, drawn in step.drawing.items():
            allowed[running.row] = drawn
        for running, token in step.first.items():
            first[running.row] = token
        rows = [running.row for running in step.drawing]
        forest = cache.view(rows, node_capacity=_nodes(self._rows), page_capacity=self._num_pages)
        written, kept = np.zeros(0, int), _kept(cache)
        if chunks is not None and self._reconstructed_pages:
            written = chunks.forest.slots(self._chunk_tokens)[chunks.store]
        planned = self._intervals.plan_decoding(forest, self._blocks, self.copies, written // self._page_size, kept)
        options, places = self._row_options(step), None if kept is None else kept.place
        return Drawing(forest, np.asarray(behind), planned.plan, allowed, first, options, places), planned

    def _chunks(self, step: Step, cache: PrefixCache, size: int, longest: int) -> Chunks:
        """Fill `size` rows with the tokens of chunks; those of the longest one decide how much room the plan has."""
        width = self._chunk_tokens
        tokens, following = np.zeros((size, width), np.int32), np.full((size, width), -1, np.int32)
        store = np.zeros((size, width), bool)
        for row, piece in enumerate(step.pieces):
            request, end = piece.running.request, piece.end
            text = part_of_context(request, max(end - width, 0), end)
            tokens[row, width - len(text) :] = text
            store[row] = np.arange(end - width, end) >= piece.store
            if piece.score < min(end, piece.running.score_end):
                after, at = request.prompt[piece.score + 1 : end + 1], width - (end - piece.score)
                following[row, at : at + len(after)] = after
        forest = cache.chunks(
            [(piece.running.row, piece.end) for piece in step.pieces],
            size,
            node_capacity=_nodes(size),
            page_capacity=self._num_pages,
        )
        needed, room = (
            self._intervals.blocks_of_chunks(np.full(size, end), width) for end in (longest, self._max_context)
        )
        if room > _MANY_BLOCKS and needed <= room // _SHORT:
            room //= _SHORT
        return Chunks(forest, self._intervals.plan(forest, width, room, kept=_kept(cache)), tokens, store, following)

    def _row_options(self, step: Step) -> RowOptions:
        """Return how each row draws; they stay on the device while the rows are the same."""
        requests: list[Request | None] = [None] * self._rows
        for running in step.drawing:
            requests[running.row] = running.request
        key = tuple(None if request is None else request.id for request in requests)
        if self._options is None or self._options[0] != key:
            params = [None if request is None else request.params for request in requests]
            options = RowOptions.of(params, self._config.vocab_size)._replace(allowed=None)
            options = everywhere(self._model.mesh, options)._replace(allowed=self._nothing_allowed)
            self._options = key, options
        options = self._options[1]
        masks = {running.row: running.request.mask for running in step.drawing if running.request.mask is not None}
        if masks:
            allowed = np.zeros(self._nothing_allowed.shape, np.uint32)
            for row, mask in masks.items():
                allowed[row] = allowed_words(mask, self._config.vocab_size)
            options = options._replace(allowed=everywhere(self._model.mesh, allowed))
        return options

    def _begin_history(self, running: Running) -> None:
        """Set what a request with penalties has seen so far; nobody looks at that of the others."""
        request, params = running.request, running.request.params
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0):
            return
        in_prompt = np.zeros(self._config.vocab_size, bool)
        in_prompt[request.prompt] = True
        generated = np.bincount(np.asarray(request.tokens, np.int64), minlength=self._config.vocab_size)
        self._set_row(running.row, in_prompt, generated.clip(max=65535).astype(np.uint16))

    def _set_row(self, row: int, in_prompt: Bool[np.ndarray, " V"], generated: UInt16[np.ndarray, " V"]) -> None:
        history = self._set_history(self._carried.history, np.int32(row), in_prompt, generated)
        self._carried = self._carried._replace(history=history)


def _kept(cache: PrefixCache) -> PageSubset | None:
    """Return the pages that layers with windows have, if these are fewer than all."""
    return None if cache.windows is None else cache.windows.subset


def _nodes(rows: int) -> int:
    """Return the nodes that there is room for; more make larger arrays, and compile anew."""
    return max(EXPECTED_DEPTH * rows, _MIN_NODES)


@lru_cache(maxsize=16)
def _program(
    graph: nnx.GraphDef[Decoder],
    config: DecoderConfig,
    mesh: Mesh | None,
    steps: int,
    implementation: str | None,
) -> Program:
    """Return a jitted step; engines of one model have the same, so that a second one compiles nothing."""

    def run(model: Decoder, *rest: Any, parallel: Parallel) -> tuple:
        return run_step(model, steps, implementation, *rest, parallel=parallel)

    return program(graph, config, mesh, run, donate=(1, 2))
