"""Hugging Face checkpoints of Qwen3 and Llama: a directory with config.json, *.safetensors and tokenizer.json.

    open_checkpoint   config, tokenizer and the headers of all tensors; one error that lists everything wrong
    Checkpoint.load   tensor by tensor from the mapped files to the device, in the dtype that is wanted

Only files in the directory are read; nothing is ever downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from codec_jax.nnx.checkpoint_config import read_config, read_max_context, read_stop_tokens
from codec_jax.nnx.decoder import Decoder, DecoderConfig
from codec_jax.nnx.weights import filled_decoder, parameter_shapes

_Transform = Callable[[Array], Array]


def _as_it_is(tensor: Array) -> Array:
    """Take the tensor as it is stored."""
    return tensor


def _transposed(tensor: Array) -> Array:
    """Turn PyTorch's [outputs, inputs] into the [inputs, outputs] of `nnx.Linear`."""
    return tensor.T


#: Tensor name -> (parameter of `Decoder`, transform).
_LLAMA: dict[str, tuple[str, _Transform]] = {
    r"model\.embed_tokens\.weight": ("embedding.embedding", _as_it_is),
    r"model\.layers\.(\d+)\.input_layernorm\.weight": (r"blocks.\1.attention_norm.scale", _as_it_is),
    r"model\.layers\.(\d+)\.self_attn\.q_proj\.weight": (r"blocks.\1.attention.query.kernel", _transposed),
    r"model\.layers\.(\d+)\.self_attn\.k_proj\.weight": (r"blocks.\1.attention.key.kernel", _transposed),
    r"model\.layers\.(\d+)\.self_attn\.v_proj\.weight": (r"blocks.\1.attention.value.kernel", _transposed),
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight": (r"blocks.\1.attention.out.kernel", _transposed),
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": (r"blocks.\1.mlp_norm.scale", _as_it_is),
    r"model\.layers\.(\d+)\.mlp\.gate_proj\.weight": (r"blocks.\1.mlp.gate.kernel", _transposed),
    r"model\.layers\.(\d+)\.mlp\.up_proj\.weight": (r"blocks.\1.mlp.up.kernel", _transposed),
    r"model\.layers\.(\d+)\.mlp\.down_proj\.weight": (r"blocks.\1.mlp.down.kernel", _transposed),
    r"model\.norm\.weight": ("norm.scale", _as_it_is),
    r"lm_head\.weight": ("head.kernel", _transposed),
}
_QWEN3 = _LLAMA | {
    r"model\.layers\.(\d+)\.self_attn\.q_norm\.weight": (r"blocks.\1.attention.query_norm.scale", _as_it_is),
    r"model\.layers\.(\d+)\.self_attn\.k_norm\.weight": (r"blocks.\1.attention.key_norm.scale", _as_it_is),
}
_TENSORS = {"llama": _LLAMA, "qwen3": _QWEN3}

#: Older files have them; they follow from the config.
_UNNEEDED = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

_DTYPES = ("BF16", "F16", "F32")


