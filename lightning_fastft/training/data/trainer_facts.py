"""What a DataModule reads from the Trainer; each function takes None for a run without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_fastft.checkpoint.lightning_internals import batch_progress
from lightning_fastft.core.checks import check_replaceable
from lightning_fastft.core.errors import ContextError, OptionError
from lightning_fastft.packing.reading.sources import REJECTED
from lightning_fastft.packing.rows.rejects import is_rejects

# Options that name the data of trainer.validate and trainer.test.
_DATA_OPTIONS: dict[tuple[object, str], str] = {
    (TrainerFn.VALIDATING, "val"): "val_paths or val_share (--data.val_paths FILE or --data.val_share 0.05)",
    (TrainerFn.TESTING, "test"): "test_paths (--data.test_paths FILE)",
}


class LoopFacts(NamedTuple):
    """Facts of a custom training loop that a DataModule reads, under the names of a Trainer.

    Args:
        world_size: Number of ranks.
        global_rank: Index of this rank.
        accumulate_grad_batches: Micro-batches per optimizer step.
        strategy: Has ``root_device``.
        lightning_module: The module that is trained; None if it is not known yet.
    """

    world_size: int
    global_rank: int
    accumulate_grad_batches: int
    strategy: Any
    lightning_module: Any


def find_ranks(trainer: Trainer | LoopFacts | None) -> tuple[int, int]:
    """Return how many processes train different data, and which of them this one is."""
    if trainer is None:
        return 1, 0
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy) and torch.distributed.is_initialized():
        # Tensor-parallel ranks share their data. Only the mesh, which exists once processes do, knows them.
        data_parallel = strategy.distributed_sampler_kwargs
        return int(data_parallel["num_replicas"]), int(data_parallel["rank"])
    size = find_context_size(trainer)
    return trainer.world_size // size, trainer.global_rank // size


def find_context_size(trainer: Trainer | LoopFacts | None) -> int:
    """Return the number of processes that share each pack: ``context_parallel`` of the strategy."""
    return 1 if trainer is None else int(getattr(trainer.strategy, "context_parallel", 1))


def find_accumulation(trainer: Trainer | LoopFacts | None) -> int:
    """Return the micro-batches of an accumulation window.

    Raises:
        OptionError: A callback changes it, or the size of a pack, during the run.
    """
    if trainer is None:
        return 1
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, GradientAccumulationScheduler):
            raise OptionError(
                f"GradientAccumulationScheduler({callback.scheduling}) changes accumulate_grad_batches during a run; "
                "the plan weighs whole windows of one length. Remove the callback and set "
                "Trainer(accumulate_grad_batches=...)."
            )
        if isinstance(callback, BatchSizeFinder):
            raise OptionError(
                "BatchSizeFinder changes an attribute, but packs are planned before it runs, so each trial would train "
                "the same packs. Remove the callback, and set max_tokens; fastft plan shows what fits."
            )
    return int(trainer.accumulate_grad_batches)


def has_trained(trainer: Trainer | None) -> bool:
    """Return whether an earlier fit of this Trainer trained a batch."""
    return trainer is not None and batch_progress(trainer).total.processed > 0


def repeats_first_epoch(trainer: Trainer | None) -> bool:
    """Return whether every epoch is like the first: ``Trainer(overfit_batches=...)``."""
    return getattr(trainer, "overfit_batches", 0) > 0


def ends_by_count(trainer: Trainer) -> bool:
    """Return whether a run ends on data whose epochs do not: by steps, or by whole epochs of limited micro-batches."""
    has_epochs = trainer.max_epochs is not None and trainer.max_epochs > 0
    return trainer.max_steps >= 0 or (has_epochs and isinstance(trainer.limit_train_batches, int))


def check_limits(trainer: Trainer) -> None:
    """Check the limits of a run on data whose epochs have no end: none is a share, and they end with a window.

    Raises:
        OptionError: limit_train_batches is a share or not a multiple of accumulate_grad_batches, a callback changes
            that number, or val_check_interval is a share and epochs have no limit.
    """
    limit, interval, accumulate = trainer.limit_train_batches, trainer.val_check_interval, find_accumulation(trainer)
    if isinstance(limit, float) and 0.0 < limit < 1.0:
        raise OptionError(
            f"limit_train_batches={limit} is a share of an epoch, and an epoch of this data has no end. Give a number "
            "of micro-batches, or end the run by steps alone: --trainer.max_steps N."
        )
    if isinstance(limit, int) and limit % accumulate:
        # Trainer(fast_dev_run=N) sets limit_train_batches.
        given = "fast_dev_run" if getattr(trainer, "fast_dev_run", False) else "limit_train_batches"
        raise OptionError(
            f"{given}={limit} cuts an accumulation window, whose loss is a mean over all its micro-batches: give a "
            f"multiple of accumulate_grad_batches={accumulate}."
        )
    if isinstance(interval, float) and interval < 1.0 and not isinstance(limit, int):
        raise OptionError(
            f"val_check_interval={interval} is a share of an epoch, and an epoch of this data has no end. Give a "
            "number of micro-batches: --trainer.val_check_interval N."
        )


def check_rollout_run(trainer: Trainer | None) -> None:
    """Check that a run that samples its data ends.

    Raises:
        OptionError: Nothing ends it, or an option is a share: an epoch of rollouts has no last batch.
    """
    if trainer is None:
        return
    check_limits(trainer)
    timers = (callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, Timer))
    if ends_by_count(trainer) or any(timer.time_remaining() is not None for timer in timers):
        return
    raise OptionError(
        f"Rollouts are sampled without an end, so max_epochs={trainer.max_epochs} never ends the run. Say when it "
        "ends: --trainer.max_steps N (or --trainer.max_time DD:HH:MM:SS)."
    )


def uses_cuda(trainer: Trainer | LoopFacts | None) -> bool:
    """Return whether the run computes on CUDA; without a Trainer, whether it could."""
    return torch.cuda.is_available() if trainer is None else trainer.strategy.root_device.type == "cuda"


def find_run_folder(trainer: Trainer) -> Path:
    """Return Trainer.log_dir of rank 0, without the broadcast in it.

    ``prepare_data`` runs on one rank, and a broadcast would wait for the others.
    """
    logger = next(iter(trainer.loggers), None)
    folder = logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else getattr(logger, "save_dir", None)
    return Path(folder or trainer.default_root_dir)


def find_rejected_file(trainer: Trainer | None, *, path: str | None, split: str, rank: int) -> Path | None:
    """Return the file of a split's rejected rows on one rank: at a path, else in the run's folder; None without both.

    Raises:
        OptionError: The file holds anything but rejected rows.
    """
    if path is not None:
        file = Path(path).expanduser()
    elif trainer is not None:
        file = find_run_folder(trainer) / REJECTED
    else:
        return None
    file = file if split == "train" else file.with_stem(f"{file.stem}_{split}")
    file = file.with_stem(f"{file.stem}_rank{rank}") if rank else file
    return check_replaceable("The file of rejected rows (rejected_path)", file, is_ours=is_rejects)


def check_not_evaluated(trainer: Trainer | None, *, split: str) -> None:
    """Check that a split without data is not the one to evaluate, which Lightning would skip without a word.

    Raises:
        OptionError: ``trainer.validate`` or ``trainer.test`` has nothing to evaluate.
    """
    if trainer is None or trainer.state.status != TrainerStatus.RUNNING:
        return
    if options := _DATA_OPTIONS.get((trainer.state.fn, split)):
        raise OptionError(f"There is no data to evaluate: give {options}.")


def check_accumulation(trainer: Trainer, *, planned: int) -> None:
    """Check that accumulation is as planned.

    Raises:
        OptionError: It changed during the run.
    """
    if trainer.accumulate_grad_batches != planned:
        raise OptionError(
            f"accumulate_grad_batches changed from {planned} to {trainer.accumulate_grad_batches} during the run. "
            "The plan weighs whole windows of one length; keep it constant, or begin a new fit."
        )


def check_prepared(trainer: Trainer) -> None:
    """Check that transformers models in the LightningModule of a running Trainer have packed attention.

    Raises:
        ContextError: Documents of a pack would see each other.
    """
    # Without an import of transformers there is no transformers model. After a run its models are restored, and a loop
    # of your own may read the batches.
    if "transformers" not in sys.modules or trainer.state.status != TrainerStatus.RUNNING:
        return
    from lightning_fastft.patches.packed import describe_unprepared

    unprepared = describe_unprepared(trainer.lightning_module)
    if unprepared:
        raise ContextError(
            f"Packed documents would see each other: {unprepared} has no packed attention, and "
            f'{type(trainer.strategy).__name__} installs none. Use Trainer(strategy="fastft"), or add '
            "PackedTraining() to the callbacks."
        )
