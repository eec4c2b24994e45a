"""Parameters whose values are in host memory: reads raise, because the device memory has values of another layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_fastft.core.errors import SwapError

COPY_MESSAGE = (
    "A model whose frozen weights are streamed cannot be copied: its parameters do not hold their values. Copy "
    "model.state_dict(), which has all of them, or use OffloadCheckpointing(weights='resident')."
)

# Functions of a parameter that do not read its values.
_WITHOUT_VALUES = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in (
            "data_ptr", "detach", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
            "is_floating_point", "ndimension", "nelement", "numel", "requires_grad_", "size", "storage_offset",
            "stride", "untyped_storage",
        )),
        *(torch.is_complex, torch.is_floating_point, torch.numel, torch._has_compatible_shallow_copy_type),
    }
)  # fmt: skip


class HostParameter(nn.Parameter):
    """A parameter whose shape, dtype and device can be read, but not its values.

    Assigning ``__class__`` hides the values of a parameter and shows them again, as in torch's uninitialised
    parameters, so the parameter stays the same object.

    Raises:
        SwapError: A torch function was called with the parameter, or with a view of it.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run functions and properties that do not need the values."""
        if func is torch.Tensor.to and _stays(*args, **(kwargs or {})):
            return args[0]
        # Properties, among them data and grad, arrive as method wrappers.
        if func not in _WITHOUT_VALUES and type(func).__name__ != "method-wrapper":
            raise SwapError(
                f"{getattr(func, '__name__', func)} got a frozen weight whose values are in host memory while weights "
                "are streamed. Call the layer, as in model.lm_head(hidden), read model.state_dict(), or use "
                "OffloadCheckpointing(weights='resident')."
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            # A view holds no values either.
            return found.as_subclass(cls) if isinstance(found, torch.Tensor) else found


def is_plain(tensor: object) -> bool:
    """Return whether a tensor is a plain ``nn.Parameter``, with its values hidden or not."""
    return type(tensor) in (nn.Parameter, HostParameter)


def _stays(tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> bool:
    """Return whether ``to`` would return the tensor unchanged."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    is_there = device is None or (device.type == tensor.device.type and device.index in (None, tensor.device.index))
    return is_there and dtype in (None, tensor.dtype) and not copy


def hide_values(tensors: Iterable[torch.Tensor]) -> None:
    """Make reads of the values raise; no-op for tensors of other classes than nn.Parameter."""
    for tensor in tensors:
        if type(tensor) is nn.Parameter:
            tensor.__class__ = HostParameter


def show_values(tensors: Iterable[torch.Tensor]) -> None:
    """Undo ``hide_values``."""
    for tensor in tensors:
        if type(tensor) is HostParameter:
            tensor.__class__ = nn.Parameter  # type: ignore[assignment]
