"""The plan: which thread block computes attention between which query rows and which KV pages.

    rows     requests in depth-first order x query tokens x q heads of a kv head, cut into tiles of `tile_rows`
    streams  one per (tile, kv head): the pages of every node that some row of the tile reads, grouped into blocks;
             blocks whose every token every row sees come first and need no mask
    segments the streams cut into `num_ctas` runs of equal cost; a run is one or more segments
    merge    the segments of each tile and kv head, in order: POR combines their partials

A plan refers to node lengths by node, so it stays exact while leaves grow by up to `steps` tokens. It has three parts:
what kernels read, the guard that says whether it still holds, and what only the host keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from codec_jax import checks
from codec_jax.arrays import expand
from codec_jax.errors import PlanError
from codec_jax.forest import Forest
from codec_jax.forest.homes import Homes
from codec_jax.mesh import CONTEXT
from codec_jax.planning.cost import CostModel
from codec_jax.planning.division import Policy
from codec_jax.planning.estimate import Estimate
from pallas_kernels.heads import Heads
from pallas_kernels.plan_format import ForestArrays, PlanArrays, PlanGuard, Segment


@dataclass(frozen=True, eq=False)
class PlanHost:
    """The part of a plan for the host only. All are equal, so that costs measured anew do not recompile a step."""

    estimates: tuple[Estimate, ...]  # what blocks and segments were expected to cost, on each device
    policy: Policy  # how streams were divided
    min_wide_tokens: int | None  # that was asked for

    def __eq__(self, other: object) -> bool:
        """Take all for the same."""
        return isinstance(other, PlanHost)

    def __hash__(self) -> int:
        """Return one number for all."""
        return hash(PlanHost)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A plan for one forest and head layout, made by `make_plan`: a pytree that jitted steps take as an argument."""

    arrays: PlanArrays
    guard: PlanGuard
    page_size: int = field(metadata={"static": True})
    host: PlanHost = field(metadata={"static": True})
    #: Where pages live if they are spread over devices: then every array of `arrays` has a leading axis, the devices.
    homes: Homes | None = field(default=None, metadata={"static": True})
    #: Pages of the arrays that it is for, if it is of some of the forest's pages only: a `PageSubset`.
    subset_pages: int | None = field(default=None, metadata={"static": True})

    @property
    def heads(self) -> Heads:
        """The heads that it is for."""
        return self.arrays.heads

    @property
    def cost_model(self) -> CostModel:
        """The costs that it was balanced by."""
        return self.host.estimates[0].model

    @property
    def block_capacity(self) -> int:
        """Blocks that there is room for, which `make_plan` takes for another plan of the same shapes."""
        return self.arrays.block_pages.shape[-3]

    @property
    def num_ctas(self) -> int:
        """Thread blocks, of each device."""
        return self.arrays.cta_begin.shape[-2]

    @property
    def is_spread(self) -> bool:
        """Whether this is the plan of several devices, rather than of one or of one among them."""
        return self.arrays.used_rows.ndim > 1

    @property
    def devices(self) -> int:
        """Devices that it is the plan of."""
        return self.arrays.used_rows.shape[0] if self.is_spread else 1

    def local(self, device: int = 0) -> Plan:
        """Return the plan of one device, of the pages that live on it; a plan that is not spread as it is. Jittable.

        Inside of `jax.shard_map` that `specs` divide the plan for, a device has its own only, the first.

        Args:
          device: its place along the context axis.

        Raises ValueError for a device that there is not.

        >>> forest, pool = Forest.from_nodes([-1, 0, 0], [1000, 20, 5], [1, 2]).spread(80, devices=2)
        >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64, homes=pool.homes)
        >>> plan.local(1).is_spread
        False
        """
        if not self.is_spread:
            return self
        checks.integer("device", device, 0, below=self.devices)
        host = replace(self.host, estimates=self.host.estimates[device : device + 1])
        return replace(self, arrays=jax.tree.map(lambda x: x[device], self.arrays), host=host)

    @property
    def specs(self) -> Plan:
        """What `jax.shard_map` needs to know: a device has its part of a plan that is spread, and all of any other."""
        arrays = PartitionSpec(CONTEXT) if self.is_spread else PartitionSpec()
        return replace(
            self,
            arrays=jax.tree.map(lambda _: arrays, self.arrays),
            guard=jax.tree.map(lambda _: PartitionSpec(), self.guard),
        )

    @property
    def is_host(self) -> bool:
        """Whether the arrays are NumPy arrays."""
        return isinstance(self.guard.structure_hash, np.ndarray)

    def __repr__(self) -> str:
        """Say what it is for."""
        heads, arrays = self.heads, self.arrays
        text = (
            f"Plan({heads.num_q_heads} q heads, {heads.num_kv_heads} kv heads of {heads.head_dim}, "
            f"{arrays.request_capacity:,} requests x {arrays.query_tokens} query tokens in {arrays.num_tiles:,} tiles"
        )
        if arrays.window is not None:
            text += f", {arrays.window}"
        # A tree may be mapped to specs, shardings, or anything else.
        if not isinstance(arrays.cta_begin, np.ndarray | jax.Array):
            return f"{text}, of {arrays.cta_begin!r})"
        spread = f" on each of {self.devices} devices" if self.is_spread else ""
        return f"{text}, {self.num_ctas} thread blocks{spread}, blocks of {arrays.block_tokens} tokens)"

    def is_valid_for(self, forest: Forest) -> Bool[Array, ""]:
        """Whether the forest is the one planned for, with no more than `steps` tokens added to a leaf. Jittable.

        Args:
          forest: of the same capacities as the one planned for.

        >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[1000, 20, 5], leaf=[1, 2])
        >>> bool(make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64).is_valid_for(forest))
        True
        """
        return self.guard.holds(arrays_of(forest))

    def check(self, forest: Forest) -> None:
        """Raise PlanError, which says why, if attention over the forest by this plan gives NaN.

        Under `jax.jit` a plan that does not hold cannot raise, so it gives NaN: when you see one, call this on the
        forest and the plan that went into the step. Arrays on a device are fetched.

        Args:
          forest: the forest, as it was passed to `forest_attention`.

        >>> forest, pool = Forest.from_nodes([-1], [30], [0]).reserve(PagePool.create(8, np.arange(2)), 40)
        >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64, steps=2)
        >>> plan.check(forest.extend(2))
        >>> plan.check(forest.extend(3))
        Traceback (most recent call last):
        codec_jax.errors.PlanError: plan: expected lengths within the plan's steps, got 33 tokens in node 0, ...
        """
        self.check_shapes(forest)
        self._check_values(*jax.device_get((self.guard, forest)))

    def check_shapes(self, forest: Forest) -> None:
        """Raise PlanError for what shows without a device: capacities and page size, and all of it on the host.

        Args:
          forest: as in `check`.

        >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[1000, 20, 5], leaf=[1, 2])
        >>> make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64).check_shapes(forest)
        """
        check_capacities(self, forest)
        if forest.is_host and self.is_host:
            self._check_values(self.guard, forest)

    def _check_values(self, guard: PlanGuard, forest: Forest) -> None:
        if forest.structure_hash != guard.structure_hash:
            raise PlanError("plan: expected a plan for this forest, got one for another; make a plan for this forest")
        wrong = (forest.length < guard.min_length) | (forest.length > guard.max_length)
        if wrong.any():
            node = int(np.argmax(wrong))
            got = f"{forest.length[node]} tokens" if forest.length[node] >= 0 else "an extend that had no room"
            raise PlanError(
                f"plan: expected lengths within the plan's steps, got {got} in node {node}, "
                f"which was planned for {guard.min_length[node]} to {guard.max_length[node]}; make a new plan"
            )


