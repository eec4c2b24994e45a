"""Switches of a layer that a module may move between a forward and its backward: adapters, their scales, dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Attributes of PEFT's layers, and the flag of evaluation mode. PEFT is not imported in this folder.
_ADAPTER_NAMES = ("_active_adapter", "_disable_adapters", "scaling")
_NAMES = (*_ADAPTER_NAMES, "training")

State = list[Any]


class Switches:
    """Read the switches of modules in a forward, and set them again for its recompute.

    A model may run with one adapter and then with another, or within ``peft.helpers.rescale_adapter_scale``, before one
    backward. The recompute of a layer must repeat the forward that it belongs to.

    Args:
        modules: Modules of a layer; those without a switch are skipped.

    Cost:
        About two microseconds of the host per adapted linear layer in a forward, and two in a recompute.

    Example:
        >>> dropout = nn.Dropout(0.5)
        >>> switches = Switches([dropout])
        >>> then = switches.read()
        >>> _ = dropout.eval()
        >>> with switches.set_to(then):
        ...     print(dropout.training)
        True
        >>> dropout.training
        False
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._switches = [
            (module, name) for module in modules if _has_switch(module) for name in _NAMES if hasattr(module, name)
        ]

    def read(self) -> State:
        """Return the present values."""
        return [_copy(getattr(module, name)) for module, name in self._switches]

    @contextmanager
    def set_to(self, state: State) -> Iterator[None]:
        """Set the modules to earlier values within a block."""
        present = self.read()
        if present == state:
            yield
            return
        moved = [
            (module, name, value, getattr(module, name))
            for (module, name), value, other in zip(self._switches, state, present)
            if value != other
        ]
        for module, name, value, _ in moved:
            setattr(module, name, _copy(value))
        try:
            yield
        finally:
            for module, name, _, own in moved:
                setattr(module, name, own)


def is_random(module: nn.Module) -> bool:
    """Return whether a module draws random numbers in training (dropout or router noise above 0)."""
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(module, _DropoutNd) and module.p > 0:
        return True
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
        for name, value in vars(module).items()
    )


def _has_switch(module: nn.Module) -> bool:
    return any(hasattr(module, name) for name in _ADAPTER_NAMES[:2]) or is_random(module)


def _copy(value: Any) -> Any:
    """Return a value that a later write to the attribute does not change."""
    return value.copy() if isinstance(value, (dict, list)) else value
