"""Feed-forward blocks with the norms around them.

Axes: T tokens, D model width, P columns of gate and up, F width of the feed-forward block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_fastft.activations.segments import Session
from lightning_fastft.activations.values import unneeded
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.fused.column_scales import scale_output
from lightning_fastft.fused.functions.projections import (
    normed_gradients,
    planned_value,
    project_normed,
    times_factor,
)
from lightning_fastft.fused.functions.rows import Grads, Norm, norm_gradients
from lightning_fastft.fused.functions.scales import before_scale
from lightning_fastft.fused.linear_gradients import parameter_gradients, quantised_gradient, rows_gradients_apart
from lightning_fastft.fused.linears import (
    FusedLinear,
    low_rank_rows,
    product,
    quantised_gate,
    quantised_gate_gradients,
    unscaled_product,
)
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import GateForm, LowRankRows
from lightning_fastft.kernels.fp8_linear.reference import Fp8Rows
from lightning_fastft.kernels.launch import contiguous_rows
from lightning_fastft.kernels.rms_norm.op import rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm

GATE_UP_VALUE, DOWN_VALUE = "mlp.gate_up", "mlp.down"

# Point at which a norm after the block, or the scale of DoRA, is the last to save a tensor; its input is a value too.
POST_NORM_POINT = "mlp.post_norm"


def norm_feed_forward(
    x_TD: torch.Tensor,
    norm: Norm,
    gate_up: FusedLinear,
    down: FusedLinear,
    *,
    form: GateForm,
    factor: float,
    session: Session | None,
) -> torch.Tensor:
    """Return ``x + factor * down(gate(gate_up(norm(x))))``.

    Cost:
        That of the products, and with a factor a pass over the gradient of the output; saves x_TD, gate and up, the
        adapters' low-rank rows and low-precision factors, and trained weights.
    """
    call = _FeedForwardCall(gate_up, down, norm.form, form, session, factor)

    def run(call: _FeedForwardCall) -> torch.Tensor:
        return _NormFeedForward.apply(call, x_TD, norm.weight_D, *gate_up.tensors, *down.tensors)

    return _run_block(run, call, point=POST_NORM_POINT if down.is_scaled else DOWN_VALUE)


def feed_forward_between_norms(
    x_TD: torch.Tensor,
    norm: Norm | None,
    gate_up: FusedLinear,
    down: FusedLinear,
    post_norm: Norm,
    *,
    form: GateForm,
    session: Session | None,
) -> torch.Tensor:
    """Return ``x + post_norm(down(gate(gate_up(norm(x)))))``.

    Cost:
        That of the products, two norms and one addition; saves x_TD, gate and up, the output of down, the adapters'
        low-rank rows and low-precision factors, and trained weights.
    """
    weight_D, norm_form = (None, None) if norm is None else norm
    call = _FeedForwardCall(gate_up, down, norm_form, form, session)

    def run(call: _FeedForwardCall) -> torch.Tensor:
        return _FeedForwardBetweenNorms.apply(
            call, post_norm.form, x_TD, weight_D, post_norm.weight_D, *gate_up.tensors, *down.tensors
        )  # fmt: skip

    return _run_block(run, call, point=POST_NORM_POINT)


class _FeedForwardCall(NamedTuple):
    """Arguments of a block that have no gradient."""

    gate_up: FusedLinear
    down: FusedLinear
    norm_form: NormForm | None
    gate_form: GateForm
    session: Session | None
    factor: float = 1.0


class _NormFeedForward(torch.autograd.Function):
    """Norm and feed-forward block; saves x, gate and up, low-rank rows, low-precision factors and trained weights.

    The backward recomputes the activation, and the norm if weights are trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _FeedForwardCall,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        session = call.session
        gate_up_TP, *low = project_normed(session, GATE_UP_VALUE, call.gate_up, x_TD, weight_D, form=call.norm_form)
        # Without the session, which belongs to a forward.
        ctx.call, ctx.num_low = call if session is None else call._replace(session=None), len(low)
        watched = (*call.gate_up.watched_tensors, *call.down.watched_tensors)
        if call.down.is_scaled:
            products_TD, *low_down = planned_value(
                session, DOWN_VALUE, lambda: unscaled_product(call.down, _gated(call, gate_up_TP))
            )
            # Every run of a layer must save the same number of tensors.
            low_down = low_down if session is None else []
            ctx.save_for_backward(x_TD, weight_D, gate_up_TP, products_TD, *low, *watched, *low_down)
            if session is not None and session.is_last(POST_NORM_POINT):
                return unneeded(x_TD, x_TD.shape[-1])
            return scale_output(call.down.parts, products_TD, addend_TO=x_TD, alpha=call.factor)
        saved = (x_TD, weight_D, gate_up_TP, None, *low, *watched)
        if session is not None:
            # Every run of a layer must save the same number of tensors, even one that ends here.
            ctx.save_for_backward(*saved)
            if session.is_last(DOWN_VALUE):
                return unneeded(x_TD, x_TD.shape[-1])
        y_TD, *low_down = product(call.down, _gated(call, gate_up_TP), addend_TO=x_TD, factor=call.factor)
        if session is None:
            ctx.save_for_backward(*saved, *low_down)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> Grads:
        x_TD, weight_D, gate_up_TP, products_TD, *others = ctx.saved_tensors
        d_y_TD = contiguous_rows(d_y_TD)
        d_out_TD = times_factor(d_y_TD, ctx.call.factor, reader=ctx.call.down)
        call, low = _restore(ctx, others)
        return None, *_block_gradients(
            call, low, d_out_TD, products_TD, d_y_TD, x_TD, weight_D, gate_up_TP,
            needs=ctx.needs_input_grad[1:], is_scaled=False,
        )  # fmt: skip


