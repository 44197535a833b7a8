"""Reasons why a family of kernels does not serve a call, for all that have them."""

from collections.abc import Collection

from pallas_kernels.family import Tiling
from pallas_kernels.heads import Heads, Scores
from pallas_kernels.plan_format import PlanArrays
from pallas_kernels.softmax import MASK_VALUE, MIN_ROW_MAX

#: Of scores: times this, that of a token which a row does not see is still below the least maximum of a row.
_LEAST_FACTOR = 10 * MIN_ROW_MAX / MASK_VALUE


def of_values_in_keys(heads: Heads) -> str | None:
    """Say why not, for values without pages of their own."""
    return (
        "it takes values with pages of their own, got keys that are the values as well" * heads.values_in_keys or None
    )


def of_head_sizes(heads: Heads, sizes: Collection[tuple[int, int]]) -> str | None:
    """Say why not, for heads of other sizes than these, of keys and of values."""
    if reason := of_values_in_keys(heads):
        return reason
    got = heads.head_dim, heads.value_head_dim
    if got in sizes:
        return None

    def said(keys: int, values: int) -> str:
        return f"{keys}" if keys == values else f"{keys} with values of {values}"

    ordered = sorted(sizes, key=lambda each: (each[0] != each[1], each))
    return f"it takes head sizes {', '.join(said(*each) for each in ordered)}, got {said(*got)}"


def of_scores(scores: Scores | None) -> str | None:
    """Say why not, for scores of which the greatest product would have the least weight, or masked ones some."""
    if scores is None:
        return None
    if scores.scale < 0:
        return f"it takes a scale of 0 or more, got {scores.scale}"
    if scores.log2_factor >= _LEAST_FACTOR:
        return None
    name, got = ("scale", scores.scale) if scores.softcap is None else ("softcap", scores.softcap)
    return f"it takes a {name} of {_LEAST_FACTOR:g} or more, got {got}"


def of_plan(plan: PlanArrays | None, wanted: Tiling, way_out: str = "") -> str | None:
    """Say why not, for a plan that is cut otherwise."""
    lanes = range(wanted.sums, wanted.lanes + 1)
    if plan is None or (
        plan.tile_rows == wanted.tile_rows and plan.lanes in lanes and plan.block_tokens in wanted.block_tokens
    ):
        return None
    several = " or ".join(map(str, lanes)) + " lane" + "s" * (wanted.lanes > 1)
    tokens = " or ".join(map(str, sorted(set(wanted.block_tokens))))
    return (
        f"it takes plans of {wanted.tile_rows} rows a tile, {several} and blocks of {tokens} tokens{way_out}, "
        f"got {plan.tile_rows} rows, {plan.lanes} lanes and blocks of {plan.block_tokens} tokens"
    )
