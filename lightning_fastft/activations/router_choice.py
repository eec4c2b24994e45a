"""The choice of experts of a layer with a router, which its recompute must repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class RouterChoice(TorchFunctionMode):
    """Store the indices of every top-k of a layer, so that its recompute routes each token to the same experts.

    Args:
        value: Stores a value in the forward and finds it in the recompute: ``Session.value``.
    """

    def __init__(self, value: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self._value = value

    def is_innermost(self) -> bool:
        """Return whether this mode is the first to receive a call."""
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        scores: torch.Tensor = args[0] if args else kwargs["input"]
        axis = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        with torch.no_grad():
            (index,) = self._value("choice of experts", lambda: (func(*args, **kwargs).indices,), is_always_held=True)
        values = _ChosenValues.apply(scores, index, axis) if scores.is_floating_point() else scores.gather(axis, index)
        return torch.return_types.topk((values, index))  # type: ignore[attr-defined]


class _ChosenValues(torch.autograd.Function):
    """Values of a top-k at known indices, with the bits of torch.topk in value and gradient; saves the indices."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.axis, ctx.shape = axis, scores.shape
        return scores.gather(axis, index)

    @staticmethod
    def backward(ctx: Any, d_values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        # Indices are unique along the axis, so nothing is summed.
        return d_values.new_zeros(ctx.shape).scatter(ctx.axis, index, d_values), None, None
