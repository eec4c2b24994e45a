"""A low-rank product added to a wide matrix on a GPU: one pass over memory.

Axes: T rows and N columns (walked in tiles), R ranks (walked in steps).
The kernel reads the base (and the residual) and writes the sum. Tiles of the same rows run one after another, so the
low-rank rows come from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# Every tile reads its part of the factor from the L2 cache: 2 R / rows bytes per value in bf16, and 4 from memory.
# On an H200, 32,768 x 4,096, 16 ranks: 141 us in place, 197 with a residual. Other tiles take 145 to 202 and 199 to 232
# on 4 warps, 148 to 307 on 8 warps. A product that is not transposed takes 154 or more
# (python -m benchmarks.row_kernels --only low_rank_add --rows 32768 --width 4096 --tiles).
BLOCK_ROWS = 32
BLOCK_COLUMNS = 128
NUM_WARPS = 4
# Whether the product of a tile is computed transposed, see _add_low_rank_kernel.
TRANSPOSED = True
# Ranks of one step; more ranks take more steps.
MAX_BLOCK_RANKS = 32
# tl.dot needs at least this size along each axis.
_MIN_BLOCK_RANKS = 16


@triton.jit
def _add_low_rank_kernel(
    base_ptr,
    residual_ptr,
    low_ptr,
    factor_ptr,
    out_ptr,
    base_stride,
    residual_stride,
    low_stride,
    factor_rank_stride,
    factor_column_stride,
    out_stride,
    num_rows,
    num_columns,
    num_ranks,
    HAS_RESIDUAL: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Run one program per tile, columns fastest.

    The product is computed before anything else is loaded. A transposed product changes its layout once. Otherwise the
    rest of the kernel runs in the layout of tensor cores, with 26 barriers instead of 5 (Triton 3.9 for Hopper, bf16,
    16 ranks, a residual, in place).
    """
    tile = tl.program_id(0)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_N)
    rows = (tile // num_column_tiles).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = (tile % num_column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_rows = rows < num_rows
    inside_cols = cols < num_columns
    inside = inside_rows[:, None] & inside_cols[None, :]

    low_rows = low_ptr + rows * low_stride
    factor_cols = factor_ptr + cols.to(tl.int64) * factor_column_stride
    product = tl.zeros((BLOCK_N, BLOCK_T) if TRANSPOSED else (BLOCK_T, BLOCK_N), dtype=tl.float32)
    for first in tl.range(0, num_ranks, BLOCK_R, num_stages=1):
        ranks = first + tl.arange(0, BLOCK_R)
        inside_ranks = ranks < num_ranks
        low = tl.load(low_rows[:, None] + ranks[None, :], mask=inside_rows[:, None] & inside_ranks[None, :], other=0.0)
        factor_ptrs = factor_cols[None, :] + ranks.to(tl.int64)[:, None] * factor_rank_stride
        factor = tl.load(factor_ptrs, mask=inside_ranks[:, None] & inside_cols[None, :], other=0.0)
        if TRANSPOSED:
            product = tl.dot(tl.trans(factor), tl.trans(low), product, input_precision="ieee")
        else:
            product = tl.dot(low, factor, product, input_precision="ieee")

    total = tl.trans(product) if TRANSPOSED else product
    total += tl.load(base_ptr + rows[:, None] * base_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    if IN_PLACE:
        # More than one thread may read a value: all must read before one of them writes.
        tl.debug_barrier()
    tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def add_low_rank(
    base_TN: torch.Tensor,
    low_TR: torch.Tensor,
    factor_RN: torch.Tensor,
    *,
    residual_TN: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum; same contract as the reference."""
    num_rows, num_columns = base_TN.shape
    num_ranks = low_TR.shape[1]
    sum_TN = torch.empty(num_rows, num_columns, dtype=base_TN.dtype, device=base_TN.device) if out is None else out
    if sum_TN.numel() == 0:
        return sum_TN
    launch(
        _add_low_rank_kernel,
        (ceil_div(num_rows, BLOCK_ROWS) * ceil_div(num_columns, BLOCK_COLUMNS),),
        base_TN,
        base_TN if residual_TN is None else residual_TN,
        low_TR,
        factor_RN,
        sum_TN,
        base_TN.stride(0),
        0 if residual_TN is None else residual_TN.stride(0),
        low_TR.stride(0),
        factor_RN.stride(0),
        factor_RN.stride(1),
        sum_TN.stride(0),
        num_rows,
        num_columns,
        num_ranks,
        HAS_RESIDUAL=residual_TN is not None,
        IN_PLACE=out is not None,
        TRANSPOSED=TRANSPOSED,
        BLOCK_T=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        BLOCK_R=min(max(next_power_of_2(num_ranks), _MIN_BLOCK_RANKS), MAX_BLOCK_RANKS),
        num_warps=NUM_WARPS,
    )
    return sum_TN
