"""RunReport: write an HTML page and a JSON file about a run after fit."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.activations.budgets import peak_memory_bytes
from lightning_fastft.checkpoint.lightning_internals import logged_step_values
from lightning_fastft.checkpoint.remote import is_remote
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.checks import check_int, check_replaceable
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.status import Status
from lightning_fastft.monitor.host_waits import HostWaitDetector
from lightning_fastft.monitor.report.copies import StepProfile, StepTrace
from lightning_fastft.monitor.report.facts import (
    describe_checkpoints,
    describe_command,
    describe_model,
    describe_options,
    describe_versions,
    without_secrets,
)
from lightning_fastft.monitor.report.findings import (
    describe_plan,
    describe_profile,
    describe_rows,
    describe_waits,
    find_max_tokens,
)
from lightning_fastft.monitor.report.losses import NUM_ENDS, StepLosses
from lightning_fastft.monitor.report.sums import PackSums
from lightning_fastft.monitor.report.timing import EPOCH_START, RECORDED, Batch, BatchTimes, Clock
from lightning_fastft.monitor.report.verdict import judge, summarize
from lightning_fastft.monitor.token_throughput import GIB, mark_time
from lightning_fastft.strategies.packed_steps import collect_statuses, find_packed_batches
from lightning_fastft.strategies.patching import patcher_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_fastft.planner.plan import Plan, StepCost

SCHEMA = "lightning_fastft.run_report"
SCHEMA_VERSION = 1
# The first steps set up optimizer state, kernels and plans.
_NUM_WARMUP = 3
# Most logged values with a curve. The loss has one of its own, exact over ranks.
MOST_VALUES = 32
TRAINING_LOSS = "train_loss"


class RunReport(Callback):
    """Write a self-contained HTML page about a run, and JSON with the same figures; also after an exception or signal.

    The page shows model, method, device, tokens per second, peak memory of each rank, losses, the last validation and a
    verdict; active features; the memory plan; packing; curves of loss, of tokens per second and of the first 32 values
    that training logs at each step (those of rank 0); the parts of a step; one profiled step with its CUDA streams;
    host syncs by line of code; the slowest pack (without the first of each epoch, during which the loader starts);
    options, versions and command. A curve has at most 512 points, each the mean of equally many values. The loss of an
    optimizer step is the mean over its labelled tokens on all ranks; tokens per second are those of rank 0 by
    micro-batch. Steps of a resumed run continue from the checkpoint.

    Environment variables are not read, and values that look like secrets are replaced. The page loads nothing and runs
    no script. Rank 0 writes the files and logs a summary. Losses, memory and speed of all ranks are gathered once, if
    the run finished or ExactResume stopped it. Otherwise the page shows the losses of rank 0, scaled by its share of
    the labels, and says so.

    Args:
        path: The HTML file, ending in ".html"; the JSON file is written next to it. None is "run_report.html" in the
            folder of the logger, or in the Trainer's default_root_dir without a logger. An earlier report is replaced;
            other files are not.
        profile_step: Optimizer step, counted from 0 in this fit, whose last micro-batch is profiled by torch.profiler.
            The next step is watched for host syncs, unless the Trainer has a HostWaitDetector, whose result is shown
            then. None does neither, and so does a run that ends earlier.

    Raises:
        OptionError: path is remote or does not end in ".html", or profile_step is below 0. When fit begins: path is
            None and the folder is remote, or another file is there.
        OSError: When fit begins: the folder cannot be created.

    Cost:
        Every micro-batch: five CUDA events and one small asynchronous copy; no host sync. The profiled step has two
        host syncs, and its trace is written and read, about a second per 10,000 kernels. The watched step is slower by
        some microseconds per operation. Neither is included in reported times. At the end: one small gather over ranks,
        and the two files.

    Example:
        >>> RunReport("reports/run.html", profile_step=None).json_path
        PosixPath('reports/run.json')
    """

    def __init__(self, path: str | Path | None = None, *, profile_step: int | None = 8) -> None:
        if path is not None and is_remote(path):
            raise OptionError(f"path must be a local or mounted file, got {str(path)!r}.")
        if path is not None and Path(path).suffix != ".html":
            raise OptionError(f'path must end in ".html", got {str(path)!r}. The JSON file is written next to it.')
        self.path = None if path is None else Path(path)
        self.profile_step = None if profile_step is None else check_int("profile_step", profile_step, low=0)
        self._html_path = self.path
        self._reset()

    def _reset(self) -> None:
        self._is_open = False
        self._device = torch.device("cpu")
        self._losses = StepLosses()
        # What training logs besides the loss, by its name.
        self._values: dict[str, StepLosses] = {}
        self._why_alone = "the run ended before the other ranks could be asked"
        self._copies = AsyncScalarReader()
        self._packs = PackSums()
        self._times = BatchTimes(num_warmup=_NUM_WARMUP)
        self._clock: Clock | None = None
        self._last_end: Any = None
        self._step = self._num_batches = self._first_step = self._last_global_step = 0
        self._source: str | None = None
        self._is_epoch_start = False
        self._num_recordings = 0
        self._validation_copies = AsyncScalarReader()
        # Optimizer step and values of the last validation.
        self._validation: tuple[int, dict[str, float]] = (0, {})
        self._profile: StepProfile | None = None
        self._trace: StepTrace | None = None
        self._no_profile = ""
        self._detector: HostWaitDetector | None = None
        self._is_own_detector = False
        self._plans: list[tuple[StepCost, Plan]] = []
        self._ranks: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._started = ""

    @property
    def html_path(self) -> Path | None:
        """Path of the page; known once fit has begun."""
        return self._html_path

    @property
    def json_path(self) -> Path | None:
        """Path of the JSON file."""
        return None if self._html_path is None else self._html_path.with_suffix(".json")

    def status(self) -> Status:
        """Return the path of the report."""
        return Status("run report", "active", "written after fit" if self._html_path is None else str(self._html_path))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find and create the folder before training, so that an unwritable folder fails early."""
        self._reset()
        # trainer.log_dir broadcasts, so all ranks must read it.
        folder = trainer.log_dir or trainer.default_root_dir
        if self.path is None and is_remote(folder):
            raise OptionError(
                f"RunReport writes to local or mounted folders, but the folder of this run is {folder}. Give "
                "RunReport(path='run_report.html')."
            )
        self._html_path = Path(folder) / "run_report.html" if self.path is None else self.path
        if trainer.is_global_zero:
            self._html_path.parent.mkdir(parents=True, exist_ok=True)
            check_replaceable(
                "The run report (path)", self._html_path, is_ours=lambda head: b"<title>Run report: " in head
            )
            check_replaceable(
                "The run report's JSON (path)",
                self._html_path.with_suffix(".json"),
                is_ours=lambda head: SCHEMA.encode() in head,
            )
        self._is_open = True
        self._started = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting."""
        self._device = trainer.strategy.root_device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._first_step = self._last_global_step = trainer.global_step
        self._source = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        self._detector = next((found for found in _callbacks(trainer) if isinstance(found, HostWaitDetector)), None)
        if self._detector is None and self.profile_step is not None:
            self._detector, self._is_own_detector = _QuietDetector(steps=[self.profile_step + 1]), True
            self._detector.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the next micro-batch as the first of its epoch, during which the loader starts."""
        self._is_epoch_start = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; start the profiler or the detector if it is their step."""
        if self._is_own_detector and self._detector is not None:
            self._detector.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._num_recordings = _count_recordings(trainer)
        begin = mark_time(self._device)
        self._clock = Clock(self._describe(batch), is_counted=not self._begin_profile(trainer, batch_idx))
        if self._last_end is not None:
            self._clock.begin("between", self._last_end)
        self._clock.begin("forward", begin)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Mark the end of the forward."""
        self._begin_part("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the end of the backward; with manual optimization another forward may follow."""
        self._begin_part("forward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Mark the start of clipping and the optimizer step."""
        self._begin_part("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the micro-batch, and take in what has arrived."""
        clock, self._clock = self._clock, None
        if clock is None:
            return
        end = mark_time(self._device)
        clock.begin("end", end)
        # Checked at the end, because a detector of the user may run after this callback.
        clock.is_counted &= not (self._detector is not None and self._detector.is_watching)
        is_recorded = _count_recordings(trainer) > self._num_recordings
        is_epoch_start, self._is_epoch_start = self._is_epoch_start, False
        clock.batch = clock.batch._replace(set_up=RECORDED if is_recorded else EPOCH_START if is_epoch_start else "")
        self._times.push(clock)
        # The time after a profiled or watched step is not time spent waiting for data.
        self._last_end = end if clock.is_counted else None
        if self._profile is not None:
            self._trace, self._profile = self._profile.stop(), None
        has_stepped = trainer.global_step != self._last_global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            logged = logged_step_values(trainer)
            names = tuple(name for name in logged if name != TRAINING_LOSS)[:MOST_VALUES]
            values = torch.stack([value.float().reshape(()) for value in (loss, *map(logged.__getitem__, names))])
            # Lightning divides the loss by the micro-batches of a window.
            self._copies.push((self._step, trainer.accumulate_grad_batches, has_stepped, names), values)
        self._num_batches += 1
        if has_stepped:
            self._last_global_step = trainer.global_step
            self._step += 1
        self._plans = _find_plans(trainer) or self._plans
        self._poll()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exclude the validation from the times."""
        self._pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the copies of the validation values."""
        if not trainer.sanity_checking:
            for name, value in trainer.callback_metrics.items():
                if name.startswith("val") and value.numel() == 1:
                    self._validation_copies.push((trainer.global_step, name), value)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exclude the time between epochs."""
        self._pause()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the remaining values with a host sync, and gather those of the other ranks."""
        self._pause()
        self._close_detector()
        self._take_in(self._copies.wait())
        self._take_validation(self._validation_copies.wait())
        self._times.poll(wait=True)
        self._times.finish()
        self._ranks = self._ask_ranks(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the report."""
        self._write(trainer, pl_module, state="finished", error=None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the values so far. Wait for the device and other ranks only if all ranks saved and stopped."""
        self._close_detector()
        if self._profile is not None:
            self._profile.cancel()
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
                self._step += self._clock is not None
                self.on_train_end(trainer, pl_module)
            elif self._device.type != "cuda":
                self._poll()
            self._times.drop()
            self._times.finish()
            self._write(trainer, pl_module, state=state, error=exception)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as failure:
            # An error of the report must not hide the error that ended the run.
            rank_zero_warn(f"The run report could not be written: {type(failure).__name__}: {failure}")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release device objects."""
        self._close_detector()
        self._copies.clear()
        self._validation_copies.clear()
        self._times.drop()
        self._clock = self._last_end = None
        self._plans = []

    # Counting.

    def _begin_part(self, part: str) -> None:
        if self._clock is not None:
            self._clock.begin(part, mark_time(self._device))

    def _pause(self) -> None:
        self._last_end = None
        if self._is_own_detector and self._detector is not None:
            self._detector.pause()

    def _close_detector(self) -> None:
        if self._is_own_detector and self._detector is not None:
            self._detector.close()

    def _begin_profile(self, trainer: pl.Trainer, batch_idx: int) -> bool:
        is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if (
            self.profile_step is None
            or self._step != self.profile_step
            or not is_last
            or self._trace is not None
            or not trainer.is_global_zero
        ):
            return False
        if torch.autograd._profiler_enabled():
            self._no_profile = "Another profiler was running, and there can be only one."
            return False
        self._profile = StepProfile(is_cuda=self._device.type == "cuda")
        patcher_of(trainer).add_undo(self._profile.cancel)
        self._profile.start()
        return True

    def _describe(self, batch: Any) -> Batch:
        packed = find_packed_batches(batch)
        if packed:
            contexts = [found.context for found in packed]
            counted = [self._packs.add(context) for context in contexts]
            num_tokens = sum(context.num_real_tokens for context in contexts)
            return Batch(
                self._num_batches,
                self._step,
                num_tokens,
                sum(number for number, _ in counted),
                max(longest for _, longest in counted),
            )
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        return Batch(self._num_batches, self._step, ids.numel() if isinstance(ids, torch.Tensor) else None, None, None)

    def _take_in(self, arrived: list[tuple[Any, torch.Tensor]]) -> None:
        for (step, num_micro_batches, is_last, names), values in arrived:
            # The copy to the host is finished, so this is no host sync.
            loss, *others = map(float, values)
            self._losses.add(step, loss * num_micro_batches, is_last=is_last)
            for name, value in zip(names, others):
                self._values.setdefault(name, StepLosses()).add(step, value, is_last=is_last)

    def _poll(self) -> None:
        self._take_in(self._copies.poll())
        self._take_validation(self._validation_copies.poll())
        self._times.poll()

    def _take_validation(self, arrived: list[tuple[Any, torch.Tensor]]) -> None:
        for (step, name), value in arrived:
            others = self._validation[1] if step == self._validation[0] else {}
            self._validation = step, {**others, name: float(value)}

    def _ask_ranks(self, trainer: pl.Trainer) -> list[dict[str, Any]]:
        # The array has the same size on every rank, whatever the number of recorded steps.
        own_V = np.concatenate(
            [[peak_memory_bytes(self._device) / GIB, self._times.rate() or 0.0], self._losses.to_array()]
        )
        all_RV = own_V[None]
        if trainer.world_size > 1:
            # A host sync, at the end of the run.
            all_RV = (
                trainer.strategy.all_gather(torch.from_numpy(own_V).to(self._device))
                .reshape(-1, len(own_V))
                .cpu()
                .numpy()
            )
            self._why_alone = "" if self._losses.take_mean(all_RV[:, 2:]) else "the ranks noted different steps"
        return [
            {"rank": rank, "peak_memory_gib": peak, "tokens_per_s": rate or None}
            for rank, (peak, rate) in enumerate(all_RV[:, :2].tolist())
        ]

    # Writing.

    def _write(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, state: str, error: BaseException | None
    ) -> None:
        if not self._is_open or self._html_path is None or not trainer.is_global_zero:
            return
        self._is_open = False
        # Imported on first use, at the end of a run.
        from lightning_fastft.monitor.report.page import render_page
        from lightning_fastft.packing.store.dataset import replace_file

        assert self.json_path is not None
        data = self._collect(trainer, pl_module, state=state, error=error)
        try:
            replace_file(self.json_path, json.dumps(data, indent=1, allow_nan=False).encode())
            replace_file(self._html_path, render_page(data).encode())
        except OSError as failure:
            # A full disk must not end the run before the user saves the trained model.
            rank_zero_warn(f"The run report could not be written to {self._html_path}: {failure}")
            return
        told = f"Run report: {self._html_path}"
        rank_zero_info(f"{summarize(data)}\n{told}" if state in ("finished", "stopped") else told)

    def _collect(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, state: str, error: BaseException | None
    ) -> dict[str, Any]:
        is_cuda = self._device.type == "cuda"
        model = describe_model(pl_module)
        ranks = self._ranks or [
            {
                "rank": trainer.global_rank,
                "peak_memory_gib": peak_memory_bytes(self._device) / GIB,
                "tokens_per_s": self._times.rate(),
            }
        ]
        step, values = self._validation
        profile_step = None if self.profile_step is None else self._first_step + self.profile_step
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "outcome": {"state": state, **_describe_error(error)},
            "resumed": None if self._first_step == 0 else {"step": self._first_step, "checkpoint": self._source},
            "head": {**model, **self._head(trainer, ranks)},
            "validation": {"step": step, "metrics": [{"name": name, "value": value} for name, value in values.items()]}
            if values
            else None,
            "checkpoints": describe_checkpoints(trainer),
            "statuses": [status._asdict() for status in _statuses(trainer)],
            "plans": [describe_plan(cost, plan) for cost, plan in self._plans],
            "packing": self._packs.to_dict(max_tokens=find_max_tokens(trainer)),
            "data": describe_rows(trainer),
            "curves": self._curves(trainer),
            "logged": self._describe_values(),
            "times": self._times.to_dict(is_cuda=is_cuda),
            "slowest": self._times.slowest_to_dict(first_step=self._first_step),
            "ranks": ranks,
            "profile": describe_profile(self._trace, step=profile_step, is_cuda=is_cuda, why_not=self._no_profile),
            "waits": describe_waits(self._detector, is_cuda=is_cuda),
            "options": describe_options(trainer, pl_module),
            "versions": describe_versions(),
            "command": describe_command(),
        }
        data = without_secrets(data)
        data["outcome"]["level"], data["outcome"]["verdict"] = judge(data)
        return data

    def _head(self, trainer: pl.Trainer, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return device, times, speed, memory and losses of the run."""
        is_cuda = self._device.type == "cuda"
        rates = [rank["tokens_per_s"] for rank in ranks]
        num_ends = self._num_ends()
        return {
            "device": torch.cuda.get_device_name(self._device) if is_cuda else "CPU",
            "num_ranks": trainer.world_size,
            "started": self._started,
            "seconds": time.monotonic() - self._began,
            "num_steps": self._step,
            "last_step": trainer.global_step,
            "num_batches": self._num_batches,
            "tokens_per_s": sum(rates) if all(rate is not None for rate in rates) else None,
            "peak_memory_gib": max(rank["peak_memory_gib"] for rank in ranks),
            "memory_of": "device, highest rank" if is_cuda else "process, from its start",
            "num_loss_steps": num_ends,
            "first_step_loss": self._losses.first(1),
            "first_loss": self._losses.first(num_ends),
            "final_loss": self._losses.final(num_ends),
        }

    def _describe_values(self) -> list[dict[str, Any]]:
        """Return the curves of what training logged on this rank, with means over the first and the last steps."""
        num_ends = self._num_ends()
        return [
            {
                "name": name,
                "first": values.first(num_ends),
                "final": values.final(num_ends),
                **values.curve.to_dict(first_step=self._first_step),
            }
            for name, values in self._values.items()
        ]

    def _num_ends(self) -> int:
        """Return how many steps first and final values are means of: at most a quarter of the run each."""
        return max(1, min(NUM_ENDS, self._step // 4))

    def _curves(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the curves of loss and tokens per second."""
        is_alone = trainer.world_size > 1 and self._why_alone
        return {
            "loss": {
                **self._losses.curve.to_dict(first_step=self._first_step),
                "num_not_finite": self._losses.num_not_finite,
                "ranks": [trainer.global_rank] if is_alone else list(range(trainer.world_size)),
                "why_alone": self._why_alone if is_alone else "",
                "why_not": "No optimizer step ended with a loss that is a number.",
            },
            "tokens_per_s": {
                **self._times.tokens_per_s.to_dict(first_step=self._first_step),
                "why_not": "Batches are neither packed nor hold input_ids, so tokens are not known.",
            },
        }


class _QuietDetector(HostWaitDetector):
    """A detector that prints nothing; the report shows its result."""

    def _tell(self) -> None:
        pass


def _describe_error(error: BaseException | None) -> dict[str, Any]:
    """Return the error that ended the run, or the signal after which it was saved."""
    if isinstance(error, RunStopped):
        return {
            "error": None,
            "stop": {
                "signal": error.signal_name,
                "step": error.step,
                "checkpoint": str(error.path),
                "exit_code": error.code,
            },
        }
    return {
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)[:4000]},
        "stop": None,
    }


def _statuses(trainer: pl.Trainer) -> list[Status]:
    own = getattr(trainer.strategy, "statuses", None)
    return own() if callable(own) else collect_statuses(trainer, [])


def _find_plans(trainer: pl.Trainer) -> list[tuple[StepCost, Plan]]:
    """Return the current memory plans of the strategy or PackedTraining."""
    owners = (trainer.strategy, *_callbacks(trainer))
    activations = next(
        (
            found
            for owner in owners
            if (found := getattr(getattr(owner, "packed_steps", None), "activations", None)) is not None
        ),
        None,
    )
    stacks = getattr(activations, "stacks", ())
    return [(stack.cost, stack.plan) for stack in stacks if stack.cost is not None and stack.plan is not None]


def _count_recordings(trainer: pl.Trainer) -> int:
    """Return how many layers FusedKernels has recorded as CUDA graphs so far."""
    return sum(getattr(callback, "num_recordings", 0) for callback in _callbacks(trainer))


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return getattr(trainer, "callbacks", [])
