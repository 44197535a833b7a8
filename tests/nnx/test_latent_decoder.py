"""Decoders with latent attention and the mixture of DeepSeek-V3: over forests, in files with float8, and refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONTEXT, LONG, PROMPTS, VOCAB, Dense, assert_logits_follow, numbered
from flax import nnx
from latent_cases import CONFIG, LATENT, MIXTURE, mesh_of, sharp
from small_checkpoints import assert_read_to_its_devices, write

from codec_jax import DraftTrees, Forest, PagePool, PageSubset, make_plan
from codec_jax.attention import backends
from codec_jax.nnx import (
    Decoder,
    DecoderConfig,
    Latent,
    Mixture,
    MultiHeadLatentAttention,
    Sampler,
    YarnScaling,
    intervals,
    open_checkpoint,
    random_decoder,
)
from codec_jax.nnx.checkpoint_config import read_config
from codec_jax.nnx.experts import Experts
from codec_jax.nnx.memory import pages_that_fit
from codec_jax.planning import default_tiling, planner
from codec_jax.rollout import Policy
from pallas_kernels import HOPPER, HOPPER_LATENT, Family

IN_FLOAT8 = replace(
    CONFIG, num_layers=1, mixture=None, latent=replace(LATENT, size=128), head_dim=136, kv_dtype=jnp.float8_e4m3fn
)


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense(sharp(CONFIG))


# --- Over forests ------------------------------------------------------------------------------------------------


def test_candidates_of_a_draft_tree_see_their_ancestors_and_are_kept(dense: Dense) -> None:
    model, heads = dense.model, {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 144}
    prompt, paths, decode = LONG[:20], [[7], [7, 8], [7, 9], [7, 9, 10]], jax.jit(model.decode)
    forest = Forest.from_nodes([-1], [20], [0], page_size=8)
    plan = make_plan(forest, query_tokens=20, **heads)
    _, cache = decode(np.asarray([prompt]), model.new_cache(16, 8), forest, plan)
    forest, _ = forest.reserve(PagePool.create(16, np.arange(3)), 8)
    drafts, drafted = DraftTrees.from_parents(np.asarray([[-1, 0, 0, 2]])), forest.extend(4)
    plan = make_plan(drafted, query_tokens=4, **heads)
    hidden, cache = decode(np.asarray([[7, 8, 9, 10]]), cache, drafted, plan, drafts=drafts)
    got = np.asarray(model.logits(hidden))[0]
    for candidate, path in enumerate(paths):
        np.testing.assert_allclose(got[candidate], dense.logits([*prompt, *path]), atol=1e-4, rtol=1e-4)
    accepted, source, target = drafts.accept(forest, np.asarray([[0, 2, 3]]), np.asarray([3]))
    forest = accepted.extend()
    cache = tuple(pages.move(source, target) for pages in cache)
    hidden, _ = decode(np.asarray([[11]]), cache, forest, make_plan(forest, **heads))
    want = dense.logits([*prompt, *paths[3], 11])
    np.testing.assert_allclose(model.logits(hidden)[0, 0], want, atol=1e-4, rtol=1e-4)


def test_a_sampler_on_a_mesh_says_what_the_whole_decoder_says() -> None:
    dense = Dense(sharp(replace(CONFIG, mixture=replace(MIXTURE, num_experts=8, groups=4))))
    sampler = Sampler(
        dense.model, mesh=mesh_of(2, 2), max_requests=4, num_pages=64, page_size=8, max_context=CONTEXT, steps=8
    )
    state, texts = sampler.start(PROMPTS), numbered(PROMPTS)
    assert_logits_follow(state, texts, dense)
    for pages in state.cache:
        shards = pages.latent.addressable_shards
        assert [shard.data.shape for shard in shards] == [(32, 8, 1, LATENT.page_dim)] * 4
    _, generated = sampler.decode(state, 12, temperature=0.0)
    for request, text in texts.items():
        assert generated.tokens[request] == dense.greedy(text, 12)


def test_a_decoder_of_deepseeks_sizes_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both forms: PAC and POR over latents, and over K and V of what is shared."""
    latent = Latent(size=512, nope_dim=128, rope_dim=64, value_dim=128)
    config = replace(CONFIG, num_layers=1, latent=latent, head_dim=576, mixture=None, dtype=jnp.bfloat16)
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a test's device", core_count=132)
    forest, _ = Forest.from_nodes([-1, 0, 0], [40, 3, 9], [1, 2]).reserve(PagePool.create(16, np.arange(5)), 1)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [hopper])
        for module in (intervals, planner):
            patch.setattr(module, "default_tiling", default_tiling)
        planner_of_both = intervals.Intervals(config, 1, 16, 16, reconstructed_pages=4)
        plans = planner_of_both.plan(forest, 1, None, PageSubset.of(forest.pages_of(0), 16, 4))
    of_heads: list[Any] = []  # how such a call is lowered, `tests/kernels` has

    def attend(call: Any, scores: Any) -> Any:
        of_heads.append((call.query.shape, call.query.dtype, call.key_pages.shape, scores.scale))
        rows = jnp.zeros(call.query.shape[:3], jnp.float32)
        return jnp.zeros((*rows.shape, 128), call.query.dtype), rows, rows

    def on_hopper(family: Family) -> Family:
        return family._replace(why_not=lambda heads, _, *rest: family.why_not(heads, hopper, *rest))

    monkeypatch.setattr(backends, "BACKENDS", (on_hopper(HOPPER)._replace(attend=attend), on_hopper(HOPPER_LATENT)))
    model = Decoder(config, nnx.Rngs(0))
    graph, weights = nnx.split(model)

    def step(weights: Any, cache: Any) -> Any:
        tokens = jnp.zeros((2, 1), jnp.int32)
        return nnx.merge(graph, weights).decode(tokens, cache, forest.extend(), plans, implementation="mosaic")

    traced = jax.jit(step).trace(weights, config.new_cache(16, 16, 4))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu") == 2
    assert of_heads == [((2, 1, 4, 192), jnp.float16, (4, 16, 4, 192), config.scale)]


