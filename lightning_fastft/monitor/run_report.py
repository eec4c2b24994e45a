"""RunReport: write an HTML page and a JSON file about a run after fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.checkpoint.lightning_internals import logged_step_values
from lightning_fastft.checkpoint.remote import is_remote
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.checks import check_int, check_replaceable
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.marks import mark_time
from lightning_fastft.core.status import Status
from lightning_fastft.monitor.host_waits import HostWaitDetector
from lightning_fastft.monitor.report.content import SCHEMA, collect
from lightning_fastft.monitor.report.record import RunRecord
from lightning_fastft.monitor.report.step_profile import StepProfile
from lightning_fastft.monitor.report.timing import EPOCH_START, RECORDED, Batch
from lightning_fastft.monitor.report.verdict import summarize
from lightning_fastft.strategies.packed_steps import is_planned
from lightning_fastft.strategies.patching import callbacks_of, patcher_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastft.planner.step import Plan, StepCost

# Most logged values with a curve. The loss has one of its own, exact over ranks.
MOST_VALUES = 32
TRAINING_LOSS = "train_loss"
# Names such as "val_loss", "val/loss" and "validation_loss"; "value_loss" is logged by training.
_VALIDATION = re.compile(r"val(id|idation)?(?![a-z])")


class RunReport(GivenOnce, Callback):
    """Write a self-contained HTML page about a run, and JSON with the same figures; also after an exception or signal.

    The page shows model, method, device, tokens per second, peak memory of each rank, losses, the last validation and a
    verdict; active features; the memory plan; packing; curves of loss, of tokens per second and of the first 32 values
    that training logs at each step (those of rank 0); the parts of a step; one profiled step with its CUDA streams;
    host syncs by line of code; the slowest pack (without the first of each epoch, during which the loader starts);
    options, versions and command. A curve has at most 512 points, each the mean of equally many values. The loss of an
    optimizer step is the mean over its labelled tokens on all ranks; tokens per second are those of rank 0 by
    micro-batch. Steps of a resumed run continue from the checkpoint. With manual optimization a loss is what
    ``training_step`` returned; where a batch has several optimizer steps, losses and host syncs are counted by batch.

    Environment variables are not read, and values that look like secrets are replaced. The page loads nothing and runs
    no script. Rank 0 writes the files and logs a summary. Losses, packs, memory and speed of all ranks are gathered
    once, if the run finished or ExactResume stopped it. Otherwise the page shows the losses of rank 0, scaled by its
    share of the labels, and its packs, and says so.

    Args:
        path: The HTML file, ending in ".html"; the JSON file is written next to it. None is "run_report.html" in the
            folder of the logger, or in the Trainer's default_root_dir without a logger. An earlier report is replaced;
            other files are not.
        profile_step: Optimizer step, counted from 0 in this fit, whose last micro-batch is profiled by torch.profiler;
            a batch with several optimizer steps counts as one. The next step is watched for host syncs, unless the
            Trainer has a HostWaitDetector, whose result is shown then. None does neither, and so does a run that ends
            earlier.

    Raises:
        OptionError: path is remote or does not end in ".html", or profile_step is below 0. When fit begins: path is
            None and the folder is remote, or another file is there.
        OSError: When fit begins: the folder cannot be created.

    Cost:
        Every micro-batch: five CUDA events and one small asynchronous copy; no host sync. The profiled step has two
        host syncs, and its trace is written and read, about a second per 10,000 kernels. The watched step is slower by
        some microseconds per operation. Neither is included in reported times. At the end: two small gathers over
        ranks, and the two files.

    Example:
        >>> RunReport("reports/run.html", profile_step=None).json_path
        PosixPath('reports/run.json')
    """

    def __init__(self, path: str | Path | None = None, *, profile_step: int | None = 8) -> None:
        if path is not None and is_remote(path):
            raise OptionError(f"path must be a local or mounted file, got {str(path)!r}.")
        if path is not None and Path(path).suffix != ".html":
            raise OptionError(f'path must end in ".html", got {str(path)!r}. The JSON file is written next to it.')
        self.path = None if path is None else Path(path).expanduser()
        self.profile_step = None if profile_step is None else check_int("profile_step", profile_step, low=0)
        # Path of the page; known once fit has begun.
        self.html_path = self.path
        self._reset()

    def _reset(self) -> None:
        self._run = RunRecord()
        self._is_open = False
        self._loss_reader = AsyncScalarReader()
        self._scalar_reader = AsyncScalarReader()
        self._batch: Batch | None = None
        self._last_end: Any = None
        self._last_global_step = 0
        self._is_epoch_start = False
        self._num_recordings = 0
        self._profile: StepProfile | None = None
        self._own_detector: HostWaitDetector | None = None

    @property
    def json_path(self) -> Path | None:
        """Path of the JSON file."""
        return None if self.html_path is None else self.html_path.with_suffix(".json")

    def status(self) -> Status:
        """Return the path of the report."""
        return Status("run report", "active", "written after fit" if self.html_path is None else str(self.html_path))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find and create the folder before training, so that an unwritable folder fails early."""
        self._reset()
        # trainer.log_dir broadcasts, so all ranks must read it.
        folder = trainer.log_dir or trainer.default_root_dir
        if self.path is None and is_remote(folder):
            raise OptionError(
                f"RunReport writes to local or mounted folders, but the folder of this run is {folder}. Give "
                "RunReport(path='run_report.html')."
            )
        self.html_path = Path(folder) / "run_report.html" if self.path is None else self.path
        if trainer.is_global_zero:
            self.html_path.parent.mkdir(parents=True, exist_ok=True)
            check_replaceable(
                "The run report (path)", self.html_path, is_ours=lambda head: b"<title>Run report: " in head
            )
            check_replaceable(
                "The run report's JSON (path)",
                self.html_path.with_suffix(".json"),
                is_ours=lambda head: SCHEMA.encode() in head,
            )
        self._is_open = True
        self._run.started = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._run.device = trainer.strategy.root_device
        if self._run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._run.device)
        self._run.first_step = self._last_global_step = trainer.global_step
        self._run.source = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        detectors = (found for found in callbacks_of(trainer) if isinstance(found, HostWaitDetector))
        self._run.detector = next(detectors, None)
        if self._run.detector is None and self.profile_step is not None:
            self._run.detector = self._own_detector = HostWaitDetector(steps=[self.profile_step + 1])
            self._own_detector.is_silent = True
            self._own_detector.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the next micro-batch as the first of its epoch, during which the loader starts."""
        self._is_epoch_start = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the batch; start the profiler or the detector if it is their step."""
        if self._own_detector is not None:
            self._own_detector.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._num_recordings = _count_recordings(trainer)
        begin = mark_time(self._run.device)
        self._batch = self._run.add_batch(batch)
        self._batch.is_counted = not self._begin_profile(trainer, batch_idx)
        if self._last_end is not None:
            self._batch.marks.append(("between", self._last_end))
        self._batch.marks.append(("forward", begin))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Mark the end of the forward."""
        self._begin_part("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the end of the backward; with manual optimization another forward may follow."""
        self._begin_part("forward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Mark the start of clipping and the optimizer step, and record its learning rates."""
        self._begin_part("optimizer")
        step = trainer.global_step - self._run.first_step
        for name, rate in _learning_rates(trainer, optimizer):
            # The scheduler changes a tensor in place after this step, so the copy starts here.
            if isinstance(rate, torch.Tensor):
                self._scalar_reader.push((self._run.add_learning_rate, step, name), rate)
            else:
                self._run.add_learning_rate(step, name, float(rate))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the micro-batch, start the copies of its loss and values, and read finished copies."""
        timed, self._batch = self._batch, None
        if timed is None:
            return
        end = mark_time(self._run.device)
        timed.marks.append(("end", end))
        # Checked at the end, because a detector of the user may run after this callback.
        timed.is_counted &= not (self._run.detector is not None and self._run.detector.is_watching)
        is_recorded = _count_recordings(trainer) > self._num_recordings
        is_epoch_start, self._is_epoch_start = self._is_epoch_start, False
        timed.set_up = RECORDED if is_recorded else EPOCH_START if is_epoch_start else ""
        self._run.times.push(timed)
        # The time after a profiled or watched step is not time spent waiting for data.
        self._last_end = end if timed.is_counted else None
        has_stepped = trainer.global_step != self._last_global_step
        if self._profile is not None:
            # With manual optimization, only the end of a micro-batch tells whether it was the last one of its step.
            if has_stepped:
                self._run.trace, self._run.profiled_step = self._profile.stop(), self._run.step
            self._profile.cancel()
            self._profile = None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            logged = logged_step_values(trainer)
            names = tuple(name for name in logged if name != TRAINING_LOSS)[:MOST_VALUES]
            values = torch.stack([value.float().reshape(()) for value in (loss, *map(logged.__getitem__, names))])
            # Lightning divides the loss by the micro-batches of a window.
            has_window = is_planned(batch) and pl_module.automatic_optimization
            about = (self._run.step, trainer.accumulate_grad_batches, has_window, has_stepped, names)
            self._loss_reader.push(about, values)
        self._run.num_batches += 1
        if has_stepped:
            self._count_steps(trainer)
        self._run.plans = _find_plans(trainer) or self._run.plans
        self._poll()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude the validation, and the time between epochs, from the times."""
        self._pause()

    on_train_epoch_end = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the copies of the validation values."""
        if not trainer.sanity_checking:
            for name, value in trainer.callback_metrics.items():
                if _VALIDATION.match(name) and value.numel() == 1:
                    self._scalar_reader.push((self._run.add_validation, trainer.global_step, name), value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the remaining values with a host sync, and gather those of the other ranks."""
        self._pause()
        if self._own_detector is not None:
            self._own_detector.close()
        self._run.add_losses(self._loss_reader.wait())
        self._run.add_scalars(self._scalar_reader.wait())
        self._run.times.poll(wait=True)
        self._run.times.finish()
        self._run.gather_ranks(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report."""
        self._write(trainer, pl_module, state="finished", error=None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the values so far. Wait for the device and other ranks only if all ranks saved and stopped."""
        state = (
            "stopped"
            if isinstance(exception, RunStopped)
            else "interrupted"
            if isinstance(exception, KeyboardInterrupt)
            else "failed"
        )
        try:
            if state == "stopped":
                # An earlier callback has ended the run at the end of a step that is not counted yet.
                if self._batch is not None:
                    self._count_steps(trainer)
                self.on_train_end(trainer, pl_module)
            elif self._run.device.type != "cuda":
                self._poll()
            self._run.times.drop()
            self._run.times.finish()
            self._write(trainer, pl_module, state=state, error=exception)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as failure:
            # An error of the report must not hide the error that ended the run.
            rank_zero_warn(f"The run report could not be written: {type(failure).__name__}: {failure}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release device objects."""
        self._loss_reader.clear()
        self._scalar_reader.clear()
        self._run.times.drop()
        self._batch = self._last_end = None
        self._run.plans = []

    # Counting.

    def _count_steps(self, trainer: Trainer) -> None:
        self._last_global_step = trainer.global_step
        self._run.step = trainer.global_step - self._run.first_step
        self._run.num_windows += 1

    def _begin_part(self, part: str) -> None:
        if self._batch is not None:
            self._batch.marks.append((part, mark_time(self._run.device)))

    def _pause(self) -> None:
        self._last_end = None
        if self._own_detector is not None:
            self._own_detector.pause()

    def _begin_profile(self, trainer: Trainer, batch_idx: int) -> bool:
        is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if (
            self.profile_step is None
            or self._run.num_windows != self.profile_step
            or not is_last
            or self._run.trace is not None
            or not trainer.is_global_zero
        ):
            return False
        if torch.autograd._profiler_enabled():
            self._run.why_no_trace = "Another profiler was running, and there can be only one."
            return False
        self._profile = StepProfile(is_cuda=self._run.device.type == "cuda")
        patcher_of(trainer).add_undo(self._profile.cancel)
        self._profile.start()
        return True

    def _poll(self) -> None:
        self._run.add_losses(self._loss_reader.poll())
        self._run.add_scalars(self._scalar_reader.poll())
        self._run.times.poll()

    # Writing.

    def _write(self, trainer: Trainer, pl_module: LightningModule, *, state: str, error: BaseException | None) -> None:
        if not self._is_open or self.html_path is None or not trainer.is_global_zero:
            return
        self._is_open = False
        # Imported on first use, at the end of a run.
        from lightning_fastft.monitor.report.page import render_page
        from lightning_fastft.packing.store.dataset import replace_file

        assert self.json_path is not None
        if not self._run.num_batches:
            # Training with nothing left to do does not start, so on_train_start did not record its checkpoint.
            self._run.first_step = trainer.global_step
            self._run.source = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        data = collect(self._run, trainer, pl_module, profile_step=self.profile_step, state=state, error=error)
        try:
            replace_file(self.json_path, json.dumps(data, indent=1, allow_nan=False).encode())
            replace_file(self.html_path, render_page(data).encode())
        except OSError as failure:
            # A full disk must not end the run before the user saves the trained model.
            rank_zero_warn(f"The run report could not be written to {self.html_path}: {failure}")
            return
        told = f"Run report: {self.html_path}"
        rank_zero_info(f"{summarize(data)}\n{told}" if state in ("finished", "stopped") else told)


def _learning_rates(trainer: Trainer, optimizer: Any) -> list[tuple[str, Any]]:
    """Return the learning rate of each parameter group, by the name that LearningRateMonitor gives it."""
    names = [type(found).__name__ for found in trainer.optimizers]
    place = next((index for index, found in enumerate(trainer.optimizers) if found is optimizer), 0)
    name = f"lr-{type(optimizer).__name__}"
    # LearningRateMonitor numbers optimizers of one class from the second on.
    if num_before := names[:place].count(type(optimizer).__name__):
        name += f"-{num_before}"
    groups = optimizer.param_groups[:MOST_VALUES]
    if len(groups) == 1:
        return [(f"{name}/{groups[0]['name']}" if groups[0].get("name") else name, groups[0]["lr"])]
    return [(f"{name}/{group.get('name', f'pg{number}')}", group["lr"]) for number, group in enumerate(groups, 1)]


def _find_plans(trainer: Trainer) -> list[tuple[StepCost, Plan]]:
    """Return the current memory plans of the strategy or PackedTraining."""
    for owner in (trainer.strategy, *callbacks_of(trainer)):
        activations = getattr(getattr(owner, "packed_steps", None), "activations", None)
        if activations is not None:
            stacks = activations.stacks
            return [(stack.cost, stack.plan) for stack in stacks if stack.cost is not None and stack.plan is not None]
    return []


def _count_recordings(trainer: Trainer) -> int:
    """Return how many layers FusedKernels has recorded as CUDA graphs so far."""
    return sum(getattr(callback, "num_recordings", 0) for callback in callbacks_of(trainer))
