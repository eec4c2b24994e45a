"""The low-rank part of an adapted linear layer, computed from low-precision copies of the adapter weights.

Axes: T tokens of the pack, D input width, N output width, R rank of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.backends import GPU_TYPES, must_check


def lora_addmm(
    base: torch.Tensor,
    x: torch.Tensor,
    a_RD: torch.Tensor,
    b_NR: torch.Tensor,
    *,
    scale: float,
    copy_a_RD: torch.Tensor | None = None,
    copy_b_NR: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``base + scale * (x A^T) B^T``, computed from low-precision copies, with gradients for the masters.

    The GEMMs read the copies instead of the masters. Gradients are accumulated and returned in the dtype of the
    masters (fp32 products of low-precision factors), so nothing is rounded between the GEMM and the optimizer.

    Args:
        base: Output of the base layer. Shape (..., N).
        x: Input of the layer, after the adapter's dropout. Shape (..., D); dtype and device of base.
        a_RD: Master of A. Shape (R, D).
        b_NR: Master of B. Shape (N, R).
        scale: Factor on the low-rank part.
        copy_a_RD: A in the dtype of x; None if the master has this dtype.
        copy_b_NR: B in the dtype of x; None if the master has this dtype.
        is_checked: As in ``must_check``.

    Returns:
        Shape, dtype and device of base.

    Cost:
        2 R (D + N) FLOP per token forward, three times that backward; keeps x, x A^T and the copies; no host sync.

    Source:
        LoRA, arXiv 2106.09685; masters and copies as in mixed-precision training, arXiv 1710.03740.

    Example:
        >>> lora_addmm(torch.zeros(1, 2), torch.ones(1, 3), torch.ones(1, 3), torch.ones(2, 1), scale=2.0)
        tensor([[6., 6.]])
    """
    copy_a_RD = a_RD.detach() if copy_a_RD is None else copy_a_RD
    copy_b_NR = b_NR.detach() if copy_b_NR is None else copy_b_NR
    if must_check(is_checked):
        _check(base, x, masters=(a_RD, b_NR), copies=(copy_a_RD, copy_b_NR))
    return _LoraAddmm.apply(base, x, a_RD, b_NR, copy_a_RD, copy_b_NR, scale)


class _LoraAddmm(torch.autograd.Function):
    """Save x, x A^T and the copies.

    The copies are saved through autograd, so a refresh between forward and backward raises instead of giving a wrong
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        x: torch.Tensor,
        a_RD: torch.Tensor,
        b_NR: torch.Tensor,
        copy_a_RD: torch.Tensor,
        copy_b_NR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        low_TR = x_TD @ copy_a_RD.T
        ctx.save_for_backward(x, low_TR, copy_a_RD, copy_b_NR)
        ctx.scale, ctx.a_dtype, ctx.b_dtype = scale, a_RD.dtype, b_NR.dtype
        return torch.addmm(base.reshape(-1, base.shape[-1]), low_TR, copy_b_NR.T, alpha=scale).view(base.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, low_TR, copy_a_RD, copy_b_NR = ctx.saved_tensors
        needs_base, needs_x, needs_a, needs_b = ctx.needs_input_grad[:4]
        d_out_TN = d_out.reshape(-1, d_out.shape[-1])
        d_x = d_a_RD = None
        if needs_x or needs_a:
            d_low_TR = (d_out_TN @ copy_b_NR).mul_(ctx.scale)
            d_x = (d_low_TR @ copy_a_RD).view(x.shape) if needs_x else None
            d_a_RD = wide_product(d_low_TR.T, x.reshape(-1, x.shape[-1]), dtype=ctx.a_dtype) if needs_a else None
        d_b_NR = wide_product(d_out_TN.T, low_TR, dtype=ctx.b_dtype).mul_(ctx.scale) if needs_b else None
        return d_out if needs_base else None, d_x, d_a_RD, d_b_NR, None, None, None


def wide_product(left: torch.Tensor, right: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return left x right in dtype without rounding the sums to the narrow dtype of the factors.

    Args:
        left: Shape (M, K); any layout.
        right: Shape (K, N); dtype of left.
        dtype: Dtype of the result, at least as wide as the factors.

    Cost:
        2 M K N FLOP; on a CPU wide copies of the factors; no host sync.
    """
    if left.dtype is dtype:
        return left @ right
    if left.device.type in GPU_TYPES and dtype is torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.to(dtype) @ right.to(dtype)


def _check(
    base: torch.Tensor,
    x: torch.Tensor,
    *,
    masters: tuple[torch.Tensor, torch.Tensor],
    copies: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Raise on shapes and dtypes that would broadcast or cast silently."""
    a_RD, b_NR = masters
    if a_RD.ndim != 2 or b_NR.ndim != 2 or a_RD.shape[0] != b_NR.shape[1]:
        raise ShapeError(f"A has shape {tuple(a_RD.shape)}, B has {tuple(b_NR.shape)}; they must be (R, D) and (N, R).")
    if x.shape[-1] != a_RD.shape[1] or base.shape[-1] != b_NR.shape[0] or x.shape[:-1] != base.shape[:-1]:
        raise ShapeError(
            f"x {tuple(x.shape)} and base {tuple(base.shape)} do not fit A {tuple(a_RD.shape)} and B "
            f"{tuple(b_NR.shape)}."
        )
    for name, copy, master in zip(("A", "B"), copies, masters):
        if copy.shape != master.shape or copy.dtype is not x.dtype or base.dtype is not x.dtype:
            raise ShapeError(
                f"The compute copy of {name} is {copy.dtype} {tuple(copy.shape)}; x is {x.dtype}, base is "
                f"{base.dtype}, the master has "
                f"{tuple(master.shape)}."
            )
