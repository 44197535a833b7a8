"""Draft trees: against trees walked in plain Python, float64 attention, and dense logits of every root path."""

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forests import Tree, ancestry, candidate_parents, depth_first, renumbered, seeds, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import Arrays, Heads, attend, check

from codec_jax import DraftTrees, Forest, KVPages, PagePool, Plan, make_plan
from codec_jax.attention import forest_attention
from codec_jax.forest import NO_SLOT
from codec_jax.nnx import Decoder, DecoderConfig

REQUESTS, PAGES = 6, 128


def drafted(tree: Tree, tokens: int, page_size: int, seed: int, more: int = 0) -> Forest:
    """The tree with `tokens` candidates, and room for `more` tokens, for each request, on scattered pages."""
    forest = Forest.from_nodes(*tree, page_size=page_size, request_capacity=REQUESTS)
    forest, _ = forest.reserve(PagePool.create(PAGES, forest.used_pages), tokens + more)
    pages = np.random.default_rng(seed).permutation(PAGES)
    scattered = forest.tree._replace(page_ids=pages[forest.used_pages])
    return Forest.build(scattered, page_capacity=PAGES, node_capacity=64).extend(tokens)


@jax.jit
def built_and_sorted(parent: jax.Array) -> tuple[DraftTrees, jax.Array]:
    drafts = DraftTrees.from_parents(parent)
    return drafts, drafts.sort(parent)


# --- Trees ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12).flatmap(lambda count: st.lists(candidate_parents(count), min_size=1, max_size=4)))
def test_trees_are_what_walking_them_says(parents: list[list[int]]) -> None:
    drafts = DraftTrees.from_parents(np.asarray(parents))
    for row, parent in enumerate(parents):
        order, place = depth_first(parent), renumbered(parent)
        assert drafts.order[row].tolist() == order
        assert drafts.parent[row].tolist() == place
        assert drafts.depth[row].tolist() == [len(ancestry(place, t)) - 1 for t in range(len(parent))]
        seen_by = [[t for t in range(len(parent)) if j in ancestry(place, t)] for j in range(len(parent))]
        assert [list(range(j, end)) for j, end in enumerate(drafts.subtree_end[row].tolist())] == seen_by
        sorted_twice = drafts.sort(np.asarray(parents)[..., None] * np.asarray([1, 2]))[row]
        np.testing.assert_array_equal(sorted_twice, [[parent[i], 2 * parent[i]] for i in order])


@settings(max_examples=30)
@given(st.lists(candidate_parents(9), min_size=3, max_size=3))
def test_trees_built_on_the_device_are_those_of_the_host(parents: list[list[int]]) -> None:
    on_host = DraftTrees.from_parents(np.asarray(parents))
    drafts, tokens = built_and_sorted(jnp.asarray(parents))
    chex.assert_trees_all_equal(drafts, on_host)
    np.testing.assert_array_equal(tokens, np.take_along_axis(np.asarray(parents), on_host.order, axis=1))


@pytest.mark.parametrize(
    ("parent", "problem"),
    [
        ([[-1, 0], [-1, 1]], r"a candidate that comes before its child, got parent\[1, 1\] = 1"),
        ([[-1, -2]], r"got parent\[0, 1\] = -2"),
        ([-1, 0], r"expected integers \[B, T\], got int64 of shape \(2,\)"),
        ([[-1.0, 0.0]], r"expected integers \[B, T\], got float64"),
    ],
    ids=str,
)
def test_parents_that_cannot_be_are_refused(parent: list, problem: str) -> None:
    with pytest.raises(ValueError, match=f"parent: .*{problem}"):
        DraftTrees.from_parents(np.asarray(parent))


