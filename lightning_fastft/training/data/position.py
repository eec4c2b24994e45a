"""Positions in checkpoints: whether one belongs to the plan of this run, whether all ranks have one plan, and the
documents that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.document import Document

# Begins the identity of the data in a checkpoint; older versions wrote other ones.
BY_CONTENT = "tokens:"
# Parts of a plan's identity that may change between a checkpoint and its resumption, and the part that follows from
# them.
SIZES, EPOCH_SIZE = ("world_size", "accumulate_grad_batches"), "micro_batches_per_epoch"


def compare_plans(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, bool]:
    """Describe the differences of two plan descriptions; return also whether only sizes differ.

    Warn where data cannot be compared.
    """
    if "data" in saved and not str(saved["data"]).startswith(BY_CONTENT):
        rank_zero_warn(
            "The checkpoint names its data by path and time, as older versions did. It cannot be checked that the data "
            "is the same."
        )
        saved = {**saved, "data": current["data"]}
    changed = [name for name, value in current.items() if saved.get(name) != value]
    lines = [f"{name} was {saved.get(name)!r} and is {current[name]!r}" for name in changed]
    return "; ".join(lines), bool(set(changed) & {*SIZES}) and set(changed) <= {*SIZES, EPOCH_SIZE}


def check_ranks_agree(description: Mapping[str, Any]) -> None:
    """Stop all ranks before the first step if one of them read other data: uneven ranks hang until a timeout.

    Raises:
        DataError: Plans differ.
    """
    descriptions = on_all_ranks(lambda: description, error=DataError)
    for rank, other in enumerate(descriptions):
        if other != descriptions[0]:
            raise DataError(f"Rank 0 plans {descriptions[0]}, rank {rank} plans {other}. Give all ranks the same data.")


def to_plain(document: Document) -> dict[str, Any]:
    """Return a document without images as tensors and plain types, for a checkpoint."""
    return {
        "input_ids": torch.from_numpy(document.input_ids),
        "labels": torch.from_numpy(document.labels),
        "segment_lengths": list(document.segment_lengths),
        "scores": list(document.scores),
        "log_probs": None if document.log_probs is None else torch.from_numpy(document.log_probs),
    }


def from_plain(values: Mapping[str, Any]) -> Document:
    """Return the document of ``to_plain``."""
    log_probs = values["log_probs"]
    return Document(
        values["input_ids"].numpy(),
        values["labels"].numpy(),
        segment_lengths=tuple(values["segment_lengths"]),
        scores=tuple(values["scores"]),
        log_probs=None if log_probs is None else log_probs.numpy(),
    )
