"""Move the expert axis of a stack from last to first and back, in plain PyTorch."""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel


@one_kernel
def exchange_ends(source: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write ``out[k, j, i] = source[i, j, k]``, cast once."""
    return out.copy_(source.permute(2, 1, 0))
