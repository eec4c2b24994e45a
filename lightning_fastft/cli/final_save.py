"""FinalSave: save the last step of a run, where ModelCheckpoint has saved only earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fastft.checkpoint.lightning_internals import save_last_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class FinalSave(Callback):
    """Let each ModelCheckpoint save the last step of the run, unless it keeps only the best values of a metric.

    ModelCheckpoint saves after a validation, or every so many steps or epochs. Without this callback the steps after
    that would be lost, and a run that ends before its first validation would save nothing.
    """

    def __init__(self) -> None:
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the step at which the run begins."""
        self._first_step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the step at which the run ends, if it has trained any."""
        if trainer.global_step == self._first_step:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                save_last_step(trainer, callback)
