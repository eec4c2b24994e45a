"""The attention function that transformers models call: packed attention with a batch context, else eager attention.

Axes: B rows, Q queries, T keys, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lightning_fastft.activations.values import ATTENTION_VALUE, find_session
from lightning_fastft.core.autocast import is_autocast_on
from lightning_fastft.core.errors import BackendError, ShapeError, SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.hf.families import FAMILIES, check_servable, decoder_layers, text_config_key
from lightning_fastft.kernels.attention.flash import Collect
from lightning_fastft.kernels.attention.op import packed_attention
from lightning_fastft.kernels.attention.sdpa import dense_attention
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.pack_mask import HIDDEN_MESSAGE
from lightning_fastft.patches.deferred_mask import DeferredMask
from lightning_fastft.patches.part_exchange import gather_heads, gather_rows, share_of_heads
from lightning_fastft.patches.rotary import check_row_angles

# transformers matches its own backends by substrings, so the name must not contain sdpa, flex, flash, eager or a slash.
NAME = "fastft"

# Keywords that change scores or keys and that no backend supports; ignoring them would silently train a wrong model.
_FOREIGN_KEYWORDS = ("position_bias", "indices", "block_indices", "sinks", "head_mask", "attention_bias")


def register() -> None:
    """Register ``attn_implementation="fastft"`` with transformers; a second call has no effect.

    Example:
        >>> register()
        >>> "fastft" in AttentionInterface() and "fastft" in AttentionMaskInterface()
        True
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, defer_mask)


def install_attention(model: PreTrainedModel, patcher: ModelPatcher) -> Status:
    """Set the attention of a model to "fastft", and record the undo in the patcher.

    In a composite model only the text part changes; vision and audio towers keep their attention.

    Returns:
        Status "packed attention".

    Raises:
        UnsupportedModelError: The family cannot be packed exactly.
        SwapError: transformers did not accept the setting.
    """
    check_servable(model)
    register()
    configs = [model.config]
    requested: str | dict[str, str] = NAME
    key = text_config_key(model)
    if key:
        configs.append(getattr(model.config, key))
        requested = {"": NAME, key: NAME}
    before = [config._attn_implementation for config in configs]
    model.set_attn_implementation(requested)
    for config, old in zip(configs, before):
        # The outer model may not use the attention interface (got_ocr2); the forward raises on a mask that it builds.
        if config is configs[-1] and config._attn_implementation != NAME:
            raise SwapError(
                f"{type(model).__name__} kept attention {config._attn_implementation!r}; load it with "
                f"attn_implementation={NAME!r}."
            )
        # The setter would validate an implementation that the model already ran with.
        patcher.add_undo(functools.partial(setattr, config, "_attn_implementation_internal", old))
    model_type = configs[-1].model_type
    note = "" if model_type in FAMILIES else "; not a tested family: fit compares two documents at its start"
    return Status("packed attention", "active", f"{model_type}, {len(decoder_layers(model))} layers{note}")


