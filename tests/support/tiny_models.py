"""Two-layer models of every tested family, random weights, one builder for all tests."""

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.sizes import sizes

VOCABULARY = 97
WINDOW = 5

_SHARED = sizes(
    vocab=VOCABULARY,
    width=32,
    inner=40,
    layers=2,
    heads=4,
    key_heads=2,
    head_width=16,
    positions=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# Newer than the oldest transformers that is tested: 5.17 has no lfm3 and no bailing_hybrid, 5.23 no lara_mini. Tests skip
# what the installed version does not have.
MISSING = {"lfm3", "bailing_hybrid", "lara_mini"} - {*CONFIG_MAPPING}

# name -> (model_type, what differs)
TINY = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_windowed": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", dict(use_sliding_window=True, **_MIXED_WINDOWS)),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=16, **_MIXED_WINDOWS),
    ),
    "gemma3_text": ("gemma3_text", dict(query_pre_attn_scalar=16, **_MIXED_WINDOWS)),
    # Values are raw keys in the second layer, whose heads are wider and whose angles turn only some columns.
    "gemma4": (
        "gemma4_text",
        dict(
            head_dim=8,
            global_head_dim=16,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            **_MIXED_WINDOWS,
        ),
    ),
    # The second layer reads keys and values of the first one.
    "gemma4_shared": (
        "gemma4_text",
        {
            "layer_types": ["full_attention"] * 2,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "head_dim": 8,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            **_MIXED_WINDOWS,
        ),
    ),
    "qwen3_moe": ("qwen3_moe", dict(decoder_sparse_step=1, mlp_only_layers=[], **_EXPERTS)),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmoe": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "mellum": ("mellum", {"mlp_layer_types": ["dense", "sparse"], **_EXPERTS, **_MIXED_WINDOWS}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
}
# More dense models, for fused layers alone; tests/support/layer_pairs.py takes all of them.
MORE_DENSE = {
    "gemma": ("gemma", {}),
    "ministral": ("ministral", _MIXED_WINDOWS),
    "ministral3": (
        "ministral3",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _MIXED_WINDOWS),
    # The layer without a window has no rotary embedding; without windows all layers have one.
    "exaone4": ("exaone4", _MIXED_WINDOWS),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cwm": (
        "cwm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **_MIXED_WINDOWS},
    ),
}
# Models with an image tower; the overrides of build_tiny are those of the text part.
_TOWER = sizes(
    depth=1, layers=1, heads=2, width=32, inner=40, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[0]
)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
COMPOSITES = {
    "qwen2_vl": {"rope_parameters": _SECTIONS, "head_dim": 16, "hidden_size": 64},
    "qwen2_5_vl": {"rope_parameters": _SECTIONS, "head_dim": 16, "hidden_size": 64},
    "muse_glimmer": {"layer_rope_theta": [10000.0, 0], **_MIXED_WINDOWS},
    "qwen3_vl": {"rope_parameters": _MROPE},
    "qwen3_vl_moe": {"rope_parameters": _MROPE, "decoder_sparse_step": 1, "mlp_only_layers": [0], **_EXPERTS},
}
# More mixture models, for the experts alone: their attention is not in the list of tested families.
MORE_MOE = {
    "qwen2_moe": (
        "qwen2_moe",
        dict(
            decoder_sparse_step=1,
            mlp_only_layers=[],
            shared_expert_intermediate_size=24,
            use_sliding_window=False,
            **_EXPERTS,
        ),
    ),
    "deepseek_v2": ("deepseek_v2", {**TINY["deepseek_v3"][1], "topk_method": "greedy", "n_shared_experts": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", TINY["deepseek_v3"][1]),
    "phimoe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "minimax_m2": (
        "minimax_m2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 1,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [1, 1],
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "minimax_m3_vl_text": (
        "minimax_m3_vl_text",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "mlp_hidden_act": "silu",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "layers_block_type": ["attention", "moe"],
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_chunk_size": 4}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 24, **_EXPERTS}
_KIMI = {
    **TINY["deepseek_v3"][1],
    "num_experts": 4,
    "num_experts_per_token": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
# Hybrids, with a mixer and an attention layer each.
HYBRIDS = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "lfm2_moe": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1, **_EXPERTS},
    ),
    "lfm3": ("lfm3", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "qwen3_next": ("qwen3_next", {**_DELTA_NET, **_SHARED_EXPERT}),
    "qwen3_5_text": ("qwen3_5_text", _DELTA_NET),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_DELTA_NET, **_SHARED_EXPERT}),
    "lara_mini": ("lara_mini", {**_DELTA_NET, **_SHARED_EXPERT}),
    "olmo_hybrid": ("olmo_hybrid", _DELTA_NET),
    "kimi_linear": ("kimi_linear", _KIMI),
    "bailing_hybrid": ("bailing_hybrid", _KIMI),
    "nemotron_h_hybrid": (
        "nemotron_h",
        {
            **MORE_MOE["nemotron_h"][1],
            "layers_block_type": ["mamba", "moe", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            **_MAMBA,
        },
    ),
    "falcon_h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 64}),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": 4,
            "num_key_value_heads": 4,
        },
    ),
    "jamba": ("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 4, "mamba_d_state": 8}),
}
TINY, MORE_DENSE, MORE_MOE, HYBRIDS = (
    {name: entry for name, entry in models.items() if entry[0] not in MISSING}
    for models in (TINY, MORE_DENSE, MORE_MOE, HYBRIDS)
)


def has_experts(name):
    """Whether a model has mixture-of-experts layers."""
    differences = COMPOSITES[name] if name in COMPOSITES else {**TINY, **MORE_DENSE, **MORE_MOE, **HYBRIDS}[name][1]
    return any("experts" in option for option in differences)


MOE = tuple(name for name in TINY if has_experts(name))
DENSE = tuple(name for name in TINY if name not in MOE)


def build_tiny(name, *, attention="eager", experts=None, **overrides):
    """A tiny model in float32 with weights large enough that attention is far from uniform."""
    auto_class = AutoModelForImageTextToText if name in COMPOSITES else AutoModelForCausalLM
    if name in COMPOSITES:
        text = {**_SHARED, **COMPOSITES[name], **overrides}
        config = AutoConfig.for_model(name, text_config=text, vision_config=_TOWER, image_token_id=VOCABULARY - 1)
    else:
        model_type, differences = {**TINY, **MORE_DENSE, **MORE_MOE, **HYBRIDS}[name]
        config = AutoConfig.for_model(model_type, **{**_SHARED, **differences, **overrides})
    torch.manual_seed(0)
    model = auto_class.from_config(
        config, attn_implementation=attention, **({"experts_implementation": experts} if experts else {})
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name or parameter.ndim > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.fill_(0.75)
    return model
