"""Planning again: a plan with the sizes, costs and capacities of another one, for the same compiled step."""

from __future__ import annotations

from codec_jax import checks
from codec_jax.forest import Forest
from codec_jax.planning.plan import Plan
from codec_jax.planning.planner import make_plan


def replan(plan: Plan, forest: Forest, *, steps: int = 1) -> Plan:
    """Plan for a forest that has grown or changed, such that a step which is compiled for a plan takes the new one too.

    Args:
      plan: the plan before, for a forest of the same capacities.
      forest: the forest to plan for, with NumPy arrays.
      steps: tokens that every leaf may grow by before a new plan is due, as in `make_plan`.

    Raises what `make_plan` raises, TypeError for what is no plan.

    >>> forest, pool = Forest.from_nodes([-1], [30], [0]).reserve(PagePool.create(8, np.arange(2)), 40)
    >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64, steps=16)
    >>> forest = forest.extend(16)  # after 16 tokens
    >>> replan(plan, forest, steps=16).check(forest.extend(16))
    """
    checks.instance("plan", plan, Plan)
    heads, arrays = plan.heads, plan.arrays
    return make_plan(
        forest,
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        value_head_dim=heads.value_head_dim,
        steps=steps,
        query_tokens=arrays.query_tokens,
        num_ctas=len(arrays.cta_begin),
        tile_rows=arrays.tile_rows,
        block_tokens=arrays.block_tokens,
        lanes=arrays.lanes,
        min_wide_tokens=plan.host.min_wide_tokens,
        block_capacity=plan.block_capacity,
        cost_model=plan.cost_model,
        policy=plan.host.policy,
    )
