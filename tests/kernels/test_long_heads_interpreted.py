"""Heads of 512 numbers step by step on a CPU: results, races, and barriers that nobody waits for."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Tree
from kernel_calls import LONG_SCALE, SIX, Arrays, Heads, attend, check, plan_of

from codec_jax import Forest, PagePool
from pallas_kernels import HOPPER

if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(
        "before JAX 0.11 the interpreter knows neither layouts nor copies past an array's end", allow_module_level=True
    )
from interpreted import PARAMS, RACE, said_of, serving
from latent_simulator import simulate_latents

from pallas_kernels.hopper.long_heads import LongPipeline


@pytest.fixture(autouse=True)
def _interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernels serve on this machine."""
    simulate_latents(monkeypatch, PARAMS)
    with serving(monkeypatch, HOPPER):
        yield


class Case(NamedTuple):
    """A tree, and the arguments of `make_plan`."""

    tree: Tree
    heads: Heads
    query_tokens: int = 1
    page_size: int = 16
    num_ctas: int = 2
    requests: int | None = None
    dtype: Any = jnp.bfloat16
    window: int | None = None
    softcap: float | None = None
    sinks: Any = None


CASES = {
    "masks by row and by token, segments that are merged, two kv heads": Case(
        SIX, Heads(16, 2, 512), num_ctas=3, page_size=8, requests=9
    ),
    "two tiles that are not full, a window, causal, a cap, sinks": Case(
        Tree([-1, 0, 0], [150, 40, 9], [2, 1]), Heads(20, 1, 512), query_tokens=2, page_size=64, dtype=jnp.float16,
        window=37, softcap=3.0, sinks=np.linspace(-2, 2, 20, dtype=np.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_interpreted_kernels_equal_dense_attention_without_races(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    forest = Forest.from_nodes(*case.tree, page_size=case.page_size, request_capacity=case.requests)
    plan = plan_of(
        forest, case.heads, query_tokens=case.query_tokens, num_ctas=case.num_ctas, window=case.window,
        block_capacity=0,
    )  # fmt: skip
    num_pages = len(forest.used_pages) + 1
    arrays = Arrays.random(forest, case.heads, case.dtype, 0, case.query_tokens, num_pages)
    check(arrays, forest, plan, scale=LONG_SCALE, softcap=case.softcap, sinks=case.sinks)
    assert RACE not in capsys.readouterr().out


def test_a_plan_that_does_not_hold_any_more_gives_nan() -> None:
    forest, heads = Forest.from_nodes([-1, 0, 0], [70, 15, 31], [1, 2, 0]), Heads(4, 2, 512)
    forest, _ = forest.reserve(PagePool.create(16, forest.used_pages), 20)
    plan = plan_of(forest, heads, steps=4, num_ctas=2, block_capacity=0)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=16)
    grown, plan = jax.device_put((forest.extend(np.asarray([17, 2, 9])), plan))
    out = attend(*arrays, grown, plan, implementation="mosaic")
    assert np.isnan(np.asarray(out, np.float32)).all()


def test_keys_given_back_before_their_scores_are_there_are_a_race(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loader waits for what the scorer says: were it not to, the next block's keys would come too early."""
    rings = LongPipeline.rings.fget
    assert rings is not None
    monkeypatch.setattr(
        LongPipeline,
        "rings",
        property(lambda pipeline: tuple(r._replace(free=None) if i == 0 else r for i, r in enumerate(rings(pipeline)))),
    )
    monkeypatch.setattr(LongPipeline, "release_keys", lambda *_: None)
    forest, heads = Forest.from_nodes([-1], [150], [0]), Heads(2, 1, 512)
    plan = plan_of(forest, heads, num_ctas=1, block_capacity=0)
    arrays = Arrays.random(forest, heads, jnp.bfloat16, 0, num_pages=16)
    assert RACE in said_of(lambda: attend(*arrays, forest, plan, implementation="mosaic"), capsys)
