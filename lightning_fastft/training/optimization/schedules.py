"""Parameter groups and learning-rate schedules, as plain functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_fastft.core.checks import check_choice
from lightning_fastft.core.errors import OptionError, ResumeError

SCHEDULES = ("cosine", "linear", "constant")


def group_parameters(
    parameters: Sequence[torch.nn.Parameter],
    *,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    undecayed: Collection[torch.nn.Parameter] = (),
    fast: Sequence[torch.nn.Parameter] = (),
    fast_rate: float | None = None,
) -> list[dict[str, Any]]:
    """Return the groups an optimizer is called with, each parameter in exactly one.

    Args:
        parameters: Trainable parameters.
        learning_rate: Rate of every group; None leaves the optimizer's own.
        weight_decay: Decay of matrices, with 0 for vectors (norms, biases); None leaves the optimizer's own for all.
        undecayed: Those of the parameters that have 0 whatever their shape.
        fast: Those of the parameters that have a rate of their own, in groups after the others (LoRA+).
        fast_rate: Their rate.

    Example:
        >>> norm, matrix = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))
        >>> groups = group_parameters([norm, matrix], weight_decay=0.1)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.1, 1), (0.0, 1)]
    """
    if fast:
        chosen = set(fast)
        slow = [parameter for parameter in parameters if parameter not in chosen]
        rates = ((slow, learning_rate), (fast, fast_rate))
        return [
            group
            for members, rate in rates
            if members
            for group in group_parameters(members, learning_rate=rate, weight_decay=weight_decay, undecayed=undecayed)
        ]
    shared = {} if learning_rate is None else {"lr": learning_rate}
    if weight_decay is None:
        return [{"params": list(parameters), **shared}]
    spared = set(undecayed)
    decays = [parameter.ndim > 1 and parameter not in spared for parameter in parameters]
    groups = [
        {
            "params": [parameter for parameter, has_it in zip(parameters, decays) if has_it is has_decay],
            "weight_decay": weight_decay if has_decay else 0.0,
            **shared,
        }
        for has_decay in (True, False)
    ]
    return [group for group in groups if group["params"]]


def learning_rate_schedule(
    name: str, *, num_steps: int, num_warmup_steps: int, end_share: float = 0.0
) -> Callable[[float], float]:
    """Return the function from optimizer step (from 0) to share of the peak learning rate; never 0 within the run.

    A warm-up equals that of transformers' schedules of one more step without their first one, whose rate is 0. Without
    a warm-up both are equal.

    Args:
        name: "cosine", "linear" or "constant": the way down after the warm-up.
        num_steps: Optimizer steps of the run; later steps stay at end_share.
        num_warmup_steps: Steps of the linear rise, the last of which has the peak.
        end_share: Share of the peak at which "cosine" and "linear" end.

    Raises:
        OptionError: name is unknown.

    Example:
        >>> share = learning_rate_schedule("linear", num_steps=5, num_warmup_steps=2)
        >>> [share(step) for step in range(6)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    check_choice("scheduler", name, SCHEDULES)

    return functools.partial(_share_of_peak, name, num_steps, num_warmup_steps, end_share)


def _share_of_peak(name: str, num_steps: int, num_warmup_steps: int, end_share: float, step: float) -> float:
    peak = max(0, num_warmup_steps - 1)
    if step < peak:
        return (step + 1) / num_warmup_steps
    if name == "constant":
        return 1.0
    done = min(1.0, (step - peak) / max(1, num_steps - peak))
    falling = 1.0 - done if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return end_share + (1.0 - end_share) * falling


class RunSchedule(LambdaLR):
    """A LambdaLR with one function for all groups, also for those that are added to the optimizer during a run.

    Callbacks that unfreeze layers add groups, and may set their rates again. From then on such a rate follows the
    schedule. torch's LambdaLR steps only optimizers with the groups that it was made with.

    Args:
        optimizer: Its present groups have their peak learning rates.
        share_of_peak: Takes the step, and returns the share of the peak.

    Example:
        >>> weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        >>> optimizer = torch.optim.SGD(weights[:1], lr=1.0)
        >>> schedule = RunSchedule(optimizer, lambda step: 0.5**step)
        >>> optimizer.step()
        >>> schedule.step()
        >>> optimizer.add_param_group({"params": weights[1:], "lr": 0.1})
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.25, 0.05]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, share_of_peak: Callable[[float], float]) -> None:
        self._num_first_groups = len(optimizer.param_groups)
        super().__init__(optimizer, share_of_peak)

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step, also of groups that were added or whose rate was set since the last one."""
        for number in range(self._num_first_groups, len(self.optimizer.param_groups)):
            self._include(number)
        super().step(epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a schedule, and the functions of groups that were added before its state was saved.

        Raises:
            ResumeError: The state is that of a scheduler of another class.
        """
        if "lr_lambdas" not in state_dict:
            raise ResumeError(
                "The checkpoint holds the state of a scheduler of another class than that of scheduler='cosine', "
                "'linear' or 'constant'. Resume with the scheduler of that run, or start a new run from its weights "
                "without ckpt_path."
            )
        num_added = len(state_dict["lr_lambdas"]) - len(self.lr_lambdas)
        self.lr_lambdas += self.lr_lambdas[:1] * num_added
        super().load_state_dict(state_dict)

    def _include(self, number: int) -> None:
        """Find the peak of an added group whose rate the schedule has not set."""
        group, share = self.optimizer.param_groups[number], self.lr_lambdas[0](self.last_epoch)
        is_new = number == len(self.base_lrs)
        if is_new or group["lr"] != self.base_lrs[number] * share:
            # A share of 0 is the end of a run; nothing is trained at its rates.
            peak = group["lr"] / share if share else group["lr"]
            group["initial_lr"] = peak
            if is_new:
                self.lr_lambdas.append(self.lr_lambdas[0])
                self.base_lrs.append(peak)
            else:
                self.base_lrs[number] = peak


def apply_schedule(scheduler: Any) -> None:
    """Give the groups of an optimizer the rates of its schedule at the present step; no-op if it is no LambdaLR.

    A checkpoint restores the rates of its own schedule, which had another length if the run had.
    """
    if not isinstance(scheduler, LambdaLR):
        return
    for group, base, share in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas):
        group["lr"] = base * share(scheduler.last_epoch)


def apply_found_rate(optimizer: torch.optim.Optimizer, scheduler: Any, *, found: float | None) -> None:
    """Give a rate that LearningRateFinder has set in the groups of an optimizer to their schedule too.

    Lightning 2.6.6 sets the groups alone: the first step has the rate that was found, in all groups and without a
    warm-up, and the schedule then returns to the one that it was made with.

    Args:
        optimizer: Its groups are changed.
        scheduler: Its scheduler.
        found: The rate of its first group; others keep their share of that.

    Raises:
        OptionError: The scheduler keeps the rate with which it was made.
    """
    groups, rates = optimizer.param_groups, scheduler.get_last_lr()
    if found is None or [group["lr"] for group in groups] == rates:
        return
    bases = getattr(scheduler, "base_lrs", rates)
    factors = [base / bases[0] if bases[0] else 1.0 for base in bases]
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [found * factor for factor in factors]
        for group, base in zip(groups, scheduler.base_lrs):
            group["initial_lr"] = base
        apply_schedule(scheduler)
    elif isinstance(scheduler, ReduceLROnPlateau):
        for group, factor in zip(groups, factors):
            group["lr"] = found * factor
    else:
        raise OptionError(
            f"LearningRateFinder found the learning rate {found:g}, and {type(scheduler).__name__} keeps the one with "
            f"which it was made. Set learning_rate={found:g} and remove the callback, or use "
            "LearningRateFinder(update_attr=False)."
        )
