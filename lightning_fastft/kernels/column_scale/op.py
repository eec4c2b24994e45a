"""Columns times factors, such as magnitude over row norm (DoRA), and the gradients, each in one pass over memory.

Axes: T rows, N columns (outputs of a layer), I inputs of the layer, R ranks.
``scale_columns`` and its backward are not differentiable; the autograd Functions of layers call them.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.core.checks import check_layout, check_out
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check, plain_numbers, wide_dtype
from lightning_fastft.kernels.column_scale import reference
from lightning_fastft.kernels.launch import contiguous_rows


def row_factors(
    weight_NI: torch.Tensor,
    a_RI: torch.Tensor,
    b_NR: torch.Tensor,
    magnitude_N: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    is_checked: bool = True,
) -> torch.Tensor:
    """Write ``magnitude / norm`` and ``1 / norm`` of the rows of ``W + scale * B A``.

    Products, sums and norms are fp32 (float64 for float64) in a fixed order; nothing is rounded in between.

    Args:
        weight_NI: Shape (N, I); bf16, fp16, fp32 or float64; last axis contiguous, any row stride.
        a_RI: Shape (R, I), like weight_NI, contiguous.
        b_NR: Shape (N, R), like weight_NI, contiguous.
        magnitude_N: Shape (N,); any floating dtype, contiguous.
        scale: Factor on the product of B and A.
        out: Shape (2, N); fp32, or float64 if weight_NI is; contiguous.
        is_checked: As in ``must_check``.

    Returns:
        out.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong.

    Cost:
        Reads the weight once, 2 N I R FLOP; no temporary memory and no host sync. The reference makes a wide copy of
        the weight.

    Source:
        DoRA, arXiv 2402.09353.

    Example:
        >>> weight, a, b = torch.tensor([[3.0, 3.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0]])
        >>> row_factors(weight, a, b, torch.tensor([10.0]), scale=1.0, out=torch.empty(2, 1))
        tensor([[2.0000],
                [0.2000]])
    """
    if must_check(is_checked):
        check_layout("weight_NI", weight_NI, (None, None), dtypes=FLOATING, num_strided=1)
        check_layout("a_RI", a_RI, (None, weight_NI.shape[1]), like=weight_NI)
        check_layout("b_NR", b_NR, (weight_NI.shape[0], a_RI.shape[0]), like=weight_NI)
        check_layout("magnitude_N", magnitude_N, (weight_NI.shape[0],), dtypes=FLOATING, like=weight_NI)
        check_layout("out", out, (2, weight_NI.shape[0]), dtypes=(wide_dtype(weight_NI.dtype),), like=weight_NI)
    with plain_numbers(weight_NI.device.type):
        return choose_module(reference, weight_NI).row_factors(weight_NI, a_RI, b_NR, magnitude_N, scale=scale, out=out)


def scale_columns(
    x_TN: torch.Tensor,
    factor_N: torch.Tensor,
    *,
    offset_N: torch.Tensor | None = None,
    addend_TN: torch.Tensor | None = None,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``addend + alpha * (x * factor + offset)``.

    The arithmetic is fp32 (float64 for float64), and the result is rounded once. Values are independent, so NaN stays
    where it is.

    Args:
        x_TN: Shape (T, N); bf16, fp16, fp32 or float64; last axis contiguous, any row stride.
        factor_N: Factors of the columns. Shape (N,); fp32, or float64 if x_TN is; contiguous.
        offset_N: Like factor_N. None for 0.
        addend_TN: A summand like x_TN, any row stride. None for 0.
        alpha: Factor on the scaled columns.
        out: Output: a tensor like x_TN in separate memory, any row stride, or x_TN or addend_TN itself, which is
            overwritten. None for new memory.
        is_checked: As in ``must_check``.

    Returns:
        Shape (T, N), dtype and device of x_TN, no graph; contiguous, or ``out``.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong, or ``out`` overlaps an input without being x_TN or
            addend_TN.

    Cost:
        Reads x_TN (and addend_TN) and writes the result once. No host sync.

    Source:
        DoRA, arXiv 2402.09353.

    Example:
        >>> scale_columns(torch.ones(1, 2), torch.tensor([2.0, 3.0]), addend_TN=torch.ones(1, 2))
        tensor([[3., 4.]])
    """
    if must_check(is_checked):
        check_layout("x_TN", x_TN, (None, None), dtypes=FLOATING, num_strided=1)
        for name, vector_N in (("factor_N", factor_N), ("offset_N", offset_N)):
            _check_columns(name, vector_N, x_TN)
        if addend_TN is not None:
            check_layout("addend_TN", addend_TN, x_TN.shape, like=x_TN, num_strided=1)
        if out is not None:
            check_out(out, like=x_TN, may_be={"x_TN": x_TN, "addend_TN": addend_TN}, must_not_meet=(factor_N,))
    with plain_numbers(x_TN.device.type):
        return choose_module(reference, x_TN).scale_columns(
            x_TN, factor_N, offset_N=offset_N, addend_TN=addend_TN, alpha=alpha, out=out
        )


