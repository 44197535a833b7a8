"""Each family of checkpoints against transformers: dense logits, and greedy texts decoded over a forest."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_checkpoints import SIZES, TOKENS, assert_read_to_its_devices, dense_logits, save_tokenizer

from codec_jax import Window
from codec_jax.nnx import Latent, Sampler, YarnScaling, open_checkpoint
from codec_jax.nnx.checkpoint_config import read_config
from codec_jax.nnx.rope import frequencies

#: Of 16 numbers a head, over 160 positions.
ROPE = {"rope_theta": 100.0, "rope_type": "default"}
YARN = {
    "rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "beta_fast": 4.0,
    "beta_slow": 1.0,
}  # fmt: skip
LINEAR = {"rope_theta": 1000.0, "rope_type": "linear", "factor": 4.0}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3}
PATTERN = ["sliding_attention", "full_attention"]
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
}  # fmt: skip

#: Family of transformers and changes of the config -> what we make of them.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5": ("Qwen2", {"rope_parameters": YARN}, {"qkv_bias": True, "qk_norm": False}),
    "Mistral": ("Mistral", {"rope_parameters": ROPE, "sliding_window": None}, {"windows": (None,)}),
    "Mistral, window": ("Mistral", {"rope_parameters": ROPE, "sliding_window": 13}, {"windows": (Window(13),)}),
    "Qwen3-MoE": (
        "Qwen3Moe", {"rope_parameters": ROPE, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}, {}
    ),
    "Qwen3-MoE, shares of all": ("Qwen3Moe", {"rope_parameters": ROPE, **EXPERTS, "decoder_sparse_step": 2}, {}),
    "Gemma 2": (
        "Gemma2",
        {
            "rope_parameters": ROPE, "sliding_window": 13, "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 6.0,
        },
        {"windows": (Window(13), None), "softcap": 4.0, "logit_softcap": 6.0, "scale": 24**-0.5},
    ),
    "Gemma 3": (
        "Gemma3Text",
        {
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": ROPE}, "sliding_window": 13,
            "layer_types": PATTERN, "query_pre_attn_scalar": 24, "final_logit_softcapping": 6.0,
        },
        {"windows": (Window(13), None), "window_rope_theta": 100.0, "qk_norm": True},
    ),
    "OLMo 2": ("Olmo2", {"rope_parameters": ROPE}, {"norm_placement": "after", "qk_norm_over": "projection"}),
    "OLMo 3": (
        "Olmo3",
        {
            "rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE}, "sliding_window": 13,
            "layer_types": PATTERN,
        },
        {"windows": (Window(13), None), "window_rope_theta": 100.0},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "rope_parameters": {**YARN, "truncate": False}, "sliding_window": 13, "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
        {"windows": (Window(13), None), "sinks": True, "out_bias": True},
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            **LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, "q_lora_rank": 20,
            "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
        },
        {"latent": Latent(24, 12, 8, 10, 20), "head_dim": 32, "num_kv_heads": 1},
    ),
    "DeepSeek-V3, plain queries": (
        "DeepseekV3",
        {
            **LATENT, "rope_parameters": ROPE, "q_lora_rank": None, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False, "rms_norm_eps": 1e-2,
        },
        {"latent": Latent(24, 12, 8, 10), "scale": 20**-0.5},
    ),
}  # fmt: skip


def theirs_of(family: str, changes: dict[str, Any]) -> Any:
    """A model of transformers in which everything counts: sharp attention, norms that are not 1, clamps that act."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {**SIZES, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changes}
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.uniform_(0.5, 1.5) if weight.ndim == 1 else weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
            if name.endswith("experts.gate_up_proj"):
                weight.mul_(2.0)
            if name.endswith("mlp.gate.weight"):
                weight.mul_(0.3)  # or nearly all of the share would be one expert's
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, changes, fields = FAMILIES[name]
    theirs = theirs_of(family, changes)
    import torch

    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    ours = open_checkpoint(tmp_path).load(jnp.float32)
    assert {field: getattr(ours.config, field) for field in fields} == fields

    def logits_of(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return theirs(torch.tensor(tokens)).logits.numpy()

    want = logits_of(TOKENS)
    assert want.std() > 0.5  # or a wrong layer might hide in the tolerance
    np.testing.assert_allclose(dense_logits(ours, TOKENS), want, atol=1e-4, rtol=1e-4)

    # Two prompts that share 24 tokens: longer than the windows, and decoded until nothing shared is left in them.
    prompts = [TOKENS[0, :30], np.concatenate([TOKENS[0, :24], TOKENS[1, :3]])]
    sampler = Sampler(ours, max_requests=2, num_pages=16, page_size=8, steps=8)
    state, generated = sampler.decode(sampler.start(prompts), 16, temperature=0.0)
    for request, prompt in enumerate(prompts):
        [want] = logits_of(np.concatenate([prompt, generated.tokens[request]])[None])
        assert generated.tokens[request] == want[len(prompt) - 1 : -1].argmax(-1).tolist()
        np.testing.assert_allclose(state.logits[request], want[-1], atol=1e-4, rtol=1e-4)


# --- MXFP4 -------------------------------------------------------------------------------------------------------


def meaning(code: int, scale: int) -> float:
    """Of a number of 1 bit of sign, 2 of exponent and 1 of mantissa, times a power of two."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-1) ** sign * value * 2.0 ** (scale - 127)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_experts_in_mxfp4_are_what_their_codes_mean(tmp_path: Path, dtype: Any) -> None:
    sizes = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    theirs_of("GptOss", {"rope_parameters": YARN, **sizes}).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    rng, want, experts = np.random.default_rng(0), {}, "model.layers.0.mlp.experts."
    for name, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
        codes = rng.integers(0, 16, (4, outputs, 1, 32))
        scales = rng.integers(120, 130, (4, outputs, 1))
        values = np.vectorize(meaning)(codes, scales[..., None]).reshape(4, outputs, 32).swapaxes(1, 2)
        del tensors[experts + name]
        tensors[f"{experts}{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)
        tensors[f"{experts}{name}_scales"] = scales.astype(np.uint8)
        want[name] = values
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    mlp = open_checkpoint(tmp_path).load(dtype).blocks[0].mlp
    gate_up = np.concatenate([want["gate_up_proj"][..., ::2], want["gate_up_proj"][..., 1::2]], axis=-1)
    np.testing.assert_array_equal(mlp.gate_up[...].astype(jnp.float32), gate_up)  # bfloat16 holds them all
    np.testing.assert_array_equal(mlp.down[...].astype(jnp.float32), want["down_proj"])
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices("cpu")[:2])
    assert_read_to_its_devices(open_checkpoint(tmp_path), mesh, dtype)

    damaged = tensors | {f"{experts}down_proj_scales": tensors[f"{experts}down_proj_scales"].copy()}
    damaged[f"{experts}down_proj_scales"][3, 31, 0] = 255  # NaN
    save_file(damaged, tmp_path / "model.safetensors")
    for place in (None, mesh):
        with pytest.raises(ValueError, match=r"from 0 to 254 as .*down_proj_scales, got 255: NaN"):
            open_checkpoint(tmp_path).load(dtype, mesh=place)

    tensors[f"{experts}down_proj_blocks"] = tensors[f"{experts}down_proj_blocks"].astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_blocks as one of U8, got F32"):
        open_checkpoint(tmp_path)


def test_sizes_that_leave_scales_of_mxfp4_a_part_of_their_numbers_are_refused(tmp_path: Path) -> None:
    theirs_of("GptOss", {"rope_parameters": YARN, "intermediate_size": 48, "num_hidden_layers": 1}).save_pretrained(
        tmp_path
    )
    save_tokenizer(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    config["quantization_config"] = {"quant_method": "mxfp4"}
    for name in ("gate_up_proj", "down_proj"):
        experts, inputs, outputs = tensors.pop(f"model.layers.0.mlp.experts.{name}").shape
        for part, numbers in (("blocks", (16,)), ("scales", ())):
            shape = experts, outputs, inputs // 32, *numbers
            tensors[f"model.layers.0.mlp.experts.{name}_{part}"] = np.zeros(shape, np.uint8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"multiples of 32, .*, got intermediate_size = 48"):
        open_checkpoint(tmp_path)


# --- What config.json says ---------------------------------------------------------------------------------------


#: What was written for these families before transformers 5, in keys, or what is left out.
OLDER: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 1},
    "mistral": {"rope_theta": 1e6, "sliding_window": None, "num_key_value_heads": 8},
    "qwen3_moe": {"rope_theta": 1e6, "num_experts": 16, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64},
    "gemma3_text": {
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 64, "sliding_window_pattern": 3, "query_pre_attn_scalar": 168,
    },
    "olmo2": {"rope_theta": 5e5},
    "olmo3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32,
            "beta_slow": 1, "attention_factor": 1.2079441541679836,
        },
    },
    "gpt_oss": {
        "rope_theta": 150000, "swiglu_limit": 7.0, "initial_context_length": 4096, "experts_per_token": 4,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
    },
    "deepseek_v3": {
        "rope_theta": 10000, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_routed_experts": 64,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("bare", [False, True], ids=["older keys", "no keys but sizes"])
@pytest.mark.parametrize("family", OLDER)
def test_keys_and_defaults_are_those_of_transformers(family: str, bare: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8 if family == "deepseek_v3" else 4, "max_position_embeddings": 65536,
    }  # fmt: skip
    older = {**sizes, **({} if bare else OLDER[family])}
    newer = transformers.CONFIG_MAPPING[family](**older).to_dict()
    assert "rope_parameters" in newer
    problems: list[str] = []
    given = {"model_type": family, **older}
    assert read_config(given, problems) == read_config({**newer, "architectures": None}, problems) is not None
    assert not problems


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "expected use_sliding_window = false, which is what .*, got true"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "expected sliding_attention in every layer, as .* = 4096"),
        ("mistral", {"sliding_window": 0}, "expected a whole number from 1 to 2147483647 as sliding_window, got 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "expected true or false as norm_topk_prob, got 1"),
        ("qwen3_moe", {"num_experts": 4}, "experts_per_token: expected at most num_experts = 4, got 8"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, 'expected numbers of layers as mlp_only_layers, got "0"'),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "expected a whole number from 1 .* as decoder_sparse_step, got 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "expected use_bidirectional_attention = false, .* got true"),
        ("gemma2", {"hidden_activation": "gelu"}, 'expected hidden_activation = "gelu_pytorch_tanh", .* got "gelu"'),
        ("gemma2", {"layer_types": ["full_attention"]}, "expected full_attention or .* for each of 2 layers as layer_"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "expected full_attention or sliding_attention .*"),
        ("gemma2", {"sliding_window": None}, "expected a whole number from 1 .* as sliding_window, got null"),
        ("gemma2", {"final_logit_softcapping": -1}, r"expected a number from .* as final_logit_softcapping, got -1"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "expected attn_logit_softcapping = null, .* got 50.0"),
        ("gemma3_text", {"rope_parameters": ROPE}, "expected objects full_attention and sliding_attention in rope_par"),
        (
            "gemma3_text", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": LINEAR}},
            "expected rope_parameters.sliding_attention of type default, which the decoder computes, got ",
        ),
        ("olmo3", {"rope_theta": 1e4}, r"expected rope_theta = 500000.0, which is what .*, got 10000.0"),
        ("qwen2", {"rope_scaling": {**YARN, "mscale": 0.7}}, "expected mscale = null, which .*, got 0.7"),
        ("qwen2", {"rope_scaling": {**YARN, "truncate": 1}}, "expected true or false as rope_scaling.truncate, got 1"),
        ("qwen2", {"rope_scaling": {**YARN, "factor": None}}, "expected a number .* as rope_scaling.factor, got null"),
        (
            "qwen2", {"rope_scaling": YARN, "original_max_position_embeddings": 41},
            "expected original_max_position_embeddings = 40, which .*, got 41",
        ),
        ("gpt_oss", {"attention_bias": False}, "expected attention_bias = true, which .*, got false"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "expected swiglu_limit = 7.0, which is what the decoder computes, got 6.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "expected quantization_config = null, .*fp8"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "expected quantization_config = null, .*"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "expected num_key_value_heads = 4, which is what .*, got 2"),
        ("deepseek_v3", {"head_dim": 16}, "expected head_dim = 64, which is what the decoder computes, got 16"),
        ("deepseek_v3", {"rope_interleave": False}, "expected rope_interleave = true, which .*, got false"),
        ("deepseek_v3", {"topk_method": "greedy"}, 'expected topk_method = "noaux_tc", which .*, got "greedy"'),
        ("deepseek_v3", {"qk_rope_head_dim": 7, "head_dim": 7}, "rope_dim: expected an even number .*, got 7"),
        ("deepseek_v3", {"v_head_dim": 512}, "value_dim: expected at most nope_dim .* = 192, got 512"),
        ("deepseek_v3", {"q_lora_rank": 0}, "expected a whole number from 1 .* as q_lora_rank, got 0"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "expected a whole number from 0 .* as first_k_dense_replace"),
        ("deepseek_v3", {"n_shared_experts": None}, "expected a whole number from 1 .* as n_shared_experts, got null"),
        ("deepseek_v3", {"n_group": 3}, "groups: expected a divisor of num_experts = 256 that .*, got 3"),
        ("deepseek_v3", {"topk_group": 9}, "groups_per_token: expected at most groups = 8, got 9"),
        ("deepseek_v3", {"num_experts_per_tok": 200}, "experts_per_token: expected at most .* 4 groups = 128, got 200"),
        (
            "deepseek_v3", {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}},
            "expected mscale_all_dim = null, which .*, got 1.0",
        ),
        (
            "deepseek_v3", {"rope_scaling": {**LINEAR, "mscale_all_dim": 1.0}},
            "expected mscale_all_dim = null, which .*, got 1.0",
        ),
        (
            "deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "expected quantization_config = null, which .*64, 64",
        ),
    ],
)  # fmt: skip
def test_what_the_decoder_does_not_compute_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    problems: list[str] = []
    heads = {"num_key_value_heads": 4, "head_dim": 64} if family == "deepseek_v3" else {}
    read_config({**SIZES, **heads, "model_type": family, **changes}, problems)
    assert len(problems) == 1, problems
    assert re.match(f"config.json: {message}", problems[0]), problems[0]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (4.0, 2.0), (40.0, 0.01), (500.0, 200.0), (1.0, 1.0)])
def test_frequencies_of_yarn_are_those_of_transformers(truncate: bool, fast: float, slow: float) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {**YARN, "beta_fast": fast, "beta_slow": slow, "truncate": truncate, "original_max_position_embeddings": 640}
    config = transformers.Qwen2Config(hidden_size=128, num_attention_heads=2, rope_parameters=rope)
    want, attention_factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    scaling = YarnScaling(4.0, 640, attention_factor, fast, slow, truncate)
    np.testing.assert_allclose(frequencies(32, 100.0, scaling), want, rtol=1e-5)
