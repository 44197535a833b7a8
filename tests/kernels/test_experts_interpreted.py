"""The kernel for mixtures on Hopper GPUs step by step on a CPU: results, races, and barriers that nobody waits for."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from expert_calls import Sizes, check_choice, check_rows, exact, in_parts, random_call, random_choices, random_scores

if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(
        "before JAX 0.11 the interpreter knows neither layouts nor copies past an array's end", allow_module_level=True
    )
from interpreted import PARAMS, RACE, said_of
from simulator import read

from codec_jax.nnx import expert_products
from codec_jax.nnx.expert_products import map_tokens
from pallas_kernels.addends import Parts
from pallas_kernels.hopper import arrange, choose, experts, grouped

GPU = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a test's device", core_count=2)


class Interpreted:
    """Pallas as the interpreter has it: it looks for no races in wgmma, and counts copies one by one, not in groups."""

    kernel = staticmethod(partial(plgpu.kernel, interpret=PARAMS))

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)

    def wgmma(self, acc: Any, rows: Any, weights: Any) -> None:
        read(rows)
        read(weights)
        plgpu.wgmma(acc, rows, weights)

    def wait_smem_to_gmem(self, _: int, **options: Any) -> None:
        plgpu.wait_smem_to_gmem(0, **options)


@pytest.fixture(autouse=True)
def _interpreted_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kernel in (arrange, choose, grouped):
        monkeypatch.setattr(kernel, "plgpu", Interpreted())
    monkeypatch.setattr(expert_products.jax, "devices", lambda: [GPU])
    experts.map_rows.clear_cache()
    yield
    experts.map_rows.clear_cache()


def test_the_interpreted_kernel_is_exact_without_races(capsys: pytest.CaptureFixture[str]) -> None:
    """Where one expert has more rows than a tile, another none that is here, and columns end within an item."""
    sizes = Sizes(130, 5, 2, 128, 192, bias=True)
    x, chosen, weights = random_call(sizes, 0, jnp.bfloat16, popular=1)
    chosen = chosen._replace(expert=jnp.where(chosen.expert == 2, sizes.num_experts, chosen.expert))
    x = x.at[7].set(jnp.nan)  # which stays with its token
    got = np.asarray(map_tokens(x, chosen, weights, "clamped"), np.float64)
    want = exact(x, chosen, weights, "clamped")
    assert np.isnan(want).any(axis=1).nonzero()[0].tolist() == [7]
    np.testing.assert_allclose(got, want, atol=0.03 * np.nanstd(want), rtol=0.02)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [(5, 6, 3, 128), (9, 70, 8, 64), (1, 1, 1, 64)], ids=str)
def test_interpreted_tokens_get_their_rows_without_races(
    sizes: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        x, expert = random_choices(*sizes, seed)
        check_rows(x, expert, sizes[1], arrange.arrange(x, jnp.asarray(expert), sizes[1]))
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [(8, 128, 8), (3, 32, 5), (4, 64, 1)], ids=str)
@pytest.mark.parametrize("normalised", [True, False])
def test_the_interpreted_kernel_chooses_the_greatest_scores(sizes: tuple[int, int, int], normalised: bool) -> None:
    tokens, num_experts, chosen = sizes  # in fours: otherwise two thread blocks write the same, which is a race here
    for seed in range(3):
        scores = random_scores(tokens, num_experts, seed, jnp.bfloat16)
        left = in_parts(scores, 2) if seed else Parts(scores[None])
        made = choose.choose.__wrapped__(left, scores.dtype, chosen=chosen, normalised=normalised)
        check_choice(scores, chosen, normalised, made)


def test_a_missing_wait_is_a_race(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class WithoutOneWait(Interpreted):
        skipped: Any = None

        def barrier_wait(self, ref: Any) -> None:
            if getattr(ref, "ref", ref) is not self.skipped:
                plgpu.barrier_wait(ref)

    broken, compute = WithoutOneWait(), grouped._compute_items

    def compute_without_it(refs: Any, *others: Any) -> None:
        broken.skipped = refs.full
        compute(refs, *others)
        broken.skipped = None

    monkeypatch.setattr(grouped, "plgpu", broken)
    monkeypatch.setattr(grouped, "_compute_items", compute_without_it)
    x, chosen, weights = random_call(Sizes(5, 4, 2, 64, 64), 0, jnp.bfloat16)
    assert RACE in said_of(lambda: map_tokens(x, chosen, weights, "silu"), capsys)
