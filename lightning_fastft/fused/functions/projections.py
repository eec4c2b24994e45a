"""Projections after a norm, and projections that are added to the residual stream.

Axes: T tokens, D model width, C columns of all projections of a call side by side, I inputs, R rank of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_fastft.activations.segments import Session
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.fused.column_scales import scale_output
from lightning_fastft.fused.functions.rows import Grads, Norm, norm_gradients
from lightning_fastft.fused.functions.scales import before_scale
from lightning_fastft.fused.linear_gradients import (
    gradients_for,
    parameter_gradients,
    quantised_gradient,
    rows_gradients,
)
from lightning_fastft.fused.linear_parts import TENSORS_PER_LAYER
from lightning_fastft.fused.linears import FusedLinear, product, quantised_norm, rows_for, unscaled_product
from lightning_fastft.kernels.backends import wide_dtype
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows
from lightning_fastft.kernels.launch import contiguous_rows
from lightning_fastft.kernels.rms_norm.op import rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm, shifted_weight

QKV_VALUE, OUT_VALUE = "self_attn.qkv", "self_attn.o_proj"


def norm_project(
    x_TD: torch.Tensor, norm: Norm | None, fused_linear: FusedLinear, *, session: Session | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the projection of the normed rows, shape (T, C), and the rows themselves for the residual stream.

    Without a norm the rows are projected as they are.

    Cost:
        That of rms_norm_forward and product; saves x_TD, the adapters' low-rank rows and low-precision factors, and
        trained weights.
    """
    x_TD = contiguous_rows(x_TD)
    weight_D, form = (None, None) if norm is None else norm
    out = _NormProject.apply(fused_linear, form, session, x_TD, weight_D, *fused_linear.tensors)
    return out if isinstance(out, tuple) else (out, x_TD)


def project_add(
    x_TI: torch.Tensor,
    residual_TD: torch.Tensor,
    fused_linear: FusedLinear,
    *,
    factor: float = 1.0,
    session: Session | None,
) -> torch.Tensor:
    """Return ``residual + factor * projection of x``.

    Cost:
        That of product, and with a factor a pass over the gradient of the output; saves x_TI if a parameter is trained,
        the adapter's low-rank rows and low-precision factors, and a trained weight.
    """
    return _ProjectAdd.apply(fused_linear, factor, session, x_TI, residual_TD, *fused_linear.tensors)


def project_norm_add(
    x_TI: torch.Tensor, residual_TD: torch.Tensor, norm: Norm, fused_linear: FusedLinear, *, session: Session | None
) -> torch.Tensor:
    """Return ``residual + norm(projection of x)``, for families that also norm the output of a block.

    Cost:
        That of product and rms_norm_forward, and one addition; saves the projection, x_TI if a parameter is trained,
        the adapter's low-rank rows and low-precision factors, and a trained weight.
    """
    return _ProjectNormAdd.apply(
        fused_linear, norm.form, session, x_TI, residual_TD, norm.weight_D, *fused_linear.tensors
    )


