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
from kernel_calls import H200

from codec_jax import Forest, LatentPages, PagePool, PageSubset, Plan, PlanError, make_plan, replan
from codec_jax.attention import forest_attention
from codec_jax.attention.latent import expanded
from codec_jax.latent import Reconstructed, choose_reconstructed, latent_attention, reconstruct
from codec_jax.nnx import DecoderConfig, Latent
from codec_jax.nnx.batch import all_plans
from codec_jax.nnx.intervals import Intervals
from codec_jax.planning import latent_forms
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
            value_head_dim=options.pop("value_head_dim", self.latent if absorbed else self.value),
            **{"num_ctas": 4, "block_capacity": 256, **options},
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


@jax.jit
def attend_reconstructed(given: Arrays, forest: Forest, plan: Plan) -> jax.Array:
    pages = reconstruct(*given[2:])
    query = jnp.concatenate(given[:2], axis=-1)
    return forest_attention(query, pages.key, pages.value, forest, plan)


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
    assert_close(attend_reconstructed(given, forest, plan), want)


def test_the_sizes_of_deepseek_v2() -> None:
    """A latent of 512, 64 rotated numbers, heads of 128: keys of 192 and values of 128."""
    sizes = Sizes(heads=2, latent=512, rope=64, nope=128, value=128)
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    want = attend_each(given, SECTIONS)
    assert_close(absorb(*given, forest, sizes.plan(forest)), want)
    pages = reconstruct(*given[2:])
    chex.assert_shape([pages.key, pages.value], [(PAGES, PAGE, 2, 192), (PAGES, PAGE, 2, 128)])
    assert_close(attend_reconstructed(given, forest, sizes.plan(forest, absorbed=False)), want)


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


def test_values_of_float32_sums_keep_what_bfloat16_weights_leave_of_them() -> None:
    """In two parts: one rounded to bfloat16 would be 2**-9 off."""
    rng = np.random.default_rng(0)
    attended = jnp.asarray(rng.normal(size=(2, 1, 4, 32)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(32, 4, 16)), jnp.bfloat16)
    want = np.einsum("btnl,lnv->btnv", np.asarray(attended, np.float64), np.asarray(weights, np.float64))
    got = np.asarray(jax.jit(expanded)(attended, weights), np.float64)
    size = np.einsum("btnl,lnv->btnv", np.abs(attended), np.abs(np.asarray(weights, np.float64)))
    assert (np.abs(got - want) < 2**-16 * size).all()


def test_dtypes_of_weights_pages_and_queries_may_differ() -> None:
    sizes = Sizes()
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    mixed = given._replace(latent_pages=given[2].astype(jnp.bfloat16), up_key=given[3].astype(jnp.float16))
    assert_close(absorb(*mixed, forest, sizes.plan(forest)), attend_each(mixed, SECTIONS))
    # Rotated queries out of range of the others' dtype, which the scale makes small.
    mixed = given._replace(query_nope=given.query_nope.astype(jnp.float16), query_rope=1e5 * given.query_rope)
    subset = PageSubset.of(np.arange(4), PAGES, 4)
    out = absorb(*mixed, forest, sizes.plan(forest), scale=1e-5)
    both = attend_both(mixed, forest, plans_of(sizes, forest, subset), subset.page_ids, 1e-5)
    np.testing.assert_allclose(np.asarray(both, np.float64), np.asarray(out, np.float64), atol=2e-3)


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


def test_what_weights_and_pages_cannot_be_is_refused_by_name() -> None:
    sizes = Sizes()
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    for name in ("up_key", "up_value"):
        wrong = given._replace(**{name: getattr(given, name).astype(jnp.complex64)})
        with pytest.raises(ValueError, match=rf"^{name}: expected float32, bfloat16 or float16, got complex64"):
            latent_attention(*wrong, forest, sizes.plan(forest))
    with pytest.raises(ValueError, match=r"^query_nope: expected "):
        latent_attention(*given._replace(query_nope=[1.0]), forest, sizes.plan(forest))
    with pytest.raises(TypeError, match=r"^latent_pages: expected an array, got LatentPages"):
        reconstruct(LatentPages(given.latent_pages), given.up_key, given.up_value)
    with pytest.raises(ValueError, match=r"^dtype: expected float32, bfloat16 or float16, got int32"):
        reconstruct(given.latent_pages, given.up_key, given.up_value, jnp.int32)
    forms = {"num_q_heads": 4, "latent": 32, "rope": 16, "nope": 24, "value": 20, "num_pages": PAGES, "capacity": 4}
    for itemsize in (0, -2, "x", 2.0):
        with pytest.raises(ValueError, match=rf"^itemsize: expected an integer of at least 1, got {itemsize!r}"):
            choose_reconstructed(forest, **forms, itemsize=itemsize)


