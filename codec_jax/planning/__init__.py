"""Plans of the work, how they are made and made again, and the costs that they are balanced by."""

from codec_jax.planning.cost import CostModel
from codec_jax.planning.plan import Plan, arrays_of
from codec_jax.planning.planner import make_plan, pages_of_block
from codec_jax.planning.replan import replan
from codec_jax.planning.tiling import default_tiling

__all__ = ["CostModel", "Plan", "arrays_of", "default_tiling", "make_plan", "pages_of_block", "replan"]