def defer_mask(attention_mask: Any = None, **arguments: Any) -> DeferredMask:
    """Return an object that can build the mask later; registered as the mask function of "fastft"."""
    if isinstance(attention_mask, DeferredMask):
        return attention_mask
    return DeferredMask({"attention_mask": attention_mask, **arguments})


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DeferredMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    context: BatchContext | None = None,
    collect: Collect | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute one layer's attention; registered as the attention function of "fastft".

    Args:
        module: The attention layer.
        query: Shape (B, H, Q, W).
        key: Shape (B, G, T, W).
        value: Shape (B, G, T, any width).
        attention_mask: The result of defer_mask, an additive or bool mask of shape (B, 1, Q, T), or None.
        dropout: Dropout of the attention weights.
        scaling: Factor of the scores; None for 1 / sqrt(head width).
        sliding_window: Number of keys that a query attends to, with a context; without one the mask has the window.
        softcap: Soft cap of the scores.
        s_aux: Learned sinks, shape (H,).
        context: The metadata of a packed batch; None for padded batches and generation.
        collect: As in packed_attention. It is not called without a context, or under autocast, which casts heads.
        keywords: Ignored; with a context, keywords that change attention raise.

    Returns:
        The output, shape (B, Q, H, width of a value), and the attention weights if they were requested without a
        context, else None.

    Raises:
        BackendError: With a context, packed attention cannot compute the call exactly.
        ShapeError: With a context, queries are not one row of its tokens.
    """
    scale = scaling if scaling is not None else getattr(module, "head_dim", query.shape[-1]) ** -0.5
    if context is None and isinstance(attention_mask, DeferredMask):
        context = attention_mask.context
    if context is None:
        dropout = dropout if module.training else 0.0
        return _attend_unpacked(
            query, key, value, attention_mask, dropout=dropout, scale=scale, softcap=softcap, sink_H=s_aux,
            keywords=keywords,
        )  # fmt: skip

    if query.shape[0] != 1:
        raise _shape_error(module, query, key, context)
    q_THW, k_TGW, v_TGW = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out_THW = attend_rows(
        module,
        q_THW,
        k_TGW,
        v_TGW,
        attention_mask,
        dropout=dropout,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
        sink_H=s_aux,
        context=context,
        collect=collect,
        keywords=keywords,
    )
    # Models may take views of the output, as with transformers' own attention.
    return out_THW[None].contiguous(), None


def attend_rows(
    module: nn.Module,
    q_THW: torch.Tensor,
    k_TGW: torch.Tensor,
    v_TGW: torch.Tensor,
    mask: DeferredMask | torch.Tensor | None,
    *,
    dropout: float,
    scale: float,
    window: int | None,
    softcap: float | None,
    sink_H: torch.Tensor | None,
    context: BatchContext,
    collect: Collect | None,
    keywords: dict[str, Any],
    is_checked: bool = True,
) -> torch.Tensor:
    """Compute one layer's attention over a packed row, as ``attend`` does with a context.

    Args:
        module: The attention layer.
        q_THW: Queries, shape (T, H, W).
        k_TGW: Keys, shape (T, G, W).
        v_TGW: Values, shape (T, G, any width).
        mask: As attention_mask of ``attend``.
        dropout: As in ``attend``.
        scale: Factor on the scores.
        window: As sliding_window of ``attend``.
        softcap: As in ``attend``.
        sink_H: As s_aux of ``attend``.
        context: The metadata of the packed batch.
        collect: As in ``attend``.
        keywords: Further keywords of the layer; those that change attention raise.
        is_checked: As in ``packed_attention``.

    Returns:
        Shape (T, H, width of a value).

    Raises:
        BackendError: As ``attend``.
        ShapeError: As ``attend``.
    """
    if not context.is_model_prepared:
        check_row_angles(module, context)
    if q_THW.shape[0] != context.num_tokens or k_TGW.shape[0] != context.num_tokens:
        raise _shape_error(module, q_THW.transpose(0, 1)[None], k_TGW.transpose(0, 1)[None], context)
    _check_packable(module, mask, dropout=dropout, window=window, keywords=keywords, context=context)
    if is_autocast_on(q_THW.device.type):
        # Cast like autocast for scaled_dot_product_attention: normalised queries and keys are float32, values are not.
        q_THW, k_TGW, v_TGW = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q_THW, k_TGW, v_TGW))
        collect = None
    session = find_session(module)
    part = context.part
    if part is not None:
        q_THW, k_TGW, v_TGW = gather_rows(q_THW, k_TGW, v_TGW, part=part)
        sink_H = None if sink_H is None else share_of_heads(sink_H, part=part)
        # Gradients of keys and values pass through the exchange.
        collect = None
    out_THW = packed_attention(
        q_THW,
        k_TGW,
        v_TGW,
        context=context.whole,
        scale=scale,
        window=window,
        softcap=softcap,
        sink_H=sink_H,
        backend=context.attention_backend,
        remember=None if session is None else functools.partial(session.value, ATTENTION_VALUE),
        collect=collect,
        is_checked=is_checked,
    )
    return out_THW if part is None else gather_heads(out_THW, part=part)


def _attend_unpacked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DeferredMask | torch.Tensor | None,
    *,
    dropout: float,
    scale: float,
    softcap: float | None,
    sink_H: torch.Tensor | None,
    keywords: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with a mask, as for padded batches and generation."""
    mask = attention_mask.additive(query.dtype) if isinstance(attention_mask, DeferredMask) else attention_mask
    mask = _additive(_keep_chosen(mask, keywords.get("indices"), query=query, key=key), query.dtype)
    if softcap is None and sink_H is None and dropout == 0.0 and not keywords.get("output_attentions"):
        out_BHQW = dense_attention(query, key, value, mask_B1QT=mask, scale=scale)
        return out_BHQW.transpose(1, 2).contiguous(), None
    return _eager_attention(query, key, value, mask=mask, scale=scale, softcap=softcap, sink_H=sink_H, dropout=dropout)