def test_reconstructed_values_are_finite() -> None:
    latents = jnp.full((1, PAGE, 1, 32), 300.0, jnp.float16)
    pages = reconstruct(latents, jnp.ones((32, 4, 16)), jnp.full((32, 4, 16), 300.0))
    assert np.isfinite(pages.value).all()


@pytest.mark.parametrize(("dtype", "ulp"), [(None, 2.0**-10), (jnp.float16, 2.0**-10), (jnp.bfloat16, 2.0**-7)])
def test_k_and_v_of_bfloat16_latents_are_rounded_once_to_float16_unless_told(dtype: Any, ulp: float) -> None:
    given = arrays(Sizes(), dtype=jnp.bfloat16)
    pages = jax.jit(partial(reconstruct, dtype=dtype))(*given[2:])
    latents, up_key, up_value = (np.asarray(x.astype(jnp.float32), np.float64) for x in given[2:])
    size = up_key.shape[0]
    rotated = np.broadcast_to(latents[..., size:], (*latents.shape[:2], up_key.shape[1], latents.shape[3] - size))
    key = np.concatenate([np.einsum("pskl,lnd->psnd", latents[..., :size], up_key), rotated], axis=-1)
    value = np.einsum("pskl,lnv->psnv", latents[..., :size], up_value)
    for got, exact in ((pages.key, key), (pages.value, value)):
        assert got.dtype == (dtype or jnp.float16)
        assert_close(got, exact, ulp / 2 + 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_k_and_v_out_of_range_are_as_large_as_their_dtype_has_them(dtype: Any) -> None:
    sign = np.array([1, -1])
    latents = jnp.full((1, PAGE, 1, 33), 1e30, jnp.bfloat16)  # 32 numbers and one that is rotated
    weights = jnp.asarray(np.broadcast_to(1e20 * sign[:, None], (32, 2, 16)), jnp.bfloat16)
    pages = reconstruct(latents, weights, weights, dtype)
    largest = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(pages.value[0, 0, :, 0].astype(jnp.float32), sign * largest)
    np.testing.assert_array_equal(pages.key[0, 0, :, 0].astype(jnp.float32), sign * largest)
    assert np.isfinite(pages.key.astype(jnp.float32)).all()


def test_latents_of_one_byte_a_number_are_attended_as_what_they_hold() -> None:
    sizes = Sizes(latent=256, query_tokens=3)
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    empty = LatentPages.zeros(PAGES, PAGE, 264, jnp.float8_e4m3fn, rope=8)
    slots = np.arange(PAGES * PAGE).reshape(PAGES, PAGE)
    pages = jax.jit(LatentPages.write)(empty, slots, given.latent_pages)
    held = given._replace(latent_pages=pages.rows(slice(None)))
    plan = sizes.plan(forest)
    want = attend_each(held, SECTIONS)
    assert_close(absorb(*given._replace(latent_pages=pages), forest, plan), want)
    assert np.abs(want - attend_each(given, SECTIONS)).max() > 1e-3  # which rounding to one byte costs
    subset = PageSubset.of(forest.pages_of(0), PAGES, PAGES)
    rest, of_pages = plans_of(sizes, forest, subset)
    both = Reconstructed(reconstruct(pages.rows(subset.page_ids), *given[3:]), of_pages)
    assert_close(absorb(*given._replace(latent_pages=pages), forest, rest, reconstructed=both), want)

    query = jnp.ones((REQUESTS, 3, 4, 264))
    with pytest.raises(ValueError, match=r"^key_scale: expected None for `LatentPages`, which have their scales with "):
        forest_attention(query, pages, None, forest, plan, key_scale=jnp.ones(1))
    with pytest.raises(ValueError, match=r"^mesh: expected None for latents of one byte a number; call it inside of j"):
        forest_attention(query, pages, None, forest, plan, mesh=jax.make_mesh((1,), ("tensor",)))
    with pytest.raises(ValueError, match=r"^implementation: 'mosaic' cannot serve"):
        forest_attention(query, pages, None, forest, plan, implementation="mosaic")
    shorter = given._replace(latent_pages=pages, up_key=given.up_key[:200], up_value=given.up_value[:200])
    with pytest.raises(ValueError, match=r"^latent_pages: expected L \+ rope numbers, L = 200, got 264"):
        latent_attention(*shorter, forest, plan)


# ---------------------------------------------------------------------- both at once


@partial(jax.jit, static_argnames="scale")
def attend_both(given: Arrays, forest: Forest, plans: tuple[Plan, Plan], page_ids: Any, scale: Any = None) -> Any:
    plan, of_pages = plans
    pages = reconstruct(given.latent_pages[page_ids], given.up_key, given.up_value)
    return latent_attention(*given, forest, plan, reconstructed=Reconstructed(pages, of_pages), scale=scale)


def plans_of(sizes: Sizes, forest: Forest, subset: PageSubset, **options: Any) -> tuple[Plan, Plan]:
    return (
        sizes.plan(forest, subset=subset.rest, **options),
        sizes.plan(forest, absorbed=False, subset=subset, **options),
    )


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(query_tokens=3, value=40)], ids=["one query token", "three"])
@settings(max_examples=12)
@given(tree=trees(max_nodes=8, max_length=50, max_requests=REQUESTS), seed=seeds)
def test_any_pages_may_be_reconstructed_and_the_rest_not(sizes: Sizes, tree: Tree, seed: int) -> None:
    """Pages of any nodes, those that leaves end in among them, none and all: POR merges both forms exactly."""
    given, forest, rng = arrays(sizes, seed), sizes.forest(tree), np.random.default_rng(seed)
    share = rng.choice([0.0, 0.5, 1.0])
    pages = rng.permutation(np.flatnonzero(rng.random(PAGES) < share))
    subset = PageSubset.of(pages, PAGES, PAGES)
    out = attend_both(given, forest, plans_of(sizes, forest, subset), subset.page_ids)
    assert_close(out, attend_each(given, tree))


