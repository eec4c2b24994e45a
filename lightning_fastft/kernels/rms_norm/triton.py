"""RMSNorm on a GPU: one pass over memory forward, one backward.

Axes: T rows (walked in blocks), D columns that are normed together (all of them in one tile), P programs of the
    backward that write a partial sum.
The backward reads d_y, x and an addend, and writes d_x. Only the gradient of the weight sums over rows: each program
sums its rows in a fixed order, and a second launch sums the programs in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.core.checks import is_same_memory
from lightning_fastft.kernels.fp8_linear.reference import LARGEST, LEAST_PEAK, Fp8Rows
from lightning_fastft.kernels.fp8_linear.triton import new_rows, row_scale
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.rms_norm.reference import NormForm
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# Short rows share a program, 16 at most, until it has 2048 values. On an H200, for 8,192 rows of 5,120 columns, 8 warps
# take 58 us forward and 102 us backward, 16 warps 72 and 101, 32 warps 79 and 156. For 1,024 columns, 4 warps take 42
# and 80 us, 8 warps 41 and 70. Measured by: python -m benchmarks.row_kernels --only rms_norm --tiles (--width 1024).
TILE_SIZE = 2048
MAX_BLOCK_ROWS = 16
VALUES_PER_THREAD = 32
MIN_WARPS, MAX_WARPS = 8, 16
# About four programs for each of an H200's 132 multiprocessors; fixed, so that the order of the sums does not depend on
# the device. Not yet measured: the same command has candidates.
MAX_PROGRAMS = 512


@triton.jit
def _sum_of_products(left, right):
    """Return the sum of the products of each row; each product is rounded separately, so all threads that share a row
    get the same bits.

    If a thread has one value of a row and its product were fused with the first sum over threads, only the products
    from other threads would be rounded.
    """
    # The compiler cannot fuse the following addition into a product that is an FMA already.
    return tl.sum(tl.fma(left, right, 0.0), axis=1)


@triton.jit
def _reciprocal_root(row, mean_scale, eps):
    """Return 1 over the root of the mean square of each row; both operations round to nearest, unlike the approximate
    rsqrt.
    """
    variance = _sum_of_products(row, row) * mean_scale + eps
    return tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance))


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    x_stride,
    y_stride,
    num_rows,
    num_columns,
    mean_scale,
    eps,
    weight_offset,
    IS_WEIGHT_WIDE: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    ROUND_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_PEAK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Run one program per block of rows; masked columns are 0 and add nothing to a sum.

    Quantised rows are written in e4m3 with their scales.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_D)
    inside_rows = rows < num_rows
    inside_cols = cols < num_columns
    inside = inside_rows[:, None] & inside_cols[None, :]

    row = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside_cols, other=0.0).to(tl.float32) + weight_offset

    normed = row * _reciprocal_root(row, mean_scale, eps)[:, None]
    if not IS_WEIGHT_WIDE:
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = (normed * weight[None, :]).to(x_ptr.dtype.element_ty)
    if IS_QUANTISED:
        y = y.to(tl.float32)
        scale, inverse = row_scale(tl.max(tl.abs(y), axis=1), ROUND_SCALES, LARGEST, LEAST_PEAK)
        y = (y * inverse[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(scale_ptr + rows, scale, mask=inside_rows)
    tl.store(y_ptr + rows[:, None] * y_stride + cols[None, :], y, mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    d_y_ptr,
    x_ptr,
    addend_ptr,
    weight_ptr,
    out_ptr,
    rstd_out_ptr,
    partial_ptr,
    d_y_stride,
    x_stride,
    addend_stride,
    out_stride,
    num_rows,
    num_columns,
    num_steps,
    mean_scale,
    eps,
    weight_offset,
    HAS_ADDEND: tl.constexpr,
    WRITE_RSTD: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Run P programs; each takes every P-th block of rows, in a fixed order."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside_cols = cols < num_columns
    weight = tl.load(weight_ptr + cols, mask=inside_cols, other=0.0).to(tl.float32) + weight_offset
    if NEEDS_WEIGHT:
        weight_terms = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)

    for step in range(num_steps):
        rows = (program + step * tl.num_programs(0)) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside_rows = rows < num_rows
        inside = inside_rows[:, None] & inside_cols[None, :]
        row = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        d_y = tl.load(d_y_ptr + rows[:, None] * d_y_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_ADDEND:
            addend = tl.load(addend_ptr + rows[:, None] * addend_stride + cols[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
        # Without eps a masked row has an infinite reciprocal root, and 0 times infinity would make the sums NaN.
        rstd = tl.where(inside_rows, _reciprocal_root(row, mean_scale, eps), 0.0)
        if WRITE_RSTD:
            tl.store(rstd_out_ptr + rows, rstd, mask=inside_rows)
        if IN_PLACE:
            # More than one thread may read a value: all must read before one of them writes.
            tl.debug_barrier()

        normed = row * rstd[:, None]
        if NEEDS_WEIGHT:
            weight_terms += d_y * normed
        d_normed = d_y * weight[None, :]
        # The root mean square is itself a function of the row: subtract the component along the row. The sum reads the
        # raw row, so it does not wait for the sum in the root: 102 instead of 158 us on an H200, 8,192 x 5,120.
        along = _sum_of_products(d_normed, row) * (mean_scale * rstd)
        d_x = (d_normed - normed * along[:, None]) * rstd[:, None]
        if HAS_ADDEND:
            d_x += addend
        tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], d_x.to(out_ptr.dtype.element_ty), mask=inside)

    if NEEDS_WEIGHT:
        tl.store(partial_ptr + program * num_columns + cols, tl.sum(weight_terms, axis=0), mask=inside_cols)


def rms_norm_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, form: NormForm, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the normed rows; same contract as the reference."""
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    _launch_forward(x_TD, weight_D, form=form, y_TD=y_TD, scale_T=None)
    return y_TD


