"""The patcher of instance swaps: every change made to a user's model is written down and undone in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_fastft.core.errors import SwapError

_MISSING = object()


class ModelPatcher:
    """Change modules and attributes of live model instances, and take every change back.

    Only instances are touched: never a class, a module of another library or source text. A swapped module shares the
    ``__dict__`` of the one it replaces (``share_state``), so parameters, optimizer state and state-dict keys stay the
    same.

    Example:
        >>> model, patcher = nn.Sequential(nn.Linear(2, 2)), ModelPatcher()
        >>> patcher.set_attribute(model, "training", False)
        >>> patcher.undo()
        >>> model.training
        True
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def __reduce__(self) -> tuple[type[ModelPatcher], tuple[()]]:
        # A copy in another process has other instances, of which nothing here can be undone.
        return type(self), ()

    def replace_module(self, root: nn.Module, name: str, new: nn.Module) -> None:
        """Put new in the place of the submodule of that dotted name.

        Raises:
            SwapError: root has no such submodule.
        """
        parent_name, _, leaf = name.rpartition(".")
        parent = root.get_submodule(parent_name)
        if leaf not in parent._modules:
            raise SwapError(
                f"{type(root).__name__} has no submodule {name!r}; it has {sorted(parent._modules)} under "
                f"{parent_name!r}."
            )
        old = parent._modules[leaf]
        parent._modules[leaf] = new
        self._undo.append(lambda: parent._modules.__setitem__(leaf, old))

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one instance; undo restores the instance's own value, or removes it where there was
        none.
        """
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def restore() -> None:
            if old is _MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, old)

        self._undo.append(restore)

    def add_undo(self, undo: Callable[[], None]) -> None:
        """Record how to take back a change made by other means, such as the removal of a hook handle."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take back every change, last one first; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


def share_state(old: nn.Module, new_class: type[nn.Module]) -> nn.Module:
    """Return an instance of new_class that shares the whole state of old: parameters, buffers, hooks and attributes.

    Raises:
        SwapError: new_class does not extend the class of old, so methods could miss attributes.
    """
    if not issubclass(new_class, type(old)):
        raise SwapError(
            f"{new_class.__name__} must extend {type(old).__name__} to share the state of one of its instances."
        )
    new = new_class.__new__(new_class)
    new.__dict__ = old.__dict__
    return new