def test_both_forms_serve_a_generation_without_compiling_again() -> None:
    """A shared node is reconstructed once; then leaves grow, and another node takes its place."""
    sizes, tree = Sizes(), Tree([-1, 0, 0, -1, 3], [37, 5, 9, 20, 1], [1, 2, 4])
    given, forest = arrays(sizes), sizes.forest(tree)
    forest, _ = forest.reserve(PagePool.create(PAGES, taken=forest.used_pages), 4)
    compiled = attend_both._cache_size()
    for node, step in ((0, 1), (0, 2), (3, 3)):
        forest = forest.extend()
        longer = Tree(tree.parent, [37, 5 + step, 9 + step, 20, 1 + step], tree.leaf)
        subset = PageSubset.of(forest.pages_of(node), PAGES, 4)
        out = attend_both(given, forest, plans_of(sizes, forest, subset, steps=2), subset.page_ids)
        slots = [forest.context_slots(request) for request in range(3)]
        assert [len(each) for each in slots] == [
            sum(longer.length[n] for n in path) for path in ([0, 1], [0, 2], [3, 4])
        ]
        want = np.stack([attend_alone(given, list(each), request) for request, each in enumerate(slots)])
        assert_close(out[:3], want)
    assert attend_both._cache_size() == compiled + 1


def test_a_plan_that_does_not_hold_gives_nan_in_both_forms() -> None:
    sizes, tree = Sizes(), Tree([-1, 0], [40, 5], [1])
    given, forest = arrays(sizes), sizes.forest(tree)
    subset = PageSubset.of(np.arange(3), PAGES, 3)
    plans = plans_of(sizes, forest, subset)
    for which in range(2):
        stale = list(plans)
        stale[which] = plans_of(sizes, sizes.forest(Tree([-1, 0], [40, 7], [1])), subset)[which]
        out = attend_both(given, *jax.device_put((forest, tuple(stale))), subset.page_ids)
        assert np.isnan(np.asarray(out)[0]).all()


