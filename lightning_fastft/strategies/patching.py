"""The one patcher of a Trainer's run, which is undone however the run ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback

from lightning_fastft.core.patcher import ModelPatcher

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a Trainer, whose type does not declare them."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return callbacks


def patcher_of(trainer: Trainer) -> ModelPatcher:
    """Return the patcher of a Trainer's present run; the first call creates it.

    Strategies, FineTuner and callbacks record all their changes in this one patcher: changes of the model, and of the
    process (signal handlers, a watchdog process, patched methods of torch). The changes are undone in reverse order
    when the run ends: before the ``teardown`` of every callback, or, after an exception or an interrupt, before any
    callback's ``on_exception``. So an error in one of these callbacks cannot leave changes behind.
    """
    callbacks = callbacks_of(trainer)
    for callback in callbacks:
        if isinstance(callback, _UndoPatches):
            return callback.patcher
    undo = _UndoPatches()
    # A new list: Lightning may be iterating over the present one.
    trainer.callbacks = [undo, *callbacks]  # type: ignore[attr-defined]
    return undo.patcher


class _UndoPatches(Callback):
    """Undo the patches of a run. It is the first of the Trainer's callbacks, and is removed when the run ends."""

    def __init__(self) -> None:
        self.patcher = ModelPatcher()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._undo(trainer)

    def _undo(self, trainer: Trainer) -> None:
        remaining = [callback for callback in callbacks_of(trainer) if callback is not self]
        trainer.callbacks = remaining  # type: ignore[attr-defined]
        self.patcher.undo()
