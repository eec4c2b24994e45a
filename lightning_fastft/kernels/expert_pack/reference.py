"""Move the expert axis of a stack from last to first and back, in plain PyTorch.

Axes: E experts, R adapter rank, O columns of the factor.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel


@one_kernel
def exchange_ends(source: torch.Tensor, *, scale: float, out: torch.Tensor) -> torch.Tensor:
    """Write ``out[k, j, i] = scale * source[i, j, k]``; the product is fp32 (float64 for float64), rounded once."""
    moved = source.permute(2, 1, 0)
    if scale == 1.0:
        return out.copy_(moved)
    wide = torch.float64 if source.dtype is torch.float64 else torch.float32
    return out.copy_(moved.to(wide) * scale)