def test_plans_of_all_pages_are_refused_beside_reconstructed_ones() -> None:
    """They would count tokens twice."""
    sizes = Sizes()
    given, forest = arrays(sizes), sizes.forest(SECTIONS)
    subset = PageSubset.of(np.arange(4), PAGES, 4)
    plan, of_pages = plans_of(sizes, forest, subset)
    pages = reconstruct(given.latent_pages[subset.page_ids], given.up_key, given.up_value)
    with pytest.raises(PlanError, match=r"^plan: expected a plan of some of the pages, got one of all; make it with"):
        latent_attention(*given, forest, sizes.plan(forest), reconstructed=Reconstructed(pages, of_pages))
    whole = Reconstructed(pages, sizes.plan(forest, absorbed=False))
    with pytest.raises(PlanError, match=r"^reconstructed: expected a plan of some of the pages, got one of all; make"):
        latent_attention(*given, forest, plan, reconstructed=whole)
    with pytest.raises(
        ValueError, match=r"^return_residuals: expected True, for the plan is of some of the pages, got F"
    ):
        latent_attention(*given, forest, plan)
    windowed = Reconstructed(pages, sizes.plan(forest, absorbed=False, subset=subset, window=30))
    with pytest.raises(
        PlanError, match=r"^reconstructed: expected a plan with window = None, as plan has, got Window\("
    ):
        latent_attention(*given, forest, plan, reconstructed=windowed)
    with pytest.raises(TypeError, match=r"^reconstructed: expected a Reconstructed, got int"):
        latent_attention(*given, forest, plan, reconstructed=3)
    few = Reconstructed(jax.tree.map(lambda x: x[:3], pages), of_pages)
    with pytest.raises(ValueError, match=r"^key_pages: expected .*num_pages = 4"):
        latent_attention(*given, forest, plan, reconstructed=few)


def test_subsets_that_do_not_fit_are_refused_by_name() -> None:
    sizes = Sizes()
    forest = sizes.forest(SECTIONS)
    for pages in ([1, 1], [-1], [PAGES]):
        with pytest.raises(ValueError, match=rf"^pages: expected different pages of 0 to {PAGES - 1}, got \["):
            PageSubset.of(np.array(pages), PAGES, 4)
    with pytest.raises(ValueError, match=r"^capacity: expected at least 3, the number of pages, got 2"):
        PageSubset.of(np.arange(3), PAGES, 2)
    last = int(forest.used_pages.max())
    with pytest.raises(ValueError, match=rf"^subset: expected one of a pool of {last + 1} pages .*, got one of a pool"):
        sizes.plan(forest, subset=PageSubset.of(np.arange(2), last, 2))
    subset, homes = PageSubset.of(np.arange(2), PAGES, 2), PagePool.create(PAGES, devices=2).homes
    with pytest.raises(ValueError, match=r"^subset: expected .* on one device, got Homes\(devices=2"):
        sizes.plan(forest, subset=subset, homes=homes)
    plan, whole = sizes.plan(forest, subset=subset), sizes.plan(forest)
    assert replan(plan, forest, subset=subset).subset_pages == 2
    for before, other, capacity in ((plan, None, 2), (plan, subset.rest, 2), (whole, subset, None)):
        with pytest.raises(ValueError, match=rf"^subset: expected one of capacity {capacity}, as the plan before"):
            replan(before, forest, subset=other)
    given = arrays(sizes)
    mesh = jax.make_mesh((1,), ("tensor",))
    with pytest.raises(PlanError, match=r"^plan: expected one of all pages, got one of a subset"):
        forest_attention(
            jnp.zeros((REQUESTS, 1, 4, 40)), given.latent_pages[:2], None, forest, plan, mesh=mesh,
        )  # fmt: skip


