"""Small checkpoints made by hand, and their logits in float64."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from codec_jax.nnx import Checkpoint, Decoder, PlacedDecoder

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
QWEN2 = {**SIZES, "model_type": "qwen2", "rope_theta": 100.0, "use_sliding_window": False, "sliding_window": 9}
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, 90)).astype(np.int32)


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
        if config["model_type"] == "qwen2":
            tensors |= {
                layer + f"self_attn.{name}_proj.bias": (size,)
                for name, size in zip("qkv", (query, kv, kv), strict=True)
            }
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
        columns = x @ weight[name + "_proj.weight"].T + weight.get(name + "_proj.bias", 0.0)
        return columns.reshape(len(tokens), -1, HEAD_DIM).swapaxes(0, 1)

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


def assert_read_to_its_devices(checkpoint: Checkpoint, mesh: Mesh, dtype: DTypeLike = jnp.float32) -> None:
    """Each device has of every parameter what it gets when the whole one is divided."""
    read, whole = checkpoint.load(dtype, mesh=mesh), PlacedDecoder.of(checkpoint.load(dtype), mesh)
    pairs = zip(nnx.to_flat_state(read.weights), nnx.to_flat_state(whole.weights), strict=True)
    for (path, parameter), (_, same) in pairs:
        got, want = parameter[...], same[...]
        assert (got.sharding, got.dtype) == (want.sharding, want.dtype), path
        for shard, other in zip(got.addressable_shards, want.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.float32(shard.data), np.float32(other.data), err_msg=str(path))


def dense_logits(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    graph, weights = nnx.split(model)
    return np.asarray(jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))(weights, tokens))
