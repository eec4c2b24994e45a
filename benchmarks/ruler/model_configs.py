"""Configurations of the models of the workloads: arguments of Hugging Face's configurations."""

from __future__ import annotations

from typing import Any

# Tokens of the longest pack of a workload. Models that have longer packs than their configuration allows announce this
# length, because Unsloth rescales RoPE for a longer one: it trained another model, with gradient cosines down to 0.56.
LONGEST_PACK = 262_144


def qwen3(*, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": LONGEST_PACK,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


QWEN3_14B = qwen3(hidden=5120, inner=17_408, layers=40, heads=40, kv_heads=8, tied=False)
# Only some of the layers, for packs whose step would take minutes with all layers.
QWEN3_14B_10L = {**QWEN3_14B, "num_hidden_layers": 10}
QWEN3_8B = qwen3(hidden=4096, inner=12_288, layers=36, heads=32, kv_heads=8, tied=False)
QWEN3_32B = qwen3(hidden=5120, inner=25_600, layers=64, heads=64, kv_heads=8, tied=False)
QWEN3_06B = qwen3(hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8, tied=True)
LLAMA_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": LONGEST_PACK,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LLAMA_8B_6L = {**LLAMA_8B, "num_hidden_layers": 6}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def qwen3_moe(*, layers: int) -> dict[str, Any]:
    return {
        **qwen3(hidden=2048, inner=6144, layers=layers, heads=32, kv_heads=4, tied=False),
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    }  # fmt: skip


def gpt_oss(*, layers: int, experts: int = 32) -> dict[str, Any]:
    return {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    }


def qwen3_5(*, hidden: int, layers: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    """Qwen3.5: three gated delta layers, then one of attention with a gate."""
    return {
        "vocab_size": 248_320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        **others,
    }


QWEN35_9B = qwen3_5(hidden=4096, layers=32, kv_heads=4, intermediate_size=12_288)
QWEN35_35B_12L = qwen3_5(
    hidden=2048,
    layers=12,
    kv_heads=2,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
TINY_QWEN35 = {
    **qwen3_5(hidden=64, layers=4, kv_heads=2, intermediate_size=128),
    "vocab_size": 160,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
}
TINY_QWEN35_MOE = {
    **{key: value for key, value in TINY_QWEN35.items() if key != "intermediate_size"},
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
# Five windows, then one global layer of wide heads; the last layers share keys and values of earlier ones.
GEMMA4_E4B = {
    "vocab_size": 262_144,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_kv_shared_layers": 18,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
TINY_GEMMA4 = {
    **GEMMA4_E4B,
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 160,
    "max_position_embeddings": 1024,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
TINY_MOE = {**TINY, "moe_intermediate_size": 24, "num_experts": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
TINY_GPT_OSS = {
    **{key: value for key, value in TINY.items() if key != "rope_parameters"},
    "intermediate_size": 48, "num_local_experts": 32, "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip


def num_weights(config: dict[str, Any]) -> int:
    """Return the approximate number of weights of a dense model of this configuration, without norms.

    Example:
        >>> round(num_weights(QWEN3_14B) / 1e9, 1)
        14.8
    """
    width, head = config["hidden_size"], config["head_dim"]
    attention = 2 * width * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer = attention + 3 * width * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + config["vocab_size"] * width * (
        1 if config["tie_word_embeddings"] else 2
    )
