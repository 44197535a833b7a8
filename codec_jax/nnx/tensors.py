"""Which tensors of a Hugging Face checkpoint each parameter of a decoder is made of, and how.

The table goes from parameters to tensors. Families differ in which parameters the decoder of their config has, so one
table serves them all, but for norms, whose names say where they stand in a block that has all four.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from codec_jax.nnx.decoder_config import DecoderConfig

#: How tensors become a parameter, after they are joined along their first axis:
#: plain        as they are
#: linear       transposed: [outputs, inputs] of PyTorch to [inputs, outputs]
#: experts      the same for each expert, all of whose tensors follow one another
#: interleaved  of the last axis the numbers 0, 2, 4 ... first: gates, then what they let through
#: mxfp4        two tensors: numbers of 4 bits and their scales, [experts, outputs, inputs]; to [..., inputs, outputs]
#: mxfp4 interleaved  the same, and interleaved
#: first        of each head's outputs the first, as many as the parameter has: to [inputs, heads, outputs]
#: last         the last
Layout = Literal["plain", "linear", "experts", "interleaved", "mxfp4", "mxfp4 interleaved", "first", "last"]

#: Layouts whose tensors have the outputs first, and the parameters the inputs.
TRANSPOSED = ("linear", "first", "last")

#: MXFP4: numbers that share a scale, and what the 16 codes mean. A byte has two of them, the low half first.
MXFP4_GROUP = 32
_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: A scale that is none.
MXFP4_NAN = 255
#: Added to the exponent of a scale.
_EXPONENT_BIAS = 127

_TENSORS = {
    "embedding.embedding": ("model.embed_tokens.weight",),
    "norm.scale": ("model.norm.weight",),
    "head.kernel": ("lm_head.weight",),
}
#: The same in each of `Decoder.blocks`; in a block with experts, {} is the number of each.
_TENSORS_OF_BLOCK = {
    "attention.query_key_value.kernel": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "attention.query_key_value.bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "attention.query_norm.scale": ("self_attn.q_norm.weight",),
    "attention.key_norm.scale": ("self_attn.k_norm.weight",),
    "attention.out.kernel": ("self_attn.o_proj.weight",),
    "attention.out_bias": ("self_attn.o_proj.bias",),
    "attention.sinks": ("self_attn.sinks",),
    "mlp.gate_up.kernel": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.kernel": ("mlp.down_proj.weight",),
    "mlp.router.kernel": ("mlp.gate.weight",),
    "mlp.gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.down": ("mlp.experts.{}.down_proj.weight",),
    "mlp.choice_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared.gate_up.kernel": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "mlp.shared.down.kernel": ("mlp.shared_experts.down_proj.weight",),
}
#: With latent attention.
_TENSORS_OF_LATENT = {
    "attention.query_down.kernel": ("self_attn.q_a_proj.weight",),
    "attention.query_norm.scale": ("self_attn.q_a_layernorm.weight",),
    "attention.query.kernel": ("self_attn.q_b_proj.weight",),
    "attention.down.kernel": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention.latent_norm.scale": ("self_attn.kv_a_layernorm.weight",),
    "attention.up_key": ("self_attn.kv_b_proj.weight",),
    "attention.up_value": ("self_attn.kv_b_proj.weight",),
}
#: With queries that have no latent of their own.
_QUERY_OF_LATENT = {"attention.query.kernel": ("self_attn.q_proj.weight",)}
#: In gpt-oss, the family whose experts have biases.
_TENSORS_OF_BIASED_EXPERTS = {
    "mlp.router.kernel": ("mlp.router.weight",),
    "mlp.router.bias": ("mlp.router.bias",),
    "mlp.gate_up": ("mlp.experts.gate_up_proj",),
    "mlp.gate_up_bias": ("mlp.experts.gate_up_proj_bias",),
    "mlp.down": ("mlp.experts.down_proj",),
    "mlp.down_bias": ("mlp.experts.down_proj_bias",),
}
_NORMS_OF_BLOCK = {
    "before": {"attention_norm": "input", "mlp_norm": "post_attention"},
    "after": {"attention_out_norm": "post_attention", "mlp_out_norm": "post_feedforward"},
    "both": {
        "attention_norm": "input",
        "attention_out_norm": "post_attention",
        "mlp_norm": "pre_feedforward",
        "mlp_out_norm": "post_feedforward",
    },
}

#: Older files have them; they follow from the config.
UNNEEDED = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


class Parts(NamedTuple):
    """The tensors of a parameter, by name, with their shapes."""

    layout: Layout
    shapes: dict[str, tuple[int, ...]]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return what the tensors may be, as safetensors names it."""
        return ("U8",) if self.layout.startswith("mxfp4") else ("BF16", "F16", "F32")


