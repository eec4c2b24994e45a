"""RunLength: report the length of a run before it begins, and runs with nothing left to train."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.core.errors import OptionError, ResumeError, count
from lightning_fastft.core.phases import begin_phase, log_phase
from lightning_fastft.training.data.describe import describe_epoch
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.reward import RewardTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# A shorter run is usually a mistake: long packs with only a few hundred rows.
FEWEST_STEPS = 10


# The loader of a command, which refuses to evaluate without data.
_NEEDED = {TrainerFn.VALIDATING: "val_dataloader", TrainerFn.TESTING: "test_dataloader"}


def check_has_end(options: Mapping[str, Any]) -> None:
    """Refuse a run without an end, which Lightning would train for 1,000 epochs, and one that ends before its first
    step, silently.

    Args:
        options: Those of the trainer.

    Raises:
        OptionError: max_epochs, max_steps and max_time are not set, or one option leaves nothing to train.
    """
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        value = options.get(name)
        # fast_dev_run sets all of them.
        if value == 0 and not isinstance(value, bool) and not options.get("fast_dev_run"):
            raise OptionError(
                f"--trainer.{name} is {value}, so nothing would be trained. Give a larger number, or evaluate with "
                "fastft validate."
            )
    is_endless = options.get("max_steps", -1) in (None, -1)
    if is_endless and not any(options.get(name) for name in ("max_epochs", "max_time", "fast_dev_run")):
        raise OptionError(
            "The run has no end: give --trainer.max_epochs 1, --trainer.max_steps N or --trainer.max_time DD:HH:MM:SS "
            "(max_epochs -1 trains until you stop it)."
        )


class RunLength(Callback):
    """Log the optimizer steps of an epoch, warn if there are very few, and reject a checkpoint past the end of the run.

    Raises:
        OptionError: There is no data to evaluate.
        ResumeError: The checkpoint has trained more epochs than max_epochs.
    """

    def __init__(self) -> None:
        self._has_trained = False
        self._first_batch, self._begin = "", 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the plan of the data module before the model is loaded."""
        self._has_trained = False
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, PackedDataModule) and trainer.state.fn in _NEEDED:
            getattr(data, _NEEDED[trainer.state.fn])()
        if stage != "fit" or not isinstance(data, PackedDataModule):
            return
        if data.is_streamed:
            rank_zero_info(f"Packs of {data.max_tokens} tokens, formed while the stream is read.")
            return
        plan = data.plan
        num_steps = math.ceil(plan.num_micro_batches / plan.accumulate)
        is_cut = plan.num_micro_batches < plan.num_uncut_micro_batches
        epoch = describe_epoch(
            num_packs=len(plan.packs),
            num_extra_packs=plan.num_extra_packs,
            world_size=plan.world_size,
            accumulate=plan.accumulate,
        )
        cut = f", of which limit_train_batches leaves {num_steps}" if is_cut else ""
        rank_zero_info(f"Packs of {data.max_tokens} tokens; {epoch}{cut}.")
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            return
        num_all = num_steps * trainer.max_epochs
        # No warning if the user sets the number of steps or batches.
        is_set = is_cut or 0 <= trainer.max_steps < num_all
        if num_all < FEWEST_STEPS and not is_set:
            smaller = "--trainer.accumulate_grad_batches 1, " if plan.accumulate > 1 else ""
            rank_zero_warn(
                f"The whole run has {count(num_all, 'optimizer step')} (max_epochs={trainer.max_epochs}), too few to "
                f"learn much: {count(len(plan.packs), 'pack')} of max_tokens={data.max_tokens}, "
                f"accumulate_grad_batches={plan.accumulate}, {count(plan.world_size, 'rank')}. "
                f"For more steps: a smaller --data.max_tokens, {smaller}more --trainer.max_epochs."
            )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Reject a checkpoint past the last epoch, before Lightning does."""
        loops = checkpoint.get("loops")
        if trainer.state.fn != TrainerFn.FITTING or not loops or trainer.max_epochs is None or trainer.max_epochs < 0:
            return
        num_epochs = loops["fit_loop"]["epoch_progress"]["current"]["processed"]
        if num_epochs > trainer.max_epochs:
            raise ResumeError(
                f"The checkpoint {trainer.ckpt_path} has {num_epochs} epochs behind it and this run ends after "
                f"{trainer.max_epochs} "
                f"(trainer.max_epochs). Go on with --trainer.max_epochs {num_epochs + 1} or more, or take an earlier "
                "checkpoint."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record that training has started, and time its first batch."""
        if not self._has_trained:
            compiles = " (compiles kernels)" if trainer.strategy.root_device.type == "cuda" else ""
            self._first_batch = f"first batch{compiles}"
            self._begin = begin_phase(self._first_batch)
        self._has_trained = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report how long the host took for the first batch; later ones cost nothing."""
        if self._begin:
            log_phase(self._first_batch, time.perf_counter() - self._begin)
            self._begin = 0.0

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log where the trained model is, or that a resumed run had nothing left to train."""
        if self._has_trained:
            callback = trainer.checkpoint_callback
            saved = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
            if saved and isinstance(pl_module, Tuner):
                place = _shorten(saved)
                can_talk = not isinstance(pl_module, RewardTuner)
                plain = " --plain" if _is_plain(trainer) else ""
                talk = f" Talk with the model: fastft chat {shlex.quote(place)}{plain}" if can_talk else ""
                rank_zero_info(f"Saved {place}.{talk}")
        if self._has_trained or trainer.ckpt_path is None:
            return
        if 0 <= trainer.max_steps <= trainer.global_step:
            place, more = f"optimizer step {trainer.global_step} of max_steps={trainer.max_steps}", "max_steps"
        elif trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch:
            epoch = f"epoch {trainer.current_epoch} of max_epochs={trainer.max_epochs}"
            place, more = f"{epoch}, optimizer step {trainer.global_step}", "max_epochs"
        else:
            return
        rank_zero_info(
            f"Nothing was left to train: {trainer.ckpt_path} is at the end of this run ({place}). To continue, give a "
            f"higher --trainer.{more}."
        )


def _is_plain(trainer: Trainer) -> bool:
    """Return whether the run trained on plain text, without the chat template."""
    data = getattr(trainer, "datamodule", None)
    return isinstance(data, (PackedDataModule, RolloutDataModule)) and data.is_plain


def _shorten(path: str) -> str:
    """Return a path inside the current folder relative to it."""
    short = path if ":" in path else os.path.relpath(path)
    return path if short.startswith("..") else short
