"""Columns times factors on a GPU: one pass over memory each way.

Axes: T rows and N columns (walked in tiles), P programs along the rows; I inputs and R ranks of a layer.
The backward reads gradient and saved columns once: it writes the scaled gradient, and each program its part of the sums
over rows, which a second kernel adds in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

BLOCK_ROWS = 16
BLOCK_COLUMNS = 256
NUM_WARPS = 4
# Rows of one program of the backward. Sums of 8,192 rows are then 32 parts.
PROGRAM_ROWS = 256
# Row norms: outputs of one program and inputs of one step. Every program reads all of A from the L2 cache, R / outputs
# of what it reads of the weight; layers with few outputs need small programs to fill the device.
NORM_OUTPUTS, FEW_OUTPUTS, NORM_INPUTS, NORM_STAGES, NORM_WARPS = 32, 16, 128, 4, 4
MANY_OUTPUTS = 8192
# Ranks of one product; more ranks take more products. tl.dot needs at least 16.
MIN_BLOCK_RANKS, MAX_BLOCK_RANKS = 16, 64


@triton.jit
def _row_factors_kernel(
    weight_ptr,
    a_ptr,
    b_ptr,
    magnitude_ptr,
    out_ptr,
    weight_stride,
    num_outputs,
    num_inputs,
    num_ranks,
    scale,
    NUM_RANK_STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Run one program per BLOCK_N outputs; ``norm = sqrt(sum over inputs of (W + scale * B A)^2)``, all in fp32."""
    outputs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_outputs = outputs < num_outputs
    squares = tl.zeros((BLOCK_N, BLOCK_I), dtype=tl.float32)
    for first in tl.range(0, num_inputs, BLOCK_I, num_stages=NUM_STAGES):
        cols = first + tl.arange(0, BLOCK_I)
        inside_cols = cols < num_inputs
        product = tl.zeros((BLOCK_N, BLOCK_I), dtype=tl.float32)
        for step in tl.static_range(NUM_RANK_STEPS):
            ranks = step * BLOCK_R + tl.arange(0, BLOCK_R)
            inside_ranks = ranks < num_ranks
            b_ptrs = b_ptr + outputs[:, None] * num_ranks + ranks[None, :]
            b = tl.load(b_ptrs, mask=inside_outputs[:, None] & inside_ranks[None, :], other=0.0)
            a_ptrs = a_ptr + ranks.to(tl.int64)[:, None] * num_inputs + cols[None, :]
            a = tl.load(a_ptrs, mask=inside_ranks[:, None] & inside_cols[None, :], other=0.0)
            product = tl.dot(b, a, product, input_precision="ieee")
        weight_ptrs = weight_ptr + outputs[:, None] * weight_stride + cols[None, :]
        weight = tl.load(weight_ptrs, mask=inside_outputs[:, None] & inside_cols[None, :], other=0.0)
        total = weight.to(tl.float32) + scale * product
        squares += total * total
    norm = tl.sqrt_rn(tl.sum(squares, axis=1))
    magnitude = tl.load(magnitude_ptr + outputs, mask=inside_outputs, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, tl.div_rn(magnitude, norm), mask=inside_outputs)
    tl.store(
        out_ptr + num_outputs + outputs, tl.div_rn(tl.full((BLOCK_N,), 1.0, tl.float32), norm), mask=inside_outputs
    )


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


def row_factors(
    weight_NI: torch.Tensor,
    a_RI: torch.Tensor,
    b_NR: torch.Tensor,
    magnitude_N: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the factors; same contract as the reference."""
    (num_outputs, num_inputs), num_ranks = weight_NI.shape, a_RI.shape[0]
    if num_outputs == 0:
        return out
    block_outputs = NORM_OUTPUTS if num_outputs >= MANY_OUTPUTS else FEW_OUTPUTS
    block_ranks = min(max(next_power_of_2(num_ranks), MIN_BLOCK_RANKS), MAX_BLOCK_RANKS)
    launch(
        _row_factors_kernel,
        (ceil_div(num_outputs, block_outputs),),
        weight_NI,
        a_RI,
        b_NR,
        magnitude_N,
        out,
        weight_NI.stride(0),
        num_outputs,
        num_inputs,
        num_ranks,
        float(scale),
        NUM_RANK_STEPS=ceil_div(num_ranks, block_ranks),
        BLOCK_N=block_outputs,
        BLOCK_I=NORM_INPUTS,
        BLOCK_R=block_ranks,
        NUM_STAGES=NORM_STAGES,
        num_warps=NORM_WARPS,
    )
    # A backward that saved the factors must see that they were written.
    torch.autograd.graph.increment_version(out)
    return out


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
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
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
    return (
        d_x_TN,
        None if saved_TN is None else sums_2PN[0].sum(dim=0),
        sums_2PN[1].sum(dim=0) if needs_totals else None,
    )
