"""Reads and writes of the state of Lightning's loops and connectors, for which Lightning 2.6.6 has no public API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.utilities.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastft.core.patcher import ModelPatcher

# The name of the barrier at which Lightning has restored the states of a checkpoint, or there was none.
RESUME_END = "_CheckpointConnector.resume_end"
Metrics = dict[str, torch.Tensor]
# A method of the epoch loop that broadcasts the stop flag of rank 0 before each micro-batch, with a host sync.
_SIGTERM_BROADCAST = "_broadcast_sigterm_tensor"


def batch_progress(trainer: Trainer) -> Any:
    """Return Lightning's count of training micro-batches, which it restores from a checkpoint before the first one."""
    return trainer.fit_loop.epoch_loop.batch_progress


def logged_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs metrics now: that of the last optimizer step, counted from 0."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def log_last_step(trainer: Trainer) -> None:
    """Log the metrics of the last optimizer step, as Lightning does after ``on_train_batch_end``; for a run that ends
    in that hook.
    """
    trainer._logger_connector.update_train_step_metrics()


def take_back_batches(trainer: Trainer, num_batches: int) -> None:
    """Make Lightning count the last micro-batches as not started, so that they are trained again."""
    progress = batch_progress(trainer)
    for tracker in (progress.total, progress.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(tracker, name, getattr(tracker, name) - num_batches)
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        fetcher.fetched -= num_batches


def set_batches_of_epoch(trainer: Trainer, num_batches: int) -> None:
    """Make Lightning count this many micro-batches of the epoch as done; its total stays."""
    current = batch_progress(trainer).current
    num_before = current.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, num_batches)
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        fetcher.fetched += num_batches - num_before


def log_hyperparameters(trainer: Trainer) -> None:
    """Give the loggers the hyperparameters of the LightningModule and the DataModule, as Lightning does."""
    _log_hyperparams(trainer)


def begin_next_epoch(trainer: Trainer) -> None:
    """Let a run that resumes at the last batch of an epoch begin the next one; call it in ``on_train_start``.

    Lightning (2.6.6) has finished the first epoch by then, but trains the next one as the rest of it: without
    ``on_train_epoch_start``, and without counting it as begun. A checkpoint of it then reads like one of its end, and a
    run that resumes it trains that epoch again.
    """
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.total
    if loop.restarted_mid_epoch and epochs.processed >= epochs.started:
        loop.reset_restart_stage()


def reopen_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Make a checkpoint of the end of a run count its last epoch as running, if a limit ended the run inside it.

    Lightning (2.6.6) counts that epoch as processed, and a run that continues to max_epochs would skip the rest of it.
    """
    loop = (checkpoint.get("loops") or {}).get("fit_loop")
    if not loop or loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return
    for tracker in ("total", "current"):
        counts = loop["epoch_progress"][tracker]
        for name in ("processed", "completed"):
            counts[name] = min(counts[name], max(0, counts["started"] - 1))


def end_restart(trainer: Trainer) -> None:
    """Count a resumed run as going on; in ``on_train_epoch_end``, after which nothing else reads it in that epoch.

    Lightning (2.6.6) does the same right after the epoch, and does not step ReduceLROnPlateau before.
    """
    trainer.fit_loop._restarting = False


def restore_metrics(trainer: Trainer, metrics: Metrics) -> None:
    """Add metrics of a checkpoint to those that callbacks and schedulers read, until they are logged again."""
    trainer._logger_connector._callback_metrics.update(metrics)


def skip_rate_finders(trainer: Trainer, patcher: ModelPatcher) -> None:
    """Have no LearningRateFinder search in a run that resumes; call it when its checkpoint is open, before
    ``on_fit_start``. The patcher undoes it.

    After its trial Lightning (2.6.6) forgets the checkpoint of the run: only its weights would be used, and training
    would begin again at step 0 with a new optimizer.
    """
    for callback in getattr(trainer, "callbacks", ()) if trainer.ckpt_path is not None else ():
        if isinstance(callback, LearningRateFinder):
            rank_zero_info(f"{type(callback).__name__} is skipped: the rates of the checkpoint go on.")
            patcher.set_attribute(callback, "lr_find", do_nothing)


def is_in_window(trainer: Trainer) -> bool:
    """Return whether gradients of a window are partly accumulated, or a micro-batch is running."""
    progress = batch_progress(trainer).current
    return progress.processed < progress.ready or bool(trainer.fit_loop._should_accumulate())


def cluster_environment(trainer: Trainer) -> Any:
    """Return the cluster environment of a Trainer."""
    return trainer._accelerator_connector.cluster_environment


def signal_connector(trainer: Trainer) -> Any:
    """Return the object that installs Lightning's own signal handlers."""
    return trainer._signal_connector