def test_bfloat16_is_close_to_float32() -> None:
    graph, weights = nnx.split(sharp(replace(CONFIG, softcap=50.0)))
    rounded = jax.tree.map(lambda x: (0.3 * x).astype(jnp.bfloat16), weights)
    exact = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    low = Decoder(replace(exact.config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), nnx.Rngs(0))
    kinds = nnx.split(low)[1]
    low = nnx.merge(nnx.graphdef(low), jax.tree.map(lambda x, kind: x.astype(kind.dtype), rounded, kinds))
    assert low.blocks[1].mlp.choice_bias.dtype == jnp.float32
    want = np.stack([Dense(exact).logits(prompt) for prompt in PROMPTS[:2]])
    state = Sampler(low, max_requests=2, num_pages=32, page_size=8, max_context=CONTEXT).start(PROMPTS[:2])
    assert {array.dtype for array in jax.tree.leaves(state.cache)} == {jnp.dtype(jnp.bfloat16)}
    for got in (state.logits, np.stack([Dense(low).logits(prompt) for prompt in PROMPTS[:2]])):
        assert np.abs(got - want).mean() < 0.03 * want.std()


def test_latents_in_float8_on_devices_that_divide_the_pages_are_close_to_float32() -> None:
    graph, weights = nnx.split(sharp(replace(IN_FLOAT8, kv_dtype=None)))
    exact = nnx.merge(graph, jax.tree.map(lambda x: 0.3 * x, weights))
    low = nnx.merge(nnx.graphdef(sharp(IN_FLOAT8)), nnx.state(exact))
    want = np.stack([Dense(exact).logits(prompt) for prompt in PROMPTS[:2]])
    sampler = Sampler(low, mesh=mesh_of(2, 1), max_requests=2, num_pages=32, page_size=8, max_context=CONTEXT)
    state = sampler.start(PROMPTS[:2])
    assert state.cache[0].latent.dtype == jnp.float8_e4m3fn
    assert state.cache[0].quantisation.saturated.tolist() == [0, 0]
    assert 0 < np.abs(state.logits - want).mean() < 0.03 * want.std()


