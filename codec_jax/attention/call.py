"""Attention of every request over its path in the forest, each shared token read once per row tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from codec_jax import checks
from codec_jax.attention.backends import check_name, choose
from codec_jax.attention.draft_mask import positions_of_tokens, readers_of_tokens
from codec_jax.attention.on_mesh import attend_on_mesh, check_divided, check_of_all_pages, check_on_mesh
from codec_jax.errors import PlanError
from codec_jax.forest import ONE_BYTE, DraftTrees, Forest, LatentPages
from codec_jax.mesh import TENSOR, axis_size
from codec_jax.planning import Plan, arrays_of
from pallas_kernels import Call, Family, Heads, Scores

Residuals = tuple[Float[Array, "B T N"], Float[Array, "B T N"]]


@overload
def forest_attention(
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"] | LatentPages,
    value_pages: Float[Array, "num_pages page_size K V"] | None,
    forest: Forest,
    plan: Plan,
    *,
    drafts: DraftTrees | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    key_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    value_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    implementation: str | None = None,
    return_residuals: Literal[False] = False,
    mesh: Mesh | None = None,
) -> Float[Array, "B T N V"]: ...


@overload
def forest_attention(
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"] | LatentPages,
    value_pages: Float[Array, "num_pages page_size K V"] | None,
    forest: Forest,
    plan: Plan,
    *,
    drafts: DraftTrees | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    key_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    value_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    implementation: str | None = None,
    return_residuals: Literal[True],
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T N V"], Residuals]: ...


def forest_attention(
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"] | LatentPages,
    value_pages: Float[Array, "num_pages page_size K V"] | None,
    forest: Forest,
    plan: Plan,
    *,
    drafts: DraftTrees | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    key_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    value_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    implementation: str | None = None,
    return_residuals: bool = False,
    mesh: Mesh | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Residuals]:
    """Attention of each request's last T tokens over its whole context. Jittable.

    Args:
      query: [B, T, N, H] in the caller's request order, B = forest.request_capacity; float32, bfloat16 or float16.
        The T tokens are the last T of each request's context (their K and V are in the pages already) and see each
        other causally, or as `drafts` says.
      key_pages: [num_pages, page_size, K, H], N a multiple of K; or `LatentPages`, which may have one byte a number.
      value_pages: [num_pages, page_size, K, V]; every value finite, also where nobody reads (`KVPages` sees to that).
        None where the values are the first V numbers of the keys, as in latent attention; V is the plan's
        value_head_dim.
      forest: the paths, in lengths that include the query tokens.
      plan: from `make_plan` for this forest, head layout and T; with a mesh, for the heads of one device. It says how
        far back query tokens see (`Window`).
      drafts: trees of the T tokens, which are candidates then, in depth-first order and in the request's own leaf: each
        sees the context before them, itself and its ancestors.
      scale: factor on the scores; defaults to 1 / sqrt(H).
      softcap: bound on the scaled scores s, which become softcap * tanh(s / softcap); None leaves them.
      sinks: [N], float32, bfloat16 or float16: one more logit in the softmax of each q head, neither scaled nor capped,
        that no value belongs to; None for none.
      key_scale: [K], dtype as of sinks: factor on the keys of each kv head, for pages of one byte a number
        (float8_e4m3fn or float8_e5m2; `KVPages.quantisation`); or [num_pages, K, page_size], of each token and kv head.
        None for 1.
      value_scale: the same for values. Of each token they are at most 32, and finite also where nobody reads.
      implementation: "mosaic" (kernels for Hopper GPUs: bfloat16 or float16, pages of these if H = V is 64, 256, 512 or
        a multiple of 8 from 72 to 128, or H = 192 and V = 128, of one byte a number if H = V is 64, 128 or 256;
        and latents, H = 576, V = 512, K = 1 and value_pages None, of 16 bits or `LatentPages`),
        "ampere" (kernels for every NVIDIA GPU since Ampere: bfloat16 or float16, H and V multiples of 8 up to 256; on
        Hopper for plans that are cut as `AMPERE.tiling` says), "xla" (any device), or None for the fastest of them that
        this device and these shapes allow; where that is "xla" on a GPU, a warning says why.
      return_residuals: also return the row maximum of the scores, scaled and capped, and the row sum of exp(score -
        maximum), float32 [B, T, N], so that further partials can be merged (`codec_jax.partial.por`). "mosaic" and
        "ampere" may return in the maximum's place a number that is up to 7 less, and the sum to it. Sinks are in both,
        so partials that are merged later must not add them again.
      mesh: the devices that query and pages are divided among: along an axis "tensor" by their heads, and along an axis
        "context" the pages, of which each device has an equal run (`PagePool.create(devices=...)`). The output is
        divided by heads. Inside of `jax.shard_map` there is no need for it: everything is one device's there, and a
        plan for several is taken as `plan.local()`, whose partials `codec_jax.partial.merge_everywhere` merges.

    Returns [B, T, N, V] in the query's dtype; rows of free request slots are 0. Where lengths show on the device
    only, a plan for another forest or past its steps gives NaN everywhere, and so do drafts in a leaf that others read:
    `plan.check(forest)` and `drafts.check(forest, T)` say why. Pages past num_pages, of a forest of another pool, are
    noticed on the host only.

    Raises ValueError for shapes, dtypes, names or a mesh that do not fit, and for arrays that are divided among devices
    without a mesh; PlanError for a plan that does not fit, NotImplementedError where JAX asks for a derivative.

    >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[1000, 20, 5], leaf=[1, 2])
    >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=2, head_dim=64)
    >>> pages = jnp.ones((66, 16, 2, 64))
    >>> jax.jit(forest_attention)(jnp.ones((2, 1, 8, 64)), pages, pages, forest, plan).shape
    (2, 1, 8, 64)

    Source: CoDec, section 4 (doi 10.1145/3802028).
    """
    if mesh is None:
        check_of_all_pages(plan, is_partial=return_residuals, has_sinks=sinks is not None)
    out, residuals = attention_by(
        _attend, query, key_pages, value_pages, forest, plan, drafts=drafts, scale=scale, softcap=softcap, sinks=sinks,
        key_scale=key_scale, value_scale=value_scale, implementation=implementation, mesh=mesh,
    )  # fmt: skip
    return (out, residuals) if return_residuals else out


def attention_by(
    run: Callable[[Family, Call, Scores], tuple[Array, Array, Array]],
    query: Float[Array, "B T N H"],
    key_pages: Float[Array, "num_pages page_size K H"] | LatentPages,
    value_pages: Float[Array, "num_pages page_size K V"] | None,
    forest: Forest,
    plan: Plan,
    *,
    drafts: DraftTrees | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    key_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    value_scale: Float[Array, " K"] | Float[Array, "num_pages K page_size"] | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T n V"], Residuals]:
    """Attention as `forest_attention` describes it, with whatever runs a call on one device; the residuals, too.

    Args:
      run: called with the backend, the call and the scores; returns what `Family.attend` does, perhaps of fewer heads.
      query, key_pages, value_pages, forest, plan, drafts, scale, softcap, sinks, key_scale, value_scale,
        implementation, mesh: as in `forest_attention`; plans of some pages are taken, and with sinks if these are all
        that a row sees.
    """
    if isinstance(key_pages, LatentPages):
        keys, quantisation = key_pages.latent, key_pages.quantisation
    else:
        keys, quantisation = key_pages, None
    optional = {"value_pages": value_pages, "sinks": sinks, "key_scale": key_scale, "value_scale": value_scale}
    given: tuple[Any, ...] = checks.array("query", query), checks.array("key_pages", keys)
    given += tuple(None if x is None else checks.array(name, x) for name, x in optional.items())
    given += (quantisation,)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
    given = _without_derivative(*given) if traced else given
    query, keys, value_pages, sinks, key_scale, value_scale, quantisation = given
    if sinks is not None:
        _check_sinks(sinks, query)
    dtype = query.dtype
    for name, factor in (("key_scale", key_scale), ("value_scale", value_scale)):
        if factor is not None:
            _check_scale(name, factor, keys, of_latents=quantisation is not None)
    if (key_scale is not None and key_scale.ndim == 3) != (value_scale is not None and value_scale.ndim == 3):
        raise ValueError("key_scale, value_scale: expected scales of each token for both or for none, got one of them")
    if quantisation is not None:
        query = query.astype(jnp.float32)  # which products with what latents mean do not round
    scale = None if scale is None else checks.number("scale", scale)
    check_softcap(softcap)
    if mesh is not None:
        if quantisation is not None:
            raise ValueError("mesh: expected None for latents of one byte a number; call it inside of jax.shard_map")
        check_on_mesh(mesh, query, keys, plan)
        # Forest, plan and drafts may still be on the host here; in the program of the devices they are not.
        _check(query, keys, value_pages, forest, plan, drafts, axis_size(mesh, TENSOR))
        check_name(implementation)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "implementation": implementation}
        arrays = (query, keys, value_pages, forest, plan, drafts, sinks, key_scale, value_scale)
        return attend_on_mesh(mesh, forest_attention, *arrays, **options)
    query = check_divided(query, keys, value_pages, plan)
    rope = 0 if quantisation is None else quantisation.rotated.shape[3]
    heads = _check(query, keys, value_pages, forest, plan, drafts, rope=rope)
    scores = Scores(1.0 / math.sqrt(heads.head_dim) if scale is None else scale, softcap)
    backend = choose(implementation, heads, scores, plan.arrays)
    forest, plan, drafts = jax.tree.map(jnp.asarray, (forest, plan, drafts))

    guard, window, readers, positions = plan.guard, plan.arrays.window, None, None
    position = forest.positions(query.shape[1])
    if drafts is not None:
        position, readers = drafts.positions(forest), readers_of_tokens(drafts, forest, plan.arrays)
        positions = None if window is None else positions_of_tokens(drafts, forest, plan.arrays)
        # Where only the device knows that the drafts do not fit, the plan is taken for one that does not.
        structure_hash = jnp.where(drafts.fit(forest).all(), guard.structure_hash, ~forest.structure_hash)
        guard = replace(guard, structure_hash=structure_hash)
    # Long pages are seen as several short ones.
    beside = (None, None) if quantisation is None else quantisation[:2]
    short = plan.arrays.page_tokens
    keys, value_pages, *beside = jax.tree.map(
        lambda pages: pages.reshape(pages.shape[0] * pages.shape[1] // short, short, *pages.shape[2:]),
        (keys, value_pages, *beside),
    )
    planned = arrays_of(forest), plan.arrays, guard, readers, positions
    call = Call(query, keys, value_pages, position, *planned, *beside)
    call = _with_scales(call, *_in_float32(key_scale, value_scale))._replace(sinks=sinks)
    out, row_max, row_sum = run(backend, call, scores)
    return out.astype(dtype), (row_max, row_sum)


def _attend(family: Family, call: Call, scores: Scores) -> tuple[Array, Array, Array]:
    return family.attend(call, scores)


def _in_float32(*scales: Array | None) -> tuple[Array | None, ...]:
    return tuple(None if scale is None else scale.astype(jnp.float32) for scale in scales)


def _with_scales(call: Call, key_scale: Array | None, value_scale: Array | None) -> Call:
    """Give a call the scales of heads, or of tokens and heads."""
    if key_scale is not None and key_scale.ndim == 3:
        return call._replace(key_scale_of_tokens=key_scale, value_scale_of_tokens=value_scale)
    return call._replace(key_scale=key_scale, value_scale=value_scale)


@jax.custom_jvp
def _without_derivative(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays that JAX must not differentiate with respect to, or it would stumble over a loop far from here."""
    return arrays


