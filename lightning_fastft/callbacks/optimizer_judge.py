"""OptimizerJudge: collect the effect of the first optimizer steps on the device, and check it on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.core.errors import NotTrainingError, list_names
from lightning_fastft.core.shards import local_values
from lightning_fastft.training.optimizer import FusedAdamW

# A run that ends early is checked if it has at least this many steps: LoRA's A gets its first gradient in the second
# step, because B starts at zero.
FEWEST_STEPS_TO_JUDGE = 3
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OptimizerJudge:
    """Check the tensors of one optimizer right after each of its first steps.

    Args:
        optimizer: The optimizer to watch.
        named: The trainable tensors of the module with their names; tensors of other optimizers are ignored.
        num_steps: Number of steps to check.
        is_allowed: Whether a tensor of that name may have no gradient.
        is_automatic: Whether Lightning runs the backward, so that a step without one was skipped.
        is_tower: Whether the tensors belong to image towers. The owner then sets ``has_labels`` only for windows with
            images, and a run without images is not an error.
        is_sharded: Whether ranks hold shards. They combine what they saw, so all of them must judge the same steps:
            those without labels count too.

    Cost:
        In checked steps two reads of the tensors and one of the optimizer state on the device; no host sync.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        num_steps: int,
        is_allowed: Callable[[str], bool],
        is_automatic: bool,
        is_tower: bool,
        is_sharded: bool,
    ) -> None:
        name_of = {id(parameter): name for name, parameter in named}
        # Tied tensors appear once in the module and once in the optimizer.
        watched = [
            (name_of[id(parameter)], parameter, number)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in name_of
        ]
        self.names = [name for name, _, _ in watched]
        self._parameters = [parameter for _, parameter, _ in watched]
        self._groups = [number for _, _, number in watched]
        self._optimizer = optimizer
        self._num_steps_to_judge = num_steps
        self._is_allowed = is_allowed
        self._is_automatic = is_automatic
        self.is_tower = is_tower
        self._is_sharded = is_sharded
        # State of the accumulation window so far. With manual optimization Lightning does not see a backward that is
        # called on the loss itself.
        self.has_labels = self.has_backward = False
        self.is_done = not watched
        self._has_gradient = [False] * len(watched)
        self._has_rate = [False] * len(watched)
        self._num_steps = self._num_judged = self._num_without_rate = self._num_without_labels = self._num_skipped = 0
        self._has_warned = False
        self._reader = AsyncScalarReader()
        self._last = torch.zeros(3, len(watched), dtype=torch.bool)
        if watched:
            self._device = self._parameters[0].device
            self._checksum_P = _checksums(self._written(), self._device)
            self._seen_3P = torch.zeros(3, len(watched), dtype=torch.bool, device=self._device)
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def close(self) -> None:
        """Stop watching the optimizer and free the tensors on the device."""
        self._handle.remove()
        self._reader.clear()

    def judge(self) -> None:
        """Check the results of earlier steps that have arrived on the host.

        Raises:
            NotTrainingError: A gradient was not finite, or a tensor has no gradient or did not move by the last checked
                step.
        """
        self._read(self._reader.poll())

    def finish(self) -> None:
        """Check a run that ended before num_steps, if it had enough steps; one host sync.

        Raises:
            NotTrainingError: A tensor had no gradient or did not move, or no step could train at all.
        """
        self._read(self._reader.wait())
        if self.is_done:
            return
        if self._num_judged >= FEWEST_STEPS_TO_JUDGE:
            self._raise_if_still(self._num_judged)
        elif self.is_tower:
            rank_zero_warn(
                f"GradientHealth: {len(self.names)} tensors of image towers were not checked: {self._num_judged} steps "
                f"had images, {FEWEST_STEPS_TO_JUDGE} are needed ({list_names(self.names)})."
            )
        elif self._num_judged == 0 and self._num_steps >= FEWEST_STEPS_TO_JUDGE:
            raise NotTrainingError(
                f"Nothing was trained in {self._num_steps} optimizer steps: {self._why_nothing_counts()}."
            )
        else:
            rank_zero_warn(
                f"GradientHealth checked nothing: the run had {self._num_judged} steps that could train, "
                f"{FEWEST_STEPS_TO_JUDGE} are needed."
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record one step that the optimizer made; host work and launches only."""
        has_labels = self.has_labels or self._is_sharded
        has_backward = self.has_backward or not self._is_automatic
        self.has_labels = self.has_backward = False
        if self.is_done:
            return
        self._num_steps += 1
        has_rate = [_is_above_zero(group["lr"]) for group in optimizer.param_groups]
        self._num_without_rate += not any(has_rate)
        self._num_without_labels += not has_labels
        self._num_skipped += not has_backward
        if not (any(has_rate) and has_labels and has_backward):
            self._warn_if_nothing_counts()
        elif self._num_judged < self._num_steps_to_judge:
            self._num_judged += 1
            # A fused optimizer under a gradient scaler decides on the device whether it skips.
            self._gather(has_rate, found_inf=getattr(optimizer, "found_inf", None))

    def _written(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that steps update: fp32 masters if the optimizer has them.

        Masters move even if their rounded values do not.
        """
        optimizer = self._optimizer
        written = (
            optimizer.master_of(each) if isinstance(optimizer, FusedAdamW) else each for each in self._parameters
        )
        return map(local_values, written)

    def _gather(self, has_rate: Sequence[bool], *, found_inf: torch.Tensor | None) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        for index, gradient in enumerate(gradients):
            self._has_gradient[index] |= gradient is not None
            self._has_rate[index] |= has_rate[self._groups[index]]
        largest_P = _largest_values(gradients, self._device)
        # The square of a finite gradient may overflow the moments. The moments themselves are read, because only the
        # optimizer knows whether it squares, whether it clips, and the dtype of its moments.
        is_finite_P = torch.isfinite(largest_P) & self._find_finite_state()
        has_moved_P = _checksums(self._written(), self._device) != self._checksum_P
        seen_3P = torch.stack([is_finite_P & (largest_P > 0), ~is_finite_P, has_moved_P])
        if found_inf is not None:
            seen_3P = seen_3P & (found_inf.reshape(()) == 0)
        if self._is_sharded:
            seen_by_all = seen_3P.to(torch.uint8)
            torch.distributed.all_reduce(seen_by_all, torch.distributed.ReduceOp.MAX)
            seen_3P = seen_by_all.bool()
        self._seen_3P = self._seen_3P | seen_3P
        self._reader.push((self._num_judged, self._num_steps), self._seen_3P)

    def _find_finite_state(self) -> torch.Tensor:
        """Return per parameter whether its optimizer state is finite; 8-bit moments by the scales of their blocks."""
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        names = {name: None for state in states for name, held in state.items() if name != "step" and _has_values(held)}
        is_finite_P = torch.ones(len(states), dtype=torch.bool, device=self._device)
        for name in names:
            held = [state.get(name) for state in states]
            largest_P = _largest_values([each if _has_values(each) else None for each in held], self._device)
            is_finite_P &= torch.isfinite(largest_P)
        return is_finite_P

    def _read(self, arrived: Sequence[tuple[Any, torch.Tensor]]) -> None:
        for (num_judged, num_steps), seen_3P in arrived:
            self._last = seen_3P
            # This copy has arrived on the host, so reading it is not a host sync.
            broken = [name for name, is_broken in zip(self.names, seen_3P[1].tolist()) if is_broken]
            if broken:
                raise NotTrainingError(
                    "Gradients, or the optimizer moments of their squares, are not finite (NaN or infinity) in "
                    f"optimizer step {num_steps} of this run for {len(broken)} of {len(self.names)} tensors: "
                    f"{list_names(broken)}. These tensors are corrupted: go back to the last checkpoint. Check the "
                    "learning rate, gradient clipping, the data of that step, and fp16 without a gradient scaler."
                )
            if num_judged >= self._num_steps_to_judge and not self.is_done:
                self.is_done = True
                self._raise_if_still(num_judged)

    def _raise_if_still(self, num_judged: int) -> None:
        # The latest copy that has arrived on the host.
        has_value, _, has_moved = self._last.tolist()
        idle = [name for name, has_rate in zip(self.names, self._has_rate) if not has_rate]
        if idle:
            rank_zero_warn(
                f"GradientHealth: {len(idle)} tensors have a learning rate of 0 and were not checked: "
                f"{list_names(idle)}."
            )
        judged = [
            index for index, name in enumerate(self.names) if self._has_rate[index] and not self._is_allowed(name)
        ]
        missing = [index for index in judged if not self._has_gradient[index]]
        zero = [index for index in judged if self._has_gradient[index] and not has_value[index]]
        still = [index for index in judged if has_value[index] and not has_moved[index]]
        causes = (
            (missing, "never had a gradient", "they are not part of the loss, or it was detached before them"),
            (zero, "only had gradients of exactly zero", "their output is detached, masked, or multiplied by zero"),
            (
                still,
                "had gradients and did not move",
                "the learning rate is too small for their dtype, or other code restores their values",
            ),
        )
        parts = [
            f"{len(found)} {what} ({list_names([self.names[index] for index in found])}): {why}"
            for found, what, why in causes
            if found
        ]
        if parts:
            raise NotTrainingError(
                f"{len(missing) + len(zero) + len(still)} of {len(self.names)} trainable tensors did not train in "
                f"{num_judged} steps: {'; '.join(parts)}. Freeze tensors that should not train (requires_grad=False). "
                "List tensors that may have no gradient, such as experts that got no token, in "
                'GradientHealth(allow_zero=["*.experts.*"]).'
            )

    def _warn_if_nothing_counts(self) -> None:
        if self.is_tower:
            return
        if self._num_steps >= self._num_steps_to_judge and self._num_judged == 0 and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"GradientHealth: nothing was trained in {self._num_steps} optimizer steps so far: "
                f"{self._why_nothing_counts()}."
            )

    def _why_nothing_counts(self) -> str:
        return (
            f"the learning rate was 0 in {self._num_without_rate} of them, {self._num_without_labels} had no labelled "
            "token or no unequal rewards, and "
            f"{self._num_skipped} were skipped because the training step returned nothing"
        )


