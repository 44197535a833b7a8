"""Planning again: a plan with the sizes, costs and capacities of another one, for the same compiled step."""

from __future__ import annotations

from typing import Any

from codec_jax import checks
from codec_jax.forest import Forest, PageSubset
from codec_jax.planning.plan import Plan, check_capacities
from codec_jax.planning.planner import make_plan


def replan(plan: Plan, forest: Forest, *, steps: int = 1, subset: PageSubset | None = None) -> Plan:
    """Plan for a forest that has grown or changed, such that a step which is compiled for a plan takes the new one too.

    Args:
      plan: the plan before, for a forest of the same capacities.
      forest: the forest to plan for, with NumPy arrays.
      steps: tokens that every leaf may grow by before a new plan is due, as in `make_plan`.
      subset: the pages to plan for, if the plan before was of a subset of the same capacity.

    Raises what `make_plan` raises, TypeError for what is no plan, ValueError for a subset of another capacity, and
    PlanError for a forest of others.

    >>> forest, pool = Forest.from_nodes([-1], [30], [0]).reserve(PagePool.create(8, np.arange(2)), 40)
    >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64, steps=16)
    >>> forest = forest.extend(16)  # after 16 tokens
    >>> replan(plan, forest, steps=16).check(forest.extend(16))
    """
    checks.instance("plan", plan, Plan)
    check_capacities(plan, forest)
    if subset is not None:
        checks.instance("subset", subset, PageSubset)
    if (got := None if subset is None else subset.capacity) != plan.subset_pages:
        raise ValueError(f"subset: expected one of capacity {plan.subset_pages}, as the plan before, got {got}")
    names = ("num_q_heads", "num_kv_heads", "head_dim", "value_head_dim")
    same: dict[str, Any] = dict(zip(names, plan.heads.shape, strict=True))
    same |= {name: getattr(plan.arrays, name) for name in ("query_tokens", "tile_rows", "block_tokens", "lanes")}
    same |= {"kv_dtype": plan.heads.kv_dtype, "window": plan.arrays.window, "num_ctas": plan.num_ctas}
    same |= {"block_capacity": plan.block_capacity, "homes": plan.homes, "subset": subset}
    same |= {"segment_capacity": plan.arrays.segments.shape[-2]}
    same |= {"cost_model": plan.cost_model, "policy": plan.host.policy, "min_wide_tokens": plan.host.min_wide_tokens}
    return make_plan(forest, steps=steps, **same)
