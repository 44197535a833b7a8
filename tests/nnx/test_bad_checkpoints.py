"""Checkpoints that do not serve, and what is said of them before any work."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_checkpoints import LLAMA3, QWEN3, VOCAB, save_tokenizer, tensors_of, write

from codec_jax.nnx import open_checkpoint
from codec_jax.nnx.checkpoint_config import read_config


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
    "a head beside a tied embedding": (  # which transformers takes, unlike older ones
        change_tensors(lambda t: t.update({"lm_head.weight": 2 * t["model.embed_tokens.weight"]})),
        "model.safetensors: expected lm_head.weight to be model.embed_tokens.weight, as tie_word_embeddings says, got "
        r"another one; which is meant\? set tie_word_embeddings to false, or leave the tensor out",
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
        'config.json: expected model_type to be one of llama, mistral, qwen2, .*, got "mixtral"',
    ),
    "another head": (
        change_json("config.json", architectures=["Qwen3ForTokenClassification"]),
        r'config.json: expected architectures = \["Qwen3ForCausalLM"\], got \["Qwen3ForTokenClassification"\]',
    ),
    "missing size": (
        change_json("config.json", intermediate_size=None),
        "config.json: expected a whole number from 1 to 2147483647 as intermediate_size, got null",
    ),
    "size of another type": (
        change_json("config.json", num_hidden_layers=True),
        "config.json: expected a whole number from 1 to 2147483647 as num_hidden_layers, got true",
    ),
    "context of another type": (
        change_json("config.json", max_position_embeddings="long"),
        'config.json: expected a whole number from 1 to 2147483647 as max_position_embeddings, got "long"',
    ),
    "norm": (
        change_json("config.json", rms_norm_eps=-1e-6),
        r"config.json: expected a number from 1e-37 to 1e\+37 as rms_norm_eps, got -1e-06",
    ),
    "number beyond float32": (
        change_json("config.json", rope_theta=10**400),
        r"config.json: expected a number from 1e-37 to 1e\+37 as rope_theta, got 10{400}",
    ),
    "number that float32 rounds to 0": (
        change_json("config.json", rms_norm_eps=1e-300),
        r"config.json: expected a number from 1e-37 to 1e\+37 as rms_norm_eps, got 1e-300",
    ),
    "size beyond int32": (
        change_json("config.json", hidden_size=2**31),
        "config.json: expected a whole number from 1 to 2147483647 as hidden_size, got 2147483648",
    ),
    "more layers than could be listed": (
        change_json("config.json", num_hidden_layers=10**9),
        "config.json: expected num_hidden_layers of at most 24, as many as there are tensors, got 1000000000",
    ),
    "nested too deeply": (
        lambda directory: (directory / "config.json").write_text("[" * 10**5 + "]" * 10**5),
        "config.json: expected a JSON file, got .*recursion.*",
    ),
    "tied embeddings of another type": (
        change_json("config.json", tie_word_embeddings="false"),
        'config.json: expected true or false as tie_word_embeddings, got "false"',
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
        change_json("config.json", rope_scaling={"type": "dynamic", "factor": 4.0}),
        'config.json: expected rope_scaling of type default, linear, .* got {"type": "dynamic", "factor": 4.0}',
    ),
    "rotary scaling per kind of layer": (
        change_json("config.json", rope_parameters={"full_attention": {"rope_theta": 100.0}}),
        "config.json: expected rope_parameters of type default, linear, llama3 or yarn, .*",
    ),
    "rotary scaling that is no object": (
        change_json("config.json", rope_scaling="llama3"),
        'config.json: expected an object as rope_scaling, got "llama3"',
    ),
    "rotary scaling without a factor": (
        change_json("config.json", rope_scaling={**LLAMA3, "factor": None}),
        r"config.json: expected a number from 1e-37 to 1e\+37 as rope_scaling.factor, got null",
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
    "first token below 0": (
        change_json("config.json", bos_token_id=-1),
        "tokenizer.json: expected the token -1, which the model's configuration names .* got none; .*",
    ),
    "stop token of another type": (
        change_json("generation_config.json", eos_token_id="</s>"),
        'generation_config.json: expected token ids as eos_token_id, got "</s>"',
    ),
    "too many stop tokens": (
        change_json("generation_config.json", eos_token_id=list(range(17))),
        "generation_config.json: expected at most 16 token ids as eos_token_id, got 17",
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


@pytest.mark.parametrize("absolute", [True, False])
def test_an_index_that_names_a_file_elsewhere_is_refused_and_the_file_not_opened(
    tmp_path: Path, absolute: bool
) -> None:
    """Opening it would be a problem more, for it holds nothing."""
    directory = write(tmp_path / "model", QWEN3, tensors_of(QWEN3), shards=2)
    shard = "model-00001-of-00002.safetensors"
    outside = (directory / shard).rename(tmp_path / shard)
    outside.write_bytes(b"")
    name = str(outside) if absolute else f"../{shard}"
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard, name))
    problems = problems_of(directory)
    named = [tensor for tensor, file in json.loads(index.read_text())["weight_map"].items() if file == name]
    assert problems == [f'{index.name}: expected files in the directory, got "{name}" for {tensor}' for tensor in named]


def test_shards_may_lie_in_a_folder_of_the_directory(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, tensors_of(QWEN3), shards=2)
    shard, index = "model-00002-of-00002.safetensors", tmp_path / "model.safetensors.index.json"
    (tmp_path / "more").mkdir()
    (tmp_path / shard).rename(tmp_path / "more" / shard)
    index.write_text(index.read_text().replace(shard, f"more/{shard}"))
    assert tmp_path / "more" / shard in open_checkpoint(tmp_path).files


def test_a_value_that_is_nested_too_deeply_to_be_shown_is_refused() -> None:
    value: Any = []
    for _ in range(10**4):
        value = [value]
    for key in ("model_type", "architectures", "hidden_act", "rope_scaling", "vocab_size", "tie_word_embeddings"):
        problems: list[str] = []
        read_config({**QWEN3, key: value}, problems)
        assert len(problems) == 1
        assert problems[0].endswith("got something nested too deeply")


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match=r"^directory: expected one with config.json, .*, got .*nowhere"):
        open_checkpoint(tmp_path / "nowhere")
