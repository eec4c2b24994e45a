"""What a schedule-free optimizer cannot work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_fastft.training.tuner import Tuner


def check_schedule_free(optimizer: Optimizer, tuner: Tuner) -> None:
    """Refuse shards, a falling schedule and a second average with a schedule-free optimizer.

    Raises:
        OptionError: The run has one of them.
    """
    name = type(optimizer).__name__
    if tuner.is_sharded:
        raise OptionError(
            f"{name} holds two values of each weight, and folders with shards have a place for one. Use "
            "strategy='fastft' or 'fastft_ddp', or FusedAdamW."
        )
    if isinstance(tuner.scheduler, str) and tuner.scheduler != "constant":
        raise OptionError(
            f"scheduler={tuner.scheduler!r} lowers the learning rate, and {name} averages weights in place of that. "
            "Set scheduler='constant', after whose warm-up (warmup_share, warmup_steps) the rate stays."
        )
    callbacks: list[object] = tuner.trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise OptionError(
                f"{type(callback).__name__} averages weights that {name} averages already. Remove the callback, or "
                "use another optimizer."
            )
