"""Latent attention, absorbed and reconstructed, against a plain computation of each request alone."""

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import SECTIONS, Tree, contexts, num_pages, seeds, trees
from hypothesis import given, settings

from codec_jax import Forest, PagePool, Plan, PlanError, make_plan
from codec_jax.attention import forest_attention
from codec_jax.latent import latent_attention, reconstruct
from codec_jax.traffic import count_pass

REQUESTS, NODES, PAGES, PAGE = 6, 20, 48, 16


class Sizes(NamedTuple):
    heads: int = 4
    latent: int = 32
    rope: int = 8
    nope: int = 16
    value: int = 16
    query_tokens: int = 1

    def forest(self, tree: Tree) -> Forest:
        capacities = {"request_capacity": REQUESTS, "node_capacity": NODES, "page_capacity": PAGES}
        return Forest.from_nodes(*tree, page_size=PAGE, **capacities)

    def plan(self, forest: Forest, absorbed: bool = True, **options: Any) -> Plan:
        return make_plan(
            forest,
            num_q_heads=self.heads,
            num_kv_heads=1 if absorbed else self.heads,
            head_dim=(self.latent if absorbed else self.nope) + self.rope,
            query_tokens=self.query_tokens,
            **{"num_ctas": 4, "block_capacity": 256, "value_head_dim": self.latent if absorbed else None, **options},
        )


class Arrays(NamedTuple):
    query_nope: Any
    query_rope: Any
    latent_pages: Any
    up_key: Any
    up_value: Any


def arrays(sizes: Sizes, seed: int = 0, dtype: Any = np.float32) -> Arrays:
    rng = np.random.default_rng(seed)
    heads, latent, rope, nope, value, tokens = sizes
    queries = [rng.normal(size=(REQUESTS, tokens, heads, size)) for size in (nope, rope)]
    pages = rng.normal(size=(PAGES, PAGE, 1, latent + rope))
    weights = [rng.normal(size=(latent, heads, size)) * latent**-0.5 for size in (nope, value)]
    return Arrays(*(jnp.asarray(x, dtype) for x in (*queries, pages, *weights)))


def attend_alone(given: Arrays, slots: list[int], request: int, scale: float | None = None) -> np.ndarray:
    """Multi-head latent attention of one request as its paper states it, in float64: [T, N, V]."""
    query_nope, query_rope, pages, up_key, up_value = (np.asarray(x.astype(jnp.float32), np.float64) for x in given)
    latent = up_key.shape[0]
    tokens = pages.reshape(-1, pages.shape[-1])[np.asarray(slots, np.int64)]
    out = np.zeros((*query_nope.shape[1:3], up_value.shape[2]))
    for t, head in np.ndindex(out.shape[:2]):
        context = tokens[: max(0, len(slots) - out.shape[0] + t + 1)]
        if not len(context):
            continue
        key = np.concatenate([context[:, :latent] @ up_key[:, head], context[:, latent:]], axis=1)
        query = np.concatenate([query_nope[request, t, head], query_rope[request, t, head]])
        scores = key @ query * (len(query) ** -0.5 if scale is None else scale)
        weights = np.exp(scores - scores.max())
        out[t, head] = weights @ (context[:, :latent] @ up_value[:, head]) / weights.sum()
    return out


def attend_each(given: Arrays, tree: Tree, scale: float | None = None) -> np.ndarray:
    slots = contexts(tree, PAGE) + [[]] * (REQUESTS - len(tree.leaf))
    return np.stack([attend_alone(given, slots[request], request, scale) for request in range(REQUESTS)])


absorb = jax.jit(latent_attention, static_argnames="scale")


@partial(jax.jit, static_argnames="value_size")
def attend_reconstructed(given: Arrays, forest: Forest, plan: Plan, value_size: int) -> jax.Array:
    pages = reconstruct(*given[2:])
    query = jnp.concatenate(given[:2], axis=-1)
    return forest_attention(query, pages.key, pages.value, forest, plan)[..., :value_size]


