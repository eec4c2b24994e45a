"""FastFTProgressBar: loss and tokens per second on the bar, without a host wait per step."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_fastft.callbacks.late_copy import LateCopies
from lightning_fastft.checks import check_bool, check_int
from lightning_fastft.strategies.packed_steps import find_packed_batches

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Tokens per second are those of the last so many micro-batches that the device has finished.
NUM_BATCHES_IN_RATE = 20


class FastFTProgressBar(TQDMProgressBar):
    """Show the loss of the last micro-batch that the device has finished, tokens per second, and the latest validation values.

    This bar copies the loss that training_step returned into pinned memory and shows it once it is there, usually one step late. Values that the
    module logs with ``prog_bar=True`` in training are not shown: Lightning reads those on every step, whichever bar is used, and each read waits for
    the device; log without it.

    Args:
        refresh_rate: Micro-batches between two updates of the bar; 0 turns the bar off.
        process_position: As in Lightning.
        leave: As in Lightning.

    Raises:
        OptionError: A value is not allowed.

    Cost:
        One small copy per refresh; no host synchronisation in training. Validation values are read once, after a validation.

    Example:
        >>> FastFTProgressBar(refresh_rate=0).is_enabled
        False
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        check_int("refresh_rate", refresh_rate, low=0)
        check_int("process_position", process_position, low=0)
        check_bool("leave", leave)
        super().__init__(refresh_rate=refresh_rate, process_position=process_position, leave=leave)
        self._copies = LateCopies()
        self._shown: dict[str, float] = {}
        self._num_tokens = 0
        self._finished: deque[tuple[float, int]] = deque(maxlen=NUM_BATCHES_IN_RATE + 1)

    def on_train_start(self, *args: Any) -> None:  # noqa: ANN401 - Lightning's hook arguments
        """Begin a fresh bar."""
        self._copies.clear()
        self._shown, self._num_tokens = {}, 0
        self._finished.clear()
        super().on_train_start(*args)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Send the loss on its way, take in what has arrived, and update the bar."""
        self._num_tokens += sum(found.context.num_real_tokens for found in find_packed_batches(batch))
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if self.is_enabled and isinstance(loss, torch.Tensor) and (batch_idx + 1) % self.refresh_rate == 0:
            # Lightning hands the loss over divided by the micro-batches of a window.
            self._copies.push((self._num_tokens, trainer.accumulate_grad_batches), loss)
        self._take_in()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the values of the validation that just ended, and drop the rate it cut through."""
        if not trainer.sanity_checking:
            self._shown.update({name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")})
        self._finished.clear()
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, *args: Any) -> None:  # noqa: ANN401 - Lightning's hook arguments
        """Close the bar."""
        self._copies.clear()
        super().on_train_end(*args)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, int | str | float | dict[str, float]]:
        """Return what stands behind the bar: values that are on the host already."""
        return {name: _short(value) for name, value in self._shown.items()}

    def _take_in(self) -> None:
        for (num_tokens, num_micro_batches), loss in self._copies.poll():
            self._shown["loss"] = float(loss) * num_micro_batches
            self._finished.append((time.perf_counter(), num_tokens))
        if len(self._finished) > 1 and self._finished[-1][1] > self._finished[0][1]:
            (begin, num_before), (end, num_after) = self._finished[0], self._finished[-1]
            if end > begin:
                self._shown["tok/s"] = (num_after - num_before) / (end - begin)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
