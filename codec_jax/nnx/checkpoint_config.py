"""config.json and generation_config.json of a Hugging Face checkpoint, or why the decoder cannot honour them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from codec_jax.nnx.decoder import DecoderConfig
from codec_jax.nnx.rope import Llama3Scaling

#: model_type -> (architecture, whether queries and keys are normalised).
FAMILIES = {"llama": ("LlamaForCausalLM", False), "qwen3": ("Qwen3ForCausalLM", True)}

#: The only values of these keys that `Decoder` computes; a key that is not there, or null, means the same.
_HONOURED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}

#: Field of `DecoderConfig` -> key.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
}


def read_config(given: Mapping[str, Any], problems: list[str]) -> DecoderConfig | None:
    """Return the decoder that config.json describes, None without a known family and sizes that fit each other.

    Everything that `Decoder` does not compute is added to `problems`, also where a config is returned.
    """
    family, tied = given.get("model_type"), given.get("tie_word_embeddings")
    architecture, qk_norm = FAMILIES.get(family if isinstance(family, str) else "", ("", False))
    if not architecture:
        problems.append(f"config.json: expected model_type to be one of {', '.join(FAMILIES)}, got {shown(family)}")
    elif given.get("architectures") not in (None, [architecture]):
        problems.append(
            f"config.json: expected architectures = {shown([architecture])}, got {shown(given['architectures'])}"
        )
    if not isinstance(tied, bool | None):
        problems.append(f"config.json: expected true or false as tie_word_embeddings, got {shown(tied)}")
    for name, honoured in _HONOURED.items():
        _require(given, name, honoured, problems)
    layers = given.get("layer_types") or []
    # Without the switch, a window that is given may be meant.
    windowed = "use_sliding_window" not in given and given.get("sliding_window") is not None
    if windowed or not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        problems.append(
            "config.json: expected full attention in every layer, "
            f"got sliding_window = {shown(given.get('sliding_window'))}, layer_types = {shown(layers)}"
        )
    theta, scaling = _read_rope(given, problems)
    epsilon = _number(given, "rms_norm_eps", problems, default=1e-6, whole=False)

    sizes = {ours: _number(given, theirs, problems) for ours, theirs in _SIZES.items()}
    q_heads, hidden_size = sizes["num_q_heads"], sizes["hidden_size"]
    sizes["num_kv_heads"] = _number(given, "num_key_value_heads", problems, default=q_heads)
    head_dim = hidden_size // q_heads if hidden_size and q_heads else None
    sizes["head_dim"] = _number(given, "head_dim", problems, default=head_dim)
    if not architecture or None in sizes.values():
        return None
    try:
        return DecoderConfig(
            **sizes,
            rope_theta=theta or 1.0,
            rope_scaling=scaling,
            norm_epsilon=epsilon or 1.0,
            qk_norm=qk_norm,
            tied_embeddings=bool(tied),
        )
    except ValueError as error:
        problems.append(f"config.json: {error}")
        return None


def read_max_context(given: Mapping[str, Any], problems: list[str]) -> int:
    """Return the greatest number of tokens that the model was made for."""
    return _number(given, "max_position_embeddings", problems) or 0


def read_stop_tokens(config: Mapping[str, Any], generation: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    """Return the tokens that end a text: eos_token_id of generation_config.json, or else of config.json."""
    name, given = ("generation_config.json", generation) if "eos_token_id" in generation else ("config.json", config)
    tokens = given.get("eos_token_id")
    tokens = [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]
    if any(type(token) is not int or token < 0 for token in tokens):
        problems.append(f"{name}: expected token ids as eos_token_id, got {shown(given['eos_token_id'])}")
        return ()
    return tuple(tokens)


def _read_rope(given: Mapping[str, Any], problems: list[str]) -> tuple[float | None, Llama3Scaling | None]:
    """Read the base and the scaling, as transformers writes them since version 5 and as it wrote them before."""
    place = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    rope = given.get(place) or {}
    if not isinstance(rope, dict):
        problems.append(f"config.json: expected an object as {place}, got {shown(rope)}")
        return None, None
    both = {**given, **rope}
    theta = _number(both, "rope_theta", problems, default=10_000.0, whole=False)
    _require(both, "partial_rotary_factor", 1.0, problems)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values()):
        return theta, None
    if kind != "llama3":
        problems.append(
            f"config.json: expected {place} of type default or llama3, which the decoder computes, got {shown(rope)}"
        )
        return theta, None
    place += "."
    factor, low, high = (
        _number(rope, name, problems, whole=False, place=place)
        for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = _number(rope, "original_max_position_embeddings", problems, place=place)
    if None in (factor, low, high, context):
        return theta, None
    try:
        return theta, Llama3Scaling(factor, low, high, context)
    except ValueError as error:
        problems.append(f"config.json: {place}{error}")
        return theta, None


def _require(given: Mapping[str, Any], name: str, honoured: Any, problems: list[str]) -> None:
    """Say so if a key has another value than the only one that `Decoder` computes."""
    if given.get(name) not in (None, honoured):
        problems.append(
            f"config.json: expected {name} = {shown(honoured)}, which is what the decoder computes, "
            f"got {shown(given[name])}"
        )


def _number(
    given: Mapping[str, Any],
    name: str,
    problems: list[str],
    *,
    default: float | None = None,
    whole: bool = True,
    place: str = "",
) -> Any:
    """Return a positive number, or None and say why there is none."""
    value: Any = given.get(name)
    if value is None and default is not None:
        return default
    # Within int32 and float32. A bool is an int, but no number here.
    kinds, low, high, kind = ((int,), 1, 2**31 - 1, "whole number") if whole else ((int, float), 1e-37, 1e37, "number")
    if type(value) in kinds and low <= value <= high:
        return value
    problems.append(f"config.json: expected a {kind} from {low} to {high} as {place}{name}, got {shown(value)}")
    return None


def shown(value: Any) -> str:
    """Return a value as JSON, or as much of it as a message has room for."""
    try:
        return json.dumps(value)[:1000]
    except RecursionError:
        return "something nested too deeply"
