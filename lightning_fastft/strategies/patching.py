"""The one patcher of a Trainer's run, and its undo however the run ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback

from lightning_fastft.core.patcher import ModelPatcher

if TYPE_CHECKING:
    import lightning.pytorch as pl


def patcher_of(trainer: pl.Trainer) -> ModelPatcher:
    """Return the patcher of a Trainer's present run; the first call makes it.

    Strategies, FineTuner and callbacks record in this one patcher what they change: in the model, and in the process
    (signal handlers, a watchdog process, patched methods of torch). It is undone in reverse order when the run ends:
    before the ``teardown`` of every callback, or, after an exception or an interrupt, before any callback's
    ``on_exception``, so that an error in one of these cannot leave changes behind.
    """
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if isinstance(callback, _UndoPatches):
            return callback.patcher
    undo = _UndoPatches()
    # A new list: Lightning may be iterating over the present one.
    trainer.callbacks = [undo, *callbacks]  # type: ignore[attr-defined]
    return undo.patcher


class _UndoPatches(Callback):
    """Undo the patches of a run; the first of the Trainer's callbacks, and gone when the run has ended."""

    def __init__(self) -> None:
        self.patcher = ModelPatcher()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo(trainer)

    def _undo(self, trainer: pl.Trainer) -> None:
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        trainer.callbacks = [callback for callback in callbacks if callback is not self]  # type: ignore[attr-defined]
        self.patcher.undo()
