"""Which calls the Hopper kernels for latents take, how plans for them cut the work, and the calls themselves."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import refusals, two_launches
from pallas_kernels.family import Call, Tiling
from pallas_kernels.heads import Heads, Scores
from pallas_kernels.hopper.tiling import SIXTEEN_BITS, why_not_on
from pallas_kernels.packing import Packing
from pallas_kernels.plan_format import PlanArrays

#: Numbers of a key, and of a value, of which a key begins with one.
_KEY_COLUMNS, _VALUE_COLUMNS = 576, 512
#: Two blocks and a tile of the query fill the shared memory of a multiprocessor, and a tile's output the registers.
_BLOCK_TOKENS, _LANES = 64, 1
#: With scales and rotated keys beside them, as `codec_jax.LatentPages` has them.
ONE_BYTE = jnp.float8_e4m3fn


def tiling(heads: Heads, device: jax.Device) -> Tiling:
    """Return how plans are to be cut."""
    return Tiling(device.core_count, Packing.of(heads.group).tile_rows, _LANES, (_BLOCK_TOKENS, _BLOCK_TOKENS))


def why_not(heads: Heads, device: Any, scores: Scores | None = None, plan: PlanArrays | None = None) -> str | None:
    """Say why the kernels cannot serve a call on a device; None if they can."""
    if reason := why_not_on(device):
        return reason
    if heads.rotated_beside:
        if heads.kv_dtype != ONE_BYTE or heads.rotated_beside != _KEY_COLUMNS - _VALUE_COLUMNS:
            return (
                f"of latents with scales it takes {jnp.dtype(ONE_BYTE)} and {_KEY_COLUMNS - _VALUE_COLUMNS} numbers of "
                f"rotated keys, got {heads.kv_dtype} and {heads.rotated_beside}"
            )
    elif heads.kv_dtype not in SIXTEEN_BITS or heads.query_dtype not in (jnp.float32, heads.kv_dtype):
        return (
            f"of latents it takes bfloat16 or float16, or {jnp.dtype(ONE_BYTE)} as `LatentPages` have it, and a query "
            f"of the same or of float32, got {heads.kv_dtype} and {heads.query_dtype}"
        )
    got = heads.num_kv_heads, heads.head_dim, heads.value_head_dim
    if got != (1, _KEY_COLUMNS, _VALUE_COLUMNS) or not heads.values_in_keys:
        pages = "the same pages" if heads.values_in_keys else "pages of their own"
        return (
            f"of latents it takes 1 kv head of {_KEY_COLUMNS} numbers whose first {_VALUE_COLUMNS} are the values "
            f"(value_pages=None, and a plan with value_head_dim={_VALUE_COLUMNS}), got {got[0]} of {got[1]}, and "
            f"values of {got[2]} in {pages}"
        )
    return refusals.of_scores(scores) or refusals.of_plan(plan, tiling(heads, device))


# Lowering the kernels takes seconds, and a step calls them in every layer. A jitted function is lowered once for all.
@partial(jax.jit, static_argnames=("scores",))
@jax.enable_x64(False)  # the kernels count in int32
def attend(call: Call, scores: Scores) -> tuple[Array, Array, Array]:
    """Run PAC over latents and POR, as `Family.attend` promises."""
    # A JAX that was built without GPU support may not have their dialect.
    from pallas_kernels.hopper.latent import latent_pac
    from pallas_kernels.hopper.latent_widen import joined_query
    from pallas_kernels.hopper.por import por

    def pac(call: Call) -> tuple[Array, ...]:
        is_one_byte = call.key_pages.dtype == ONE_BYTE
        query = joined_query(call.query) if is_one_byte else call.query.astype(call.key_pages.dtype)
        return latent_pac(call._replace(query=query), scores)

    return two_launches.run(call, pac, por)
