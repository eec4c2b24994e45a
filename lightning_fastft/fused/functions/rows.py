"""Norms of rows, and their gradients with that of the residual stream.

The residual stream passes through the Function that norms it, so that one kernel adds both of its gradients.

Axes: T tokens, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.fused.linear_gradients import gradients_for
from lightning_fastft.fused.linears import FusedLinear
from lightning_fastft.kernels.launch import contiguous_rows
from lightning_fastft.kernels.rms_norm.op import rms_norm_backward, rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm

Grads = tuple[torch.Tensor | None, ...]


class Norm(NamedTuple):
    """An RMSNorm: its weight, shape (D,), and its form."""

    weight_D: torch.Tensor
    form: NormForm


def norm_rows(x_TD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed rows, and the rows themselves for the residual stream.

    Cost:
        That of rms_norm_forward; saves x_TD.
    """
    x_TD = contiguous_rows(x_TD)
    out = _NormRows.apply(x_TD, norm.weight_D, norm.form)
    return out if isinstance(out, tuple) else (out, x_TD)


class _NormRows(torch.autograd.Function):
    """Norm of rows; saves x."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, form: NormForm) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, weight_D)
        ctx.form = form
        y_TD = rms_norm_forward(x_TD, weight_D, form=form, is_checked=False)
        return (y_TD, x_TD) if ctx.needs_input_grad[0] else y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor | None, d_x_TD: torch.Tensor | None = None) -> Grads:
        x_TD, weight_D = ctx.saved_tensors
        return (*norm_gradients(d_y_TD, d_x_TD, x_TD, weight_D, form=ctx.form, needs=ctx.needs_input_grad[:2]), None)


def norm_gradients(
    d_y_TD: torch.Tensor | None,
    d_x_TD: torch.Tensor | None,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    form: NormForm,
    needs: tuple[bool, bool],
    reader: FusedLinear | None = None,
    rstd_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a norm's rows, with that of the residual stream added, and of its weight.

    The first is in memory that layers like ``reader`` read without a copy; rstd_out as in rms_norm_backward.
    """
    needs_x, needs_weight = needs
    if d_y_TD is None or not (needs_x or needs_weight):
        return d_x_TD if needs_x else None, None
    d_x_TD, d_weight_D = rms_norm_backward(
        contiguous_rows(d_y_TD),
        x_TD,
        weight_D,
        form=form,
        addend_TD=None if d_x_TD is None else contiguous_rows(d_x_TD),
        needs_weight=needs_weight,
        out=None if reader is None else gradients_for(reader, x_TD),
        rstd_out=rstd_out,
        is_checked=False,
    )
    return d_x_TD if needs_x else None, None if d_weight_D is None else d_weight_D.to(weight_D.dtype)
