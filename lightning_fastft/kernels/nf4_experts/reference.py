"""Dequantisation of NF4 expert weights with doubly quantised scales in plain PyTorch.

Axes: E experts, C bytes of one expert (two weights each), X = 2 C weights of one expert in memory order, Q = X / 64
    blocks that share a scale, G groups of 256 blocks that share a scale of scales, M entries of a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel

# Block sizes of bitsandbytes for NF4 with double quantisation.
BLOCK_WEIGHTS = 64
GROUP_BLOCKS = 256


class NF4Stack(NamedTuple):
    """Stacked weights of E experts, each quantised separately as in bitsandbytes.

    Args:
        packed_EC: Indices into the NF4 table, the earlier weight in the high half of a byte. Shape (E, C), uint8.
        absmax_EQ: Indices of the scales in their table. Shape (E, Q), uint8.
        nested_absmax_EG: Scales of the scales. Shape (E, G), fp32; the last group may be short.
        offset_E: Added to the scales of an expert. Shape (E,), fp32.
        quant_map_M: The NF4 table. Shape (16,), fp32.
        nested_quant_map_M: The table of the scales. Shape (256,), fp32.
    """

    packed_EC: torch.Tensor
    absmax_EQ: torch.Tensor
    nested_absmax_EG: torch.Tensor
    offset_E: torch.Tensor
    quant_map_M: torch.Tensor
    nested_quant_map_M: torch.Tensor


@one_kernel
def dequantise_stack(stack: NF4Stack, out_EX: torch.Tensor) -> torch.Tensor:
    """Write ``table[index] * (nested_table[scale] * nested_absmax + offset)`` to out_EX, each step rounded to fp32, the
    last one to the dtype of out_EX.
    """
    if out_EX.is_meta:
        return out_EX
    num_blocks = stack.absmax_EQ.shape[1]
    # One expert at a time: int64 indices take 16 times the memory of their codes.
    for expert, packed_C in enumerate(stack.packed_EC):
        nested_Q = stack.nested_absmax_EG[expert].repeat_interleave(GROUP_BLOCKS)[:num_blocks]
        scale_Q = stack.nested_quant_map_M[stack.absmax_EQ[expert].long()] * nested_Q + stack.offset_E[expert]
        place_X = torch.stack((packed_C >> 4, packed_C & 15), dim=1).flatten()
        value_QB = stack.quant_map_M[place_X.long()].view(num_blocks, BLOCK_WEIGHTS) * scale_Q[:, None]
        out_EX[expert] = value_QB.flatten()
    return out_EX