class _FeedForwardBetweenNorms(torch.autograd.Function):
    """Feed-forward block between two norms.

    Saves x, gate and up, the input of the norm after the block, low-rank rows, low-precision factors and trained
    weights; the backward recomputes the rest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _FeedForwardCall,
        post_form: NormForm,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor | None,
        post_weight_D: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        session = call.session
        gate_up_TP, *low = project_normed(session, GATE_UP_VALUE, call.gate_up, x_TD, weight_D, form=call.norm_form)
        (out_TD,) = planned_value(
            session,
            DOWN_VALUE,
            lambda: product(call.down, _gated(call, gate_up_TP))[:1],
        )
        # Without the session, which belongs to a forward.
        ctx.call, ctx.post_form, ctx.num_low = call._replace(session=None), post_form, len(low)
        watched = (*call.gate_up.watched_tensors, *call.down.watched_tensors)
        ctx.save_for_backward(x_TD, weight_D, post_weight_D, gate_up_TP, out_TD, *low, *watched)
        if session is not None and session.is_last(POST_NORM_POINT):
            return unneeded(x_TD, x_TD.shape[-1])
        return rms_norm_forward(out_TD, post_weight_D, form=post_form, is_checked=False).add_(x_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> Grads:
        x_TD, weight_D, post_weight_D, gate_up_TP, out_TD, *others = ctx.saved_tensors
        needs_x, needs_weight, needs_post_weight, *needs = ctx.needs_input_grad[2:]
        is_needed = needs_x or needs_weight or any(needs)
        d_out_TD, d_post_weight_D = norm_gradients(
            d_y_TD,
            None,
            out_TD,
            post_weight_D,
            form=ctx.post_form,
            needs=(is_needed, needs_post_weight),
            reader=ctx.call.down,
        )
        if d_out_TD is None:
            return None, None, None, None, d_post_weight_D, *(None for _ in needs)
        call, low = _restore(ctx, others)
        d_x_TD, d_weight_D, *gradients = _block_gradients(
            call, low, d_out_TD, out_TD, d_y_TD, x_TD, weight_D, gate_up_TP,
            needs=(needs_x, needs_weight, *needs), is_scaled=True,
        )  # fmt: skip
        return None, None, d_x_TD, d_weight_D, d_post_weight_D, *gradients


def _gated(call: _FeedForwardCall, gate_up_TP: torch.Tensor) -> torch.Tensor | Fp8Rows:
    """Return the rows that down reads."""
    act = quantised_gate(call.down, gate_up_TP, form=call.gate_form)
    return gate_forward(gate_up_TP, form=call.gate_form, is_checked=False) if act is None else act


def _run_block(run: Callable[[_FeedForwardCall], torch.Tensor], call: _FeedForwardCall, *, point: str) -> torch.Tensor:
    """Run the last Function of a layer, whose output a recompute may not need."""
    if call.session is None:
        return run(call)
    return call.session.run_last(point, lambda: run(call), full=lambda: run(call._replace(session=None)))


def _restore(ctx: Any, others: Sequence[torch.Tensor]) -> tuple[_FeedForwardCall, tuple[Sequence[torch.Tensor], ...]]:
    """Return the call with its saved tensors, and the low-rank rows of gate_up and of down; the latter may be absent.

    ``others`` holds the low-rank rows of gate_up, the watched tensors of both projections, and those of down.
    """
    call, num_low = ctx.call, ctx.num_low
    num_first = num_low + len(call.gate_up.watched_tensors)
    num_watched = num_first + len(call.down.watched_tensors)
    gate_up, down = (
        call.gate_up.with_watched(others[num_low:num_first]),
        call.down.with_watched(others[num_first:num_watched]),
    )
    if gate_up is not call.gate_up or down is not call.down:
        call = call._replace(gate_up=gate_up, down=down)
    return call, (others[:num_low], others[num_watched:])


def _block_gradients(
    call: _FeedForwardCall,
    low: tuple[Sequence[torch.Tensor], ...],
    d_out_TD: torch.Tensor,
    out_TD: torch.Tensor | None,
    d_x_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    gate_up_TP: torch.Tensor,
    *,
    needs: Sequence[bool],
    is_scaled: bool,
) -> Grads:
    """Return the gradients of x, the norm's weight, and the tensors of gate_up and down from that of down's output.

    out_TD is the output of down, or without is_scaled its products before the scale of DoRA, None without DoRA. d_x_TD
    is the gradient of the residual stream. d_out_TD is overwritten if it is separate memory.
    """
    gate_up, down, (low_up, low_down) = call.gate_up, call.down, low
    num_needs = 2 + len(gate_up.tensors)
    in_place = is_scaled or call.factor != 1.0
    d_out_TD, d_magnitudes = before_scale(
        down, d_out_TD, out_TD, needs=needs[num_needs:], is_scaled=is_scaled, in_place=in_place
    )
    d = quantised_gradient(down, d_out_TD, needs=needs[num_needs:])
    d_act_TF, d_low_TR, a_RF = rows_gradients_apart(down, d_out_TD, d=d)
    d_gate_up: torch.Tensor | Fp8Rows
    act: torch.Tensor | Fp8Rows | None
    quantised = quantised_gate_gradients(gate_up, down, d_act_TF, gate_up_TP, form=call.gate_form)
    if quantised is not None:
        d_gate_up, act = quantised
    else:
        # The gate's backward reads these rows next, so it adds the gradient from the adapter.
        addend = None if d_low_TR is None or a_RF is None else LowRankRows(d_low_TR, contiguous_rows(a_RF))
        d_gate_up, act, _ = gate_backward(
            d_act_TF, gate_up_TP, form=call.gate_form, addend=addend, need_act=any(needs[num_needs:]), is_checked=False
        )
        del addend
    del d_act_TF, quantised
    d_down: list[torch.Tensor | None] = [None] * len(down.tensors)
    if act is not None:
        # They were saved if the layer ran without a session; else they cost one thin GEMM.
        low_TR = low_down[0] if low_down else low_rank_rows(down, act)
        d_down = parameter_gradients(
            down, act, d_out_TD, low_TR, d_low_TR, needs=needs[num_needs:], d=d, d_magnitudes=d_magnitudes
        )
    del act, d_out_TD, d
    d_gate_up, d_magnitudes = before_scale(gate_up, d_gate_up, gate_up_TP, needs=needs[2:num_needs], in_place=True)
    return (
        *normed_gradients(
            gate_up, low_up, d_gate_up, d_x_TD, x_TD, weight_D, form=call.norm_form, needs=needs[:num_needs],
            d_magnitudes=d_magnitudes,
        ),
        *d_down,
    )  # fmt: skip
