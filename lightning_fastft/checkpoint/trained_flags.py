"""TrainedFlags: which parameters callbacks froze or unfroze during a run, for its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class TrainedFlags:
    """Record ``requires_grad`` at the start of a run, and restore what changed after it.

    Lightning's finetuning callbacks freeze layers again when a run is resumed, and unfreeze them only at the start of
    their epoch. A run that is resumed later in that epoch, or after it, would not train them.

    Example:
        >>> import torch
        >>> module = torch.nn.Linear(2, 2).requires_grad_(False)
        >>> flags = TrainedFlags()
        >>> flags.note(module)
        >>> module.bias.requires_grad = True
        >>> flags.changed(module)
        {'bias': True}
    """

    def __init__(self) -> None:
        self._first: dict[str, bool] | None = None
        self._to_freeze: set[str] = set()

    def note(self, module: nn.Module) -> None:
        """Record the flags of a module, once for each run."""
        if self._first is None:
            self._first = _read(module)

    def changed(self, module: nn.Module) -> dict[str, bool]:
        """Return the present flags, by name, of parameters whose flag has changed."""
        first = self._first or {}
        return {name: flag for name, flag in _read(module).items() if flag != first.get(name, flag)}

    def restore(self, module: nn.Module, changed: Mapping[str, bool]) -> None:
        """Train the parameters of a new run that its checkpoint trained; ``freeze`` does the rest."""
        self.note(module)
        self._to_freeze = {name for name, flag in changed.items() if not flag}
        for name, parameter in module.named_parameters():
            if changed.get(name, False):
                parameter.requires_grad = True

    def freeze(self, module: nn.Module) -> None:
        """Freeze what the run of the checkpoint had frozen, once the optimizer is made: it holds those parameters."""
        for name, parameter in module.named_parameters():
            if name in self._to_freeze:
                parameter.requires_grad = False
        self._to_freeze = set()


def _read(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}
