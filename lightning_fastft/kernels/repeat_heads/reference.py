"""Repeated heads in plain PyTorch.

Axes: T tokens, H query heads, G key/value heads, W width of a head.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel


@one_kernel
def repeat_heads(x_TGW: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return each head repeated once per query head that shares it."""
    return x_TGW.repeat_interleave(num_heads // x_TGW.shape[1], dim=1)