# --- Attention --------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What one compiled step serves."""

    heads: Heads
    tokens: int
    page_size: int = 16
    tile_rows: int = 16
    block_tokens: int = 64
    num_ctas: int = 5
    lanes: int = 1
    policy: str = "aligned"

    def plan(self, forest: Forest, steps: int = 1) -> Plan:
        tiles = -(-REQUESTS * self.tokens * (self.heads.q // self.heads.kv) // self.tile_rows)
        return make_plan(
            forest,
            num_q_heads=self.heads.q,
            num_kv_heads=self.heads.kv,
            head_dim=self.heads.dim,
            steps=steps,
            query_tokens=self.tokens,
            num_ctas=self.num_ctas,
            tile_rows=self.tile_rows,
            block_tokens=self.block_tokens,
            lanes=self.lanes,
            block_capacity=tiles * PAGES,
            segment_capacity=64,
            policy=self.policy,
        )


LAYOUTS = {
    "some candidates": Layout(Heads(4, 2, 16), 5),
    "one candidate": Layout(Heads(2, 1, 16), 1),
    "pages in places of their own": Layout(Heads(4, 2, 16), 5, block_tokens=32, policy="invariant"),
    # Pages of candidates that none of a tile's rows comes before, and yet not all of them descend from.
    "candidates over several pages and tiles": Layout(Heads(4, 1, 16), 21, page_size=8, tile_rows=8, block_tokens=16),
    "pages in parts, pairs of tiles": Layout(Heads(6, 2, 16), 9, page_size=32, tile_rows=9, block_tokens=16, lanes=2),
    "a request over more than a pair of tiles": Layout(Heads(4, 1, 16), 12, page_size=8, block_tokens=32, lanes=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_candidates_see_their_context_and_their_ancestors_only(layout: Layout) -> None:
    parents = st.lists(candidate_parents(layout.tokens).map(renumbered), min_size=REQUESTS, max_size=REQUESTS)

    @settings(max_examples=15)
    @given(trees(max_nodes=6, max_length=40, max_requests=REQUESTS), parents, seeds)
    def check_one(tree: Tree, parent: list[list[int]], seed: int) -> None:
        forest = drafted(tree, layout.tokens, layout.page_size, seed)
        arrays = Arrays.random(forest, layout.heads, jnp.float32, seed, layout.tokens, PAGES)
        check(arrays, forest, layout.plan(forest), implementation="xla", parent=parent)

    check_one()


def test_one_plan_serves_passes_of_changing_trees_and_growing_contexts() -> None:
    layout, rng = LAYOUTS["candidates over several pages and tiles"], np.random.default_rng(0)
    tree = Tree([-1, 0, 0, 1], [30, 10, 3, 8], [3, 2, 1, 2, 0])
    forest = drafted(tree, layout.tokens, layout.page_size, seed=0, more=20)
    plan = layout.plan(forest, steps=20)
    for step in range(4):
        parent = [renumbered([rng.integers(-1, t) if t else -1 for t in range(layout.tokens)]) for _ in range(REQUESTS)]
        arrays = Arrays.random(forest, layout.heads, jnp.float32, step, layout.tokens, PAGES)
        check(arrays, forest, plan, implementation="xla", parent=parent)
        forest = forest.extend(rng.integers(0, 7, REQUESTS)) if step < 3 else forest


@given(trees(max_nodes=4, max_length=40, max_requests=3), seeds)
def test_blocks_without_a_mask_hold_no_candidates(tree: Tree, seed: int) -> None:
    """The kernels look at no mask there, whatever the trees are."""
    layout = LAYOUTS["candidates over several pages and tiles"]._replace(block_tokens=8)  # a page each
    forest = drafted(tree, layout.tokens, layout.page_size, seed)
    plan = layout.plan(forest)
    for segment in plan.arrays.segments[: plan.arrays.cta_ptr[-1]]:
        _, node, token, _ = np.moveaxis(plan.arrays.block_pages[segment[3] : segment[4]], -1, 0)
        is_leaf = np.isin(node, forest.leaf[forest.active])
        assert not (is_leaf & (token + plan.arrays.page_tokens > forest.length[node] - layout.tokens)).any()


def test_a_chain_of_candidates_is_causal_attention() -> None:
    layout = LAYOUTS["some candidates"]
    forest = drafted(Tree([-1, 0, 0], [30, 9, 0], [1, 2, 2]), layout.tokens, layout.page_size, seed=1)
    arrays, plan = Arrays.random(forest, layout.heads, jnp.float32, 0, layout.tokens, PAGES), layout.plan(forest)
    chain = DraftTrees.from_parents(np.tile(np.arange(layout.tokens) - 1, (REQUESTS, 1)))
    chex.assert_trees_all_close(
        attend(*arrays, forest, plan, drafts=chain, implementation="xla"),
        attend(*arrays, forest, plan, implementation="xla"),
        atol=1e-6,
    )


def test_drafts_that_do_not_fit_raise_on_the_host_and_give_nan_on_the_device() -> None:
    heads, tokens = Heads(2, 1, 16), 3
    options = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "query_tokens": tokens}
    parent = np.asarray([[-1, 0, 0], [-1, 0, 1]])
    good = DraftTrees.from_parents(parent)
    invalid = jax.jit(DraftTrees.from_parents)(jnp.asarray(parent).at[1, 2].set(2))
    owned, shared = Forest.from_nodes([-1, 0, 0], [9, 4, 3], [2, 1]), Forest.from_nodes([-1, 0], [9, 4], [1, 1])
    short = Forest.from_nodes([-1, 0, 0], [9, 4, 2], [2, 1])
    for forest, drafts, problem in (
        (owned, good, None),
        (owned, invalid, ""),
        (shared, good, "request 0 with 4 tokens in a leaf of 2 readers"),
        (short, good, "request 0 with 2 tokens in a leaf of 1 readers"),
    ):
        arrays = Arrays.random(forest, heads, jnp.float32, 0, tokens, 4)
        plan = make_plan(forest, **options)
        on_device = attend(*arrays, *jax.device_put((forest, plan)), drafts=drafts, implementation="xla")
        assert bool(jnp.isnan(on_device).all() if problem is not None else jnp.isfinite(on_device).all())
        if problem:
            with pytest.raises(ValueError, match=f"drafts: .*{problem}"):
                forest_attention(*arrays, forest, plan, drafts=drafts)
    arrays = Arrays.random(owned, heads, jnp.float32, 0, tokens, 4)
    plan, drafts = make_plan(owned, **options), DraftTrees.from_parents(parent[:1])
    with pytest.raises(ValueError, match=r"^drafts: expected shape \[B = 2, T = 3\], got \(1, 3\)"):
        forest_attention(*arrays, owned, plan, drafts=drafts)


# --- A model's passes -------------------------------------------------------------------------------------------

CONFIG = DecoderConfig(
    vocab_size=30,
    hidden_size=24,
    mlp_size=40,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
)


def test_passes_give_the_dense_logits_of_every_root_path_and_accepted_tokens_are_kept() -> None:
    """Three passes over random trees, of which random paths are accepted, each against the model's dense attention."""
    tokens, page_size, num_pages, rng = 7, 8, 48, np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"):
        graph, weights = nnx.split(Decoder(CONFIG, nnx.Rngs(0)))
        weights = jax.tree.map(lambda x: x * 3, weights)  # sharper than an untrained model
        model = nnx.merge(graph, weights)
        dense = jax.jit(lambda context: model(context[None])[0])  # of 40 tokens, padding included
        # Two requests share a document of 11 tokens, and a fourth slot is free.
        document = rng.integers(0, 30, 11).tolist()
        contexts = [[*document, 3], [*document, 4, 5], [6] * 9]
        forest = Forest.from_sequences(contexts, page_size=page_size, request_capacity=4)
        forest, _ = forest.reserve(PagePool.create(num_pages, forest.used_pages), 3 * tokens)
        cache = model.new_cache(num_pages, page_size)
        heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        # Prefill, the plain way: every token of every request in one causal pass, shared ones twice alike.
        view, node = forest.chunks(16)
        rows = np.zeros((len(node), 16), np.int64)
        readers = forest.request_of_row[forest.row_lo[node]]
        for row, reader in enumerate(readers.tolist()):
            rows[row] = np.asarray(contexts[reader])[np.maximum(view.positions(16)[row], 0)]
        plan = make_plan(view, query_tokens=16, **heads)
        _, cache = jax.jit(model.decode)(jnp.asarray(rows), cache, view, plan, store=view.slots(16) != NO_SLOT)

        @partial(jax.jit, donate_argnums=0)
        def verify(cache: Any, forest: Forest, plan: Plan, parent: jax.Array, candidates: jax.Array) -> Any:
            drafts = DraftTrees.from_parents(parent)
            hidden, cache = model.decode(
                drafts.sort(candidates), cache, forest.extend(tokens), plan, drafts=drafts, implementation="xla"
            )
            return drafts, model.logits(hidden), cache

        @partial(jax.jit, donate_argnums=0)
        def accept(cache: Any, forest: Forest, drafts: DraftTrees, path: jax.Array, count: jax.Array) -> Any:
            forest, source, target = drafts.accept(forest, path, count)
            return forest, tuple(pages.move(source, target) for pages in cache)

        plan = make_plan(forest.extend(tokens), query_tokens=tokens, steps=2 * tokens, **heads)
        on_device = jax.device_put(forest)
        for _ in range(3):
            parent = np.asarray([[-1, *(rng.integers(max(t - 3, -1), t) for t in range(1, tokens))] for _ in range(4)])
            candidates = rng.integers(0, 30, (4, tokens))
            drafts, logits, cache = verify(cache, on_device, plan, jnp.asarray(parent), jnp.asarray(candidates))
            paths, counts = np.zeros((4, tokens), np.int32), np.zeros(4, np.int32)
            for request, context in enumerate(contexts):
                order, place = depth_first(parent[request]), renumbered(parent[request])
                in_place = candidates[request][order].tolist()
                for t in range(tokens):
                    text = context + [in_place[a] for a in ancestry(place, t)]
                    padded = jnp.asarray(text + [0] * (40 - len(text)))
                    np.testing.assert_allclose(logits[request, t], dense(padded)[len(text) - 1], atol=2e-4)
                path = ancestry(place, int(rng.integers(tokens)))
                paths[request, : len(path)], counts[request] = path, len(path)
                contexts[request] = context + [in_place[a] for a in path]
            on_device, cache = accept(cache, on_device, drafts, jnp.asarray(paths), jnp.asarray(counts))
            lengths = [len(context) for context in contexts]
            assert np.asarray(on_device.request_length).tolist() == [*lengths, 0]


@pytest.mark.parametrize(
    ("path", "count", "message"),
    [
        ([[0], [1]], [3, 1], r"path: expected 3 places in \[0, 4\) .* for request 0, got \[0\]"),
        ([[0, 1], [1, 9]], [2, 2], r"path: expected 2 places in \[0, 4\) .* for request 1, got \[1, 9\]"),
        ([[0, 1], [-5, 0]], [2, 1], r"path: expected 1 places in \[0, 4\) .* for request 1, got \[-5, 0\]"),
        # Paths that are none: a child before its parent, one place twice, two roots, one that is not below the other.
        (
            [[1, 0], [1, 2]],
            [2, 2],
            r"path: .* from a root down, each below the one before it, for request 0, got \[1, 0\]",
        ),
        ([[0, 0], [1, 2]], [2, 2], r"path: .* for request 0, got \[0, 0\]"),
        ([[0, 1], [0, 1]], [2, 2], r"path: .* for request 1, got \[0, 1\]"),
        ([[0, 2], [1, 2]], [2, 1], r"path: .* for request 0, got \[0, 2\]"),
        ([0, 1], [1, 1], r"path: expected \[B, A\] with B = 2 and A of at most T = 4, got shape \(2,\)"),
        ([[0], [1]], 1, r"count: expected shape \[B = 2\], got \(\)"),
    ],
)
def test_what_cannot_be_accepted_raises_on_the_host_and_spoils_the_forest_on_the_device(
    path: list, count: int | list[int], message: str
) -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    forest, _ = forest.reserve(PagePool.create(64, forest.used_pages), 20)
    trees = DraftTrees.from_parents(np.array([[-1, 0, 0, 1], [-1, -1, 1, 1]]))
    for array in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match=message):
            trees.accept(forest, array(path), array(count))
    if np.ndim(path) == 2 and np.ndim(count) == 1:
        plan = make_plan(forest, num_q_heads=1, num_kv_heads=1, head_dim=8, steps=8)
        after = jax.jit(trees.accept)(forest, jnp.asarray(path), jnp.asarray(count))[0]
        assert bool(plan.is_valid_for(forest))
        assert not bool(plan.is_valid_for(after))


def test_paths_may_be_unsigned() -> None:
    forest = Forest.from_sequences([[1, 2, 3]])
    forest, _ = forest.reserve(PagePool.create(64, forest.used_pages), 20)
    trees, count = DraftTrees.from_parents(np.array([[-1, 0, 1, 0]])), np.array([3])
    for dtype in (np.int32, np.uint8, np.uint32, np.uint64):
        after, source, _ = trees.accept(forest, np.array([[0, 1, 2]], dtype), count)
        assert after.request_length.tolist() == [6]
        assert source.tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8])
