"""Verify trees of guesses in one pass of the model, so that the tokens are distributed as the model says.

    verify   one pass over prompt (read once for all its samples), answer and tree
    accept   a guess x, drawn from q, where the model has p: keep x with probability min(1, p(x) / q(x)); else go on to
             its next sibling with p <- the positive part of p - q, and q <- q without x, both normalised; where q
             gives x nothing, go on at once
    compact  K and V of the path move to the front of the tree's slots, and the rest of the tree is forgotten

However bad the guesses are, the tokens are distributed as those that the model samples one by one. The rule is that of
Leviathan et al. (ICML 2023), for trees that of SpecInfer (ASPLOS 2024, algorithm 2), and for siblings drawn without
replacement that of recursive rejection sampling (Jeon et al., 2024).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from codec_jax import DraftTrees, Forest, KVPages
from codec_jax.nnx import Decoder
from codec_jax.nnx.batch import Plans
from codec_jax.nnx.sampling import request_keys

SUPPORT = 8  # tokens to which guesses give any probability


class Drafts(NamedTuple):
    """Trees of T candidates in the order of drawing, and what the children of each were drawn from."""

    parent: Int[np.ndarray, "B T"]  # -1 for the root, which is no guess, and where a tree is smaller
    tokens: Int[np.ndarray, "B T"]
    ids: Int[np.ndarray, "B T support"]
    probability: Float[np.ndarray, "B T support"]  # of `ids`; all 0 for a candidate without children

    @classmethod
    def empty(cls, batch: int, tokens: int) -> Drafts:
        """Return trees without any candidates."""
        drawn = (batch, tokens, SUPPORT)
        parent = np.full((batch, tokens), -1, np.int32)
        return cls(parent, np.zeros_like(parent), np.zeros(drawn, np.int32), np.zeros(drawn, np.float32))


def accept(
    key: Key[Array, ""],
    logits: Float[Array, "T V"],
    parent: Int[Array, " T"],
    tokens: Int[Array, " T"],
    ids: Int[Array, "T support"],
    probability: Float[Array, "T support"],
    temperature: Float[Array, ""],
) -> tuple[Bool[Array, " T"], Int[Array, ""]]:
    """Decide which candidates of one tree are kept, the root among them, and draw the token that follows them.

    All are in depth-first order: parent and token of each candidate, the model's logits of what follows it, and the
    distribution that its children were drawn from. Returns the path that is kept, and a token.
    """
    key_of_tests, key_of_next = jax.random.split(key)
    chance = jax.random.uniform(key_of_tests, tokens.shape)
    likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    model = jnp.where(temperature == 0.0, likeliest, jax.nn.softmax(logits / jnp.maximum(temperature, 1e-6)))
    draft = jax.vmap(lambda ids, probability: jnp.zeros(logits.shape[-1]).at[ids].add(probability))(ids, probability)
    tiny = jnp.finfo(draft.dtype).tiny
    draft = jnp.where(draft >= tiny, draft, 0.0)  # some devices take smaller numbers for 0, and some do not

    def test(carry: tuple, place: Array) -> tuple:
        """Test the candidate if it is a child of the last one that was kept; its earlier siblings were not."""
        last, p, q = carry
        token = tokens[place]
        # A guess to which q gives nothing says nothing about the others. At temperature 0 any guess may be right.
        tested = (parent[place] == last) & ((q[token] > 0.0) | (temperature == 0.0))
        kept = tested & (chance[place] * q[token] < p[token])
        others, left = jnp.maximum(p - q, 0.0), q.at[token].set(0.0)
        refused_p = jnp.where(others.sum() > 0, others / jnp.maximum(others.sum(), 1e-30), p)
        refused_q = left / jnp.maximum(left.sum(), tiny)
        p = jnp.where(kept, model[place], jnp.where(tested, refused_p, p))
        q = jnp.where(kept, draft[place], jnp.where(tested, refused_q, q))
        return (jnp.where(kept, place, last), p, q), kept

    places = jnp.arange(1, tokens.shape[0], dtype=jnp.int32)
    (_, p, _), kept = lax.scan(test, (jnp.int32(0), model[0], draft[0]), places)
    following = jax.random.categorical(key_of_next, jnp.log(p)).astype(jnp.int32)
    return jnp.concatenate([jnp.ones(1, bool), kept]), following


def verify(
    model: Decoder,
    depth: int,
    cache: tuple[KVPages, ...],
    forest: Forest,
    plan: Plans,
    drafts: Drafts,
    key: Key[Array, ""],
    temperature: Float[Array, ""],
) -> tuple[tuple[KVPages, ...], Int[Array, "B A"], Int[Array, " B"], Int[Array, " B"]]:
    """Run one pass: return the cache, the tokens kept in each tree of `depth` levels, their count, and the next one."""
    trees = DraftTrees.from_parents(drafts.parent)
    tokens, ids, probability = (trees.sort(x) for x in drafts[1:])
    hidden, cache = model.decode(tokens, cache, forest.extend(tokens.shape[1]), plan, drafts=trees)
    keys = request_keys(key, jnp.arange(tokens.shape[0], dtype=jnp.int32), forest.request_length)
    kept, following = jax.vmap(partial(accept, temperature=temperature))(
        keys, model.logits(hidden), trees.parent, tokens, ids, probability
    )
    kept &= forest.active[:, None]
    path = jnp.argsort(~kept, axis=1)[:, :depth].astype(jnp.int32)  # the places that are kept, in order, then others
    count = kept.sum(axis=1, dtype=jnp.int32)
    _, source, target = trees.accept(forest, path, count)
    cache = tuple(pages.move(source, target) for pages in cache)
    return cache, jnp.take_along_axis(tokens, path, axis=1), count, following
