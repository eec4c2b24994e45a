"""Pass gradients from one autograd Function to a later one."""

from __future__ import annotations

import torch


class Handover:
    """Gradients that one backward leaves for a later one, so that autograd neither sums nor copies them.

    Attention passes the gradients of keys and values, not yet summed over query heads, to the Function that split the
    heads. Functions that write columns of one fused projection pass its gradient on: the first one allocates it, the
    last one returns it to autograd.
    """

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor, ...] | None = None

    def put(self, *tensors: torch.Tensor) -> None:
        """Store gradients; ``packed_attention`` calls this as ``collect``."""
        self._tensors = tensors

    def take(self) -> tuple[torch.Tensor, ...] | None:
        """Return the stored gradients once; None if there are none."""
        tensors, self._tensors = self._tensors, None
        return tensors
