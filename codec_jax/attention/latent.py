"""Multi-head latent attention (DeepSeek-V2): one latent vector per token in the place of K and V of every head.

A page holds, for each token, its latent of L numbers and one rotated key of `rope` numbers that all heads share. Head
n's key is [latent @ up_key[:, n], rotated key], its value latent @ up_value[:, n]. Two ways to attend over such pages:

    reconstruct         K and V of every head are computed from the latents and stored; from there on everything is as
                        for any other model (the paper's way): fewer products, which many readers want
    latent_attention    up_key is applied to the query and up_value to the output, so that the latents themselves are
                        read, once for all heads: what decoding wants, which is bound by memory

Both are the same function of their arguments up to rounding. One call may do both, each on its own pages: then POR
merges what they give, exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from codec_jax import checks
from codec_jax.attention.call import forest_attention
from codec_jax.attention.pac_por import Partial, por
from codec_jax.errors import PlanError
from codec_jax.forest import Forest, KVPages, LatentPages, finite
from codec_jax.forest.latent_pages import reconstructed_dtype
from codec_jax.planning import Plan

_HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reconstructed:
    """K and V of every head for some of the pages, and the plan of these. A pytree.

    >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[96, 20, 5], leaf=[1, 2])
    >>> shared = PageSubset.of(np.arange(6), num_pages=10, capacity=6)
    >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=8, head_dim=40, value_head_dim=20, subset=shared)
    >>> latents, up_key, up_value = jnp.ones((10, 16, 1, 48)), jnp.ones((32, 8, 24)), jnp.ones((32, 8, 20))
    >>> latent.Reconstructed(latent.reconstruct(latents[shared.page_ids], up_key, up_value), plan).pages.key.shape
    (6, 16, 8, 40)
    """

    pages: KVPages  # by `reconstruct`, of the pages of a `PageSubset`
    plan: Plan  # by make_plan with num_kv_heads=N, head_dim=nope + rope, value_head_dim=V and the subset


def latent_attention(
    query_nope: Float[Array, "B T N nope"],
    query_rope: Float[Array, "B T N rope"],
    latent_pages: Float[Array, "num_pages page_size 1 L+rope"] | LatentPages,
    up_key: Float[Array, "L N nope"],
    up_value: Float[Array, "L N V"],
    forest: Forest,
    plan: Plan,
    *,
    reconstructed: Reconstructed | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Attention over latent pages, with up_key and up_value absorbed into query and output. Jittable.

    Args:
      query_nope: [B, T, N, nope], the part of the query that has no position; B and T as in `forest_attention`.
      query_rope: [B, T, N, rope], the part that is rotated, after rotation.
      latent_pages: [num_pages, page_size, 1, L + rope]: each token's latent, after its normalisation, then its rotated
        key. Every value finite. Or `LatentPages`, which may have one byte a number.
      up_key: [L, N, nope], from latents to keys.
      up_value: [L, N, V], from latents to values.
      forest: as in `forest_attention`.
      plan: from `make_plan` with num_kv_heads=1, head_dim=L + rope and value_head_dim=L; without the last one the
        rotated keys pass for values, and what they add is cut off. All N q heads of a request are rows of one kv
        head, so pages that requests share are read once if tile_rows holds N rows for each of them.
      reconstructed: K and V of some pages, which are attended in their place; `plan` is then of the subset's `rest`.
        Worth it where many requests share them (`choose_reconstructed`).
      scale: factor on the scores; defaults to 1 / sqrt(nope + rope).
      implementation: as in `forest_attention`. "mosaic" takes L = 512, rope = 64 and a plan with value_head_dim=L; it
        multiplies in the dtype of the pages, to which it rounds the query.

    Returns [B, T, N, V] in the dtype of query_nope; query, scores and sums are float32 on the way, but that the query
    has the dtype of K and V where these are reconstructed.

    Raises ValueError for shapes that do not fit, PlanError for a plan that does not.

    >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[100, 20, 5], leaf=[1, 2])
    >>> heads = {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 32 + 16, "value_head_dim": 32}
    >>> plan = make_plan(forest, **heads, tile_rows=16)
    >>> query_nope, query_rope = jnp.ones((2, 1, 8, 24)), jnp.ones((2, 1, 8, 16))
    >>> pages, up_key, up_value = jnp.ones((10, 16, 1, 48)), jnp.ones((32, 8, 24)), jnp.ones((32, 8, 20))
    >>> jax.jit(latent.latent_attention)(query_nope, query_rope, pages, up_key, up_value, forest, plan).shape
    (2, 1, 8, 20)
    """
    held = latent_pages if isinstance(latent_pages, LatentPages) else LatentPages(latent_pages)
    query_nope, query_rope = checks.array("query_nope", query_nope), checks.array("query_rope", query_rope)
    latent, num_heads, nope = _check_weights(held, up_key, up_value)
    rope = held.size - latent
    axes = checks.shape("query_nope", query_nope, B=None, T=None, N=num_heads, H=nope)
    checks.shape("query_rope", query_rope, **axes | {"H": rope})
    checks.float_dtype("query_nope", query_nope.dtype)
    checks.float_dtype("query_rope", query_rope.dtype)
    scale = 1.0 / math.sqrt(nope + rope) if scale is None else scale
    query = absorbed(query_nope, query_rope, up_key)
    attend = partial(forest_attention, forest=forest, scale=scale, implementation=implementation)
    of_latents = partial(attend, query, latent_pages, None, plan=plan)
    if reconstructed is None:
        return _values(of_latents(), up_value).astype(query_nope.dtype)
    checks.instance("reconstructed", reconstructed, Reconstructed)
    pages = reconstructed.pages
    checks.instance("plan", plan, Plan)
    if (window := reconstructed.plan.arrays.window) != plan.arrays.window:
        raise PlanError(f"reconstructed: expected a plan with window = {plan.arrays.window}, as plan has, got {window}")
    for name, each in (("plan", plan), ("reconstructed", reconstructed.plan)):
        if each.subset_pages is None:
            raise PlanError(f"{name}: expected a plan of some of the pages, got one of all; make it with subset=")
    attended, residuals = of_latents(return_residuals=True)
    left = Partial(_values(attended, up_value), *residuals)
    query = of_heads(query_nope, query_rope, pages.key.dtype)
    attended, residuals = attend(query, pages.key, pages.value, plan=reconstructed.plan, return_residuals=True)
    return por(left, Partial(attended.astype(jnp.float32), *residuals)).out.astype(query_nope.dtype)


