"""ExactResume: resume a run bit for bit from a checkpoint, and save one when a signal stops the run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.checkpoint.last import STOPPED
from lightning_fastft.checkpoint.lightning_internals import (
    batch_progress,
    begin_next_epoch,
    do_nothing,
    is_in_window,
    log_last_step,
    reopen_epoch,
    signal_connector,
    sigterm_broadcast,
)
from lightning_fastft.checkpoint.plateaus import ResumedPlateaus
from lightning_fastft.checkpoint.ranks import RankVote, on_all_ranks
from lightning_fastft.checkpoint.remote import is_remote
from lightning_fastft.checkpoint.rng import RandomState
from lightning_fastft.checkpoint.settings import STATE, collect_settings, describe_differences
from lightning_fastft.checkpoint.slurm import requeue_job, requeue_signal
from lightning_fastft.checkpoint.stops import STOP_SIGNALS, RunStopped, StopSignals
from lightning_fastft.checkpoint.trained_flags import TrainedFlags
from lightning_fastft.core.checks import check_bool, check_float
from lightning_fastft.core.errors import FastFTError
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_INTERRUPT_ANSWER = (
    "\nCtrl-C: the run saves at the next optimizer step and ends. A second Ctrl-C ends it at once, without saving.\n"
)


def checkpoint_folder(trainer: Trainer) -> str:
    """Return the folder or URL of the first ModelCheckpoint that has one, else the Trainer's default_root_dir."""
    folders = (callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return str(next((folder for folder in folders if folder is not None), trainer.default_root_dir))


class ExactResume(GivenOnce, Callback):
    """Save the state that Lightning checkpoints lack, so that a resumed run equals an uninterrupted one.

    The strategies of this package add it. The result is bit-equal if the kernels of the model are deterministic.

    Checkpoints get the random states of all ranks, which are restored at the first batch, the parameters that
    callbacks froze or unfroze during the run, and the metrics that ReduceLROnPlateau monitors. A checkpoint inside an
    accumulation window has the random states of the start of that window, because partial gradients are not saved.
    PackedDataModule repeats the window; for other data modules there is a warning. Settings that differ from those of
    the checkpoint are reported.

    After SIGTERM or SIGUSR1 all ranks save ``stopped-step=N.ckpt`` at the next optimizer step, and exit with code 143
    or 138. The folder is that of the first ModelCheckpoint, else the Trainer's ``default_root_dir``. A first Ctrl-C
    does the same with exit code 130. A second one, at least half a second later, raises KeyboardInterrupt without a
    save. Ctrl-C is unchanged in interactive sessions and if the script has its own handler. The ranks agree on the
    host, so Lightning's broadcast before each micro-batch, which has a host sync, is disabled.

    A signal during a validation ends it after the current batch in the same way; its metrics are lost, and the resumed
    run continues after it. A signal in or after ``on_train_end`` has no effect, and the run exits with 0. If a rank
    makes no progress for stop_timeout_s after SIGTERM or SIGUSR1, it prints its stacks to stderr and exits with 143 or
    138 without a save.

    Under SLURM with Lightning's auto_requeue, its requeue signal (SIGUSR1) saves in the same way, and then rank 0 calls
    ``scontrol requeue``. The requeued job continues as with ``ckpt_path="last"``, if it is given no other checkpoint.

    Args:
        stop_signals: Whether to handle SIGTERM, SIGUSR1 and a first Ctrl-C during training.
        stop_timeout_s: Seconds without a micro-batch or validation batch, after a signal, until a hung process ends
            itself, 1 to 86,400. It must exceed the longest micro-batch. Time spent in a save does not count.

    Raises:
        ResumeError: A setting of this run changes the tensor shapes of the checkpoint.

    Cost:
        About 100 microseconds of the host per optimizer step; with several ranks an all-reduce of 8 bytes on the host
        per optimizer step. No host sync.

    Source:
        own; random states are restored last, at the first batch, because creating loaders draws random numbers.

    Example:
        >>> ExactResume().status().state
        'inactive'
    """

    def __init__(self, *, stop_signals: bool = True, stop_timeout_s: float = 60.0) -> None:
        self.stop_signals = check_bool("stop_signals", stop_signals)
        self.stop_timeout_s = check_float("stop_timeout_s", stop_timeout_s, low=1.0, high=86_400.0)
        self._stops = StopSignals()
        self._vote = RankVote()
        self._num_val_votes = 0
        self._has_signals = self._has_stopped = False
        self._patcher = ModelPatcher()
        self._at_window_start: RandomState | None = None
        self._step_before = 0
        self._to_restore: RandomState | None = None
        self._flags = TrainedFlags()
        self._plateaus = ResumedPlateaus()
        self._has_warned = False
        self._seed = 0
        self._status = Status("exact resume", "inactive", "no training yet")

    def status(self) -> Status:
        """Return whether random states are saved and signals are handled."""
        return self._status

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the state of an earlier run; refuse a second callback of this class."""
        super().setup(trainer, pl_module, stage)
        self._stops.unwatch()
        self._stops = StopSignals()
        self._has_stopped = False
        self._at_window_start = self._to_restore = None
        self._flags = TrainedFlags()
        self._plateaus = ResumedPlateaus()
        self._seed = torch.initial_seed()

    # Random states and trained parameters.

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record which parameters are trained, and freeze those of a checkpoint; the optimizers are there."""
        self._flags.note(pl_module)
        self._flags.freeze(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add random states of all ranks, settings, and changes of ``requires_grad``. Every rank must call this."""
        self._stops.note_save()
        present = self._at_window_start if is_in_window(trainer) else None
        if present is not None:
            self._warn_of_lost_window(trainer)
        else:
            present = RandomState.capture(trainer.strategy.root_device)
            self._warn_of_lost_gradients(trainer, pl_module)
        states = on_all_ranks(present.to_plain, error=FastFTError)
        settings, flags = self._settings(trainer, pl_module), self._flags.changed(pl_module)
        checkpoint[STATE] = {
            "random": states,
            "settings": settings,
            "requires_grad": flags,
            "plateaus": self._plateaus.save(trainer),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the random state of this rank, restore which parameters are trained, and warn of other settings."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        reopen_epoch(checkpoint)
        state = checkpoint.get(STATE)
        if state is None:
            rank_zero_warn(
                "The checkpoint has no random states, because it was written without ExactResume. Dropout and other "
                "random numbers differ from those of an uninterrupted run."
            )
            return
        self._flags.restore(pl_module, state.get("requires_grad", {}))
        self._plateaus.load(state.get("plateaus", {}))
        for line in describe_differences(state["settings"], self._settings(trainer, pl_module)):
            rank_zero_warn(f"Resumed with another setting than that of the checkpoint: {line}.")
        states = state["random"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"The checkpoint has random states of {len(states)} ranks and this run has {trainer.world_size}, so "
                "random numbers differ."
            )
            return
        self._to_restore = RandomState.from_plain(states[trainer.global_rank])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restore the random states at the first batch of a resumed run; record them at the start of each window."""
        self._stops.note_progress()
        self._plateaus.note(has_validated=False)
        self._step_before = trainer.global_step
        device = trainer.strategy.root_device
        if self._to_restore is not None:
            state, self._to_restore = self._to_restore, None
            state.restore(device)
        if (batch_progress(trainer).current.ready - 1) % trainer.accumulate_grad_batches == 0:
            # Also without accumulation: a save after an exception in a micro-batch restarts that micro-batch.
            self._at_window_start = RandomState.capture(device)

    # Signals.

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers, after Lightning has installed its own."""
        self._take_signals(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers if there was no sanity check, create the process group, and find the epoch."""
        begin_next_epoch(trainer)
        # Strategies that shard load a checkpoint after on_fit_start.
        self._flags.freeze(pl_module)
        self._plateaus.start(trainer)
        self._take_signals(trainer)
        self._vote.open()
        self._disable_sigterm_broadcast(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Save and stop after an optimizer step if a rank received a signal.

        Raises:
            RunStopped: A SystemExit with 128 plus the number of the signal.
        """
        self._stops.note_progress()
        # With manual optimization a window ends with the micro-batch in which the module stepped.
        has_stepped = pl_module.automatic_optimization or trainer.global_step != self._step_before
        if has_stepped and not is_in_window(trainer):
            self._stop_if_told(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the number of validation batches that every rank has: the ranks can vote that often."""
        self._plateaus.note(has_validated=False)
        self._num_val_votes = 0
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            num_batches = sum(trainer.num_val_batches)
            self._num_val_votes = self._vote.fewest(0 if num_batches == float("inf") else int(num_batches))

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Record progress."""
        self._stops.note_progress()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Save and stop between two validation batches if a rank received a signal.

        Raises:
            RunStopped: A SystemExit with 128 plus the number of the signal.
        """
        self._stops.note_progress()
        if self._num_val_votes > 0:
            self._num_val_votes -= 1
            self._stop_if_told(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record that metrics are complete."""
        self._plateaus.note(has_validated=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have ReduceLROnPlateau move at the end of the epoch in which the run was resumed."""
        self._plateaus.end_epoch(trainer)

    def _stop_if_told(self, trainer: Trainer) -> None:
        number = self._vote.agree(self._stops.received)
        if not number:
            return
        if not trainer.validating:
            # Lightning would log this step after the hook.
            log_last_step(trainer)
        folder, name = checkpoint_folder(trainer), f"{STOPPED}{trainer.global_step}.ckpt"
        # A Path would remove a slash from a URL and save into a local folder.
        path = f"{folder.rstrip('/')}/{name}" if is_remote(folder) else Path(folder) / name
        trainer.save_checkpoint(path, weights_only=False)
        # Our strategies may still be writing it in the background.
        getattr(trainer.strategy, "finish_saves", do_nothing)()
        # The line of a progress bar has no end yet.
        line_end = "\n" if getattr(trainer.progress_bar_callback, "is_enabled", False) else ""
        rank_zero_info(
            f"{line_end}{signal.Signals(number).name}: the run was saved at optimizer step {trainer.global_step} and "
            f"ends. Resume with ckpt_path={path}, or repeat the command with --ckpt_path last"
        )
        if number == requeue_signal(trainer):
            # SLURM kills the other ranks as soon as one has ended, so all wait for the answer.
            answers = on_all_ranks(lambda: requeue_job() if trainer.is_global_zero else "", error=FastFTError)
            rank_zero_info(answers[0])
        self._has_stopped = True
        raise RunStopped(number, step=trainer.global_step, path=path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the process group; Lightning restores the signal handlers."""
        self._plateaus.note_end()
        self._stops.unwatch()
        self._patcher.undo()
        self._vote.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop the process group without waiting for other ranks."""
        self.release_signals(trainer)
        self._patcher.undo()
        self._vote.drop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching after a fit that trained nothing, for which Lightning calls no on_train_end."""
        self.release_signals(trainer)

    def release_signals(self, trainer: Trainer) -> None:
        """Stop watching for signals; after an error also restore the handlers, which Lightning may not do.

        The strategy calls this before any callback's ``on_exception`` or ``teardown``. If one of these raises,
        Lightning does not call the others, and the handlers of a finished run would answer the next signal.
        """
        self._stops.unwatch()
        if trainer.interrupted and not self._has_stopped:
            self._stops.uninstall()

    def _settings(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {**collect_settings(trainer, pl_module), "seed_everything": self._seed}

    def _take_signals(self, trainer: Trainer) -> None:
        connector, requeue = signal_connector(trainer), requeue_signal(trainer)
        signals = tuple(dict.fromkeys([*STOP_SIGNALS, *([signal.Signals(requeue)] if requeue else [])]))
        self._has_signals = False
        reason = "checkpoints hold the random states of all ranks"
        if not self.stop_signals:
            reason += "; signals are not handled (stop_signals=False)"
        elif self._stops.install(signals, is_ignored=lambda handler: getattr(handler, "__self__", None) is connector):
            self._has_signals = True
            self._stops.watch(self.stop_timeout_s)
            reason += f"; {' and '.join(number.name for number in signals)} save and end the run" + (
                f"; after {signal.Signals(requeue).name} SLURM requeues the job" if requeue else ""
            )
            if self._stops.install_interrupt(_INTERRUPT_ANSWER if trainer.is_global_zero else ""):
                reason += ", and so does a first Ctrl-C"
            if connector.received_sigterm:
                # The signal came before these handlers were installed. Lightning would end the run inside a window,
                # with exit code 0.
                connector.received_sigterm = False
                self._stops.received = signal.SIGTERM
        else:
            reason += "; signals are not handled (this is not the main thread)"
        self._status = Status("exact resume", "active", reason)

    def _disable_sigterm_broadcast(self, trainer: Trainer) -> None:
        """Disable Lightning's broadcast if every rank handles signals here. All ranks must call this."""
        loop, broadcast = sigterm_broadcast(trainer)
        self._patcher.undo()
        if trainer.world_size > 1 and broadcast and self._vote.everywhere(self._has_signals):
            self._patcher.set_attribute(loop, broadcast, do_nothing)
            self._status = self._status._replace(
                reason=f"{self._status.reason}; ranks agree on the host, in place of Lightning's broadcast before each "
                "micro-batch"
            )

    def _warn_of_lost_window(self, trainer: Trainer) -> None:
        """Warn where the data module cannot repeat the start of a window."""
        if not self._has_warned and not getattr(getattr(trainer, "datamodule", None), "repeats_windows", False):
            self._has_warned = True
            rank_zero_warn(
                "A checkpoint was saved inside an accumulation window. Its partial gradients are not saved, so a "
                "resumed run skips these micro-batches (PackedDataModule repeats them). Save at optimizer steps with "
                "ModelCheckpoint(every_n_train_steps=...), or make val_check_interval a multiple of "
                "accumulate_grad_batches."
            )

    def _warn_of_lost_gradients(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn where manual optimization has accumulated gradients and not stepped."""
        if pl_module.automatic_optimization or self._has_warned or trainer.global_step != self._step_before:
            return
        if any(parameter.grad is not None for parameter in pl_module.parameters()):
            self._has_warned = True
            rank_zero_warn(
                "A checkpoint was saved in manual optimization after a micro-batch without a step. Accumulated "
                "gradients are not saved, so a resumed run steps without them. Save at optimizer steps with "
                "ModelCheckpoint(every_n_train_steps=...)."
            )