def assert_close(got: Any, want: np.ndarray, tolerance: float = 1e-5) -> None:
    chex.assert_shape(got, want.shape)
    chex.assert_trees_all_close(np.asarray(got.astype(jnp.float32), np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "sizes",
    [Sizes(), Sizes(query_tokens=3), Sizes(heads=3, latent=24, rope=16, nope=8, value=20)],
    ids=["one query token", "three query tokens", "values wider than the keys without position"],
)
@settings(max_examples=10)
@given(tree=trees(max_nodes=8, max_length=50, max_requests=REQUESTS), seed=seeds)
def test_both_ways_give_the_latent_attention_of_each_request_alone(sizes: Sizes, tree: Tree, seed: int) -> None:
    assert num_pages(tree, PAGE) <= PAGES
    given, forest = arrays(sizes, seed), sizes.forest(tree)
    want = attend_each(given, tree)
    assert_close(absorb(*given, forest, sizes.plan(forest)), want)
    plan = sizes.plan(forest, absorbed=False)
    assert_close(attend_reconstructed(given, forest, plan, value_size=sizes.value), want)


def test_the_sizes_of_deepseek_v2() -> None:
    """A latent of 512, 64 rotated numbers, heads of 128: keys of 192 and values of 128."""
    sizes = Sizes(heads=2, latent=512, rope=64, nope=128, value=128)
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    want = attend_each(given, SECTIONS)
    assert_close(absorb(*given, forest, sizes.plan(forest)), want)
    pages = reconstruct(*given[2:])
    chex.assert_shape([pages.key, pages.value], (PAGES, PAGE, 2, 192))
    assert_close(attend_reconstructed(given, forest, sizes.plan(forest, absorbed=False), value_size=128), want)


def test_a_plan_may_take_the_rotated_keys_for_values_but_not_less_than_the_latents() -> None:
    sizes = Sizes()
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    plan = sizes.plan(forest, value_head_dim=sizes.latent + sizes.rope)
    assert_close(absorb(*given, forest, plan), attend_each(given, SECTIONS))
    with pytest.raises(PlanError, match=r"^plan: expected one for value_head_dim = L = 32, got one for 31; make it w"):
        latent_attention(*given, forest, sizes.plan(forest, value_head_dim=31))
    with pytest.raises(ValueError, match=r"^value_pages: expected .*, K, 41\].*, got None, and keys of 40 numbers"):
        latent_attention(*given, forest, sizes.plan(forest, value_head_dim=41))


def test_the_rotated_key_may_be_missing() -> None:
    sizes = Sizes(rope=0)
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    assert_close(absorb(*given, forest, sizes.plan(forest)), attend_each(given, SECTIONS))


def test_scale_is_the_factor_on_the_scores() -> None:
    sizes = Sizes()
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    out = absorb(*given, forest, sizes.plan(forest), scale=0.4)
    assert_close(out, attend_each(given, SECTIONS, scale=0.4))


def test_half_precision_is_exact_up_to_the_rounding_of_the_output() -> None:
    """Absorbed, where nothing but the output is rounded: scores this large would show it."""
    sizes = Sizes()
    given, forest = arrays(sizes, dtype=jnp.bfloat16), sizes.forest(SECTIONS)
    given = given._replace(query_nope=given.query_nope * 16)
    out = absorb(*given, forest, sizes.plan(forest))
    chex.assert_type(out, jnp.bfloat16)
    assert_close(out, attend_each(given, SECTIONS), 2 * 2**-8)
    pages = reconstruct(*given[2:])
    chex.assert_type([pages.key, pages.value], jnp.bfloat16)


def test_dtypes_of_weights_pages_and_queries_may_differ() -> None:
    sizes = Sizes()
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    mixed = given._replace(latent_pages=given[2].astype(jnp.bfloat16), up_key=given[3].astype(jnp.float16))
    assert_close(absorb(*mixed, forest, sizes.plan(forest)), attend_each(mixed, SECTIONS))


def test_one_plan_serves_a_generation() -> None:
    """Latents written step by step, leaves growing under one plan, give what the whole context gives."""
    sizes, steps = Sizes(), 4
    given, tree = arrays(sizes), Tree(parent=[-1, 0, 0], length=[37, 5, 9], leaf=[1, 2])
    forest = sizes.forest(tree)
    forest, _ = forest.reserve(PagePool.create(PAGES, taken=forest.used_pages), steps)
    plan = sizes.plan(forest, steps=steps)
    new = np.random.default_rng(1).normal(size=(steps, REQUESTS, 1, 1, 40)).astype(np.float32)
    pages, compiled = given.latent_pages, absorb._cache_size()
    for step in range(steps):
        forest = forest.extend()
        flat = pages.reshape(-1, 1, 40).at[jnp.asarray(forest.slots())].set(new[step], mode="drop")
        pages = flat.reshape(pages.shape)
        out = absorb(*given._replace(latent_pages=pages), forest, plan)
        for request in range(2):
            held = contexts(tree, PAGE)[request]
            context = jnp.concatenate(
                [given.latent_pages.reshape(-1, 40)[np.asarray(held)], new[: step + 1, request, 0, 0]]
            )
            alone = attend_alone(given._replace(latent_pages=context), list(range(len(context))), request)
            assert_close(out[request], alone)
    assert absorb._cache_size() <= compiled + 1


def test_pages_that_requests_share_are_read_once_if_a_tile_holds_all_their_heads() -> None:
    sizes, tree = Sizes(heads=16), Tree([-1, *[0] * REQUESTS], [160, *[16] * REQUESTS], list(range(1, REQUESTS + 1)))
    given, forest = arrays(sizes), sizes.forest(tree)
    reads = {}
    for tile_rows in (16, 16 * REQUESTS):
        plan = sizes.plan(forest, tile_rows=tile_rows)
        reads[tile_rows] = count_pass(forest, plan).kv_tokens_read
        assert_close(absorb(*given, forest, plan), attend_each(given, tree))
    assert reads == {16: (160 + 16) * REQUESTS, 16 * REQUESTS: 160 + 16 * REQUESTS}


SHAPES = {name: x.shape for name, x in arrays(Sizes())._asdict().items()}
WRONG = {
    "query_nope": [(6, 1, 4, 8), (6, 1, 2, 16), (6, 4, 16)],
    "query_rope": [(6, 1, 4, 16), (6, 2, 4, 8), (5, 1, 4, 8), (6, 4, 8)],
    "latent_pages": [(PAGES, PAGE, 2, 40), (PAGES, PAGE, 1, 31), (PAGES, PAGE, 40)],
    "up_key": [(32, 64)],
    "up_value": [(32, 2, 16), (16, 4, 16), (32, 64)],
}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shapes in WRONG.items() for shape in shapes])
def test_shapes_that_do_not_fit_are_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    sizes = Sizes()
    forest = sizes.forest(SECTIONS)
    shaped = [jnp.zeros(shape if other == name else fitting) for other, fitting in SHAPES.items()]
    with pytest.raises(ValueError, match=rf"^{name}: expected .*\b(got \({shape[0]}, |got {shape[-1]}$)"):
        latent_attention(*shaped, forest, sizes.plan(forest))
    if not name.startswith("query"):
        with pytest.raises(ValueError, match=rf"^{name}: expected "):
            reconstruct(*shaped[2:])


