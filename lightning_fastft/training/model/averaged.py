"""AveragedCausalLM: an EvaluatedCausalLM whose weights are the average of a schedule-free optimizer between steps."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_fastft.core.optimizer_twin import is_schedule_free
from lightning_fastft.training.model.evaluation import EvaluatedCausalLM
from lightning_fastft.training.optimization.schedule_free import check_two_points

# Key of checkpoints.
_POINT = "fastft_gradient_point"


class AveragedCausalLM(EvaluatedCausalLM):
    """Switch a schedule-free optimizer between its two points: y, where gradients are taken, and the average x.

    Training steps need y. Validation, saves, exports and ``generate`` read x, and so does all code after the fit. y is
    copied to the host before the switch and back before the next training batch, so that neither a validation nor a
    save changes a bit of the training. A checkpoint has x as weights, and y in addition, from which a run is resumed.
    Without such an optimizer nothing here does anything.

    Args:
        args: Of ``EvaluatedCausalLM``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # y of each trained parameter by name, on the host, while the parameters hold x.
        self._point: dict[str, torch.Tensor] | None = None
        # From the start of the training to its end: earlier optimizers of the Trainer are those of another fit.
        self._is_stepped = False

    def use_average(self) -> None:
        """Set the weights to the average x, which is evaluated and saved, until the next training batch.

        A callback that reads weights of ``module.model`` itself between two steps calls this first.

        Cost:
            Once after a step, with a schedule-free optimizer: a copy of the trained weights to the host.
        """
        optimizers = self._schedule_free_optimizers() if self._is_stepped and self._point is None else []
        if not optimizers:
            return
        held = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
        for optimizer in optimizers:
            # A callback of the user may have switched it to x.
            optimizer.train()
        self._point = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in self.named_parameters()
            if parameter in held
        }
        for optimizer in optimizers:
            optimizer.eval()
        self._refresh_low_precision_adapters()

    @torch.no_grad()
    def use_gradient_point(self) -> None:
        """Set the weights to y, bit for bit as before ``use_average``."""
        for optimizer in self._schedule_free_optimizers():
            optimizer.train()
        if self._point is None:
            return
        point, self._point = self._point, None
        for name, parameter in self.named_parameters():
            if name in point:
                parameter.copy_(point[name])
        self._refresh_low_precision_adapters()

    def setup(self, stage: str) -> None:
        """Begin a fit at the weights as they are; a checkpoint is restored later."""
        super().setup(stage)
        if stage == "fit":
            self._point, self._is_stepped = None, False

    def on_train_start(self) -> None:
        """Refuse what a schedule-free optimizer cannot work with; a subclass may have made it."""
        super().on_train_start()
        self._is_stepped = True
        for optimizer in self._schedule_free_optimizers():
            check_two_points(optimizer, self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Switch to y before a training batch."""
        self.use_gradient_point()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Switch back to y if a callback has saved since the forward."""
        self.use_gradient_point()
        super().backward(*args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Switch back to y if a callback has saved since the backward; the optimizer's step calls this hook."""
        self.use_gradient_point()

    def on_validation_model_eval(self) -> None:
        """Switch to x for a validation and its callbacks."""
        super().on_validation_model_eval()
        self.use_average()

    def state_dict(self, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the average x of the trained weights."""
        self.use_average()
        return super().state_dict(**kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add y, from which training continues."""
        super().on_save_checkpoint(checkpoint)
        if self._point is not None and "optimizer_states" in checkpoint:
            checkpoint[_POINT] = self._point

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore y to resume a run; every other use of a checkpoint keeps x."""
        super().on_load_checkpoint(checkpoint)
        is_resumed = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        self._point, self._is_stepped = checkpoint.get(_POINT) if is_resumed else None, False

    def _end_steps(self) -> None:
        """Leave x in the weights after a run, and keep y for a checkpoint that is saved later."""
        self.use_average()
        self._is_stepped = False

    def _schedule_free_optimizers(self) -> list[Any]:
        """Return the optimizers of the Trainer that have two points."""
        optimizers: list[Optimizer] = [] if self._trainer is None else self.trainer.optimizers
        return [optimizer for optimizer in optimizers if is_schedule_free(optimizer)]