class _NormProject(torch.autograd.Function):
    """Norm and projection; saves x, low-rank rows, low-precision factors and trained weights.

    The backward recomputes the normed rows if weights are trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fused_linear: FusedLinear,
        form: NormForm | None,
        session: Session | None,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        *parameters: torch.Tensor | None,
    ) -> Any:
        ctx.set_materialize_grads(False)

        y_TC, *low = project_normed(session, QKV_VALUE, fused_linear, x_TD, weight_D, form=form)
        ctx.fused_linear, ctx.form, ctx.num_low = fused_linear, form, len(low)
        # The gradients of magnitudes read the output.
        saved_y_TC = y_TC if fused_linear.is_scaled else None
        ctx.save_for_backward(x_TD, weight_D, saved_y_TC, *low, *fused_linear.watched_tensors)
        return (y_TC, x_TD) if ctx.needs_input_grad[3] else y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TC: torch.Tensor | None, d_x_TD: torch.Tensor | None = None) -> Grads:
        x_TD, weight_D, y_TC, *others = ctx.saved_tensors
        needs_x, needs_weight, *needs = ctx.needs_input_grad[3:]
        if d_y_TC is None:
            return None, None, None, d_x_TD, None, *(None for _ in needs)
        low, fused_linear = others[: ctx.num_low], ctx.fused_linear.with_watched(others[ctx.num_low :])
        d_y_TC, d_magnitudes = before_scale(fused_linear, d_y_TC, y_TC, needs=needs)
        return None, None, None, *normed_gradients(
            fused_linear, low, d_y_TC, d_x_TD, x_TD, weight_D, form=ctx.form, needs=(needs_x, needs_weight, *needs),
            d_magnitudes=d_magnitudes,
        )  # fmt: skip


class _ProjectAdd(torch.autograd.Function):
    """Projection added to the residual stream.

    Saves x if a parameter is trained, the low-rank rows, the low-precision factors and a trained weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fused_linear: FusedLinear,
        factor: float,
        session: Session | None,
        x_TI: torch.Tensor,
        residual_TD: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        products_TD = None
        if fused_linear.is_scaled:
            # The gradient of the magnitude reads the products, which the sum does not give back.
            products_TD, *low = planned_value(session, OUT_VALUE, lambda: unscaled_product(fused_linear, x_TI))
            y_TD = scale_output(fused_linear.parts, products_TD, addend_TO=residual_TD, alpha=factor)
        else:
            y_TD, *low = planned_value(
                session, OUT_VALUE, lambda: product(fused_linear, x_TI, addend_TO=residual_TD, factor=factor)
            )
        ctx.fused_linear, ctx.factor, ctx.num_low = fused_linear, factor, len(low)
        saved_x = (x_TI,) if any(ctx.needs_input_grad[5:]) else ()
        ctx.save_for_backward(products_TD, *low, *fused_linear.watched_tensors, *saved_x)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> Grads:
        needs_x, needs_residual, *needs = ctx.needs_input_grad[3:]
        products_TD, *others = ctx.saved_tensors
        x_TI = others.pop() if any(needs) else None
        low, fused_linear = others[: ctx.num_low], ctx.fused_linear.with_watched(others[ctx.num_low :])
        d_y_TD = contiguous_rows(d_y_TD)
        d_out_TD = times_factor(d_y_TD, ctx.factor, reader=fused_linear)
        d_out_TD, d_magnitudes = before_scale(
            fused_linear, d_out_TD, products_TD, needs=needs, is_scaled=False, in_place=ctx.factor != 1.0
        )
        d_x_TI, *gradients = _linear_gradients(
            fused_linear, low, d_out_TD, x_TI, needs_x=needs_x, needs=needs, d_magnitudes=d_magnitudes
        )
        return None, None, None, d_x_TI, d_y_TD if needs_residual else None, *gradients


