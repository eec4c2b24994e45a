"""Raise on packed batches whose result would differ from separate documents."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.core.errors import BackendError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import ADVICE, decoder_layers, find_decoder
from lightning_fastft.hf.images import image_directions
from lightning_fastft.hf.mixers import find_mixers, holds_attention, mixer_family
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.pack_mask import HIDDEN_MESSAGE, hides_tokens

# Types of decoder layers without attention.
_LAYERS_WITHOUT_ATTENTION = frozenset({"moe", "mlp"})
_MEDIA_KEYWORDS = ("pixel_values", "image", "video", "audio", "input_features")


def install_guards(model: PreTrainedModel, patcher: ModelPatcher) -> ReadGuard:
    """Check each forward of a model on a packed batch.

    Every attention layer and mixer must read the context. Images must have M-RoPE positions if the model uses them, and
    a text model must get no images. No attention scale may depend on positions in the pack. A mask of the caller's own
    must not hide a token of a document.

    Returns:
        The guard that counts context reads.

    Cost:
        Two integers on the host per forward; one host sync if the caller replaces the mask of the batch.
    """
    decoder = find_decoder(model)
    guard = ReadGuard(model)
    _hook(decoder, patcher, before=refuse_hidden_tokens)
    _hook(decoder, patcher, before=guard.begin, after=guard.end)
    if _has_media_positions(model):
        _hook(model.base_model, patcher, before=_refuse_media)
    if not _takes_media(model):
        _hook(model.base_model, patcher, before=_refuse_unread_media)
    if image_directions(model.config) != "causal":
        _hook(model.base_model, patcher, before=_refuse_causal_images)
    scales = [
        float(part.floor_scale)  # type: ignore[arg-type]
        for part in decoder.modules()
        if getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True)
    ]
    if mixer_family(model) is not None:
        _hook(decoder, patcher, before=_refuse_prefixes)
    if scales:
        _hook(decoder, patcher, before=partial(_refuse_scaled, type(model).__name__, min(scales)))
    return guard


def refuse_packed_batches(model: PreTrainedModel, patcher: ModelPatcher) -> None:
    """Make a model that is not a causal language model (a classifier, an encoder-decoder) raise on packed batches.

    A decoder without a head that was loaded with packed attention reads the context itself and does not change.
    """
    from lightning_fastft.patches.attention import NAME

    if model.base_model is model and model.config._attn_implementation == NAME:
        return
    # A wrapper may call model.forward, which skips the model's hooks, and a model may not pass keywords to its decoder.
    for module in dict.fromkeys((model, model.base_model)):
        _hook(module, patcher, before=partial(_refuse_packs, type(model).__name__))


def refuse_soft_prompts(root: nn.Module, patcher: ModelPatcher) -> None:
    """Make PEFT models with prompt tuning, prefix tuning or p-tuning inside root raise on packed batches."""
    for module in root.modules():
        if isinstance(module, PeftModel):
            _hook(module, patcher, before=_refuse_soft_prompt)


def refuse_hidden_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on a mask of the caller's own that hides tokens of documents, in a forward pre-hook.

    Raises:
        BackendError: It has a zero before the pad tail.

    Cost:
        None for the mask of the batch; one host sync for another one.
    """
    context = kwargs.get("context")
    if isinstance(context, BatchContext) and hides_tokens(kwargs.get("attention_mask"), context):
        raise BackendError(HIDDEN_MESSAGE)


class ReadGuard:
    """Count how often the attention layers and mixers of one model read the context in one forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        layer_types = getattr(config, "layer_types", None) or ()
        num_without = sum(kind in _LAYERS_WITHOUT_ATTENTION for kind in layer_types)
        # Some families skip random layers in training.
        skips_layers = bool(getattr(config, "layerdrop", 0.0))
        family, layers = mixer_family(model), decoder_layers(model)
        num_readers = sum(len(find_mixers(layer, family)) + holds_attention(layer, family) for layer in layers)
        self._num_expected = 0 if skips_layers else num_readers - num_without
        self._readers = "decoder layers" if family is None else "attention layers and mixers"
        self._name = f"{type(model).__name__} ({config.model_type})"
        self._num_before = self._num_last = 0

    def expect(self, num_reads: int) -> None:
        """Set the number of reads per forward."""
        self._num_expected = num_reads

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Count reads without a check; yield a list of one number, set at the end: the reads of the last forward."""
        expected, self._num_expected, self._num_last = self._num_expected, 0, 0
        counted = [0]
        try:
            yield counted
        finally:
            self._num_expected = expected
            counted[0] = self._num_last

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the number of reads so far, in a forward pre-hook."""
        context = kwargs.get("context")
        self._num_before = 0
        if isinstance(context, BatchContext):
            self._num_before = context.num_reads
            context.is_model_prepared = context.is_in_prepared_forward = True

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Compare the reads of this forward with the expected number, in a forward hook."""
        context = kwargs.get("context")
        if not isinstance(context, BatchContext):
            return
        context.is_in_prepared_forward = False
        self._num_last = context.num_reads - self._num_before
        # After the step the strategy checks for zero reads, with advice for a model without packed attention.
        if not 0 < self._num_last < self._num_expected:
            return
        raise UnsupportedModelError(
            f"Only {self._num_last} of {self._num_expected} {self._readers} of {self._name} read the batch context, so "
            f"documents of a pack would attend to each other in the others. {ADVICE}"
        )


