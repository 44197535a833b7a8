"""The decoder against the same architecture written out in float64 NumPy."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from codec_jax import Forest, KVPages, PagePool, Plan, make_plan
from codec_jax.nnx import Attention, Decoder, DecoderConfig, Llama3Scaling
from codec_jax.nnx.norm import RMSNorm

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=24,
    mlp_size=56,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rope_theta=500.0,
    norm_epsilon=1e-3,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
)
VARIANTS = {
    "Qwen3, tied": CONFIG,
    "Llama, untied": replace(CONFIG, qk_norm=False, tied_embeddings=False),
    "Qwen3, untied, MQA": replace(CONFIG, tied_embeddings=False, num_kv_heads=1),
    "Llama, tied, MHA": replace(CONFIG, qk_norm=False, num_kv_heads=4),
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
PAGE_SIZE, NUM_PAGES, REQUESTS = 8, 24, 4


def model_of(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder in which everything counts: random norms, and weights large enough for sharp attention."""
    model = Decoder(config, nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    graph, weights = nnx.split(model)
    weights = jax.tree.map(
        lambda x: jnp.asarray(
            rng.uniform(0.5, 1.5, x.shape) if x.ndim == 1 else rng.normal(size=x.shape) * 1.5 * x.shape[0] ** -0.5,
            x.dtype,
        ),
        weights,
    )
    return nnx.merge(graph, weights)


# --- The architecture, plainly ----------------------------------------------------------------------------------


def exact(weight: nnx.Variable) -> np.ndarray:
    return np.asarray(weight[...].astype(jnp.float32), np.float64)


def exact_norm(x: np.ndarray, norm: RMSNorm, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * exact(norm.scale)


def exact_rope(x: np.ndarray, theta: float) -> np.ndarray:
    """Turn (x[i], x[i + H/2]) of the token at each position by position * theta^(-2i/H): x is [T, heads, H]."""
    half = x.shape[-1] // 2
    turned = x.copy()
    for position in range(len(x)):
        for i in range(half):
            angle = position * theta ** (-2 * i / x.shape[-1])
            left, right = x[position, :, i], x[position, :, i + half]
            turned[position, :, i] = left * np.cos(angle) - right * np.sin(angle)
            turned[position, :, i + half] = right * np.cos(angle) + left * np.sin(angle)
    return turned


def exact_attention(x: np.ndarray, layer: Attention, config: DecoderConfig) -> np.ndarray:
    tokens, head_dim = len(x), config.head_dim
    heads = (x @ exact(layer.query_key_value.kernel)).reshape(tokens, -1, head_dim)
    assert heads.shape[1] == config.num_q_heads + 2 * config.num_kv_heads
    query, key = heads[:, : config.num_q_heads], heads[:, config.num_q_heads : -config.num_kv_heads]
    value = heads[:, -config.num_kv_heads :]
    if config.qk_norm:
        query = exact_norm(query, layer.query_norm, config.norm_epsilon)
        key = exact_norm(key, layer.key_norm, config.norm_epsilon)
    query, key = exact_rope(query, config.rope_theta), exact_rope(key, config.rope_theta)
    out = np.zeros(query.shape)
    for t in range(tokens):
        for head in range(config.num_q_heads):
            kv_head = head * config.num_kv_heads // config.num_q_heads
            scores = key[: t + 1, kv_head] @ query[t, head] / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ value[: t + 1, kv_head] / weights.sum()
    return out.reshape(tokens, -1) @ exact(layer.out.kernel)


def exact_logits(model: Decoder, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] after each token of one sequence."""
    config = model.config
    x = exact(model.embedding.embedding)[tokens]
    for block in model.blocks:
        x = x + exact_attention(exact_norm(x, block.attention_norm, config.norm_epsilon), block.attention, config)
        hidden = exact_norm(x, block.mlp_norm, config.norm_epsilon)
        gate, up = np.split(hidden @ exact(block.mlp.gate_up.kernel), 2, axis=-1)
        x = x + gate / (1 + np.exp(-gate)) * up @ exact(block.mlp.down.kernel)
    x = exact_norm(x, model.norm, config.norm_epsilon)
    return x @ (exact(model.embedding.embedding).T if config.tied_embeddings else exact(model.head.kernel))


class Jitted:
    """A decoder's two ways of computing logits, compiled."""

    def __init__(self, model: Decoder) -> None:
        graph, weights = nnx.split(model)
        self.dense = partial(jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens)), weights)
        self.over_forest = partial(jax.jit(partial(self._over_forest, graph)), weights)

    @staticmethod
    def _over_forest(
        graph: nnx.GraphDef,
        weights: nnx.State,
        tokens: jax.Array,
        cache: tuple[KVPages, ...],
        forest: Forest,
        plan: Plan,
        store: jax.Array | bool = True,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        model = nnx.merge(graph, weights)
        hidden, cache = model.decode(tokens, cache, forest, plan, store=store)
        return model.logits(hidden), cache


def assert_close(got: jax.Array, want: np.ndarray, tolerance: float = 2e-4) -> None:
    chex.assert_type(got, jnp.float32)
    chex.assert_trees_all_close(np.asarray(got, np.float64), want, atol=tolerance, rtol=tolerance)


# --- Dense ------------------------------------------------------------------------------------------------------


@every_variant
def test_dense_logits_are_those_of_the_architecture(config: DecoderConfig) -> None:
    model = model_of(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 21), np.int32)
    want = np.stack([exact_logits(model, row) for row in tokens.tolist()])
    assert want.std() > 0.5  # or a wrong layer might hide in the tolerance
    assert_close(Jitted(model).dense(tokens), want)


