"""The decoder layers of transformers that can be fused, and the differences between families."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple


class LayerForm(NamedTuple):
    """Differences of the layers of a family from the common form: norm, attention, add, norm, feed-forward, add.

    A layer without ``self_attn`` has a mixer in its place: a gated delta rule with ``delta_projections``, else a
    separate module. Fused attention (``fused/attention.py``) reads these attributes of ``self_attn``: ``head_dim`` and
    ``scaling``, and if they exist ``sliding_window``, ``attention_dropout``, ``use_rope`` and ``sinks``. A family with
    other attributes for these needs a field here.

    Args:
        is_norm_wide: The norms multiply by their weight in fp32 (gpt-oss, Gemma), not after rounding (Llama).
        norm_offset: Added to the weights of all norms, including those of heads.
        norms: Norms before attention and before the block; () for a family without (OLMo 2).
        post_norms: Norms of the outputs of attention and of the block, before they are added; () for none.
        last_norm: Norm before the head.
        has_multiplier: The outputs of attention and of the block are multiplied by the layer's residual_multiplier
            before they are added (Granite). Not with post_norms.
        head_norms: Norms of queries and of keys, if the attention layer has them.
        has_joint_head_norms: They norm the columns of all heads together (OLMo 2, MiniMax M2), not each head.
        has_config_window: Every layer passes the window of the configuration to attention (Mistral); otherwise the
            layer's own attribute, if any.
        rotates_windows_only: In a model with sliding windows, layers that attend without one have no rotary embedding
            (EXAONE 4); ``is_sliding`` of the attention layer says which.
        has_layers_without_angles: Attention layers that get no angles have no positions (LaraMini); in other families
            the layer's own forward runs then.
        has_softcap: Attention gets the layer's soft cap. Gemma 3 has the attribute and does not use it: False.
        has_half_angles: The model has one angle for each pair of columns (gpt-oss), not one for each rotated column.
        scales_late_queries: Queries beyond the positions of the pretraining are scaled (Ministral 3). Calls with such
            positions run the layer's own forward.
        has_own_mixer: Attention, or the mixer in its place, runs as a separate module; norms, additions and the
            feed-forward block are fused.
        has_gated_heads: The query projection also returns a gate for each head, by which the head's output is
            multiplied.
        block: Name of the feed-forward block.
        feed_forward: Classes of dense feed-forward blocks that compute ``down(act(gate(x)) * up(x))``.
        activation: Activation of a dense block without an activation module (LFM2); empty to use the module.
        projections: Layers whose concatenated outputs are queries, keys and values.
        delta_projections: In layers with a gated delta rule, the layers whose concatenated outputs it reads.
        out: Layer that reads the output of attention.
        gate_up: Layers of the block whose concatenated outputs are gate and up.
        down: Last layer of the block.
        dropouts: Dropout modules after attention and after the block, which must be inactive.
        has_layer_inputs: After the block the layer adds a projection of its per-layer inputs, and multiplies the sum
            by its scalar (Gemma 4).
        without: Attributes that are true if a layer has further operations; such a layer is not supported.
    """

    is_norm_wide: bool = False
    norm_offset: float = 0.0
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, ...] = ()
    last_norm: str = "norm"
    has_multiplier: bool = False
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    has_joint_head_norms: bool = False
    has_config_window: bool = False
    rotates_windows_only: bool = False
    has_layers_without_angles: bool = False
    has_softcap: bool = False
    has_half_angles: bool = False
    scales_late_queries: bool = False
    has_own_mixer: bool = False
    has_gated_heads: bool = False
    block: str = "mlp"
    feed_forward: tuple[str, ...] = ()
    activation: str = ""
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    delta_projections: tuple[str, ...] = ()
    out: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    dropouts: tuple[str, ...] = ()
    has_layer_inputs: bool = False
    without: tuple[str, ...] = ()


_GEMMA_NORM = LayerForm(is_norm_wide=True, norm_offset=1.0)
_GEMMA = _GEMMA_NORM._replace(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_QWEN3_5 = _GEMMA_NORM._replace(has_gated_heads=True, delta_projections=_DELTA_PROJECTIONS)
_OLMO = LayerForm(
    is_norm_wide=True,
    norms=(),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    has_joint_head_norms=True,
)
_EXAONE = LayerForm(
    norms=(), post_norms=("post_attention_layernorm", "post_feedforward_layernorm"), rotates_windows_only=True
)
_GRANITE = LayerForm(has_multiplier=True)
_LFM2 = LayerForm(
    norms=("operator_norm", "ffn_norm"),
    last_norm="embedding_norm",
    head_norms=("q_layernorm", "k_layernorm"),
    block="feed_forward",
    activation="silu",
    out="out_proj",
    gate_up=("w1", "w3"),
    down="w2",
)


# By class of the decoder layer; tests compare each with transformers.
LAYERS = MappingProxyType(
    {
        "LlamaDecoderLayer": LayerForm(feed_forward=("LlamaMLP",)),
        "MistralDecoderLayer": LayerForm(has_config_window=True, feed_forward=("MistralMLP",)),
        "MixtralDecoderLayer": LayerForm(has_config_window=True),
        "Qwen2DecoderLayer": LayerForm(feed_forward=("Qwen2MLP",)),
        "Qwen2MoeDecoderLayer": LayerForm(feed_forward=("Qwen2MoeMLP",)),
        "Qwen3DecoderLayer": LayerForm(feed_forward=("Qwen3MLP",)),
        "Qwen3MoeDecoderLayer": LayerForm(feed_forward=("Qwen3MoeMLP",)),
        "Qwen3VLTextDecoderLayer": LayerForm(feed_forward=("Qwen3VLTextMLP",)),
        "Qwen3VLMoeTextDecoderLayer": LayerForm(feed_forward=("Qwen3VLMoeTextMLP",)),
        "GptOssDecoderLayer": LayerForm(is_norm_wide=True, has_half_angles=True),
        "Phi3DecoderLayer": LayerForm(
            has_config_window=True,
            feed_forward=("Phi3MLP",),
            projections=("qkv_proj",),
            gate_up=("gate_up_proj",),
            dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        ),
        "CwmDecoderLayer": LayerForm(feed_forward=("CwmMLP",)),
        "Glm4MoeDecoderLayer": LayerForm(feed_forward=("Glm4MoeMLP",)),
        "MellumDecoderLayer": LayerForm(feed_forward=("MellumMLP",)),
        "MinistralDecoderLayer": LayerForm(feed_forward=("MinistralMLP",)),
        "Ministral3DecoderLayer": LayerForm(
            has_config_window=True, scales_late_queries=True, feed_forward=("Ministral3MLP",)
        ),
        "Qwen2VLDecoderLayer": LayerForm(has_own_mixer=True, feed_forward=("Qwen2MLP",)),
        "Qwen2_5_VLDecoderLayer": LayerForm(has_own_mixer=True, feed_forward=("Qwen2MLP",)),
        "Qwen3NextDecoderLayer": _QWEN3_5._replace(
            feed_forward=("Qwen3NextMLP",), delta_projections=("in_proj_qkvz", "in_proj_ba")
        ),
        "Qwen3_5DecoderLayer": _QWEN3_5._replace(feed_forward=("Qwen3_5MLP",)),
        "Qwen3_5MoeDecoderLayer": _QWEN3_5,
        "LaraMiniDecoderLayer": LayerForm(
            is_norm_wide=True, has_layers_without_angles=True, delta_projections=_DELTA_PROJECTIONS
        ),
        "SmolLM3DecoderLayer": LayerForm(feed_forward=("SmolLM3MLP",)),
        "GemmaDecoderLayer": _GEMMA_NORM._replace(feed_forward=("GemmaMLP",)),
        "Gemma2DecoderLayer": _GEMMA._replace(has_softcap=True, feed_forward=("Gemma2MLP",)),
        "Gemma3DecoderLayer": _GEMMA._replace(feed_forward=("Gemma3MLP",)),
        "GraniteDecoderLayer": _GRANITE._replace(feed_forward=("GraniteMLP",)),
        "GraniteMoeDecoderLayer": _GRANITE._replace(block="block_sparse_moe"),
        "Olmo2DecoderLayer": _OLMO._replace(feed_forward=("Olmo2MLP",)),
        "Olmo3DecoderLayer": _OLMO._replace(feed_forward=("Olmo3MLP",)),
        "Exaone4DecoderLayer": _EXAONE._replace(feed_forward=("Exaone4MLP",)),
        "Lfm2DecoderLayer": _LFM2._replace(feed_forward=("Lfm2MLP",)),
        "Lfm2MoeDecoderLayer": _LFM2._replace(feed_forward=("Lfm2MoeMLP",)),
        "Lfm3DecoderLayer": _LFM2._replace(
            has_own_mixer=True, post_norms=("post_operator_norm", "post_ffn_norm"), feed_forward=("Lfm3MLP",)
        ),
        "MiniMaxM2DecoderLayer": LayerForm(has_joint_head_norms=True),
        "Gemma4TextDecoderLayer": _GEMMA._replace(
            norm_offset=0.0,
            has_own_mixer=True,
            feed_forward=("Gemma4TextMLP",),
            has_layer_inputs=True,
            without=("enable_moe_block",),
        ),
        "MuseGlimmerTextDecoderLayer": _GEMMA._replace(has_own_mixer=True, feed_forward=("MuseGlimmerTextMLP",)),
        "DeepseekV2DecoderLayer": LayerForm(has_own_mixer=True, feed_forward=("DeepseekV2MLP",)),
        "DeepseekV3DecoderLayer": LayerForm(has_own_mixer=True, feed_forward=("DeepseekV3MLP",)),
        "Glm4MoeLiteDecoderLayer": LayerForm(has_own_mixer=True, feed_forward=("Glm4MoeLiteMLP",)),
        "Llama4TextDecoderLayer": LayerForm(has_own_mixer=True, block="feed_forward", feed_forward=("Llama4TextMLP",)),
    }
)
