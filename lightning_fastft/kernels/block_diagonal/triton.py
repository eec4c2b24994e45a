"""A block-diagonal matrix on a GPU: one launch writes blocks and zeros.

Axes: O rows of all blocks together (walked in tiles), C columns of the matrix (all of them in one tile).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

MAX_BLOCKS = 4
# Values of a tile: 16 for each thread of 4 warps. Candidates: python -m benchmarks.row_kernels --only block_diagonal
# --tiles.
TILE_SIZE = 2048
NUM_WARPS = 4


@triton.jit
def _add_block(value, block_ptr, stride, rows, cols, first_row, end_row, first_col, end_col):
    """Return the tile plus its part of a block."""
    inside = ((rows >= first_row) & (rows < end_row))[:, None] & ((cols >= first_col) & (cols < end_col))[None, :]
    ptrs = block_ptr + (rows - first_row).to(tl.int64)[:, None] * stride + (cols - first_col)[None, :]
    return value + tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _block_diagonal_kernel(
    out_ptr,
    block_0_ptr,
    block_1_ptr,
    block_2_ptr,
    block_3_ptr,
    out_stride,
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    row_0,
    row_1,
    row_2,
    row_3,
    col_0,
    col_1,
    col_2,
    col_3,
    num_rows,
    num_columns,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Run one program per tile of rows; block I ends at row_I and col_I."""
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    cols = tl.arange(0, BLOCK_C)
    value = tl.zeros((BLOCK_O, BLOCK_C), dtype=out_ptr.dtype.element_ty)
    # Blocks share no element, so the sum with zeros is the block itself.
    value = _add_block(value, block_0_ptr, stride_0, rows, cols, 0, row_0, 0, col_0)
    value = _add_block(value, block_1_ptr, stride_1, rows, cols, row_0, row_1, col_0, col_1)
    value = _add_block(value, block_2_ptr, stride_2, rows, cols, row_1, row_2, col_1, col_2)
    value = _add_block(value, block_3_ptr, stride_3, rows, cols, row_2, row_3, col_2, col_3)
    inside = (rows < num_rows)[:, None] & (cols < num_columns)[None, :]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_stride + cols[None, :], value, mask=inside)


def write_block_diagonal(out_OC: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
    """Write at most MAX_BLOCKS blocks; same contract as the reference."""
    num_rows, num_columns = out_OC.shape
    if out_OC.numel() == 0:
        return
    ends, row, column = [], 0, 0
    for block in blocks:
        row, column = row + block.shape[0], column + block.shape[1]
        ends.append((row, column))
    missing = MAX_BLOCKS - len(blocks)
    given, ends = [*blocks, *[out_OC] * missing], [*ends, *[(row, column)] * missing]
    block_columns = next_power_of_2(num_columns)
    block_rows = max(TILE_SIZE // block_columns, 1)
    launch(
        _block_diagonal_kernel,
        (ceil_div(num_rows, block_rows),),
        out_OC,
        *given,
        out_OC.stride(0),
        *(block.stride(0) for block in given),
        *(row for row, _ in ends),
        *(column for _, column in ends),
        num_rows,
        num_columns,
        BLOCK_O=block_rows,
        BLOCK_C=block_columns,
        num_warps=NUM_WARPS,
    )
