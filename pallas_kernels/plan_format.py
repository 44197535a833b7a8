"""The format of a plan: what the planner writes, and every path that runs a plan reads.

A row's fields make a value of `Segment` or `Page`, and so do whole columns: `Segment(*segments.T)`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from pallas_kernels.heads import Heads, Window


class Segment(NamedTuple):
    """Blocks [begin, end) of one kv head for one row tile, or, in a wide segment, for two. Columns of `segments`."""

    tile0: Any
    tile1: Any  # the same in a narrow segment
    head: Any  # kv head
    begin: Any
    first_masked: Any  # blocks from there on need a mask
    end: Any
    partial0: Any  # where the result of tile0 goes
    partial1: Any
    query_start0: Any  # entry of the query [B x T] that tile0 begins with; -1 if its entries are not consecutive there
    query_start1: Any

    @property
    def is_wide(self) -> Any:
        """Whether the segment serves two tiles."""
        return self.tile0 != self.tile1


class Page(NamedTuple):
    """One page of a block. Columns of `block_pages`."""

    page_id: Any
    node: Any
    token: Any  # index of its first token within the node
    readers: Any  # rows that read it, counted over both tiles of a wide segment, as in `token_mask`; 0 fills up a block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlanArrays:
    """The part of a plan for kernels: blocks of pages, the segments that thread blocks run, and what POR merges."""

    block_pages: Int[Any, "blocks pages_per_block 4"]  # `Page`
    segments: Int[Any, "segments 10"]  # `Segment`, in the order in which thread blocks run them
    # For each thread block its first segment, the one after its last, and, to save it round trips to memory,
    # the fields of the first and the page ids of its first block.
    cta_begin: Int[Any, "num_ctas 12+pages_per_block"]
    merge_ptr: Int[Any, " tiles*K+1"]  # partials [merge_ptr[u], merge_ptr[u + 1]) are those of tile u // K, head u % K
    used_rows: Int[Any, " 1"]  # query rows from there on belong to free request slots

    heads: Heads = field(metadata={"static": True})
    request_capacity: int = field(metadata={"static": True})  # B
    query_tokens: int = field(metadata={"static": True})  # T
    window: Window | None = field(metadata={"static": True})  # how far back query tokens see
    tile_rows: int = field(metadata={"static": True})
    lanes: int = field(metadata={"static": True})  # row tiles that a segment may serve
    page_tokens: int = field(metadata={"static": True})  # of a page of a block: a page of the pool, or a part of one
    num_partials: int = field(metadata={"static": True})  # that there is room for
    # Whether a row has the same bits in any company. The mask of a block that it sees still depends on the others.
    invariant: bool = field(metadata={"static": True})

    @property
    def block_tokens(self) -> int:
        """KV tokens of a block."""
        return self.block_pages.shape[-2] * self.page_tokens

    @property
    def num_tiles(self) -> int:
        """Row tiles, those of free request slots included."""
        return -(-self.request_capacity * self.query_tokens * self.heads.group // self.tile_rows)

    @property
    def cta_ptr(self) -> Int[Any, " num_ctas+1"]:
        """Thread block c runs segments [cta_ptr[c], cta_ptr[c + 1])."""
        xp = np if isinstance(self.cta_begin, np.ndarray) else jnp
        return xp.concatenate([self.cta_begin[:, 0], self.cta_begin[-1:, 1]])

    @property
    def used_segments(self) -> Segment:
        """The columns of the segments that some thread block runs; of a plan on the host."""
        return Segment(*self.segments[: self.cta_begin[-1, 1]].T)


class ForestArrays(NamedTuple):
    """The part of a forest for kernels, int32."""

    length: Int[Any, " nodes"]
    start: Int[Any, " nodes"]
    row_of_request: Int[Any, " B"]
    request_of_row: Int[Any, " B"]
    leaf: Int[Any, " B"]  # of each request; negative for a free slot
    structure_hash: Int[Any, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlanGuard:
    """Lengths and structure for which a plan is exact; for any other forest, attention gives NaN."""

    min_length: Int[Any, " nodes"]
    max_length: Int[Any, " nodes"]
    structure_hash: Int[Any, ""]

    def holds(self, forest: ForestArrays) -> Any:
        """Whether the plan is exact for a forest, bool []. Jittable."""
        lengths = (forest.length >= self.min_length) & (forest.length <= self.max_length)
        return (forest.structure_hash == self.structure_hash) & lengths.all()
