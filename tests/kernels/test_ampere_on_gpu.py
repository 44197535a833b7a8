"""Heads that only the kernels for GPUs since Ampere serve, on such a GPU, held to float64 attention."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from kernel_calls import TREE, Arrays, Heads, check, grown, plan_of

from pallas_kernels import AMPERE

if not hasattr(plgpu, "mma"):
    pytest.skip("before JAX 0.11 there are no warp-level products", allow_module_level=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(8, 4, 40), 64),
        *((Heads(32, 8, *sizes), 16) for sizes in ((192, 128), (96, 256), (40, 72))),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sizes_of_keys_and_values(heads: Heads, page_size: int, dtype: Any) -> None:
    forest = grown(TREE, page_size, seed=0, request_capacity=9)
    plan = plan_of(forest, heads, AMPERE)
    check(Arrays.random(forest, heads, dtype, seed=1), forest, plan, implementation="ampere")
