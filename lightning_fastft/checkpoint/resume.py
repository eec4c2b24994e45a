"""ExactResume: a run that goes on from a checkpoint as if it had never stopped, and that ends in a checkpoint
when it is told to stop.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.checkpoint.last import STOPPED
from lightning_fastft.checkpoint.lightning_internals import (
    ask_nobody,
    batch_progress,
    cluster_environment,
    is_in_window,
    question_of_ranks,
    signal_connector,
)
from lightning_fastft.checkpoint.ranks import RankVote, on_all_ranks
from lightning_fastft.checkpoint.remote import is_remote
from lightning_fastft.checkpoint.rng import RandomState
from lightning_fastft.checkpoint.stops import STOP_SIGNALS, RunStopped, StopSignals
from lightning_fastft.core.checks import check_bool, check_float
from lightning_fastft.core.errors import FastFTError, ResumeError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status

if TYPE_CHECKING:
    import lightning.pytorch as pl

STATE = "fastft_resume"
# Shapes of trained tensors follow from these: nothing could be resumed.
_FIXED = ("lora.r",)
# What an optimizer and its schedule bring along from the checkpoint, whatever this run says.
_RESTORED = ("learning_rate", "weight_decay", "seed_everything")
# The method of Lightning's epoch loop that asks rank 0 on the device, before each micro-batch, whether it was told to
# stop, and waits for the answer.
_INTERRUPT_ANSWER = (
    "\nCtrl-C: the run is saved at the next optimizer step and ends; a second Ctrl-C ends it at once, without saving.\n"
)
_TRAINER_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_steps",
    "max_epochs",
    "precision",
)


def checkpoint_folder(trainer: pl.Trainer) -> str:
    """Return the folder, or the URL of one, of the first ModelCheckpoint that has one, else the Trainer's."""
    folders = (callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return str(next((folder for folder in folders if folder is not None), trainer.default_root_dir))


class ExactResume(Callback):
    """Keep what a checkpoint of Lightning leaves out, so that the resumed run equals the one that went on, bit for bit
    where its kernels are.

    The strategies of this package add it. A checkpoint gets the random states of all ranks, restored at the first
    batch. One that is asked for inside an accumulation window stands for the beginning of that window, because
    half-summed gradients are in no checkpoint: it has the random states of then, and PackedDataModule trains the window
    again; other data modules are warned about. SIGTERM and SIGUSR1 are noted, and at the next optimizer step all ranks
    save ``stopped-step=N.ckpt`` (in the folder of the first ModelCheckpoint, else in the Trainer's
    ``default_root_dir``) and end with exit code 143 or 138. So does a first Ctrl-C, with exit code 130; a second one,
    half a second later or more, is a KeyboardInterrupt and saves nothing. In notebooks and other interactive sessions,
    and where the script has a handler of its own for it, Ctrl-C stays what it is. Settings that differ from those of
    the checkpoint are named. While signals are noted here on every rank, Lightning's own question of rank 0 before each
    micro-batch, for whose answer the host waits for the device, is left out: the ranks agree on the host.

    A signal that comes during a validation, the last one too, ends it between two of its batches in the same way; its
    metrics are lost, and the resumed run goes on behind it. One that comes later than that (``on_train_end``) changes
    nothing: the run did what it was asked, and exits with 0. A rank that hangs reaches no step: where nothing goes on
    for stop_timeout_s after a SIGTERM or SIGUSR1, the process writes its stacks to stderr and ends with 143 or 138,
    without a save.

    Args:
        stop_signals: Whether SIGTERM, SIGUSR1 and a first Ctrl-C are taken over during training. SLURM with automatic
            requeueing keeps Lightning's.
        stop_timeout_s: Seconds without a micro-batch or validation batch, after a signal, until a hung process ends
            itself, 1 to 86,400; more than the longest micro-batch takes. A save is waited for.

    Raises:
        ResumeError: A setting of this run makes the tensors of the checkpoint useless.

    Cost:
        About 100 microseconds of the host per optimizer step; with several ranks a sum of 8 bytes on the host per
        optimizer step. No host wait.

    Source:
        own; the order (random states last, at the first batch) because the making of loaders draws from the generators.

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
        self._has_signals = False
        self._patcher = ModelPatcher()
        self._at_window_start: RandomState | None = None
        self._step_before = 0
        self._to_restore: RandomState | None = None
        self._has_warned = False
        self._seed = 0
        self._status = Status("exact resume", "inactive", "no training yet")

    def status(self) -> Status:
        """Return whether random states are kept and signals noted."""
        return self._status

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin a run without anything of an earlier one."""
        self._stops.unwatch()
        self._stops = StopSignals()
        self._at_window_start = self._to_restore = None
        self._seed = torch.initial_seed()

    # Random states.

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random states of all ranks, and the settings; every rank makes this call."""
        self._stops.note_save()
        present = self._at_window_start if is_in_window(trainer) else None
        if present is not None:
            self._warn_of_lost_window(trainer)
        else:
            present = RandomState.capture(trainer.strategy.root_device)
        states = on_all_ranks(present.to_plain, error=FastFTError)
        checkpoint[STATE] = {"random": states, "settings": self._settings(trainer, pl_module)}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take up the random state of this rank, and name settings that differ."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        state = checkpoint.get(STATE)
        if state is None:
            rank_zero_warn(
                "The checkpoint has no random states (it was written without ExactResume): dropout and whatever else "
                "is drawn goes on differently."
            )
            return
        for line in describe_differences(state["settings"], self._settings(trainer, pl_module)):
            rank_zero_warn(f"Resumed with another setting than that of the checkpoint: {line}.")
        states = state["random"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"The checkpoint has random states of {len(states)} ranks and this run has {trainer.world_size}: what "
                "is drawn differs."
            )
            return
        self._to_restore = RandomState.from_plain(states[trainer.global_rank])

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the random states before the first batch of a resumed run; keep those with which a window begins."""
        self._stops.note_progress()
        self._step_before = trainer.global_step
        device = trainer.strategy.root_device
        if self._to_restore is not None:
            state, self._to_restore = self._to_restore, None
            state.restore(device)
        if (batch_progress(trainer).current.ready - 1) % trainer.accumulate_grad_batches == 0:
            # Without accumulation too: a save of an exception, inside the only micro-batch, stands for its beginning.
            self._at_window_start = RandomState.capture(device)

    # Signals.

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over as soon as Lightning has installed its own handlers."""
        self._take_signals(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over where there was no sanity check, and join the other ranks."""
        self._take_signals(trainer)
        self._vote.open()
        self._spare_the_device(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """At an optimizer step, save and end if a rank was told to stop.

        Raises:
            RunStopped: A SystemExit with 128 plus the number of the signal.
        """
        self._stops.note_progress()
        # A module that steps by hand has windows of its own: they end with the micro-batch in which it stepped.
        has_stepped = pl_module.automatic_optimization or trainer.global_step != self._step_before
        if has_stepped and not is_in_window(trainer):
            self._stop_if_told(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find how many validation batches every rank has: so often all of them can be asked."""
        self._num_val_votes = 0
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            num_batches = sum(trainer.num_val_batches)
            self._num_val_votes = self._vote.fewest(0 if num_batches == float("inf") else int(num_batches))

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Note that the run goes on."""
        self._stops.note_progress()

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Between two validation batches, save and end if a rank was told to stop.

        Raises:
            RunStopped: A SystemExit with 128 plus the number of the signal.
        """
        self._stops.note_progress()
        if self._num_val_votes > 0:
            self._num_val_votes -= 1
            self._stop_if_told(trainer)

    def _stop_if_told(self, trainer: pl.Trainer) -> None:
        number = self._vote.agree(self._stops.received)
        if not number:
            return
        folder, name = checkpoint_folder(trainer), f"{STOPPED}{trainer.global_step}.ckpt"
        # A Path would take a slash from a URL, and save into a local folder named after it.
        path = f"{folder.rstrip('/')}/{name}" if is_remote(folder) else Path(folder) / name
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(
            f"{signal.Signals(number).name}: the run was saved at optimizer step {trainer.global_step} and ends; go on "
            f"with ckpt_path={path}"
        )
        raise RunStopped(number, step=trainer.global_step, path=path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the other ranks; Lightning gives the signals back."""
        self._stops.unwatch()
        self._patcher.undo()
        self._vote.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Wait for no rank any more."""
        self._stops.unwatch()
        self._patcher.undo()
        self._vote.drop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the watch of a fit that trained nothing: Lightning calls no on_train_end then."""
        self._stops.unwatch()

    def _settings(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        return {**collect_settings(trainer, pl_module), "seed_everything": self._seed}

    def _take_signals(self, trainer: pl.Trainer) -> None:
        environment, connector = cluster_environment(trainer), signal_connector(trainer)
        self._has_signals = False
        reason = (
            "checkpoints hold the random states of all ranks; one written inside an accumulation window resumes "
            "at the start of it"
        )
        if not self.stop_signals:
            reason += "; signals are left alone (stop_signals=False)"
        elif isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            reason += "; SIGTERM and the requeue signal are Lightning's (SLURM requeues)"
        elif self._stops.install(
            STOP_SIGNALS, is_ignored=lambda handler: getattr(handler, "__self__", None) is connector
        ):
            self._has_signals = True
            self._stops.watch(self.stop_timeout_s)
            reason += (
                f"; {' and '.join(number.name for number in STOP_SIGNALS)} save at the next optimizer step and "
                "end the run"
            )
            if self._stops.install_interrupt(_INTERRUPT_ANSWER if trainer.is_global_zero else ""):
                reason += ", and so does a first Ctrl-C"
            if connector.received_sigterm:
                # It came between Lightning's handlers and ours; Lightning would end the run inside a window, with exit
                # code 0.
                connector.received_sigterm = False
                self._stops.received = signal.SIGTERM
        else:
            reason += "; signals are left alone (this is not the main thread)"
        self._status = Status("exact resume", "active", reason)

    def _spare_the_device(self, trainer: pl.Trainer) -> None:
        """Leave out Lightning's question, where on every rank the signals come here; all ranks make this call."""
        loop, asking = question_of_ranks(trainer)
        self._patcher.undo()
        if trainer.world_size > 1 and asking and self._vote.everywhere(self._has_signals):
            self._patcher.set_attribute(loop, asking, ask_nobody)
            self._status = self._status._replace(
                reason=f"{self._status.reason}; ranks agree on the host, in place of Lightning's question before each "
                "micro-batch"
            )

    def _warn_of_lost_window(self, trainer: pl.Trainer) -> None:
        """Say that data which cannot go back loses the beginning of a window."""
        if not self._has_warned and not hasattr(getattr(trainer, "datamodule", None), "plan"):
            self._has_warned = True
            rank_zero_warn(
                "A checkpoint was asked for inside an accumulation window: its gradients are not kept, and a run that "
                "is resumed from it does not "
                "train these micro-batches, unless the data goes back to the beginning of the window, as "
                "PackedDataModule does. Save every so many "
                "optimizer steps (ModelCheckpoint(every_n_train_steps=...)), or make val_check_interval a multiple of "
                "accumulate_grad_batches."
            )


def collect_settings(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """Return by dotted name what a user sets and a run depends on: plain types only."""
    found = {name: getattr(trainer, name) for name in _TRAINER_SETTINGS}
    hparams = dict(getattr(pl_module, "hparams", {}))
    return {
        name: value
        for name, value in (found | flatten(hparams)).items()
        if isinstance(value, (int, float, str, list, tuple, type(None)))
    }


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name; names that begin with an underscore are left out.

    Example:
        >>> flatten({"lora": {"r": 4}, "_x": 1})
        {'lora.r': 4}
    """
    found: dict[str, Any] = {}
    for name, value in nested.items():
        if str(name).startswith("_"):
            continue
        if isinstance(value, Mapping):
            found.update(flatten(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def describe_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line per setting that differs, with both values and the one that counts."""
    lines = []
    for name in sorted(saved.keys() & current.keys()):
        before, now = saved[name], current[name]
        if _plain(before) != _plain(now):
            effect = "the checkpoint's goes on" if name in _RESTORED else "this run's counts"
            lines.append(f"{name} was {before!r} and is {now!r} ({effect})")
    return lines


def check_settings(checkpoint: Mapping[str, Any], trainer: pl.Trainer) -> None:
    """Refuse settings with which the tensors of a checkpoint cannot be used, before one of them is.

    Raises:
        ResumeError: With the name and both values.
    """
    saved = checkpoint.get(STATE, {}).get("settings", {})
    current = collect_settings(trainer, trainer.lightning_module)
    wrong = [
        f"{name} was {saved[name]!r} and is {current.get(name)!r}"
        for name in _FIXED
        if name in saved and current.get(name) != saved[name]
    ]
    if wrong:
        raise ResumeError(
            f"The checkpoint does not fit this run: {'; '.join(wrong)}. Resume with the values of the checkpoint, or "
            "begin a new run without it."
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
