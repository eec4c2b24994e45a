"""Check, before the first step, that the metrics which callbacks and schedulers monitor can be there when they
are read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.lightning_internals import batch_progress, checks_at_epoch_end
from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    import lightning.pytorch as pl


# Lightning gives these to ModelCheckpoint.
_ALWAYS_THERE = frozenset({"epoch", "step"})


def check_monitors(trainer: pl.Trainer) -> None:
    """Name monitors that nothing logs, and refuse early stopping in a run that ends before its first validation.

    The names that are logged are known of a module with an attribute ``logged_names`` alone, as a FineTuner has it.

    Args:
        trainer: In ``on_train_start``, when loaders and a restored position are known.

    Raises:
        OptionError: EarlyStopping would find no validation metric at the end of the run.
    """
    known: frozenset[str] | None = getattr(trainer.lightning_module, "logged_names", None)
    for owner, monitor in _monitors(trainer):
        if known is not None and monitor not in known | _ALWAYS_THERE:
            near = difflib.get_close_matches(monitor, known, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            module = type(trainer.lightning_module).__name__
            rank_zero_warn(
                f"{owner} monitors {monitor!r}, which {module} does not log.{meant} It logs {', '.join(sorted(known))}."
            )
    for callback in getattr(trainer, "callbacks", ()):
        if (
            isinstance(callback, EarlyStopping)
            and callback.monitor.startswith("val")
            and _ends_before_validation(trainer, callback)
        ):
            raise OptionError(
                f"EarlyStopping(monitor={callback.monitor!r}) looks at the end of an epoch, and "
                f"max_steps={trainer.max_steps} ends this run inside "
                "one, before a validation. Validate earlier with Trainer(val_check_interval=...), raise max_steps, or "
                "remove EarlyStopping."
            )


def _monitors(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    for callback in getattr(trainer, "callbacks", ()):
        # A double of a test may have no monitor.
        monitor = getattr(callback, "monitor", None)
        if isinstance(callback, (EarlyStopping, ModelCheckpoint)) and monitor:
            yield type(callback).__name__, monitor
    for entry in trainer.lr_scheduler_configs:
        if entry.reduce_on_plateau and entry.monitor:
            yield type(entry.scheduler).__name__, entry.monitor


def _ends_before_validation(trainer: pl.Trainer, callback: EarlyStopping) -> bool:
    """Whether max_steps ends the run inside an epoch whose end the callback waits for, and no metric is there
    from before.
    """
    if not (callback.strict and checks_at_epoch_end(callback) and trainer.enable_validation) or trainer.max_steps < 0:
        return False
    num_done = batch_progress(trainer).current.ready
    num_left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return num_done + num_left < trainer.num_training_batches and callback.monitor not in trainer.callback_metrics
