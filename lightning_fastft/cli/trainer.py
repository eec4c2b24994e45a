"""FastFTTrainer: a Trainer for the command line with a logging interval that depends on the length of the run."""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning.pytorch import Trainer

# Each logged step has a host sync, so long runs keep Lightning's interval; short runs log this many times.
LONGEST_INTERVAL, TIMES_IN_A_RUN = 50, 10


class FastFTTrainer(Trainer):
    """Lightning's Trainer; with ``log_every_n_steps="auto"`` short runs log their loss too.

    Args:
        *args: As Lightning's Trainer.
        log_every_n_steps: Optimizer steps between two logged steps. "auto" is 50, or less for a short run: a tenth of
            its steps, and at least once per epoch. None is Lightning's default, 50.
        **kwargs: As Lightning's Trainer.
    """

    def __init__(self, *args: Any, log_every_n_steps: int | Literal["auto"] | None = "auto", **kwargs: Any) -> None:
        self._is_auto = log_every_n_steps == "auto"
        super().__init__(*args, log_every_n_steps=None if log_every_n_steps == "auto" else log_every_n_steps, **kwargs)

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