def check_capacities(plan: Plan, forest: Forest) -> None:
    """Raise PlanError for a plan of a forest with other capacities, or pages of another size."""
    checks.instance("forest", forest, Forest)
    for name, planned, got in (
        ("page_size", plan.page_size, forest.page_size),
        ("request_capacity", plan.arrays.request_capacity, forest.request_capacity),
        ("node_capacity", plan.guard.min_length.shape[0], forest.node_capacity),
    ):
        if planned != got:
            raise PlanError(
                f"plan: expected a plan for {name} = {got}, which the forest has, got one for {planned}; "
                "make a plan for this forest"
            )


def arrays_of(forest: Forest) -> ForestArrays:
    """Return what a step says of a forest."""
    return ForestArrays(
        length=forest.length,
        start=forest.start,
        row_of_request=forest.row_of_request,
        request_of_row=forest.request_of_row,
        leaf=forest.leaf,
        structure_hash=forest.structure_hash,
    )


def growing_leaves(forest: Forest) -> Int[np.ndarray, " leaves"]:
    """Return the leaves that may grow: those of one reader."""
    leaf = forest.leaf[forest.leaf >= 0]
    return leaf[forest.readers[leaf] == 1]


def growing_pages(forest: Forest) -> Int[np.ndarray, " pages"]:
    """Return the pages that growing leaves have for their next tokens."""
    leaf = growing_leaves(forest)
    first = forest.length[leaf] // forest.page_size
    node, nth = expand(forest.page_count[leaf] - first)
    return forest.page_ids[forest.page_offset[leaf[node]] + first[node] + nth]


def max_lengths(forest: Forest, steps: int) -> Int[np.ndarray, " nodes"]:
    """Return the tokens that each node may come to hold: leaves of one reader grow, up to the end of their pages."""
    longest, leaf = forest.length.copy(), growing_leaves(forest)
    longest[leaf] = np.minimum(forest.length[leaf].astype(np.int64) + steps, forest.page_count[leaf] * forest.page_size)
    return longest


def begin_of_ctas(
    cta_ptr: Int[np.ndarray, " num_ctas+1"],
    segments: Int[np.ndarray, "segments 10"],
    block_pages: Int[np.ndarray, "blocks pages_per_block 4"],
) -> Int[np.ndarray, "num_ctas 12+pages_per_block"]:
    """List what each thread block begins with."""
    first = segments[np.minimum(cta_ptr[:-1], len(segments) - 1)]
    page_ids = block_pages[Segment(*first.T).begin, :, 0]
    return np.concatenate([cta_ptr[:-1, None], cta_ptr[1:, None], first, page_ids], axis=1, dtype=np.int32)
