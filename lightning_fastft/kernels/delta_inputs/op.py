"""Inputs of the gated delta rule from a fused projection of packed documents, and the gradient.

Axes: T tokens, C columns of the fused projection, G query and key heads, H value heads, W columns of a head, N channels
    of the convolution, K taps of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.core.checks import check_choice, check_layout, check_out
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check
from lightning_fastft.kernels.delta_inputs import reference
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm, DeltaInputs, DeltaParameters
from lightning_fastft.kernels.handover import Handover


def make_delta_inputs(
    rows_TC: torch.Tensor,
    parameters: DeltaParameters,
    position_T: torch.Tensor,
    *,
    form: DeltaForm,
    row_gradient: Handover,
) -> DeltaInputs:
    """Return the inputs of the gated delta rule; differentiable.

    Args:
        rows_TC: Output of the fused projection.
        parameters: Weights of the convolution and of the decays.
        position_T: Position of each token in its document.
        form: Layout of the inputs among the columns.
        row_gradient: Holds the gradient of rows_TC. ``gate_heads`` runs first in the backward and has written the
            columns of the gates.

    Cost:
        As delta_inputs_forward and delta_inputs_backward; saves rows_TC and the weights.
    """
    return DeltaInputs(*_DeltaInputs.apply(rows_TC, *parameters, position_T, form, row_gradient))


def delta_inputs_forward(
    rows_TC: torch.Tensor,
    parameters: DeltaParameters,
    position_T: torch.Tensor,
    *,
    form: DeltaForm,
    is_checked: bool = True,
) -> DeltaInputs:
    """Return queries, keys and values after the convolution, silu and the l2 norm, and decay and strength; no graph.

    A token reads only tokens of its own document. The arithmetic is fp32 (float64 for float64) and each value is
    rounded once.

    Args:
        rows_TC: Output of the fused projection. Shape (T, C), C = form.num_columns; bf16, fp16, fp32 or float64; last
            axis contiguous, any row stride.
        parameters: Weights, contiguous; bf16, fp16, fp32 or rows_TC's dtype.
        position_T: Position of each token in its document, from 0. Shape (T,), int64.
        form: Layout of the inputs among the columns.
        is_checked: As in ``must_check``.

    Returns:
        The inputs, each contiguous; q, k and v in the dtype of rows_TC.

    Cost:
        Reads the columns of heads once (taps from the cache) and writes them once, in 3 launches; no host sync.
        The reference makes fp32 copies.

    Source:
        Gated delta networks, arXiv 2412.06464; ``Qwen3_5GatedDeltaNet`` of transformers.

    Example:
        >>> form = DeltaForm(num_key_heads=1, num_heads=1, key_width=1, value_width=1)
        >>> parameters = DeltaParameters(torch.ones(3, 2), torch.zeros(1), torch.zeros(1))
        >>> rows = torch.zeros(2, 6)
        >>> delta_inputs_forward(rows, parameters, torch.tensor([0, 1]), form=form).beta_TH
        tensor([[0.5000],
                [0.5000]])
    """
    if must_check(is_checked):
        _check(rows_TC, parameters, position_T, form)
    with torch.no_grad():
        return choose_module(reference, rows_TC).delta_inputs_forward(rows_TC, parameters, position_T, form=form)


def delta_inputs_backward(
    gradients: DeltaInputs,
    rows_TC: torch.Tensor,
    parameters: DeltaParameters,
    position_T: torch.Tensor,
    *,
    form: DeltaForm,
    needs_weights: bool,
    out: torch.Tensor,
    is_checked: bool = True,
) -> DeltaParameters | None:
    """Write the gradient of the projection into ``out``, and return the gradients of the weights.

    Sums have a fixed order, so two calls are bit-equal.

    Args:
        gradients: Gradients of the outputs; shapes and layouts of the outputs, q, k and v in the dtype of rows_TC.
        rows_TC: As given to ``delta_inputs_forward``.
        parameters: As given to ``delta_inputs_forward``.
        position_T: As given to ``delta_inputs_forward``.
        form: As given to ``delta_inputs_forward``.
        needs_weights: Return the gradients of the weights.
        out: Gradient of the projection, a tensor like rows_TC. The columns of the output gates are not touched; all
            others are written.
        is_checked: As in ``must_check``.

    Returns:
        Gradients of the weights, fp32 (float64 for float64); None unless needs_weights.

    Raises:
        ShapeError: As in ``delta_inputs_forward``, or ``out`` shares memory with an input.

    Cost:
        Reads gradients and columns once (taps from the cache) and writes the gradient of the columns once, in 3
        launches; computes the convolution K times; no host sync. needs_weights: partial sums of 4 K N bytes per 32
        tokens.
    """
    if must_check(is_checked):
        _check(rows_TC, parameters, position_T, form)
        _check_gradients(gradients, rows_TC, form)
        check_choice("needs_weights", needs_weights, (False, True))
        check_out(out, like=rows_TC, may_be={}, must_not_meet=(rows_TC, *gradients))
    with torch.no_grad():
        return choose_module(reference, rows_TC).delta_inputs_backward(
            gradients, rows_TC, parameters, position_T, form=form, needs_weights=needs_weights, out=out
        )


class _DeltaInputs(torch.autograd.Function):
    """Save the fused projection, the weights and the positions."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_TC: torch.Tensor,
        conv_weight_NK: torch.Tensor,
        a_log_H: torch.Tensor,
        dt_bias_H: torch.Tensor,
        position_T: torch.Tensor,
        form: DeltaForm,
        row_gradient: Handover,
    ) -> DeltaInputs:
        ctx.form, ctx.row_gradient = form, row_gradient
        ctx.save_for_backward(rows_TC, conv_weight_NK, a_log_H, dt_bias_H, position_T)
        parameters = DeltaParameters(conv_weight_NK, a_log_H, dt_bias_H)
        return delta_inputs_forward(rows_TC, parameters, position_T, form=form, is_checked=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_TC, *weights, position_T = ctx.saved_tensors
        found = ctx.row_gradient.take()
        d_rows_TC = torch.zeros_like(rows_TC) if found is None else found[0]
        needs_rows, *needs = ctx.needs_input_grad[:4]
        gradients = delta_inputs_backward(
            DeltaInputs(*(d.contiguous() for d in d_outputs)),
            rows_TC,
            DeltaParameters(*weights),
            position_T,
            form=ctx.form,
            needs_weights=any(needs),
            out=d_rows_TC,
            is_checked=False,
        )
        d_weights = (
            None if gradients is None or not need else d.to(weight.dtype)
            for d, weight, need in zip(gradients or weights, weights, needs)
        )
        return d_rows_TC if needs_rows else None, *d_weights, None, None, None


def _check(rows_TC: torch.Tensor, parameters: DeltaParameters, position_T: torch.Tensor, form: DeltaForm) -> None:
    """Raise on arguments that the kernels would read wrongly."""
    if not isinstance(form, DeltaForm):
        raise OptionError(f"form must be a DeltaForm, got {type(form).__name__}.")
    check_layout("rows_TC", rows_TC, (None, None), dtypes=FLOATING, num_strided=1)
    if rows_TC.shape[1] != form.num_columns:
        raise ShapeError(f"rows_TC has {rows_TC.shape[1]} columns; the form has {form.num_columns}.")
    check_layout("position_T", position_T, rows_TC.shape[:1], dtypes=(torch.int64,), like=rows_TC)
    shapes = ((form.num_channels, None), (form.num_heads,), (form.num_heads,))
    for name, weight, shape in zip(DeltaParameters._fields, parameters, shapes):
        check_layout(name, weight, shape, dtypes=FLOATING, like=rows_TC)


def _check_gradients(gradients: DeltaInputs, rows_TC: torch.Tensor, form: DeltaForm) -> None:
    """Raise on gradients of other outputs."""
    queries, values = ((rows_TC.shape[0], columns.num_heads, columns.width) for columns in (form.queries, form.values))
    shapes = (queries, queries, values, values[:2], values[:2])
    for name, tensor, shape in zip(DeltaInputs._fields, gradients, shapes):
        check_layout(f"The gradient of {name}", tensor, shape, dtypes=FLOATING, like=rows_TC)