def rms_norm_quantised(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, form: NormForm, round_scales_to_power_of_2: bool
) -> Fp8Rows:
    """Return the norm in e4m3; same contract as the reference."""
    out = new_rows(*x_TD.shape, device=x_TD.device)
    _launch_forward(
        x_TD,
        weight_D,
        form=form,
        y_TD=out.values_TI,
        scale_T=out.scale_T,
        round_scales=round_scales_to_power_of_2,
    )
    return out


def _launch_forward(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    form: NormForm,
    y_TD: torch.Tensor,
    scale_T: torch.Tensor | None,
    round_scales: bool = False,
) -> None:
    """Write y, and its scales if it is quantised."""
    num_rows, num_columns = x_TD.shape
    if num_rows == 0:
        return
    block_rows, block_columns, num_warps = _tile(num_columns)
    launch(
        _rms_norm_forward_kernel,
        (ceil_div(num_rows, block_rows),),
        x_TD,
        weight_D,
        y_TD,
        y_TD if scale_T is None else scale_T,
        x_TD.stride(0),
        y_TD.stride(0),
        num_rows,
        num_columns,
        1.0 / num_columns,
        float(form.eps),
        float(form.weight_offset),
        IS_WEIGHT_WIDE=form.is_weight_wide,
        IS_QUANTISED=scale_T is not None,
        ROUND_SCALES=round_scales,
        LARGEST=LARGEST,
        LEAST_PEAK=LEAST_PEAK,
        BLOCK_T=block_rows,
        BLOCK_D=block_columns,
        num_warps=num_warps,
    )


def rms_norm_backward(
    d_y_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    form: NormForm,
    addend_TD: torch.Tensor | None = None,
    needs_weight: bool,
    out: torch.Tensor | None = None,
    rstd_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients; same contract as the reference."""
    num_rows, num_columns = x_TD.shape
    d_x_TD = torch.empty(num_rows, num_columns, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    if num_rows == 0:
        return (d_x_TD, torch.zeros(num_columns, dtype=torch.float32, device=x_TD.device) if needs_weight else None)
    block_rows, block_columns, num_warps = _tile(num_columns)
    num_blocks = ceil_div(num_rows, block_rows)
    num_programs = min(num_blocks, MAX_PROGRAMS) if needs_weight else num_blocks
    partial_PD = (
        torch.empty(num_programs, num_columns, dtype=torch.float32, device=x_TD.device) if needs_weight else None
    )
    launch(
        _rms_norm_backward_kernel,
        (num_programs,),
        d_y_TD,
        x_TD,
        d_y_TD if addend_TD is None else addend_TD,
        weight_D,
        d_x_TD,
        d_x_TD if rstd_out is None else rstd_out,
        d_x_TD if partial_PD is None else partial_PD,
        d_y_TD.stride(0),
        x_TD.stride(0),
        0 if addend_TD is None else addend_TD.stride(0),
        d_x_TD.stride(0),
        num_rows,
        num_columns,
        ceil_div(num_blocks, num_programs),
        1.0 / num_columns,
        float(form.eps),
        float(form.weight_offset),
        HAS_ADDEND=addend_TD is not None,
        WRITE_RSTD=rstd_out is not None,
        NEEDS_WEIGHT=needs_weight,
        IN_PLACE=any(is_same_memory(d_x_TD, other) for other in (d_y_TD, addend_TD) if other is not None),
        BLOCK_T=block_rows,
        BLOCK_D=block_columns,
        num_warps=num_warps,
    )
    return d_x_TD, None if partial_PD is None else partial_PD.sum(dim=0)


def _tile(num_columns: int) -> tuple[int, int, int]:
    """Return the rows and columns of a tile, and its number of warps."""
    block_columns = next_power_of_2(num_columns)
    block_rows = min(max(TILE_SIZE // block_columns, 1), MAX_BLOCK_ROWS)
    num_warps = block_rows * block_columns // (32 * VALUES_PER_THREAD)
    return block_rows, block_columns, min(max(num_warps, MIN_WARPS), MAX_WARPS)
