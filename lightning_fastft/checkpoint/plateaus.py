"""ResumedPlateaus: what ReduceLROnPlateau reads at the end of an epoch, in checkpoints of that epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.lightning_internals import batch_progress, end_restart, restore_metrics
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import FastFTError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ResumedPlateaus:
    """Let ReduceLROnPlateau move once per epoch, also in the epoch in which a run is resumed.

    Lightning (2.6.6) leaves these schedulers as they are at the end of that epoch, because its checkpoints have no
    metrics. A checkpoint gets the metrics that they monitor. One of the end of an epoch, such as those of a
    ModelCheckpoint after the validation, also gets the schedulers that move next: they move when the run is resumed.
    """

    def __init__(self) -> None:
        # Whether the metrics of the validation after the latest batch are complete.
        self._has_validated = False
        self._has_ended = False
        self._loaded: Mapping[str, Any] = {}

    def note(self, *, has_validated: bool) -> None:
        """Record that a validation is complete, or that a batch or a validation begins."""
        self._has_validated = has_validated

    def note_end(self) -> None:
        """Record the end of training, after which no scheduler is due."""
        self._has_ended = True

    def save(self, trainer: Trainer) -> dict[str, Any]:
        """Return the state for a checkpoint, in plain types. Every rank must call this."""
        found = {number: each for number, each in enumerate(trainer.lr_scheduler_configs) if each.reduce_on_plateau}
        if not found:
            return {}
        metrics = trainer.callback_metrics
        names = {each.monitor for each in found.values() if each.monitor in metrics}
        of_ranks = on_all_ranks(lambda: {name: float(metrics[name]) for name in names}, error=FastFTError)
        values = {}
        for name in sorted(names):
            of_name = [own[name] for own in of_ranks if name in own]
            values[name] = sum(of_name) / len(of_name)
        batches, loop = batch_progress(trainer).current, cast("Any", trainer.fit_loop)
        epochs = loop.epoch_progress.current
        is_over = loop.epoch_loop._num_ready_batches_reached() and batches.processed == batches.ready
        is_at_end = is_over and not self._has_ended and epochs.completed < epochs.started
        is_due = is_at_end and (self._has_validated or epochs.processed > epochs.completed)
        due = [
            number
            for number, each in found.items()
            if each.interval == "epoch" and each.monitor in values and (trainer.current_epoch + 1) % each.frequency == 0
        ]
        by_epoch = any(each.interval == "epoch" for each in found.values())
        return {
            "values": values,
            "due": due if is_due else [],
            # From these, Lightning ends the epoch again; from others it goes on with training.
            "continues": not (is_at_end and (is_due or trainer.validating)),
            "is_lost": bool(is_at_end and not is_due and by_epoch),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self._loaded = state

    def start(self, trainer: Trainer) -> None:
        """Give a resumed run its metrics, and move the schedulers that were due; call it in ``on_train_start``."""
        device = trainer.strategy.root_device
        values = {name: torch.tensor(value, device=device) for name, value in self._loaded.get("values", {}).items()}
        restore_metrics(trainer, values)
        if self._loaded.get("is_lost", False):
            rank_zero_warn(
                "The checkpoint was written between the last batch of an epoch and the end of its validation. "
                "ReduceLROnPlateau does not move for that epoch, because Lightning does not validate it again."
            )
        configs = trainer.lr_scheduler_configs
        for number in self._loaded.get("due", ()):
            if number < len(configs) and configs[number].reduce_on_plateau:
                trainer.lightning_module.lr_scheduler_step(
                    configs[number].scheduler, values.get(str(configs[number].monitor))
                )

    def end_epoch(self, trainer: Trainer) -> None:
        """Have the schedulers move at the end of the first epoch; call it in ``on_train_epoch_end``."""
        if self._loaded.get("continues", False):
            end_restart(trainer)
        self._loaded = {}
