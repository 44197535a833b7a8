"""Draft trees: each request brings candidate tokens that see the context, themselves and their ancestors only.

    candidates   0          in the last T slots of the request's own leaf, depth first, so that subtrees are consecutive
                / \\
               1   4        readers of 0: candidates [0, 5); of 1: [1, 4); of 2: [2, 3); of 3: [3, 4); of 4: [4, 5)
              / \\
             2   3

So a tree adds nothing to what attention knows about already: the readers of a draft token are an interval of query
rows like those of any other KV token, only a narrower one.

A pass of speculative decoding (SpecInfer, ASPLOS 2024; Medusa, ICML 2024) is: extend the forest by T, run the model
over the candidates at `DraftTrees.positions`, choose a path from a root down in each tree, and `accept` it: K and V of
the path move to the front of the T slots, and the forest grows by the tokens of the path only.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from codec_jax import checks
from codec_jax.arrays import HostOrDevice, to_int32
from codec_jax.forest.forest import Forest
from codec_jax.forest.token_slots import NO_SLOT


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
        """Build the trees from the candidate above each candidate. Jittable.

        A request with fewer candidates than T is filled up with roots: nobody else sees those, and what is computed for
        them is ignored.

        Args:
          parent: [B, T], -1 for a candidate that follows the context. Parents come before children, in any such order:
            `sort` puts what belongs to the candidates in depth-first order, in which siblings stay as they were.

        Raises ValueError for a candidate that does not come after its parent; under `jax.jit`, where nothing can be
        raised, attention with such trees returns NaN.

        >>> DraftTrees.from_parents(np.array([[-1, -1, 0, 0]])).order.tolist()
        [[0, 2, 3, 1]]
        """
        xp: ModuleType = jnp if isinstance(parent, jax.Array) else np
        parent = parent if isinstance(parent, jax.Array) else checks.host_array("parent", parent)
        if parent.ndim != 2 or not jnp.issubdtype(parent.dtype, jnp.integer):
            raise ValueError(f"parent: expected integers [B, T], got {parent.dtype} of shape {parent.shape}")
        number = xp.arange(parent.shape[1], dtype=np.int32)[None]
        valid = (parent >= -1) & (parent < number)
        if not isinstance(parent, jax.core.Tracer):
            fits = np.asarray(valid)
            checks.each("parent", np.asarray(parent), fits, "-1 for a root or a candidate that comes before its child")
        parent = xp.where(valid, parent, -1).astype(np.int32)
        seen = _ancestors(parent, xp)  # [B, T, T]: candidate t sees candidate a
        depth, size = seen.sum(2, dtype=np.int32) - 1, seen.sum(1, dtype=np.int32)
        # Depth first, before a candidate come those above it, and the subtrees of its and their earlier siblings.
        earlier = (parent[:, :, None] == parent[:, None]) & (number[:, :, None] > number[:, None])
        passed = xp.where(earlier, size[:, None], 0).sum(2, dtype=np.int32)
        place = depth + xp.where(seen, passed[:, None], 0).sum(2, dtype=np.int32)
        order = xp.argsort(place, axis=1).astype(np.int32)
        above = xp.where(parent >= 0, xp.take_along_axis(place, xp.maximum(parent, 0), axis=1), -1)
        end = xp.where(valid.all(1, keepdims=True), place + size, 0)
        return cls(order, *(xp.take_along_axis(x, order, axis=1) for x in (above, end, depth)))

    def sort(self, values: HostOrDevice) -> HostOrDevice:
        """Put one value for each candidate, as `from_parents` got them, in depth-first order. Jittable.

        Args:
          values: [B, T] or [B, T, ...].

        Raises ValueError for another shape.

        >>> DraftTrees.from_parents(np.array([[-1, -1, 0, 0]])).sort(np.array([[50, 60, 70, 80]])).tolist()
        [[50, 70, 80, 60]]
        """
        values = values if isinstance(values, jax.Array) else np.asarray(values)
        if values.shape[:2] != self.order.shape:
            raise ValueError(
                f"values: expected one for each candidate, [B, T, ...] with [B, T] = {self.order.shape}, "
                f"got shape {values.shape}"
            )
        xp = np if isinstance(values, np.ndarray) and isinstance(self.order, np.ndarray) else jnp
        return xp.take_along_axis(values, self.order.reshape(*self.order.shape, *[1] * (values.ndim - 2)), axis=1)

    def positions(self, forest: Forest) -> Int[HostOrDevice, "B T"]:
        """Return each candidate's position in its request's context, for rotary embeddings. Jittable.

        Siblings have the same position, while their slots follow each other.

        Args:
          forest: the one that holds the T candidates already.

        >>> trees = DraftTrees.from_parents(np.array([[-1, -1, 0, 0]]))
        >>> trees.positions(Forest.from_nodes([-1], [30], [0])).tolist()  # 26 tokens and 4 candidates
        [[26, 27, 27, 26]]
        """
        return forest.positions(self.depth.shape[1])[:, :1] + self.depth

    def accept(
        self, forest: Forest, path: Int[HostOrDevice, "B A"], count: Int[HostOrDevice, " B"]
    ) -> tuple[Forest, Int[Array, "B A"], Int[Array, "B A"]]:
        """Take a path in each tree, from a root down, for the request's next tokens. Jittable.

        Args:
          forest: the one from before the candidates.
          path: [B, A], places of candidates, each below the one before it; A is at most T.
          count: [B], how many places of the path each request takes.

        Returns the forest with the accepted tokens, and the slots from which and to which K and V of every layer move
        (`KVPages.move`).

        Raises ValueError for shapes that do not fit, and on the host for a path that is none or more tokens than it
        has; under `jax.jit` attention over the forest then returns NaN.

        >>> forest, pool = Forest.from_nodes([-1], [26], [0]).reserve(PagePool.create(8, np.arange(2)), 4)
        >>> trees = DraftTrees.from_parents(np.array([[-1, -1, 0, 0]]))
        >>> forest, source, target = trees.accept(forest, np.array([[0, 2]]), np.array([2]))
        >>> forest.request_length.tolist(), source.tolist(), target.tolist()
        ([28], [[26, 28]], [[26, 27]])
        """
        on_host = forest.is_host and not any(isinstance(x, jax.core.Tracer) for x in (path, count, self.parent))
        xp = np if on_host else jnp
        path, count, parent = map(xp.asarray, (path, count, self.parent))
        for name, given in (("path", path), ("count", count)):
            if given.dtype.kind not in "iu":
                raise ValueError(f"{name}: expected integers, got {given.dtype}")
        # The parent of a root is -1, and so is the count of a path that is none; places may be more than 8 bits hold.
        path, count = (to_int32(given, -(2**31)) for given in (path, count))
        (batch, tokens), shape = self.depth.shape, path.shape
        if len(shape) != 2 or shape[0] != batch or shape[1] > tokens:
            raise ValueError(f"path: expected [B, A] with B = {batch} and A of at most T = {tokens}, got shape {shape}")
        checks.shape("count", count, B=batch)
        taken = xp.arange(shape[1], dtype=np.int32)[None] < count[:, None]
        place = xp.clip(path, 0, tokens - 1)
        above = xp.concatenate([xp.full((batch, 1), -1, path.dtype), path[:, :-1]], axis=1)
        follows = (path == place) & (xp.take_along_axis(parent, place, axis=1) == above)
        fits = (count >= 0) & (count <= shape[1]) & (~taken | follows).all(1)
        if on_host and not fits.all():
            request = int(np.argmin(fits))
            raise ValueError(
                f"path: expected {count[request]} places in [0, {tokens}) from a root down, each below the one before "
                f"it, for request {request}, got {path[request].tolist()}"
            )
        slots = jnp.asarray(forest.extend(tokens).slots(tokens))
        source = jnp.take_along_axis(slots, jnp.asarray(place), axis=1)
        target = jnp.where(taken, slots[:, : shape[1]], NO_SLOT)
        return forest.extend(count if on_host else jnp.where(fits, count, -1)), source, target

    def fit(self, forest: Forest) -> Bool[HostOrDevice, " B"]:
        """Whether each request has a valid tree, and its candidates in a leaf that nobody else reads. Jittable.

        Args:
          forest: the one that holds the candidates already.

        >>> trees = DraftTrees.from_parents(np.array([[-1, 0], [-1, 0]]))
        >>> trees.fit(Forest.from_nodes([-1, 0, 0], [30, 2, 1], [1, 2])).tolist()
        [True, False]
        """
        xp = np if forest.is_host and isinstance(self.subtree_end, np.ndarray) else jnp
        tokens, leaf = self.depth.shape[1], forest.leaf
        owned = (forest.readers[leaf] == 1) & (forest.length[leaf] >= tokens)
        valid = (self.subtree_end > xp.arange(tokens, dtype=np.int32)[None]).all(1)
        return (owned & valid) | (leaf < 0)

    def check(self, forest: Forest, query_tokens: int) -> None:
        """Raise ValueError unless there are T = `query_tokens` candidates for each request of a forest, in its leaf.

        Leaves show only while the forest's arrays are NumPy arrays.

        Args:
          forest: the one that holds the candidates already.
          query_tokens: T, candidates of each request.

        >>> DraftTrees.from_parents(np.array([[-1, 0]])).check(Forest.from_nodes([-1], [30], [0]), query_tokens=2)
        """
        checks.shape("drafts", self.depth, B=forest.request_capacity, T=query_tokens)
        fits = self.fit(forest)
        if isinstance(fits, np.ndarray) and not fits.all():
            request = int(np.argmin(fits))
            raise ValueError(
                f"drafts: expected the {query_tokens} candidates of every request in a leaf that nobody else reads, "
                f"got request {request} with {forest.length[forest.leaf[request]]} tokens in a leaf of "
                f"{forest.readers[forest.leaf[request]]} readers; call Forest.reserve and extend first"
            )


def _ancestors(parent: Int[HostOrDevice, "B T"], xp: ModuleType) -> Bool[HostOrDevice, "B T T"]:
    """Return which candidates [.., .., a] are candidate [.., t] or above it, by repeated squaring."""
    tokens = parent.shape[1]
    number = xp.arange(tokens, dtype=np.int32)[None, None]  # [1, 1, T]
    above = (parent[:, :, None] == number) | (number.mT == number)
    for _ in range((tokens - 1).bit_length()):
        steps = above.astype(np.float32)
        above = steps @ steps > 0
    return above