def test_reconstructed_values_are_finite() -> None:
    latents = jnp.full((1, PAGE, 1, 32), 300.0, jnp.float16)
    pages = reconstruct(latents, jnp.ones((32, 4, 16)), jnp.full((32, 4, 16), 300.0))
    assert np.isfinite(pages.value).all()


def test_values_that_are_wider_than_keys_cannot_be_reconstructed() -> None:
    given = arrays(Sizes(value=25))
    with pytest.raises(ValueError, match=r"^up_value: expected values of at most nope \+ rope = 24 numbers, got 25"):
        reconstruct(*given[2:])


def test_an_unknown_implementation_is_refused() -> None:
    sizes = Sizes()
    forest = sizes.forest(SECTIONS)
    with pytest.raises(ValueError, match=r"^implementation: expected 'mosaic', 'ampere', 'xla' or None, got 'cuda'"):
        latent_attention(*arrays(sizes), forest, sizes.plan(forest), implementation="cuda")


def test_a_plan_for_reconstructed_heads_is_refused() -> None:
    sizes = Sizes()
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    with pytest.raises(PlanError, match=r"^plan: expected one for .* = \(1, 4, 1, 40\).*\(1, 4, 4, 24\)"):
        latent_attention(*given, forest, sizes.plan(forest, absorbed=False))