class _Tensor(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class _Source(NamedTuple):
    """Where a parameter comes from."""

    file: Path
    name: str
    transform: _Transform


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is known to fit the decoder, its weights still on disk. `open_checkpoint` makes it."""

    config: DecoderConfig
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]  # those that end a text
    max_context: int  # tokens that the model was made for
    sources: Mapping[str, _Source]  # of each parameter, by its path in the decoder

    def load(self, dtype: DTypeLike = jnp.bfloat16, *, progress: bool = False) -> Decoder:
        """Read the weights to the default device; `dtype` is that of weights, activations and KV cache.

        The host holds one tensor at a time, and no other weights are made first. `progress` shows a bar. Raises
        ValueError for a dtype other than float32, bfloat16 and float16.
        """
        if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {jnp.dtype(dtype)}")
        config = replace(self.config, dtype=dtype, param_dtype=dtype)
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(file, framework="numpy"))
                for file in {source.file for source in self.sources.values()}
            }

            def weight(path: str, _: jax.ShapeDtypeStruct) -> Array:
                source = self.sources[path]
                return _place(files[source.file].get_tensor(source.name), source.transform, dtype)

            return filled_decoder(config, weight, progress=progress)


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read everything but the weights of a Hugging Face checkpoint of the Qwen3 or Llama family.

    Args:
      directory: holds config.json, model.safetensors or its shards (with or without an index), tokenizer.json and
        perhaps generation_config.json.

    Raises ValueError that lists all that is wrong with the checkpoint: tensors that are missing, unknown, of another
    shape or truncated, an architecture or a setting that `Decoder` does not compute, tokens that the model does not
    have. Raises NotADirectoryError if there is no such directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise NotADirectoryError(
            f"directory: expected one with config.json, weights and tokenizer.json, got {directory}"
        )
    problems: list[str] = []
    given = _read_json(directory / "config.json", problems)
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file, problems) if generation_file.exists() else None
    tokenizer = _read_tokenizer(directory / "tokenizer.json", problems)
    headers = _read_headers(directory, problems)
    if given is None:
        raise _refusal(directory, problems)
    config = read_config(given, problems)
    max_context = read_max_context(given, problems)
    stop_tokens = read_stop_tokens(given, generation or {}, problems)
    sources: dict[str, _Source] = {}
    if config is not None:
        sources = _match(config, _TENSORS[given["model_type"]], headers, problems)
    if tokenizer is not None and type(given.get("vocab_size")) is int:
        first = [given["bos_token_id"]] if type(given.get("bos_token_id")) is int else []
        _check_tokens(tokenizer, given["vocab_size"], [*first, *stop_tokens], problems)
    if problems or config is None or tokenizer is None:
        raise _refusal(directory, problems)
    return Checkpoint(config, tokenizer, stop_tokens, max_context, sources)


def _refusal(directory: Path, problems: list[str]) -> ValueError:
    return ValueError("\n  ".join([f"{directory}: expected a checkpoint that the decoder can run, but", *problems]))


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{file.name}: expected a JSON file, got {error}")
        return None
    if not isinstance(content, dict):
        problems.append(f"{file.name}: expected a JSON object, got {type(content).__name__}")
        return None
    return content


# ---------------------------------------------------------------------- tokens


def _read_tokenizer(file: Path, problems: list[str]) -> Tokenizer | None:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other type
        problems.append(f"{file.name}: expected a file of the tokenizers library, got {error}")
        return None
    # Some are saved with the settings of their training, which would shorten or fill up prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_tokens(tokenizer: Tokenizer, vocab_size: int, special: list[int], problems: list[str]) -> None:
    """The tokenizer may have fewer tokens than the embedding has rows, which are often padded, but no others."""
    beyond = sorted(token for token in tokenizer.get_vocab().values() if token >= vocab_size)
    if beyond:
        problems.append(
            f"tokenizer.json: expected tokens in [0, {vocab_size}), the vocabulary of config.json, "
            f"got {len(beyond)} beyond it, up to {beyond[-1]}"
        )
    for token in special:
        if token >= vocab_size or tokenizer.id_to_token(token) is None:
            problems.append(
                f"tokenizer.json: expected the token {token}, which the model's configuration names as the first or "
                "last of a text, got none; is it the tokenizer of another model?"
            )


# ---------------------------------------------------------------------- tensors


class _Headers(NamedTuple):
    """What the headers of all files say."""

    tensors: dict[str, _Tensor]
    unread: set[str] | None  # tensors in files that could not be read; None if nothing says which these are


def _read_headers(directory: Path, problems: list[str]) -> _Headers:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    file_of: dict[str, str] = {}
    if single.exists():
        files = [single]
    elif index.exists():
        file_of = _read_index(index, problems)
        files = [directory / name for name in sorted(set(file_of.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files and not index.exists():
        problems.append("model.safetensors: expected this file, or shards of it, got none")
    tensors: dict[str, _Tensor] = {}
    broken = set()
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no dict
                    if name in tensors:
                        problems.append(
                            f"{file.name}: expected no {name}, which {tensors[name].file.name} has, got one"
                        )
                    header = opened.get_slice(name)
                    tensors[name] = _Tensor(file, tuple(header.get_shape()), header.get_dtype())
        except (OSError, SafetensorError) as error:
            problems.append(f"{file.name}: expected a whole safetensors file, got {error}")
            broken.add(file.name)
    if not files or (broken and not file_of):
        return _Headers(tensors, None)
    return _Headers(tensors, {name for name, file in file_of.items() if file in broken})


def _read_index(file: Path, problems: list[str]) -> dict[str, str]:
    """Return the file of each tensor."""
    content = _read_json(file, problems)
    if content is None:
        return {}
    file_of = content.get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()) or not file_of:
        problems.append(f"{file.name}: expected a file name for each tensor as weight_map, got {str(file_of)[:40]}")
        return {}
    return file_of


def _match(
    config: DecoderConfig, table: Mapping[str, tuple[str, _Transform]], headers: _Headers, problems: list[str]
) -> dict[str, _Source]:
    """Find the tensor of every parameter."""
    parameters = parameter_shapes(config)
    sources = {}
    for name, tensor in headers.tensors.items():
        if re.fullmatch(_UNNEEDED, name) or (name == "lm_head.weight" and config.tied_embeddings):
            continue
        matches = ((re.fullmatch(pattern, name), *entry) for pattern, entry in table.items())
        target, transform = next(
            ((match.expand(parameter), transform) for match, parameter, transform in matches if match),
            (name, _as_it_is),
        )
        if target not in parameters:
            problems.append(f"{tensor.file.name}: expected no {name}, which the decoder does not have")
            continue
        sources[target] = _Source(tensor.file, name, transform)
        expected = jax.eval_shape(transform, parameters[target]).shape
        if tensor.shape != expected:
            problems.append(f"{tensor.file.name}: expected {name} of shape {expected}, got {tensor.shape}")
        if tensor.dtype not in _DTYPES:
            problems.append(
                f"{tensor.file.name}: expected {name} as one of {', '.join(_DTYPES)}, got {tensor.dtype}; "
                "quantised weights are not supported"
            )
    if headers.unread is not None:
        missing = [_tensor_name(target, table) for target in parameters.keys() - sources.keys()]
        problems.extend(f"{name}: expected this tensor, got none" for name in sorted(set(missing) - headers.unread))
    return sources


def _tensor_name(target: str, table: Mapping[str, tuple[str, _Transform]]) -> str:
    """Return the tensor that a parameter of the decoder comes from."""
    for pattern, (parameter, _) in table.items():
        if match := re.fullmatch(parameter.replace(r"\1", r"(\d+)"), target):
            return pattern.replace(r"(\d+)", "".join(match.groups())).replace("\\", "")
    raise KeyError(target)


@partial(jax.jit, static_argnames=("transform", "dtype"))
def _place(tensor: Array, transform: _Transform, dtype: DTypeLike) -> Array:
    return transform(tensor).astype(dtype)
