"""Refuse ranks with different numbers of batches, before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import DataError
from lightning_fastft.core.status import Status
from lightning_fastft.packing.loader import ENDLESS

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

STATUS_NAME = "even batches"


def check_even_batches(trainer: Trainer) -> Status:
    """Compare the number of training batches per epoch over all ranks. Every rank must call this.

    It is called in ``on_train_start``. A rank that ends its epoch before the others leaves them waiting for its
    gradients.

    Args:
        trainer: Its ``num_training_batches`` are compared: the length of the loader under ``limit_train_batches``.

    Returns:
        A status with the number, or with the reason why it is unknown.

    Raises:
        DataError: The numbers differ; the message lists all of them, on every rank.

    Cost:
        One all-gather of a number per rank, once per run.
    """
    if trainer.world_size == 1:
        return Status(STATUS_NAME, "inactive", "one rank")
    found = on_all_ranks(lambda: trainer.num_training_batches, error=DataError)
    if len(set(found)) > 1:
        counts = ", ".join(
            f"rank {rank}: {'no length' if count == float('inf') else int(count)}" for rank, count in enumerate(found)
        )
        fewest = int(min(found))
        raise DataError(
            f"The ranks have different numbers of training batches per epoch ({counts}): the ranks with fewer would "
            "leave the others waiting for their gradients. Give every rank the same number, as PackedDataModule does, "
            f"or set Trainer(limit_train_batches={fewest})."
        )
    if found[0] == float("inf"):
        remedy = (
            "give the loader a length, or set Trainer(limit_train_batches=...); Watchdog ends a run whose ranks wait "
            "for each other"
        )
        return Status(
            STATUS_NAME,
            "inactive",
            "the loader has no length, so the number of batches per rank is unknown",
            remedy,
        )
    if found[0] >= ENDLESS:
        return Status(STATUS_NAME, "active", f"batches without an end on each of {len(found)} ranks")
    return Status(STATUS_NAME, "active", f"{int(found[0])} per epoch on each of {len(found)} ranks")
