"""What config.json says of latent attention and of the mixture of DeepSeek-V3, or why the decoder cannot honour it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codec_jax.nnx.checkpoint_rope import Rope, sharpening
from codec_jax.nnx.checkpoint_values import flag, number, require
from codec_jax.nnx.decoder_config import Latent, Mixture
from codec_jax.nnx.rope import YarnScaling

#: Those that have both; of Kimi K2 transformers has no class.
MODEL_TYPES = ("deepseek_v3", "kimi_k2")
#: What transformers takes for keys that are not there.
DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
#: The only values of further keys that `Decoder` computes.
HONOURED: Mapping[str, Any] = {
    "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
}  # fmt: skip


def read_latent(given: Mapping[str, Any], rope: Rope, q_heads: int | None, problems: list[str]) -> dict[str, Any]:
    """Return fields of `DecoderConfig`, {} where there is a problem with one of them."""
    known = len(problems)
    if q_heads is not None:
        require(given, "num_key_value_heads", q_heads, problems)
    size, nope, rotated, value = (
        number(given, name, problems) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if rotated is not None:
        require(given, "head_dim", rotated, problems)
    query = None if given["q_lora_rank"] is None else number(given, "q_lora_rank", problems)
    if len(problems) > known:
        return {}
    try:
        latent = Latent(size, nope, rotated, value, query)
    except ValueError as error:
        problems.append(f"config.json: {error}")
        return {}
    scale = latent.query_dim**-0.5 * _sharpened(given, rope, problems)
    return {"latent": latent, "num_kv_heads": 1, "head_dim": latent.page_dim, "scale": scale}


def read_mixture(given: Mapping[str, Any], problems: list[str]) -> Mixture | None:
    """Read the mixture of experts, None where there is a problem with it."""
    known = len(problems)
    experts, chosen, size, shared, groups, best = (
        number(given, name, problems)
        for name in (
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group",
            "topk_group",
        )
    )  # fmt: skip
    dense = number(given, "first_k_dense_replace", problems, least=0)
    scale = number(given, "routed_scaling_factor", problems, whole=False)
    normalised = flag(given, "norm_topk_prob", problems)
    if len(problems) > known:
        return None
    try:
        return Mixture(
            experts, chosen, size, normalised, first_layer=dense, shared_size=size * shared, sigmoid=True,
            groups=groups, groups_per_token=best, weight_scale=float(scale),
        )  # fmt: skip
    except ValueError as error:
        problems.append(f"config.json: {error}")
        return None


def read_further_layers(given: Mapping[str, Any], problems: list[str]) -> int:
    """Return how many layers follow those of the decoder, for the prediction of several tokens; they are not read."""
    if given.get("model_type") not in MODEL_TYPES:
        return 0
    newer = "num_mtp_layers" in given
    name = "num_mtp_layers" if newer else "num_nextn_predict_layers"
    return number(given, name, problems, default=DEFAULTS["num_nextn_predict_layers"], least=0) or 0


def _sharpened(given: Mapping[str, Any], rope: Rope, problems: list[str]) -> float:
    """Return the factor on scores where positions are stretched."""
    read = given.get("rope_parameters") or given.get("rope_scaling")
    read = read if isinstance(read, dict) else {}
    amount = read.get("mscale_all_dim")
    if isinstance(rope.scaling, YarnScaling):
        return 1.0 if amount is None else sharpening(rope.scaling.factor, amount) ** 2
    if rope.scaling is not None:
        require(read, "mscale_all_dim", None, problems)
    return 1.0
