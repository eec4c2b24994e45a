"""RMSNorm in one pass over memory, and its gradient in one pass.

Axes: T rows (tokens, or tokens times heads), D columns that are normed together.
Neither function is differentiable; the autograd Functions of layers call them.
"""

from __future__ import annotations

from types import ModuleType

import torch

from lightning_fastft.core.checks import (
    check_bool,
    check_choice,
    check_float,
    check_layout,
    check_out,
    do_ranges_overlap,
)
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import FLOATING, TRITON_DTYPES, choose_module, must_check, no_graph, wide_dtype
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows
from lightning_fastft.kernels.rms_norm import reference
from lightning_fastft.kernels.rms_norm.reference import NormForm

# One program holds a row from the first read to the last write.
MAX_COLUMNS = 16_384


def rms_norm_forward(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    form: NormForm,
    out: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``weight * x / rms(x)`` of each row.

    The arithmetic is fp32 (float64 for float64). The result is rounded once, or twice if ``form.is_weight_wide`` is
    False. Rows are independent, so NaN stays in its row.

    Args:
        x_TD: Rows to norm. Shape (T, D), 1 <= D <= 16,384; bf16, fp16, fp32 or float64; last axis contiguous, any row
            stride.
        weight_D: Weight of the norm. Shape (D,), contiguous; bf16, fp16 or fp32 for any dtype of x_TD, float64 only
            with float64.
        form: Variant of RMSNorm, with eps.
        out: Output tensor: like x_TD, any row stride, in memory that no input shares. None for new memory.
        is_checked: As in ``must_check``.

    Returns:
        Shape (T, D), dtype and device of x_TD, no graph; contiguous, or ``out``.

    Raises:
        ShapeError: D is above 16,384, or ``out`` overlaps an input.

    Cost:
        Reads x_TD and writes the result once; no host sync. The reference makes fp32 copies.

    Source:
        arXiv 1910.07467; order of roundings as in transformers.

    Example:
        >>> rms_norm_forward(torch.tensor([[3.0, 3.0]]), torch.tensor([1.0, 3.0]), form=NormForm(eps=0.0))
        tensor([[1., 3.]])
    """
    if must_check(is_checked):
        _check_rows("x_TD", x_TD)
        _check_form(form)
        _check_weight(weight_D, x_TD)
        if out is not None:
            check_out(out, like=x_TD, may_be={}, must_not_meet=(x_TD, weight_D))
    with no_graph():
        return _choose(x_TD).rms_norm_forward(x_TD, weight_D, form=form, out=out)


def rms_norm_quantised(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    form: NormForm,
    round_scales_to_power_of_2: bool = False,
    is_checked: bool = True,
) -> Fp8Rows:
    """Return ``quantise_rows(rms_norm_forward(x, weight))`` bit for bit, in one kernel.

    Args:
        x_TD: As in ``rms_norm_forward``; bf16, fp16 or fp32.
        weight_D: As in ``rms_norm_forward``.
        form: Variant of RMSNorm, with eps.
        round_scales_to_power_of_2: As in ``quantise_rows``.
        is_checked: As in ``must_check``.

    Returns:
        The rows in e4m3 and their scales, in new memory.

    Raises:
        ShapeError: As in ``rms_norm_forward``.
        OptionError: As in ``rms_norm_forward``.

    Cost:
        Reads x_TD once and writes one byte per number; no host sync. Both operations apart also write and read the
        normed rows. The reference makes fp32 copies.

    Source:
        own.

    Example:
        >>> x, weight = torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 2.0])
        >>> rows = rms_norm_quantised(x, weight, form=NormForm(eps=0.0))
        >>> rows.values_TI.float() * rows.scale_T[:, None]
        tensor([[1., 2.]])
    """
    if must_check(is_checked):
        check_layout("x_TD", x_TD, (None, None), dtypes=TRITON_DTYPES, num_strided=1)
        _check_rows("x_TD", x_TD)
        _check_form(form)
        _check_weight(weight_D, x_TD)
        check_bool("round_scales_to_power_of_2", round_scales_to_power_of_2)
    with no_graph():
        return _choose(x_TD).rms_norm_quantised(
            x_TD, weight_D, form=form, round_scales_to_power_of_2=round_scales_to_power_of_2
        )


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
    is_checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the rows and of the weight; the reciprocal roots are computed again.

    The gradient through the norm and the addend are added in fp32 (float64 for float64) and rounded once. Sums over
    rows have a fixed order, so two calls are bit-equal.

    Args:
        d_y_TD: Gradient of the output. Shape (T, D); dtype and device of x_TD; last axis contiguous, any row stride.
        x_TD: As given to ``rms_norm_forward``.
        weight_D: As given to ``rms_norm_forward``.
        form: As given to ``rms_norm_forward``.
        addend_TD: Gradient that reaches x_TD through the residual stream. Like d_y_TD; None for 0.
        needs_weight: Return the gradient of the weight.
        out: Output tensor for d_x_TD: a tensor like x_TD in separate memory, or d_y_TD or addend_TD itself, which is
            overwritten. None for new memory.
        rstd_out: Output tensor for 1 over the root mean square of each row. Shape (T,), contiguous, fp32 (float64 for
            float64), separate memory; None to discard it.
        is_checked: As in ``must_check``.

    Returns:
        d_x_TD: Shape (T, D), dtype and device of x_TD; contiguous, or ``out``.
        d_weight_D: Shape (D,), sum over T of d_y_TD times the normed row, fp32 (float64 for float64); None unless
            needs_weight.

    Raises:
        ShapeError: D is above 16,384, or ``out`` or ``rstd_out`` overlaps an input
            without being d_y_TD or addend_TD.

    Cost:
        Reads d_y_TD, x_TD (and addend_TD) and writes d_x_TD once; no host sync. With needs_weight a second launch over
        at most 512 partial sums of D fp32 values. The reference makes fp32 copies.

    Example:
        >>> ones, weight = torch.ones(1, 2), torch.tensor([1.0, 3.0])
        >>> rms_norm_backward(ones, ones, weight, form=NormForm(eps=0.0), needs_weight=True)
        (tensor([[-1.,  1.]]), tensor([1., 1.]))
    """
    if must_check(is_checked):
        _check_rows("x_TD", x_TD)
        _check_form(form)
        _check_weight(weight_D, x_TD)
        check_choice("needs_weight", needs_weight, (False, True))
        check_layout("d_y_TD", d_y_TD, x_TD.shape, like=x_TD, num_strided=1)
        if addend_TD is not None:
            check_layout("addend_TD", addend_TD, x_TD.shape, like=x_TD, num_strided=1)
        if out is not None:
            may_be = {"d_y_TD": d_y_TD, "addend_TD": addend_TD}
            check_out(out, like=x_TD, may_be=may_be, must_not_meet=(x_TD, weight_D, rstd_out))
        if rstd_out is not None:
            check_layout("rstd_out", rstd_out, x_TD.shape[:1], dtypes=(wide_dtype(x_TD.dtype),), like=x_TD)
            others = (other for other in (d_y_TD, x_TD, weight_D, addend_TD) if other is not None)
            if any(do_ranges_overlap(rstd_out, other) for other in others):
                raise ShapeError("rstd_out shares memory with an input. Give separate memory, or None.")
    with no_graph():
        return _choose(x_TD).rms_norm_backward(
            d_y_TD,
            x_TD,
            weight_D,
            form=form,
            addend_TD=addend_TD,
            needs_weight=needs_weight,
            out=out,
            rstd_out=rstd_out,
        )


