"""Checkpoints against transformers, and against the architecture written out over a checkpoint's own tensors."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from codec_jax.nnx import PUBLISHED, Decoder, Llama3Scaling, Sampler, open_checkpoint, random_decoder
from codec_jax.nnx.weights import parameter_shapes

VOCAB, HEAD_DIM, CONTEXT = 48, 16, 160
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
}
# Of the eight frequencies, two are kept, three interpolated and three divided.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN3 = {**SIZES, "model_type": "qwen3", "rope_theta": 100.0, "tie_word_embeddings": True, "eos_token_id": 5}
LLAMA = {**SIZES, "model_type": "llama", "rope_theta": 100.0, "rope_scaling": LLAMA3, "eos_token_id": 5}
LLAMA_NEWER = {**SIZES, "model_type": "llama", "rope_parameters": {"rope_theta": 100.0, **LLAMA3}}
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, 90)).astype(np.int32)


# --- Checkpoints made by hand -----------------------------------------------------------------------------------


def save_tokenizer(directory: Path, size: int = VOCAB) -> None:
    words = {f"w{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))


def tensors_of(config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random tensors that make everything count: sharp attention, norms that are not 1."""
    rng = np.random.default_rng(0)
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    query, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    tensors = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        tensors |= {layer + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        tensors |= {layer + f"self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        tensors |= {layer + f"mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        tensors[layer + "self_attn.q_proj.weight"] = (query, hidden)
        tensors[layer + "self_attn.o_proj.weight"] = (hidden, query)
        tensors[layer + "mlp.down_proj.weight"] = (hidden, mlp)
        if config["model_type"] == "qwen3":
            tensors |= {layer + f"self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
    return {
        name: (
            rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else 1.5 * rng.normal(size=shape) * shape[1] ** -0.5
        ).astype(dtype)
        for name, shape in tensors.items()
    }


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Write a checkpoint with an index if it has several shards."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_tokenizer(directory, config["vocab_size"])
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    file_of = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return directory


def exact_logits(tensors: dict[str, np.ndarray], config: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence in float64."""
    weight = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    angle = np.asarray(
        [[position * frequency for frequency in exact_frequencies(config)] for position in range(len(tokens))]
    )

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.get("rms_norm_eps", 1e-6)) * weight[name + ".weight"]

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        return (x @ weight[name + "_proj.weight"].T).reshape(len(tokens), -1, HEAD_DIM).swapaxes(0, 1)

    def turned(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = weight["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        normed = norm(x, layer + "input_layernorm")
        query, key, value = (heads(normed, f"{layer}self_attn.{name}") for name in "qkv")
        if config["model_type"] == "qwen3":
            query, key = norm(query, layer + "self_attn.q_norm"), norm(key, layer + "self_attn.k_norm")
        group = len(query) // len(key)
        key, value = (np.repeat(each, group, axis=0) for each in (turned(key), value))
        scores = turned(query) @ key.swapaxes(1, 2) / math.sqrt(HEAD_DIM)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out = (shares / shares.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(len(tokens), -1)
        x = x + out @ weight[layer + "self_attn.o_proj.weight"].T
        normed = norm(x, layer + "post_attention_layernorm")
        gate, up = (normed @ weight[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ weight[layer + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return norm(x, "model.norm") @ weight[head].T


def exact_frequencies(config: dict[str, Any]) -> list[float]:
    """Radians per position of each pair, by the definition of Llama 3.1 in wavelengths."""
    rope = {**config, **(config.get("rope_scaling") or config.get("rope_parameters") or {})}
    frequencies = []
    for i in range(HEAD_DIM // 2):
        frequency = rope["rope_theta"] ** (-2 * i / HEAD_DIM)
        if rope.get("rope_type") == "llama3":
            context, wavelength = rope["original_max_position_embeddings"], 2 * math.pi / frequency
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > context / low:
                frequency /= rope["factor"]
            elif wavelength > context / high:
                smooth = (context / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def dense_logits(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    graph, weights = nnx.split(model)
    return np.asarray(jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))(weights, tokens))


@pytest.mark.parametrize(
    ("config", "shards", "dtype"),
    [(QWEN3, 1, np.float32), (LLAMA, 3, np.float16), (LLAMA_NEWER, 2, ml_dtypes.bfloat16)],
    ids=["Qwen3", "Llama, shards, float16", "Llama, rope_parameters, shards, bfloat16"],
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
        want = theirs(torch.tensor(TOKENS), use_cache=True)
    assert want.logits.std() > 0.5
    np.testing.assert_allclose(dense_logits(ours, TOKENS), want.logits, atol=1e-4, rtol=0)

    sampler = Sampler(ours, max_requests=2, num_pages=40, page_size=8, steps=1)
    state = sampler.start(TOKENS)
    np.testing.assert_allclose(state.logits, want.logits[:, -1], atol=1e-4, rtol=0)
    for _ in range(20):
        state, new = sampler.decode(state, 1, temperature=0.0)
        with torch.no_grad():
            want = theirs(torch.tensor(new.tokens), past_key_values=want.past_key_values, use_cache=True)
        np.testing.assert_allclose(state.logits, want.logits[:, -1], atol=1e-4, rtol=0)


# --- Loading ----------------------------------------------------------------------------------------------------


def test_what_the_checkpoint_says_beside_its_weights(tmp_path: Path) -> None:
    config = {**LLAMA, "rms_norm_eps": 1e-5, "bos_token_id": 1, "hidden_act": "silu", "attention_bias": False}
    checkpoint = open_checkpoint(write(tmp_path, config, tensors_of(config)))
    assert checkpoint.config.norm_epsilon == 1e-5
    assert checkpoint.config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert checkpoint.max_context == CONTEXT
    assert checkpoint.stop_tokens == (5,)
    assert checkpoint.tokenizer.get_vocab_size() == VOCAB
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert open_checkpoint(tmp_path).stop_tokens == (7, 3)


def test_a_prompt_is_never_cut_or_filled_up_by_settings_of_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, tensors_of(QWEN3))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert open_checkpoint(tmp_path).tokenizer.encode(["w1", "w2", "w3"], is_pretokenized=True).ids == [1, 2, 3]


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


def test_tensors_that_follow_from_others_are_not_needed(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(HEAD_DIM // 2, np.float32)
    tensors["lm_head.weight"] = np.full(
        (VOCAB, 32), np.nan, np.float32
    )  # tied: transformers does not look at it either
    model = open_checkpoint(write(tmp_path, QWEN3, tensors)).load(jnp.float32)
    assert np.isfinite(dense_logits(model, TOKENS)).all()


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


# --- Checkpoints that do not serve ------------------------------------------------------------------------------


def problems_of(directory: Path) -> list[str]:
    with pytest.raises(ValueError, match="expected a checkpoint that the decoder can run, but") as raised:
        open_checkpoint(directory)
    return [line.strip() for line in str(raised.value).splitlines()[1:]]


def change_json(file: str, **values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        content = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
        (directory / file).write_text(json.dumps({**content, **values}))

    return change


def change_tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return rewrite


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda directory: (directory / file).write_bytes((directory / file).read_bytes()[:size])


def remove(file: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).unlink()


NORM, KEY = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
WRONG = {
    "missing tensor": (change_tensors(lambda t: t.pop(KEY)), f"{KEY}: expected this tensor, got none"),
    "extra tensor": (
        change_tensors(lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[NORM]})),
        "model.safetensors: expected no model.layers.2.mlp.up_proj.weight, which the decoder does not have",
    ),
    "bias": (
        change_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[NORM]})),
        "model.safetensors: expected no model.layers.0.self_attn.q_proj.bias, which the decoder does not have",
    ),
    "misshaped tensor": (
        change_tensors(lambda t: t.update({KEY: np.ascontiguousarray(t[KEY][:-1])})),
        rf"model.safetensors: expected {KEY} of shape \(32, 32\), got \(31, 32\)",
    ),
    "transposed tensor": (
        change_tensors(lambda t: t.update({"model.embed_tokens.weight": np.zeros((32, 48), np.float32)})),
        r"model.safetensors: expected model.embed_tokens.weight of shape \(48, 32\), got \(32, 48\)",
    ),
    "quantised tensor": (
        change_tensors(lambda t: t.update({NORM: t[NORM].astype(np.int8)})),
        f"model.safetensors: expected {NORM} as one of BF16, F16, F32, got I8; quantised .* not supported",
    ),
    "truncated tensors": (cut("model.safetensors", -3), "model.safetensors: expected a whole safetensors file, got .*"),
    "truncated header": (cut("model.safetensors", 100), "model.safetensors: expected a whole safetensors file, got .*"),
    "no weights": (remove("model.safetensors"), "model.safetensors: expected this file, or shards of it, got none"),
    "no config": (remove("config.json"), "config.json: expected a JSON file, got .*No such file.*"),
    "truncated config": (cut("config.json", 20), "config.json: expected a JSON file, got .*"),
    "another architecture": (
        change_json("config.json", model_type="mixtral"),
        'config.json: expected model_type to be one of llama, qwen3, got "mixtral"',
    ),
    "another head": (
        change_json("config.json", architectures=["Qwen3ForTokenClassification"]),
        r'config.json: expected architectures = \["Qwen3ForCausalLM"\], got \["Qwen3ForTokenClassification"\]',
    ),
    "missing size": (
        change_json("config.json", intermediate_size=None),
        "config.json: expected a positive whole number as intermediate_size, got null",
    ),
    "size of another type": (
        change_json("config.json", num_hidden_layers=True),
        "config.json: expected a positive whole number as num_hidden_layers, got true",
    ),
    "context of another type": (
        change_json("config.json", max_position_embeddings="long"),
        'config.json: expected a positive whole number as max_position_embeddings, got "long"',
    ),
    "norm": (
        change_json("config.json", rms_norm_eps=-1e-6),
        "config.json: expected a positive number as rms_norm_eps, got -1e-06",
    ),
    "activation": (
        change_json("config.json", hidden_act="gelu"),
        'config.json: expected hidden_act = "silu", which is what the decoder computes, got "gelu"',
    ),
    "attention bias": (
        change_json("config.json", attention_bias=True),
        "config.json: expected attention_bias = false, which is what the decoder computes, got true",
    ),
    "MLP bias": (
        change_json("config.json", mlp_bias=True),
        "config.json: expected mlp_bias = false, which is what the decoder computes, got true",
    ),
    "quantisation": (
        change_json("config.json", quantization_config={"bits": 4}),
        'config.json: expected quantization_config = null, which is what the decoder computes, got {"bits": 4}',
    ),
    "sliding window": (
        change_json("config.json", use_sliding_window=True, sliding_window=64),
        "config.json: expected use_sliding_window = false, which is what the decoder computes, got true",
    ),
    "sliding window without a switch": (
        change_json("config.json", sliding_window=64),
        "config.json: expected full attention in every layer, got sliding_window = 64, .*",
    ),
    "layers with sliding windows": (
        change_json("config.json", layer_types=["full_attention", "sliding_attention"]),
        "config.json: expected full attention in every layer, got .*sliding_attention.*",
    ),
    "rotary scaling": (
        change_json("config.json", rope_scaling={"type": "yarn", "factor": 4.0}),
        'config.json: expected rope_scaling of type default or llama3, .* got {"type": "yarn", "factor": 4.0}',
    ),
    "rotary scaling per kind of layer": (
        change_json("config.json", rope_parameters={"full_attention": {"rope_theta": 100.0}}),
        "config.json: expected rope_parameters of type default or llama3, .*",
    ),
    "rotary scaling that is no object": (
        change_json("config.json", rope_scaling="llama3"),
        'config.json: expected an object as rope_scaling, got "llama3"',
    ),
    "rotary scaling without a factor": (
        change_json("config.json", rope_scaling={**LLAMA3, "factor": None}),
        "config.json: expected a positive number as rope_scaling.factor, got null",
    ),
    "rotary scaling upside down": (
        change_json("config.json", rope_scaling={**LLAMA3, "low_freq_factor": 4.0}),
        "config.json: rope_scaling.high_frequency_factor: expected more than low_frequency_factor, .* got 4.0 and 4.0",
    ),
    "partial rotation": (
        change_json("config.json", partial_rotary_factor=0.5),
        "config.json: expected partial_rotary_factor = 1.0, which is what the decoder computes, got 0.5",
    ),
    "partial rotation, newer": (
        change_json("config.json", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "config.json: expected partial_rotary_factor = 1.0, which is what the decoder computes, got 0.5",
    ),
    "no tokenizer": (
        remove("tokenizer.json"),
        "tokenizer.json: expected a file of the tokenizers library, got No such file.*",
    ),
    "tokenizer with more tokens": (
        partial(save_tokenizer, size=VOCAB + 2),
        rf"tokenizer.json: expected tokens in \[0, {VOCAB}\), the vocabulary of config.json, got 2 beyond it, up to 49",
    ),
    "tokenizer of another model": (
        partial(save_tokenizer, size=3),
        "tokenizer.json: expected the token 5, which the model's configuration names .* got none; .*",
    ),
    "stop token of another type": (
        change_json("generation_config.json", eos_token_id="</s>"),
        'generation_config.json: expected token ids as eos_token_id, got "</s>"',
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checkpoint_that_does_not_serve_says_what_is_wrong(tmp_path: Path, wrong: str) -> None:
    change, message = WRONG[wrong]
    change(write(tmp_path, QWEN3, tensors_of(QWEN3)))
    problems = problems_of(tmp_path)
    assert len(problems) == 1
    assert re.fullmatch(message, problems[0]), problems[0]


def test_one_error_lists_everything(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, tensors_of(QWEN3))
    together = ["extra tensor", "misshaped tensor", "sliding window", "activation", "rotary scaling", "norm"]
    together += ["another head", "tokenizer with more tokens", "stop token of another type"]
    for name in together:
        WRONG[name][0](tmp_path)
    change_tensors(lambda t: t.pop(NORM))(tmp_path)
    problems = problems_of(tmp_path)
    for message in [*(WRONG[name][1] for name in together), f"{NORM}: expected this tensor, got none"]:
        assert any(re.fullmatch(message, problem) for problem in problems), message
    assert len(problems) == len(together) + 1


def test_only_tensors_that_no_shard_was_to_hold_are_missing_when_a_shard_is_truncated(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    del tensors[KEY]
    write(tmp_path, QWEN3, tensors, shards=3)
    cut("model-00002-of-00003.safetensors", -1)(tmp_path)
    remove("model-00003-of-00003.safetensors")(tmp_path)
    problems = problems_of(tmp_path)
    assert [problem.split(":")[0] for problem in problems] == [
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        KEY,
    ]


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    write(tmp_path, QWEN3, tensors, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({NORM: tensors[NORM]}, tmp_path / "zzz.safetensors")
    assert re.fullmatch(rf"zzz.safetensors: expected no {NORM}, which model-.* has, got one", problems_of(tmp_path)[0])


@pytest.mark.parametrize("weight_map", [None, 7, {NORM: 7}])
def test_an_index_without_files_is_refused(tmp_path: Path, weight_map: Any) -> None:
    write(tmp_path, QWEN3, tensors_of(QWEN3), shards=2)
    change_json("model.safetensors.index.json", weight_map=weight_map)(tmp_path)
    assert problems_of(tmp_path)[0].startswith("model.safetensors.index.json: expected a file name for each tensor")


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match=r"^directory: expected one with config.json, .*, got .*nowhere"):
        open_checkpoint(tmp_path / "nowhere")


# --- Published sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    config = PUBLISHED[name]
    one, two = (
        sum(math.prod(parameter.shape) for parameter in parameter_shapes(replace(config, num_layers=layers)).values())
        for layers in (1, 2)
    )
    assert one + (config.num_layers - 1) * (two - one) == parameters


def test_random_weights_depend_on_the_seed_alone_and_give_finite_logits(tmp_path: Path) -> None:
    config = open_checkpoint(write(tmp_path, LLAMA, tensors_of(LLAMA))).config
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
