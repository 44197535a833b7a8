"""Attention on several devices: the plan of each runs on its heads and its pages, and one POR merges across devices.

query  [B, T, N, H]                         heads by "tensor", the same along "context"
pages  [num_pages, page_size, K, H]         pages by "context", heads by "tensor"
plan   a part for each device of "context"  for the heads of one device
out    [B, T, N, V]                         heads by "tensor", merged along "context"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from codec_jax import checks
from codec_jax.attention.exchange import merge_everywhere
from codec_jax.attention.pac_por import add_sinks
from codec_jax.errors import PlanError
from codec_jax.forest import DraftTrees, Forest
from codec_jax.mesh import CONTEXT, TENSOR, axis_size
from codec_jax.planning import Plan

_WAY_OUT = (
    "pass mesh=, with a plan for the heads of one device, or call forest_attention inside of jax.shard_map, where "
    "every array is one device's"
)


def attend_on_mesh(
    mesh: Mesh,
    attend: Callable[..., Any],
    query: Array,
    key_pages: Array,
    value_pages: Array | None,
    forest: Forest,
    plan: Plan,
    drafts: DraftTrees | None,
    sinks: Array | None,
    key_scale: Array | None,
    value_scale: Array | None,
    **options: Any,
) -> Any:
    """Call `attend`, with these options, on each device, and merge. Raises ValueError for pages elsewhere."""
    arguments: Any = (query, key_pages, value_pages, plan, sinks, key_scale, value_scale, forest, drafts)
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}
    if explicit:  # where `jax.shard_map` takes only what is divided as it says

        def of_types(spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*(name if name in explicit else None for name in spec))

        specs = _specs(mesh, plan, key_scale, value_scale)
        for name, array in (("key_pages", key_pages), ("value_pages", value_pages)):
            if array is not None:
                _check_placed(name, array, of_types(specs.key_pages))
        arguments = jax.tree.map(
            lambda spec, tree: jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, of_types(spec))), tree),
            tuple(specs),
            arguments,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
    return _on_devices(*arguments, mesh=mesh, attend=attend, **options)


# Outside of a jitted step, `jax.shard_map` would run on all devices operation by operation.
@partial(jax.jit, static_argnames=("mesh", "attend", "scale", "softcap", "implementation"))
def _on_devices(
    query: Array,
    key_pages: Array,
    value_pages: Array | None,
    plan: Plan,
    sinks: Array | None,
    key_scale: Array | None,
    value_scale: Array | None,
    forest: Forest,
    drafts: DraftTrees | None,
    *,
    mesh: Mesh,
    attend: Callable[..., Any],
    **options: Any,
) -> Any:
    def local(
        query: Array, key_pages: Array, value_pages: Array | None, plan: Plan, sinks: Array | None, *others: Any
    ) -> Any:
        key_scale, value_scale, forest, drafts = others
        here = (query, key_pages, value_pages, forest, plan.local())
        given = {"drafts": drafts, "key_scale": key_scale, "value_scale": value_scale, "return_residuals": True}
        if CONTEXT not in mesh.axis_names:
            return attend(*here, sinks=sinks, **given, **options)
        out, (row_max, row_sum) = attend(*here, **given, **options)
        out, row_max, row_sum = merge_everywhere(out, row_max, row_sum, CONTEXT)
        residuals = row_max, row_sum
        return (out, residuals) if sinks is None else add_sinks(out, residuals, sinks)

    specs = _specs(mesh, plan, key_scale, value_scale)
    on_devices = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs), out_specs=(specs.query, (specs.query, specs.query))
    )
    return on_devices(query, key_pages, value_pages, plan, sinks, key_scale, value_scale, forest, drafts)


class _Specs(NamedTuple):
    """How each argument is divided among the devices of a mesh."""

    query: PartitionSpec  # and output, maximum, sum
    key_pages: PartitionSpec
    value_pages: PartitionSpec
    plan: Plan
    sinks: PartitionSpec
    key_scale: PartitionSpec
    value_scale: PartitionSpec
    forest: PartitionSpec
    drafts: PartitionSpec


def _specs(mesh: Mesh, plan: Plan, *scales: Array | None) -> _Specs:
    context, tensor = (axis if axis in mesh.axis_names else None for axis in (CONTEXT, TENSOR))
    pages = PartitionSpec(context, None, tensor, None)
    by_head = PartitionSpec(None, None, tensor)
    of_heads, of_tokens, whole = PartitionSpec(tensor), PartitionSpec(context, tensor, None), PartitionSpec()
    of_keys, of_values = (of_tokens if scale is not None and scale.ndim == 3 else of_heads for scale in scales)
    return _Specs(by_head, pages, pages, plan.specs, of_heads, of_keys, of_values, whole, whole)


def _check_placed(name: str, pages: Array, expected: PartitionSpec) -> None:
    """Raise ValueError for pages that are divided otherwise: to divide them anew moves the cache."""
    got = jax.typeof(pages).sharding.spec
    if tuple(got) != tuple(expected):
        raise ValueError(
            f"{name}: expected pages divided as {expected}, got {got}; place them once, by jax.device_put or "
            "jax.reshard"
        )


def check_divided(query: Array, key_pages: Array, value_pages: Array | None, plan: Plan) -> Array:
    """Return the query, in a form that only one device's program takes.

    Raises ValueError for arrays or a plan that are divided among devices. Where `jax.jit` divides a program by itself,
    the query's form raises it, once that is known: XLA would bring all pages to every device.
    """
    checks.instance("plan", plan, Plan)
    here = jax.sharding.get_abstract_mesh()
    if here.manual_axes and (others := [name for name in here.axis_names if name not in here.manual_axes]):
        raise ValueError(
            f"mesh: expected a jax.shard_map over all axes, got one that leaves {', '.join(map(repr, others))} to "
            "jax.jit; leave axis_names out"
        )
    for name, array in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages)):
        if array is None:
            continue
        if isinstance(array, jax.core.Tracer):
            divided = any(axis is not None for axis in jax.typeof(array).sharding.spec)
        else:
            divided = not array.is_fully_replicated
        if divided:
            spec = getattr(jax.typeof(array).sharding, "spec", None)
            raise ValueError(
                f"{name}: expected an array of one device, got one divided among several, {spec}; {_WAY_OUT}"
            )
    if plan.is_spread:
        raise ValueError(f"plan: expected one for one device, got one for {plan.devices}; {_WAY_OUT}")
    pages = plan.subset_pages if plan.homes is None else plan.homes.pages
    if pages is not None:
        checks.shape("key_pages", key_pages, num_pages=pages, page_size=None, K=None, H=None)
    return _of_one_device(query)


def check_of_all_pages(plan: Plan, *, is_partial: bool, has_sinks: bool) -> None:
    """Raise ValueError for one device's plan of some pages, but where partials are wanted, and without sinks."""
    checks.instance("plan", plan, Plan)
    if plan.is_spread or (plan.homes is None and plan.subset_pages is None):
        return
    part, merge = "some of the pages", "por"
    if plan.homes is not None:
        part, merge = f"the pages on one of {plan.homes.devices} devices", "merge_everywhere"
    if not is_partial:
        raise ValueError(
            f"return_residuals: expected True, for the plan is of {part}, got False; merge what comes out by "
            f"codec_jax.partial.{merge}"
        )
    if has_sinks:
        raise ValueError(
            f"sinks: expected None, for the plan is of {part}, got an array; add them once, by "
            f"codec_jax.partial.add_sinks, to what {merge} returns"
        )


