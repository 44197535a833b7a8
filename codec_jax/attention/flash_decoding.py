"""FlashDecoding's call over a paged cache: rows of the block table that list the same pages read them once.

`flash_attn_with_kvcache` takes what the function of that name in flash-attn takes. Which rows share which pages is
found on the host and kept, together with the plan, in `plans`: the layers of a model, and the steps of a generation
while the same pages are listed, share one plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from codec_jax import checks
from codec_jax.arrays import HostOrDevice, Integers
from codec_jax.attention.backends import check_name
from codec_jax.attention.call import check_softcap, forest_attention
from codec_jax.attention.plan_cache import CallLayout, PlanCache
from codec_jax.forest import ONE_BYTE, Forest
from codec_jax.planning import Plan
from pallas_kernels import Window
from pallas_kernels.token_mask import MAX_ROWS

#: The plans of `flash_attn_with_kvcache`: `plans.info()` counts, `plans.clear()` frees their memory.
plans = PlanCache()

#: Arguments of flash-attn 2 and 3 that are not honoured, and the way out.
_WAYS_OUT = {
    "k, v, cu_seqlens_k_new": "arrays cannot be written in place; KVPages.write the new tokens first and count them in "
    "cache_seqlens",
    "rotary_cos, rotary_sin, rotary_seqlens": "rotate q, and k before it is written to the cache",
    "q_descale": "q is not quantised; multiply it",
    "cache_leftpad": "leave padding pages out of block_table, and start each context at the start of a page",
    "page_table": "pass it as block_table",
    "cu_seqlens_q": "pad q to [batch, seqlen_q, nheads, headdim]",
    "qv": "use codec_jax.latent for values that are part of the keys",
    "alibi_slopes": "not supported; use flash-attn for such layers",
    "s_aux, learnable_sink": "pass it as sinks",
}
_REFUSED = {name: way_out for names, way_out in _WAYS_OUT.items() for name in names.split(", ")}
#: More than any context has, so that a bound of as many is none.
_MOST_TOKENS = 2**30 - 1
#: Values that ask for nothing, beside None.
_NEUTRAL = {"cache_leftpad": 0, "q_descale": 1}
#: Arguments that say how to compute, not what: the plan decides that, so any value will do.
_HINTS = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "max_seqlen_q", "rotary_interleaved"}


@overload
def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, *, return_softmax_lse: Literal[False] = False, **options: Any
) -> Float[Array, "B T N H"]: ...


@overload
def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, *, return_softmax_lse: Literal[True], **options: Any
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]: ...


def flash_attn_with_kvcache(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "num_blocks page_block_size K H"],
    v_cache: Float[Array, "num_blocks page_block_size K H"],
    k: None = None,
    v: None = None,
    *,
    cache_seqlens: int | Integers | Array | None = None,
    cache_batch_idx: Integers | Array | None = None,
    block_table: Int[np.ndarray, "B max_blocks"] | Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    sinks: Float[Array, " N"] | None = None,
    k_descale: Float[Array, "B K"] | float | None = None,
    v_descale: Float[Array, "B K"] | float | None = None,
    return_softmax_lse: bool = False,
    implementation: str | None = None,
    **others: Any,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Attention of each row's query tokens over its cache, as flash-attn's function of this name computes it.

    Args:
      q: [batch, seqlen_q, nheads, headdim]; float32, bfloat16 or float16.
      k_cache: [num_blocks, page_block_size, nheads_k, headdim] with a block_table, page_block_size a multiple of 8;
        [batch_cache, seqlen_cache, nheads_k, headdim] without, seqlen_cache a multiple of 8. Every value finite.
      v_cache: like k_cache.
      k, v: must be None: JAX arrays cannot be written in place, so new K and V are written before.
      cache_seqlens: tokens in each row's cache, those of q included: an integer, or [batch]; defaults to all that
        the table or the cache holds. A row of length 0 gives 0.
      cache_batch_idx: [batch], the row of a cache without block_table that each row reads; defaults to its own.
      block_table: [batch, max_blocks], the blocks of each row in order. Entries past a row's length may hold anything.
        NumPy arrays are best: an array on a device is fetched from it, once.
      softmax_scale: factor on the scores; defaults to 1 / sqrt(headdim).
      causal: whether query token t sees only the keys up to seqlen_k - seqlen_q + t; if not, all of the row's.
      window_size: keys that a query token sees to the left of its own and to the right of it, -1 for all. On the right
        it is 0, which is causal, or -1; with seqlen_q > 1 a bound on the left takes causal.
      attention_chunk: where query tokens see their chunk only, its tokens; 0 where they do not. As a bound on the left.
      softcap: bound on the scaled scores s, which become softcap * tanh(s / softcap); 0 leaves them.
      sinks: [nheads], one more logit in the softmax of each q head that no value belongs to. Forks of flash-attn have
        it as `s_aux` or `learnable_sink`.
      k_descale: [batch, nheads_k], or a number, factors on the keys of a cache of one byte a number (float8_e4m3fn or
        float8_e5m2); q stays as it is. Rows that share blocks share what these hold, not the factors.
      v_descale: the same for values.
      return_softmax_lse: also return the natural logarithm of the sum of exponentials, float32
        [batch, nheads, seqlen_q], sinks included; without them -inf for what sees no key, as in flash-attn 3
        (flash-attn 2 says +inf).
      implementation: as in `forest_attention`.
      others: `num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`, `max_seqlen_q` and `rotary_interleaved` say
        how to compute and are ignored. All further arguments of flash-attn 2 and 3 must have their default.

    q and the caches may be traced, but a traced call keeps the table and lengths that it was traced with. Forest and
    plan come from `plans`.

    Raises ValueError for what does not fit or is not supported, TypeError for a table, lengths or indices that are
    traced, and for a name that flash-attn does not have.

    >>> from codec_jax.flash_decoding import flash_attn_with_kvcache
    >>> cache = jnp.ones((8, 16, 2, 64))
    >>> table = np.array([[0, 1, 2], [0, 1, 3]])  # two rows that share two blocks
    >>> lens = np.array([40, 45])
    >>> flash_attn_with_kvcache(jnp.ones((2, 1, 8, 64)), cache, cache, block_table=table, cache_seqlens=lens).shape
    (2, 1, 8, 64)
    """
    _refuse({"k": k, "v": v} | others)
    q, k_cache, v_cache = (checks.array(name, x) for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)))
    for name, flag in (("causal", causal), ("return_softmax_lse", return_softmax_lse)):
        checks.boolean(name, flag)
    _check_arrays(q, k_cache, v_cache)
    batch, tokens, num_q_heads, head_dim = q.shape
    causal, window = _window(window_size, attention_chunk, tokens, causal)
    check_name(implementation)
    cap = checks.number("softcap", 0.0 if softcap is None else softcap) or None
    check_softcap(cap)
    if sinks is not None:
        sinks = checks.array("sinks", sinks)
        checks.shape("sinks", sinks, nheads=num_q_heads)
        checks.float_dtype("sinks", sinks.dtype)
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else checks.number("softmax_scale", softmax_scale)
    if block_table is None:
        table, page_size = _consecutive_pages(k_cache.shape, batch, cache_batch_idx)
    else:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: expected None with a block_table; reorder the rows of block_table")
        table, page_size = _on_host("block_table", block_table), k_cache.shape[1]
        if page_size % 8:
            raise ValueError(f"k_cache: expected a page_block_size that is a multiple of 8, got {page_size}")
    lens = _lengths(cache_seqlens, table, batch, page_size)
    if (fold := tokens > 1 and not causal) and num_q_heads * tokens > MAX_ROWS:
        raise ValueError(
            f"q: expected at most {MAX_ROWS // num_q_heads} query tokens of {num_q_heads} heads without causal, got "
            f"{tokens}; call with fewer at a time, as they do not see each other"
        )
    descale = tuple(
        _descale(name, given, k_cache, batch) for name, given in (("k_descale", k_descale), ("v_descale", v_descale))
    )
    if not lens.any():
        empty = jnp.zeros_like(q)
        nothing = jnp.full(num_q_heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
        lse = jnp.broadcast_to(nothing[None, :, None], (batch, num_q_heads, tokens))
        return (empty, lse) if return_softmax_lse else empty
    layout = CallLayout(
        num_q_heads=num_q_heads * tokens if fold else num_q_heads,
        num_kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        query_tokens=1 if fold else tokens,
        page_size=page_size,
        num_pages=math.prod(k_cache.shape[:2]) // page_size,
        window=window,
        kv_dtype=k_cache.dtype,
    )
    forest, plan = plans.find(table, lens, layout)
    options = {"scale": scale, "softcap": cap, "implementation": implementation}
    out, lse = _attend(q, k_cache, v_cache, forest, plan, sinks, descale, fold=fold, **options)
    return (out, lse) if return_softmax_lse else out


@functools.partial(jax.jit, static_argnames=("fold", "scale", "softcap", "implementation"))
def _attend(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    forest: Forest,
    plan: Plan,
    sinks: Array | None,
    descale: tuple[Array | None, Array | None],
    *,
    fold: bool,
    **options: Any,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Attention and log-sum-exp; `fold` makes the query tokens further q heads, which see every key."""
    batch, tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    # In a jitted function cutting a cache into pages copies nothing.
    key_pages, value_pages = (x.reshape(-1, forest.page_size, num_kv_heads, head_dim) for x in (k_cache, v_cache))
    by_kv_head = (batch, tokens, num_kv_heads, num_q_heads // num_kv_heads)

    def multiplied(x: Array, factor: Array | None) -> Array:
        of_q_heads = None if factor is None else jnp.repeat(factor, by_kv_head[3], axis=1)
        return x if of_q_heads is None else x.astype(jnp.float32) * of_q_heads[:, None, :, None]

    query = multiplied(q, descale[0])
    if fold:
        query = query.reshape(*by_kv_head, head_dim).swapaxes(1, 2).reshape(batch, 1, tokens * num_q_heads, head_dim)
        if sinks is not None:
            sinks = jnp.tile(sinks.reshape(num_kv_heads, -1), (1, tokens)).reshape(-1)
    out, (row_max, row_sum) = forest_attention(
        query, key_pages, value_pages, forest, plan, sinks=sinks, return_residuals=True, **options
    )
    lse = row_max + jnp.log(row_sum)
    if fold:
        batch, tokens, num_kv_heads, group = by_kv_head
        out = out.reshape(batch, num_kv_heads, tokens, group, head_dim).swapaxes(1, 2).reshape(q.shape)
        lse = lse.reshape(batch, num_kv_heads, tokens, group).swapaxes(1, 2).reshape(q.shape[:3])
    return multiplied(out, descale[1]).astype(q.dtype), lse.swapaxes(1, 2)


def _descale(name: str, given: Any, k_cache: Array, batch: int) -> Float[Array, "B K"] | None:
    """Return the factors of each row and kv head. Raises ValueError for factors that do not fit the cache."""
    if given is None:
        return None
    if k_cache.dtype.itemsize > 1:
        if isinstance(given, jax.core.Tracer) or not (checks.host_array(name, given) == 1).all():
            raise ValueError(
                f"{name}: expected 1 for a cache of {k_cache.dtype}, got other factors; they are for one byte a number"
            )
        return None
    shape = (batch, k_cache.shape[2])
    try:
        factors = jnp.asarray(given, jnp.float32)
    except (TypeError, ValueError):
        factors = None
    if factors is None or factors.shape not in ((), shape):
        got = f"{given!r:.100}" if factors is None else factors.shape
        raise ValueError(f"{name}: expected a number, or one for each row and kv head {shape}, got {got}")
    if not isinstance(given, jax.Array):  # what a device has is not fetched to be looked at
        held = np.broadcast_to(np.asarray(given, np.float32), shape)
        checks.each(name, held, np.isfinite(held), "finite factors")
    return jnp.broadcast_to(factors, shape)


def _window(
    window_size: Sequence[int] | None, attention_chunk: int | None, tokens: int, causal: bool
) -> tuple[bool, Window | None]:
    """Return whether query tokens are causal, and their window. Raises ValueError for bounds that are not supported."""
    try:
        if isinstance(window_size, Set | Mapping):  # these could be taken apart, but have no left and right
            raise TypeError
        left, right = (-1, -1) if window_size is None else window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size: expected two integers, tokens to the left and right, got {window_size!r:.100}"
        ) from None
    left, right = (checks.integer("window_size", x, -1, below=2**63) for x in (left, right))
    left = -1 if left >= _MOST_TOKENS else left
    chunk = 0 if attention_chunk is None else checks.integer("attention_chunk", attention_chunk, 0, below=_MOST_TOKENS)
    if right > 0:
        raise ValueError(f"window_size: expected -1 or 0 on the right, got {right}; pass causal=True, or ({left}, 0)")
    if chunk and left >= 0:
        raise ValueError(
            f"attention_chunk: expected 0 beside window_size = {(left, right)}, got {chunk}; pass one of them"
        )
    causal = causal or right == 0
    if tokens > 1 and not causal and (chunk or left >= 0):
        name, got = ("attention_chunk", chunk) if chunk else ("window_size", (left, right))
        raise ValueError(f"{name}: expected no bound on the left without causal, got {got}; pass causal=True")
    if chunk:
        return causal, Window(chunk, chunked=True)
    return causal, Window(left + 1) if left >= 0 else None


def _consecutive_pages(
    shape: Sequence[int], batch: int, cache_batch_idx: Integers | Array | None
) -> tuple[Int[np.ndarray, "B max_blocks"], int]:
    """Return the block table and the page size that a cache [batch_cache, seqlen_cache, K, H] amounts to."""
    batch_cache, seqlen_cache = shape[:2]
    # Up to 128 tokens, which is what a block of the kernels holds.
    page_size = math.gcd(seqlen_cache, 128)
    if page_size % 8:
        raise ValueError(
            f"k_cache: expected room for a multiple of 8 tokens where there is no block_table, got {seqlen_cache}; "
            "make the cache longer"
        )
    given = np.arange(batch) if cache_batch_idx is None else _on_host("cache_batch_idx", cache_batch_idx)
    index = checks.int_vector("cache_batch_idx", given)
    if len(index) != batch or index.min() < 0 or index.max() >= batch_cache:
        raise ValueError(
            f"cache_batch_idx: expected one of the {batch_cache} rows of k_cache for each of the {batch} rows of q, "
            f"got {index.tolist()}"
        )
    per_row = seqlen_cache // page_size
    return index[:, None] * per_row + np.arange(per_row), page_size


def _lengths(
    cache_seqlens: int | Integers | Array | None, table: np.ndarray, batch: int, page_size: int
) -> Int[np.ndarray, " B"]:
    """Return the checked length of each row. Raises ValueError for lengths, or a table, that do not fit."""
    if table.ndim != 2 or len(table) != batch or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(
            f"block_table: expected integers of shape [{batch}, max_blocks] to go with q, "
            f"got {table.dtype} of shape {table.shape}"
        )
    room = table.shape[1] * page_size
    given = np.asarray(room) if cache_seqlens is None else _on_host("cache_seqlens", cache_seqlens)
    if not np.issubdtype(given.dtype, np.integer) or given.shape not in ((), (batch,)):
        raise ValueError(
            f"cache_seqlens: expected an integer, or one for each of the {batch} rows of q, "
            f"got {given.dtype} of shape {given.shape}"
        )
    lens = np.broadcast_to(given, batch)
    held = f"lengths in [0, {room}], which is what {table.shape[1]} blocks of {page_size} tokens hold"
    checks.each("cache_seqlens", lens, (lens >= 0) & (lens <= room), held)
    return lens.astype(np.int64)


def _check_arrays(q: Array, k_cache: Array, v_cache: Array) -> None:
    """Raise ValueError unless shapes and dtypes fit together."""
    checks.shape("q", q, batch=None, seqlen_q=None, nheads=None, headdim=None)
    axes = ("num_blocks", "page_block_size", "nheads_k")
    sizes = checks.shape("k_cache", k_cache, **dict.fromkeys(axes), headdim=q.shape[3])
    for name, array, others in (("q", q, ()), ("k_cache", k_cache, ONE_BYTE)):
        if not array.size:
            raise ValueError(f"{name}: expected numbers, got shape {array.shape}")
        checks.float_dtype(name, array.dtype, *others)
    if q.shape[2] % sizes["nheads_k"]:
        raise ValueError(f"k_cache: expected nheads_k that divides nheads = {q.shape[2]}, got {sizes['nheads_k']}")
    checks.shape("v_cache", v_cache, **sizes)
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache: expected {k_cache.dtype} like k_cache, got {v_cache.dtype}")


def _refuse(others: dict[str, Any]) -> None:
    """Raise ValueError for an argument that asks for what is not supported, TypeError for an unknown one."""
    for name, value in others.items():
        if name not in _HINTS and name not in _REFUSED:
            raise TypeError(f"flash_attn_with_kvcache() got an unexpected keyword argument {name!r}")
        if name in _HINTS or value is None:
            continue
        neutral = _NEUTRAL.get(name)
        is_known = neutral is not None and not isinstance(value, jax.core.Tracer)
        if not is_known or not (checks.host_array(name, value) == np.asarray(neutral)).all():
            got = f"an array of shape {value.shape}" if getattr(value, "shape", ()) else repr(value)
            raise ValueError(f"{name}: expected {neutral}, got {got}; {_REFUSED[name]}")


def _on_host(name: str, value: HostOrDevice | Integers | int) -> np.ndarray:
    """Return the values of an array. Raises TypeError for a traced one, which has none."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name}: expected known integers, got a traced array; the plan is made on the host: call this outside "
            "of jax.jit, or make Forest.from_block_table and make_plan there for a step that calls forest_attention"
        )
    return checks.host_array(name, value)
