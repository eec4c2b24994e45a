"""Which decoder layers of transformers can be fused, and how each family differs."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple


class LayerForm(NamedTuple):
    """How the layers of a family differ; all of them norm, attend, add, norm, feed forward, add.

    Args:
        is_norm_wide: The norms multiply with their weight in fp32 (gpt-oss, Gemma), not after rounding (Llama).
        norm_offset: Added to the weights of all norms, also those of heads.
        has_post_norms: The outputs of attention and of the feed-forward block are normed before they are added (Gemma);
            these models name their norms differently.
        has_config_window: Every layer passes the window of the configuration to attention (Mistral); otherwise the
            layer's own attribute, if any.
        has_softcap: Attention gets the layer's soft cap. Gemma 3 has the attribute and does not use it: False.
        has_half_angles: The model has one angle for each pair of columns (gpt-oss), not one for each rotated column.
        scales_late_queries: Queries beyond the positions of the pretraining are scaled (Ministral 3). Calls with such
            positions run the layer's own forward.
        has_own_mixer: Attention runs as a module of its own; norms, additions and the feed-forward block are fused.
        has_gated_heads: The query projection also gives a gate for each head, which its output is multiplied with.
        feed_forward: Classes of dense feed-forward blocks that compute ``down(act(gate(x)) * up(x))``.
        projections: Layers whose outputs side by side are queries, keys and values.
        delta_projections: In layers with a gated delta rule, the layers whose outputs side by side it reads.
        gate_up: Layers of the block whose outputs side by side are gate and up.
        dropouts: Dropout modules after attention and after the block, which must be inactive.
    """

    is_norm_wide: bool = False
    norm_offset: float = 0.0
    has_post_norms: bool = False
    has_config_window: bool = False
    has_softcap: bool = False
    has_half_angles: bool = False
    scales_late_queries: bool = False
    has_own_mixer: bool = False
    has_gated_heads: bool = False
    feed_forward: tuple[str, ...] = ()
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    delta_projections: tuple[str, ...] = ()
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    dropouts: tuple[str, ...] = ()


_GEMMA_NORM = LayerForm(is_norm_wide=True, norm_offset=1.0)
_GEMMA = _GEMMA_NORM._replace(has_post_norms=True)
_QWEN3_5 = _GEMMA_NORM._replace(
    has_gated_heads=True, delta_projections=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
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
        "SmolLM3DecoderLayer": LayerForm(feed_forward=("SmolLM3MLP",)),
        "GemmaDecoderLayer": _GEMMA_NORM._replace(feed_forward=("GemmaMLP",)),
        "Gemma2DecoderLayer": _GEMMA._replace(has_softcap=True, feed_forward=("Gemma2MLP",)),
        "Gemma3DecoderLayer": _GEMMA._replace(feed_forward=("Gemma3MLP",)),
    }
)
