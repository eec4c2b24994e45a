"""Move the expert axis of a stack from last to first and back on a GPU.

Tiles are transposed in shared memory, so reads and writes are both coalesced.
Axes of the source: first, middle (walked by the grid), last; the result has first and last exchanged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# A side of 64 values is 256 contiguous bytes in fp32 and 128 in bf16; the tile takes 16 KiB of shared memory. Not yet
# measured.
MAX_SIDE = 64
NUM_WARPS = 4


@triton.jit
def _exchange_ends_kernel(
    source_ptr,
    out_ptr,
    num_first,
    num_middle,
    num_last,
    BLOCK_FIRST: tl.constexpr,
    BLOCK_LAST: tl.constexpr,
):
    """Run one program per tile of the two outer axes and index of the middle axis."""
    num_last_tiles = tl.cdiv(num_last, BLOCK_LAST)
    middle = tl.program_id(1).to(tl.int64)
    first = (tl.program_id(0) // num_last_tiles).to(tl.int64) * BLOCK_FIRST + tl.arange(0, BLOCK_FIRST)
    last = (tl.program_id(0) % num_last_tiles).to(tl.int64) * BLOCK_LAST + tl.arange(0, BLOCK_LAST)
    inside = (first < num_first)[:, None] & (last < num_last)[None, :]
    source_row = first * num_middle + middle
    value = tl.load(source_ptr + source_row[:, None] * num_last + last[None, :], mask=inside, other=0.0)
    out_row = last * num_middle + middle
    # The compiler transposes the tile here: the store runs along the first axis of the source.
    tl.store(out_ptr + out_row[None, :] * num_first + first[:, None], value.to(out_ptr.dtype.element_ty), mask=inside)


def exchange_ends(source: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Write ``out[k, j, i] = source[i, j, k]``; same contract as the reference."""
    num_first, num_middle, num_last = source.shape
    if source.numel() == 0:
        return out
    sides = [min(next_power_of_2(size), MAX_SIDE) for size in (num_first, num_last)]
    launch(
        _exchange_ends_kernel,
        (ceil_div(num_first, sides[0]) * ceil_div(num_last, sides[1]), num_middle),
        source,
        out,
        num_first,
        num_middle,
        num_last,
        BLOCK_FIRST=sides[0],
        BLOCK_LAST=sides[1],
        num_warps=NUM_WARPS,
    )
    # Autograd does not see writes of a kernel. A backward that saved the old values must raise.
    torch.autograd.graph.increment_version(out)
    return out
