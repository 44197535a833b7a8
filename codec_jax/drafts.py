"""Draft trees: each request brings candidate tokens that see the context, themselves and their ancestors only.

    candidates   0          in the last T slots of the request's own leaf, depth first, so that subtrees are consecutive
                / \\
               1   4        readers of 0: candidates [0, 5); of 1: [1, 4); of 2: [2, 3); of 3: [3, 4); of 4: [4, 5)
              / \\
             2   3

So a tree adds nothing to what attention knows about already: the readers of a draft token are an interval of query
rows like those of any other KV token, only a narrower one. `readers_of_tokens` finds it for every token of a plan.

A pass of speculative decoding (SpecInfer, ASPLOS 2024; Medusa, ICML 2024) is: extend the forest by T, run the model
over the candidates at `DraftTrees.positions`, choose a path from a root down in each tree, and `accept` it: K and V of
the path move to the front of the T slots, and the forest grows by the tokens of the path only.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from codec_jax.arrays import HostOrDevice
from codec_jax.pages import NO_SLOT
from pallas_kernels.columns import Page, Segment

if TYPE_CHECKING:
    from codec_jax.forest import Forest
    from codec_jax.plan import Plan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftTrees:
    """One tree, or several side by side, of T candidates for each request; build them with `from_parents`.

    A candidate's place is its number in depth-first order, in which tokens, query, K and V are given.
    """

    order: Int[HostOrDevice, "B T"]  # the candidate, as `from_parents` got it, at each place
    parent: Int[HostOrDevice, "B T"]  # place of the candidate above, -1 for a root
    subtree_end: Int[HostOrDevice, "B T"]  # the candidate at place j is seen by those at places [j, subtree_end)
    depth: Int[HostOrDevice, "B T"]  # candidates above

    @classmethod
    def from_parents(cls, parent: Int[HostOrDevice, "B T"]) -> DraftTrees:
        """Build the trees from the candidate above each candidate, -1 for one that follows the context. Jittable.

        Parents come before children, in any such order: `sort` puts what belongs to the candidates in depth-first
        order, in which siblings stay as they were. A request with fewer candidates than T is filled up with roots:
        nobody else sees those, and what is computed for them is ignored.

        Raises ValueError for a candidate that does not come after its parent; under `jax.jit`, where nothing can be
        raised, attention with such trees returns NaN.
        """
        on_host = not isinstance(parent, jax.Array)
        xp: ModuleType = np if on_host else jnp
        parent = xp.asarray(parent)
        if parent.ndim != 2 or not jnp.issubdtype(parent.dtype, jnp.integer):
            raise ValueError(f"parent: expected integers [B, T], got {parent.dtype} of shape {parent.shape}")
        number = xp.arange(parent.shape[1], dtype=np.int32)
        valid = (parent >= -1) & (parent < number)
        if on_host and not valid.all():
            request, candidate = np.argwhere(~valid)[0].tolist()
            raise ValueError(
                f"parent: expected -1 for a root or a candidate that comes before its child, got "
                f"parent[{request}, {candidate}] = {parent[request, candidate]}"
            )
        parent = xp.where(valid, parent, -1).astype(np.int32)
        seen = _ancestors(parent, xp)  # [B, T, T]: candidate t sees candidate a
        depth, size = seen.sum(2, dtype=np.int32) - 1, seen.sum(1, dtype=np.int32)
        # Depth first, before a candidate come those above it, and the subtrees of its and their earlier siblings.
        earlier = (parent[:, :, None] == parent[:, None]) & (number[:, None] > number)
        passed = xp.where(earlier, size[:, None], 0).sum(2, dtype=np.int32)
        place = depth + xp.where(seen, passed[:, None], 0).sum(2, dtype=np.int32)
        order = xp.argsort(place, axis=1).astype(np.int32)
        above = xp.where(parent >= 0, xp.take_along_axis(place, xp.maximum(parent, 0), axis=1), -1)
        end = xp.where(valid.all(1, keepdims=True), place + size, 0)
        return cls(order, *(xp.take_along_axis(x, order, axis=1) for x in (above, end, depth)))

    def sort(self, values: HostOrDevice) -> HostOrDevice:
        """Put one value for each candidate, [B, T] or [B, T, ...] as `from_parents` got them, in depth-first order."""
        xp = np if isinstance(values, np.ndarray) and isinstance(self.order, np.ndarray) else jnp
        return xp.take_along_axis(values, self.order.reshape(*self.order.shape, *[1] * (values.ndim - 2)), axis=1)

    def positions(self, forest: Forest) -> Int[HostOrDevice, "B T"]:
        """Return each candidate's position in its request's context, for rotary embeddings. Jittable.

        `forest` holds the T candidates already. Siblings have the same position, while their slots follow each other.
        """
        return forest.positions(self.depth.shape[1])[:, :1] + self.depth

    def accept(
        self, forest: Forest, path: Int[HostOrDevice, "B A"], count: Int[HostOrDevice, " B"]
    ) -> tuple[Forest, Int[Array, "B A"], Int[Array, "B A"]]:
        """Take the first `count` places of `path`, from a root down, for each request's next tokens. Jittable.

        `forest` is the one from before the candidates. Returns it with the accepted tokens, and the slots from which
        and to which K and V of every layer move (`KVPages.move`).

        Raises ValueError for shapes that do not fit, and on the host for places outside of a tree or more tokens than
        a path has; under `jax.jit` attention over the forest then returns NaN.
        """
        (batch, tokens), (shape, of_count) = self.depth.shape, (np.shape(path), np.shape(count))
        if len(shape) != 2 or shape[0] != batch or shape[1] > tokens:
            raise ValueError(f"path: expected [B, A] with B = {batch} and A of at most T = {tokens}, got shape {shape}")
        if of_count != (batch,):
            raise ValueError(f"count: expected shape {(batch,)}, one number for each request, got {of_count}")
        most = shape[1]
        xp = np if all(isinstance(x, np.ndarray) for x in (path, count)) else jnp
        taken = xp.arange(most, dtype=np.int32) < count[:, None]
        fits = (count <= most) & (~taken | ((path >= 0) & (path < tokens))).all(1)
        if isinstance(fits, np.ndarray) and not fits.all():
            request = int(np.argmin(fits))
            raise ValueError(
                f"path: expected {count[request]} places in [0, {tokens}) for request {request}, "
                f"got {path[request].tolist()}"
            )
        slots = jnp.asarray(forest.extend(tokens).slots(tokens))
        source = jnp.take_along_axis(slots, jnp.clip(path, 0, tokens - 1), axis=1)
        target = jnp.where(taken, slots[:, :most], NO_SLOT)
        return forest.extend(count if isinstance(fits, np.ndarray) else jnp.where(fits, count, -1)), source, target

    def fit(self, forest: Forest) -> Bool[HostOrDevice, " B"]:
        """Whether each request has a valid tree, and its candidates in a leaf that nobody else reads. Jittable."""
        xp = np if forest.is_host and isinstance(self.subtree_end, np.ndarray) else jnp
        tokens, leaf = self.depth.shape[1], forest.leaf
        owned = (forest.row_hi[leaf] - forest.row_lo[leaf] == 1) & (forest.length[leaf] >= tokens)
        valid = (self.subtree_end > xp.arange(tokens, dtype=np.int32)).all(1)
        return (owned & valid) | (leaf < 0)

    def check(self, forest: Forest, query_tokens: int) -> None:
        """Raise ValueError unless there are T = `query_tokens` candidates for each request of a forest, in its leaf.

        Leaves show only while the forest's arrays are NumPy arrays.
        """
        expected = (forest.request_capacity, query_tokens)
        if self.depth.shape != expected:
            raise ValueError(
                f"drafts: expected trees for [B, T] = {expected}, which the query has, got {self.depth.shape}"
            )
        fits = self.fit(forest)
        if isinstance(fits, np.ndarray) and not fits.all():
            request = int(np.argmin(fits))
            raise ValueError(
                f"drafts: expected the {query_tokens} candidates of every request in a leaf that nobody else reads, "
                f"got request {request} with {forest.length[forest.leaf[request]]} tokens in a leaf of "
                f"{(forest.row_hi - forest.row_lo)[forest.leaf[request]]} readers; call Forest.reserve and extend first"
            )


def readers_of_tokens(drafts: DraftTrees, forest: Forest, plan: Plan) -> Int[Array, "blocks S"]:
    """Return the query rows that see each token of each of the plan's blocks, first + (last + 1 << 16).

    As in `Plan.pages`, rows are counted from the first row of the stream's first tile. It is 0 for tokens past
    the end of their node.
    """
    page = Page(*jnp.moveaxis(plan.pages[..., None], 2, 0))  # [blocks, slots, 1]
    node, readers = page.node, page.readers
    token = page.token + jnp.arange(plan.slot_tokens, dtype=jnp.int32)  # [blocks, slots, slot_tokens]
    tokens, group = plan.query_tokens, plan.group
    length = forest.length[node]
    row = forest.row_lo[node]  # of the only request that reads the node, if it is the leaf of one
    request = forest.request_of_row[row]
    place = token - (length - tokens)
    drafted = (forest.leaf[request] == node) & (forest.row_hi[node] - row == 1) & (place >= 0)
    place = jnp.clip(place, 0, tokens - 1)
    # Rows of the page's readers, which are this request's as far as they are in the stream; none, where it is padding.
    lo, hi = readers & 0xFFFF, readers >> 16
    begin = row * tokens * group - _first_row_of_blocks(plan)[:, None, None]
    end = begin + drafts.subtree_end[request, place] * group
    begin += place * group
    lo, hi = (jnp.where(drafted, jnp.clip(draft, lo, hi), page) for draft, page in ((begin, lo), (end, hi)))
    return jnp.where(token < length, lo | hi << 16, 0).reshape(plan.pages.shape[0], -1)


def _first_row_of_blocks(plan: Plan) -> Int[Array, " blocks"]:
    """Return the first row of the first tile of each block's stream."""
    segment = Segment(*plan.segments.T)
    tile, lo, hi = segment.tile, segment.lo, segment.hi
    blocks = plan.pages.shape[0]
    # A stream begins where some segment begins, so the last segment that begins at or before a block has its tile.
    begins = jnp.full(blocks, -1, jnp.int32).at[jnp.where(hi > lo, lo, blocks)].set(tile, mode="drop")
    number = jnp.arange(blocks, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(begins >= 0, number, 0))
    return begins[last] * plan.tile_rows


def _ancestors(parent: Int[HostOrDevice, "B T"], xp: ModuleType) -> Bool[HostOrDevice, "B T T"]:
    """Return which candidates [.., .., a] are candidate [.., t] or above it, by repeated squaring."""
    tokens = parent.shape[1]
    number = xp.arange(tokens, dtype=np.int32)
    above = (parent[:, :, None] == number) | (number[:, None] == number)
    for _ in range((tokens - 1).bit_length()):
        steps = above.astype(np.float32)
        above = steps @ steps > 0
    return above
