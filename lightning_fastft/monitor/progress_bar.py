"""FastFTProgressBar: loss and tokens per second on the bar, without a host wait per step."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.checks import check_bool, check_int
from lightning_fastft.strategies.packed_steps import find_packed_batches

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Tokens per second are those of the last so many micro-batches that the device has finished.
NUM_BATCHES_IN_RATE = 20


class FastFTProgressBar(TQDMProgressBar):
    """Show the loss of the last optimizer step that the device has finished, tokens per second, and what validation
    logs with ``prog_bar=True``.

    The loss of a step is the mean over the micro-batches of its window. It is made on the device from what
    training_step returned, copied into pinned memory and shown once it is there, usually one step late. Values that the
    module logs with ``prog_bar=True`` in training are not shown: Lightning reads those on every step, whichever bar is
    used, and each read waits for the device; log without it.

    Args:
        refresh_rate: Micro-batches between two updates of the bar; 0 turns the bar off.
        process_position: As in Lightning.
        leave: As in Lightning.

    Raises:
        OptionError: A value is not allowed.

    Cost:
        One small copy per refresh, with accumulation one addition per micro-batch; no host synchronisation in training.
        Validation values are read once, after a validation.

    Example:
        >>> FastFTProgressBar(refresh_rate=0).is_enabled
        False
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        check_int("refresh_rate", refresh_rate, low=0)
        check_int("process_position", process_position, low=0)
        check_bool("leave", leave)
        super().__init__(refresh_rate=refresh_rate, process_position=process_position, leave=leave)
        self._copies = AsyncScalarReader()
        self._shown: dict[str, float] = {}
        self._num_tokens = self._last_global_step = self._num_summed = 0
        # Names that are on the bar before a validation, and those that validations put there.
        self._names_before: frozenset[str] = frozenset()
        self._validation_names: set[str] = set()
        # On the device: the sum over the micro-batches of the window so far, and the loss of the last step until it is
        # copied.
        self._sum: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None
        self._finished: deque[tuple[float, int]] = deque(maxlen=NUM_BATCHES_IN_RATE + 1)

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Begin a fresh bar."""
        self._drop()
        self._shown, self._num_tokens, self._last_global_step = {}, 0, trainer.global_step
        self._finished.clear()
        super().on_train_start(trainer, *args)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Send the loss on its way, take in what has arrived, and update the bar."""
        self._num_tokens += sum(found.context.num_real_tokens for found in find_packed_batches(batch))
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if self.is_enabled and isinstance(loss, torch.Tensor):
            self._add(trainer, loss.detach())
            if (batch_idx + 1) % self.refresh_rate == 0:
                has_loss, value = self._loss is not None, loss if self._loss is None else self._loss
                self._loss = None
                # Inside a window too: that the device has come so far is what tokens per second are counted by.
                self._copies.push((self._num_tokens, has_loss), value)
        self._take_in()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note which values training has logged."""
        self._names_before = frozenset(trainer.progress_bar_metrics)
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the values of the validation that just ended, and drop the rate it cut through."""
        if not trainer.sanity_checking:
            values = trainer.progress_bar_metrics
            self._validation_names |= values.keys() - self._names_before
            self._shown.update({name: float(values[name]) for name in self._validation_names & values.keys()})
        self._finished.clear()
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, *args: Any) -> None:
        """Close the bar."""
        self._drop()
        super().on_train_end(*args)

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return what stands behind the bar: values that are on the host already."""
        return {name: _short(value) for name, value in self._shown.items()}

    def _drop(self) -> None:
        self._copies.clear()
        self._sum = self._loss = None
        self._num_summed = 0

    def _add(self, trainer: pl.Trainer, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch to its window; with the last of one, its mean is the loss of the step."""
        num_micro_batches = trainer.accumulate_grad_batches
        self._sum, self._num_summed = loss if self._sum is None else self._sum + loss, self._num_summed + 1
        if num_micro_batches > 1 and trainer.global_step == self._last_global_step:
            return
        # Lightning hands losses over divided by the micro-batches of a window, of which the last one of an epoch may
        # have fewer.
        is_whole = self._num_summed == num_micro_batches
        self._loss = self._sum if is_whole else self._sum * (num_micro_batches / self._num_summed)
        self._sum, self._num_summed, self._last_global_step = None, 0, trainer.global_step

    def _take_in(self) -> None:
        for (num_tokens, has_loss), loss in self._copies.poll():
            if has_loss:
                self._shown["loss"] = float(loss)
            self._finished.append((time.perf_counter(), num_tokens))
        if len(self._finished) > 1 and self._finished[-1][1] > self._finished[0][1]:
            (begin, num_before), (end, num_after) = self._finished[0], self._finished[-1]
            if end > begin:
                self._shown["tok/s"] = (num_after - num_before) / (end - begin)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
