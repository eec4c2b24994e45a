"""Backward functions that are not differentiable themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a backward of an autograd Function as not differentiable, as torch's function of this name does.

    Torch's function enters ``no_grad`` in every call, which takes microseconds. Gradients are off already unless a
    second derivative is asked for, which raises as with torch's.
    """
    guarded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return guarded(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return run
