"""Step an optimizer on the meta device, to know what its step allocates and runs before it is made."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fastft.core.shards import local_values

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Optimizers whose step changes nothing but parameters and state, by the start of their module.
_KNOWN_MODULES = ("torch.optim.", "bitsandbytes.optim.", "lightning_fastft.")
# bitsandbytes keeps the moments of smaller parameters on the device.
_LEAST_PAGED_VALUES = 1e5
_PAGED = ("state1", "state2")
# What a step on the meta device raises if it needs values, a closure or a device.
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError)


class StateBytes(NamedTuple):
    """State of a parameter in bytes: on the device, and in managed memory that the driver may keep on the host."""

    device: int
    paged: int


class ValueReads(TorchDispatchMode):
    """Let a step on the meta device read values, which are not there: 1 for numbers, False for conditions.

    Attributes:
        num_reads: Values that were read so far; on a device each of them is a host sync.
    """

    num_reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, or return a value in its place."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.num_reads += 1
            return False if args[0].dtype is torch.bool else 1.0
        return func(*args, **(kwargs or {}))


class OptimizerTwin:
    """An optimizer of the same class and options over parameters of the same shapes on the meta device.

    It has no state and no hooks. The original is not changed.

    Args:
        optimizer: The original; its parameters may be on any device, and sharded.
        shares_twins: Whether parameters of a group with the same shape and dtype share twins, for a faster step.

    Example:
        >>> twin = OptimizerTwin(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], momentum=0.9))
        >>> twin.step(), twin.state_bytes()
        (0, [StateBytes(device=12, paged=0)])
    """

    def __init__(self, optimizer: Optimizer, *, shares_twins: bool = False) -> None:
        self._optimizer = twin = copy_without_state(optimizer)
        # Managed memory needs a driver, so the twin has none, and paged state is told by its size.
        self._is_paged = getattr(optimizer, "is_paged", False)
        if self._is_paged:
            twin.is_paged = False  # type: ignore[attr-defined]
        # The twin of each parameter, group by group.
        self._twins = [_twins_of(group["params"], shares_twins=shares_twins) for group in optimizer.param_groups]
        twin.param_groups = [
            _options_on_meta(group, optimizer) | {"params": list(dict.fromkeys(twins))}
            for group, twins in zip(optimizer.param_groups, self._twins)
        ]
        if is_schedule_free(twin):
            twin.train()  # type: ignore[attr-defined]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters on the meta device, with gradients."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def step(self) -> int:
        """Make a step; return how many values the host read from the device.

        Raises:
            REFUSALS: It does not run on the meta device.
        """
        with torch.no_grad(), ValueReads() as reads:
            self._optimizer.step()
        return reads.num_reads

    def state_bytes(self) -> list[StateBytes]:
        """Return the state of each parameter of the original after a step; shared tensors count once."""
        seen: set[int] = set()
        sizes = {
            parameter: self._count(self._optimizer.state.get(parameter, {}), seen) for parameter in self.parameters
        }
        return [sizes[parameter] for twins in self._twins for parameter in twins]

    def _count(self, state: Mapping[str, Any], seen: set[int]) -> StateBytes:
        device = paged = 0
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.is_meta or id(value) in seen:
                continue
            seen.add(id(value))
            if self._is_paged and name in _PAGED and value.numel() >= _LEAST_PAGED_VALUES:
                paged += value.nbytes
            else:
                device += value.nbytes
        return StateBytes(device, paged)


def copy_without_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer over the same parameters, without state and hooks.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5)
        >>> copy_without_state(optimizer).param_groups[0]["lr"]
        0.5
    """
    other: Optimizer = object.__new__(type(optimizer))
    # bitsandbytes writes to a table of codes.
    other.__dict__.update(
        {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(optimizer).items()}
    )
    other.__dict__.update({name: OrderedDict() for name in _HOOKS})
    # A scheduler's wrapper steps the optimizer that it was made for.
    other.__dict__.pop("step", None)
    other.state = defaultdict(dict)
    return other


def measure_state(optimizer: Optimizer) -> list[StateBytes] | None:
    """Return the state of each parameter after a step, or None if the optimizer makes none on the meta device.

    Example:
        >>> measure_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(3))])) is None
        True
    """
    twin = OptimizerTwin(optimizer, shares_twins=True)
    try:
        twin.step()
    except REFUSALS:
        return None
    return twin.state_bytes()


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Return whether an optimizer switches its parameters between two points, as those of the package schedulefree do.

    Source:
        The test of transformers.Trainer.

    Example:
        >>> is_schedule_free(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]))
        False
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of PyTorch, bitsandbytes or this package, whose step has no other effect.

    Example:
        >>> is_known(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]))
        True
    """
    return f"{type(optimizer).__module__}.".startswith(_KNOWN_MODULES)


def _twins_of(parameters: list[torch.Tensor], *, shares_twins: bool) -> list[torch.Tensor]:
    """Return a parameter on the meta device with a gradient for each parameter."""
    forms: dict[Any, torch.Tensor] = {}
    found = []
    for parameter in parameters:
        local = local_values(parameter)
        form: Any = (local.shape, local.dtype) if shares_twins else parameter
        if shares_twins and form in forms:
            # The first twin also gets what the optimizer makes once for all, so the others share a second one.
            form = (*form, "others")
        if form not in forms:
            forms[form] = torch.empty_like(local, device="meta", requires_grad=True)
            forms[form].grad = torch.empty_like(local, device="meta", requires_grad=False)
        found.append(forms[form])
    return found


def _options_on_meta(group: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of a group that run on the meta device what runs on a GPU by default."""
    has_tensors = any(isinstance(value, torch.Tensor) for value in group.values())
    found = {name: 1.0 if isinstance(value, torch.Tensor) else value for name, value in group.items()}
    # Both need a device.
    found |= {name: False for name in ("capturable", "fused") if found.get(name)}
    if "foreach" in found and found["foreach"] is None and not group.get("fused"):
        # As torch.optim chooses on a GPU: it loops over parameters if rates are tensors, and in Adafactor.
        found["foreach"] = not has_tensors and not isinstance(optimizer, torch.optim.Adafactor)
    return found
