"""The state of an optimizer before its first step, for checkpoints of sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_fastft.core.optimizer_twin import copy_without_state


def read_first_state(optimizer: Optimizer, read: Callable[[Optimizer], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function reads from an optimizer that has made no step, and leave the optimizer as it is.

    torch.distributed.checkpoint writes whole states. It makes those that are missing by a step with zero gradients,
    which counts as a step, and writes none where gradients are there. So the function reads a stand-in without
    gradients, and counts of steps become 0 again.

    Args:
        optimizer: Without state.
        read: Returns the state of an optimizer, with parameters by name or number.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        found = read(_stand_in(optimizer))
    finally:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
    for state in found.get("state", {}).values():
        if "step" in state:
            step = state["step"]
            state["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else 0
    for group, own in zip(found.get("param_groups", []), optimizer.param_groups):
        if "weight_decay" in own:
            group["weight_decay"] = own["weight_decay"]
    return found


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer over the same parameters, without hooks and without weight decay, which enters moments."""
    other = copy_without_state(optimizer)
    other.param_groups = [
        {**group, **({"weight_decay": 0.0} if "weight_decay" in group else {})} for group in optimizer.param_groups
    ]
    from lightning_fastft.training.optimizer import FusedAdamW

    if isinstance(other, FusedAdamW):
        other.release()
    return other
