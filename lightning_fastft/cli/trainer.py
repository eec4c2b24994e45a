"""FastFTTrainer: a Trainer for the command line that chooses its logging interval, and in a job its size."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from lightning_fastft.cli.final_save import FinalSave
from lightning_fastft.core.checks import check_float, check_int
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.strategies.launchers import refuse_several_processes

# Each logged step has a host sync, so long runs keep Lightning's interval; short runs log this many times.
LONGEST_INTERVAL, TIMES_IN_A_RUN = 50, 10


class FastFTTrainer(Trainer):
    """Lightning's Trainer that saves the last step; short runs log their loss too, and the launcher sets the nodes.

    torchrun and srun also set the number of devices, with a strategy for several: they start one process for each, and
    a config for one GPU then serves a job.

    Args:
        *args: As Lightning's Trainer.
        enable_progress_bar: False also drops progress bars from callbacks, because a command line cannot remove a
            callback of a config.
        num_nodes: Machines of the job. "auto" is the number that torchrun or srun started, and 1 without them.
        log_every_n_steps: Optimizer steps between two logged steps. "auto" is 50, or less for a short run: a tenth of
            its steps, and at least once per epoch. None is Lightning's default, 50.
        **kwargs: As Lightning's Trainer.

    Raises:
        OptionError: The launcher started several processes, or there are several nodes, and the strategy is for one
            device; or num_nodes is "auto", and NODE_RANK says that there are several nodes but not how many; or one of
            our callbacks is given twice, or two ModelCheckpoints differ in no more than their folder, or there are two
            progress bars.
    """

    def __init__(
        self,
        *args: Any,
        enable_progress_bar: bool | None = None,
        num_nodes: int | Literal["auto"] = "auto",
        log_every_n_steps: int | Literal["auto"] | None = "auto",
        **kwargs: Any,
    ) -> None:
        self._is_auto = log_every_n_steps == "auto"
        callbacks = kwargs.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if enable_progress_bar is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
        # WeightAveraging replaces the weights in its own on_train_end.
        kwargs["callbacks"] = [FinalSave(), *callbacks]
        _refuse_equal_savers(callbacks)
        _refuse_second_bar(callbacks)
        for callback in callbacks:
            # Their setup would refuse too, but after the data is tokenised.
            if isinstance(callback, GivenOnce):
                callback.check_given_once(callbacks)
        num_nodes = _count_nodes() if num_nodes == "auto" else num_nodes
        _take_devices_of_launcher(kwargs)
        super().__init__(
            *args,
            enable_progress_bar=enable_progress_bar,
            num_nodes=num_nodes,
            log_every_n_steps=None if log_every_n_steps == "auto" else log_every_n_steps,
            **kwargs,
        )
        refuse_several_processes(self.strategy, num_nodes=num_nodes)
        if self.gradient_clip_val is not None:
            check_float("trainer.gradient_clip_val", self.gradient_clip_val, low=0.0)
        if self.check_val_every_n_epoch is not None:
            check_int("trainer.check_val_every_n_epoch", self.check_val_every_n_epoch, low=1)
        if self.val_check_interval == 0:
            raise OptionError(
                "trainer.val_check_interval must be above 0, got 0. For a run without validation: "
                "--trainer.limit_val_batches 0"
            )
        if isinstance(log_every_n_steps, int):
            check_int("trainer.log_every_n_steps", log_every_n_steps, low=0)

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between two logged steps; "auto" is resolved once the loader is known."""
        if not self._is_auto:
            return self._log_every_n_steps
        num_steps = math.inf if self.max_steps < 0 else self.max_steps
        in_epoch = (
            math.ceil(self.num_training_batches / self.accumulate_grad_batches)
            if math.isfinite(self.num_training_batches)
            else math.inf
        )
        if self.max_epochs is not None and self.max_epochs > 0:
            num_steps = min(num_steps, in_epoch * self.max_epochs)
        return int(max(1, min(LONGEST_INTERVAL, num_steps / TIMES_IN_A_RUN, in_epoch)))

    @log_every_n_steps.setter
    def log_every_n_steps(self, interval: int) -> None:
        # Lightning sets the given value, or its default.
        self._log_every_n_steps = interval


def _refuse_equal_savers(callbacks: Iterable[Callback]) -> None:
    """Raise for two ModelCheckpoints that Lightning cannot tell apart, as when one is added to that of a config."""
    seen: dict[str, ModelCheckpoint] = {}
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        first = seen.setdefault(callback.state_key, callback)
        if first is not callback:
            raise OptionError(
                f"The run has two ModelCheckpoint callbacks, with dirpath={first.dirpath} and "
                f"dirpath={callback.dirpath}. The command line adds callbacks to those of the config: remove "
                "--trainer.callbacks+=ModelCheckpoint and write its options into the config."
            )


def _refuse_second_bar(callbacks: Iterable[Callback]) -> None:
    """Raise for two kinds of progress bars, as when one is added to that of a config; equal ones are refused later."""
    bars = [type(callback).__name__ for callback in callbacks if isinstance(callback, ProgressBar)]
    if len({*bars}) > 1:
        raise OptionError(
            f"The run has the progress bars {' and '.join(bars)}, and a Trainer takes one. The command line adds "
            f"callbacks to those of the config: write {bars[-1]} into a copy of the config in place of {bars[0]}."
        )


def _take_devices_of_launcher(options: dict[str, Any]) -> None:
    """Set devices to the number of processes that torchrun or srun started on this node, for strategies of several.

    Lightning refuses every other number. A function of its own, because jsonargparse reads the options of ``__init__``
    from its source.
    """
    strategy: str | Strategy = options.get("strategy", "auto")
    if strategy in ("auto", "fastft") or isinstance(strategy, SingleDeviceStrategy):
        return
    given = os.environ
    num_tasks = int(given.get("SLURM_STEP_NUM_TASKS", "1"))
    if "TORCHELASTIC_RUN_ID" in given:
        options["devices"] = int(given.get("LOCAL_WORLD_SIZE", "1"))
    elif num_tasks > 1:
        # A shell that srun started is one task, whose run may start processes itself.
        options["devices"] = num_tasks // int(given["SLURM_STEP_NUM_NODES"])


def _count_nodes() -> int:
    """Return the number of nodes that the launcher started: torchrun, else srun."""
    given = os.environ
    if "TORCHELASTIC_RUN_ID" in given:
        return int(given.get("WORLD_SIZE", "1")) // int(given.get("LOCAL_WORLD_SIZE", "1"))
    if "SLURM_STEP_NUM_NODES" in given:
        return int(given["SLURM_STEP_NUM_NODES"])
    if int(given.get("NODE_RANK", "0")) > 0:
        raise OptionError(
            f"NODE_RANK={given['NODE_RANK']} says that there are several nodes. Give their number on each of them: "
            "--trainer.num_nodes 2."
        )
    return 1
