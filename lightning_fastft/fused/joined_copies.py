"""Low-precision copies of A below each other in one memory, for layers that read the same rows.

Axes: R adapter ranks of all layers together, I input columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_fastft.moe.low_precision_copy import LowPrecisionCopy

if TYPE_CHECKING:
    from lightning_fastft.fused.linears import FusedLinear


def joined(factors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices with the same columns as one tensor if they are below each other in one memory, else None."""
    if len(factors) < 2:
        return factors[0] if factors else None
    first, end = factors[0], factors[0].data_ptr()
    for factor in factors:
        if factor.data_ptr() != end or not factor.is_contiguous():
            return None
        if factor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += factor.nbytes
    num_rows, num_columns = sum(factor.shape[0] for factor in factors), first.shape[1]
    with torch.inference_mode(mode=False), torch.no_grad():
        return first.as_strided((num_rows, num_columns), (num_columns, 1))


def join_copies(fused_linear: FusedLinear, copies: Sequence[LowPrecisionCopy]) -> FusedLinear:
    """Put low-precision copies of A of all layers below each other, so that one product reads them without a copy.

    Args:
        fused_linear: The layers.
        copies: The copies that their parts hold as ``copy_a_RI``, in the order of the parts that have adapters.

    Returns:
        The same layers with the copies in their new memory, or as they are.
    """
    parts = [part for part in fused_linear.parts if part.copy_a_RI is not None]
    if not copies or len(copies) != len(parts) or joined([copy.tensor for copy in copies]) is not None:
        return fused_linear
    tensor = copies[0].tensor
    with torch.inference_mode(mode=False):
        memory_RI = tensor.new_empty(fused_linear.num_ranks, fused_linear.num_inputs)
    for copy, place_RI in zip(copies, memory_RI.split([part.rank for part in parts])):
        copy.move(place_RI)
    moved = iter(copies)
    return dataclasses.replace(
        fused_linear,
        parts=tuple(
            part if part.copy_a_RI is None else part._replace(copy_a_RI=next(moved).tensor)
            for part in fused_linear.parts
        ),
    )