def _keep_chosen(
    mask: torch.Tensor | None, index_BQK: torch.Tensor | None, *, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Return a mask that also hides the keys that the indexer did not choose."""
    if index_BQK is None:
        return mask
    hidden_BQT = torch.ones((*index_BQK.shape[:2], key.shape[2]), dtype=torch.bool, device=key.device).scatter_(
        -1, index_BQK.long(), False
    )
    if mask is None:
        mask = torch.zeros((), dtype=query.dtype, device=query.device)
    added = _additive(mask, query.dtype)
    assert added is not None
    return added.masked_fill(hidden_BQT[:, None], torch.finfo(query.dtype).min)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return an additive mask in the dtype of the scores; finite, so that a row without keys is not NaN."""
    if mask is None or mask.dtype is dtype:
        return mask
    lowest = torch.finfo(dtype).min
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    return mask.clamp(min=lowest).to(dtype)


def _eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sink_H: torch.Tensor | None,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute transformers' eager attention, with soft caps before the mask and sinks as additional keys."""
    num_repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(num_repeats, dim=1), value.repeat_interleave(num_repeats, dim=1)
    score_BHQT = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        score_BHQT = torch.tanh(score_BHQT / softcap) * softcap
    if mask is not None:
        score_BHQT = score_BHQT + mask
    if sink_H is not None:
        sink_BHQ1 = sink_H.to(score_BHQT.dtype)[None, :, None, None].expand(*score_BHQT.shape[:3], 1)
        score_BHQT = torch.cat([score_BHQT, sink_BHQ1], dim=-1)
    weight_BHQT = score_BHQT.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    if sink_H is not None:
        weight_BHQT = weight_BHQT[..., :-1]
    weight_BHQT = nn.functional.dropout(weight_BHQT, p=dropout)
    return (weight_BHQT @ value).transpose(1, 2).contiguous(), weight_BHQT


def _shape_error(module: nn.Module, query: torch.Tensor, key: torch.Tensor, context: BatchContext) -> ShapeError:
    """Return the error of a call whose queries or keys are not one row of the tokens of a pack."""
    return ShapeError(
        f"{type(module).__name__} got queries {tuple(query.shape)} and keys {tuple(key.shape)} for a pack of "
        f"{context.num_tokens} tokens: a packed batch is one row without a cache or a prefix (use_cache=False)."
    )


def _check_packable(
    module: nn.Module,
    attention_mask: object,
    *,
    dropout: float,
    window: int | None,
    keywords: dict[str, Any],
    context: BatchContext,
) -> None:
    """Raise on a call whose result would differ from separate documents."""
    layer = type(module).__name__
    if dropout > 0.0 and module.training:
        name = _find_dropout_name(getattr(module, "config", None), dropout=dropout)
        raise BackendError(
            f"{layer} needs attention dropout {dropout}, which packed attention does not support. Its layers read the "
            f"number when they are built: load the model with AutoModelForCausalLM.from_pretrained(NAME, {name}=0.0), "
            f"or set {name} in the config.json of its folder."
        )
    if isinstance(attention_mask, torch.Tensor):
        raise BackendError(
            f"{layer} got its own mask and a batch context; packed attention would ignore the mask. Pass only one of "
            "them."
        )
    obstacle = (
        attention_mask.find_obstacle(window, max_length=context.max_length)
        if isinstance(attention_mask, DeferredMask)
        else ""
    )
    if obstacle:
        raise BackendError(f"The mask of {layer} {obstacle}; packed attention would compute something else.")
    # Of a prepared model, the guard of its decoder has seen the mask of the caller.
    mask = attention_mask if isinstance(attention_mask, DeferredMask) else None
    if not context.is_model_prepared and mask is not None and mask.hides_tokens(context):
        raise BackendError(HIDDEN_MESSAGE)
    is_causal = keywords.get("is_causal")
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise BackendError(f"{layer} is not causal; packed attention is.")
    if keywords.get("output_attentions"):
        raise BackendError("Packed attention computes no attention weights; request them without a batch context.")
    # Empty indices of an indexer mean all keys (patches/carriers.py).
    foreign = [
        name
        for name in _FOREIGN_KEYWORDS
        if keywords.get(name) is not None and not (name == "indices" and keywords[name].numel() == 0)
    ]
    if foreign:
        raise BackendError(f"{layer} passes {', '.join(foreign)}, which no backend of packed attention supports.")


def _find_dropout_name(config: object, *, dropout: float) -> str:
    """Return the field of a configuration that holds the dropout of attention weights: GPT-2 names it attn_pdrop."""
    fields = {} if config is None else vars(config)
    found = (name for name, value in fields.items() if "att" in name and "drop" in name and value == dropout)
    return next(found, "attention_dropout")