@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn])
def test_a_prompt_whose_numbers_are_not_finite_does_not_look_like_text(kv_dtype: Any) -> None:
    model = sharp(replace(IN_FLOAT8, kv_dtype=kv_dtype))
    model.embedding.embedding[...] = model.embedding.embedding[...].at[7].set(jnp.nan)
    sampler = Sampler(model, max_requests=2, num_pages=32, page_size=8, max_context=CONTEXT)
    state = sampler.start([[1, 2, 7, 3], [1, 2, 3, 4]])
    assert np.isfinite(state.logits).all(axis=1).tolist() == [False, True]


def test_a_token_takes_one_latent_and_one_rotated_key_a_layer() -> None:
    assert CONFIG.kv_token_bytes == 2 * (136 + 8) * 4
    assert IN_FLOAT8.kv_token_bytes == 128 + 4 + 2 * 8
    for config in (CONFIG, IN_FLOAT8, replace(IN_FLOAT8, kv_scales="token")):
        arrays = [array.nbytes for array in jax.tree.leaves(config.new_cache(6, 8)) if array.ndim > 1]
        assert sum(arrays) == 6 * 8 * config.kv_token_bytes
        both = [array.nbytes for array in jax.tree.leaves(config.new_cache(6, 8, 2)) if array.ndim > 1]
        assert sum(both) - sum(arrays) == 2 * 8 * config.reconstructed_token_bytes
        assert pages_that_fit(config, 8, gib=1.0) == 2**30 // (8 * config.kv_token_bytes)