def sigterm_broadcast(trainer: Trainer) -> tuple[Any, str]:
    """Return the epoch loop and the name of its SIGTERM broadcast; the name is empty if the loop has none."""
    loop = trainer.fit_loop.epoch_loop
    return loop, _SIGTERM_BROADCAST if hasattr(loop, _SIGTERM_BROADCAST) else ""


def logged_step_values(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the latest step value of each name that ``self.log`` received in this training epoch, on its device.

    ``trainer.callback_metrics`` would read values logged with prog_bar=True, with a host sync.
    """
    results = trainer._results
    found = () if results is None else (item for _, item in results.valid_items() if item.meta.on_step)
    values = {item.meta.name: item._forward_cache for item in found}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.numel() == 1}


def drop_step_value(trainer: Trainer, name: str) -> None:
    """Forget the step value of a name that ``training_step`` does not log now; else loggers get the last one again."""
    results = trainer._results
    item = None if results is None else results.get(f"training_step.{name}")
    if item is not None:
        item.reset()


def checks_at_epoch_end(callback: Any) -> bool:
    """Return whether an EarlyStopping reads its metric at the end of a training epoch."""
    return bool(callback._check_on_train_epoch_end)


def wrap_monitored(trainer: Trainer, patcher: ModelPatcher, agree: Callable[[Metrics], Metrics]) -> None:
    """Pass the metrics that ModelCheckpoint, EarlyStopping and ReduceLROnPlateau read through ``agree``.

    The patcher undoes it.
    """

    def wrap(owner: Any, name: str, through: Callable[[Callable[[Any], Any], Any], Any]) -> None:
        patcher.set_attribute(owner, name, functools.partial(through, getattr(owner, name)))

    def read_candidates(read: Callable[[Trainer], Metrics], trainer: Trainer) -> Metrics:
        # After an exception (save_on_exception) the other ranks may be elsewhere.
        return read(trainer) if trainer.interrupted else agree(read(trainer))

    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, ModelCheckpoint):
            wrap(callback, "_monitor_candidates", read_candidates)
        if isinstance(callback, EarlyStopping):
            wrap(callback, "_evaluate_stopping_criteria", lambda judge, value: judge(agree({"": value})[""]))

    def read_plateau(read: Callable[[str], Any], name: str) -> Any:
        value = read(name)
        return agree({} if value is None else {name: value}).get(name)

    wrap(trainer.fit_loop.epoch_loop, "_get_monitor_value", read_plateau)


def save_last_step(trainer: Trainer, callback: ModelCheckpoint) -> None:
    """Let a ModelCheckpoint save at the end of training, unless it has saved this step or keeps only the best ones.

    Lightning has counted the last epoch as completed, also where a limit ended the run inside it. A run that resumes
    would train the rest of that epoch as the next one, so the count is that of ``on_train_epoch_end`` during the save.
    """
    if callback._should_skip_saving_checkpoint(trainer):
        return
    progress: Any = trainer.fit_loop.epoch_progress
    trackers = (progress.total, progress.current)
    for tracker in trackers:
        tracker.completed -= 1
    try:
        metrics = callback._monitor_candidates(trainer)
        if callback.monitor is None:
            callback._save_topk_checkpoint(trainer, metrics)
        callback._save_last_checkpoint(trainer, metrics)
    finally:
        for tracker in trackers:
            tracker.completed += 1


def wrap_average(callback: Any, patcher: ModelPatcher, wrap: Callable[[Any], Any]) -> None:
    """Wrap the function with which a WeightAveraging will average, if it has one, until the patcher undoes it."""
    options = callback._kwargs
    if options.get("avg_fn") is not None:
        patcher.set_attribute(callback, "_kwargs", {**options, "avg_fn": wrap(options["avg_fn"])})


def do_nothing(*_: object) -> None:
    """Do nothing, in place of Lightning's broadcast, because the ranks agree on the host."""
