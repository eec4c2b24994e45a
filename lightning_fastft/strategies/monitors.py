"""Check before the first step that loggers can log and that monitored metrics will exist; give all ranks one value."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.lightning_internals import batch_progress, checks_at_epoch_end, wrap_monitored
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import FastFTError, OptionError
from lightning_fastft.strategies.patching import callbacks_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastft.core.patcher import ModelPatcher

_LIBRARIES = ("lightning", "lightning_fastft")
# Lightning provides these to ModelCheckpoint.
_ALWAYS_THERE = frozenset({"epoch", "step"})


def check_loggers(trainer: Trainer) -> None:
    """Open the runs of W&B, as Lightning does next, and refuse one without a login.

    Raises:
        OptionError: W&B has no API key, and there is no terminal to ask for it.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None:
        return
    for logger in trainer.loggers:
        try:
            getattr(logger, "experiment", None)
        except wandb.errors.UsageError as error:
            raise OptionError(
                f"W&B has no API key ({error}). Log in with: wandb login. Or record offline, to upload later with "
                "wandb sync: set WANDB_MODE=offline, or --trainer.logger.offline true"
            ) from error


def check_monitors(trainer: Trainer) -> None:
    """Warn of monitors that are never logged, and refuse early stopping and checkpoints that would find no metric.

    Logged names are known only for modules with an attribute ``logged_names``, such as FineTuner. It is called when
    loaders and a restored position are known.

    Raises:
        OptionError: EarlyStopping would find no validation metric in the run or at its end, the monitor of
            EarlyStopping or ModelCheckpoint is a misspelled name of a metric, or ModelCheckpoint would save nothing
            because there is no validation.
    """
    known: frozenset[str] | None = getattr(trainer.lightning_module, "logged_names", None)
    # Callbacks of the user may log any name.
    callbacks = callbacks_of(trainer)
    has_others = any(type(found).__module__.partition(".")[0] not in _LIBRARIES for found in callbacks)
    for owner, monitor in _monitors(trainer):
        if known is not None and monitor not in known | _ALWAYS_THERE:
            near = difflib.get_close_matches(monitor, known, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            module = type(trainer.lightning_module).__name__
            told = f"{type(owner).__name__} monitors {monitor!r}, which {module} does not log.{meant} It logs "
            told += f"{', '.join(sorted(known))}."
            needs_it = owner.strict if isinstance(owner, EarlyStopping) else _saves_nothing_without(owner)
            if near and needs_it and not has_others:
                raise OptionError(told)
            rank_zero_warn(told)
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None) or ""
        is_of_validation = monitor.startswith("val")
        # Validations of the module log it, and nothing else does.
        is_ours = is_of_validation and known is not None and monitor in known and not has_others
        if is_ours and _saves_nothing_without(callback) and not _validates(trainer):
            raise OptionError(
                f"ModelCheckpoint(monitor={monitor!r}) would save nothing, because the run has no validation "
                "before its end. Give --data.val_share 0.05 or --data.val_paths FILE with a smaller "
                "--trainer.val_check_interval, or set save_last=True, or remove monitor."
            )
        if not isinstance(callback, EarlyStopping):
            continue
        if is_of_validation and _ends_before_validation(trainer, callback):
            raise OptionError(
                f"EarlyStopping(monitor={monitor!r}) reads its metric at the end of an epoch, but "
                f"max_steps={trainer.max_steps} ends this run inside an epoch, before a validation. Validate earlier "
                "with Trainer(val_check_interval=...), raise max_steps, or remove EarlyStopping."
            )
        is_tried = getattr(trainer, "fast_dev_run", False)
        if is_ours and callback.strict and not is_tried and not _has_validation(trainer):
            raise OptionError(
                f"EarlyStopping(monitor={monitor!r}) finds no metric, because the run has no validation. Give "
                "--data.val_share 0.05 or --data.val_paths FILE, or remove EarlyStopping."
            )


def share_monitored(trainer: Trainer, patcher: ModelPatcher) -> None:
    """Let ModelCheckpoint, EarlyStopping and ReduceLROnPlateau read the same values on every rank until an undo.

    A metric that was logged without ``sync_dist=True`` differs between ranks. They would otherwise train with different
    learning rates, and name files that rank 0 has not written.

    Cost:
        One all-gather of the metrics on the host at each check: a save or a validation, or each step of a
        ReduceLROnPlateau, which has a host sync anyway. Nothing with one rank.
    """
    if trainer.world_size > 1:
        wrap_monitored(trainer, patcher, mean_over_ranks)


def mean_over_ranks(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each metric's mean over the ranks that have it; an equal metric is returned as it is.

    All ranks must call this. Tensors with several elements stay as they are.

    Example:
        >>> mean_over_ranks({"train_loss": torch.tensor(2.0)})
        {'train_loss': tensor(2.)}
    """
    found = on_all_ranks(
        lambda: {name: float(value) for name, value in metrics.items() if value.numel() == 1}, error=FastFTError
    )
    shared = dict(metrics)
    for name in dict.fromkeys(name for own in found for name in own):
        values = [own[name] for own in found if name in own]
        if name not in metrics or len(set(values)) > 1:
            device = metrics[name].device if name in metrics else None
            shared[name] = torch.tensor(sum(values) / len(values), device=device)
    return shared


def _saves_nothing_without(callback: object) -> TypeGuard[ModelCheckpoint]:
    """Return whether a callback writes no checkpoint unless its monitor is logged."""
    return isinstance(callback, ModelCheckpoint) and bool(callback.monitor) and not callback.save_last


def _has_validation(trainer: Trainer) -> bool:
    """Return whether the run has validation data and does not skip it."""
    # A data module without such data gives an empty list of loaders.
    return bool(trainer.enable_validation) and trainer.val_dataloaders != []


def _validates(trainer: Trainer) -> bool:
    """Return whether the run has validation data and reaches a validation before max_steps."""
    if not _has_validation(trainer):
        return False
    if trainer.max_steps < 0 or trainer.num_training_batches == math.inf:
        return True
    num_left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    first = min(trainer.val_check_batch or math.inf, trainer.num_training_batches)
    return batch_progress(trainer).current.ready + num_left >= first


def _monitors(trainer: Trainer) -> Iterator[tuple[object, str]]:
    for callback in callbacks_of(trainer):
        # A test double may have no monitor.
        monitor = getattr(callback, "monitor", None)
        if isinstance(callback, (EarlyStopping, ModelCheckpoint)) and monitor:
            yield callback, monitor
    for entry in trainer.lr_scheduler_configs:
        if entry.reduce_on_plateau and entry.monitor:
            yield entry.scheduler, entry.monitor


def _ends_before_validation(trainer: Trainer, callback: EarlyStopping) -> bool:
    """Return whether max_steps ends the run before the end of an epoch at which the callback first finds a metric."""
    if not (callback.strict and checks_at_epoch_end(callback) and trainer.enable_validation) or trainer.max_steps < 0:
        return False
    num_done = batch_progress(trainer).current.ready
    num_left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return num_done + num_left < trainer.num_training_batches and callback.monitor not in trainer.callback_metrics
