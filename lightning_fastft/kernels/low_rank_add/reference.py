"""A low-rank product added to a wide matrix in plain PyTorch.

Axes: T rows, N columns, R ranks.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype


@one_kernel
def add_low_rank(
    base_TN: torch.Tensor,
    low_TR: torch.Tensor,
    factor_RN: torch.Tensor,
    *,
    residual_TN: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``base + residual + low @ factor``, rounded once from fp32 (float64 for float64)."""
    wide = wide_dtype(base_TN.dtype)
    sum_TN = base_TN.to(wide) + low_TR.to(wide) @ factor_RN.to(wide)
    if residual_TN is not None:
        sum_TN += residual_TN.to(wide)
    return sum_TN.to(base_TN.dtype) if out is None else out.copy_(sum_TN)
