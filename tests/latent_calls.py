"""Calls of the Hopper kernels for latents, and what they should give: float64 attention of each request alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_calls import Arrays, Exact, Heads, attend

from codec_jax import DraftTrees, Forest, LatentPages, Plan, make_plan
from codec_jax.planning import arrays_of
from pallas_kernels import HOPPER_LATENT, Call, Scores
from pallas_kernels.packing import Packing

KEY, VALUE = 576, 512


def latent_plan(forest: Forest, q_heads: int, **options: Any) -> Plan:
    """Plan as for an H200, on any machine."""
    sizes = {"num_ctas": 132, "tile_rows": Packing.of(q_heads).tile_rows, "block_tokens": 64, "lanes": 1}
    heads = {"num_q_heads": q_heads, "num_kv_heads": 1, "head_dim": KEY, "value_head_dim": VALUE}
    return make_plan(forest, **(heads | sizes | {"block_capacity": 256} | options))


def attend_latents(
    query: Any,
    pages: Any,
    forest: Forest,
    plan: Plan,
    planes: tuple[Any, ...] = (),
    beside: tuple[Any, ...] = (None, None),
    softcap: float | None = None,
) -> Any:
    """The output of the kernels, without what `forest_attention` does around them."""
    forest = jax.tree.map(jnp.asarray, forest)
    position = forest.positions(query.shape[1])
    readers, positions, *_ = *planes, None, None
    planned = arrays_of(forest), plan.arrays, plan.guard
    call = Call(query, pages, None, position, *planned, readers, positions, *beside)
    return HOPPER_LATENT.attend(call, Scores(0.1, softcap))[0]


def random_arrays(forest: Forest, q_heads: int, dtype: Any, seed: int, query_tokens: int, num_pages: int) -> Arrays:
    """A query and latents, which are the values as well.

    Of one byte a number: `LatentPages`, what they stand for, and a query in float32 of numbers that bfloat16 has.
    """
    is_one_byte = jnp.dtype(dtype).itemsize == 1
    of_products = jnp.bfloat16 if is_one_byte else dtype
    query, pages, _ = Arrays.random(forest, Heads(q_heads, 1, KEY), of_products, seed, query_tokens, num_pages)
    if not is_one_byte:
        return Arrays(query, pages, pages)
    # Scales differ by part and by token, some are 0, and what no request reads stays as large as can be.
    rng = np.random.default_rng(seed)
    by_token = rng.choice([0.0, 0.3, 0.6, 1.0], (*pages.shape[:3], 1), p=[0.1, 0.3, 0.3, 0.3])
    by_part = np.repeat([0.5, 1.0, 0.25, 0.125, 0.5], [128, 128, 128, 128, 64])
    slots = np.arange(num_pages * forest.page_size).reshape(num_pages, -1)
    held = LatentPages.zeros(num_pages, forest.page_size, KEY, dtype, rope=KEY - VALUE)
    held = held.write(slots, pages.astype(jnp.float32) * (by_token * by_part).astype(np.float32))
    return Arrays(query.astype(jnp.float32), held, held.rows(slice(None)))


def check_latents(
    arrays: Arrays,
    forest: Forest,
    plan: Plan,
    *,
    requests: Any = None,
    parent: list[list[int]] | None = None,
    softcap: float | None = None,
    implementation: str = "mosaic",
) -> None:
    """Compare output and residuals of some requests, or of all, with float64 attention; free request slots give 0.

    The query may be float32, of numbers that the pages' dtype has.
    """
    drafts = None if parent is None else DraftTrees.from_parents(np.asarray(parent))
    query, pages, held = arrays
    is_one_byte = isinstance(pages, LatentPages)
    rounded = Arrays(query.astype(jnp.float16 if is_one_byte else pages.dtype), held, held)
    # A small scale, or the greatest of so many products would have all the weight.
    given = {"scale": KEY**-0.5 / 2, "softcap": softcap}
    out, residuals = attend(
        query, pages, None, forest, plan, drafts=drafts, implementation=implementation, return_residuals=True, **given
    )
    assert (out.dtype, out.shape) == (query.dtype, (*query.shape[:3], VALUE))
    out, row_max, row_sum = (np.asarray(x, np.float64) for x in (out, *residuals))
    free = ~np.asarray(forest.active)
    assert (out[free] == 0).all()
    assert (row_max[free] == -np.inf).all()
    assert (row_sum[free] == 0).all()
    for request in np.flatnonzero(forest.active) if requests is None else requests:
        above = None if parent is None else parent[request]
        exact = Exact.of(rounded, forest, request, parent=above, window=plan.arrays.window, **given)
        # Scales and the numbers that they make are rounded as well, and so are those of keys.
        error = (1 + is_one_byte) * exact.error[..., :VALUE]
        excess = np.abs(out[request] - exact.out[..., :VALUE]) - error
        assert excess.max() <= 0, f"request {request}: error is {excess.max()} more than {error.max()}"
        with np.errstate(divide="ignore"):
            logsumexp = row_max[request] + np.log(row_sum[request])
        np.testing.assert_allclose(logsumexp, exact.logsumexp, atol=1e-3 if is_one_byte else 1e-4, rtol=1e-6)
