"""Heads times an activation of their gates, with an optional norm before, and the gradient, each in one pass.

Axes: T tokens, C columns of the fused projection that holds the gates, H heads, W columns of a head, I = H W.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.core.checks import check_choice, check_layout, check_out
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check, no_graph
from lightning_fastft.kernels.handover import Handover
from lightning_fastft.kernels.head_gate import reference
from lightning_fastft.kernels.head_gate.reference import ACTIVATIONS, HeadGateForm
from lightning_fastft.kernels.launch import contiguous_rows


def gate_heads(
    x_THW: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_W: torch.Tensor | None = None,
    *,
    form: HeadGateForm,
    row_gradient: Handover,
) -> torch.Tensor:
    """Return ``x * a(gate)``, or ``norm(x) * a(gate)``, for each head, concatenated; differentiable.

    Args:
        x_THW: Heads; the heads of a token contiguous.
        rows_TC: Fused projection that holds the gates.
        weight_W: Weight of the norm; only with form.has_norm.
        form: Layout of the gates, activation and norm.
        row_gradient: Receives the gradient of rows_TC with the gate columns written. The Function that reads the other
            columns of rows_TC must take it; autograd gets no gradient of rows_TC from here.

    Returns:
        Shape (T, I), contiguous, dtype of x_THW.

    Cost:
        Reads heads and gates and writes the product once; the backward twice that. Saves heads and rows_TC.

    Example:
        >>> from lightning_fastft.kernels.head_columns import HeadColumns
        >>> form = HeadGateForm(HeadColumns(begin=0, width=1, num_heads=1, group_size=1, group_step=1))
        >>> gate_heads(torch.ones(1, 1, 1), torch.zeros(1, 1), form=form, row_gradient=Handover())
        tensor([[0.5000]])
    """
    return _GateHeads.apply(x_THW, rows_TC, weight_W, form, row_gradient)


def head_gate_forward(
    x_THW: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_W: torch.Tensor | None = None,
    *,
    form: HeadGateForm,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``x * a(gate)``, or ``norm(x) * a(gate)``, for each head, concatenated; no graph.

    The arithmetic is fp32 (float64 for float64) and the result is rounded once. Heads are independent, so NaN stays in
    its head.

    Args:
        x_THW: Heads. Shape (T, H, W); bf16, fp16, fp32 or float64; the heads of a token contiguous.
        rows_TC: Fused projection that holds the gates. Shape (T, C), dtype and device of x_THW; last axis contiguous,
            any row stride.
        weight_W: Weight of the norm. Shape (W,), contiguous; bf16, fp16, fp32 or x_THW's dtype; only with
            form.has_norm.
        form: Layout of the gates, activation and norm.
        is_checked: As in ``must_check``.

    Returns:
        Shape (T, I), contiguous, dtype and device of x_THW.

    Cost:
        Reads heads and gates and writes the product once; no host sync. The reference makes fp32 copies.

    Source:
        Gated attention, arXiv 2505.06708; gated norm of the gated delta rule, arXiv 2412.06464.

    Example:
        >>> from lightning_fastft.kernels.head_columns import HeadColumns
        >>> form = HeadGateForm(HeadColumns(begin=1, width=1, num_heads=1, group_size=1, group_step=1))
        >>> head_gate_forward(torch.ones(1, 1, 1), torch.tensor([[7.0, 0.0]]), form=form)
        tensor([[0.5000]])
    """
    if must_check(is_checked):
        _check(x_THW, rows_TC, weight_W, form)
    with no_graph():
        return choose_module(reference, x_THW).head_gate_forward(x_THW, rows_TC, weight_W, form=form)


