"""Rows, dense weights and NF4 weights in e4m3 with one scale per row, and their product, in plain PyTorch.

Axes: T rows, I columns that a product sums over; O output columns and I input columns of a weight; Q = O I / 64 blocks of NF4 that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS
from lightning_fastft.kernels.nf4_linear import reference as nf4_linear
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight

FP8 = torch.float8_e4m3fn
# The largest number of e4m3.
LARGEST = 448.0
# A row whose largest number is below this is scaled as if it were this, so that no factor is infinite.
LEAST_PEAK = 2.0**-100


class Fp8Rows(NamedTuple):
    """Rows in e4m3 and what each is multiplied with to get its numbers back.

    Args:
        values_TI: Shape (T, I), e4m3, contiguous.
        scale_T: Shape (T,), fp32; the largest number of the row over 448.
    """

    values_TI: torch.Tensor
    scale_T: torch.Tensor


def quantise_rows(x_TI: torch.Tensor, *, factor_I: torch.Tensor | None) -> Fp8Rows:
    """Return ``x * factor`` by rows, each scaled so that its largest number is that of e4m3; arithmetic in fp32, one rounding to e4m3."""
    wide_TI = x_TI.float() if factor_I is None else x_TI.float() * factor_I
    scale_T, inverse_T = _scales(wide_TI.abs().amax(1))
    return Fp8Rows((wide_TI * inverse_T[:, None]).to(FP8), scale_T)


def quantise_nf4(weights: Sequence[NF4Weight], values: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], *, is_transposed: bool) -> None:
    """Write each weight in e4m3, transposed where asked, and the scales of its rows.

    The NF4 table ends at 1, so the largest scale among the blocks of a row bounds the row.
    """
    for weight, value, scale_O in zip(weights, values, scales):
        if value.numel() == 0:
            continue
        wide_OI = value.new_empty(value.shape[::-1] if is_transposed else value.shape, dtype=torch.float32)
        nf4_linear.dequantise_many([weight], [wide_OI])
        scale_Q = weight.absmax_Q if weight.offset is None else nf4_linear._nested_scales(weight)
        found_O, inverse_O = _scales(scale_Q.abs().view(len(scale_O), wide_OI.shape[1] // BLOCK_WEIGHTS).amax(1))
        narrow_OI = (wide_OI * inverse_O[:, None]).to(FP8)
        value.copy_(narrow_OI.T if is_transposed else narrow_OI)
        scale_O.copy_(found_O)


def multiply(rows: Fp8Rows, weight_OI: torch.Tensor, scale_O: torch.Tensor | None, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the product of the numbers that rows and weight stand for, summed in fp32 and rounded once."""
    y_TO = rows.values_TI.float() @ weight_OI.float().T * rows.scale_T[:, None]
    return (y_TO if scale_O is None else y_TO * scale_O).to(dtype)


def _scales(peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of rows by their largest numbers, and what they are multiplied with; quotients rounded once, unlike those with a number."""
    peak = peak.clamp(min=LEAST_PEAK)
    largest = torch.full_like(peak, LARGEST)
    return peak / largest, largest / peak