def _choose(x_TD: torch.Tensor) -> ModuleType:
    """Return the module that runs; raise on rows that the kernel could not hold."""
    if x_TD.shape[1] > MAX_COLUMNS:
        raise ShapeError(f"The rows have {x_TD.shape[1]} columns, the kernel supports at most {MAX_COLUMNS}.")
    return choose_module(reference, x_TD)


def _check_form(form: NormForm) -> None:
    """Raise on an unknown form."""
    if not isinstance(form, NormForm):
        raise OptionError(f"form must be a NormForm, got {type(form).__name__}; give NormForm(eps=...).")
    check_float("form.eps", form.eps, low=0.0)
    check_float("form.weight_offset", form.weight_offset, low=float("-inf"))
    check_choice("form.is_weight_wide", form.is_weight_wide, (False, True))


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise on shapes, dtypes, devices and layouts that the kernels cannot read."""
    if check_layout(name, tensor, (None, None), dtypes=FLOATING, num_strided=1).shape[1] == 0:
        raise ShapeError(f"{name} has no columns; a mean needs at least one.")


def _check_weight(weight_D: torch.Tensor, x_TD: torch.Tensor) -> None:
    """Raise on a weight that is not one number per column."""
    dtypes = FLOATING if x_TD.dtype is torch.float64 else TRITON_DTYPES
    check_layout("weight_D", weight_D, x_TD.shape[1:], dtypes=dtypes, like=x_TD)
