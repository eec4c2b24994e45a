"""Linear functions of tensors that bring their own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def linear_map(forward: Callable[..., Any], backward: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Return ``forward(*tensors)``, whose gradients are ``backward(*gradients)``; nothing is saved.

    Args:
        forward: Returns a tensor or a tuple of tensors; it runs without autograd.
        backward: Returns a gradient or None for each tensor as a tuple, from a gradient of each result.
        *tensors: Arguments of forward.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> linear_map(lambda x: 2 * x, lambda d_y: (2 * d_y,), x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    return _LinearMap.apply(forward, backward, *tensors)


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., tuple[Any, ...]], *tensors: torch.Tensor
    ) -> Any:
        ctx.compute = backward
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.compute(*gradients)
