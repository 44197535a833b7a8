"""Checkpoints that serve: their logits, their weights, what they say, and published sizes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from small_checkpoints import (
    CONTEXT,
    HEAD_DIM,
    LLAMA,
    LLAMA3,
    LLAMA_NEWER,
    QWEN2,
    QWEN3,
    SIZES,
    TOKENS,
    VOCAB,
    dense_logits,
    exact_logits,
    save_tokenizer,
    tensors_of,
    write,
)
from tokenizers import Tokenizer

from codec_jax.nnx import PUBLISHED, Decoder, DecoderConfig, Llama3Scaling, Sampler, open_checkpoint, random_decoder
from codec_jax.nnx.weights import parameter_shapes


@pytest.mark.parametrize(
    ("config", "shards", "dtype"),
    [(QWEN3, 1, np.float32), (LLAMA, 3, np.float16), (LLAMA_NEWER, 2, ml_dtypes.bfloat16), (QWEN2, 1, np.float32)],
    ids=["Qwen3", "Llama, shards, float16", "Llama, rope_parameters, shards, bfloat16", "Qwen2.5"],
)
def test_logits_are_those_of_the_tensors_in_the_files(tmp_path: Path, config: dict, shards: int, dtype: Any) -> None:
    tensors = tensors_of(config, dtype)
    model = open_checkpoint(write(tmp_path, config, tensors, shards)).load(jnp.float32)
    want = np.stack([exact_logits(tensors, config, row) for row in TOKENS])
    assert want.std() > 0.5  # or a wrong layer might hide in the tolerance
    np.testing.assert_allclose(dense_logits(model, TOKENS), want, atol=2e-4)


# --- Checkpoints made by transformers ---------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_logits_match_those_of_transformers_in_prefill_and_20_steps(tmp_path: Path, family: str, tied: bool) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rope = {"rope_theta": 100.0, **(LLAMA3 if family == "Llama" else {"rope_type": "default"})}
    config = getattr(transformers, f"{family}Config")(
        **SIZES, rope_parameters=rope, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.uniform_(0.5, 1.5) if weight.ndim == 1 else weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    save_tokenizer(tmp_path)
    ours = open_checkpoint(tmp_path).load(jnp.float32)

    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)).logits
    assert want.std() > 0.5
    np.testing.assert_allclose(dense_logits(ours, TOKENS), want, atol=1e-4, rtol=0)

    if tied != (family == "Qwen3"):
        return  # steps do not depend on both, and take long to compile
    sampler = Sampler(ours, max_requests=2, num_pages=40, page_size=8, steps=1)
    state = sampler.start(TOKENS)
    np.testing.assert_allclose(state.logits, want[:, -1], atol=1e-4, rtol=0)
    tokens = np.array(TOKENS)
    for _ in range(20):
        state, new = sampler.decode(state, 1, temperature=0.0)
        tokens = np.concatenate([tokens, new.tokens], axis=1)
        with torch.no_grad():  # without a cache of theirs: its argument changes its name between their versions
            want = theirs(torch.tensor(tokens)).logits
        np.testing.assert_allclose(state.logits, want[:, -1], atol=1e-4, rtol=0)


# --- Loading ----------------------------------------------------------------------------------------------------


def test_what_the_checkpoint_says_beside_its_weights(tmp_path: Path) -> None:
    config = {**LLAMA, "rms_norm_eps": 1e-5, "bos_token_id": 1, "hidden_act": "silu", "attention_bias": False}
    checkpoint = open_checkpoint(write(tmp_path, config, tensors_of(config)))
    assert checkpoint.config.norm_epsilon == 1e-5
    assert checkpoint.config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert checkpoint.max_context == CONTEXT
    assert checkpoint.stop_tokens == (5,)
    assert checkpoint.tokenizer.get_vocab_size() == VOCAB
    assert {file.name for file in checkpoint.files} == {"config.json", "model.safetensors", "tokenizer.json"}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.stop_tokens == (7, 3)
    assert tmp_path / "generation_config.json" in checkpoint.files


def test_a_prompt_is_never_cut_or_filled_up_by_settings_of_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, tensors_of(QWEN3))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert open_checkpoint(tmp_path).tokenizer.encode(["w1", "w2", "w3"], is_pretokenized=True).ids == [1, 2, 3]


def test_a_special_token_of_a_relative_may_be_beyond_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, tensors_of(QWEN3))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checkpoint = open_checkpoint(tmp_path)
    tokens = checkpoint.tokenizer.encode("<image>").ids
    assert tokens == [VOCAB]
    sampler = Sampler(checkpoint.load(), max_requests=1, num_pages=4, page_size=8)
    with pytest.raises(ValueError, match=f"{VOCAB}"):
        sampler.start([tokens])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_weights_are_those_of_the_file_rounded_to_the_dtype(tmp_path: Path, dtype: Any) -> None:
    tensors = tensors_of(QWEN3)
    model = open_checkpoint(write(tmp_path, QWEN3, tensors)).load(dtype)
    assert {jnp.dtype(weight.dtype) for weight in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    assert model.new_cache(1, 8)[0].key.dtype == dtype
    parts = [jnp.asarray(tensors[f"model.layers.1.self_attn.{name}_proj.weight"]) for name in "qkv"]
    got = jnp.split(model.blocks[1].attention.query_key_value.kernel[...], [64, 96], axis=1)
    for part, want in zip(got, parts, strict=True):
        np.testing.assert_array_equal(part, want.astype(dtype).T)


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, QWEN3, tensors_of(QWEN3)))
    with pytest.raises(ValueError, match=r"^dtype: expected float32, bfloat16 or float16, got int8"):
        checkpoint.load(jnp.int8)
    with pytest.raises(ValueError, match=r"^kv_dtype: expected float32, bfloat16, float8_e4m3fn or float16, got fp8"):
        checkpoint.load(jnp.float32, kv_dtype="fp8")


def test_tensors_that_follow_from_others_are_not_needed(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(HEAD_DIM // 2, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
    model, without = (
        open_checkpoint(write(tmp_path / name, QWEN3, each)).load(jnp.float32)
        for name, each in (("with", tensors), ("without", tensors_of(QWEN3)))
    )
    logits = dense_logits(model, TOKENS)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits, dense_logits(without, TOKENS))


def test_an_index_may_name_a_file_in_several_ways(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    index = write(tmp_path, QWEN3, tensors, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "./" + content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    model = open_checkpoint(tmp_path).load(jnp.float32)
    np.testing.assert_array_equal(model.norm.scale[...], tensors["model.norm.weight"])


def test_the_single_file_goes_before_shards_as_in_transformers(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    write(tmp_path, QWEN3, {name: tensor + 1 for name, tensor in tensors.items()}, shards=2)
    model = open_checkpoint(write(tmp_path, QWEN3, tensors)).load(jnp.float32)
    np.testing.assert_array_equal(model.norm.scale[...], tensors["model.norm.weight"])


def test_shards_need_no_index(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    write(tmp_path, QWEN3, tensors, shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    model = open_checkpoint(tmp_path).load(jnp.float32)
    np.testing.assert_array_equal(model.embedding.embedding[...], tensors["model.embed_tokens.weight"])


# --- Published sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-3-12b", 11_766_034_176),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(math.prod(shape.shape) for shape in parameter_shapes(PUBLISHED[name]).values()) == parameters


def test_shapes_are_those_of_every_parameter_of_a_decoder(tmp_path: Path) -> None:
    """Of all blocks, though only one is traced."""
    config = replace(open_checkpoint(write(tmp_path, LLAMA, tensors_of(LLAMA))).config, num_layers=3)
    state = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))))
    want = {".".join(map(str, path)): (shape.get_value().shape, shape.get_value().dtype) for path, shape in state}
    assert {path: (shape.shape, shape.dtype) for path, shape in parameter_shapes(config).items()} == want


def test_random_weights_depend_on_the_seed_alone_and_give_finite_logits(tmp_path: Path) -> None:
    config = replace(open_checkpoint(write(tmp_path, LLAMA, tensors_of(LLAMA))).config, num_layers=1)
    first, again, other = (nnx.state(random_decoder(config, seed)) for seed in (1, 1, 2))
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(first)]
    for leaf, same, different in zip(leaves, jax.tree.leaves(again), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, same)
        assert leaf.ndim == 1 or (leaf != np.asarray(different, np.float32)).mean() > 0.9
    matrices = [leaf for leaf in leaves if leaf.ndim == 2]
    assert all(abs(leaf.std() - 0.02) < 0.002 for leaf in matrices)
    assert len({leaf.tobytes() for leaf in matrices}) == len(matrices)
    with jax.numpy_dtype_promotion("standard"):  # JAX's dense attention promotes to float32 implicitly
        assert np.isfinite(dense_logits(random_decoder(config), TOKENS)).all()


# --- Scales of the KV cache --------------------------------------------------------------------------------------

#: Only the cache is quantised, with one scale for all keys of a layer and one for all values.
QUANTISED_CACHE = {
    "quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}  # fmt: skip


def tensors_with_scales() -> dict[str, np.ndarray]:
    """Values are too large for float8 without a scale, and the product after attention makes up for it."""
    tensors = dict(tensors_of(LLAMA))
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn."
        tensors[f"{attention}v_proj.weight"] = tensors[f"{attention}v_proj.weight"] * 1000.0
        tensors[f"{attention}o_proj.weight"] = tensors[f"{attention}o_proj.weight"] / 1000.0
        tensors[f"{attention}k_scale"] = np.asarray([0.25 + layer], ml_dtypes.bfloat16)
        tensors[f"{attention}v_scale"] = np.asarray([32.0], np.float32)
    return tensors


def test_scales_of_the_cache_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = tensors_with_scales()
    checkpoint = open_checkpoint(write(tmp_path, {**LLAMA, "quantization_config": QUANTISED_CACHE}, tensors))
    assert checkpoint.kv_scales == ((0.25, 32.0), (1.25, 32.0))
    assert checkpoint.load(jnp.float32).config.kv_scales is None
    model = checkpoint.load(jnp.float32, kv_dtype=jnp.float8_e4m3fn)
    state = Sampler(model, max_requests=2, num_pages=32, page_size=8, max_context=CONTEXT).start(TOKENS)
    for pages, (key_scale, value_scale) in zip(state.cache, checkpoint.kv_scales, strict=True):
        assert pages.quantisation.saturated.tolist() == [0]
        assert set(pages.quantisation.key_scale.tolist()) == {key_scale}
        assert set(pages.quantisation.value_scale.tolist()) == {value_scale}
    want = np.stack([exact_logits(tensors, LLAMA, tokens)[-1] for tokens in TOKENS])
    assert np.abs(state.logits - want).mean() < 0.1 * want.std()
    by_token = checkpoint.load(jnp.float32, kv_dtype=jnp.float8_e4m3fn, kv_scales="token")
    state = Sampler(by_token, max_requests=2, num_pages=32, page_size=8, max_context=CONTEXT).start(TOKENS)
    assert np.abs(state.logits - want).mean() < 0.1 * want.std()


@pytest.mark.parametrize(
    ("changes", "scheme", "message"),
    [
        ({"k_scale": None}, {}, r"layers.1.self_attn.k_scale: expected this scale of the KV cache, got none"),
        (
            {"k_scale": np.zeros(1, np.float32)},
            {},
            r"expected one number from .* as .*layers.1.self_attn.k_scale, got",
        ),
        ({"k_scale": np.full(1, 1e300)}, {}, r"expected one number from .* as .*k_scale, got \[1e\+300\]"),
        (
            {"k_scale": np.ones(1, jnp.float8_e4m3fn)},
            {},
            r"expected a number of 16 bits or more as model.layers.1.self_attn.k_scale, got F8_E4M3",
        ),
        ({"v_scale": np.ones(2, np.float32)}, {}, r"expected one number from .* as .*layers.1.self_attn.v_scale, got"),
        ({}, {"num_bits": 4}, r"expected quantization_config = null, which .*"),
        ({}, {"config_groups": {"group_0": {}}}, r"expected quantization_config = null, which .*"),
    ],
)
def test_scales_that_are_none_are_refused(tmp_path: Path, changes: dict, scheme: dict, message: str) -> None:
    tensors = tensors_with_scales() | {f"model.layers.1.self_attn.{name}": x for name, x in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    quantised = QUANTISED_CACHE | {key: value for key, value in scheme.items() if key == "config_groups"}
    bits = scheme.get("num_bits", 8)
    quantised = {**quantised, "kv_cache_scheme": {**QUANTISED_CACHE["kv_cache_scheme"], "num_bits": bits}}
    write(tmp_path, {**LLAMA, "quantization_config": quantised}, tensors)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


def test_scales_go_with_one_byte_a_number_and_every_layer() -> None:
    config = DecoderConfig(64, 32, 64, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(
        ValueError, match=r"^kv_scales: expected a tuple of a pair for each of 2 layers, .* got 2 with bfloat16"
    ):
        replace(config, kv_scales=((1.0, 1.0),) * 2)
    with pytest.raises(
        ValueError, match=r"^kv_scales: expected a tuple of a pair for each of 2 layers, .* got 1 with float8_e4m3"
    ):
        replace(config, kv_dtype=jnp.float8_e4m3fn, kv_scales=((1.0, 1.0),))
    with pytest.raises(ValueError, match=r"^kv_scales: expected .* got 'token' with bfloat16"):
        replace(config, kv_scales="token")
    one_byte = replace(config, kv_dtype=jnp.float8_e4m3fn)
    for pair in ((1.0,), (1.0, 2.0, 3.0), 1.0, None, (0.0, 1.0), (1.0, -1.0), (1.0, np.nan), (1e38, 1.0), ("1", 1.0)):
        with pytest.raises(ValueError, match=r"^kv_scales\[1\]: expected "):
            replace(one_byte, kv_scales=((1.0, 1.0), pair))
    for scales in ([(1.0, 1.0)] * 2, np.ones((2, 2)), "tokens", 1.0):
        with pytest.raises(ValueError, match=r"^kv_scales: expected a tuple of a pair"):
            replace(one_byte, kv_scales=scales)
    for dtype in ("foo", 8):
        with pytest.raises(ValueError, match=rf"^kv_dtype: expected .* got {dtype}"):
            replace(config, kv_dtype=dtype)