def _refuse_soft_prompt(module: PeftModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on packed batches, in a forward pre-hook of a PEFT model whose active adapter is a soft prompt.

    With gradient checkpointing, transformers drops a prefix without an error. ``disable_adapter`` replaces the forward.
    """
    is_prompt = module.active_peft_config.is_prompt_learning and "forward" not in vars(module)
    if is_prompt and isinstance(kwargs.get("context"), BatchContext):
        raise UnsupportedModelError(
            f"The adapter {module.active_adapter!r} ({type(module.active_peft_config).__name__}) puts its prompt "
            "before a row, and a packed batch has many documents in one row. Use LoRA, or padded rows of your own."
        )


def _refuse_scaled(name: str, limit: float, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on long packs, in a forward pre-hook of a decoder that scales queries by their position (Llama 4).

    The scale is 1 up to the limit.
    """
    context = kwargs.get("context")
    if isinstance(context, BatchContext) and context.num_documents > 1 and context.num_tokens >= limit:
        raise UnsupportedModelError(
            f"{name} scales attention by the position in the row from {limit:.0f} tokens on (attn_temperature_tuning), "
            f"and the pack has {context.num_tokens}: later documents would get a wrong scale. Set "
            f"PackedDataModule(max_tokens={limit - 1:.0f}). Or: {ADVICE}"
        )


def _refuse_packs(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on packed batches, in a forward pre-hook."""
    if isinstance(kwargs.get("context"), BatchContext):
        raise UnsupportedModelError(
            f"{name} got a packed batch, but packing supports only causal language models. Give it padded rows from "
            "your own data module, or load the model with AutoModelForCausalLM."
        )


def _refuse_prefixes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on shared prefixes, in a forward pre-hook of a hybrid model.

    The mixers have a state, which a document cannot continue from a prefix.
    """
    context = kwargs.get("context")
    if isinstance(context, BatchContext) and context.has_prefixes:
        raise UnsupportedModelError(
            f"{type(module).__name__} has recurrent mixers, and the pack has completions that share a prompt; mixers "
            "cannot continue its state. Set PackedDataModule(share_prompts=False), or collate(..., "
            "shares_prompts=False): each completion then gets a copy of its prompt."
        )


def _takes_media(model: PreTrainedModel) -> bool:
    """Return whether a model has an argument for images, videos or audio."""
    return any(
        name.startswith(_MEDIA_KEYWORDS)
        for module in (model, model.base_model)
        for name in inspect.signature(type(module).forward).parameters
    )


def _refuse_unread_media(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on images, videos and audio, in a forward pre-hook of a text model, which drops unknown keywords."""
    media = [name for name, value in kwargs.items() if value is not None and name.startswith(_MEDIA_KEYWORDS)]
    if media and isinstance(kwargs.get("context"), BatchContext):
        raise UnsupportedModelError(
            f"{type(module).__name__} got {', '.join(media)} with a packed batch and has no image tower, so it would "
            "read image tokens as text. Take a model with images (as teacher, one that takes those of the student), or "
            "train on text."
        )


def _has_media_positions(model: PreTrainedModel) -> bool:
    """Return whether images and videos get positions on several axes (M-RoPE)."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return hasattr(model.base_model, "get_rope_index") or "mrope_section" in parameters


def _refuse_media(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on images with text positions, and on videos and audio, in a forward pre-hook."""
    media = [name for name, value in kwargs.items() if value is not None and name.startswith(_MEDIA_KEYWORDS)]
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim == 3:
        media = [name for name in media if not name.startswith("image") and name != "pixel_values"]
    if media and isinstance(kwargs.get("context"), BatchContext):
        raise UnsupportedModelError(
            f"{type(module).__name__} got {', '.join(media)} with a packed batch that has text positions, which are "
            "wrong for images under M-RoPE. Let PackedDataModule read the images, which sets the positions of each "
            "document. Train videos and audio with one document per row."
        )


def _refuse_causal_images(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on images without spans, in a forward pre-hook of a family whose images see both directions."""
    context = kwargs.get("context")
    if kwargs.get("pixel_values") is not None and isinstance(context, BatchContext) and context.spans is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} got images with a packed batch that does not say which tokens they are, so "
            "tokens of an image would not see the later ones. Let PackedDataModule read the images."
        )


def _hook(module: nn.Module, patcher: ModelPatcher, *, before: Any, after: Any = None) -> None:
    patcher.add_undo(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if after is not None:
        patcher.add_undo(module.register_forward_hook(after, with_kwargs=True).remove)