def _values(attended: Float[Array, "B T N values"], up_value: Float[Array, "L N V"]) -> Float[Array, "B T N V"]:
    """Return the values of attention over latents. Raises PlanError where the plan's values are shorter than these."""
    latent = up_value.shape[0]
    if attended.shape[3] < latent:
        raise PlanError(
            f"plan: expected one for value_head_dim = L = {latent}, got one for {attended.shape[3]}; make it with "
            f"value_head_dim={latent}"
        )
    return expanded(attended, up_value)


def absorbed(
    query_nope: Float[Array, "B T N nope"], query_rope: Float[Array, "B T N rope"], up_key: Float[Array, "L N nope"]
) -> Float[Array, "B T N L+rope"]:
    """Return the queries of latent pages: float32, which keeps them as exact as the scores."""
    return jnp.concatenate([_product("btnd,lnd->btnl", query_nope, up_key), query_rope.astype(jnp.float32)], axis=-1)


def of_heads(
    query_nope: Float[Array, "B T N nope"], query_rope: Float[Array, "B T N rope"], dtype: DTypeLike
) -> Float[Array, "B T N nope+rope"]:
    """Return the queries of K and V that were reconstructed in a dtype, in that dtype."""
    return jnp.concatenate([_within(query_nope, dtype), _within(query_rope, dtype)], axis=-1)


def expanded(attended: Float[Array, "B T N values"], up_value: Float[Array, "L N V"]) -> Float[Array, "B T N V"]:
    """Return the values of what attention over latent pages gives, whose first L numbers are meant; float32."""
    return _product("btnl,lnv->btnv", attended[..., : up_value.shape[0]], up_value)


