"""GradientHealth: stop a run that does not train, and name the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_fastft.callbacks.late_copy import LateCopies
from lightning_fastft.checks import check_int
from lightning_fastft.errors import NotTrainingError
from lightning_fastft.status import Status
from lightning_fastft.strategies.packed_steps import find_packed_batches

if TYPE_CHECKING:
    import lightning.pytorch as pl

# A run that ends early is judged from here on: LoRA's A gets its first gradient in the second step, because B starts at zero.
FEWEST_STEPS_TO_JUDGE = 3
NUM_NAMES_SHOWN = 5
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradientHealth(Callback):
    """Judge the first optimizer steps: every trainable tensor must get a finite, non-zero gradient and must move at least once.

    Only steps count that could train: a learning rate above 0, at least one labelled token in the accumulation window, and not skipped (a training step
    that returned nothing, a gradient scaler that found infinities). A gradient that is not finite in such a step stops the run at once. What the optimizer
    consumed is looked at right after its step, after clipping. A run whose learning rate stays 0, or that never meets a labelled token, is warned about
    after num_steps optimizer steps and fails at its end. Later steps cost nothing.

    Args:
        num_steps: Steps to judge, at least 3.
        allow_zero: Name patterns (``*`` and ``?``) of tensors that may stay without a gradient, such as experts of a mixture that may get no token.

    Raises:
        NotTrainingError: From the training loop, with the names of the tensors and what to look at.

    Cost:
        In judged steps two reads of the trainable tensors on the device; results are copied to pinned memory and read a step late, no host wait.

    Source:
        own.

    Example:
        >>> GradientHealth(allow_zero=["*.experts.*"]).status().state
        'inactive'
    """

    def __init__(self, *, num_steps: int = 20, allow_zero: Sequence[str] = ()) -> None:
        self.num_steps = check_int("num_steps", num_steps, low=FEWEST_STEPS_TO_JUDGE)
        self.allow_zero = (allow_zero,) if isinstance(allow_zero, str) else tuple(allow_zero)
        self._judges: list[_OptimizerJudge] = []
        self._status = Status("gradient health", "inactive", "no training yet")

    def status(self) -> Status:
        """Return what is being judged, or the verdict."""
        return self._status

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """List the trainable tensors and begin to watch the optimizers."""
        self._stop_watching()
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            reason = f"{type(trainer.strategy).__name__} may hold its parameters in pieces, which this check does not read"
            self._status = Status("gradient health", "refused", reason, "use one device or DDP")
            return
        named = [(name, parameter) for name, parameter in pl_module.named_parameters() if parameter.requires_grad and parameter.numel() > 0]
        self._check_trainable(pl_module, named, trainer.optimizers)
        self._judges = [_OptimizerJudge(self, optimizer, named, is_automatic=pl_module.automatic_optimization) for optimizer in trainer.optimizers]
        self._status = Status("gradient health", "active", f"{len(named)} tensors, judged over the first {self.num_steps} steps that can train")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Count labelled tokens on the host; a batch that is not packed counts as labelled."""
        if self._judges:
            packed = find_packed_batches(batch)
            has_labels = any(found.context.num_labelled > 0 for found in packed) or not packed
            for judge in self._judges:
                judge.has_labels |= has_labels

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Note that this optimizer step has a backward."""
        for judge in self._judges:
            judge.has_backward = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:  # noqa: ANN401
        """Read what has arrived from earlier steps, and judge it."""
        for judge in self._judges:
            judge.read(judge.copies.poll())
        if self._judges and all(judge.is_done for judge in self._judges):
            num_tensors = sum(len(judge.names) for judge in self._judges)
            self._stop_watching()
            self._status = Status("gradient health", "active", f"{num_tensors} tensors moved within {self.num_steps} steps")
            rank_zero_info(f"GradientHealth: {self._status.reason}.")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge a run that ended before the steps were over."""
        for judge in self._judges:
            judge.read(judge.copies.wait())
            judge.finish()
        self._stop_watching()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop watching."""
        self._stop_watching()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop watching."""
        self._stop_watching()

    def is_allowed(self, name: str) -> bool:
        """Return whether a tensor may stay without a gradient."""
        return any(fnmatchcase(name, pattern) for pattern in self.allow_zero)

    def _check_trainable(self, module: nn.Module, named: list[tuple[str, nn.Parameter]], optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse a run in which some trainable tensor cannot move."""
        if not named:
            raise NotTrainingError(
                f"{type(module).__name__} has no trainable tensor: every parameter has requires_grad=False. Check that adapters were added after the base "
                "model was frozen, and that no precision plugin froze them."
            )
        owned = {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
        orphans = [name for name, parameter in named if id(parameter) not in owned and not self.is_allowed(name)]
        if orphans:
            raise NotTrainingError(
                f"{len(orphans)} of {len(named)} trainable tensors are in no optimizer and can never move: {_list(orphans)}. Build the optimizer in "
                "configure_optimizers from the parameters of the finished model, or set requires_grad=False on them."
            )

    def _stop_watching(self) -> None:
        for judge in self._judges:
            judge.close()
        self._judges = []


class _OptimizerJudge:
    """Gather, on the device, what the steps of one optimizer did to its tensors."""

    def __init__(
        self, owner: GradientHealth, optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], *, is_automatic: bool
    ) -> None:
        name_of = {id(parameter): name for name, parameter in named}
        self._owner = owner
        self._optimizer = optimizer
        # Of the accumulation window so far. With manual optimization Lightning sees no backward that is called on the loss itself.
        self.has_labels = False
        self.has_backward = False
        self._is_automatic = is_automatic
        self._groups: list[int] = []
        self.names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in name_of:
                    # Tied tensors appear once in the module and once in the optimizer.
                    self.names.append(name_of[id(parameter)])
                    self._parameters.append(parameter)
                    self._groups.append(number)
        self.copies = LateCopies()
        self.is_done = not self.names
        self._has_gradient = [False] * len(self.names)
        self._has_rate = [False] * len(self.names)
        self._num_steps = self._num_judged = self._num_without_rate = self._num_without_labels = self._num_skipped = 0
        self._has_warned = False
        self._last = torch.zeros(3, len(self.names), dtype=torch.bool)
        if self.names:
            self._device = self._parameters[0].device
            self._checksum_P = _checksums(self._parameters, self._device)
            self._seen_3P = torch.zeros(3, len(self.names), dtype=torch.bool, device=self._device)
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def close(self) -> None:
        """Stop watching the optimizer and drop what is on the device."""
        self._handle.remove()
        self.copies.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - torch's hook arguments
        """Judge one step that the optimizer really made; host work and launches only."""
        has_labels, has_backward = self.has_labels, self.has_backward or not self._is_automatic
        self.has_labels = self.has_backward = False
        if self.is_done:
            return
        self._num_steps += 1
        # A rate that lives on the device is taken as above 0: reading it would wait.
        has_rate = [_is_above_zero(group["lr"]) for group in optimizer.param_groups]
        self._num_without_rate += not any(has_rate)
        self._num_without_labels += not has_labels
        self._num_skipped += not has_backward
        if not (any(has_rate) and has_labels and has_backward):
            self._warn_if_nothing_counts()
            return
        if self._num_judged >= self._owner.num_steps:
            return
        self._num_judged += 1
        self._gather(has_rate)

    def _gather(self, has_rate: list[bool]) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        for index, gradient in enumerate(gradients):
            self._has_gradient[index] |= gradient is not None
            self._has_rate[index] |= has_rate[self._groups[index]]
        largest_P = _largest_values(gradients, self._device)
        is_finite_P = torch.isfinite(largest_P)
        moved_P = _checksums(self._parameters, self._device) != self._checksum_P
        seen_3P = torch.stack([is_finite_P & (largest_P > 0), ~is_finite_P, moved_P])
        # A fused optimizer under a gradient scaler decides on the device whether it skips.
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None:
            seen_3P = seen_3P & (found_inf.reshape(()) == 0)
        self._seen_3P = self._seen_3P | seen_3P
        self.copies.push((self._num_judged, self._num_steps), self._seen_3P)

    def read(self, arrived: list[tuple[Any, torch.Tensor]]) -> None:
        """Judge what has arrived on the host.

        Raises:
            NotTrainingError: A gradient was not finite, or the last step to judge leaves a tensor without a gradient or where it was.
        """
        for (num_judged, num_steps), seen_3P in arrived:
            self._last = seen_3P
            broken = [name for name, is_broken in zip(self.names, seen_3P[1].tolist()) if is_broken]
            if broken:
                raise NotTrainingError(
                    f"Gradients are not finite (NaN or infinity) in optimizer step {num_steps} of this run for {len(broken)} of {len(self.names)} tensors: "
                    f"{_list(broken)}. Their weights are spoilt: go back to the last checkpoint. Look at the learning rate, at gradient clipping, at the "
                    "data of that step, and at fp16 without a gradient scaler."
                )
            if num_judged >= self._owner.num_steps and not self.is_done:
                self.is_done = True
                self._raise_if_still(num_judged)

    def finish(self) -> None:
        """Judge a run that ended before the steps were over, if it had enough of them.

        Raises:
            NotTrainingError: A tensor was left without a gradient or where it was, or no step could train at all.
        """
        if self.is_done:
            return
        if self._num_judged >= FEWEST_STEPS_TO_JUDGE:
            self._raise_if_still(self._num_judged)
        elif self._num_judged == 0 and self._num_steps >= FEWEST_STEPS_TO_JUDGE:
            raise NotTrainingError(f"Nothing was trained in {self._num_steps} optimizer steps: {self._why_nothing_counts()}.")
        else:
            rank_zero_warn(f"GradientHealth judged nothing: the run had {self._num_judged} steps that could train, {FEWEST_STEPS_TO_JUDGE} are needed.")

    def _raise_if_still(self, num_judged: int) -> None:
        has_value, _, has_moved = self._last.tolist()
        missing, zero, still = [], [], []
        for index, name in enumerate(self.names):
            # A group that the user's schedule keeps at 0 is not asked to move.
            if self._owner.is_allowed(name) or not self._has_rate[index]:
                continue
            if not self._has_gradient[index]:
                missing.append(name)
            elif not has_value[index]:
                zero.append(name)
            elif not has_moved[index]:
                still.append(name)
        parts = []
        if missing:
            parts.append(f"{len(missing)} never had a gradient ({_list(missing)}): they are not part of the loss, or it was detached before them")
        if zero:
            parts.append(f"{len(zero)} only had gradients of exactly zero ({_list(zero)}): what they feed is cut off, masked, or multiplied by zero")
        if still:
            parts.append(f"{len(still)} had gradients and did not move ({_list(still)}): the learning rate is too small for their dtype, or they are reset")
        idle = [name for index, name in enumerate(self.names) if not self._has_rate[index]]
        if idle:
            rank_zero_warn(f"GradientHealth: {len(idle)} tensors have a learning rate of 0 and were not judged: {_list(idle)}.")
        if parts:
            raise NotTrainingError(
                f"{len(missing) + len(zero) + len(still)} of {len(self.names)} trainable tensors did not train in {num_judged} steps: {'; '.join(parts)}. "
                "Freeze what is not meant to train (requires_grad=False); tensors that may stay untouched for that long, such as experts that got no "
                'token, are named in GradientHealth(allow_zero=["*.experts.*"]).'
            )

    def _warn_if_nothing_counts(self) -> None:
        if self._num_steps >= self._owner.num_steps and self._num_judged == 0 and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"GradientHealth: nothing was trained in {self._num_steps} optimizer steps so far: {self._why_nothing_counts()}.")

    def _why_nothing_counts(self) -> str:
        return (
            f"the learning rate was 0 in {self._num_without_rate} of them, {self._num_without_labels} had no labelled token, and {self._num_skipped} were "
            "skipped because the training step returned nothing"
        )


def _checksums(parameters: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one integer per tensor that changes when its bits change; a change that cancels out once does not do so again and again."""
    with torch.no_grad():
        sums = [parameter.detach().view(_INTEGER_OF_SIZE[parameter.element_size()]).sum(dtype=torch.int64) for parameter in parameters]
        return torch.stack([value.to(device, non_blocking=True) for value in sums])


def _largest_values(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return the largest absolute value per gradient, 0 where there is none; not squared, so that nothing tiny becomes 0."""
    present = [_values(gradient) for gradient in gradients if gradient is not None]
    is_double = any(gradient.dtype is torch.float64 for gradient in present)
    dtype = torch.float64 if is_double else torch.float32
    found = iter(torch._foreach_norm(present, ord=float("inf")) if present else ())
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.stack([zero if gradient is None else next(found).to(device=device, dtype=dtype, non_blocking=True) for gradient in gradients])


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The stored values of a gradient, dense or sparse."""
    return gradient._values() if gradient.is_sparse else gradient


def _is_above_zero(rate: float | torch.Tensor) -> bool:
    return rate.device.type != "cpu" or bool(rate > 0) if isinstance(rate, torch.Tensor) else rate > 0


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_NAMES_SHOWN])
    return shown if len(names) <= NUM_NAMES_SHOWN else f"{shown}, and {len(names) - NUM_NAMES_SHOWN} more"