def test_nodes_with_many_readers_are_chosen_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rates of an H200: K and V of 128 heads are worth having from 43 readers on, or 15 of 3 query tokens."""
    monkeypatch.setattr(latent_forms, "_BESIDE_US", 0.0)
    sizes = {"num_q_heads": 128, "latent": 512, "rope": 64, "nope": 128, "value": 128, "num_pages": 4096}

    def chosen(readers: int, capacity: int = 1000, **options: Any) -> int:
        forest = Forest.from_nodes([-1] + [0] * readers, [1000] + [40] * readers, list(range(1, readers + 1)))
        return int((choose_reconstructed(forest, **sizes, capacity=capacity, **options).place >= 0).sum())

    assert [chosen(readers) for readers in (1, 2, 16, 42, 43, 256)] == [0, 0, 0, 0, 63, 63]
    assert [chosen(readers, query_tokens=3) for readers in (14, 15)] == [0, 63]
    assert chosen(256, capacity=62) == 0
    # Of two nodes the one with more readers goes first, in whatever order they are; the other is shorter and fits.
    tree = [-1, -1, *[0] * 100, *[1] * 200]
    forest = Forest.from_nodes(tree, [160, 320, *[8] * 300], list(range(2, 302)))
    for capacity, want in ((30, range(30)), (29, range(10, 30)), (20, range(10, 30)), (19, range(10)), (9, ())):
        got = choose_reconstructed(forest, **sizes, capacity=capacity)
        assert np.flatnonzero(got.place >= 0).tolist() == list(want)


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [H200])


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(
    ("heads", "lengths", "readers", "chosen"),
    # By the rates of an H200, 1.16 ns of a token of 16 heads are saved, 9.7 with 256 readers, 9.2 of 128 heads.
    [(16, [4096], 64, 0), (16, [32768], 64, 2048), (16, [4096], 256, 256), (128, [4096], 64, 256),
     (128, [2000], 64, 0), (128, [2000, 2000], 64, 250)],
)  # fmt: skip
def test_none_is_chosen_where_a_second_form_costs_a_call_more_than_all_of_them_save(
    heads: int, lengths: list[int], readers: int, chosen: int
) -> None:
    roots = len(lengths)
    parent = [-1] * roots + [root for root in range(roots) for _ in range(readers)]
    forest = Forest.from_nodes(parent, [*lengths, *[8] * readers * roots], list(range(roots, len(parent))))
    sizes = {"num_q_heads": heads, "latent": 512, "rope": 64, "nope": 128, "value": 128}
    got = choose_reconstructed(forest, **sizes, num_pages=4096, capacity=4096)
    assert (got.place >= 0).sum() == chosen


@pytest.mark.usefixtures("on_an_h200")
def test_what_there_is_no_room_for_does_not_pay_for_others() -> None:
    """Of the first node 634 μs are saved, of the second less than one."""
    tree = [-1, -1, *[0] * 256, *[1] * 64]
    forest = Forest.from_nodes(tree, [8192, 64, *[16] * 320], list(range(2, 322)))
    sizes = {"num_q_heads": 128, "latent": 512, "rope": 64, "nope": 128, "value": 128, "num_pages": 2048}
    assert [(choose_reconstructed(forest, **sizes, capacity=n).place >= 0).sum() for n in (511, 512)] == [0, 512]


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(("document", "computed"), [(2000, 0), (4000, 250)])
def test_steps_have_a_second_form_where_it_pays(document: int, computed: int) -> None:
    config = DecoderConfig(64, 32, 64, 1, 128, 1, 576, qk_norm=False, latent=Latent(512, 128, 64, 128))
    intervals = Intervals(config, 8, 1024, 16, reconstructed_pages=512)
    forest = Forest.from_nodes([-1] + [0] * 64, [document] + [8] * 64, list(range(1, 65)))
    planned = intervals.plan_decoding(forest, 4096, intervals.no_copies)
    assert (len(planned.pages), len(all_plans(planned.plan))) == (computed, 2 if computed else 1)


def test_leaves_that_grow_are_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_forms, "_BESIDE_US", 0.0)
    sizes = {"num_q_heads": 16, "latent": 512, "rope": 64, "nope": 128, "value": 128, "num_pages": 64}
    forest = Forest.from_nodes([-1], [160], [0])
    assert (choose_reconstructed(forest, **sizes, capacity=64, query_tokens=500).place < 0).all()
    shared = Forest.from_nodes([-1], [160], [0, 0])
    assert (choose_reconstructed(shared, **sizes, capacity=64, query_tokens=500).place >= 0).sum() == 10
    with pytest.raises(TypeError, match=r"^forest: expected NumPy arrays"):
        choose_reconstructed(jax.device_put(shared), **sizes, capacity=64)


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
