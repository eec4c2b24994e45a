"""The lazy head: for a packed batch, compute logits of labelled rows only, in chunks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_fastft.core.errors import ContextError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.core.status import Status
from lightning_fastft.hf.families import find_decoder
from lightning_fastft.kernels.cross_entropy.op import labelled_cross_entropy, token_statistics
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.document import IGNORED_LABEL, is_untouched_view
from lightning_fastft.patches.lazy_logits import LazyLogits
from lightning_fastft.patches.part_exchange import sum_over_parts

STATUS_NAME = "loss head"
# Plain attribute of the swapped head: neither parameter nor buffer.
_LINK_ATTRIBUTE = "fastft_head_link"


class _LazyForward:
    """The forward of an output layer that returns ``LazyLogits`` for the call that a packed batch armed."""

    weight: Any
    bias: Any

    def forward(self, input: torch.Tensor) -> Any:
        """Return the logits, or ``LazyLogits``."""
        link: HeadLink = vars(self)[_LINK_ATTRIBUTE]
        context = link.disarm()
        # Sliced states (logits_to_keep) no longer match the rows of the context.
        is_whole = context is not None and input.ndim >= 2 and input.shape[:-1].numel() == context.num_tokens
        # Backward hooks of a module run on the gradient of the tensor that it returns.
        if context is None or not is_whole or vars(self)["_backward_hooks"] or vars(self)["_backward_pre_hooks"]:
            return super().forward(input)  # type: ignore[misc]
        return LazyLogits(hidden=input, weight=self.device_weight(), bias=self.bias, context=context)

    def device_weight(self) -> torch.Tensor:
        """Return the weight on the device of the states."""
        return self.weight


class LazyHead(_LazyForward, nn.Linear):
    """An output layer that returns ``LazyLogits`` for the call that a packed batch armed, else a tensor."""


class LazyTokenHead(_LazyForward, TrainableTokensWrapper):
    """The same for PEFT's wrapper around a head with trained rows, whose ``weight`` has these rows in their places."""

    # PEFT computes the logits without a bias.
    bias = None


_LAZY = (LazyHead, LazyTokenHead)


