"""RMSNorm in plain PyTorch: the formula and its gradient, the reference of the Triton kernels.

Axes: T rows (tokens, or tokens times heads), D columns that are normed together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows, quantise_rows


class NormForm(NamedTuple):
    """Variant of RMSNorm that a model family uses.

    Args:
        eps: Added to the mean of the squares.
        weight_offset: Added to the weight: 1 for Gemma, else 0.
        is_weight_wide: True if the product with the weight is computed in fp32 and rounded once (Gemma, gpt-oss); False
            if the normed row is rounded to its dtype first and the product is rounded again (Llama, Qwen, Mistral,
            Phi-3).

    Source:
        arXiv 1910.07467; the forms as in transformers (modeling_llama.py, modeling_gemma3.py, modeling_gpt_oss.py).

    Example:
        >>> NormForm(weight_offset=1.0, is_weight_wide=True).eps
        1e-06
    """

    eps: float = 1e-6
    weight_offset: float = 0.0
    is_weight_wide: bool = False


@one_kernel
def rms_norm_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, form: NormForm, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the normed rows; arithmetic in fp32 (float64 for float64)."""
    dtype, wide = x_TD.dtype, wide_dtype(x_TD.dtype)
    wide_TD = x_TD.to(wide)
    normed_TD = wide_TD * _reciprocal_root(wide_TD, form)[:, None]
    if not form.is_weight_wide:
        normed_TD = normed_TD.to(dtype).to(wide)
    y_TD = normed_TD * shifted_weight(weight_D, wide, form)
    return y_TD.to(dtype) if out is None else out.copy_(y_TD)


@one_kernel
def rms_norm_quantised(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, form: NormForm, round_scales_to_power_of_2: bool
) -> Fp8Rows:
    """Return the rounded norm in e4m3."""
    y_TD = rms_norm_forward(x_TD, weight_D, form=form)
    return quantise_rows(y_TD, factor_I=None, round_scales_to_power_of_2=round_scales_to_power_of_2)


@one_kernel
def rms_norm_backward(
    d_y_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    form: NormForm,
    addend_TD: torch.Tensor | None = None,
    needs_weight: bool,
    out: torch.Tensor | None = None,
    rstd_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradient of the rows, rounded once, and the gradient of the weight, not rounded."""
    wide = wide_dtype(x_TD.dtype)
    wide_TD, d_y_TD = x_TD.to(wide), d_y_TD.to(wide)
    rstd_T = _reciprocal_root(wide_TD, form)
    if rstd_out is not None:
        rstd_out.copy_(rstd_T)
    normed_TD = wide_TD * rstd_T[:, None]
    d_weight_D = (d_y_TD * normed_TD).sum(dim=0) if needs_weight else None
    d_normed_TD = d_y_TD * shifted_weight(weight_D, wide, form)
    # The root mean square is itself a function of the row: subtract the component along the row.
    along_T = (d_normed_TD * normed_TD).mean(dim=1)
    d_x_TD = (d_normed_TD - normed_TD * along_T[:, None]) * rstd_T[:, None]
    if addend_TD is not None:
        d_x_TD = d_x_TD + addend_TD.to(wide)
    return d_x_TD.to(x_TD.dtype) if out is None else out.copy_(d_x_TD), d_weight_D


def _reciprocal_root(wide_TD: torch.Tensor, form: NormForm) -> torch.Tensor:
    """Return 1 over the root of the mean square of each row."""
    return torch.rsqrt(wide_TD.pow(2).mean(dim=1) + form.eps)


def shifted_weight(weight_D: torch.Tensor, wide: torch.dtype, form: NormForm) -> torch.Tensor:
    """Return the weight in a wide dtype, with the offset of the form added."""
    return weight_D.to(wide) + form.weight_offset
