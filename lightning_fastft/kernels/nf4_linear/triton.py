"""Dequantisation of NF4 weights of linear layers: up to four weights in one launch, each into any row stride.

Axes: O output columns and I input columns of a weight, (O, I) in memory, walked in tiles of words of eight weights, one
    program per weight and tile; Q = O I / 64 blocks that share a scale, G groups of 256 blocks that share a scale of
    scales, M entries of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight
from lightning_fastft.kernels.sizes import ceil_div

# Enough for q, k and v; the code of a kernel grows with its number of weights.
MAX_WEIGHTS = 4
# Four bytes: a thread reads them at once and writes 16 contiguous bytes of bf16. Tables, scales and words then have the
# same layout, and no data moves between threads.
WORD_WEIGHTS = 8
# Four words per thread, so that four reads are in flight at once. Not yet measured; candidates: python -m
# benchmarks.row_kernels --only nf4 --tiles.
TILE_WORDS = 512
NUM_WARPS = 4


@triton.jit
def block_scale(weight, block, inside, GROUP: tl.constexpr):
    """Return the scales of blocks of a weight (the parts of an NF4Weight); the caller must disable FP fusion."""
    absmax_ptr, nested_absmax_ptr, offset_ptr, nested_quant_map_ptr = weight[1], weight[2], weight[3], weight[5]
    scale = tl.load(absmax_ptr + block, mask=inside, other=0)
    # Scales of one byte are indices into a table.
    if absmax_ptr.dtype.element_ty == tl.uint8:
        nested = tl.load(nested_absmax_ptr + block // GROUP, mask=inside, other=0.0)
        scale = tl.load(nested_quant_map_ptr + scale.to(tl.int32)) * nested + tl.load(offset_ptr)
    return scale


@triton.jit
def _write_tile(
    weight,
    out_ptr,
    num_words,
    row_stride,
    tile,
    ROW_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write one tile of words of one weight; a word is four bytes, eight weights of one block and one row."""
    packed_ptr, quant_map_ptr = weight[0], weight[4]
    word = tile * TILE + tl.arange(0, TILE)
    inside = word < num_words
    bytes_in = tl.arange(0, 4)[None, :]
    pair = tl.load(packed_ptr + (word.to(tl.int64) * 4)[:, None] + bytes_in, mask=inside[:, None], other=0).to(tl.int32)
    scale = block_scale(weight, word // BLOCK_WORDS, inside, GROUP)
    # The high half of a byte holds the earlier weight.
    first = tl.load(quant_map_ptr + (pair >> 4)) * scale[:, None]
    second = tl.load(quant_map_ptr + (pair & 15)) * scale[:, None]
    value = tl.interleave(first, second)
    cell = (word // ROW_WORDS).to(tl.int64) * row_stride + word % ROW_WORDS * 8
    tl.store(
        out_ptr + cell[:, None] + tl.arange(0, 8)[None, :], value.to(out_ptr.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def _dequantise_kernel(
    weights,
    outs,
    num_words,
    row_strides,
    ROW_WORDS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run one program per weight and tile of TILE words, weight after weight."""
    tile = tl.program_id(0)
    for index in tl.static_range(COUNT):
        num_tiles = tl.cdiv(num_words[index], TILE)
        if (tile >= 0) & (tile < num_tiles):
            _write_tile(
                weights[index],
                outs[index],
                num_words[index],
                row_strides[index],
                tile,
                ROW_WORDS[index],
                BLOCK_WORDS,
                GROUP,
                TILE,
            )
        tile -= num_tiles


def dequantise_many(weights: Sequence[NF4Weight], outs_OI: Sequence[torch.Tensor]) -> None:
    """Write each weight to its output."""
    filled = [(weight, out_OI) for weight, out_OI in zip(weights, outs_OI) if out_OI.numel()]
    for start in range(0, len(filled), MAX_WEIGHTS):
        _launch(filled[start : start + MAX_WEIGHTS])


def _launch(filled: Sequence[tuple[NF4Weight, torch.Tensor]]) -> None:
    """Write up to MAX_WEIGHTS weights, none of them empty."""
    num_words = tuple(out_OI.numel() // WORD_WEIGHTS for _, out_OI in filled)
    launch(
        _dequantise_kernel,
        (sum(ceil_div(count, TILE_WORDS) for count in num_words),),
        # A weight without nested scales lacks some parts; absmax_Q is passed for them and never read there.
        tuple(tuple(weight.absmax_Q if part is None else part for part in weight) for weight, _ in filled),
        tuple(out_OI for _, out_OI in filled),
        num_words,
        tuple(out_OI.stride(0) for _, out_OI in filled),
        ROW_WORDS=tuple(out_OI.shape[1] // WORD_WEIGHTS for _, out_OI in filled),
        COUNT=len(filled),
        BLOCK_WORDS=BLOCK_WEIGHTS // WORD_WEIGHTS,
        GROUP=GROUP_BLOCKS,
        TILE=TILE_WORDS,
        num_warps=NUM_WARPS,
        # An FMA would round once where bitsandbytes rounds twice.
        enable_fp_fusion=False,
    )
