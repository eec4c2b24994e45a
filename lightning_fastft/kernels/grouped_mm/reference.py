"""Products of sorted rows with one matrix per expert, in plain PyTorch: a loop over experts.

Axes: N rows, sorted by expert, E experts, I input columns, O output columns, R adapter rank.
Expert e owns the rows end_E[e - 1] to end_E[e]; rows from end_E[-1] on belong to no expert and are never written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import one_kernel, wide_dtype

# Products with at most this many output columns (such as the rank of an adapter) are memory-bound.
THIN_COLUMNS = 64


class GatheredRows(NamedTuple):
    """Rows in expert order, given by indices without a copy: row n is ``x_TI[slot_N[n] // num_slots_per_row]``.

    Args:
        x_TI: Rows of tokens. Shape (T, I); last axis contiguous.
        slot_N: Slots in sorted order, as ``ExpertOrder.slot_N``. Shape (N,), int32 or int64, contiguous.
        num_slots_per_row: Slots per row, the experts per token, K, with T * K = N.
    """

    x_TI: torch.Tensor
    slot_N: torch.Tensor
    num_slots_per_row: int

    @property
    def shape(self) -> torch.Size:
        """Return the shape (N, I)."""
        return torch.Size((self.slot_N.shape[0], self.x_TI.shape[1]))

    def read(self) -> torch.Tensor:
        """Return the rows as a tensor of shape (N, I)."""
        return self.x_TI.index_select(0, self.slot_N // self.num_slots_per_row)


Rows = torch.Tensor | GatheredRows


def rows_of(rows: Rows) -> torch.Tensor:
    """Return the tensor that holds the rows."""
    return rows.x_TI if isinstance(rows, GatheredRows) else rows


def read_rows(rows: Rows) -> torch.Tensor:
    """Return rows as a tensor of shape (N, I)."""
    return rows.read() if isinstance(rows, GatheredRows) else rows


def _like(rows: Rows, values: torch.Tensor) -> Rows:
    """Return values in the order of rows."""
    return rows._replace(x_TI=values) if isinstance(rows, GatheredRows) else values


class RowAddend(NamedTuple):
    """Addend of each product before rounding: ``bias[e] + low_scale * low[n] @ low_ERO[e]``; None skips a part.

    Args:
        bias_EO: One row per expert. Shape (E, O).
        low_NR: Rows of the low-rank product, in the same order. Shape (N, R).
        low_ERO: Matrices of the low-rank product. Shape (E, R, O), contiguous.
        low_scale: Factor on the low-rank product.
    """

    bias_EO: torch.Tensor | None = None
    low_NR: torch.Tensor | None = None
    low_ERO: torch.Tensor | None = None
    low_scale: float = 1.0

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is added."""
        return self.bias_EO is None and self.low_NR is None


class Fp8Scales(NamedTuple):
    """Factors of a product of e4m3 numbers.

    Args:
        x_scale_T: Factor on each row, gathered like the rows. Shape (T,), or (N,) for rows in order; fp32, contiguous.
        weight_scale_E: Factor on the matrix of each expert. Shape (E,), fp32, contiguous.
    """

    x_scale_T: torch.Tensor
    weight_scale_E: torch.Tensor


@one_kernel
def grouped_mm(
    x_NI: Rows,
    weight_EIO: torch.Tensor,
    end_E: torch.Tensor,
    *,
    addend: RowAddend,
    out_NO: torch.Tensor,
    scales: Fp8Scales | None = None,
) -> torch.Tensor:
    """Write ``x[n] @ weight[e(n)]``, times its scales, plus the addend, rounded once; float64 is allowed.

    Raises:
        ShapeError: end_E decreases, or is outside the rows.
    """
    scale_N = None if scales is None else read_rows(_like(x_NI, scales.x_scale_T[:, None]))
    x_NI = read_rows(x_NI)
    wide = wide_dtype(x_NI.dtype)
    for expert, rows in enumerate(_rows_of_experts(end_E, num_rows=x_NI.shape[0])):
        product = x_NI[rows].to(wide) @ weight_EIO[expert].to(wide)
        if scales is not None and scale_N is not None:
            product = product * (scale_N[rows] * scales.weight_scale_E[expert])
        out_NO[rows] = _add_to(product, expert, rows, addend=addend)
    return out_NO


@one_kernel
def add_to_rows(y_NO: torch.Tensor, end_E: torch.Tensor, *, addend: RowAddend, out_NO: torch.Tensor) -> torch.Tensor:
    """Write y plus the addend, rounded once; out may be y."""
    for expert, rows in enumerate(_rows_of_experts(end_E, num_rows=y_NO.shape[0])):
        out_NO[rows] = _add_to(y_NO[rows].to(wide_dtype(y_NO.dtype)), expert, rows, addend=addend)
    return out_NO


@one_kernel
def grouped_weight_grad(
    x_NI: Rows,
    d_NO: Rows,
    end_E: torch.Tensor,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    row_weight_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``scale * (row_weight * x)[rows of e]^T @ d[rows of e]``, rounded once; 0 for an expert without rows.

    Raises:
        ShapeError: end_E decreases, or is outside the rows.
    """
    x_NI, d_NO = read_rows(x_NI), read_rows(d_NO)
    wide = wide_dtype(x_NI.dtype)
    x_NI, d_NO = weigh_rows(x_NI, d_NO, row_weight_N)
    grad_EIO = torch.empty(end_E.shape[0], x_NI.shape[1], d_NO.shape[1], dtype=dtype, device=x_NI.device)
    for expert, rows in enumerate(_rows_of_experts(end_E, num_rows=x_NI.shape[0])):
        grad_EIO[expert] = scale * (x_NI[rows].to(wide).T @ d_NO[rows].to(wide))
    return grad_EIO


def weigh_rows(
    x_NI: torch.Tensor, d_NO: torch.Tensor, row_weight_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands of a gradient, the thinner one multiplied by the weights in a wide dtype and rounded."""
    if row_weight_N is None:
        return x_NI, d_NO
    wide = wide_dtype(x_NI.dtype)
    weight_N1 = row_weight_N[:, None].to(wide)
    if has_thin_inputs(x_NI, d_NO):
        return (x_NI.to(wide) * weight_N1).to(x_NI.dtype), d_NO
    return x_NI, (d_NO.to(wide) * weight_N1).to(d_NO.dtype)


def has_thin_inputs(x_NI: Rows, d_NO: Rows) -> bool:
    """Return whether the first operand of a gradient is the thinner one, which is multiplied by the row weights."""
    return x_NI.shape[1] <= d_NO.shape[1]


def _add_to(product: torch.Tensor, expert: int, rows: slice, *, addend: RowAddend) -> torch.Tensor:
    """Return the wide product of one expert's rows with its low-rank part and bias added."""
    if addend.low_NR is not None and addend.low_ERO is not None:
        product = product + addend.low_scale * (
            addend.low_NR[rows].to(product.dtype) @ addend.low_ERO[expert].to(product.dtype)
        )
    if addend.bias_EO is not None:
        product = product + addend.bias_EO[expert].to(product.dtype)
    return product


def _rows_of_experts(end_E: torch.Tensor, *, num_rows: int) -> list[slice]:
    """Return the rows of each expert; end_E is read on the host, which is free on a CPU. The meta device has none."""
    if end_E.is_meta:
        return []
    borders = [0, *end_E.tolist()]
    if borders != sorted(borders) or borders[-1] > num_rows:
        raise ShapeError(
            f"end_E must not decrease or exceed the {num_rows} rows, got {borders[1:]}. It holds one "
            "past the last row of each expert."
        )
    return [slice(begin, end) for begin, end in pairwise(borders)]
