"""Hugging Face checkpoints: a directory with config.json, *.safetensors and tokenizer.json.

    open_checkpoint   config, tokenizer, chat template and the headers of all tensors; one error for all that is wrong
    Checkpoint.load   parameter by parameter from the mapped files to the device, in the dtype that is wanted; to each
                      of several devices what it keeps

Only files in the directory are read; nothing is ever downloaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from codec_jax.nnx.chat import ChatTemplate, read_chat_template
from codec_jax.nnx.checkpoint_config import has_fp8, is_mxfp4, read_config, read_max_context, read_stop_tokens
from codec_jax.nnx.checkpoint_kv_scales import has_kv_scales, is_kv_scale, read_kv_scales
from codec_jax.nnx.checkpoint_latent import read_further_layers
from codec_jax.nnx.checkpoint_tensors import Source, TensorFiles
from codec_jax.nnx.checkpoint_values import shown
from codec_jax.nnx.decoder import Decoder
from codec_jax.nnx.decoder_config import DecoderConfig
from codec_jax.nnx.fp8 import FP8, SCALES, StoredTensors, shape_of_scales
from codec_jax.nnx.parallel import Parallel
from codec_jax.nnx.shards import Cut, PlacedDecoder, check_sizes
from codec_jax.nnx.tensors import MXFP4_GROUP, UNNEEDED, parts_of
from codec_jax.nnx.weights import filled, parameter_shapes

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AT_ONCE = 1 << 26  # bytes that are compared


class _Tensor(NamedTuple):
    """A tensor, as the header of a safetensors file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is known to fit the decoder, its weights still on disk. `open_checkpoint` makes it."""

    config: DecoderConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the checkpoint has none
    stop_tokens: tuple[int, ...]  # those that end a text
    max_context: int  # tokens that the model was made for
    kv_scales: tuple[tuple[float, float], ...] | None  # of keys and of values, of each layer; None: it has none
    files: frozenset[Path]  # all that were read or will be
    sources: Mapping[str, Source]  # by the dotted path of each parameter

    @overload
    def load(
        self,
        dtype: DTypeLike = jnp.bfloat16,
        *,
        kv_dtype: DTypeLike | None = None,
        kv_scales: Literal["token"] | None = None,
        mesh: None = None,
        progress: bool = False,
    ) -> Decoder: ...

    @overload
    def load(
        self,
        dtype: DTypeLike = jnp.bfloat16,
        *,
        kv_dtype: DTypeLike | None = None,
        kv_scales: Literal["token"] | None = None,
        mesh: Mesh,
        progress: bool = False,
    ) -> PlacedDecoder: ...

    def load(
        self,
        dtype: DTypeLike = jnp.bfloat16,
        *,
        kv_dtype: DTypeLike | None = None,
        kv_scales: Literal["token"] | None = None,
        mesh: Mesh | None = None,
        progress: bool = False,
    ) -> Decoder | PlacedDecoder:
        """Read the weights to the default device, or to those of a mesh, one parameter after another.

        The host holds the tensors of one parameter at a time, and no other weights are made first. Of a mesh, each
        device gets what it keeps, and each process reads no more than what its devices keep.

        Args:
          dtype: float32, bfloat16 or float16, of weights, activations and KV cache, whatever the files have.
          kv_dtype: of the KV cache alone: float8_e4m3fn takes one byte a number, with the checkpoint's scales if it has
            some.
          kv_scales: "token" for scales of each token and kv head in their place, found when a token is written.
          mesh: devices along axes "context" and "tensor", among which the weights are divided.
          progress: show a bar.

        Returns the decoder; with a mesh one that is placed there, for `Engine` and `Sampler`. Raises ValueError for
        another dtype or a mesh that does not divide the decoder, and what reading raises if the files are no longer as
        they were.

        >>> model = open_checkpoint("Qwen3-4B").load()
        >>> logits = jax.jit(model)(np.asarray([[1, 2, 3]]))  # [B, T, V], float32
        """
        config = replace(self.config, dtype=dtype, param_dtype=dtype, kv_dtype=kv_dtype)
        takes_its_own = kv_scales is None and config.cache_dtype.itemsize == 1
        config = replace(config, kv_scales=self.kv_scales if takes_its_own else kv_scales)
        parallel = Parallel.of(mesh)
        check_sizes(config, parallel)
        with TensorFiles(self.sources.values(), mesh) as files:

            def weight(path: str, parameter: jax.ShapeDtypeStruct) -> Array:
                cut = Cut.of(config, parallel, path, parameter.shape)
                return files.parameter(self.sources[path], parameter.shape, parameter.dtype, cut)

            graph, weights = filled(config, weight, progress=progress)
        if mesh is None:
            return nnx.merge(graph, weights)
        return PlacedDecoder(graph, weights, config, mesh, parameter_shapes(config))


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read everything but the weights of a Hugging Face checkpoint of one of the families that `Decoder` computes.

    Args:
      directory: holds config.json, model.safetensors or its shards (with or without an index) in float32, bfloat16 or
        float16, tokenizer.json and perhaps generation_config.json, tokenizer_config.json and chat_template.jinja.
        Experts of gpt-oss may be in MXFP4, weights of DeepSeek-V3 in float8 with scales of blocks. DeepSeek-V3's layers
        that predict several tokens, which follow those of the decoder, are not read.

    Raises ValueError that lists all that is wrong with the checkpoint: tensors that are missing, unknown, of another
    shape or dtype, or truncated, an architecture or a setting that `Decoder` does not compute, tokens that the model
    does not have, a chat template that is no jinja. Raises NotADirectoryError if there is no such directory.

    >>> checkpoint = open_checkpoint("Qwen3-4B")
    >>> checkpoint.config.qk_norm
    True
    >>> tokens = checkpoint.tokenizer.encode("Once upon a time").ids
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise NotADirectoryError(
            f"directory: expected one with config.json, weights and tokenizer.json, got {directory}"
        )
    problems: list[str] = []
    names = ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
    files = [directory / name for name in names]
    given = _read_json(files[0], problems)
    tokenizer = _read_tokenizer(files[1], problems)
    generation, tokenizer_config = (_read_json(file, problems) if file.exists() else None for file in files[2:4])
    chat_template = read_chat_template(files[4], tokenizer_config or {}, problems)
    headers, kv_scales = _read_headers(directory, problems), None
    if given is not None:
        config = read_config(given, problems)
        max_context = read_max_context(given, problems)
        stop_tokens = read_stop_tokens(given, generation or {}, problems)
        further = read_further_layers(given, problems)
        scales, weights = {}, headers
        if has_kv_scales(given):
            scales = {name: tensor.file for name, tensor in headers.tensors.items() if is_kv_scale(name)}
            rest = {name: tensor for name, tensor in headers.tensors.items() if name not in scales}
            weights = headers._replace(tensors=rest)
        sources = {} if config is None else _match(config, weights, is_mxfp4(given), has_fp8(given), further, problems)
        if config is not None and sources and has_kv_scales(given):
            kv_scales = read_kv_scales(config.num_layers, scales, problems)
        if tokenizer is not None and type(given.get("vocab_size")) is int:
            first = [given["bos_token_id"]] if type(given.get("bos_token_id")) is int else []
            _check_tokens(tokenizer, given["vocab_size"], [*first, *stop_tokens], problems)
    if problems or config is None or tokenizer is None:
        raise ValueError("\n  ".join([f"{directory}: expected a checkpoint that the decoder can run, but", *problems]))
    read = {file for file in files if file.exists()} | {file for source in sources.values() for file in source.files}
    return Checkpoint(config, tokenizer, chat_template, stop_tokens, max_context, kv_scales, frozenset(read), sources)


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    # Special ones may be those of a relative that takes images, as in Gemma 3: a prompt that has one is refused.
    specials = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    beyond = sorted(token for token in set(tokenizer.get_vocab().values()) - specials if token >= vocab_size)
    if beyond:
        problems.append(
            f"tokenizer.json: expected tokens in [0, {vocab_size}), the vocabulary of config.json, "
            f"got {len(beyond)} beyond it, up to {beyond[-1]}"
        )
    for token in special:
        if not 0 <= token < vocab_size or tokenizer.id_to_token(token) is None:
            problems.append(
                f"tokenizer.json: expected the token {token}, which the model's configuration names as the first or "
                "last of a text, got none; is it the tokenizer of another model?"
            )


# ---------------------------------------------------------------------- tensors


class _Headers(NamedTuple):
    """The headers of all files."""

    tensors: dict[str, _Tensor]
    unread: set[str] | None  # tensors in files that could not be read; None if nothing says which these are


def _read_headers(directory: Path, problems: list[str]) -> _Headers:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    file_of: dict[str, str] = {}
    if single.exists():
        files = [single]
    elif index.exists():
        file_of = _read_index(index, problems)
        files = sorted({directory / name for name in file_of.values()})
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
        except (OSError, ValueError, SafetensorError) as error:
            problems.append(f"{file.name}: expected a whole safetensors file, got {error}")
            broken.add(file)
    if not files or (broken and not file_of):
        return _Headers(tensors, None)
    return _Headers(tensors, {name for name, file in file_of.items() if directory / file in broken})


def _read_index(file: Path, problems: list[str]) -> dict[str, str]:
    """Return the file of each tensor, {} if some are none in the directory."""
    content = _read_json(file, problems)
    if content is None:
        return {}
    file_of = content.get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()) or not file_of:
        problems.append(f"{file.name}: expected a file name for each tensor as weight_map, got {shown(file_of)}")
        return {}
    outside = {name: path for name, path in file_of.items() if Path(path).is_absolute() or ".." in Path(path).parts}
    for name, path in outside.items():
        problems.append(f"{file.name}: expected files in the directory, got {shown(path)} for {name}")
    return {} if outside else file_of


def _are_equal(one: _Tensor, other: _Tensor) -> bool:
    """Whether a head and an embedding have the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not math.prod(one.shape):
        return True
    stored = StoredTensors()
    head, embedding = stored.bytes_of(one.file, _HEAD), stored.bytes_of(other.file, _EMBEDDING)
    starts = range(0, len(head), _AT_ONCE)
    return all((head[i : i + _AT_ONCE] == embedding[i : i + _AT_ONCE]).all() for i in starts)