def parts_of(config: DecoderConfig, path: str, shape: tuple[int, ...], mxfp4: bool) -> Parts:
    """Return what a parameter of the given dotted path and shape is made of; `mxfp4` says how experts are stored."""
    if path in _TENSORS:
        return _joined(config, path, shape, _TENSORS[path])
    _, layer, rest = path.split(".", 2)
    prefix = f"model.layers.{layer}."
    biased = config.mixture is not None and config.mixture.bias
    table = _TENSORS_OF_BLOCK | (_TENSORS_OF_BIASED_EXPERTS if biased else {})
    latent = config.latent
    if latent is not None:
        table |= _TENSORS_OF_LATENT | (_QUERY_OF_LATENT if latent.query_size is None else {})
    norm = _NORMS_OF_BLOCK[config.norm_placement].get(rest.removesuffix(".scale"))
    names = tuple(prefix + name for name in ((f"{norm}_layernorm.weight",) if norm else table[rest]))
    if latent is not None and rest in ("attention.up_key", "attention.up_value"):
        outputs = config.num_q_heads * (latent.nope_dim + latent.value_dim)
        return Parts("first" if rest == "attention.up_key" else "last", {names[0]: (outputs, latent.size)})
    if rest not in ("mlp.gate_up", "mlp.down", "mlp.gate_up_bias"):
        return _joined(config, path, shape, names)
    interleaved = rest.startswith("mlp.gate_up")
    if biased and len(shape) == 3 and mxfp4:
        experts, inputs, outputs = shape
        groups = (experts, outputs, inputs // MXFP4_GROUP)
        shapes = {f"{names[0]}_blocks": (*groups, MXFP4_GROUP // 2), f"{names[0]}_scales": groups}
        return Parts("mxfp4 interleaved" if interleaved else "mxfp4", shapes)
    if biased:
        return Parts("interleaved" if interleaved else "plain", {names[0]: shape})
    experts, inputs, outputs = shape
    numbered = [name.format(expert) for expert in range(experts) for name in names]
    return Parts("experts", dict.fromkeys(numbered, (outputs // len(names), inputs)))


def arranged(
    layout: Layout, tensors: list[Array], shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "*parameter"]:
    """Return the parameter of the given shape that tensors make; of a device that has a part, this part. Jittable."""
    if layout.startswith("mxfp4"):
        blocks, scales = tensors
        joined = jnp.swapaxes(_of_mxfp4(blocks, scales).astype(dtype), 1, 2)
    else:
        joined = jnp.concatenate([tensor.astype(dtype) for tensor in tensors])
    if layout == "linear":
        return joined.T
    if layout == "experts":
        experts, inputs, outputs = shape
        return jnp.swapaxes(joined.reshape(experts, outputs, inputs), 1, 2)
    if layout in ("first", "last"):
        inputs, heads, outputs = shape
        of_heads = jnp.moveaxis(joined.reshape(heads, -1, inputs), 2, 0)
        return of_heads[..., :outputs] if layout == "first" else of_heads[..., -outputs:]
    if layout.endswith("interleaved"):
        return jnp.concatenate([joined[..., ::2], joined[..., 1::2]], axis=-1)
    return joined


def _joined(config: DecoderConfig, path: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Parts:
    """Return the tensors whose first axes make one axis of the parameter."""
    layout: Layout = "linear" if path.endswith(".kernel") else "plain"
    rows, rest = (shape[1], shape[:1]) if layout == "linear" else (shape[0], shape[1:])
    joined = {"query_key_value": config.query_key_value_sizes, "gate_up": (rows // 2,) * 2}
    sizes = joined.get(path.split(".")[-2], (rows,))
    return Parts(layout, {name: (size, *rest) for name, size in zip(names, sizes, strict=True)})


def _of_mxfp4(
    blocks: UInt8[Array, "experts outputs groups 16"], scales: UInt8[Array, "experts outputs groups"]
) -> Float[Array, "experts outputs inputs"]:
    """Return the numbers that MXFP4 stands for, float32."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, MXFP4_GROUP)
    value = jnp.asarray(_CODES + tuple(-code for code in _CODES), jnp.float32)[codes]
    exponent = scales.astype(jnp.int32)[..., None] - _EXPONENT_BIAS
    return jnp.ldexp(value, exponent).reshape(*scales.shape[:2], -1)
