"""Pass the batch context to attention whose decoder layer drops keywords, and to sparse attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.hf.families import ADVICE, decoder_layers, drops_keywords, find_decoder, find_indexers
from lightning_fastft.hf.mixers import holds_attention, mixer_family
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches.deferred_mask import DeferredMask

STATUS_NAME = "sparse attention"


def install_carriers(model: PreTrainedModel, patcher: ModelPatcher) -> list[Status]:
    """Pass the context with the mask into layers that drop keywords, and to indexers.

    Returns:
        Status "sparse attention" for a model with indexers, else an empty list.

    Cost:
        Host work once per run; one small object per layer and step.
    """
    family, indexers = mixer_family(model), find_indexers(find_decoder(model))
    for layer in decoder_layers(model):
        if indexers or (holds_attention(layer, family) and drops_keywords(type(layer).forward)):
            patcher.add_undo(layer.register_forward_pre_hook(_give_context_to_mask, with_kwargs=True).remove)
    if not indexers:
        return []
    name = f"{type(model).__name__} ({model.config.get_text_config(decoder=True).model_type})"
    for indexer in indexers:
        if getattr(vars(indexer).get("forward"), "func", None) is not _choose_all_keys:
            patcher.set_attribute(indexer, "forward", functools.partial(_choose_all_keys, indexer, name))
    limit = min(int(indexer.index_topk) for indexer in indexers)  # type: ignore[arg-type]
    return [Status(STATUS_NAME, "active", f"dense for documents of up to {limit} tokens; longer documents raise")]


def _give_context_to_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add the context to the mask, in a forward pre-hook of a layer.

    Unlike hooks, arguments also reach the attention when checkpointing recomputes the layer.
    """
    context, mask = kwargs.get("context"), kwargs.get("attention_mask")
    if not isinstance(context, BatchContext) or not isinstance(mask, DeferredMask):
        return None
    return args, {**kwargs, "attention_mask": mask.with_context(context)}


def _choose_all_keys(indexer: Any, name: str, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the indices of chosen keys; an empty tensor in a packed batch, which means all earlier keys.

    An indexer chooses ``index_topk`` keys for each query. In a document of at most ``index_topk`` tokens it chooses all
    keys, which is plain causal attention.

    Raises:
        UnsupportedModelError: A document of a packed batch is longer than the indexer's limit.
    """
    masks = [value for value in (*args, *kwargs.values()) if isinstance(value, DeferredMask)]
    context = masks[0].context if masks else None
    if context is None:
        return type(indexer).forward(indexer, hidden_states, *args, **kwargs)
    limit = int(indexer.index_topk)
    if context.max_length > limit:
        raise UnsupportedModelError(
            f"{name} chooses {limit} keys for each query (index_topk), and a document has "
            f"{context.max_length} tokens; packed attention is exact only up to {limit}. Set "
            f"PackedDataModule(max_tokens={limit}) or shorten the documents. Or: {ADVICE}"
        )
    return torch.empty((*hidden_states.shape[:2], 0), dtype=torch.int32, device=hidden_states.device)
