"""Refuse what a schedule-free optimizer cannot work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.optimizer_twin import is_schedule_free

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_fastft.training.model.saved import SavedCausalLM


def check_two_points(optimizer: Optimizer, module: SavedCausalLM) -> None:
    """Refuse sharded weights, and callbacks that average weights.

    Raises:
        OptionError: The run has one of them.
    """
    name = type(optimizer).__name__
    if module.is_sharded:
        raise OptionError(
            f"{name} holds two values of each weight, and folders with shards have a place for one. Use "
            "strategy='fastft' or 'fastft_ddp', or FusedAdamW."
        )
    callbacks: list[object] = module.trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise OptionError(
                f"{type(callback).__name__} averages weights that {name} averages already. Remove the callback, or "
                "use another optimizer."
            )


def check_schedule(optimizer: Optimizer, scheduler: object) -> None:
    """Refuse a schedule of ours that lowers the learning rate of a schedule-free optimizer.

    Raises:
        OptionError: It does.
    """
    if is_schedule_free(optimizer) and isinstance(scheduler, str) and scheduler != "constant":
        raise OptionError(
            f"scheduler={scheduler!r} lowers the learning rate, and {type(optimizer).__name__} averages weights in "
            "place of that. Set scheduler='constant', after whose warm-up (warmup_share, warmup_steps) the rate stays."
        )
