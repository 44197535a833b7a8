"""On which device each page of a pool lives, where a pool is spread over several; and where new pages are to live.

    pages      0 ...... P-1 | P ...... 2P-1 | 2P ..... 3P-1 | ...
    device          0       |       1       |       2       |

Every device computes attention over its own pages, so all should hold about as many that are read: that is their load.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int

from codec_jax.forest.depth_first import readers
from codec_jax.forest.page_subset import PageSubset
from codec_jax.forest.tree import GONE, Tree

#: The fewest pages of a node for which another device is worth its while: it costs a segment, and a merge.
MIN_RUN_PAGES = 32
_NOWHERE = -1  # where the last page of a node without pages lives


@dataclass(frozen=True)
class Homes:
    """Equal runs of pages, one for each device along the context axis."""

    devices: int
    pages: int  # of each device

    def of(self, pages: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
        """Return the device that each page lives on."""
        return pages // self.pages

    def subset(self, device: int) -> PageSubset:
        """Return the pages of a device, and where its own arrays have them."""
        return _subset(self, device)


@lru_cache(maxsize=64)
def _subset(homes: Homes, device: int) -> PageSubset:
    place = np.arange(homes.devices * homes.pages, dtype=np.int32) - device * homes.pages
    place = np.where((place >= 0) & (place < homes.pages), place, np.int32(-1))
    place.flags.writeable = False  # it is everybody's
    return PageSubset(place, homes.pages)


def choose_homes(
    homes: Homes, tree: Tree, added: Int[np.ndarray, " nodes"], free: Int[np.ndarray, " devices"]
) -> Int[np.ndarray, " added"]:
    """Choose the device of every page that nodes are to have more: node after node, each node's in order of devices.

    The largest additions choose first. Pages that nobody reads take memory but no time, so they are no load.

    Args:
      homes: where pages live.
      tree: the nodes with the pages that they have.
      added: pages that each node is to have more. Their sum must be free.
      free: free pages of each device.
    """
    home, nodes = homes.of(tree.page_ids), np.flatnonzero(added)
    nodes = nodes[np.argsort(-added[nodes], kind="stable")]
    read = (readers(tree.parent, tree.leaf) > 0) | (added > 0)
    load = np.bincount(
        home[np.repeat(read, tree.page_count) & (tree.page_ids != GONE)], minlength=homes.devices
    ).tolist()
    last_page = np.where(tree.page_count > 0, np.cumsum(tree.page_count) - 1, -1)
    last_home = np.append(home, _NOWHERE)[last_page]
    room, shares = free.tolist(), np.zeros((len(added), homes.devices), np.int64)
    for node, count, last in zip(nodes.tolist(), added[nodes].tolist(), last_home[nodes].tolist(), strict=True):
        for device, pages in _divided(count, last, load, room):
            shares[node, device] = pages
            load[device] += pages
            room[device] -= pages
    return np.repeat(np.tile(np.arange(homes.devices), len(added)), shares.reshape(-1))


def _divided(count: int, last: int, load: list[int], room: list[int]) -> list[tuple[int, int]]:
    """Divide a node's new pages, the one before them living on device `last`: (device, pages) of each part."""
    order = sorted([device for device, pages in enumerate(room) if pages], key=load.__getitem__)
    parts = min(max(count // MIN_RUN_PAGES, 1), len(load))
    if parts == 1 and last in order and load[last] < load[order[0]] + MIN_RUN_PAGES:
        order.sort(key=last.__ne__)  # it goes first
    while sum([room[device] for device in order[:parts]]) < count:
        parts += 1
    chosen = order[:parts]
    if parts == 1:
        return [(chosen[0], count)]

    def pages_below(level: int) -> list[int]:
        """Return the pages that fill each of the chosen devices up to a load, as far as it has room."""
        return [min(max(level - load[device], 0), room[device]) for device in chosen]

    level = bisect_left(range(max(load) + count), count, key=lambda level: sum(pages_below(level)))
    lower, upper = pages_below(level - 1), pages_below(level)
    rising = [device for device, a, b in zip(chosen, lower, upper, strict=True) if a < b][: count - sum(lower)]
    return [(device, pages + (device in rising)) for device, pages in zip(chosen, lower, strict=True)]