def scale_columns_backward(
    d_y_TN: torch.Tensor,
    saved_TN: torch.Tensor | None,
    factor_N: torch.Tensor,
    *,
    needs_totals: bool = False,
    out: torch.Tensor | None = None,
    is_checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return ``d_y * factor``, and the sums over rows of ``d_y * saved`` and of d_y.

    ``saved`` is x or y of scale_columns; the gradient of the factor follows from the sums. Sums are fp32 (float64 for
    float64) in a fixed order, so two calls are bit-equal.

    Args:
        d_y_TN: Gradient of the scaled columns, like x_TN of scale_columns.
        saved_TN: Like d_y_TN, any row stride. None if its sum is not needed.
        factor_N: As in scale_columns.
        needs_totals: Whether the sum of the gradient is needed.
        out: Memory for the first result: a tensor like d_y_TN in separate memory, any row stride, or d_y_TN itself,
            which is overwritten. None for new memory.
        is_checked: As in ``must_check``.

    Returns:
        d_x_TN: Gradient of the columns.
        products_N: Sum over rows of gradient times saved columns, fp32 (float64 for float64); None without saved_TN.
        totals_N: Sum over rows of the gradient, like products_N; None unless needs_totals.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong, or ``out`` overlaps saved_TN.

    Cost:
        Reads d_y_TN and saved_TN and writes the first result once; 8 bytes of temporary memory per column and 256 rows.
        No host sync.

    Source:
        DoRA, arXiv 2402.09353.

    Example:
        >>> d_y, x, factor = torch.ones(2, 1), torch.tensor([[1.0], [2.0]]), torch.tensor([3.0])
        >>> scale_columns_backward(d_y, x, factor)[1]
        tensor([3.])
    """
    if must_check(is_checked):
        check_layout("d_y_TN", d_y_TN, (None, None), dtypes=FLOATING, num_strided=1)
        _check_columns("factor_N", factor_N, d_y_TN)
        if saved_TN is not None:
            check_layout("saved_TN", saved_TN, d_y_TN.shape, like=d_y_TN, num_strided=1)
        if out is not None:
            check_out(out, like=d_y_TN, may_be={"d_y_TN": d_y_TN}, must_not_meet=(factor_N, saved_TN))
    with plain_numbers(d_y_TN.device.type):
        return choose_module(reference, d_y_TN).scale_columns_backward(
            d_y_TN, saved_TN, factor_N, needs_totals=needs_totals, out=out
        )


def scale_by_magnitude(
    x: torch.Tensor, magnitude_N: torch.Tensor, factors_2N: torch.Tensor, *, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the output of a DoRA layer from that of its base and adapter; differentiable in x and the magnitude.

    ``y = (x - bias) * magnitude / norm + bias``; the norm is a constant, as in the paper. Gradients: ``d_x = d_y *
    magnitude / norm`` and ``d_magnitude = sum over rows of d_y * (x - bias) / norm``.

    Args:
        x: Base and low-rank product, with the bias. Shape (..., N).
        magnitude_N: Shape (N,).
        factors_2N: ``magnitude / norm`` and ``1 / norm``. Shape (2, N); fp32, or float64 if x is; no gradient.
        bias_N: Bias of the layer, frozen; None without one.

    Cost:
        That of scale_columns and scale_columns_backward; saves x and the factors.

    Source:
        DoRA, arXiv 2402.09353, section 4.3.

    Example:
        >>> scale_by_magnitude(torch.ones(1, 2), torch.ones(2), torch.tensor([[2.0, 3.0], [2.0, 3.0]]))
        tensor([[2., 3.]])
    """
    return _ScaleByMagnitude.apply(x, magnitude_N, factors_2N, bias_N)


def offset_of(bias_N: torch.Tensor, factor_N: torch.Tensor) -> torch.Tensor:
    """Return the offset that leaves a bias inside of x unscaled."""
    return bias_N.to(factor_N.dtype) * (1.0 - factor_N)


def magnitude_gradient(
    products_N: torch.Tensor,
    totals_N: torch.Tensor | None,
    factors_2N: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    is_scaled: bool,
) -> torch.Tensor:
    """Return the gradient of the magnitude from the sums of scale_columns_backward.

    Args:
        products_N: Sum of gradient times saved columns.
        totals_N: Sum of the gradient; None without a bias.
        factors_2N: As in scale_by_magnitude.
        bias_N: Bias inside of the saved columns.
        is_scaled: The saved columns are the output. A column whose factor is 0 then has no gradient.
    """
    if bias_N is not None and totals_N is not None:
        products_N = products_N - bias_N.to(products_N.dtype) * totals_N
    if is_scaled:
        factor_N = factors_2N[0]
        products_N = torch.where(factor_N == 0.0, 0.0, products_N / factor_N)
    return products_N * factors_2N[1]


class _ScaleByMagnitude(torch.autograd.Function):
    """Save x and the factors, through autograd: a refresh before the backward is an error."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        magnitude_N: torch.Tensor,
        factors_2N: torch.Tensor,
        bias_N: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, factors_2N, bias_N)
        ctx.dtype = magnitude_N.dtype
        offset_N = None if bias_N is None else offset_of(bias_N, factors_2N[0])
        x_TN = x.reshape(-1, x.shape[-1])
        # Not a view, because models may write to the output in place (OLMo clips projections).
        y = x.new_empty(x.shape)
        scale_columns(x_TN, factors_2N[0], offset_N=offset_N, out=y.view(x_TN.shape))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, factors_2N, bias_N = ctx.saved_tensors
        needs_magnitude = ctx.needs_input_grad[1]
        # A mixer that transposes the output for a convolution brings a transposed gradient.
        d_y_TN = d_y.reshape(-1, d_y.shape[-1])
        d_x_TN, products_N, totals_N = scale_columns_backward(
            contiguous_rows(d_y_TN),
            x.reshape(-1, x.shape[-1]) if needs_magnitude else None,
            factors_2N[0],
            needs_totals=needs_magnitude and bias_N is not None,
        )
        d_magnitude_N = None
        if products_N is not None:
            found_N = magnitude_gradient(products_N, totals_N, factors_2N, bias_N=bias_N, is_scaled=False)
            d_magnitude_N = found_N.to(ctx.dtype)
        return d_x_TN.view(d_y.shape), d_magnitude_N, None, None


def _check_columns(name: str, vector_N: torch.Tensor | None, x_TN: torch.Tensor) -> None:
    """Raise unless a vector has a value per column, in the dtype of the arithmetic."""
    if vector_N is None:
        return
    check_layout(name, vector_N, (x_TN.shape[1],))
    dtype = wide_dtype(x_TN.dtype)
    if vector_N.dtype is not dtype or vector_N.device != x_TN.device:
        raise ShapeError(
            f"{name} must be {dtype} on {x_TN.device}, got {vector_N.dtype} on {vector_N.device}. Cast it before."
        )