# --- Over a forest ----------------------------------------------------------------------------------------------


def plan_of(config: DecoderConfig, forest: Forest, query_tokens: int, steps: int = 1) -> Plan:
    return make_plan(
        forest,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        steps=steps,
        query_tokens=query_tokens,
        num_ctas=3,
        tile_rows=8,
        block_tokens=16,
        block_capacity=64,
    )


def last_tokens(contexts: list[list[int]], count: int) -> np.ndarray:
    """The last `count` tokens of each request, to the right; free request slots and missing tokens are 0."""
    rows = [([0] * count + context)[-count:] for context in contexts]
    return np.asarray(rows + [[0] * count] * (REQUESTS - len(rows)), np.int32)


@pytest.mark.parametrize(
    ("variant", "query_tokens"), [("Qwen3, tied", 1), ("Qwen3, untied, MQA", 3), ("Llama, untied", 3)]
)
def test_decoding_over_a_forest_gives_the_logits_of_each_context_alone(variant: str, query_tokens: int) -> None:
    """Three prompts in one call, a fork inside a page, then steps in which requests grow at their own pace."""
    config = VARIANTS[variant]
    model = model_of(config)
    jitted = Jitted(model)
    rng = np.random.default_rng(2)
    contexts = [rng.integers(0, config.vocab_size, length).tolist() for length in (21, 16, 11)]

    def check(logits: jax.Array) -> None:
        for row, context in zip(logits, contexts, strict=False):
            want = exact_logits(model, context)[-len(row) :]
            assert_close(row[-len(want) :], want)

    cache = model.new_cache(NUM_PAGES, PAGE_SIZE)
    forest = Forest.from_nodes([-1] * 3, [21, 16, 11], range(3), page_size=PAGE_SIZE, request_capacity=REQUESTS)
    plan = plan_of(config, forest, 21)
    logits, cache = jitted.over_forest(last_tokens(contexts, 21), cache, forest, plan)
    check(logits)

    forest, new = forest.fork([0])
    contexts.append(list(contexts[0]))
    assert new.tolist() == [3]
    forest, _ = forest.reserve(PagePool.create(NUM_PAGES, forest.used_pages), 10)
    plan = plan_of(config, forest, query_tokens, steps=10)
    for _ in range(10 // query_tokens):
        counts = [query_tokens, *rng.integers(0, query_tokens + 1, 3).tolist()]
        for context, count in zip(contexts, counts, strict=True):
            context.extend(rng.integers(0, config.vocab_size, count).tolist())
        forest = forest.extend(np.asarray(counts))
        # Tokens of earlier steps that are among the last ones are computed and stored again.
        logits, cache = jitted.over_forest(last_tokens(contexts, query_tokens), cache, forest, plan)
        check(logits)


def test_tokens_that_are_not_to_be_stored_leave_every_page_as_it_was() -> None:
    model = model_of(CONFIG)
    forest = Forest.from_nodes([-1, -1], [5, 9], [0, 1], page_size=PAGE_SIZE, request_capacity=REQUESTS)
    cache = jax.tree.map(lambda pages: pages + 7.0, model.new_cache(NUM_PAGES, PAGE_SIZE))
    decode = partial(Jitted(model).over_forest, np.ones((REQUESTS, 2), np.int32), cache, forest)
    plan = plan_of(CONFIG, forest, 2)

    def changed_by(store: list[list[bool]]) -> list[list[int]]:
        """The (page, offset) pairs that every layer has written, K and V alike."""
        _, written = decode(plan, np.asarray(store + [[True, True]] * 2))
        changed = [
            np.argwhere((np.asarray(old) != np.asarray(new)).any(axis=(2, 3))).tolist()
            for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(written), strict=True)
        ]
        assert all(places == changed[0] for places in changed)
        return changed[0]

    # Request 0 has page 0, request 1 has pages 1 and 2; slots 2 and 3 are free, whatever they are to store.
    assert changed_by([[True, True], [True, True]]) == [[0, 3], [0, 4], [1, 7], [2, 0]]
    assert changed_by([[False, True], [False, False]]) == [[0, 4]]
    assert changed_by([[False, False], [True, False]]) == [[1, 7]]