def _checksums(parameters: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one integer per tensor that changes when its bits change.

    A change can cancel out in one step, but not in every step.
    """
    sums = [_bits(parameter.detach()).to(device, non_blocking=True) for parameter in parameters]
    return torch.stack(sums)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits read as integers, modulo their range.

    The sum has the type of the integers, so it needs no copy of the tensor.
    """
    is_whole = (
        tensor.is_contiguous() and tensor.nbytes % 4 == 0 and tensor.storage_offset() * tensor.element_size() % 4 == 0
    )
    if is_whole:
        return tensor.view(-1).view(torch.int32).sum(dtype=torch.int32).long()
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()]).sum(dtype=torch.int64)


def _largest_values(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return the largest absolute value per gradient, 0 without a gradient; squares would round tiny values to 0."""
    values = [None if gradient is None else stored_values(gradient) for gradient in gradients]
    # A shard may be empty.
    present = [each for each in values if each is not None and each.numel()]
    is_double = any(gradient.dtype is torch.float64 for gradient in present)
    dtype = torch.float64 if is_double else torch.float32
    found = iter(torch._foreach_norm(present, ord=float("inf")) if present else ())
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.stack(
        [
            zero if each is None or not each.numel() else next(found).to(device=device, dtype=dtype, non_blocking=True)
            for each in values
        ]
    )


def _has_values(held: object) -> bool:
    """Return whether an entry of an optimizer's state is a floating-point tensor."""
    return isinstance(held, torch.Tensor) and held.is_floating_point() and held.numel() > 0


def stored_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a gradient, dense or sparse; of a sharded one, those of this rank."""
    return gradient._values() if gradient.is_sparse else local_values(gradient)


def _is_above_zero(rate: float | torch.Tensor) -> bool:
    """Return whether a learning rate is above 0; a rate on the device counts as such, to avoid a host sync."""
    if isinstance(rate, torch.Tensor):
        return rate.device.type != "cpu" or float(rate) > 0
    return rate > 0
