"""The kernels for latents on a Hopper GPU, held to float64 attention of each request alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forests import Tree, renumbered, seeds, trees
from hypothesis import given, settings
from kernel_calls import PAGES, TREE, Arrays, Heads, attend, check, grown, plan_of
from latent_calls import KEY, VALUE, check_latents, latent_plan, random_arrays
from plan_cases import num_wide

from codec_jax import Forest, LatentPages, PagePool, PageSubset, Window
from codec_jax.latent import Reconstructed, latent_attention, reconstruct
from codec_jax.nnx import Decoder, DecoderConfig, Latent
from pallas_kernels.packing import TILE_ROWS

pytestmark = pytest.mark.gpu


ONE_BYTE = jnp.float8_e4m3fn


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
@pytest.mark.parametrize(("q_heads", "query_tokens"), [(16, 1), (16, 5), (64, 5), (128, 1), (20, 3)])
def test_random_forests_equal_dense_attention(q_heads: int, query_tokens: int, dtype: Any) -> None:
    """On scattered pages, with free request slots, and with requests shorter than the query."""

    @settings(max_examples=15)
    @given(trees(max_nodes=10, max_length=150, max_requests=8), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        forest = grown(tree, 16, seed, request_capacity=10)
        if forest.request_length.any():
            arrays = random_arrays(forest, q_heads, dtype, seed, query_tokens, PAGES)
            check_latents(arrays, forest, latent_plan(forest, q_heads, query_tokens=query_tokens))

    check_one()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, ONE_BYTE])
@pytest.mark.parametrize(("q_heads", "page_size"), [(1, 8), (16, 64), (71, 16), (128, 256), (20, 48)])
def test_layouts_equal_dense_attention(q_heads: int, page_size: int, dtype: Any) -> None:
    forest = grown(TREE, page_size, seed=0, request_capacity=9)
    arrays = random_arrays(forest, q_heads, dtype, 1, 1, PAGES)
    check_latents(arrays, forest, latent_plan(forest, q_heads))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
@pytest.mark.parametrize("num_ctas", [1, 3, 132])
def test_many_requests_on_any_number_of_thread_blocks(num_ctas: int, dtype: Any) -> None:
    leaf = np.random.default_rng(0).permutation(100) + 1
    forest = Forest.from_nodes([-1] + [0] * 50 + [1] * 50, [3000, *range(100)], leaf)
    arrays = random_arrays(forest, 16, dtype, 2, 1, 700)
    check_latents(arrays, forest, latent_plan(forest, 16, num_ctas=num_ctas), requests=range(0, 100, 7))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
@pytest.mark.parametrize("query_tokens", [1, 5])
@pytest.mark.parametrize("window", [None, 100, Window(500, chunked=True)], ids=str)
def test_one_plan_serves_leaves_that_grow(window: Any, query_tokens: int, dtype: Any) -> None:
    forest = Forest.from_nodes([-1] + [0] * 20, [900, *range(0, 200, 10)], list(range(1, 21)), request_capacity=22)
    forest, _ = forest.reserve(PagePool.create(PAGES * 2, forest.used_pages), 40)
    plan = latent_plan(forest, 16, steps=40, query_tokens=query_tokens, window=window)
    for step in range(2):
        arrays = random_arrays(forest, 16, dtype, step, query_tokens, 2 * PAGES)
        check_latents(arrays, forest, plan, softcap=20.0 if step else None)
        forest = forest.extend(np.random.default_rng(step).integers(0, 40, 22)) if step == 0 else forest


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
@pytest.mark.parametrize("window", [None, 3])
def test_draft_trees_equal_dense_attention(window: int | None, dtype: Any) -> None:
    requests, tokens, rng = 12, 16, np.random.default_rng(0)
    forest = Forest.from_nodes([-1] + [0] * requests, [300, *range(0, 120, 10)], list(range(1, requests + 1)))
    num_pages = len(forest.used_pages) + 3 * requests
    forest = forest.reserve(PagePool.create(num_pages, forest.used_pages), tokens)[0].extend(tokens)
    parent = [renumbered([-1, *(int(rng.integers(-1, t)) for t in range(1, tokens))]) for _ in range(requests)]
    arrays = random_arrays(forest, 16, dtype, 0, tokens, num_pages)
    plan = latent_plan(forest, 16, query_tokens=tokens, window=window)
    check_latents(arrays, forest, plan, parent=parent)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
def test_a_stale_plan_gives_nan_and_results_are_the_same_from_run_to_run(dtype: Any) -> None:
    tree = Tree([-1, 0, 0], [100, 15, 31], [1, 2, 0])
    forest, longer = (grown(tree._replace(length=[100, 15, n]), request_capacity=5) for n in (31, 33))
    plan, (query, pages, _) = latent_plan(forest, 16), random_arrays(longer, 16, dtype, 0, 1, PAGES)
    once, *again = (attend(query, pages, None, forest, plan, implementation="mosaic") for _ in range(4))
    assert all((np.asarray(once, np.float32) == np.asarray(result, np.float32)).all() for result in again)
    longer, plan = jax.device_put((longer, plan))
    stale = attend(query, pages, None, longer, plan, implementation="mosaic")
    assert np.isnan(np.asarray(stale, np.float32)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
@pytest.mark.parametrize("q_heads", [16, 128])
def test_a_latent_that_is_not_finite_shows_in_the_requests_that_read_it(q_heads: int, dtype: Any) -> None:
    """Blocks of a leaf are masked by row, the ends of leaves by token; the root is everyone's."""
    forest = Forest.from_nodes([-1, 0, 0, 0], [700, 9, 12, 1400], [1, 2, 3])
    plan = latent_plan(forest, q_heads)
    query, pages, _ = random_arrays(forest, q_heads, dtype, 0, 1, PAGES)
    held = pages if isinstance(pages, LatentPages) else LatentPages(pages)
    clean = np.asarray(attend(query, held, None, forest, plan, implementation="mosaic"), np.float32)
    assert np.isfinite(clean).all()
    row = jnp.ones((1, 1, 1, KEY)).at[..., 3].set(jnp.nan)
    cases = [(0, 333, [0, 1, 2]), (0, 705, [0]), (1, 705, [1]), (2, 1500, [2]), (2, 2099, [2])]
    for request, token, readers in cases:
        slots = forest.context_slots(request)[None, token : token + 1]
        blown = held.write(slots, row, rope=KEY - VALUE)
        out = np.asarray(attend(query, blown, None, forest, plan, implementation="mosaic"), np.float32)
        others = ~np.isin(np.arange(3), readers)
        np.testing.assert_array_equal(out[others], clean[others])
        assert np.isnan(out[readers]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
def test_latent_attention_by_name_is_that_of_the_xla_path(dtype: Any) -> None:
    heads, nope, value, forest = 16, 128, 128, grown(TREE, 16, seed=0, request_capacity=9)
    plan, rng = latent_plan(forest, heads), np.random.default_rng(0)
    shapes = (9, 1, heads, nope), (9, 1, heads, KEY - VALUE), (PAGES, 16, 1, KEY), (VALUE, heads, nope)
    arrays = [jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16) for shape in (*shapes, (VALUE, heads, value))]
    if dtype == ONE_BYTE:
        slots = np.arange(PAGES * 16).reshape(PAGES, 16)
        arrays[2] = LatentPages.zeros(PAGES, 16, KEY, dtype, rope=KEY - VALUE).write(slots, arrays[2])
    attend_by = jax.jit(latent_attention, static_argnames="implementation")
    got, want = (attend_by(*arrays, forest, plan, implementation=name) for name in ("mosaic", "xla"))
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("heads", "query_tokens", "page_size"),
    [(Heads(16, 16, 192, 128), 1, 16), (Heads(128, 128, 192, 128), 1, 64), (Heads(8, 8, 192, 128), 33, 8)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_heads_of_reconstructed_latents_equal_dense_attention(
    heads: Heads, query_tokens: int, page_size: int, dtype: Any
) -> None:
    """On scattered pages, with free request slots, and with requests shorter than the query."""

    @settings(max_examples=10)
    @given(trees(max_nodes=10, max_length=150, max_requests=8), seeds)
    def check_one(tree: Tree, seed: int) -> None:
        forest = grown(tree, page_size, seed, request_capacity=10)
        if forest.request_length.any():
            plan = plan_of(forest, heads, query_tokens=query_tokens)
            check(Arrays.random(forest, heads, dtype, seed, query_tokens), forest, plan)

    check_one()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("requests", [45, 150])
def test_heads_of_reconstructed_latents_over_a_root_that_many_tiles_share(requests: int, dtype: Any) -> None:
    """In segments of one tile and of two."""
    heads, lengths = Heads(16, 16, 192, 128), np.random.default_rng(0).integers(0, 150, requests)
    forest = Forest.from_nodes([-1] + [0] * requests, [9000, *lengths], np.arange(requests) + 1)
    plan = plan_of(forest, heads, block_capacity=4096)
    assert (num_wide(plan) > 0) == (requests > TILE_ROWS)
    arrays = Arrays.random(forest, heads, dtype, 0, num_pages=2048)
    check(arrays, forest, plan, requests=(0, 1, 44, requests - 1))


@pytest.mark.parametrize("heads", [16, 128])
def test_both_forms_merged_are_latent_attention_of_the_xla_path(heads: int) -> None:
    requests, nope, value, pages = 70, 128, 128, 400
    lengths = np.random.default_rng(0).integers(0, 60, requests)
    forest = Forest.from_nodes([-1] + [0] * requests, [1000, *lengths], np.arange(requests) + 1)
    rng = np.random.default_rng(1)
    shapes = (requests, 1, heads, nope), (requests, 1, heads, KEY - VALUE), (pages, 16, 1, KEY), (VALUE, heads, nope)
    arrays = [jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16) for shape in (*shapes, (VALUE, heads, value))]
    subset = PageSubset.of(forest.pages_of(0), pages, 70)
    options = {"block_capacity": 1024}
    kept = reconstruct(arrays[2][subset.page_ids], *arrays[3:])
    of_heads = plan_of(forest, Heads(heads, heads, nope + KEY - VALUE, value), subset=subset, **options)
    rest = latent_plan(forest, heads, subset=subset.rest, **options)
    attend_by = jax.jit(latent_attention, static_argnames="implementation")
    got = attend_by(*arrays, forest, rest, reconstructed=Reconstructed(kept, of_heads), implementation="mosaic")
    want = attend_by(*arrays, forest, latent_plan(forest, heads, **options), implementation="xla")
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ONE_BYTE])
def test_a_decoder_by_name_is_that_of_the_xla_path(dtype: Any) -> None:
    sizes = Latent(size=VALUE, nope_dim=16, rope_dim=KEY - VALUE, value_dim=16)
    config = DecoderConfig(
        64, 32, 64, num_layers=2, num_q_heads=16, num_kv_heads=1, head_dim=KEY, qk_norm=False, latent=sizes,
        kv_dtype=dtype,
    )  # fmt: skip
    model, forest = Decoder(config, nnx.Rngs(0)), Forest.from_nodes([-1, 0, 0], [100, 20, 5], [1, 2])
    forest = forest.reserve(PagePool.create(16, forest.used_pages), 3)[0].extend(3)
    tokens, plan = jnp.arange(6).reshape(2, 3), latent_plan(forest, 16, query_tokens=3)
    # Pages that hold something, for both requests to read.
    rows, slots = jax.random.normal(jax.random.key(0), (16, 16, 1, KEY)), np.arange(256).reshape(16, 16)
    cache = (LatentPages.zeros(16, 16, KEY, config.cache_dtype, rope=KEY - VALUE).write(slots, rows),) * 2
    got, want = (
        np.asarray(model.decode(tokens, cache, forest, plan, implementation=name)[0], np.float32)
        for name in ("mosaic", "xla")
    )
    np.testing.assert_allclose(got, want, atol=0.05, rtol=0.05)
