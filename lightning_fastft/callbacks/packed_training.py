"""PackedTraining: packed attention, the lazy head and the activation policy under any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.status import Status, render_status_table
from lightning_fastft.strategies.mixin import FastFTStrategyMixin
from lightning_fastft.strategies.packed_steps import (
    CheckRead,
    PackedSteps,
    check_loaders,
    collect_statuses,
    environment_of,
)
from lightning_fastft.strategies.patching import callbacks_of, patcher_of

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastft.activations.checkpointing import OffloadCheckpointing


class PackedTraining(GivenOnce, Callback):
    """Prepare every transformers model in the LightningModule for packed batches, under a strategy of Lightning.

    It does what ``strategy="fastft"`` does. Modules are swapped once the model is built and restored when the run ends,
    also after an exception; parameters and state-dict keys do not change. A packed batch that no attention layer reads
    is refused before its backward. Under a strategy of lightning_fastft the callback is inactive.

    Args:
        attention: Backend of packed attention; "auto" chooses by device, head shape and longest document. "one_by_one"
            runs the documents of a pack one at a time with the model's own attention: exact for every family, and slow.
        activations: How activations are kept, offloaded or recomputed; None keeps the model's own checkpointing.

    Raises:
        OptionError: Options are given under a strategy of lightning_fastft, which takes them itself. Or the Trainer has
            more than one PackedTraining.

    Example:
        >>> PackedTraining().status()
        []
    """

    def __init__(self, *, attention: str = "auto", activations: OffloadCheckpointing | None = None) -> None:
        self.packed_steps = PackedSteps(attention=attention, activations=activations)
        self._is_redundant = False
        self._check_read: CheckRead | None = None

    def status(self) -> list[Status]:
        """Return the statuses for the table of the run."""
        if self._is_redundant:
            return [
                Status(
                    "PackedTraining", "inactive", "the strategy installs packed training itself", "remove the callback"
                )
            ]
        return self.packed_steps.statuses()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check whether the strategy installs packed training itself; refuse a second callback of this class."""
        super().setup(trainer, pl_module, stage)
        self._is_redundant = isinstance(trainer.strategy, FastFTStrategyMixin)
        if self._is_redundant and (self.packed_steps.activations is not None or self.packed_steps.attention != "auto"):
            raise OptionError(
                f"{type(trainer.strategy).__name__} installs packed training itself and would ignore the options of "
                "PackedTraining: remove the callback and pass attention= and activations= to the strategy."
            )
        self._precede_searches(trainer)
        # A step that failed is forgotten when the run ends.
        patcher_of(trainer).set_attribute(self, "_check_read", None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install before sanity validation, after configure_model."""
        self._install(trainer, pl_module)
        self.packed_steps.check_documents()
        self.packed_steps.place(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is active."""
        if not self._is_redundant:
            check_loaders(trainer)
            self.packed_steps.check_training_mode()
            rank_zero_info("\n" + render_status_table(collect_statuses(trainer, [])))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install for ``trainer.validate``."""
        self._install(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the reads of the context before the step."""
        self._begin(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Refuse a step whose packed batch no attention layer read."""
        self._check(pl_module, where="training_step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Check a step of manual optimization, whose backward Lightning may not see."""
        if not pl_module.automatic_optimization:
            self._check(pl_module, where="training_step")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the reads of the context before the step."""
        self._begin(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Refuse a step whose packed batch no attention layer read."""
        self._check(pl_module, where="validation_step")

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Refuse a step whose packed batch no attention layer read."""
        self._check(pl_module, where="test_step")

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Refuse a step whose packed batch no attention layer read."""
        self._check(pl_module, where="predict_step")

    def _precede_searches(self, trainer: Trainer) -> None:
        """Move before Lightning's searches, which train in the first hook after the model is built."""
        callbacks = callbacks_of(trainer)
        searches = [
            index
            for index, callback in enumerate(callbacks)
            if isinstance(callback, (LearningRateFinder, BatchSizeFinder))
        ]
        if searches and searches[0] < callbacks.index(self):
            # A new list, because Lightning iterates over the current one.
            others = [callback for callback in callbacks if callback is not self]
            trainer.callbacks = [*others[: searches[0]], self, *others[searches[0] :]]  # type: ignore[attr-defined]

    def _install(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_redundant:
            self.packed_steps.install(pl_module, patcher_of(trainer), environment_of(trainer))

    def _begin(self, batch: Any) -> None:
        self._check_read = None if self._is_redundant else self.packed_steps.begin(batch)

    def _check(self, pl_module: LightningModule, *, where: str) -> None:
        check_read, self._check_read = self._check_read, None
        if check_read is not None:
            check_read(pl_module, where=where)