class _ProjectNormAdd(torch.autograd.Function):
    """Normed projection added to the residual stream.

    Saves the projection, x if a parameter is trained, low-rank rows, low-precision factors and a trained weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fused_linear: FusedLinear,
        form: NormForm,
        session: Session | None,
        x_TI: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        out_TD, *low = planned_value(session, OUT_VALUE, lambda: product(fused_linear, x_TI))
        ctx.fused_linear, ctx.form, ctx.num_low = fused_linear, form, len(low)
        saved_x = (x_TI,) if any(ctx.needs_input_grad[6:]) else ()
        ctx.save_for_backward(out_TD, weight_D, *low, *fused_linear.watched_tensors, *saved_x)
        # Round before the addition, as the model does.
        return rms_norm_forward(out_TD, weight_D, form=form, is_checked=False).add_(residual_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> Grads:
        out_TD, weight_D, *others = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, *needs = ctx.needs_input_grad[3:]
        x_TI = others.pop() if any(needs) else None
        low, fused_linear = others[: ctx.num_low], ctx.fused_linear.with_watched(others[ctx.num_low :])
        d_out_TD, d_weight_D = norm_gradients(
            d_y_TD,
            None,
            out_TD,
            weight_D,
            form=ctx.form,
            needs=(needs_x or any(needs), needs_weight),
            reader=fused_linear,
        )
        d_x_TI: torch.Tensor | None = None
        gradients: list[torch.Tensor | None] = [None] * len(needs)
        if d_out_TD is not None:
            d_out_TD, d_magnitudes = before_scale(fused_linear, d_out_TD, out_TD, needs=needs, in_place=True)
            d_x_TI, *gradients = _linear_gradients(
                fused_linear, low, d_out_TD, x_TI, needs_x=needs_x, needs=needs, d_magnitudes=d_magnitudes
            )
        return None, None, None, d_x_TI, d_y_TD if needs_residual else None, d_weight_D, *gradients


def project_normed(
    session: Session | None,
    name: str,
    fused_linear: FusedLinear,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    *,
    form: NormForm | None,
) -> tuple[torch.Tensor, ...]:
    """Return the projection of normed rows and the low-rank rows of adapters, as a value that a plan can hold.

    Without a norm, the rows themselves are projected.
    """

    def compute() -> tuple[torch.Tensor, ...]:
        if weight_D is None or form is None:
            return product(fused_linear, x_TD)
        quantised = quantised_norm(fused_linear, x_TD, weight_D, form=form)
        if quantised is not None:
            return product(fused_linear, quantised)
        rows = rows_for(fused_linear, x_TD)
        return product(fused_linear, rms_norm_forward(x_TD, weight_D, form=form, out=rows, is_checked=False))

    return planned_value(session, name, compute)


def normed_gradients(
    fused_linear: FusedLinear,
    low: Sequence[torch.Tensor],
    d_y_TC: torch.Tensor | Fp8Rows,
    d_x_TD: torch.Tensor | None,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    *,
    form: NormForm | None,
    needs: Sequence[bool],
    d_magnitudes: Sequence[torch.Tensor | None],
) -> Grads:
    """Return the gradients of project_normed: of the rows, of the norm's weight, and of FusedLinear.tensors.

    The gradient of the rows includes that of the residual stream. d_y_TC and d_magnitudes are results of before_scale.
    """
    needs_x, needs_weight, *needs_tensors = needs
    if weight_D is None or form is None:
        found_TD, *gradients = _linear_gradients(
            fused_linear, low, d_y_TC, x_TD, needs_x=needs_x, needs=needs_tensors, d_magnitudes=d_magnitudes
        )
        if found_TD is not None and d_x_TD is not None:
            found_TD = found_TD + d_x_TD
        return found_TD, None, *gradients
    d = quantised_gradient(fused_linear, d_y_TC, needs=needs_tensors)
    d_h_TD, d_low_TR = rows_gradients(fused_linear, d_y_TC, needs_x=needs_x or needs_weight, d=d)
    rstd_T = None
    if d_h_TD is not None and _adapters_read_raw_rows(x_TD, needs_tensors):
        rstd_T = x_TD.new_empty(x_TD.shape[0], dtype=wide_dtype(x_TD.dtype))
    # A layer of as many ranks reads this gradient next.
    of_norm = norm_gradients(
        d_h_TD, d_x_TD, x_TD, weight_D, form=form, needs=(needs_x, needs_weight), reader=fused_linear, rstd_out=rstd_T
    )
    del d_h_TD, d_x_TD
    gradients = [None] * len(needs_tensors)
    low_TR = low[0] if low else None
    if rstd_T is not None and d_low_TR is not None:
        # A normed row is the raw row times one number, its columns times the weight, so it need not be written again.
        d_low_TR.mul_(rstd_T.unsqueeze(1))
        # Products of gradients and weights are computed in the wider dtype of both.
        factor_D = shifted_weight(weight_D, rstd_T.dtype, form) if form.weight_offset else weight_D
        gradients = parameter_gradients(
            fused_linear, x_TD, d_y_TC, low_TR, d_low_TR, needs=needs_tensors, factor_I=factor_D,
            d_magnitudes=d_magnitudes,
        )  # fmt: skip
    elif any(needs_tensors):
        quantised = quantised_norm(fused_linear, x_TD, weight_D, form=form)
        h = rms_norm_forward(x_TD, weight_D, form=form, is_checked=False) if quantised is None else quantised
        gradients = parameter_gradients(
            fused_linear, h, d_y_TC, low_TR, d_low_TR, needs=needs_tensors, d=d, d_magnitudes=d_magnitudes
        )
    return (*of_norm, *gradients)


def _linear_gradients(
    fused_linear: FusedLinear,
    low: Sequence[torch.Tensor],
    d_TO: torch.Tensor | Fp8Rows,
    x_TI: torch.Tensor | None,
    *,
    needs_x: bool,
    needs: Sequence[bool],
    d_magnitudes: Sequence[torch.Tensor | None],
) -> Grads:
    """Return the gradients of rows that are projected as they are, and of FusedLinear.tensors.

    x_TI may be None if no parameter is trained. d_TO and d_magnitudes are results of before_scale.
    """
    d = quantised_gradient(fused_linear, d_TO, needs=needs)
    d_x_TI, d_low_TR = rows_gradients(fused_linear, d_TO, needs_x=needs_x, d=d)
    if x_TI is None or not any(needs):
        return d_x_TI, *[None] * len(needs)
    return d_x_TI, *parameter_gradients(
        fused_linear, x_TI, d_TO, low[0] if low else None, d_low_TR, needs=needs, d=d, d_magnitudes=d_magnitudes
    )


def _adapters_read_raw_rows(x_TD: torch.Tensor, needs: Sequence[bool]) -> bool:
    """Return whether only adapters are trained, in a dtype whose range holds 1/rms of a row times a gradient."""
    return any(needs[2::TENSORS_PER_LAYER]) and not any(needs[0::TENSORS_PER_LAYER]) and x_TD.dtype is not torch.float16


def planned_value(
    session: Session | None, name: str, compute: Callable[[], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """Return what ``compute`` returns, kept or computed by the plan of the open segment if there is one."""
    return compute() if session is None else session.value(name, compute)


def times_factor(d_y_TD: torch.Tensor, factor: float, *, reader: FusedLinear) -> torch.Tensor:
    """Return a gradient times the residual multiplier, in memory that ``reader`` reads without a copy."""
    return d_y_TD if factor == 1.0 else torch.mul(d_y_TD, factor, out=gradients_for(reader, d_y_TD))