@_without_derivative.defjvp
def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "forest_attention: expected no derivative, it is for decoding; train with jax.nn.dot_product_attention, or "
        "wrap what goes in in jax.lax.stop_gradient"
    )


def check_softcap(softcap: Any) -> None:
    """Raise ValueError for what is neither a positive number nor None."""
    if softcap is not None and checks.number("softcap", softcap) <= 0:
        raise ValueError(f"softcap: expected a positive number or None, got {softcap}")


def _check_sinks(sinks: Array, query: Array) -> None:
    """Raise ValueError unless sinks are numbers for the q heads."""
    heads = checks.shape("query", query, B=None, T=None, N=None, H=None)["N"]
    checks.shape("sinks", sinks, N=heads)
    checks.float_dtype("sinks", sinks.dtype)


def _check_scale(name: str, scale: Array, key_pages: Array, *, of_latents: bool) -> None:
    """Raise ValueError unless a scale is a number for each kv head, or token and head, of pages that have scales."""
    if of_latents:
        raise ValueError(f"{name}: expected None for `LatentPages`, which have their scales with them")
    checks.shape("key_pages", key_pages, num_pages=None, page_size=None, K=None, H=None)
    if key_pages.dtype.itemsize > 1:
        raise ValueError(f"{name}: expected None for pages of {key_pages.dtype}; scales are for one byte a number")
    num_pages, page_size, heads, _ = key_pages.shape
    by_token = {"num_pages": num_pages, "K": heads, "page_size": page_size}
    checks.shape(name, scale, **(by_token if scale.ndim == 3 else {"K": heads}))
    checks.float_dtype(name, scale.dtype)