def _match(
    config: DecoderConfig, headers: _Headers, mxfp4: bool, fp8: bool, further: int, problems: list[str]
) -> dict[str, Source]:
    """Find the tensors of every parameter; those of further layers are left alone."""
    known = len(headers.tensors) + len(headers.unread or ())
    if config.num_layers > known:  # a layer has several: listing all that are missing might take for ever
        if headers.unread is not None:
            problems.append(
                f"config.json: expected num_hidden_layers of at most {known}, as many as there are tensors, "
                f"got {config.num_layers}"
            )
        return {}
    if mxfp4 and config.mixture is not None:
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.mixture.expert_size}
        uneven = [f"{name} = {size}" for name, size in sizes.items() if size % MXFP4_GROUP]
        if uneven:
            problems.append(
                f"config.json: expected sizes of experts in multiples of {MXFP4_GROUP}, which share a scale in MXFP4, "
                f"got {', '.join(uneven)}"
            )
            return {}
    parts = {path: parts_of(config, path, shape.shape, mxfp4) for path, shape in parameter_shapes(config).items()}
    expected = {name: (shape, each.dtypes) for each in parts.values() for name, shape in each.shapes.items()}
    in_fp8 = {name for name, tensor in headers.tensors.items() if fp8 and tensor.dtype == FP8 and name in expected}
    for name in in_fp8:
        shape, dtypes = expected[name]
        expected |= {name: (shape, (FP8,)), name + SCALES: (shape_of_scales(shape), dtypes)}
    unread_layers = range(config.num_layers, config.num_layers + further)
    for name, tensor in headers.tensors.items():
        if re.fullmatch(UNNEEDED, name):
            continue
        if name == _HEAD and config.tied_embeddings:
            embedding = headers.tensors.get(_EMBEDDING)
            if embedding is not None and not _are_equal(tensor, embedding):
                problems.append(
                    f"{tensor.file.name}: expected {_HEAD} to be {_EMBEDDING}, as tie_word_embeddings says, got "
                    "another one; which is meant? set tie_word_embeddings to false, or leave the tensor out"
                )
            continue
        if (layer := re.match(r"model\.layers\.(\d{1,10})\.", name)) and int(layer[1]) in unread_layers:
            continue
        if name not in expected:
            problems.append(f"{tensor.file.name}: expected no {name}, which the decoder does not have")
            continue
        shape, dtypes = expected[name]
        if tensor.shape != shape:
            problems.append(f"{tensor.file.name}: expected {name} of shape {shape}, got {tensor.shape}")
        if tensor.dtype not in dtypes:
            problems.append(
                f"{tensor.file.name}: expected {name} as one of {', '.join(dtypes)}, got {tensor.dtype}; "
                "quantised weights are not supported"
            )
    missing = expected.keys() - headers.tensors.keys()
    if headers.unread is not None:
        problems.extend(f"{name}: expected this tensor, got none" for name in sorted(missing - headers.unread))
    if missing:
        return {}
    file_of = {name: headers.tensors[name].file for name in expected}
    return {
        path: Source(
            layout,
            tuple((file_of[name], name) for name in shapes),
            {name: file_of[name + SCALES] for name in shapes if name in in_fp8},
        )
        for path, (layout, shapes) in parts.items()
    }
