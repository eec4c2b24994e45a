"""Columns times factors in plain PyTorch.

Axes: T rows, N columns (outputs of a layer), I inputs of the layer, R ranks.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype


@one_kernel
def row_factors(
    weight_NI: torch.Tensor,
    a_RI: torch.Tensor,
    b_NR: torch.Tensor,
    magnitude_N: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write ``magnitude / norm`` and ``1 / norm`` of the rows of ``W + scale * B A``, in fp32 (float64 for float64)."""
    wide = out.dtype
    norm_N = torch.addmm(weight_NI.to(wide), b_NR.to(wide), a_RI.to(wide), alpha=scale).norm(dim=1)
    return out.copy_(torch.stack([magnitude_N.to(wide) / norm_N, 1.0 / norm_N]))


@one_kernel
def scale_columns(
    x_TN: torch.Tensor,
    factor_N: torch.Tensor,
    *,
    offset_N: torch.Tensor | None = None,
    addend_TN: torch.Tensor | None = None,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``addend + alpha * (x * factor + offset)``, rounded once from fp32 (float64 for float64)."""
    y_TN = x_TN.to(wide_dtype(x_TN.dtype)) * factor_N
    if offset_N is not None:
        y_TN += offset_N
    if alpha != 1.0:
        y_TN *= alpha
    if addend_TN is not None:
        y_TN += addend_TN
    return y_TN.to(x_TN.dtype) if out is None else out.copy_(y_TN)


@one_kernel
def scale_columns_backward(
    d_y_TN: torch.Tensor,
    saved_TN: torch.Tensor | None,
    factor_N: torch.Tensor,
    *,
    needs_totals: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return ``d_y * factor``, and the sums over rows of ``d_y * saved`` and of d_y."""
    wide_TN = d_y_TN.to(wide_dtype(d_y_TN.dtype))
    products_N = None if saved_TN is None else (wide_TN * saved_TN).sum(dim=0)
    totals_N = wide_TN.sum(dim=0) if needs_totals else None
    d_x_TN = wide_TN * factor_N
    return d_x_TN.to(d_y_TN.dtype) if out is None else out.copy_(d_x_TN), products_N, totals_N