def test_paths_and_counts_may_be_narrow_and_what_cannot_be_accepted_spoils_the_forest_all_the_same(
    dtype: type[np.integer],
) -> None:
    forest, _ = Forest.from_nodes([-1], [26], [0]).reserve(PagePool.create(40, np.arange(2)), 300)
    plan = make_plan(forest, num_q_heads=1, num_kv_heads=1, head_dim=8, steps=300)
    trees = DraftTrees.from_parents(np.asarray([[-1, -1, 0, 0]]))
    accept = jax.jit(lambda path, count: trees.accept(forest, path, count)[0])
    assert not bool(plan.is_valid_for(accept(jnp.array([[3, 0]]), jnp.array([2], dtype))))
    assert accept(jnp.array([[0, 2]], dtype), jnp.array([2], dtype)).request_length.tolist() == [28]
    many = DraftTrees.from_parents(np.full((1, 200), -1))
    after = jax.jit(lambda path: many.accept(forest, path, np.array([1]))[0])(jnp.array([[5]], dtype))
    assert after.request_length.tolist() == [27]


def test_positions_are_depths_below_the_context() -> None:
    forest = Forest.from_nodes([-1, 0, 0], [9, 5, 4], [2, 1], request_capacity=3)
    drafts = DraftTrees.from_parents(np.asarray([[-1, 0, 1, 0], [-1, -1, 0, 1], [-1, -1, -1, -1]]))
    assert drafts.positions(forest)[:2].tolist() == [[9, 10, 11, 10], [10, 11, 10, 11]]


@given(st.data(), seeds)
def test_moves_read_all_before_they_write(data: st.DataObject, seed: int) -> None:
    pages = KVPages(*(jnp.asarray(np.random.default_rng(seed).normal(size=(3, 8, 1, 2)), jnp.float32) for _ in "kv"))
    slots = st.one_of(st.integers(0, 23), st.just(int(NO_SLOT)))
    source = data.draw(st.lists(slots, min_size=6, max_size=6))
    target = data.draw(st.permutations(range(24)))[:4] + [int(NO_SLOT)] * 2
    moved = jax.jit(KVPages.move)(pages, jnp.asarray([source]), jnp.asarray([target]))
    for before, after in ((pages.key, moved.key), (pages.value, moved.value)):
        before, after = (np.asarray(x).reshape(24, 1, 2) for x in (before, after))
        expected = before.copy()
        for a, b in zip(source, target, strict=True):
            if NO_SLOT not in (a, b):
                expected[b] = before[a]
        np.testing.assert_array_equal(after, expected)
