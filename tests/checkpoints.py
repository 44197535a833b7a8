"""A Hugging Face checkpoint of one layer with sharp random weights: its texts vary, and stop now and then."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers


def write_checkpoint(
    directory: Path, family: str, *, vocab_size: int, stop: int, max_context: int, deviation: float, seed: int
) -> None:
    """Write a "qwen3" checkpoint with q/k norm and tied embeddings, or a "llama" one without; tokens are w0, w1, ..."""
    qwen3, rng = family == "qwen3", np.random.default_rng(seed)
    config = {
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": qwen3,
        "eos_token_id": stop,
    }
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (vocab_size, 32),
        **({} if qwen3 else {"lm_head.weight": (vocab_size, 32)}),
        "model.norm.weight": (32,),
        layer + "input_layernorm.weight": (32,),
        layer + "post_attention_layernorm.weight": (32,),
        layer + "self_attn.q_proj.weight": (64, 32),
        layer + "self_attn.k_proj.weight": (32, 32),
        layer + "self_attn.v_proj.weight": (32, 32),
        layer + "self_attn.o_proj.weight": (32, 64),
        **({layer + "self_attn.q_norm.weight": (16,), layer + "self_attn.k_norm.weight": (16,)} if qwen3 else {}),
        layer + "mlp.gate_proj.weight": (48, 32),
        layer + "mlp.up_proj.weight": (48, 32),
        layer + "mlp.down_proj.weight": (32, 48),
    }
    weights = {
        name: np.ones(shape) if len(shape) == 1 else deviation * rng.normal(size=shape) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(
        {name: weight.astype(np.float32) for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(f"w{stop}", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
