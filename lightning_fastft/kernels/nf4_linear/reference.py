"""Dequantisation of NF4 weights of linear layers in plain PyTorch.

Axes: O output columns and I input columns of a weight, (O, I) in memory; X = O I weights in memory order, C = X / 2
    bytes, Q = X / 64 blocks that share a scale, G groups of 256 blocks that share a scale of scales, M entries of a
    table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS, GROUP_BLOCKS


class NF4Weight(NamedTuple):
    """A weight quantised by bitsandbytes: plain tensors, contiguous, on one device.

    The statistics follow the weight in memory order. Without double quantisation absmax_Q holds the scales themselves
    in fp32, and nested_absmax_G, offset and nested_quant_map_M are None.

    Args:
        packed_C: Indices into the NF4 table, the earlier weight in the high half of a byte. Shape (C,), uint8.
        absmax_Q: Indices of the scales in their table, or the scales. Shape (Q,), uint8 or fp32.
        nested_absmax_G: Scales of the scales. Shape (G,), fp32; the last group may be short.
        offset: Added to every scale. Shape (), fp32.
        quant_map_M: The NF4 table. Shape (16,), fp32.
        nested_quant_map_M: The table of the scales. Shape (256,), fp32.
    """

    packed_C: torch.Tensor
    absmax_Q: torch.Tensor
    nested_absmax_G: torch.Tensor | None
    offset: torch.Tensor | None
    quant_map_M: torch.Tensor
    nested_quant_map_M: torch.Tensor | None


@one_kernel
def dequantise_many(weights: Sequence[NF4Weight], outs_OI: Sequence[torch.Tensor]) -> None:
    """Write ``table[place] * scale`` of each weight to its output, rounded to fp32 and then to the dtype of the
    output.
    """
    for weight, out_OI in zip(weights, outs_OI):
        scale_Q = weight.absmax_Q if weight.offset is None else _nested_scales(weight)
        place_X = torch.stack((weight.packed_C >> 4, weight.packed_C & 15), dim=1).flatten()
        value_QB = weight.quant_map_M[place_X.int()].view(-1, BLOCK_WEIGHTS) * scale_Q[:, None]
        out_OI.copy_(value_QB.view(out_OI.shape))


def _nested_scales(weight: NF4Weight) -> torch.Tensor:
    """Return ``nested_table[place] * nested_absmax + offset``, each step rounded to fp32."""
    assert weight.nested_absmax_G is not None
    assert weight.nested_quant_map_M is not None
    assert weight.offset is not None
    nested_Q = weight.nested_absmax_G.repeat_interleave(GROUP_BLOCKS)[: len(weight.absmax_Q)]
    return weight.nested_quant_map_M[weight.absmax_Q.int()] * nested_Q + weight.offset
