"""What is refused of PEFT's LoRA: variants that packs or our losses do not fit, and misspelt fields of a sub-config."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lightning_fastft.core.errors import OptionError, UnsupportedModelError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn

_IN_A_ROW = "PEFT looks for the invocation tokens once in each row, and a pack holds many documents in one row"
# By the field of LoraConfig that asks for a variant.
_REASONS = {
    "layer_replication": (
        "copies of a layer share one weight, and run the attention of transformers. Remove it, or save a model with "
        "the layers repeated and train on its folder."
    ),
    "alora_invocation_tokens": f"{_IN_A_ROW}. Remove it.",
    "arrow_config": "it combines adapters that are already trained. Remove it.",
    "kasa_config": "its regularisation has to be added to the loss, which the tuners do not do. Remove it.",
    "velora_config": (
        "its gradients use a mean over all tokens of a micro-batch, padding included, and PEFT keeps that mean in a "
        "buffer, which checkpoints of adapters do not hold. Remove it."
    ),
    "monteclora_config": "its divergence has to be added to the loss, which the tuners do not do. Remove it.",
}


def refuse_variants(lora: LoraConfig) -> None:
    """Refuse a configuration that asks for a variant of LoRA that would train something else.

    Raises:
        OptionError: The message names the field and the reason.
    """
    for name, reason in _REASONS.items():
        if getattr(lora, name, None) not in (None, []):
            raise OptionError(f"lora.{name} is not supported: {reason}")


def refuse_unknown_parts(lora: Mapping[str, Any]) -> None:
    """Refuse unknown fields of eva_config and loftq_config, which PEFT ignores.

    Raises:
        OptionError: A field is unknown; the message has the nearest one.
    """
    from peft import EvaConfig, LoftQConfig

    for name, kind in (("eva_config", EvaConfig), ("loftq_config", LoftQConfig)):
        part = lora.get(name)
        known = [field.name for field in fields(kind)]
        for field in part if isinstance(part, Mapping) else ():
            if field not in known:
                near = difflib.get_close_matches(str(field), known, n=1)
                advice = f"Did you mean {near[0]}?" if near else f"Its fields are {', '.join(known)}."
                raise OptionError(f"lora.{name} has the unknown field {field!r}. {advice}")


def refuse_tokens_of_a_copy(adapted: nn.Module) -> None:
    """Refuse a model that trains tokens of a layer and a copy of it: PEFT 0.21 builds it, and cannot run its forward.

    That happens where the head shares the weight of the embedding, and ``modules_to_save`` names the head.

    Raises:
        OptionError: The message names the layer.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper

    for name, layer in adapted.named_modules():
        if isinstance(layer, TrainableTokensLayer) and isinstance(layer.base_layer, ModulesToSaveWrapper):
            shown = name.removeprefix("base_model.model.").removesuffix(".token_adapter")
            raise OptionError(
                f"lora trains a copy of {shown} (modules_to_save) and tokens of it (trainable_token_indices, by the "
                "embedding, whose weight it shares), and PEFT cannot run both. Remove one of them, or replace "
                "trainable_token_indices by the embedding in modules_to_save."
            )


def refuse_invoked_adapters(root: nn.Module) -> None:
    """Refuse packed batches of a model with activated LoRA (aLoRA), also if documents run one at a time.

    Raises:
        UnsupportedModelError: A layer inside root has such an adapter.
    """
    for name, layer in root.named_modules():
        variants = getattr(layer, "lora_variant", None) or {}
        if any(type(variant).__name__.startswith("ALora") for variant in variants.values()):
            raise UnsupportedModelError(
                f"{name} has an adapter with alora_invocation_tokens, which cannot be trained on packed documents: "
                f"{_IN_A_ROW}. Use LoRA without invocation tokens, or padded rows of your own."
            )
