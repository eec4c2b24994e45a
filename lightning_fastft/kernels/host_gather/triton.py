"""Rows of a table in pinned host memory, read by the kernel itself over the bus.

Axes: T tokens of the pack, V rows of the table, D model width (walked in tiles, one program per token and tile).
Only the requested rows cross the bus; the device holds no copy of the table. Pinned memory has a device address (CUDA's
unified virtual addressing), which Triton's launcher looks up for every pointer argument
(``CU_POINTER_ATTRIBUTE_DEVICE_POINTER`` in its driver.c; pinned tensors are accepted since triton#1197).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# 2048 bf16 columns on 4 warps: two 16-byte reads per thread in flight, and enough programs to saturate the bus at any
# model width.
MAX_BLOCK = 2048
NUM_WARPS = 4


@triton.jit
def _gather_rows_kernel(
    weight_ptr,
    token_ptr,
    out_ptr,
    weight_stride,
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    """Run one program per token and tile of columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row).to(tl.int64)
    # An invalid token gives NaN instead of an out-of-bounds read.
    num_readable = tl.where((token >= 0) & (token < num_rows), num_columns, 0)
    value = tl.load(weight_ptr + token * weight_stride + cols, mask=cols < num_readable, other=float("nan"))
    tl.store(out_ptr + row * num_columns + cols, value, mask=cols < num_columns)


def gather_rows(weight_VD: torch.Tensor, token_T: torch.Tensor) -> torch.Tensor:
    """Return the rows of the tokens on their device; a token outside the table gives a row of NaN."""
    num_tokens, num_columns = token_T.shape[0], weight_VD.shape[1]
    out_TD = torch.empty(num_tokens, num_columns, dtype=weight_VD.dtype, device=token_T.device)
    if out_TD.numel() == 0:
        return out_TD
    block = min(next_power_of_2(num_columns), MAX_BLOCK)
    launch(
        _gather_rows_kernel,
        (num_tokens, ceil_div(num_columns, block)),
        weight_VD,
        token_T,
        out_TD,
        weight_VD.stride(0),
        weight_VD.shape[0],
        num_columns,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    return out_TD
