"""The Hopper kernels for latents step by step on a CPU: results, races, and barriers that nobody waits for."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree
from kernel_calls import SIX, attend
from latent_calls import KEY, VALUE, check_latents, latent_plan, random_arrays

from codec_jax import Forest, LatentPages, PagePool
from pallas_kernels import HOPPER_LATENT

if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(
        "before JAX 0.11 the interpreter knows neither layouts nor copies past an array's end", allow_module_level=True
    )
from interpreted import PARAMS, RACE, said_of, serving
from latent_simulator import simulate_latents

from pallas_kernels.hopper import latent, latent_compute


@pytest.fixture(autouse=True)
def _interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernels serve on this machine."""
    simulate_latents(monkeypatch, PARAMS)
    with serving(monkeypatch, HOPPER_LATENT):
        yield


class Case(NamedTuple):
    """A tree, and the arguments of `make_plan`."""

    tree: Tree
    q_heads: int
    query_tokens: int = 1
    page_size: int = 16
    num_ctas: int = 2
    requests: int | None = None
    dtype: Any = jnp.bfloat16
    query_dtype: Any = None  # that of the pages, or float32
    window: int | None = None
    softcap: float | None = None


CASES = {
    "masks by row and by token, segments that are merged": Case(SIX, 16, num_ctas=3, page_size=8, requests=9),
    "heads of a request in two tiles, a query in float32": Case(
        Tree([-1, 0], [150, 30], [1]), 128, num_ctas=1, dtype=jnp.float16, query_dtype=jnp.float32
    ),
    "two tiles that are not full, a window, causal, a cap": Case(
        Tree([-1, 0, 0], [150, 40, 9], [2, 1]), 20, query_tokens=2, page_size=64, window=37, softcap=3.0
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_interpreted_kernels_equal_dense_attention_without_races(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    forest = Forest.from_nodes(*case.tree, page_size=case.page_size, request_capacity=case.requests)
    plan = latent_plan(
        forest, case.q_heads, query_tokens=case.query_tokens, num_ctas=case.num_ctas, window=case.window,
        block_capacity=0,
    )  # fmt: skip
    num_pages = len(forest.used_pages) + 1
    arrays = random_arrays(forest, case.q_heads, case.dtype, 0, case.query_tokens, num_pages)
    arrays = arrays._replace(query=arrays.query.astype(case.query_dtype or case.dtype))
    check_latents(arrays, forest, plan, softcap=case.softcap)
    assert RACE not in capsys.readouterr().out


def test_one_plan_serves_leaves_that_grow_and_gives_nan_past_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    forest = Forest.from_nodes([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest, _ = forest.reserve(PagePool.create(32, forest.used_pages), 20)
    plan = latent_plan(forest, 2, steps=20, num_ctas=2, block_capacity=0)
    for new in ([17, 2, 9], [4, 0, 0]):
        arrays = random_arrays(forest, 2, jnp.bfloat16, 0, 1, 32)
        check_latents(arrays, forest, plan)
        forest = forest.extend(np.asarray(new))
    assert RACE not in capsys.readouterr().out
    on_device = jax.device_put((forest, plan))
    out, _ = attend(
        *arrays[:2], None, *on_device, implementation="mosaic", return_residuals=True, drafts=None, scale=KEY**-0.5 / 2,
        softcap=None,
    )  # fmt: skip
    assert np.isnan(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_latent_that_is_not_finite_shows_in_the_request_that_reads_it(dtype: Any) -> None:
    """One leaf fills a block, which is masked by row; the others share theirs."""
    forest = Forest.from_nodes([-1, 0, 0, 0], [70, 9, 12, 140], [1, 2, 3])
    plan = latent_plan(forest, 4, num_ctas=2, block_capacity=0)
    query, pages, _ = random_arrays(forest, 4, dtype, 0, 1, 24)
    held = pages if isinstance(pages, LatentPages) else LatentPages(pages)
    clean = np.asarray(attend(query, held, None, forest, plan, implementation="mosaic"), np.float32)
    row = jnp.ones((1, 1, 1, KEY)).at[..., 3].set(jnp.nan)
    for request in range(3):
        slots = forest.context_slots(request)[None, 75:76]
        blown = held.write(slots, row, rope=KEY - VALUE)
        out = np.asarray(attend(query, blown, None, forest, plan, implementation="mosaic"), np.float32)
        others = np.arange(3) != request
        np.testing.assert_array_equal(out[others], clean[others])
        assert np.isnan(out[request]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_draft_trees_equal_dense_attention_without_races(dtype: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parent = [[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, -1, 2, 2]]
    forest = Forest.from_nodes([-1, 0, 0, 0], [70, 3, 12, 0], [3, 2, 1])
    forest = forest.reserve(PagePool.create(16, forest.used_pages), 5)[0].extend(5)
    plan = latent_plan(forest, 4, query_tokens=5, num_ctas=2, block_capacity=0)
    check_latents(random_arrays(forest, 4, dtype, 0, 5, 16), forest, plan, parent=parent)
    assert RACE not in capsys.readouterr().out


def test_a_missing_wait_is_a_race(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class WithoutOneWait:
        skipped: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(plgpu, name)

        def barrier_wait(self, ref: Any) -> None:
            if getattr(ref, "ref", ref) is not self.skipped:
                plgpu.barrier_wait(ref)

    broken, work = WithoutOneWait(), latent.follow

    def work_without_it(pipeline: Any) -> None:
        broken.skipped = pipeline.refs.weights_full
        work(pipeline)
        broken.skipped = None

    monkeypatch.setattr(latent_compute, "plgpu", broken)
    monkeypatch.setattr(latent, "follow", work_without_it)
    forest = Forest.from_nodes([-1], [100], [0])  # a block for each stage
    plan = latent_plan(forest, 2, num_ctas=1, block_capacity=0)
    query, pages, _ = random_arrays(forest, 2, jnp.bfloat16, 0, 1, 16)
    assert RACE in said_of(lambda: attend(query, pages, None, forest, plan, implementation="mosaic"), capsys)