def reconstruct(
    latent_pages: Float[Array, "num_pages page_size 1 L+rope"],
    up_key: Float[Array, "L N nope"],
    up_value: Float[Array, "L N V"],
    dtype: DTypeLike | None = None,
) -> KVPages:
    """Return K and V of every head over the same pages, or over some of them. Jittable.

    Keys are [num_pages, page_size, N, nope + rope], values [num_pages, page_size, N, V]. Attention over them takes
    query_nope and query_rope side by side, and a plan for num_kv_heads=N, head_dim=nope + rope and value_head_dim=V.

    Args:
      latent_pages, up_key, up_value: as in `latent_attention`; of a `PageSubset`, latent_pages[subset.page_ids], and
        of `LatentPages` what `rows` gives for these.
      dtype: of K and V; defaults to float16 for bfloat16 latents, and to that of others. What is larger than its
        largest number becomes that.

    Raises ValueError for shapes and dtypes that do not fit, TypeError for `LatentPages`.

    >>> forest = Forest.from_nodes(parent=[-1, 0, 0], length=[100, 20, 5], leaf=[1, 2])
    >>> plan = make_plan(forest, num_q_heads=8, num_kv_heads=8, head_dim=24 + 16, value_head_dim=20)
    >>> pages = jax.jit(latent.reconstruct)(jnp.ones((10, 16, 1, 48)), jnp.ones((32, 8, 24)), jnp.ones((32, 8, 20)))
    >>> query = jnp.concatenate([jnp.ones((2, 1, 8, 24)), jnp.ones((2, 1, 8, 16))], -1)
    >>> jax.jit(forest_attention)(query, pages.key, pages.value, forest, plan).shape
    (2, 1, 8, 20)
    """
    if isinstance(latent_pages, LatentPages):
        raise TypeError("latent_pages: expected an array, got LatentPages; pass what their rows(page_ids) gives")
    latent, _, _ = _check_weights(LatentPages(latent_pages), up_key, up_value)
    rope = latent_pages.shape[3] - latent
    latents, rotated = latent_pages[..., 0, :latent], latent_pages[..., latent:]
    dtype = reconstructed_dtype(latent_pages.dtype) if dtype is None else dtype
    checks.float_dtype("dtype", dtype)
    key = _within(_product("psl,lnd->psnd", latents, up_key), dtype)
    value = finite(_within(_product("psl,lnv->psnv", latents, up_value), dtype), dtype)
    shared = jnp.broadcast_to(_within(rotated, dtype), (*key.shape[:3], rope))
    return KVPages(jnp.concatenate([key, shared], axis=-1), value)


def _within(x: Array, dtype: DTypeLike) -> Array:
    """Return numbers in a dtype, of those out of its range the largest that it has; NaN stays as it is."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(dtype), -largest, largest)  # bfloat16 has no bound as small as 65504


def _product(equation: str, left: Array, right: Array) -> Array:
    """Contract two arrays of any float dtype; sums are float32, and so are the numbers, or as good as that.

    Tensor cores multiply 16 bits several times as fast as 32, and products of those are exact in float32. A float32
    left side of a bfloat16 right one goes in two parts, which have all but the last 8 bits of it.
    """
    if left.dtype == jnp.float32 and right.dtype == jnp.bfloat16:
        high = jax.lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7)  # XLA may leave two conversions out
        high, low = (part.astype(right.dtype) for part in (high, left - high))
        return _product(equation, high, right) + _product(equation, low, right)
    if left.dtype == right.dtype and left.dtype.itemsize == 2:
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
    return jnp.einsum(equation, left.astype(jnp.float32), right.astype(jnp.float32), precision=_HIGHEST)


def _check_weights(pages: LatentPages, up_key: Array, up_value: Array) -> tuple[int, int, int]:
    """Return L, N and nope. Raises ValueError unless pages and weights fit together."""
    checks.shape("up_key", up_key, L=None, N=None, nope=None)
    checks.float_dtype("up_key", up_key.dtype)
    checks.float_dtype("up_value", up_value.dtype)
    latent, num_heads, nope = up_key.shape
    checks.shape("up_value", up_value, L=latent, N=num_heads, V=None)
    checks.shape("latent_pages", pages.latent, num_pages=None, page_size=None, heads=1, numbers=None)
    if pages.size < latent or (pages.quantisation is not None and pages.latent.shape[3] != latent):
        raise ValueError(f"latent_pages: expected L + rope numbers, L = {latent}, got {pages.size}")
    return latent, num_heads, nope
