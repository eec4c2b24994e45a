"""Merge adapters into the weights of their base, and compare the logits of both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_fastft.core.errors import UnsupportedModelError, list_names
from lightning_fastft.hf.families import decoder_layers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# Width from which errors of sums in fp32 exceed those of the weights' own rounding.
_NARROW = 64


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits in evaluation mode, fp32 on the host."""
    with torch.inference_mode():
        return model.eval()(input_ids=ids, use_cache=False).logits.float().cpu()


def merge(model: PeftModel, ids: torch.Tensor, *, adapted: torch.Tensor) -> tuple[PreTrainedModel, float]:
    """Return the model with merged adapters and the relative change of its logits.

    An adapter of the embedding or the head changes one of them: if they share their weight, the head gets a copy.

    Raises:
        UnsupportedModelError: Rounding of weights does not explain the change, an adapter has a bias that the base has
            no place for, or other layers share the weight of an adapted one.
    """
    _check_biases(model)
    with model.disable_adapter():
        base = logits_of(model, ids)
    _untie(model)
    _check_owners(model)
    merged: Any = model.merge_and_unload(safe_merge=True)
    if not is_tied(merged):
        # PEFT does so in its newer versions, and for the outer configuration alone.
        for config in (merged.config, merged.config.get_text_config(decoder=True)):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
    size = torch.linalg.vector_norm(adapted)
    moved = float(torch.linalg.vector_norm(logits_of(merged, ids) - adapted) / size)
    effect = float(torch.linalg.vector_norm(base - adapted) / size)
    # Rounding errors of layers are independent. Models amplify them differently: tiny models with far from uniform
    # logits reach 4 of these units, 6 if another expert is chosen (tests/cli/test_export.py). A merge that is lost or
    # doubled changes logits by the whole effect.
    unit = torch.finfo(merged.dtype).eps * math.sqrt(len(decoder_layers(merged)) + 1)
    if merged.dtype is torch.float32:
        # Sums are in fp32 too, and their error grows with the width: 11 units at a width of 1,024.
        unit *= max(1.0, math.sqrt(merged.get_input_embeddings().weight.shape[-1] / _NARROW))
    allowed = max(2 * unit, min(8 * unit, 0.75 * effect))
    if not moved <= allowed:
        in_fp32 = "" if merged.dtype is torch.float32 else ", or merge in fp32 (--dtype float32)"
        raise UnsupportedModelError(
            f"Merging changed the logits of {type(merged).__name__} by {moved:.1e} relative to their size. Rounding to "
            f"{merged.dtype} explains {allowed:.1e}, and the adapters change them by {effect:.1e}. Export the adapters "
            f"without merging{in_fp32}."
        )
    return merged, moved


def is_tied(model: Any) -> bool:
    """Return whether the head of a model shares the weight of its embedding; adapters around them are ignored."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and _own_layer(head).weight is _own_layer(embedding).weight


def _untie(model: PeftModel) -> None:
    """Give the head a copy of the weight that it shares with the embedding, if an adapter changes one of them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: Any = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    if is_tied(model) and any(isinstance(layer, BaseTunerLayer) for layer in layers):
        head = _own_layer(layers[1])
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _own_layer(layer: Any) -> Any:
    """Return the layer of the base inside PEFT's."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(layer, AuxiliaryTrainingWrapper):
        layer = layer.original_module
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer


def _check_biases(model: PeftModel) -> None:
    """Raise if a layer has no bias to which the bias of its adapter could be added."""
    lacking = [
        name
        for name, module in model.named_modules()
        if any(getattr(module, "lora_bias", {}).values()) and getattr(module.get_base_layer(), "bias", None) is None  # type: ignore[operator]
    ]
    if lacking:
        raise UnsupportedModelError(
            f"The adapters have biases (lora_bias), and {list_names(lacking)} has none to add them to, so they cannot "
            "be merged. Export the adapters without --merge."
        )


def _check_owners(model: PeftModel) -> None:
    """Raise if another layer holds the weight that an adapter would change."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = dict(model.named_modules())
    inside = {layer.get_base_layer() for layer in layers.values() if isinstance(layer, BaseTunerLayer)}
    owners: dict[int, list[str]] = {}
    for name, layer in layers.items():
        if layer not in inside:
            own = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
            for parameter in own.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(name.removeprefix("base_model.model."))
    for layer in layers.values():
        weight = getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, LoraLayer) else None
        names = owners.get(id(weight), [])
        if len(names) > 1:
            raise UnsupportedModelError(
                f"{list_names(names)} share one weight. Merged into it, the adapters of one would change the others "
                "too. Export the adapters without --merge."
            )
