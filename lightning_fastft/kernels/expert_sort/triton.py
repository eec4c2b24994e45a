"""A stable counting sort of expert ids on a GPU: three launches, no atomics, bit-equal to a stable argsort.

Axes: T tokens of the pack, K experts per token, N routed slots (T * K), E experts, G bins (the experts and one for
    slots without an expert), B blocks of slots.

The first launch counts the slots of each bin in each block (G x B cells). Their sum over earlier blocks is the number
of slots of a bin before a block, and their sum over experts is the start of each expert. The rank inside a block comes
from comparing its slots with each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.expert_sort.reference import ExpertOrder
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# 65,536 slots make 256 blocks: two programs per multiprocessor, and one tile for the sums over blocks. Not tuned.
BLOCK_SLOTS = 256
# Bins compared with the slots of a block at a time: tiles of 256 x 64 are 128 values per thread.
BLOCK_BINS = 64
BLOCK_EARLIER = 64
# Blocks summed at a time.
BLOCK_BLOCKS = 1024
NUM_WARPS = 4


@triton.jit
def _load_bins(expert_ptr, slot, num_slots, token_stride, choice_stride, num_experts, K: tl.constexpr):
    """Return the bin of each slot: its expert, num_experts for a slot without an expert, and num_experts + 1 past the
    last slot.
    """
    inside = slot < num_slots
    expert = tl.load(expert_ptr + (slot // K) * token_stride + (slot % K) * choice_stride, mask=inside, other=0)
    is_known = (expert >= 0) & (expert < num_experts)
    bin_of_slot = tl.where(is_known, expert, num_experts)
    return tl.where(inside, bin_of_slot, num_experts + 1).to(tl.int32)


@triton.jit
def _count_kernel(
    expert_ptr,
    count_ptr,
    num_slots,
    token_stride,
    choice_stride,
    num_experts,
    num_blocks,
    K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_BINS: tl.constexpr,
):
    """Run one program per block of slots and tile of bins; count the slots of the block in each bin."""
    block = tl.program_id(0).to(tl.int64)
    bins = tl.program_id(1) * BLOCK_BINS + tl.arange(0, BLOCK_BINS)
    slot = block * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    bin_of_slot = _load_bins(expert_ptr, slot, num_slots, token_stride, choice_stride, num_experts, K)
    count = tl.sum((bin_of_slot[:, None] == bins[None, :]).to(tl.int32), axis=0)
    tl.store(count_ptr + bins.to(tl.int64) * num_blocks + block, count, mask=bins <= num_experts)


@triton.jit
def _sum_blocks_kernel(count_ptr, total_ptr, num_blocks, BLOCK_BLOCKS: tl.constexpr):
    """Run one program per bin: replace each count by the number of slots of this bin in earlier blocks, and write the
    total.
    """
    row = tl.program_id(0).to(tl.int64)
    total = 0
    for start in range(0, num_blocks, BLOCK_BLOCKS):
        offs = start + tl.arange(0, BLOCK_BLOCKS)
        inside = offs < num_blocks
        count = tl.load(count_ptr + row * num_blocks + offs, mask=inside, other=0)
        earlier = total + tl.cumsum(count, axis=0) - count
        tl.store(count_ptr + row * num_blocks + offs, earlier, mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(total_ptr + row, total)


@triton.jit
def _place_kernel(
    expert_ptr,
    earlier_ptr,
    total_ptr,
    slot_ptr,
    place_ptr,
    end_ptr,
    num_slots,
    token_stride,
    choice_stride,
    num_experts,
    num_blocks,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_EARLIER: tl.constexpr,
):
    """Run one program per block of slots: place = start of the expert + slots of the expert in earlier blocks + slots
    of the expert earlier in the block.
    """
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_SLOTS)
    slot = block * BLOCK_SLOTS + lane
    inside = slot < num_slots
    bin_of_slot = _load_bins(expert_ptr, slot, num_slots, token_stride, choice_stride, num_experts, K)

    rank = tl.zeros((BLOCK_SLOTS,), dtype=tl.int32)
    for start in range(0, BLOCK_SLOTS, BLOCK_EARLIER):
        other_lane = start + tl.arange(0, BLOCK_EARLIER)
        other_slot = block * BLOCK_SLOTS + other_lane
        other_bin = _load_bins(expert_ptr, other_slot, num_slots, token_stride, choice_stride, num_experts, K)
        is_before = (other_bin[None, :] == bin_of_slot[:, None]) & (other_lane[None, :] < lane[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)

    experts = tl.arange(0, EXPERTS)
    end = tl.cumsum(tl.load(total_ptr + experts, mask=experts < num_experts, other=0), axis=0)
    if block == 0:
        tl.store(end_ptr + experts, end, mask=experts < num_experts)
    # A bin begins at the end of the previous bin.
    previous = tl.minimum(tl.maximum(bin_of_slot - 1, 0), EXPERTS - 1)
    begin = tl.where(bin_of_slot == 0, 0, tl.gather(end, previous, axis=0))
    earlier = tl.load(earlier_ptr + bin_of_slot.to(tl.int64) * num_blocks + block, mask=inside, other=0)
    place = begin + earlier + rank
    tl.store(place_ptr + slot, place, mask=inside)
    tl.store(slot_ptr + place, slot.to(tl.int32), mask=inside)


def sort_slots(expert_TK: torch.Tensor, *, num_experts: int) -> ExpertOrder:
    """Return the slots in the stable order of their experts; same contract as the reference."""
    (num_tokens, num_choices), device = expert_TK.shape, expert_TK.device
    num_slots, num_bins = num_tokens * num_choices, num_experts + 1
    slot_N, place_TK = _empty((num_slots,), device), _empty((num_tokens, num_choices), device)
    if num_slots == 0:
        return ExpertOrder(slot_N, place_TK, torch.zeros(num_experts, dtype=torch.int32, device=device))
    num_blocks = ceil_div(num_slots, BLOCK_SLOTS)
    end_E, count_GB, total_G = (
        _empty((num_experts,), device),
        _empty((num_bins, num_blocks), device),
        _empty((num_bins,), device),
    )
    given = (num_slots, *expert_TK.stride(), num_experts, num_blocks)
    launch(
        _count_kernel,
        (num_blocks, ceil_div(num_bins, BLOCK_BINS)),
        expert_TK,
        count_GB,
        *given,
        K=num_choices,
        BLOCK_SLOTS=BLOCK_SLOTS,
        BLOCK_BINS=BLOCK_BINS,
        num_warps=NUM_WARPS,
    )
    block_blocks = min(next_power_of_2(num_blocks), BLOCK_BLOCKS)
    launch(
        _sum_blocks_kernel, (num_bins,), count_GB, total_G, num_blocks, BLOCK_BLOCKS=block_blocks, num_warps=NUM_WARPS
    )
    launch(
        _place_kernel,
        (num_blocks,),
        expert_TK,
        count_GB,
        total_G,
        slot_N,
        place_TK,
        end_E,
        *given,
        K=num_choices,
        EXPERTS=next_power_of_2(num_experts),
        BLOCK_SLOTS=BLOCK_SLOTS,
        BLOCK_EARLIER=BLOCK_EARLIER,
        num_warps=NUM_WARPS,
    )
    return ExpertOrder(slot_N, place_TK, end_E)


def _empty(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=device)