def head_gate_backward(
    d_y_TI: torch.Tensor,
    x_THW: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_W: torch.Tensor | None = None,
    *,
    form: HeadGateForm,
    needs_weight: bool,
    out: torch.Tensor,
    is_checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the heads and of the weight, and write the gradient of the gates to ``out``.

    Sums have a fixed order, so two calls are bit-equal.

    Args:
        d_y_TI: Gradient of the forward's output. Shape (T, I); dtype and device of x_THW; last axis contiguous, any row
            stride.
        x_THW: As given to ``head_gate_forward``.
        rows_TC: As given to ``head_gate_forward``.
        weight_W: As given to ``head_gate_forward``.
        form: As given to ``head_gate_forward``.
        needs_weight: Return the gradient of the weight too; only with form.has_norm.
        out: Gradient of the fused projection, a tensor like rows_TC; the gate columns are written, others are not
            touched.
        is_checked: As in ``must_check``.

    Returns:
        d_x_THW: Shape (T, H, W), contiguous, dtype of x_THW.
        d_weight_W: Shape (W,), fp32 (float64 for float64); None unless needs_weight.

    Raises:
        ShapeError: As in ``head_gate_forward``, or ``out`` shares memory with an input.

    Cost:
        Reads d_y_TI, heads and gates, and writes the gradients of both once; no host sync. needs_weight: at most 4 KiB
        x W of partial sums, read once more. The reference makes fp32 copies.

    Example:
        >>> from lightning_fastft.kernels.head_columns import HeadColumns
        >>> form = HeadGateForm(HeadColumns(begin=0, width=1, num_heads=1, group_size=1, group_step=1))
        >>> one, gate, d_rows = torch.ones(1, 1), torch.zeros(1, 1), torch.empty(1, 1)
        >>> head_gate_backward(one, one[None], gate, form=form, needs_weight=False, out=d_rows)[0]
        tensor([[[0.5000]]])
        >>> d_rows
        tensor([[0.2500]])
    """
    if must_check(is_checked):
        _check(x_THW, rows_TC, weight_W, form)
        check_layout("d_y_TI", d_y_TI, x_THW.flatten(1).shape, like=x_THW, num_strided=1)
        check_out(out, like=rows_TC, may_be={}, must_not_meet=(d_y_TI, x_THW, rows_TC, weight_W))
        if check_choice("needs_weight", needs_weight, (False, True)) and not form.has_norm:
            raise OptionError("needs_weight is True, but the form has no norm. Pass needs_weight=False.")
    with no_graph():
        return choose_module(reference, x_THW).head_gate_backward(
            d_y_TI, x_THW, rows_TC, weight_W, form=form, needs_weight=needs_weight, out=out
        )


class _GateHeads(torch.autograd.Function):
    """Save heads, the fused projection and the norm's weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x_THW: torch.Tensor,
        rows_TC: torch.Tensor,
        weight_W: torch.Tensor | None,
        form: HeadGateForm,
        row_gradient: Handover,
    ) -> torch.Tensor:
        ctx.form, ctx.row_gradient = form, row_gradient
        ctx.save_for_backward(x_THW, rows_TC, weight_W)
        return head_gate_forward(x_THW, rows_TC, weight_W, form=form, is_checked=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TI: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_THW, rows_TC, weight_W = ctx.saved_tensors
        d_rows_TC = torch.empty(rows_TC.shape, dtype=rows_TC.dtype, device=rows_TC.device)
        d_y_TI = contiguous_rows(d_y_TI)
        d_x_THW, d_weight_W = head_gate_backward(
            d_y_TI,
            x_THW,
            rows_TC,
            weight_W,
            form=ctx.form,
            needs_weight=ctx.needs_input_grad[2],
            out=d_rows_TC,
            is_checked=False,
        )
        ctx.row_gradient.put(d_rows_TC)
        if weight_W is not None and d_weight_W is not None:
            d_weight_W = d_weight_W.to(weight_W.dtype)
        return d_x_THW, None, d_weight_W, None, None


def _check(x_THW: torch.Tensor, rows_TC: torch.Tensor, weight_W: torch.Tensor | None, form: HeadGateForm) -> None:
    """Raise on arguments that the kernels would read wrongly."""
    check_layout("rows_TC", rows_TC, (None, None), dtypes=FLOATING, num_strided=1)
    check_choice("form.activation", form.activation, ACTIVATIONS)
    columns = form.columns
    check_layout("x_THW", x_THW, (rows_TC.shape[0], columns.num_heads, columns.width), like=rows_TC, num_strided=1)
    if columns.end > rows_TC.shape[1]:
        raise ShapeError(f"The gates end at column {columns.end}; rows_TC has {rows_TC.shape[1]}.")
    if form.has_norm is (weight_W is None):
        raise OptionError("weight_W must be given with form.has_norm, and only then.")
    if weight_W is not None:
        check_layout("weight_W", weight_W, (columns.width,), dtypes=FLOATING, like=rows_TC)
