"""Products of sorted rows with one matrix per expert, in plain PyTorch: a loop over experts.

Axes: N rows, sorted by expert, E experts, I input columns, O output columns, R adapter rank.
Expert e owns the rows end_E[e - 1] to end_E[e]; rows at or behind end_E[-1] belong to nobody and are never written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from lightning_fastft.errors import ShapeError


class RowAddend(NamedTuple):
    """What is added to each product before it is rounded: ``bias[e] + low_scale * low[n] @ low_ERO[e]``; None leaves a part out.

    Args:
        bias_EO: One row per expert. Shape (E, O).
        low_NR: Rows of the low-rank product, sorted as the others. Shape (N, R).
        low_ERO: Their matrices. Shape (E, R, O), contiguous.
        low_scale: Factor on the low-rank product.
    """

    bias_EO: torch.Tensor | None = None
    low_NR: torch.Tensor | None = None
    low_ERO: torch.Tensor | None = None
    low_scale: float = 1.0

    @property
    def is_empty(self) -> bool:
        """Nothing is added."""
        return self.bias_EO is None and self.low_NR is None


def grouped_mm(x_NI: torch.Tensor, weight_EIO: torch.Tensor, end_E: torch.Tensor, *, addend: RowAddend, out_NO: torch.Tensor) -> torch.Tensor:
    """Write ``x[n] @ weight[e(n)]`` and what is added to it, rounded once; float64 is allowed.

    Raises:
        ShapeError: end_E decreases, or lies outside the rows.
    """
    wide = _wide_dtype(x_NI.dtype)
    for expert, rows in enumerate(_rows_of_experts(end_E, num_rows=x_NI.shape[0])):
        product = x_NI[rows].to(wide) @ weight_EIO[expert].to(wide)
        out_NO[rows] = _add_to(product, expert, rows, addend=addend)
    return out_NO


def add_to_rows(y_NO: torch.Tensor, end_E: torch.Tensor, *, addend: RowAddend, out_NO: torch.Tensor) -> torch.Tensor:
    """Write y and what is added to it, rounded once; out may be y."""
    for expert, rows in enumerate(_rows_of_experts(end_E, num_rows=y_NO.shape[0])):
        out_NO[rows] = _add_to(y_NO[rows].to(_wide_dtype(y_NO.dtype)), expert, rows, addend=addend)
    return out_NO


def grouped_weight_grad(x_NI: torch.Tensor, d_NO: torch.Tensor, end_E: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x[rows of e]^T @ d[rows of e]``, rounded once; 0 for an expert without rows.

    Raises:
        ShapeError: end_E decreases, or lies outside the rows.
    """
    wide = _wide_dtype(x_NI.dtype)
    grad_EIO = torch.empty(end_E.shape[0], x_NI.shape[1], d_NO.shape[1], dtype=dtype, device=x_NI.device)
    for expert, rows in enumerate(_rows_of_experts(end_E, num_rows=x_NI.shape[0])):
        grad_EIO[expert] = x_NI[rows].to(wide).T @ d_NO[rows].to(wide)
    return grad_EIO


def _add_to(product: torch.Tensor, expert: int, rows: slice, *, addend: RowAddend) -> torch.Tensor:
    """Return the wide product of one expert's rows with its low-rank part and bias added."""
    if addend.low_NR is not None and addend.low_ERO is not None:
        product = product + addend.low_scale * (addend.low_NR[rows].to(product.dtype) @ addend.low_ERO[expert].to(product.dtype))
    if addend.bias_EO is not None:
        product = product + addend.bias_EO[expert].to(product.dtype)
    return product


def _rows_of_experts(end_E: torch.Tensor, *, num_rows: int) -> list[slice]:
    """Read the borders on the host, which costs nothing where they are already there."""
    borders = [0, *end_E.tolist()]
    if borders != sorted(borders) or borders[-1] > num_rows:
        raise ShapeError(f"end_E must rise from 0 to at most the {num_rows} rows, got {borders[1:]}; it holds one past the last row of each expert.")
    return [slice(begin, end) for begin, end in pairwise(borders)]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
