"""A low-rank product added to a wide matrix, and optionally a residual stream, in one pass over memory.

Axes: T rows, N columns, R ranks.
The function is not differentiable; the autograd Functions of layers call it.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_layout, check_out
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check, no_graph, plain_numbers
from lightning_fastft.kernels.low_rank_add import reference


def add_low_rank(
    base_TN: torch.Tensor,
    low_TR: torch.Tensor,
    factor_RN: torch.Tensor,
    *,
    residual_TN: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``base + residual + low @ factor``.

    Products and sums are fp32 (float64 for float64), and the result is rounded once. Sums have a fixed order, so two
    calls are bit-equal. Rows are independent, so NaN stays in its row.

    Args:
        base_TN: Matrix that the product is added to. Shape (T, N); bf16, fp16, fp32 or float64; last axis contiguous,
            any row stride.
        low_TR: Low-rank rows, already scaled. Shape (T, R), any R; dtype and device of base_TN; last axis contiguous,
            any row stride.
        factor_RN: Matrix that multiplies low_TR. Shape (R, N); dtype and device of base_TN; any strides: a transposed
            view is read without a copy.
        residual_TN: A second summand, like base_TN, any row stride. None for 0.
        out: Output tensor for the sum: a tensor like base_TN in separate memory, any row stride, or base_TN
            or residual_TN itself, which is overwritten. None for new memory.
        is_checked: As in ``must_check``.

    Returns:
        sum_TN: Shape (T, N), dtype and device of base_TN, no graph; contiguous, or ``out``.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong, or ``out`` overlaps an input without being base_TN or
            residual_TN.

    Cost:
        Reads base_TN (and residual_TN) and writes the sum once, 2 T R N FLOP; low_TR and factor_RN come from the cache
        if they fit. No host sync. The reference makes fp32 copies.

    Source:
        LoRA, arXiv 2106.09685.

    Example:
        >>> base, low, factor = torch.ones(2, 3), torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 10.0, 100.0]])
        >>> add_low_rank(base, low, factor)
        tensor([[  2.,  11., 101.],
                [  3.,  21., 201.]])
    """
    if must_check(is_checked):
        check_layout("base_TN", base_TN, (None, None), dtypes=FLOATING, num_strided=1)
        check_layout("low_TR", low_TR, (base_TN.shape[0], None), like=base_TN, num_strided=1)
        check_layout("factor_RN", factor_RN, (low_TR.shape[1], base_TN.shape[1]), like=base_TN, num_strided=2)
        if residual_TN is not None:
            check_layout("residual_TN", residual_TN, base_TN.shape, like=base_TN, num_strided=1)
        if out is not None:
            may_be = {"base_TN": base_TN, "residual_TN": residual_TN}
            check_out(out, like=base_TN, may_be=may_be, must_not_meet=(low_TR, factor_RN))
    module = choose_module(reference, base_TN)
    # Autocast would round the factors of the reference's products.
    with plain_numbers(base_TN.device.type) if module is reference else no_graph():
        return module.add_low_rank(base_TN, low_TR, factor_RN, residual_TN=residual_TN, out=out)
