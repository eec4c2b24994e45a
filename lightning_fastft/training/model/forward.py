"""Forward passes on packed batches, and what a loss or a prediction reads from them.

Axes: R labelled rows of a pack, S documents of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_fastft.core.errors import ContextError, DataError
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.context import BatchContext

if TYPE_CHECKING:
    from lightning_fastft.patches.lazy_logits import LazyLogits

ReadT = TypeVar("ReadT")


def call_model(model: Any, batch: PackedBatch | Mapping[str, Any]) -> Any:
    """Return the output of a model, and check that a packed batch was read as packed.

    Raises:
        DataError: The batch has no tokens.
        ContextError: No attention layer read the context of a pack of several documents.
    """
    if not isinstance(batch, PackedBatch):
        _check_tokens(batch)
        return model(**batch)
    num_reads = batch.context.num_reads
    output = model(**batch)
    if batch.context.num_documents > 1 and batch.context.num_reads == num_reads:
        raise ContextError(
            f"No attention layer of {type(model).__name__} read the context of a packed batch: its documents saw each "
            "other. Use Trainer(strategy='fastft'), or add the callback PackedTraining() under another strategy."
        )
    return output


def _check_tokens(batch: Any) -> None:
    """Check that a batch of a loader of the user's own can be given to a model."""
    is_mapping = isinstance(batch, Mapping)
    if is_mapping and ("input_ids" in batch or "inputs_embeds" in batch):
        return
    found = f"one with {', '.join(map(str, batch)) or 'nothing'}" if is_mapping else type(batch).__name__
    raise DataError(
        f"A batch must be a mapping with input_ids, got {found}. Rows of text are not tokenised by the Trainer: give "
        "them to PackedDataModule, and call trainer.fit(model, datamodule=PackedDataModule(rows))."
    )


def run_objective(model: Any, batch: PackedBatch, objective: Callable[[LazyLogits], torch.Tensor]) -> torch.Tensor:
    """Return the 0-dim loss that an objective computes from the logits of a packed batch.

    The objective runs inside the model's forward, where the head's weight is whole also if the model is sharded.
    """
    batch.context.objective = objective
    try:
        loss: torch.Tensor = call_model(model, batch).loss
    finally:
        batch.context.objective = None
    return loss


@torch.no_grad()
def read_logits(model: Any, batch: PackedBatch, read: Callable[[LazyLogits], ReadT]) -> ReadT:
    """Return what a function reads from the lazy logits of a model, without a graph."""
    found: list[ReadT] = []

    def objective(logits: LazyLogits) -> torch.Tensor:
        found.append(read(logits))
        return logits.hidden.new_zeros(())

    run_objective(model, batch, objective)
    return found[0]


def sum_per_document(log_prob_R: torch.Tensor, context: BatchContext) -> torch.Tensor:
    """Return the log-probability of the labelled tokens of each document, shape (S,); the pad tail is not counted."""
    num_documents = int((context.start_host_S1[:-1] < context.num_real_tokens).sum())
    # Labelled rows ascend, so those of a document are neighbours.
    row_R = context.labelled_row_R[: context.num_labelled]
    offset_S1 = torch.searchsorted(row_R, context.start_S1[: num_documents + 1].long())
    return torch.segment_reduce(log_prob_R[: context.num_labelled], "sum", offsets=offset_S1, unsafe=True, initial=0.0)
