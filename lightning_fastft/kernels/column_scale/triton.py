"""Columns times factors on a GPU: one pass over memory each way.

Axes: T rows and N columns (walked in tiles), P programs along the rows.
The backward reads gradient and saved columns once: it writes the scaled gradient, and each program its part of the sums
over rows, which a second kernel adds in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.column_scale.reference import ScaleGradients
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div

BLOCK_ROWS = 16
BLOCK_COLUMNS = 256
NUM_WARPS = 4
# Rows of one program of the backward. Sums of 8,192 rows are then 32 parts.
PROGRAM_ROWS = 256


@triton.jit
def _scale_columns_kernel(
    x_ptr,
    factor_ptr,
    offset_ptr,
    addend_ptr,
    out_ptr,
    x_stride,
    addend_stride,
    out_stride,
    num_rows,
    num_columns,
    alpha,
    HAS_OFFSET: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run one program per tile, columns fastest; a thread reads each value before it writes it."""
    tile = tl.program_id(0)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_N)
    rows = (tile // num_column_tiles).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = (tile % num_column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_cols = cols < num_columns
    inside = (rows < num_rows)[:, None] & inside_cols[None, :]
    y = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    y = y * tl.load(factor_ptr + cols, mask=inside_cols, other=0.0)[None, :]
    if HAS_OFFSET:
        y += tl.load(offset_ptr + cols, mask=inside_cols, other=0.0)[None, :]
    y *= alpha
    if HAS_ADDEND:
        y += tl.load(addend_ptr + rows[:, None] * addend_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_columns_backward_kernel(
    d_y_ptr,
    saved_ptr,
    factor_ptr,
    d_x_ptr,
    products_ptr,
    totals_ptr,
    d_y_stride,
    saved_stride,
    d_x_stride,
    num_rows,
    num_columns,
    HAS_SAVED: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
    PROGRAM_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run one program per PROGRAM_T rows and BLOCK_N columns, columns fastest.

    ``d_x = d_y * factor``; ``products = sum over rows of d_y * saved``; ``totals = sum over rows of d_y``.
    """
    program = tl.program_id(0)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_N)
    part = (program // num_column_tiles).to(tl.int64)
    cols = (program % num_column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_cols = cols < num_columns
    factor = tl.load(factor_ptr + cols, mask=inside_cols, other=0.0)
    products = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    totals = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for first in tl.range(0, PROGRAM_T, BLOCK_T):
        rows = part * PROGRAM_T + first + tl.arange(0, BLOCK_T)
        inside = (rows < num_rows)[:, None] & inside_cols[None, :]
        d_y = tl.load(d_y_ptr + rows[:, None] * d_y_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_SAVED:
            saved = tl.load(saved_ptr + rows[:, None] * saved_stride + cols[None, :], mask=inside, other=0.0)
            products += d_y * saved.to(tl.float32)
        if HAS_TOTALS:
            totals += d_y
        d_x = (d_y * factor[None, :]).to(d_x_ptr.dtype.element_ty)
        tl.store(d_x_ptr + rows[:, None] * d_x_stride + cols[None, :], d_x, mask=inside)
    if HAS_SAVED:
        tl.store(products_ptr + part * num_columns + cols, tl.sum(products, axis=0), mask=inside_cols)
    if HAS_TOTALS:
        tl.store(totals_ptr + part * num_columns + cols, tl.sum(totals, axis=0), mask=inside_cols)


def scale_columns(
    x_TN: torch.Tensor,
    factor_N: torch.Tensor,
    *,
    offset_N: torch.Tensor | None = None,
    addend_TN: torch.Tensor | None = None,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scaled columns; same contract as the reference."""
    num_rows, num_columns = x_TN.shape
    y_TN = torch.empty(num_rows, num_columns, dtype=x_TN.dtype, device=x_TN.device) if out is None else out
    if y_TN.numel() == 0:
        return y_TN
    launch(
        _scale_columns_kernel,
        (ceil_div(num_rows, BLOCK_ROWS) * ceil_div(num_columns, BLOCK_COLUMNS),),
        x_TN,
        factor_N,
        factor_N if offset_N is None else offset_N,
        x_TN if addend_TN is None else addend_TN,
        y_TN,
        x_TN.stride(0),
        0 if addend_TN is None else addend_TN.stride(0),
        y_TN.stride(0),
        num_rows,
        num_columns,
        float(alpha),
        HAS_OFFSET=offset_N is not None,
        HAS_ADDEND=addend_TN is not None,
        BLOCK_T=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return y_TN


def scale_columns_backward(
    d_y_TN: torch.Tensor,
    saved_TN: torch.Tensor | None,
    factor_N: torch.Tensor,
    *,
    needs_totals: bool = False,
    out: torch.Tensor | None = None,
) -> ScaleGradients:
    """Return the gradients; same contract as the reference."""
    num_rows, num_columns = d_y_TN.shape
    d_x_TN = torch.empty(num_rows, num_columns, dtype=d_y_TN.dtype, device=d_y_TN.device) if out is None else out
    num_parts = ceil_div(num_rows, PROGRAM_ROWS)
    # Row 0: sums of products; row 1: of gradients.
    sums_2PN = torch.empty(2, num_parts, num_columns, dtype=torch.float32, device=d_y_TN.device)
    if d_x_TN.numel():
        launch(
            _scale_columns_backward_kernel,
            (num_parts * ceil_div(num_columns, BLOCK_COLUMNS),),
            d_y_TN,
            d_y_TN if saved_TN is None else saved_TN,
            factor_N,
            d_x_TN,
            sums_2PN[0],
            sums_2PN[1],
            d_y_TN.stride(0),
            0 if saved_TN is None else saved_TN.stride(0),
            d_x_TN.stride(0),
            num_rows,
            num_columns,
            HAS_SAVED=saved_TN is not None,
            HAS_TOTALS=needs_totals,
            PROGRAM_T=PROGRAM_ROWS,
            BLOCK_T=BLOCK_ROWS,
            BLOCK_N=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )
    return ScaleGradients(
        d_x_TN,
        None if saved_TN is None else sums_2PN[0].sum(dim=0),
        sums_2PN[1].sum(dim=0) if needs_totals else None,
    )
