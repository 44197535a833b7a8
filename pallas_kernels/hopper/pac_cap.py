"""The cap of scores in PAC (logit softcap): tanh by a power, or by a polynomial where no score of a warp is beyond it.

For a power and its share of a reciprocal the hardware takes as long as for ten products. The rows of a warp may be
those of several requests, and each way rounds otherwise, so with `invariant` all scores go by powers.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_kernels import by_warp
from pallas_kernels.hopper.pac_pipeline import Sizes
from pallas_kernels.row_registers import broadcast_rows
from pallas_kernels.softmax import FEW_TERMS, MORE_TERMS, TANH_TO_POWER, TanhTerms, tanh_over


def capped(sizes: Sizes, products: jax.Array, row_scale: jax.Array | None, apart: bool) -> jax.Array:
    """Return products [64, block], capped by powers if scores are.

    Some of a row may be NaN where they will be masked, which must not become that of others: those are kept `apart`.
    Four together are rounded otherwise than each by itself.
    """
    if sizes.cap_factor is None:
        return products
    # From 2**26 on tanh is 1 in float32, and four such numbers still have a product.
    power = jnp.exp2(jnp.minimum(of_row(products, row_scale) * (sizes.cap_factor * TANH_TO_POWER), 26.0))
    return 1.0 - 2.0 * by_warp.reciprocals(1.0 + power, apart=apart or sizes.invariant)


def capped_where_seen(sizes: Sizes, products: jax.Array, row_scale: jax.Array | None, visible: jax.Array) -> jax.Array:
    """Do as `capped` for a block of which `visible` rows, [64], see all and the others nothing.

    So it is with most blocks of leaves. Of four warps one has their readers, and the others have nothing to do.
    """
    cap_factor = sizes.cap_factor
    if cap_factor is None:
        return products
    products = of_row(products, row_scale)

    def by_powers(products: jax.Array) -> jax.Array:
        return capped(sizes, products, None, apart=False)

    def by_few_terms(products: jax.Array) -> jax.Array:
        return products * tanh_over(products, cap_factor, FEW_TERMS)

    way = by_warp.any_row(visible)
    if sizes.invariant:
        return lax.switch(way, [_as_they_are, by_powers], products)
    way *= 1 + is_beyond(FEW_TERMS, cap_factor, greatest(products))
    return lax.switch(way, [_as_they_are, by_few_terms, by_powers], products)


def scores(sizes: Sizes, cap_factor: float, products: jax.Array, most: jax.Array) -> jax.Array:
    """Return scores of products [64, block] whatever they are, of which `most` is the greatest."""

    def by_more_terms(products: jax.Array) -> jax.Array:
        return products * tanh_over(products, cap_factor, MORE_TERMS, sizes.factor)

    def by_powers(products: jax.Array) -> jax.Array:
        return sizes.factor * capped(sizes, products, None, apart=False)

    return lax.switch(is_beyond(MORE_TERMS, cap_factor, most), [by_more_terms, by_powers], products)


def greatest(products: jax.Array) -> jax.Array:
    """Return the greatest of products [64, block] without their sign, by columns 8 apart, [64, 8]; NaN is left out."""
    return by_warp.fold_columns(arith.maxnumf, jnp.abs(products))


def is_beyond(polynomial: TanhTerms, cap_factor: float, most: jax.Array) -> jax.Array:
    """Say of each warp whether products, of which `most` is the greatest, are too great for a polynomial, by 1 or 0."""
    return by_warp.any_above(most, polynomial.bound / cap_factor if cap_factor else math.inf)


def of_row(products: jax.Array, row_scale: jax.Array | None) -> jax.Array:
    """Return products [64, block] times what scales their row, [64], if rows are scaled."""
    return products if row_scale is None else products * broadcast_rows(row_scale, products.shape[1])


def _as_they_are(products: jax.Array) -> jax.Array:
    return products
