"""Prefixes that an engine keeps until they are unpinned: the pages that they take, and what others take beside them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from codec_jax.forest import PrefixCache
from codec_jax.forest.radix_tree import common_prefix
from codec_jax.nnx.request import Request

#: The pages of each prefix; None while it is still to be computed.
Pins = Mapping[Request, Int[np.ndarray, " pages"] | None]


def pages_alone(request: Request, page_size: int) -> int:
    """Count the pages that a request takes if it shares nothing."""
    return -(-(len(request.prompt) + max(request.params.max_tokens - 1, 0)) // page_size)


def pages_beside(request: Request, pins: Pins, cache: PrefixCache, *more: Request) -> int:
    """Count the pages that a request takes beside those of its prompt that are pinned.

    Args:
      request: one that enters the cache or is there.
      pins: prefixes that are there, or will be.
      cache: of the engine.
      more: further prefixes, as if they were pinned.
    """
    pages, page_size = pages_alone(request, cache.tree.page_size), cache.tree.page_size
    if cache.windows is not None:  # of a pinned prefix these may have only what its end sees
        return pages
    shared = max((common_prefix(request.prompt, pin.prompt) for pin in (*_lasting(pins), *more)), default=0)
    return pages - shared // page_size


def pages_unpinned(pins: Pins, cache: PrefixCache, *more: Request) -> int:
    """Count the pages that are not pinned once all prefixes are there.

    Args:
      pins, cache, more: as in `pages_beside`.
    """
    unpinned, every = int(np.count_nonzero(cache.pins == 0)), [*_lasting(pins), *more]
    coming = [request for request in every if pins.get(request) is None]
    if not coming:
        return unpinned
    # What they take beside those that are there is what they add to a cache of nothing else.
    size = cache.tree.page_size
    alone = sum(pages_alone(request, size) for request in every)
    there, _ = PrefixCache.create(alone, size, len(every)).add([x.prompt for x in every if pins.get(x) is not None])
    together, _ = there.add([request.prompt for request in coming])
    return unpinned - (there.pool.num_free - together.pool.num_free)


def _lasting(pins: Pins) -> list[Request]:
    """Return what is pinned or will be, without what was aborted before."""
    return [request for request, pages in pins.items() if pages is not None or not request.finished]
