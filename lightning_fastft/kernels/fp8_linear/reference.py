"""Quantisation of rows and weights to e4m3 with one scale per row, and their products, in plain PyTorch.

Axes: T rows, I columns that a product sums over; O output columns and I input columns of a weight; Q = O I / 64 blocks
    of NF4 that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel
from lightning_fastft.kernels.nf4_linear import reference as nf4_linear
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight

FP8 = torch.float8_e4m3fn
# The largest number of e4m3.
LARGEST = 448.0
# Lower bound of a row's largest number in its scale, so that no factor is infinite.
LEAST_PEAK = 2.0**-100


class Fp8Rows(NamedTuple):
    """Rows in e4m3 and the scale that each is multiplied with to dequantise it.

    Args:
        values_TI: Shape (T, I), e4m3, contiguous.
        scale_T: Shape (T,), fp32; the largest number of the row over 448, or the next power of 2.
    """

    values_TI: torch.Tensor
    scale_T: torch.Tensor


@one_kernel
def quantise_rows(
    x_TI: torch.Tensor,
    *,
    factor_I: torch.Tensor | None,
    round_scales_to_power_of_2: bool,
    out: Fp8Rows | None = None,
) -> Fp8Rows:
    """Return ``x * factor`` by rows, each scaled so that its largest number fits e4m3; arithmetic in fp32, one
    rounding to e4m3.
    """
    wide_TI = x_TI.float() if factor_I is None else x_TI.float() * factor_I.float()
    peak_T = wide_TI.abs().amax(1).clamp(min=LEAST_PEAK)
    # A division by a tensor rounds once; a division by a Python number would not.
    largest_T = torch.full_like(peak_T, LARGEST)
    scale_T, inverse_T = peak_T / largest_T, largest_T / peak_T
    if round_scales_to_power_of_2:
        scale_T = _round_up_to_power_of_2(scale_T)
        inverse_T = 1 / scale_T
    values_TI = (wide_TI * inverse_T[:, None]).to(FP8)
    if out is None:
        return Fp8Rows(values_TI, scale_T)
    out.values_TI.copy_(values_TI)
    out.scale_T.copy_(scale_T)
    return out


@one_kernel
def transpose(values_TI: torch.Tensor, *, shift_T: torch.Tensor | None, out_IT: torch.Tensor) -> None:
    """Write the transpose of rows in e4m3, each times its power of 2, and zeros behind the last row."""
    num_rows = len(values_TI)
    if shift_T is not None:
        values_TI = (values_TI.float() * shift_T[:, None]).to(FP8)
    out_IT[:, :num_rows] = values_TI.T
    out_IT.view(torch.uint8)[:, num_rows:] = 0


@one_kernel
def balance(
    scale_d_T: torch.Tensor, scale_x_T: torch.Tensor, factor_O: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the exponents of ``scale_d * scale_x`` without their largest one, half for each operand, and that one for
    the sum.
    """
    exponent_T = _exponent(scale_d_T) + _exponent(scale_x_T)
    top = exponent_T.amax()
    exponent_T = exponent_T - top
    half_T = exponent_T >> 1
    return _power(half_T), _power(exponent_T - half_T), _power(top - _exponent(factor_O))


def weight_gradient(d: Fp8Rows, x: Fp8Rows, factor_O: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return ``(d / factor)^T @ x`` of the rows as they are shifted, summed in fp32 and rounded once."""
    *shifts, scale_O = balance(d.scale_T, x.scale_T, factor_O)
    turned = []
    for rows, shift_T in zip((d, x), shifts):
        turned.append(rows.values_TI.new_empty(rows.values_TI.shape[::-1]))
        transpose(rows.values_TI, shift_T=shift_T, out_IT=turned[-1])
    return multiply(Fp8Rows(turned[0], scale_O), turned[1], None, dtype=dtype)


@one_kernel
def nf4_row_scales(weights: Sequence[NF4Weight], scales: Sequence[torch.Tensor]) -> None:
    """Write the scales of the rows of each weight.

    The NF4 table ends at 1, so the largest scale among the blocks of a row bounds the row.
    """
    for weight, scale_O in zip(weights, scales):
        if len(scale_O) and weight.packed_C.numel():
            peak_O = _block_scales(weight).abs().view(len(scale_O), -1).amax(1).clamp(min=LEAST_PEAK)
            scale_O.copy_(_round_up_to_power_of_2(peak_O / torch.full_like(peak_O, LARGEST)))


@one_kernel
def quantise_nf4(
    weights: Sequence[NF4Weight], values: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], *, is_transposed: bool
) -> None:
    """Write each weight in e4m3, transposed if asked."""
    for weight, value, scale_O in zip(weights, values, scales):
        if value.numel() == 0:
            continue
        wide_OI = value.new_empty(value.shape[::-1] if is_transposed else value.shape, dtype=torch.float32)
        nf4_linear.dequantise_many([weight], [wide_OI])
        narrow_OI = (wide_OI * (1 / scale_O)[:, None]).to(FP8)
        value.copy_(narrow_OI.T if is_transposed else narrow_OI)


@one_kernel
def multiply(
    rows: Fp8Rows, weight_OI: torch.Tensor, scale_O: torch.Tensor | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of the dequantised rows and weight, summed in fp32 and rounded once."""
    y_TO = rows.values_TI.float() @ weight_OI.float().T * rows.scale_T[:, None]
    return (y_TO if scale_O is None else y_TO * scale_O).to(dtype)


def _round_up_to_power_of_2(scale: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of 2 that is at least a positive fp32 number: the exponent grows by 1 if the fraction
    is not 0.
    """
    return ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def _exponent(power: torch.Tensor) -> torch.Tensor:
    """Return the exponent of fp32 powers of 2."""
    return ((power.view(torch.int32) >> 23) & 255) - 127


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 to an exponent in fp32, which is kept within that of a normal number."""
    return ((exponent.clamp(-126, 127) + 127) << 23).to(torch.int32).view(torch.float32)


def _block_scales(weight: NF4Weight) -> torch.Tensor:
    """Return the scale of each block, fp32."""
    return weight.absmax_Q if weight.offset is None else nf4_linear._nested_scales(weight)
