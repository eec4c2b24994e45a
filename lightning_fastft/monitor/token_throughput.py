"""TokenThroughput: log tokens per second, padding, model-FLOPs utilisation and peak memory without a host sync."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_fastft.activations.budgets import peak_memory_bytes
from lightning_fastft.checkpoint.lightning_internals import logged_step
from lightning_fastft.core.checks import check_float, check_int
from lightning_fastft.core.device_peaks import peak_bf16_flops
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.marks import Mark, has_passed, mark_time, ms_between
from lightning_fastft.core.status import Status
from lightning_fastft.strategies.packed_steps import find_packed_batches

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastft.monitor.flops import ModelFlops

GIB = 1024**3


class _Interval:
    """Counts between two times: CUDA events, or seconds of the host's clock."""

    def __init__(self, *, first_step: int, begin: Mark) -> None:
        self.first_step = first_step
        # The step of loggers, which count from 0.
        self.step = 0
        self.begin = self.end = begin
        self.num_tokens = self.num_real_tokens = self.num_labelled = 0
        self.flops = 0.0


class TokenThroughput(GivenOnce, Callback):
    """Log the throughput of this rank every few optimizer steps.

    The metrics are ``throughput/...``: tokens_per_s (without padding), labelled_tokens_per_s, padding_share, mfu (model
    FLOPs per second / the device's dense bf16 peak; without recomputation, the head only on labelled tokens) and
    peak_memory_gib. Time is measured by CUDA events that are read after they have passed, or by the host's clock on a
    CPU. Validation, the time between epochs and the first step after each are excluded: an interval ends there with the
    steps that it has. In batches that are not packed, every element of ``input_ids`` counts as a labelled token.
    ``latest`` holds the values of the last interval.

    Args:
        log_every_n_steps: Most optimizer steps per interval, at least 1.
        peak_flops: Peak dense FLOPs per second of the device; None looks the device up in a table.

    Raises:
        OptionError: A value is not allowed.

    Cost:
        Two events per interval; no host sync until the end of training.

    Example:
        >>> TokenThroughput(log_every_n_steps=50).latest
        {}
    """

    def __init__(self, *, log_every_n_steps: int = 10, peak_flops: float | None = None) -> None:
        self.log_every_n_steps = check_int("log_every_n_steps", log_every_n_steps, low=1)
        self.peak_flops = None if peak_flops is None else check_float("peak_flops", peak_flops, low=1.0)
        self.latest: dict[str, float] = {}
        self._status = Status("throughput", "inactive", "no training yet")
        self._peak: float | None = None
        self._model_flops: list[ModelFlops] = []
        self._waiting: deque[_Interval] = deque()
        self._open: _Interval | None = None
        self._last_step = 0

    def status(self) -> Status:
        """Return the device and peak used for the utilisation."""
        return self._status

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the FLOPs of the model and look up the peak of the device."""
        # Imported on first use: callbacks must be importable without transformers.
        from lightning_fastft.hf.families import decoder_layers, find_causal_models
        from lightning_fastft.monitor.flops import count_flops

        self._model_flops = [count_flops(model, decoder_layers(model)) for _, model in find_causal_models(pl_module)]
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak = self.peak_flops or (peak_bf16_flops(name) if device.type == "cuda" else None)
        if self._peak is None:
            reason = f"no peak known for {name}: no utilisation"
        elif len(self._model_flops) != 1:
            reason = f"{len(self._model_flops)} transformers models in the module: no utilisation"
        else:
            reason = f"utilisation against {self._peak / 1e12:.1f} TFLOPS ({name})"
        self._status = Status("throughput", "active", reason)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._waiting.clear()
        self._last_step = trainer.global_step
        self._open = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, close a finished interval, and log intervals whose events have passed."""
        device = trainer.strategy.root_device
        has_stepped, self._last_step = trainer.global_step != self._last_step, trainer.global_step
        if self._open is None:
            # The first step of a run or after a validation has set-up work, so the interval starts after it.
            if has_stepped:
                self._open = _Interval(first_step=trainer.global_step, begin=mark_time(device))
            return
        self._count(batch, self._open)
        self._open.step = logged_step(trainer)
        if trainer.global_step - self._open.first_step >= self.log_every_n_steps:
            self._end(self._open, trainer)
            self._open = _Interval(first_step=trainer.global_step, begin=self._open.end)
        self._log_finished(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the current interval."""
        if self._open is not None and self._open.num_tokens:
            self._end(self._open, trainer)
        self._open = None

    on_train_epoch_end = on_validation_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the remaining intervals, with a host sync; drop device objects."""
        self._log_finished(trainer, wait=True)
        self._open = None

    def _end(self, interval: _Interval, trainer: Trainer) -> None:
        interval.end = mark_time(trainer.strategy.root_device)
        self._waiting.append(interval)

    def _count(self, batch: Any, interval: _Interval) -> None:
        packed = find_packed_batches(batch)
        for found in packed:
            context = found.context
            interval.num_tokens += context.num_tokens
            interval.num_real_tokens += context.num_real_tokens
            interval.num_labelled += context.num_labelled
            interval.flops += self._flops(context.num_tokens, context.num_labelled, context.sum_squared_lengths)
        if not packed and isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            # Shapes are on the host, but masks and labels are not, so every token counts as real and labelled.
            num_tokens, num_columns = batch["input_ids"].numel(), batch["input_ids"].shape[-1]
            interval.num_tokens += num_tokens
            interval.num_real_tokens += num_tokens
            interval.num_labelled += num_tokens
            interval.flops += self._flops(num_tokens, num_tokens, num_tokens * num_columns)

    def _flops(self, num_tokens: int, num_labelled: int, sum_squared_lengths: int) -> float:
        if len(self._model_flops) != 1:
            return 0.0
        return self._model_flops[0].step_flops(
            num_tokens=num_tokens, num_labelled=num_labelled, sum_squared_lengths=sum_squared_lengths
        )

    def _log_finished(self, trainer: Trainer, *, wait: bool = False) -> None:
        while self._waiting and has_passed(self._waiting[0].end, wait=wait):
            self._log(trainer, self._waiting.popleft())

    def _log(self, trainer: Trainer, interval: _Interval) -> None:
        seconds = ms_between(interval.begin, interval.end) / 1e3
        if seconds <= 0 or interval.num_tokens == 0:
            return
        values = {
            "tokens_per_s": interval.num_real_tokens / seconds,
            "labelled_tokens_per_s": interval.num_labelled / seconds,
            "padding_share": 1.0 - interval.num_real_tokens / interval.num_tokens,
            "peak_memory_gib": peak_memory_bytes(trainer.strategy.root_device) / GIB,
        }
        if self._peak is not None and interval.flops > 0:
            values["mfu"] = interval.flops / seconds / self._peak
        self.latest = values
        # Log numbers directly: pl_module.log would copy each to the device with a host sync.
        for logger in trainer.loggers:
            logger.log_metrics({f"throughput/{name}": value for name, value in values.items()}, step=interval.step)