def test_new_cache_has_empty_pages_for_every_layer() -> None:
    cache = Decoder(replace(CONFIG, dtype=jnp.bfloat16), nnx.Rngs(0)).new_cache(NUM_PAGES, PAGE_SIZE)
    assert len(cache) == CONFIG.num_layers
    for pages in cache:
        chex.assert_shape([pages.key, pages.value], (NUM_PAGES, PAGE_SIZE, 2, 12))
        chex.assert_type([pages.key, pages.value], jnp.bfloat16)
        np.testing.assert_array_equal(pages.key.astype(jnp.float32), 0.0)
        np.testing.assert_array_equal(pages.value.astype(jnp.float32), 0.0)


# --- Types and sizes --------------------------------------------------------------------------------------------


def test_bfloat16_is_close_to_the_exact_logits_of_the_same_weights() -> None:
    config = replace(CONFIG, num_layers=1, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = model_of(config)
    jitted = Jitted(model)
    chex.assert_type(jax.tree.leaves(nnx.state(model)), jnp.bfloat16)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (REQUESTS, 16), np.int32)
    want = np.stack([exact_logits(model, row) for row in tokens.tolist()])
    forest = Forest.from_nodes([-1] * REQUESTS, [16] * REQUESTS, range(REQUESTS), page_size=PAGE_SIZE)
    cache = model.new_cache(NUM_PAGES, PAGE_SIZE)
    with jax.numpy_dtype_promotion("standard"):  # JAX's dense attention promotes to float32 implicitly
        dense = jitted.dense(tokens)
    over_forest, _ = jitted.over_forest(tokens, cache, forest, plan_of(config, forest, 16))
    for got in (dense, over_forest):
        chex.assert_type(got, jnp.float32)
        chex.assert_tree_all_finite(got)
        error = np.abs(np.asarray(got, np.float64) - want)
        assert error.mean() < 0.02 * want.std()


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim"],
)
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected an integer of at least 1, got {value}"):
        replace(CONFIG, **{name: value})


def test_q_heads_must_be_a_multiple_of_kv_heads() -> None:
    with pytest.raises(ValueError, match=r"^num_q_heads: expected a multiple of num_kv_heads = 3, got 4"):
        replace(CONFIG, num_kv_heads=3)


def test_head_size_must_be_even() -> None:
    with pytest.raises(ValueError, match=r"^head_dim: expected an even number .*, got 13"):
        replace(CONFIG, head_dim=13)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ((0.0, 1.0, 4.0, 64), "^factor: expected a positive number, got 0.0"),
        ((8.0, 4.0, 4.0, 64), "^high_frequency_factor: expected more than low_frequency_factor, .* got 4.0 and 4.0"),
        ((8.0, 0.0, 4.0, 64), "^high_frequency_factor: .* both positive, got 4.0 and 0.0"),
        ((8.0, 1.0, 4.0, 0), "^original_context: expected an integer of at least 1, got 0"),
    ],
)
def test_rotary_scaling_that_cannot_be_is_refused(factors: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama3Scaling(*factors)


def test_a_cache_for_another_number_of_layers_is_refused() -> None:
    model = model_of(CONFIG)
    forest = Forest.from_nodes([-1], [5], [0], page_size=PAGE_SIZE)
    cache = model.new_cache(NUM_PAGES, PAGE_SIZE)[:1]
    with pytest.raises(ValueError, match="shorter"):
        jax.eval_shape(Jitted(model).over_forest, np.zeros((1, 1), np.int32), cache, forest, plan_of(CONFIG, forest, 1))