def _check(
    query: Array,
    key_pages: Array,
    value_pages: Array | None,
    forest: Forest,
    plan: Plan,
    drafts: DraftTrees | None,
    tensor: int = 1,
    rope: int = 0,
) -> Heads:
    """Describe the heads. Raises ValueError or PlanError for arguments that do not fit, as far as the host can see.

    The plan is for the heads of one of `tensor` devices that divide them. So many numbers of keys have other pages.
    """
    checks.instance("forest", forest, Forest)
    checks.instance("plan", plan, Plan)
    checks.shape("query", query, B=forest.request_capacity, T=None, N=None, H=None)
    sizes = {"num_pages": None, "page_size": forest.page_size, "K": None, "H": query.shape[3] - rope}
    pages = checks.shape("key_pages", key_pages, **sizes)
    checks.float_dtype("query", query.dtype)
    checks.float_dtype("key_pages", key_pages.dtype, *ONE_BYTE)
    got = (query.shape[1], query.shape[2] // tensor, key_pages.shape[2] // tensor, query.shape[3])
    planned = (plan.arrays.query_tokens, *plan.heads.shape[:3])
    if got != planned:
        raise PlanError(
            f"plan: expected one for query_tokens, num_q_heads, num_kv_heads, head_dim = {got}, "
            f"which query and key_pages have{' on each device' * (tensor > 1)}, got one for {planned}"
        )
    heads = replace(
        Heads.of(query, key_pages, key_pages),
        value_head_dim=plan.heads.value_head_dim,
        values_in_keys=value_pages is None,
        rotated_beside=rope,
    )
    if value_pages is None:
        if heads.value_head_dim > heads.head_dim:
            raise ValueError(
                f"value_pages: expected [num_pages, page_size, K, {heads.value_head_dim}], which the plan's values "
                f"have, got None, and keys of {heads.head_dim} numbers cannot hold them"
            )
    else:
        checks.shape("value_pages", value_pages, **pages | {"H": plan.heads.value_head_dim})
        if value_pages.dtype != key_pages.dtype:
            raise ValueError(f"value_pages: expected {key_pages.dtype} like key_pages, got {value_pages.dtype}")
    plan.check_shapes(forest)
    if (
        plan.homes is None
        and plan.subset_pages is None
        and forest.is_host
        and forest.used_pages.size
        and np.max(forest.used_pages) >= key_pages.shape[0]
    ):
        raise ValueError(
            f"key_pages: expected at least {np.max(forest.used_pages) + 1} pages, which the forest refers to, "
            f"got {key_pages.shape[0]}"
        )
    if drafts is not None:
        checks.instance("drafts", drafts, DraftTrees)
        drafts.check(forest, query.shape[1])
    return heads
