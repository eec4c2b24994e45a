"""Change a user's model, record every change, and undo all of them in reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_fastft.core.errors import SwapError

if TYPE_CHECKING:
    from torch import nn

_MISSING = object()
_ModuleT = TypeVar("_ModuleT", bound="nn.Module")


class ModelPatcher:
    """Change modules and attributes of model instances, and undo every change.

    A run has one patcher (``strategies.patching.patcher_of``). Only instances change: never a class, a module of
    another library or source text. A swapped module shares the ``__dict__`` of the module it replaces
    (``share_state``), so parameters, optimizer state and state-dict keys stay the same.

    Example:
        >>> from torch import nn
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

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Undo the changes made inside this block if the block raises; earlier changes stay.

        Example:
            >>> from types import SimpleNamespace
            >>> owner, patcher = SimpleNamespace(), ModelPatcher()
            >>> try:
            ...     with patcher.stage():
            ...         patcher.set_attribute(owner, "width", 3)
            ...         raise ValueError
            ... except ValueError:
            ...     vars(owner)
            {}
        """
        num_before, is_done = len(self._undo), False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                self._undo_to(num_before)

    def undo(self) -> None:
        """Undo every change, the last one first; a second call does nothing.

        Raises:
            Exception: An undo failed; all the others have run.
        """
        self._undo_to(0)

    def _undo_to(self, num_left: int) -> None:
        try:
            while len(self._undo) > num_left:
                self._undo.pop()()
        finally:
            # An undo failed: the others run all the same. One level deeper for each error, not for each change.
            if len(self._undo) > num_left:
                self._undo_to(num_left)


def share_state(old: nn.Module, new_class: type[_ModuleT]) -> _ModuleT:
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
