"""Dequantisation of stacks of NF4 expert weights on a GPU, in one pass.

Axes: E experts, C bytes of one expert (two weights each), X = 2 C weights of one expert in memory order, Q = X / 64
    blocks that share a scale (walked in tiles, one program per expert and run of tiles), G groups of 256 blocks that
    share a scale of scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS, NF4Stack
from lightning_fastft.kernels.sizes import ceil_div

# 32 blocks on 8 warps: each thread reads 4 bytes and writes their 8 weights, 16 contiguous bytes in bf16.
TILE_BLOCKS = 32
TILES_PER_PROGRAM = 4
NUM_WARPS = 8


@triton.jit
def _dequantise_stack_kernel(
    packed_ptr,
    absmax_ptr,
    nested_absmax_ptr,
    offset_ptr,
    quant_map_ptr,
    nested_quant_map_ptr,
    out_ptr,
    num_blocks,
    num_groups,
    BLOCK_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Run one program per expert and run of TILES tiles of TILE blocks."""
    expert = tl.program_id(1).to(tl.int64)
    offset = tl.load(offset_ptr + expert)
    bytes_in = tl.arange(0, BLOCK_BYTES)
    weights_in = tl.arange(0, 2 * BLOCK_BYTES)
    for tile in tl.static_range(TILES):
        block = (tl.program_id(0) * TILES + tile) * TILE + tl.arange(0, TILE)
        inside = block < num_blocks
        row = expert * num_blocks + block
        place = tl.load(absmax_ptr + row, mask=inside, other=0).to(tl.int32)
        nested = tl.load(nested_absmax_ptr + expert * num_groups + block // GROUP, mask=inside, other=0.0)
        scale = tl.load(nested_quant_map_ptr + place) * nested + offset
        pair = tl.load(packed_ptr + row[:, None] * BLOCK_BYTES + bytes_in[None, :], mask=inside[:, None], other=0).to(
            tl.int32
        )
        # The high half of a byte holds the earlier weight.
        first = tl.load(quant_map_ptr + (pair >> 4)) * scale[:, None]
        second = tl.load(quant_map_ptr + (pair & 15)) * scale[:, None]
        value = tl.interleave(first, second)
        out = out_ptr + row[:, None] * (2 * BLOCK_BYTES) + weights_in[None, :]
        tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def dequantise_stack(stack: NF4Stack, out_EX: torch.Tensor) -> torch.Tensor:
    """Write the weights of every expert to out_EX and return it."""
    num_experts, num_blocks = stack.absmax_EQ.shape
    if out_EX.numel() == 0:
        return out_EX
    launch(
        _dequantise_stack_kernel,
        (ceil_div(num_blocks, TILE_BLOCKS * TILES_PER_PROGRAM), num_experts),
        *stack,
        out_EX,
        num_blocks,
        stack.nested_absmax_EG.shape[1],
        BLOCK_BYTES=BLOCK_WEIGHTS // 2,
        GROUP=GROUP_BLOCKS,
        TILE=TILE_BLOCKS,
        TILES=TILES_PER_PROGRAM,
        num_warps=NUM_WARPS,
        # An FMA would round once where bitsandbytes rounds twice.
        enable_fp_fusion=False,
    )
    return out_EX