def check_on_mesh(mesh: Mesh, query: Array, key_pages: Array, plan: Plan) -> None:
    """Raise TypeError, ValueError or PlanError for a mesh that does not divide the heads, or pages as planned."""
    checks.instance("mesh", mesh, Mesh)
    checks.instance("plan", plan, Plan)
    if plan.subset_pages is not None:
        raise PlanError("plan: expected one of all pages, got one of a subset; call it inside of jax.shard_map")
    if not {CONTEXT, TENSOR} & set(mesh.axis_names):
        raise ValueError(
            f"mesh: expected an axis {TENSOR!r} or {CONTEXT!r}, got {', '.join(map(repr, mesh.axis_names))}; "
            "make one with jax.make_mesh, with these names"
        )
    checks.shape("query", query, B=None, T=None, N=None, H=None)
    checks.shape("key_pages", key_pages, num_pages=None, page_size=None, K=None, H=None)
    tensor, context = axis_size(mesh, TENSOR), axis_size(mesh, CONTEXT)
    if key_pages.shape[2] % tensor:
        raise ValueError(
            f"mesh: expected an axis {TENSOR!r} whose size divides the {key_pages.shape[2]} kv heads, got {tensor}; "
            f"use an axis {CONTEXT!r} for the other devices, which divides the pages, or store kv heads several times"
        )
    homes = (plan.homes.devices, plan.homes.devices * plan.homes.pages) if plan.homes else (1, key_pages.shape[0])
    if homes != (context, key_pages.shape[0]) or (plan.homes is not None and not plan.is_spread):
        raise PlanError(
            f"plan: expected one for {key_pages.shape[0]} pages on the {context} devices of the mesh's axis "
            f"{CONTEXT!r}, got one for {homes[1]} on {homes[0]}; make it with homes=pool.homes, of "
            f"PagePool.create({key_pages.shape[0]}, devices={context})"
        )


# ---------------------------------------------------------------------- what `jax.jit` divides by itself

_of_one_device_p = Primitive("forest_attention_of_one_device")
_of_one_device_p.def_impl(lambda query: query)
_of_one_device_p.def_abstract_eval(lambda query: query)
batching.defvectorized(_of_one_device_p)


def _of_one_device(query: Array) -> Array:
    return _of_one_device_p.bind(jnp.asarray(query))


def _lower(context: Any, query: Any) -> Any:
    devices = getattr(context.module_context.axis_context, "num_devices", 1)
    if devices > 1:
        raise ValueError(
            f"query: expected a program of one device, got one that jax.jit divides among {devices}; {_WAY_OUT}"
        )
    return [query]


mlir.register_lowering(_of_one_device_p, _lower)
