"""Recurrent mixers of hybrid families: their classes and kinds."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

from torch import nn
from transformers import PreTrainedModel

Kind = Literal["short convolution", "gated delta rule", "Kimi delta attention", "Mamba-2", "Mamba"]


class MixerFamily(NamedTuple):
    """The mixers of one family: the name of their class in transformers, and their kind."""

    class_name: str
    kind: Kind


# model_type of the text configuration -> its mixers. A mixer takes hidden states of shape (1, T, D) and returns the
# same shape; all its other inputs are keywords. Tests compare packed with one-by-one results for each.
MIXERS = MappingProxyType(
    {
        "lfm2": MixerFamily("Lfm2ShortConv", "short convolution"),
        "lfm2_moe": MixerFamily("Lfm2MoeShortConv", "short convolution"),
        "lfm3": MixerFamily("Lfm3ShortConv", "short convolution"),
        "qwen3_next": MixerFamily("Qwen3NextGatedDeltaNet", "gated delta rule"),
        "qwen3_5_text": MixerFamily("Qwen3_5GatedDeltaNet", "gated delta rule"),
        "qwen3_5_moe_text": MixerFamily("Qwen3_5MoeGatedDeltaNet", "gated delta rule"),
        "lara_mini": MixerFamily("LaraMiniGatedDeltaNet", "gated delta rule"),
        "olmo_hybrid": MixerFamily("OlmoHybridGatedDeltaNet", "gated delta rule"),
        "kimi_linear": MixerFamily("KimiLinearDeltaAttention", "Kimi delta attention"),
        "bailing_hybrid": MixerFamily("BailingHybridDeltaAttention", "Kimi delta attention"),
        "nemotron_h": MixerFamily("NemotronHMamba2Mixer", "Mamba-2"),
        "granitemoehybrid": MixerFamily("GraniteMoeHybridMambaLayer", "Mamba-2"),
        "falcon_h1": MixerFamily("FalconH1Mixer", "Mamba-2"),
        "bamba": MixerFamily("BambaMixer", "Mamba-2"),
        "zamba2": MixerFamily("Zamba2MambaMixer", "Mamba-2"),
        "jamba": MixerFamily("JambaMambaMixer", "Mamba"),
    }
)


def mixer_family(model: PreTrainedModel) -> MixerFamily | None:
    """Return the description of a model's mixers; None for a family without known mixers."""
    return MIXERS.get(model.config.get_text_config(decoder=True).model_type)


def find_mixers(module: nn.Module, family: MixerFamily | None) -> list[nn.Module]:
    """Return the mixers of a family inside a module, each once, in the order of its modules.

    Example:
        >>> find_mixers(nn.Linear(2, 2), MIXERS["lfm2"])
        []
    """
    return [] if family is None else [part for part in module.modules() if is_mixer(part, family)]


def is_mixer(module: nn.Module, family: MixerFamily) -> bool:
    """Return whether a module is a mixer of a family, also after FSDP2 or value points replaced its class."""
    return any(base.__name__ == family.class_name for base in type(module).__mro__)


def holds_attention(layer: nn.Module, family: MixerFamily | None) -> bool:
    """Return whether a decoder layer has attention: every layer without a mixer, and some layers with one."""
    if not find_mixers(layer, family):
        return True
    return any("Attention" in type(part).__name__ and not find_mixers(part, family) for part in layer.modules())
