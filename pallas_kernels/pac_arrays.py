"""Sizes and arrays that PAC has in every family: what it reads beside query, keys and values, and what it writes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import plan_guard
from pallas_kernels.family import Call
from pallas_kernels.heads import Scores, Window
from pallas_kernels.packing import TILE_ROWS, Packing


@dataclass(frozen=True)
class PacSizes:
    """All that is known when PAC is compiled, and is the same in every family."""

    packing: Packing
    batch: int
    query_tokens: int
    head_dim: int  # H of query and keys
    value_head_dim: int  # V
    page_tokens: int
    pages_per_block: int
    stages: int
    cap_factor: float | None  # from products to what tanh caps; None without a cap
    factor: float  # from scores, or from what tanh gives, to units of log2
    causal: bool
    window: Window | None
    invariant: bool  # whether blocks with a mask and without one must give a row the same bits
    token_planes: tuple[str, ...]  # what is given of each token, not of each page: readers, and positions with a window
    query_dtype: Any

    @classmethod
    def of(cls, call: Call, scores: Scores, stages: int, **others: Any) -> Any:
        """Describe a call, of which `stages` blocks are in flight; `others` are the family's own."""
        plan, (batch, tokens, _, head_dim) = call.plan, call.query.shape
        planes = ("readers_of_tokens", "positions_of_tokens")
        return cls(
            packing=Packing.of(plan.heads.group),
            batch=batch,
            query_tokens=tokens,
            head_dim=head_dim,
            value_head_dim=plan.heads.value_head_dim,
            page_tokens=plan.page_tokens,
            pages_per_block=plan.block_pages.shape[1],
            stages=stages,
            cap_factor=scores.cap_factor,
            factor=scores.log2_factor,
            causal=tokens > 1 and call.readers_of_tokens is None,
            window=plan.window,
            invariant=plan.invariant,
            token_planes=tuple(name for name in planes if getattr(call, name) is not None),
            query_dtype=call.query.dtype,
            **others,
        )

    @property
    def dtype(self) -> Any:
        """That of products."""
        return self.query_dtype

    @property
    def has_positions(self) -> bool:
        """Whether masks compare the positions of tokens with those of query tokens."""
        return self.causal or self.window is not None

    @property
    def rows_in_use(self) -> int:
        """Rows of a tile that the query has, at most; what is past them in shared memory may be anything."""
        return min(self.packing.units, self.batch * self.query_tokens * self.packing.parts) * self.packing.rows_of_unit

    @property
    def block(self) -> int:
        """KV tokens of a block."""
        return self.pages_per_block * self.page_tokens


def inputs_of(call: Call, sizes: PacSizes) -> dict[str, jax.Array]:
    """Return the small arrays that PAC reads, but for the positions of rows."""
    plan, forest, guard = call.plan, call.forest, call.guard
    inputs = {
        "request_of_row": forest.request_of_row,
        "node_length": forest.length,
        "block_pages": plan.block_pages,
        "segments": plan.segments,
        "cta_begin": plan.cta_begin,
        "min_length": guard.min_length,
        "max_length": guard.max_length,
        "structure_hash": forest.structure_hash.reshape(1),
        "planned_hash": guard.structure_hash.reshape(1),
        "merge_ptr": plan.merge_ptr,
        "used_rows": plan.used_rows,
    }
    inputs |= {name: getattr(call, name) for name in sizes.token_planes}  # [blocks, block]
    if sizes.has_positions and not sizes.token_planes:
        inputs["node_start"] = forest.start
    return inputs


def outputs_of(call: Call, columns: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the partials, of so many columns, and what each thread block found of the plan's guard."""
    partials, num_ctas = call.plan.num_partials, call.plan.cta_begin.shape[0]
    groups = -(-num_ctas // plan_guard.GROUP)
    return {
        "out": jax.ShapeDtypeStruct((partials, TILE_ROWS, columns), jnp.float32),
        "max": jax.ShapeDtypeStruct((partials, TILE_ROWS), jnp.float32),
        "sum": jax.ShapeDtypeStruct((partials, TILE_ROWS), jnp.float32),
        "violations": jax.ShapeDtypeStruct((groups * plan_guard.GROUP,), jnp.int32),
    }
