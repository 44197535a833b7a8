"""Batches that run through the layers together: their tokens are rows of one array, and part where they attend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from codec_jax.attention.call import attention_by
from codec_jax.attention.pac_por import Partial, add_sinks, por
from codec_jax.forest import NO_SLOT, DraftTrees, Forest, KVPages, LatentPages, Pages
from codec_jax.nnx.parallel import ALONE, Parallel
from codec_jax.planning import Plan
from pallas_kernels import Call, Family, Scores, Window

#: A plan, or one for each of a model's windows; then, with K and V kept beside latents, as many of these.
Plans = Plan | tuple[Plan, ...]


class Scoring(NamedTuple):
    """How a layer makes weights of queries and keys."""

    window: Window | None
    scale: float | None  # None: 1 / sqrt(H)
    softcap: float | None
    sinks: Float[Array, " n"] | None  # of the heads that a device has after partials are merged


class ByHeads(NamedTuple):
    """How rows attend to K and V of every head where these are kept beside latents."""

    query: Float[Array, "B T N H"]
    pages: KVPages
    values: Callable[[Float[Array, "B T N L"]], Float[Array, "B T N V"]]  # of what attention to latents gives


#: How rows attend whose K and V are in the pages already: of queries [B, T, N, H], `Pages` and `Scoring` it makes
#: [B, T, N, H]; of `ByHeads` too, values.
Attend = Callable[..., Float[Array, "B T N H"]]


class Batch(NamedTuple):
    """The last T tokens of each request of a forest, whose room is taken already (`Forest.extend`)."""

    tokens: Int[Array, "B T"]  # with drafts they are candidates, in depth-first order
    forest: Forest
    plan: Plans
    store: Bool[Array, "B T"] | bool = True  # false for tokens that are computed but not stored
    drafts: DraftTrees | None = None
    # Where layers with windows have each page, -1 for nowhere, if their pages are not those of the pool.
    places: Int[Array, " num_pages"] | None = None


class Rows(NamedTuple):
    """What layers need to know of the tokens of all batches; [B, T] of a single one, [rows, 1] of several."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    slots: Int[Array, "B T"]


def joined(*batches: Batch) -> Rows:
    """Return the rows of all batches, those of the first one first."""
    return Rows(*(_join(parts) for parts in zip(*map(_rows_of, batches), strict=True)))


def parted(rows: Array, batches: Sequence[Batch]) -> list[Array]:
    """Return what each batch has of an array of rows, as [B, T, ...]."""
    shapes = [batch.tokens.shape for batch in batches]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
    parts = jnp.split(rows.reshape(-1, *rows.shape[2:]), ends)
    return [part.reshape(*shape, *rows.shape[2:]) for part, shape in zip(parts, shapes, strict=True)]


def attend(
    batches: Sequence[Batch],
    implementation: str | None,
    parallel: Parallel,
    query: Float[Array, "B T N H"],
    pages: Pages,
    scoring: Scoring,
    by_heads: ByHeads | None = None,
) -> Float[Array, "B T n V"]:
    """Attend in each batch over its own forest and plan; of several devices each gets its part of the heads.

    Beside latents, K and V of every head are attended in the batches that have plans for them.
    """
    plans = [plans_for(batch.plan, scoring.window) for batch in batches]
    first = [of_batch[0] for of_batch in plans]
    if by_heads is None and parallel.context == 1:
        return _partial(batches, implementation, scoring, parallel.attend, first, query, pages).out
    sinks, scoring = scoring.sinks, scoring._replace(sinks=None)
    if by_heads is None:
        merged = _partial(batches, implementation, scoring, parallel.attend, first, query, pages)
    else:
        over = partial(_partial, batches, implementation, scoring, ALONE.attend)  # values come before the merge
        attended = over(first, query, pages)
        attended = replace(attended, out=by_heads.values(attended.out))
        if any(len(of_batch) > 1 for of_batch in plans):
            kept = over([of_batch[1] if len(of_batch) > 1 else None for of_batch in plans], *by_heads[:2])
            attended = por(attended, replace(kept, out=kept.out.astype(jnp.float32)))
        merged = Partial(*parallel.merge(attended.out, attended.max, attended.sum))
    # Here, so that they count once however many devices have a part of a row.
    return merged.out if sinks is None else add_sinks(merged.out, (merged.max, merged.sum), sinks)[0]


