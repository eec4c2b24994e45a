"""Repeated heads on a GPU: each value is read once and written once per query head.

Axes: T tokens (one program each), H query heads, G key/value heads, W width of a head; the G x W columns of a token are
    walked in tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import next_power_of_2

# One 16-byte read per thread of 4 warps, for 16-bit dtypes.
MAX_BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def _repeat_heads_kernel(
    in_ptr,
    out_ptr,
    in_stride,
    NUM_COLUMNS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    NUM_TIMES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program per token."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, NUM_COLUMNS, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < NUM_COLUMNS
        value = tl.load(in_ptr + token * in_stride + cols, mask=inside)
        ptrs = (
            out_ptr
            + token * (NUM_TIMES * NUM_COLUMNS)
            + cols // HEAD_WIDTH * (NUM_TIMES * HEAD_WIDTH)
            + cols % HEAD_WIDTH
        )
        for time in tl.static_range(NUM_TIMES):
            tl.store(ptrs + time * HEAD_WIDTH, value, mask=inside)


def repeat_heads(x_TGW: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return each head repeated once per query head that shares it; same contract as the reference."""
    num_tokens, num_kv_heads, width = x_TGW.shape
    out_THW = torch.empty((num_tokens, num_heads, width), dtype=x_TGW.dtype, device=x_TGW.device)
    if out_THW.numel() == 0:
        return out_THW
    num_columns = num_kv_heads * width
    launch(
        _repeat_heads_kernel,
        (num_tokens,),
        x_TGW,
        out_THW,
        x_TGW.stride(0),
        NUM_COLUMNS=num_columns,
        HEAD_WIDTH=width,
        NUM_TIMES=num_heads // num_kv_heads,
        BLOCK=min(next_power_of_2(num_columns), MAX_BLOCK),
        num_warps=NUM_WARPS,
    )
    return out_THW
