"""FastFTProgressBar: show loss and tokens per second without a host sync per step."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf

from lightning_fastft.checkpoint.lightning_internals import logged_step_values
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.checks import check_bool, check_int, check_string
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.strategies.packed_steps import find_packed_batches, is_planned
from lightning_fastft.strategies.patching import patcher_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

# Tokens per second are averaged over this many finished micro-batches.
NUM_BATCHES_IN_RATE = 20
# Logged values of the tuners that say most about a run.
NAMES = ("train_reward", "train_reward_accuracy", "train_accuracy", "train_divergence")
TRAINING = "train_"
# Name of the loss among those of logged values, none of which is empty.
_LOSS = ""


class FastFTProgressBar(GivenOnce, TQDMProgressBar):
    """Show loss, tokens per second, training values by name, and validation metrics logged with ``prog_bar=True``.

    Loss and training values are means over the micro-batches of an optimizer step. They are computed on the device from
    the output of training_step and from what it logged, copied to pinned memory asynchronously, and shown when the copy
    is done, usually one step late. Log training values without ``prog_bar=True``, which Lightning reads in every logged
    step with a host sync.

    Args:
        refresh_rate: Micro-batches between two updates of the bar; 0 disables the bar.
        process_position: As in Lightning.
        leave: As in Lightning.
        names: Training values to show if ``self.log`` gets them at each step; the bar drops "train_". A mean covers the
            micro-batches that logged the value.

    Raises:
        OptionError: A value is not allowed.

    Cost:
        One small copy per refresh, and one addition per shown value and micro-batch with accumulation; no host sync in
        training.
        Validation values are read once, after a validation.

    Example:
        >>> FastFTProgressBar(refresh_rate=0).is_enabled
        False
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        *,
        names: Sequence[str] = NAMES,
    ) -> None:
        check_int("refresh_rate", refresh_rate, low=0)
        check_int("process_position", process_position, low=0)
        check_bool("leave", leave)
        if not isinstance(names, (list, tuple)):
            raise OptionError(f"names must be a list of names, got {names!r} ({type(names).__name__}).")
        for name in names:
            check_string("names", name)
        super().__init__(refresh_rate=refresh_rate, process_position=process_position, leave=leave)
        self.names = tuple(names)
        self._reader = AsyncScalarReader()
        self._shown: dict[str, float] = {}
        self._num_tokens = self._last_global_step = 0
        # Micro-batches of a resumed epoch that an earlier run has trained.
        self._first_batch = 0
        # Optimizer steps before this run, and its micro-batches.
        self._first_step = self._num_batches = 0
        self._is_described = False
        # Names on the bar before a validation, and names that validations added.
        self._names_before: frozenset[str] = frozenset()
        self._validation_names: set[str] = set()
        # Sums over the current window on the device, and the number of micro-batches in each, by name.
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        # The last step until its copy starts: the sums on the device, and by name the factor that makes each a mean.
        self._step: tuple[dict[str, float], torch.Tensor] | None = None
        self._finished: deque[tuple[float, int]] = deque(maxlen=NUM_BATCHES_IN_RATE + 1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give log messages lines of their own until the run ends."""
        super().setup(trainer, pl_module, stage)
        clears, handlers = _ClearsBars(self), _console_handlers()
        for handler in handlers:
            handler.addFilter(clears)
            patcher_of(trainer).add_undo(functools.partial(handler.removeFilter, clears))

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches of the epoch, or up to max_steps if that ends the run inside it.

        Lightning 2.6.6 counts the remaining optimizer steps as micro-batches, and those of a resumed epoch from 0.
        """
        return self._count_batches(self._first_batch)

    def _count_batches(self, num_before: int) -> int | float:
        """Return the micro-batches of the epoch, of which so many were before those that are left."""
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        num_left: float = trainer.max_steps - trainer.global_step
        if trainer.lightning_module.automatic_optimization:
            num_left *= trainer.accumulate_grad_batches
        else:
            num_stepped = trainer.global_step - self._first_step
            # A module that steps by hand has its own number of steps in a batch, known from its batches so far.
            num_left = math.ceil(num_left * self._num_batches / num_stepped) if num_stepped else math.inf
        return min(trainer.num_training_batches, num_before + num_left)

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        """Reset the bar."""
        self._drop()
        self._first_batch = self._num_batches = 0
        self._first_step = trainer.global_step
        self._shown, self._num_tokens, self._last_global_step = {}, 0, trainer.global_step
        self._finished.clear()
        self._is_described = False
        super().on_train_start(trainer, *args)

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Show epoch and number of batches."""
        self._is_described = True
        super().on_train_epoch_start(trainer, *args)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Show epoch and number of batches in an epoch that was resumed, which Lightning does not start again."""
        if not self._is_described:
            self._first_batch = batch_idx
            self.on_train_epoch_start(trainer)
            self._first_batch = 0
            # Time per batch counts from here.
            self.train_progress_bar.initial = self.train_progress_bar.n = batch_idx
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the copy of the loss, read finished copies, and update the bar."""
        self._num_tokens += sum(found.context.num_real_tokens for found in find_packed_batches(batch))
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if self.is_enabled and isinstance(loss, torch.Tensor):
            self._add(trainer, loss.detach(), is_divided=is_planned(batch))
            if (batch_idx + 1) % self.refresh_rate == 0:
                # Also inside a window: finished copies show the progress of the device for tokens per second.
                (factors, values), self._step = self._step or ({}, loss), None
                self._reader.push((self._num_tokens, factors), values)
        elif trainer.global_step != self._last_global_step:
            # The last micro-batch of the window has no loss, so the mean of the step is not known.
            self._sums, self._last_global_step = {}, trainer.global_step
        self._read_copies()
        self._num_batches += 1
        if not pl_module.automatic_optimization:
            self.train_progress_bar.total = convert_inf(self._count_batches(batch_idx + 1))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the names that training has logged."""
        self._names_before = frozenset(trainer.progress_bar_metrics)
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the values of the finished validation, and restart the token rate."""
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

    def on_exception(self, *args: Any) -> None:
        """Close the bars, so that the error starts on its own line."""
        self._drop()
        for bar in self.open_bars():
            bar.close()

    def open_bars(self) -> list[Tqdm]:
        """Return the bars that exist, the lowest on the screen first; a closed one ignores all calls."""
        bars = (self._val_progress_bar, self._test_progress_bar, self._predict_progress_bar, self._train_progress_bar)
        return [bar for bar in bars if bar is not None]

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the values to show, which are already on the host."""
        return {name: _short(value) for name, value in self._shown.items()}

    def _drop(self) -> None:
        self._reader.clear()
        self._sums, self._step = {}, None

    def _add(self, trainer: Trainer, loss: torch.Tensor, *, is_divided: bool) -> None:
        """Add loss and logged values of a micro-batch to its window; at the end of a window, sum up the step.

        Args:
            trainer: The Trainer.
            loss: Loss, divided by the micro-batches of a full window.
            is_divided: Whether the losses of a shorter window already sum to its mean.
        """
        num_micro_batches = trainer.accumulate_grad_batches
        logged = logged_step_values(trainer) if self.names else {}
        for name, value in {_LOSS: loss, **{name: logged[name] for name in self.names if name in logged}}.items():
            value = value.float().reshape(())
            total, count = self._sums.get(name, (None, 0))
            self._sums[name] = value if total is None else total + value, count + 1
        if num_micro_batches > 1 and trainer.global_step == self._last_global_step:
            return
        factors = {name: 1 / count for name, (_, count) in self._sums.items()}
        # Lightning divides losses by the micro-batches of a full window. The last window of an epoch may be shorter.
        factors[_LOSS] = 1.0 if is_divided else num_micro_batches * factors[_LOSS]
        self._step = factors, torch.stack([total for total, _ in self._sums.values()])
        self._sums, self._last_global_step = {}, trainer.global_step

    def _read_copies(self) -> None:
        """Update the shown values and the token rate with finished copies."""
        for (num_tokens, factors), values in self._reader.poll():
            # Inside a window there are no factors, because no step has ended.
            for (name, factor), value in zip(factors.items(), values.reshape(-1)):
                self._shown[name.removeprefix(TRAINING) or "loss"] = factor * float(value)
            self._finished.append((time.perf_counter(), num_tokens))
        if len(self._finished) > 1 and self._finished[-1][1] > self._finished[0][1]:
            (begin, num_before), (end, num_after) = self._finished[0], self._finished[-1]
            if end > begin:
                self._shown["tok/s"] = (num_after - num_before) / (end - begin)


class _ClearsBars(logging.Filter):
    """Clear the bars before a log message is written on their line; their next update draws them again."""

    def __init__(self, owner: FastFTProgressBar) -> None:
        super().__init__()
        self._owner = owner

    def filter(self, record: logging.LogRecord) -> bool:
        """Clear the bars; every record passes."""
        for bar in self._owner.open_bars():
            if not bar.disable:
                bar.clear()
                bar.fp.flush()
        return True


def _console_handlers() -> list[logging.Handler]:
    """Return the handlers that write messages of Lightning and of this package to a stream."""
    names = (None, "lightning", "lightning.pytorch", "lightning_fastft")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    found = [handler for handler in handlers if type(handler) is logging.StreamHandler]
    # Python's handler for loggers that have none.
    return [*found, *([] if logging.lastResort is None else [logging.lastResort])]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