def _partial(
    batches: Sequence[Batch],
    implementation: str | None,
    scoring: Scoring,
    run: Callable[[Family, Call, Scores], tuple[Array, Array, Array]],
    plans: Sequence[Plan | None],
    query: Float[Array, "B T N H"],
    pages: Pages,
) -> Partial:
    """Attend in the batches that have a plan, each by `run`; rows of the others see none of these pages."""
    quantisation = pages.quantisation if isinstance(pages, KVPages) else None
    key_scale, value_scale = (None, None) if quantisation is None else quantisation[:2]
    keys, partials = pages.key if isinstance(pages, KVPages) else pages, []
    for part, batch, plan in zip(parted(query, batches), batches, plans, strict=True):
        if plan is None:
            assert pages.value is not None
            partials.append(Partial.empty(part.shape[:3], pages.value.shape[3]))
            continue
        out, residuals = attention_by(
            run, part, keys, pages.value, batch.forest, plan.local(),
            drafts=batch.drafts, scale=scoring.scale, softcap=scoring.softcap, sinks=scoring.sinks,
            key_scale=key_scale, value_scale=value_scale, implementation=implementation,
        )  # fmt: skip
        partials.append(Partial(out, *residuals))
    return jax.tree.map(lambda *parts: _join(parts), *partials)


def in_places(slots: Int[Array, "*rows"], places: Int[Array, " num_pages"], page_size: int) -> Int[Array, "*rows"]:
    """Return the token slots that layers have whose pages are elsewhere; NO_SLOT for those of pages without a place."""
    page, offset = slots // page_size, slots % page_size
    place = jnp.asarray(places).at[page].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    return jnp.where(place >= 0, place * page_size + offset, NO_SLOT).astype(jnp.int32)


def check_plans(batch: Batch, windows: Sequence[Window | None], pages: Pages) -> None:
    """Raise ValueError unless there is a plan for each window, or one of latents and one of K and V.

    Plans are of all pages, but those of latents, and those of layers with windows that have some pages only.
    """
    given, apart = all_plans(batch.plan), batch.places is not None
    asked = [plan.arrays.window for plan in given]
    both = len(given) > len(windows) and isinstance(pages, LatentPages) and pages.reconstructed is not None
    parts = [asked[: len(windows)], asked[len(windows) :]] if both else [asked]
    if (
        any(len(part) != len(windows) or set(part) != set(windows) for part in parts)
        or any((plan.subset_pages is None) == (both or (apart and plan.arrays.window is not None)) for plan in given)
    ):  # fmt: skip
        raise ValueError(
            f"plan: expected {len(windows)} for the windows of the model's layers, {list(windows)}, got {len(given)} "
            f"for {asked}; make one with each of config.windows_used, of a subset where layers with windows have some "
            "pages only, and where K and V are kept beside latents two: of the rest, and after these of the pages that "
            "have them"
        )


def plans_for(plans: Plans, window: Window | None) -> list[Plan]:
    """Return the plan for a window, and that of K and V beside latents, if there is one."""
    return [plan for plan in all_plans(plans) if plan.arrays.window == window]


def all_plans(plans: Plans) -> tuple[Plan, ...]:
    """Return the plans of a model in the order of its windows: first that of the layers that see everything, if any."""
    return (plans,) if isinstance(plans, Plan) else plans


def _rows_of(batch: Batch) -> Rows:
    """Return the rows of one batch; tokens that are not in the request's own leaf are not stored."""
    forest, drafts, tokens = batch.forest, batch.drafts, jnp.asarray(batch.tokens)
    positions = forest.positions(tokens.shape[1]) if drafts is None else drafts.positions(forest)
    return Rows(tokens, jnp.asarray(positions), jnp.where(batch.store, forest.slots(tokens.shape[1]), NO_SLOT))


def _join(parts: Sequence[Array]) -> Array:
    """Return arrays [B, T, ...] as one; of several arrays each token is a row of its own."""
    if len(parts) == 1:
        return parts[0]
    return jnp.concatenate([part.reshape(-1, 1, *part.shape[2:]) for part in parts])
