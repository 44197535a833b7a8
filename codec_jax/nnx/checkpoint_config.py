"""config.json and generation_config.json of a Hugging Face checkpoint, or why the decoder cannot honour them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from codec_jax.nnx import checkpoint_latent
from codec_jax.nnx.checkpoint_kv_scales import has_kv_scales
from codec_jax.nnx.checkpoint_rope import read_rope
from codec_jax.nnx.checkpoint_values import flag, number, require, shown
from codec_jax.nnx.decoder_config import DecoderConfig, Mixture
from codec_jax.nnx.fp8 import is_fp8
from codec_jax.nnx.params import MAX_STOP_TOKENS
from pallas_kernels import Window


@dataclass(frozen=True)
class _Family:
    """What is the same in all checkpoints of a model_type."""

    architecture: str
    fields: Mapping[str, Any]  # of `DecoderConfig`
    #: What transformers takes for keys that are not there, where this is not what it takes for Llama.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: The only values of further keys that `Decoder` computes.
    honoured: Mapping[str, Any] = field(default_factory=dict)
    #: Which layers see everything, where layer_types does not say so: every n-th; 1: all; 0: none.
    full_every: int = 1
    window_theta: str | None = None  # the key of the base of layers with a window; None: all turn alike


_GEMMA: dict[str, Any] = {
    "qk_norm": False, "norm_placement": "both", "norm_plus_one": True, "activation": "gelu_tanh",
}  # fmt: skip
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip
_GEMMA_HONOURED = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
_OLMO = {"qk_norm_over": "projection", "norm_placement": "after"}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

#: model_type -> family.
FAMILIES = {
    "llama": _Family("LlamaForCausalLM", {"qk_norm": False}),
    "mistral": _Family("MistralForCausalLM", {"qk_norm": False}, {"sliding_window": 4096}, full_every=0),
    "qwen2": _Family("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True}),
    "qwen3": _Family("Qwen3ForCausalLM", {}),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", {}, _EXPERTS),
    "gemma2": _Family(
        "Gemma2ForCausalLM", _GEMMA,
        {**_GEMMA_DEFAULTS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        _GEMMA_HONOURED, full_every=2,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM", {**_GEMMA, "qk_norm": True},
        {**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {**_GEMMA_HONOURED, "attn_logit_softcapping": None}, full_every=6, window_theta="rope_local_base_freq",
    ),
    "olmo2": _Family("Olmo2ForCausalLM", _OLMO, {"rms_norm_eps": 1e-5}),
    "olmo3": _Family(
        "Olmo3ForCausalLM", _OLMO, {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        full_every=4, window_theta="rope_theta",
    ),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        {"qk_norm": False, "qkv_bias": True, "out_bias": True, "sinks": True, "activation": "clamped"},
        {
            "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0,
            "num_local_experts": 128, "num_experts_per_tok": 4,
        },
        {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}, full_every=2,
    ),
    **dict.fromkeys(
        checkpoint_latent.MODEL_TYPES,
        _Family(
            "DeepseekV3ForCausalLM", {"qk_norm": False}, checkpoint_latent.DEFAULTS, checkpoint_latent.HONOURED
        ),
    ),
}  # fmt: skip

#: The only values of these keys that `Decoder` computes; a key that is not there, or null, means the same.
_HONOURED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
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
    name = given.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        problems.append(f"config.json: expected model_type to be one of {', '.join(FAMILIES)}, got {shown(name)}")
        family, architecture = FAMILIES["llama"], None
    else:
        architecture = family.architecture
        if given.get("architectures") not in (None, [architecture]):
            problems.append(
                f"config.json: expected architectures = {shown([architecture])}, got {shown(given['architectures'])}"
            )
    given = {**family.defaults, **given}
    tied = flag(given, "tie_word_embeddings", problems)
    for key, honoured in {**_HONOURED, **family.honoured}.items():
        require(given, key, honoured, problems)
    if not (is_mxfp4(given) or has_fp8(given) or has_kv_scales(given)):
        require(given, "quantization_config", None, problems)
    if name == "gpt_oss" and not given.get("rope_parameters") and not given.get("rope_scaling"):
        given["rope_scaling"] = _GPT_OSS_ROPE
    if name == "olmo3" and not given.get("rope_parameters"):
        # With the older keys, transformers has this one for layers with a window, whatever the file says.
        require(given, "rope_theta", 5e5, problems)
    rope = read_rope(given, family.window_theta, problems)
    epsilon = number(given, "rms_norm_eps", problems, default=1e-6, whole=False)

    sizes = {ours: number(given, theirs, problems) for ours, theirs in _SIZES.items()}
    q_heads, hidden_size = sizes["num_q_heads"], sizes["hidden_size"]
    sizes["num_kv_heads"] = number(given, "num_key_value_heads", problems, default=q_heads)
    head_dim = hidden_size // q_heads if hidden_size and q_heads else None
    sizes["head_dim"] = number(given, "head_dim", problems, default=head_dim)
    fields = dict(family.fields)
    fields["windows"] = _read_windows(given, family, sizes["num_layers"], problems)
    if "query_pre_attn_scalar" in family.defaults:
        fields["scale"] = (number(given, "query_pre_attn_scalar", problems, whole=False) or 1.0) ** -0.5
        fields["embedding_scale"] = float(hidden_size or 1) ** 0.5
        for ours, theirs in (("logit_softcap", "final_logit_softcapping"), ("softcap", "attn_logit_softcapping")):
            if given.get(theirs) is not None and theirs not in family.honoured:
                fields[ours] = number(given, theirs, problems, whole=False)
    if name in checkpoint_latent.MODEL_TYPES:
        fields |= checkpoint_latent.read_latent(given, rope, q_heads, problems)
        fields["mixture"] = checkpoint_latent.read_mixture(given, problems)
        sizes |= {size: fields.pop(size, None) for size in ("num_kv_heads", "head_dim")}
    elif "num_experts_per_tok" in family.defaults:
        fields["mixture"] = _read_mixture(given, name == "gpt_oss", problems)
    if architecture is None or None in sizes.values() or fields.get("mixture", "none") is None:
        return None
    try:
        return DecoderConfig(
            **sizes,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            window_rope_theta=rope.window_theta,
            norm_epsilon=epsilon or 1.0,
            tied_embeddings=tied,
            **fields,
        )
    except ValueError as error:
        problems.append(f"config.json: {error}")
        return None


def is_mxfp4(given: Mapping[str, Any]) -> bool:
    """Say whether experts are stored in MXFP4, which loading undoes."""
    quantisation = given.get("quantization_config")
    return (
        given.get("model_type") == "gpt_oss"
        and isinstance(quantisation, dict)
        and quantisation.get("quant_method") == "mxfp4"
    )


def has_fp8(given: Mapping[str, Any]) -> bool:
    """Say whether weights may be stored in float8 with scales of blocks, which loading undoes."""
    return given.get("model_type") in checkpoint_latent.MODEL_TYPES and is_fp8(given.get("quantization_config"))


def read_max_context(given: Mapping[str, Any], problems: list[str]) -> int:
    """Return the greatest number of tokens that the model was made for."""
    return number(given, "max_position_embeddings", problems) or 0


def read_stop_tokens(config: Mapping[str, Any], generation: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    """Return the tokens that end a text: eos_token_id of generation_config.json, or else of config.json."""
    name, given = ("generation_config.json", generation) if "eos_token_id" in generation else ("config.json", config)
    tokens = given.get("eos_token_id")
    tokens = [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]
    if any(type(token) is not int or token < 0 for token in tokens):
        problems.append(f"{name}: expected token ids as eos_token_id, got {shown(given['eos_token_id'])}")
        return ()
    if len(tokens) > MAX_STOP_TOKENS:
        problems.append(f"{name}: expected at most {MAX_STOP_TOKENS} token ids as eos_token_id, got {len(tokens)}")
        return ()
    return tuple(tokens)


def _read_windows(
    given: Mapping[str, Any], family: _Family, num_layers: int | None, problems: list[str]
) -> tuple[Window | None, ...]:
    """Read which layers have a window: from layer_types, or else as the family has them."""
    layers, tokens = given.get("layer_types"), given.get("sliding_window")
    every = family.full_every
    if every == 1:
        # Without the switch, a window that is given may be meant.
        windowed = "use_sliding_window" not in given and tokens is not None
        if windowed or not isinstance(layers or [], list) or any(kind != "full_attention" for kind in layers or []):
            problems.append(
                "config.json: expected full attention in every layer, "
                f"got sliding_window = {shown(tokens)}, layer_types = {shown(layers or [])}"
            )
        return (None,)
    if every == 0:  # the number alone says it
        kinds: Any = ["full_attention" if tokens is None else "sliding_attention"]
        if layers and (not isinstance(layers, list) or any(kind != kinds[0] for kind in layers)):
            problems.append(
                f"config.json: expected {kinds[0]} in every layer, as sliding_window = {shown(tokens)} has it, "
                f"got layer_types = {shown(layers)}"
            )
    elif layers is None:
        if family.window_theta == "rope_local_base_freq":
            every = number(given, "sliding_window_pattern", problems, default=every) or every
        kinds = ["sliding_attention"] * (min(every, num_layers or 1) - 1)
        kinds += ["full_attention" if every <= (num_layers or 1) else "sliding_attention"]
    else:
        kinds = layers
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
            problems.append(
                f"config.json: expected {' or '.join(known)} for each of {num_layers} layers as layer_types, "
                f"got {shown(kinds)}"
            )
            return (None,)
    if "sliding_attention" not in kinds:
        return (None,)
    tokens = number(given, "sliding_window", problems)
    if tokens is None:
        return (None,)
    # Of the patterns that repeat, the shortest, however the file says it.
    shortest = next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[: len(kinds) - n])
    return tuple(Window(tokens) if kind == "sliding_attention" else None for kind in kinds[:shortest])


def _read_mixture(given: Mapping[str, Any], bias: bool, problems: list[str]) -> Mixture | None:
    """Read the mixture of experts of Qwen3-MoE, or of gpt-oss, which has biases."""
    local = given.get("num_local_experts") is not None  # as transformers writes it since version 5
    experts = number(given, "num_local_experts" if local else "num_experts", problems)
    chosen = number(given, "num_experts_per_tok", problems)
    size = number(given, "intermediate_size" if bias else "moe_intermediate_size", problems)
    normalised = bias or flag(given, "norm_topk_prob", problems)
    every = 1 if bias else number(given, "decoder_sparse_step", problems)
    dense = [] if bias else given.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        problems.append(f"config.json: expected numbers of layers as mlp_only_layers, got {shown(dense)}")
        return None
    if None in (experts, chosen, size, every):
        return None
    try:
        return Mixture(experts, chosen, size, normalised, bias, every, tuple(dense))
    except ValueError as error:
        problems.append(f"config.json: {error}")
        return None
