"""CommandRecord: keep the command of a run in its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_fastft.cli.trained.opening import COMMAND_KEY
from lightning_fastft.monitor.report.facts import describe_command


class CommandRecord(Callback):
    """Write the command line without its secrets into every checkpoint, for the model card of an export.

    Args:
        words: Words of the command line without the name of the program.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._command = describe_command(["fastft", *words])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the command."""
        checkpoint[COMMAND_KEY] = self._command
