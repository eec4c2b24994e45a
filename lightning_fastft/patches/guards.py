"""Refuse packed batches whose result would differ from one document at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import decoder_layers, find_decoder
from lightning_fastft.hf.images import REFUSED_IMAGES, check_images
from lightning_fastft.hf.mixers import find_mixers, holds_attention, mixer_family
from lightning_fastft.packing.context import BatchContext

# Types of decoder layers without attention.
_LAYERS_WITHOUT_ATTENTION = frozenset({"moe", "mlp"})
_MEDIA_KEYWORDS = ("pixel_values", "image", "video", "audio", "input_features")


def install_guards(model: PreTrainedModel, patcher: ModelPatcher) -> ReadGuard:
    """Check in each forward that every attention layer and every mixer reads the context, that images have positions
    of their own where the model gives them some, and that no scale of the attention follows positions of the pack.

    Args:
        model: A causal language model.
        patcher: Records the hooks.

    Returns:
        The guard of the reads.

    Cost:
        Two integers on the host in each forward.
    """
    decoder = find_decoder(model)
    guard = ReadGuard(model)
    _hook(decoder, patcher, before=guard.begin, after=guard.end)
    if _has_media_positions(model):
        _hook(model.base_model, patcher, before=_refuse_media)
    if model.config.model_type in REFUSED_IMAGES:
        _hook(model.base_model, patcher, before=_refuse_images)
    scales = [
        float(part.floor_scale)  # type: ignore[arg-type]
        for part in decoder.modules()
        if getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True)
    ]
    if mixer_family(model) is not None:
        _hook(decoder, patcher, before=_refuse_prefixes)
    if scales:
        _hook(decoder, patcher, before=_ScaleGuard(type(model).__name__, limit=min(scales)))
    return guard


def refuse_packed_batches(model: PreTrainedModel, patcher: ModelPatcher) -> None:
    """Let a model that is no causal language model (a classifier, an encoder-decoder) refuse packed batches.

    A decoder without a head that was loaded with packed attention reads the context itself, and is not changed.
    """
    from lightning_fastft.patches.attention import NAME

    if model.base_model is model and model.config._attn_implementation == NAME:
        return
    # A wrapper may call model.forward, which skips the model's hooks, and a model may keep keywords from its decoder.
    for module in dict.fromkeys((model, model.base_model)):
        _hook(module, patcher, before=_Refusal(type(model).__name__))


class ReadGuard:
    """Count how often the attention layers and mixers of one model read the context in one forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        layer_types = getattr(config, "layer_types", None) or ()
        num_without = sum(kind in _LAYERS_WITHOUT_ATTENTION for kind in layer_types)
        # Some families skip whole layers at random in training.
        skips_layers = bool(getattr(config, "layerdrop", 0.0))
        family, layers = mixer_family(model), decoder_layers(model)
        num_readers = sum(len(find_mixers(layer, family)) + holds_attention(layer, family) for layer in layers)
        self._num_expected = 0 if skips_layers else num_readers - num_without
        self._readers = "decoder layers" if family is None else "attention layers and mixers"
        self._name = f"{type(model).__name__} ({config.model_type})"
        self._num_before = self._num_last = 0

    def expect(self, num_reads: int) -> None:
        """Set how many reads a forward has."""
        self._num_expected = num_reads

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Expect nothing for a while; the list ends with the number of reads of the last forward with a context."""
        expected, self._num_expected, self._num_last = self._num_expected, 0, 0
        counted = [0]
        try:
            yield counted
        finally:
            self._num_expected = expected
            counted[0] = self._num_last

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: note the reads so far."""
        context = kwargs.get("context")
        self._num_before = 0
        if isinstance(context, BatchContext):
            self._num_before = context.num_reads
            context.is_model_prepared = context.is_in_prepared_forward = True

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: compare the reads of this forward with those that the model should have."""
        context = kwargs.get("context")
        if not isinstance(context, BatchContext):
            return
        context.is_in_prepared_forward = False
        self._num_last = context.num_reads - self._num_before
        # The strategy checks for no read at all after the step, with advice for a model without packed attention.
        if not 0 < self._num_last < self._num_expected:
            return
        raise UnsupportedModelError(
            f"{self._name} read where documents begin in {self._num_last} of "
            f"{self._num_expected} {self._readers}, so in the "
            "others documents of a pack would see each other. attention='one_by_one' runs them one at a time."
        )


class _ScaleGuard:
    """Forward pre-hook of a decoder whose attention scales queries by their place in the pack (Llama 4): up to a limit
    the scale is 1.
    """

    def __init__(self, name: str, *, limit: float) -> None:
        self._name = name
        self._limit = limit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = kwargs.get("context")
        if isinstance(context, BatchContext) and context.num_documents > 1 and context.num_tokens >= self._limit:
            raise UnsupportedModelError(
                f"{self._name} scales attention by the place in the row from {self._limit:.0f} tokens on "
                f"(attn_temperature_tuning), and the pack has {context.num_tokens}: later documents would be scaled "
                f"otherwise than alone. Set PackedDataModule(max_tokens={self._limit - 1:.0f}), or use "
                "attention='one_by_one'."
            )


class _Refusal:
    """Forward pre-hook of a model that refuses packed batches."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(kwargs.get("context"), BatchContext):
            raise UnsupportedModelError(
                f"{self._name} was given a packed batch, and packing serves causal language models with a loss on next "
                "tokens. Give it padded "
                f"rows from a data module of your own, or load the model with AutoModelForCausalLM."
            )


def _refuse_prefixes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a hybrid: its mixers keep a state, which a document cannot take over from a prefix."""
    context = kwargs.get("context")
    if isinstance(context, BatchContext) and context.has_prefixes:
        raise UnsupportedModelError(
            f"{type(module).__name__} has recurrent mixers, and the pack has completions that share a prompt, whose "
            "state they would not see. Set PackedDataModule(share_prompts=False), or collate(..., "
            "shares_prompts=False): each completion then gets a copy of its prompt."
        )


def _has_media_positions(model: PreTrainedModel) -> bool:
    """Whether images and videos get positions on several axes (M-RoPE)."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return hasattr(model.base_model, "get_rope_index") or "mrope_section" in parameters


def _refuse_media(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: refuse images with positions of text, and videos and sound."""
    media = [name for name, value in kwargs.items() if value is not None and name.startswith(_MEDIA_KEYWORDS)]
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim == 3:
        media = [name for name in media if not name.startswith("image") and name != "pixel_values"]
    if media and isinstance(kwargs.get("context"), BatchContext):
        raise UnsupportedModelError(
            f"{type(module).__name__} was given {', '.join(media)} with a packed batch, whose positions are those of "
            "text; images would get wrong "
            "ones under its M-RoPE. Let PackedDataModule read the images, which gives each document its own positions; "
            "videos and sound train with one document per row."
        )


def _refuse_images(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a family whose images are not computed exactly in a pack."""
    if kwargs.get("pixel_values") is not None and isinstance(kwargs.get("context"), BatchContext):
        check_images(module.config)


def _hook(module: nn.Module, patcher: ModelPatcher, *, before: Any, after: Any = None) -> None:
    patcher.add_undo(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if after is not None:
        patcher.add_undo(module.register_forward_hook(after, with_kwargs=True).remove)
