"""Run the documents of a pack one at a time through the whole model, which is exact for every family, but slow."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.hf.sharding.state import is_sharded
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.context import ONE_BY_ONE, BatchContext
from lightning_fastft.packing.document import IGNORED_LABEL
from lightning_fastft.patches.guards import refuse_hidden_tokens
from lightning_fastft.patches.head import drop_border_labels
from lightning_fastft.patches.rotary import forget_lengths

STATUS_NAME = "packed attention"


def install_one_by_one(model: PreTrainedModel, patcher: ModelPatcher) -> Status:
    """Make a model run the documents of a packed batch one at a time with its own attention.

    Returns:
        Status "packed attention", inactive.

    Raises:
        UnsupportedModelError: The model is sharded, so ranks with different numbers of documents would deadlock; or
            its loss has a term that cannot be computed from logits.
    """
    name = type(model).__name__
    if is_sharded(model):
        raise UnsupportedModelError(
            f"{name} is sharded over ranks, whose packs have different numbers of documents, so attention="
            f"{ONE_BY_ONE!r} would deadlock. Use strategy='fastft' or 'fastft_ddp'."
        )
    if getattr(model.config.get_text_config(decoder=True), "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name} adds an auxiliary loss of its routers (output_router_logits), which attention={ONE_BY_ONE!r} "
            "would ignore. Set config.output_router_logits = False."
        )
    if not runs_one_by_one(model):
        patcher.set_attribute(model, "forward", functools.partial(_forward_one_by_one, model))
    return Status(
        STATUS_NAME,
        "inactive",
        f"{model.config.model_type}: each document of a pack runs separately with the model's own attention "
        f"(attention={ONE_BY_ONE!r})",
    )


def runs_one_by_one(model: PreTrainedModel) -> bool:
    """Return whether ``install_one_by_one`` has changed the model."""
    return getattr(vars(model).get("forward"), "func", None) is _forward_one_by_one


def _forward_one_by_one(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the documents of a packed batch one at a time; other calls run the model's own forward.

    The loss is transformers' loss for causal language models, not the model's own formula. The logits are in pack
    order.

    Raises:
        UnsupportedModelError: A packed batch has inputs that cannot be split by documents, or positions of the caller's
            own.
        BackendError: A mask of the caller's own hides tokens of documents.

    Cost:
        One forward per document, and the logits of all tokens. One host sync.
    """
    own_forward, context = type(model).forward, kwargs.get("context")
    if not isinstance(context, BatchContext):
        return own_forward(model, *args, **kwargs)
    more = sorted(name for name, value in kwargs.items() if value is not None and name not in PackedBatch._KEYS)
    if args or more:
        raise UnsupportedModelError(
            f"{type(model).__name__} runs the documents of a pack one by one and takes no other input, but "
            f"got {', '.join(more) or 'positional arguments'}."
        )
    refuse_hidden_tokens(model, args, kwargs)
    positions = kwargs.get("position_ids")
    if positions is not None and (positions != context.position_T.to(positions.device)).any():
        raise UnsupportedModelError(
            f"{type(model).__name__} runs the documents of a pack one by one at their own positions, but position_ids "
            "was changed. Pass the position_ids of the batch."
        )
    context.note_read(ONE_BY_ONE)
    rows = kwargs["input_ids"].split(context.lengths, dim=1)
    parts = []
    for ids, prefix in zip(rows, context.prefixes):
        forget_lengths(model)
        whole = ids if prefix < 0 else torch.cat([rows[prefix], ids], dim=1)
        parts.append(own_forward(model, input_ids=whole, use_cache=False).logits[:, -ids.shape[1] :])
    logits, labels = torch.cat(parts, dim=1), kwargs.get("labels")
    loss = None
    if labels is not None:
        labels = drop_border_labels(labels, context)
        num_items = kwargs.get("num_items_in_batch")
        num_items = (labels != IGNORED_LABEL).sum().clamp(min=1) if num_items is None else num_items
        loss = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=num_items)
    return CausalLMOutput(loss=loss, logits=logits)