def test_random_weights_have_the_dtypes_of_their_parameters() -> None:
    model = random_decoder(replace(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    dtypes = {path[-1]: weight.dtype for path, weight in nnx.to_flat_state(nnx.state(model))}
    assert dtypes.pop("choice_bias") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}


def test_a_policy_reads_latents_from_a_cache_of_its_own(dense: Dense) -> None:
    policy, tokens = Policy.of(dense.model), np.asarray([LONG[:6]])
    causal, cache, call = np.tril(np.ones((1, 6, 8), bool)), policy.init_cache(1, 8, jnp.float32), jax.jit(policy)
    first, cache = call(tokens[:, :5], np.arange(5)[None], cache, causal[:, :5])
    last, _ = call(tokens[:, 5:], np.asarray([[5]]), cache, causal[:, 5:])
    want = dense.all_logits(tuple(LONG[:6]))
    np.testing.assert_allclose(np.concatenate([first, last], axis=1)[0], want, atol=1e-4, rtol=1e-4)


# --- The mixture -------------------------------------------------------------------------------------------------


def exact_mixture(experts: Experts, x: np.ndarray) -> np.ndarray:
    """Token by token in float64."""

    def exact(weight: nnx.Variable) -> np.ndarray:
        return np.asarray(weight[...], np.float64)

    def mlp(token: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = np.split(token @ gate_up, 2)
        return gate / (1 + np.exp(-gate)) * up @ down

    mixture, out = experts.mixture, np.zeros(x.shape)
    of_group = mixture.num_experts // mixture.groups
    for t, token in enumerate(x.astype(np.float64)):
        logits = token @ exact(experts.router.kernel)
        shares = 1 / (1 + np.exp(-logits)) if mixture.sigmoid else np.exp(logits) / np.exp(logits).sum()
        scores = shares + (exact(experts.choice_bias) if mixture.sigmoid else 0)
        sums = [np.sort(scores[g * of_group : (g + 1) * of_group])[-2:].sum() for g in range(mixture.groups)]
        best = np.argsort(sums)[-mixture.groups_per_token :]
        allowed = [expert for expert in range(mixture.num_experts) if expert // of_group in best]
        chosen = sorted(allowed, key=lambda expert: -scores[expert])[: mixture.experts_per_token]
        total = shares[chosen].sum() if mixture.normalised else 1.0
        for expert in chosen:
            weight = mixture.weight_scale * shares[expert] / total
            out[t] += weight * mlp(token, exact(experts.gate_up)[expert], exact(experts.down)[expert])
        out[t] += mlp(token, exact(experts.shared.gate_up.kernel), exact(experts.shared.down.kernel))
    return out


@pytest.mark.parametrize(("normalised", "sigmoid"), [(True, True), (False, True), (True, False)])
def test_tokens_go_through_the_experts_of_their_best_groups_and_the_shared_one(normalised: bool, sigmoid: bool) -> None:
    mixture = replace(MIXTURE, num_experts=12, groups=4, groups_per_token=2, normalised=normalised, sigmoid=sigmoid)
    experts = Experts(CONFIG, mixture, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    if sigmoid:
        experts.choice_bias[...] = jnp.asarray(rng.normal(size=12) * 0.3, jnp.float32)
    x = rng.normal(size=(1, 200, 32)).astype(np.float32)
    want = exact_mixture(experts, x[0])
    assert want.std() > 0.1
    np.testing.assert_allclose(jax.jit(experts)(x)[0], want, atol=1e-5)


def test_a_router_that_likes_nobody_gives_numbers() -> None:
    experts = Experts(CONFIG, MIXTURE, nnx.Rngs(0))
    experts.router.kernel[...] = jnp.full((32, 6), -100.0)
    assert np.isfinite(experts(jnp.ones((1, 1, 32)))).all()


# --- Files -------------------------------------------------------------------------------------------------------

#: Sizes that take several blocks of float8, some of them in part.
FILE = {
    "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 140, "intermediate_size": 132,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT,
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip


def tensors_in_fp8() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors of `FILE` with most of the weights in float8, and the same ones as the numbers that these stand for."""
    rng, shapes = np.random.default_rng(0), {}
    attention = {"q_a": (20, 140), "q_b": (160, 20), "kv_b": (176, 24), "o": (140, 48)}
    for layer in range(3):  # the last one is for the prediction of several tokens, and not read
        prefix = f"model.layers.{layer}."
        for name, shape in attention.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = shape
        shapes[f"{prefix}self_attn.kv_a_proj_with_mqa.weight"] = (32, 140)
        mlps = {"mlp.": 132} if layer == 0 else {f"mlp.{name}.": 24 for name in (*"0123", "shared_experts")}
        for name, size in mlps.items():
            mlp = prefix + (name if size == 132 or "shared" in name else name.replace("mlp.", "mlp.experts."))
            shapes |= {f"{mlp}{part}_proj.weight": (size, 140) for part in ("gate", "up")}
            shapes[f"{mlp}down_proj.weight"] = (140, size)
    plain = {"model.embed_tokens.weight": (VOCAB, 140), "lm_head.weight": (VOCAB, 140), "model.norm.weight": (140,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        plain |= {f"{prefix}{name}_layernorm.weight": (140,) for name in ("input", "post_attention")}
        plain |= {f"{prefix}self_attn.q_a_layernorm.weight": (20,), f"{prefix}self_attn.kv_a_layernorm.weight": (24,)}
    plain |= {"model.layers.1.mlp.gate.weight": (4, 140), "model.layers.1.mlp.gate.e_score_correction_bias": (4,)}
    stored = {name: rng.normal(size=shape).astype(np.float32) for name, shape in plain.items()}
    meant = dict(stored)
    for name, shape in shapes.items():
        codes = (8 * rng.normal(size=shape)).astype(jnp.float8_e4m3fn)
        scale = rng.uniform(0.001, 0.02, [-(-size // 128) for size in shape]).astype(np.float32)
        row, column = (np.arange(size) // 128 for size in shape)
        stored |= {name: codes, name + "_scale_inv": scale}
        if "layers.2." not in name:
            meant[name] = codes.astype(np.float32) * scale[row[:, None], column[None]]
    stored["model.layers.2.eh_proj.weight"] = np.zeros((140, 280), np.float32)
    return stored, meant


def test_kimi_k2_as_published_is_read() -> None:
    given = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 163_840, "hidden_size": 7168,
        "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 5e4,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }  # fmt: skip
    problems: list[str] = []
    config = read_config(given, problems)
    assert not problems
    assert config is not None
    assert (config.latent, config.head_dim) == (Latent(512, 128, 64, 128, 1536), 576)
    assert config.scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    assert config.rope_scaling == YarnScaling(32.0, 4096, 1.0, 1.0, 1.0)
    assert config.mixture_of(0) is None
    assert config.mixture_of(1) == Mixture(
        384, 8, 2048, first_layer=1, shared_size=2048, sigmoid=True, weight_scale=2.827
    )


def weights_of(model: Decoder) -> dict[str, np.ndarray]:
    return {str(path): np.asarray(weight[...]) for path, weight in nnx.to_flat_state(nnx.state(model))}


def test_weights_in_float8_are_what_their_scales_make_of_them(tmp_path: Path) -> None:
    stored, meant = tensors_in_fp8()
    fp8 = write(tmp_path / "fp8", FILE, stored, shards=3)
    plain = write(tmp_path / "plain", {**FILE, "quantization_config": None}, meant)
    got, want = (weights_of(open_checkpoint(directory).load(jnp.float32)) for directory in (fp8, plain))
    assert got.keys() == want.keys()
    for path, weight in want.items():
        np.testing.assert_allclose(got[path], weight, rtol=1e-6, err_msg=path)

    for sizes in ((2, 2), (1, 4)):
        assert_read_to_its_devices(open_checkpoint(fp8), mesh_of(*sizes))
        assert_read_to_its_devices(open_checkpoint(plain), mesh_of(*sizes))

    # Of some experts, too, in files that leave others as they were.
    whole = [f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 3) for part in ("up", "down")]
    some = {each: tensor for each, tensor in stored.items() if each.removesuffix("_scale_inv") not in whole}
    mixed = write(tmp_path / "mixed", FILE, some | {each: meant[each] for each in whole})
    for path, weight in weights_of(open_checkpoint(mixed).load(jnp.float32)).items():
        np.testing.assert_allclose(weight, want[path], rtol=1e-6, err_msg=path)
    assert_read_to_its_devices(open_checkpoint(mixed), mesh_of(2, 2))

    # Experts and scales of several dtypes: all of these numbers are in bfloat16, too.
    last = "model.layers.1.mlp.experts.3."
    short = {each: tensor for each, tensor in meant.items() if each.startswith(last)}
    short = {each: tensor.astype(jnp.bfloat16) for each, tensor in short.items()}
    rounded = {each: tensor.astype(np.float32) for each, tensor in short.items()}
    several = write(tmp_path / "several", {**FILE, "quantization_config": None}, meant | short)
    scales = {f"{last}{part}_proj.weight_scale_inv": 2.0**-7 for part in ("gate", "up", "down")}
    scales = {each: np.full_like(stored[each], scale, jnp.bfloat16) for each, scale in scales.items()}
    scaled = write(tmp_path / "scaled", FILE, stored | scales)
    again = {
        each: np.float32(tensor) * np.float32(2.0**-7)
        for each, tensor in stored.items()
        if each + "_scale_inv" in scales
    }
    for directory, numbers in ((several, rounded), (scaled, again)):
        same = write(tmp_path / "same", {**FILE, "quantization_config": None}, meant | numbers)
        want = weights_of(open_checkpoint(same).load(jnp.float32))
        for path, weight in weights_of(open_checkpoint(directory).load(jnp.float32)).items():
            np.testing.assert_allclose(weight, want[path], rtol=1e-6, err_msg=path)
        assert_read_to_its_devices(open_checkpoint(directory), mesh_of(2, 2))

    name = "model.layers.0.mlp.up_proj.weight"
    for number in (np.nan, np.inf, -1.0, 2.0**101):
        write(tmp_path / "wrong", FILE, stored | {name + "_scale_inv": np.full((2, 2), number, np.float32)})
        for mesh in (None, mesh_of(2, 2)):
            with pytest.raises(ValueError, match=rf"expected numbers from 0 to 2\*\*100 as {name}_scale_inv, got "):
                open_checkpoint(tmp_path / "wrong").load(mesh=mesh)
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"quantization_config": None}, {}, f"expected {name} as one of BF16, F16, F32, got F8_E4M3; quantised"),
        ({}, {name + "_scale_inv": np.ones((1, 2), np.float32)}, r"_scale_inv of shape \(2, 2\), got \(1, 2\)"),
        ({}, {name: np.ones((132, 140), np.float32)}, f"expected no {name}_scale_inv, which the decoder does not have"),
        ({"num_nextn_predict_layers": 0}, {}, "expected no model.layers.2.eh_proj.weight"),
    ]
    for config, tensors, message in changes:
        write(tmp_path / "fp8", {**FILE, **config}, {**stored, **tensors})
        with pytest.raises(ValueError, match=message):
            open_checkpoint(tmp_path / "fp8")
    write(tmp_path / "fp8", FILE, {each: tensor for each, tensor in stored.items() if each != name + "_scale_inv"})
    with pytest.raises(ValueError, match=f"{name}_scale_inv: expected this tensor, got none"):
        open_checkpoint(tmp_path / "fp8")


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: replace(CONFIG, num_kv_heads=2),
            r"^latent: expected num_kv_heads = 1 and head_dim = 144, .*got 2 ",
        ),
        (
            lambda: replace(CONFIG, head_dim=16),
            r"^latent: expected num_kv_heads = 1 and head_dim = 144, .* got 1 and 16",
        ),
        (lambda: replace(CONFIG, qk_norm=True, sinks=True), r"^latent: expected no qk_norm and no sinks with latent"),
        (
            lambda: replace(CONFIG, kv_dtype=jnp.float8_e4m3fn),
            r"^kv_dtype: expected no float8_e4m3fn for latents of 136",
        ),
        (
            lambda: replace(IN_FLOAT8, kv_scales=((1.0, 1.0),)),
            r"^kv_scales: expected None or 'token' with latents, whose pages have scales by token",
        ),
        (lambda: replace(LATENT, size=0), r"^size: expected an integer of at least 1, got 0"),
        (lambda: replace(LATENT, query_size=0), r"^query_size: expected an integer of at least 1, got 0"),
        (lambda: replace(LATENT, rope_dim=7), r"^rope_dim: expected an even number for rotary positions, got 7"),
        (lambda: replace(LATENT, value_dim=21), r"^value_dim: expected at most nope_dim \+ rope_dim = 20, got 21"),
        (lambda: replace(MIXTURE, bias=True), r"^bias: expected False with sigmoid, .*, got True"),
        (lambda: replace(MIXTURE, groups=4), r"^groups: expected a divisor of num_experts = 6 .* at least 2, got 4"),
        (lambda: replace(MIXTURE, groups=6), r"^groups: expected a divisor of num_experts = 6 .* at least 2, got 6"),
        (lambda: replace(MIXTURE, groups_per_token=4), r"^groups_per_token: expected at most groups = 3, got 4"),
        (lambda: replace(MIXTURE, experts_per_token=5), r"^experts_per_token: .* the experts of 2 groups = 4, got 5"),
        (lambda: replace(MIXTURE, shared_size=0), r"^shared_size: expected an integer of at least 1, got 0"),
        (lambda: replace(MIXTURE, first_layer=-1), r"^first_layer: expected an integer of at least 0, got -1"),
        (lambda: replace(MIXTURE, weight_scale=0.0), r"^weight_scale: expected a positive number, got 0.0"),
        (
            lambda: MultiHeadLatentAttention(DecoderConfig(64, 32, 64, 1, 4, 2, 16), nnx.Rngs(0)),
            r"^config: expected one with latent, .* got None; use Attention",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
