"""Who enters, who is computed, who decodes, and who has to give way: the engine's policy, without a model or a device.

    queue      first come, first served; a request enters when a row is free, and pages for its prompt and for what all
               those inside may still generate; a row is free when its request's last step is in flight
    chunks     prompts are computed in the order of entry, up to `chunks` of `chunk_tokens` tokens a step, each shared
               node once; all but the last token of a prompt, which the request feeds when it begins to decode
    decoding   all others add up to `steps` tokens, one beside chunks; with an invariant cache none beside chunks
    giving way when pages run short, the request that entered last leaves and goes back to the head of the queue; what
               it had stays in the cache as long as there is room
    windows    layers with windows keep, for each step, what those inside see then, if they have fewer pages

A step is scheduled before it is known how the one before ended: `flying` tokens of a request may come or not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from codec_jax.errors import LogitsError, OutOfPagesError
from codec_jax.forest import PrefixCache
from codec_jax.nnx.request import Request

#: An engine's defaults: tokens that a request draws in a step without chunks, and tokens of the chunks of a step.
STEPS, PREFILL_TOKENS = 8, 2048


@dataclass(eq=False)
class Running:
    """A request that has a row."""

    request: Request
    row: int
    wanted: int  # tokens of its context to compute: all of them, but for the one that it feeds first
    left: int  # tokens that it may draw in steps to come
    scored: int  # the token from which on log-probabilities of the one that follows are missing, up to `score_end`
    score_end: int
    first: int | None  # the token to feed first, until it did
    computed: bool = False  # whether `wanted` tokens are there
    flying: int = 0  # tokens that steps in flight may add; 1 for the last step of one that draws nothing

    @property
    def scores_missing(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.scored < self.score_end

    @property
    def ends_in_flight(self) -> bool:
        """Whether its last step is in flight, after others that have shown that its numbers are finite."""
        landed = len(self.request.prompt) + len(self.request.tokens) - (self.wanted + 1)
        return not self.left and self.flying > 0 and landed > 0


class Piece(NamedTuple):
    """A chunk of a context: `chunk_tokens` tokens up to `end`, or what there is."""

    running: Running
    end: int
    store: int  # the token from which on K and V are to be stored
    score: int  # the token from which on log-probabilities are wanted

    @property
    def new_tokens(self) -> int:
        """How many tokens it stores."""
        return max(self.end - self.store, 0)


class Step(NamedTuple):
    """What to run."""

    pieces: list[Piece]
    drawing: dict[Running, int]  # tokens that each request may draw
    first: dict[Running, int]  # the token to feed, for those that begin to draw
    finishing: list[Running]  # those that draw nothing, and have all that was asked for after this step


class Scheduler:
    """Decides step by step; `cache` is the forest that results."""

    def __init__(self, cache: PrefixCache, *, steps: int, chunks: int, chunk_tokens: int, room: float) -> None:
        """Begin with an empty queue.

        Args:
          cache: the forest that requests enter.
          steps: tokens that a request may draw in a step without chunks.
          chunks: of prompts, in a step.
          chunk_tokens: tokens of a chunk, a multiple of the page size, and at least two pages.
          room: the share of what requests may still generate for which pages must be there before another one enters.
        """
        self.cache = cache
        self.queue: deque[Request] = deque()
        self.running: list[Running] = []  # in the order of entry
        self.leaving: list[Running] = []  # whose rows are free, but whose last step has not landed
        self.preempted = self.prompt_tokens = self.cached_tokens = self.computed_tokens = 0  # counts
        self._steps, self._chunks, self._chunk_tokens, self._room = steps, chunks, chunk_tokens, room

    def schedule(self) -> Step | None:
        """Return the next step; None if there is nothing to do before the one in flight has landed."""
        self._leave([running for running in self.running if running.request.finished])
        self._enter()
        self._fit_windows()
        # A step with chunks is another program, and whether there are any is up to others.
        waits = self.cache.invariant and any(map(self._needs_chunks, self.running))
        drawing = {} if waits else self._draw()
        pieces = self._compute()
        self._keep_seen(pieces)
        finishing = [x for x in self.running if not (x.left or x.flying or self._needs_chunks(x))]
        if not (pieces or drawing or finishing):
            return None
        for running in finishing:
            running.flying += 1
        first = {running: running.first for running in drawing if running.first is not None}
        for running in first:
            running.first = None
        self.computed_tokens += sum(piece.new_tokens for piece in pieces) + len(first)
        return Step(pieces, drawing, first, finishing)

    def grow(self, drawn: Mapping[Running, list[int]]) -> None:
        """Take the tokens that requests drew, before they are added to the requests.

        The last one of each is not in the forest yet: K and V come when it is fed.

        Args:
          drawn: tokens by request, at least one each.
        """
        fed = {
            running.row: [running.request.last_token, *tokens[:-1]]
            for running, tokens in drawn.items()
            if running in self.running
        }
        if fed:
            self.cache = self.cache.append(fed)

    def land(self, step: Step) -> None:
        """Know that a step is no longer in flight.

        Args:
          step: the oldest one that was.
        """
        for running in step.finishing:
            running.flying -= 1
        for running, scheduled in step.drawing.items():
            running.flying -= scheduled
        self.leaving = [running for running in self.leaving if running.flying]

    @property
    def inside(self) -> list[Request]:
        """Return the requests that entered and have not all that they asked for."""
        return [x.request for x in (*self.leaving, *self.running) if not x.request.finished]

    def restart(self) -> None:
        """Forget what was computed, and send those inside back to the head of the queue; nothing is in flight."""
        waiting = (request for request in self.queue if not request.finished)
        self.queue = deque(dict.fromkeys([*self.inside, *waiting]))
        for request in self.queue:  # half of a prompt's log-probabilities may be by other weights than the rest
            if _unscored(request) < len(request.prompt) - 1:
                request.prompt_logprobs.clear()
        self.running, self.leaving = [], []
        self.cache = self.cache.emptied()

    # ------------------------------------------------------------------ inside or not

    def _enter(self) -> None:
        """Let requests in while there is a row, and room to finish, and chunks of a step for what they still need."""
        while self.queue and self.cache.chunks_missing(self._chunk_tokens) < self._chunks:
            if self.queue[0].finished:
                self.queue.popleft()
            elif not self._admit():
                return

    def _admit(self) -> bool:
        """Let the first one of the queue in, and with it samples of its prompt; say whether there was room."""
        if not self._free_rows():
            return False
        request = self.queue[0]
        wanted, most = _wanted(request), None
        growing = [running.row for running in self.running if running.flying]
        if request.params.prompt_logprobs and self.cache.windows is not None:
            most = _unscored(request)  # what these tokens see may be gone
        if not request.params.max_tokens:  # it may be pinned, in as many pages as its tokens fill
            full = self.cache.match_in_full_pages(wanted, growing)
            most = full if most is None else min(most, full)
        needed = self.cache.needed(wanted, self._promise(request.tokens_left), growing, most)
        # One that is alone enters anyway: it would have been refused if the pool could not hold it.
        if self.running and not self._is_room_for(needed):
            return False
        try:
            self.cache, rows = self.cache.add([wanted], growing, most)
        except OutOfPagesError:  # nodes that end inside of pages take more of them than the tokens need
            if self.running:
                return False
            self.cache, rows = self.cache.evict(self.cache.num_cached).add([wanted], most=most)
        [row] = rows.tolist()
        self._begin(row, wanted)
        # An invariant cache shares whole pages only, and one with windows perhaps less: those are looked up one by one.
        if not self.cache.invariant and self.cache.windows is None:
            self._admit_samples(row, wanted)
        return True

    def _admit_samples(self, row: int, wanted: Int[np.ndarray, " tokens"]) -> None:
        """Let those in that come next and want the tokens of one that has just entered: none are looked up again."""
        tree = self.cache.tree
        leaves_page = tree.length[tree.leaf[row]] % tree.page_size > 0  # each but one grows in pages of its own
        while self.queue and not self.queue[0].finished and self._free_rows():
            request = self.queue[0]
            needed = -(-self._promise(request.tokens_left) // tree.page_size) + leaves_page
            if not request.params.max_tokens:  # it may be pinned, and a fork has all pages of what it is a fork of
                return
            if not np.array_equal(_wanted(request), wanted) or not self._is_room_for(needed):
                return
            self.cache, [fork] = self.cache.fork([row])
            self._begin(int(fork), wanted)

    def _begin(self, row: int, wanted: Int[np.ndarray, " tokens"]) -> None:
        """Know that the first one of the queue has a row, and all that it wants has a place in the cache."""
        request, cached = self.queue[0], self.cache.computed_tokens(row)
        left, scored, score_end = request.tokens_left, len(wanted), 0
        if request.params.prompt_logprobs:
            scored, score_end = _unscored(request), len(request.prompt) - 1
        if not request.tokens:
            request.cached_tokens = cached
        self.prompt_tokens += len(wanted)
        self.cached_tokens += cached
        first = request.last_token if left else None
        self.running.append(Running(request, row, len(wanted), left, scored, score_end, first))
        self.queue.popleft()  # last: an interruption may come in between, and nobody is to be in neither

    def _promise(self, tokens: int) -> int:
        """Return for how many of the tokens that a request may draw there must be pages."""
        return math.ceil(tokens * self._room)

    def _is_room_for(self, pages: int) -> bool:
        """Whether one more request that takes so many pages leaves enough to those inside."""
        return pages + self._promised() <= self.cache.available and not self._windows_are_full(1)

    def _free_rows(self) -> int:
        """Count free rows; if there are none, those whose last step is in flight leave, as many as others wait.

        The tokens of that step are not in the cache then, but those before them are.
        """
        if len(self.running) == len(self.cache.tree.leaf):
            ending = [running for running in self.running if running.ends_in_flight][: len(self.queue)]
            self.leaving += ending  # first: an interruption may come in between
            self._leave(ending)
        return len(self.cache.tree.leaf) - len(self.running)

    def _promised(self) -> int:
        """Count the pages that those inside may still take."""
        page_size = self.cache.tree.page_size
        growth = [running.flying + self._promise(running.left) for running in self.running]
        return sum(-(-tokens // page_size) for tokens in growth)

    def _leave(self, leaving: list[Running]) -> None:
        # Nobody else is to read what made logits that are not finite.
        if broken := [running.row for running in leaving if isinstance(running.request.error, LogitsError)]:
            self.cache = self.cache.forget(broken)
        if leaving:
            self.cache = self.cache.retire([running.row for running in leaving])
            self.running = [running for running in self.running if running not in leaving]

    def _give_way(self, running: Running) -> None:
        self.preempted += 1
        self.queue.appendleft(running.request)
        self._leave([running])
        if not self.running:  # alone it finds room if nothing that it left is in its way
            self.cache = self.cache.evict(self.cache.num_cached)

    # ------------------------------------------------------------------ layers with windows

    def _fit_windows(self) -> None:
        """Let requests give way until layers with windows have pages for what the others see in a step."""
        while len(self.running) > 1 and self._windows_are_full():
            self._give_way(self.running[-1])

    def _windows_are_full(self, more: int = 0) -> bool:
        """Whether what those inside see, and so many others would, may take more pages than those layers have."""
        if (windows := self.cache.windows) is None:
            return False
        page_size, seen = self.cache.tree.page_size, [self._seen(running) for running in self.running]
        growth = len(seen) * (2 + self._steps // page_size) + self._chunks * (1 + self._chunk_tokens // page_size)
        others = more * (2 + max(window.tokens for window in windows.windows) // page_size)
        return len(np.unique(np.concatenate([*seen, np.zeros(0, int)]))) + growth + others > windows.capacity

    def _seen(self, running: Running) -> Int[np.ndarray, " pages"]:
        """Return the pages that a request sees as it goes on, with those that it has room in if it decodes."""
        if self._is_computed(running):
            return self.cache.seen(running.row, int(self.cache.node_ends(running.row)[-1]))
        computed = self.cache.computed_tokens(running.row)
        return self.cache.seen(running.row, computed, computed)

    def _keep_seen(self, pieces: list[Piece]) -> None:
        """Give places to all pages that the step sees in layers with windows."""
        if self.cache.windows is not None:
            chunks = [self.cache.seen(x.running.row, min(x.store, x.score), x.end) for x in pieces]
            decoding = [self._seen(running) for running in self.running]
            self.cache = self.cache.keep(np.concatenate([*chunks, *decoding, np.zeros(0, int)]))

    # ------------------------------------------------------------------ what they do

    def _is_computed(self, running: Running) -> bool:
        running.computed = running.computed or self.cache.computed_tokens(running.row) >= running.wanted
        return running.computed

    def _share(self, one: Running, other: Running, position: int) -> bool:
        """Whether the same node has the token of two contexts that is at a position."""
        return self.cache.node_at(one.row, position) == self.cache.node_at(other.row, position)

    def _needs_chunks(self, running: Running) -> bool:
        return running.scores_missing or not self._is_computed(running)

    def _draw(self) -> dict[Running, int]:
        """Make room for those who need no more chunks, and say how many tokens they may draw."""
        ready = [running for running in self.running if not self._needs_chunks(running)]
        alone = not any(self._needs_chunks(x) or x.request.params.matcher is not None for x in self.running)
        count = self._steps if alone else 1
        while drawing := {running: min(count, running.left) for running in ready if running.left}:
            tokens = np.zeros(len(self.cache.tree.leaf), np.int64)
            for running, drawn in drawing.items():
                tokens[running.row] = running.flying + drawn
            try:
                self.cache = self.cache.reserve(tokens, [running.row for running in drawing])
            except OutOfPagesError:
                ready = [running for running in ready if running is not self.running[-1]]
                self._give_way(self.running[-1])
                continue
            for running, drawn in drawing.items():
                running.left -= drawn
                running.flying += drawn
            break
        return drawing

    def _compute(self) -> list[Piece]:
        """Cut what is still to be computed into chunks."""
        pieces: list[Piece] = []
        for running in self.running:
            while len(pieces) < self._chunks and self._needs_chunks(running):
                pieces.append(self._next_piece(running, pieces))
                end = pieces[-1].end
                self.cache = self.cache.mark_computed(running.row, end)
                running.scored = max(running.scored, end)
        return pieces

    def _next_piece(self, running: Running, before: list[Piece]) -> Piece:
        computed, ends = self.cache.computed_tokens(running.row), self.cache.node_ends(running.row)
        begin = min(computed, running.scored)
        limit = min(begin + self._chunk_tokens, running.wanted)
        if computed < running.wanted:  # what is stored goes to one node
            limit = min(limit, int(ends[np.searchsorted(ends, computed, side="right")]))
        # A chunk ends where a node does, or one of its pages.
        node = int(np.searchsorted(ends, limit))
        start, page_size = int(ends[node - 1]) if node else 0, self.cache.tree.page_size
        end = limit if limit == ends[node] else start + (limit - start) // page_size * page_size
        # Where it ends, the step's forest has the end of a node, and tokens are stored in one node only.
        for piece in before:
            if piece.store < end < piece.end and self._share(running, piece.running, piece.store):
                end = piece.store if piece.store > begin else piece.end
        return Piece(running, end, computed, min(running.scored, end))


def _wanted(request: Request) -> Int[np.ndarray, " tokens"]:
    """Return the tokens of a context that are computed first: all but the one that a request feeds to draw by."""
    context = request.context
    return context[:-1] if request.tokens_left else context


def _unscored(request: Request) -> int:
    """Return the first token of a prompt of whose successor there is no log-probability yet."""
    return request.scored_from + len(request.prompt_logprobs)