class HeadLink:
    """Connect the three patches of one model: the hook that gets the context, the head, and the loss function."""

    def __init__(self, *, original_loss: Callable[..., torch.Tensor]) -> None:
        self.original_loss = original_loss
        self._armed: BatchContext | None = None
        # The context of this call, also where the head gives tensor logits.
        self._context: BatchContext | None = None
        self._has_told_of_labels = False

    def arm(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Arm the head for this call if there is a context, else disarm it, in a forward pre-hook of the decoder."""
        context = kwargs.get("context")
        self._armed = None
        self._context = context if isinstance(context, BatchContext) else None
        if isinstance(context, BatchContext) and not (context.output_logits or kwargs.get("output_logits", False)):
            self._armed = context

    def disarm(self) -> BatchContext | None:
        """Return the context that armed the head, once."""
        context, self._armed = self._armed, None
        return context

    def loss(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: float | torch.Tensor | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the loss of the model, from labelled rows if the logits are lazy; same signature as in transformers.

        Labels of the caller's own lose those at borders of documents (``drop_border_labels``).

        Raises:
            ContextError: The context has an objective, and the logits are a tensor; or the batch is a part of a pack,
                and the loss is not that of its own labels.
        """
        context, self._context = self._context, None
        objective, part = (None, None) if context is None else (context.objective, context.part)
        is_own = isinstance(logits, LazyLogits) and is_untouched_view(labels, of=logits.context.label_T)
        if part is not None and (objective is not None or shift_labels is not None or not is_own):
            raise ContextError(
                "Under context parallelism the loss is the cross-entropy of the pack's own labels: the label of the "
                "last row of a part is in the next part. Remove the objective, output_logits, logits_to_keep or the "
                "changed labels, or set context_parallel=1."
            )
        if objective is not None:
            if not isinstance(logits, LazyLogits):
                raise ContextError(
                    "context.objective needs lazy logits, but this model computed a tensor. Remove output_logits and "
                    "logits_to_keep."
                )
            return objective(logits)
        if context is not None and shift_labels is None and not is_untouched_view(labels, of=context.label_T):
            labels = drop_border_labels(labels, context)
            self._tell_of_labels(num_items_in_batch, context)
        rest = {
            "num_items_in_batch": num_items_in_batch,
            "ignore_index": ignore_index,
            "shift_labels": shift_labels,
            **kwargs,
        }
        if not isinstance(logits, LazyLogits):
            return self.original_loss(logits, labels, vocab_size, **rest)
        is_other = ignore_index != IGNORED_LABEL or vocab_size != logits.weight.shape[0]
        if is_other or logits.scale == 0 or logits.is_changed:
            return self.original_loss(logits.tensor(), labels, vocab_size, **rest)
        row_R, target_R, num_rows, num_labelled = _find_targets(logits, labels=labels, shift_labels=shift_labels)
        if num_items_in_batch is None:
            num_items_in_batch = _at_least_one(num_labelled if part is None else part.whole.num_labelled)
        num_items = num_items_in_batch
        if isinstance(num_items, torch.Tensor) and not (num_items.device.type == "cpu" and num_items.ndim == 0):
            # A number stays on the host; kernels take it as an argument.
            num_items = num_items.to(logits.device, non_blocking=True)
        loss = _labelled_loss(logits, row_R, target_R, num_rows, num_labelled=num_labelled, num_items=num_items)
        loss = loss if part is None else sum_over_parts(loss, part=part)
        # Models add auxiliary losses in place.
        logits.cross_entropy = loss.detach().clone()
        return loss

    def _tell_of_labels(self, num_items: object, context: BatchContext) -> None:
        """Warn once if changed labels are divided by the number of labels that were planned."""
        is_planned = isinstance(num_items, float) and num_items == context.num_items
        if self._has_told_of_labels or not is_planned or not torch.is_grad_enabled():
            return
        self._has_told_of_labels = True
        warnings.warn(
            "The labels of a packed batch were changed, and its loss is still divided by num_items_in_batch, the "
            "number of labels in the data. For the mean over the changed labels of the pack, give the model "
            "num_items_in_batch=None; or give it your own number.",
            stacklevel=2,
        )


def drop_border_labels(labels: torch.Tensor, context: BatchContext) -> torch.Tensor:
    """Return labels of a whole pack without those that no token predicts: the first of each document, and those of the
    pad tail. Labels of another size are returned as they are.

    Those of the context have none. ``labels = input_ids.clone()`` has all.

    Cost:
        Two passes over the labels; no host sync.
    """
    if labels.numel() != context.num_tokens:
        return labels
    label_T = labels.reshape(-1).index_fill(0, context.start_S1[:-1].to(labels.device, torch.int64), IGNORED_LABEL)
    label_T[context.num_real_tokens :] = IGNORED_LABEL
    return label_T.view(labels.shape)


def install_head(model: PreTrainedModel, patcher: ModelPatcher) -> Status:
    """Make a model compute its loss on labelled rows only when it gets a packed batch.

    The output layer becomes a ``LazyHead`` that shares the parameters of the old one, the decoder gets a forward
    pre-hook that reads the context, and the loss function of the model is replaced. Without a context (generation,
    padded evaluation) the model behaves as before. ``context.output_logits`` and the keyword ``output_logits=True``
    request tensor logits for one call.

    Returns:
        Active; or inactive with the reason if nothing was changed.

    Cost:
        None for the installation. A step computes num_labelled x V logits in chunks instead of T x V at once.
    """
    found = _find_head(model)
    if isinstance(found, Status):
        return found
    heads, decoder = found
    if isinstance(heads[0], _LAZY):
        return Status(STATUS_NAME, "active", "installed already")
    link = HeadLink(original_loss=model.loss_function)
    names = {id(module): name for name, module in model.named_modules()}
    for head in heads:
        new = share_state(head, LazyHead if isinstance(head, nn.Linear) else LazyTokenHead)
        patcher.replace_module(model, names[id(head)], new)
        patcher.set_attribute(new, _LINK_ATTRIBUTE, link)
    patcher.set_attribute(model, "_loss_function", link.loss)
    # Some models call the inner decoder directly, not their base model (opt).
    for announcer in dict.fromkeys((decoder, find_decoder(model))):
        handle = announcer.register_forward_pre_hook(link.arm, with_kwargs=True)
        patcher.add_undo(handle.remove)
    weight: Any = heads[0].weight
    return Status(STATUS_NAME, "active", f"logits of labelled rows in chunks, V = {weight.shape[0]}")


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer runs another forward than that of its class, which a swap of the layer does not change."""
    return "forward" in vars(layer) or layer._compiled_call_impl is not None


def check_objective(model: PreTrainedModel) -> None:
    """Check that the head of a model is lazy, which an objective of a packed batch needs.

    Args:
        model: A Hugging Face causal language model after ``install_head``, also inside a PEFT model.

    Raises:
        UnsupportedModelError: The head is not lazy, so the model would train cross-entropy.
    """
    found = _find_head(model)
    if not isinstance(found, Status):
        if isinstance(found[0][0], _LAZY):
            return
        remedy = "Run packed training without attention='one_by_one'."
        found = Status(STATUS_NAME, "inactive", "it is not installed", remedy)
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot train on log-probabilities of packed batches, because its {STATUS_NAME} is "
        f"{found.state}: {found.reason}. {found.remedy}".rstrip()
    )


def _find_head(model: PreTrainedModel) -> tuple[list[nn.Module], nn.Module] | Status:
    """Return the output layer and the decoder that runs before it; or why the model is not supported.

    PEFT's modules_to_save gives several layers: the original one, and the copies that are trained in its place.
    """
    head, decoder = model.get_output_embeddings(), model.base_model
    if head is None:
        return Status(STATUS_NAME, "inactive", f"{type(model).__name__} has no output layer")
    heads: list[Any] = [head]
    if type(head) is ModulesToSaveWrapper:
        heads = [*head.modules_to_save.values(), head.original_module]
    plain = nn.Linear, TrainableTokensWrapper
    other = next((layer for layer in heads if type(layer) not in plain and not isinstance(layer, _LAZY)), None)
    if other is not None:
        if "peft" in type(head).__module__:
            remedy = "Remove lm_head from target_modules to get it."
            return Status(STATUS_NAME, "inactive", "the output layer has an adapter", remedy)
        return Status(
            STATUS_NAME, "inactive", f"the output layer is a {type(other).__name__}, not a plain linear layer"
        )
    if any(map(has_own_forward, heads)):
        return Status(STATUS_NAME, "inactive", "the output layer's forward was replaced or compiled on this instance")
    if decoder is model:
        return Status(STATUS_NAME, "inactive", f"{type(model).__name__} has no decoder apart from its output layer")
    if not isinstance(heads[0], _LAZY) and model.loss_function is not ForCausalLMLoss:
        return Status(
            STATUS_NAME,
            "inactive",
            f"the model computes its loss with {getattr(model.loss_function, '__name__', model.loss_function)}",
        )
    return heads, decoder


def _find_targets(
    logits: LazyLogits, *, labels: torch.Tensor, shift_labels: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor, int, int | torch.Tensor]:
    """Return labelled rows of the flattened hidden states, their targets, their number, and the number of labels.

    The rows are the context's if the labels are the context's own, else all rows of the labels.
    """
    context = logits.context
    if shift_labels is None and is_untouched_view(labels, of=context.label_T):
        return context.labelled_row_R, context.labelled_target_R, context.num_labelled, context.num_labelled
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    target_R = shift_labels.reshape(-1).to(logits.device, non_blocking=True)
    return None, target_R, target_R.shape[0], (target_R != IGNORED_LABEL).sum()


# torch 2.11 loses the weight of the head where a trace goes on behind a break of the graph.
@torch.compiler.disable
def _labelled_loss(
    logits: LazyLogits,
    row_R: torch.Tensor | None,
    target_R: torch.Tensor,
    num_rows: int,
    *,
    num_labelled: int | torch.Tensor,
    num_items: float | torch.Tensor,
) -> torch.Tensor:
    """Return the cross-entropy of labelled rows; without gradients also note their statistics."""
    head = logits.as_head()
    rows: dict[str, Any] = {"row_R": row_R, "target_R": target_R, "num_rows": num_rows}
    if torch.is_grad_enabled():
        return labelled_cross_entropy(head, **rows, num_items=num_items)
    nll_sum, num_correct = token_statistics(head, **rows)
    logits.statistics = nll_sum, num_correct, num_labelled
    return nll_sum / num_items


def _at_least_one(count: int | torch.Tensor) -> int | torch.Tensor:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(1, count)
