"""The autograd Functions of a fused decoder layer. Attention and, in mixture models, the experts run between them.

The backward recomputes norms and activations. A plan can hold the output of a large GEMM (``Session.value``). The
residual stream passes through the Function that norms it, so that one kernel adds both of its gradients.

Axes: T tokens, D model width, C columns of q, k and v side by side, P columns of gate and up, F width of the
    feed-forward block, W head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from lightning_fastft.activations.segments import Session
from lightning_fastft.activations.values import unneeded
from lightning_fastft.fused.linear_parts import TENSORS_PER_LAYER
from lightning_fastft.fused.linears import (
    FusedLinear,
    gradients_for,
    low_rank_rows,
    parameter_gradients,
    product,
    rows_for,
    rows_gradients,
    rows_gradients_apart,
)
from lightning_fastft.kernels.expert_gate.op import gate_backward, gate_forward
from lightning_fastft.kernels.expert_gate.reference import GateForm, LowRankRows
from lightning_fastft.kernels.head_gate.op import RowGradient
from lightning_fastft.kernels.qk_rope.op import qk_rope_backward, qk_rope_heads
from lightning_fastft.kernels.qk_rope.reference import HeadGradients, RopeForm
from lightning_fastft.kernels.rms_norm.op import rms_norm_backward, rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm, shifted_weight, wide_dtype

QKV_VALUE, OUT_VALUE = "self_attn.qkv", "self_attn.o_proj"
GATE_UP_VALUE, DOWN_VALUE = "mlp.gate_up", "mlp.down"
# Point at which a norm after the block is the last to save a tensor; its input is a value too.
POST_NORM_POINT = "mlp.post_norm"

_Grads = tuple[torch.Tensor | None, ...]


class Norm(NamedTuple):
    """An RMSNorm: its weight, shape (D,), and its form."""

    weight_D: torch.Tensor
    form: NormForm


class Rope(NamedTuple):
    """The step from raw projections to queries and keys: angles of shape (T, W), weights of the norms, and the form."""

    cos_TW: torch.Tensor
    sin_TW: torch.Tensor
    q_weight_W: torch.Tensor | None
    k_weight_W: torch.Tensor | None
    form: RopeForm


class HeadShares:
    """Pass gradients of keys and values, not yet summed over query heads, from attention to ``split_heads``."""

    def __init__(self) -> None:
        self._shares: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, d_k_THW: torch.Tensor, d_v_THW: torch.Tensor) -> None:
        """Store the gradients; ``packed_attention`` calls this as ``collect``."""
        self._shares = d_k_THW, d_v_THW

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the stored gradients once; None if attention returned its gradients to autograd."""
        shares, self._shares = self._shares, None
        return shares


def norm_rows(x_TD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed rows, and the rows themselves for the residual stream.

    Cost:
        That of rms_norm_forward; saves x_TD.
    """
    x_TD = _read_rows(x_TD)
    out = _NormRows.apply(x_TD, norm.weight_D, norm.form)
    return out if isinstance(out, tuple) else (out, x_TD)


def norm_project(
    x_TD: torch.Tensor, norm: Norm | None, fused_linear: FusedLinear, *, session: Session | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the projection of the normed rows, shape (T, C), and the rows themselves for the residual stream.

    Args:
        x_TD: Residual stream.
        norm: Norm before the projections; None for none.
        fused_linear: The projections.
        session: Of the open segment; None outside a plan.

    Cost:
        That of rms_norm_forward and product; saves x_TD, the adapters' low-rank rows and low-precision factors, and
        trained weights.
    """
    x_TD = _read_rows(x_TD)
    weight_D, form = (None, None) if norm is None else norm
    out = _NormProject.apply(fused_linear, form, session, x_TD, weight_D, *fused_linear.tensors())
    return out if isinstance(out, tuple) else (out, x_TD)


def norm_head_columns(qkv_TC: torch.Tensor, q_norm: Norm, k_norm: Norm) -> torch.Tensor:
    """Return the projection with its queries and its keys normed, each over the columns of all heads of a token.

    Args:
        qkv_TC: Raw projection.
        q_norm: Norm of the queries; the size of its weight is their number of columns.
        k_norm: Norm of the keys, which follow.

    Cost:
        Two calls of rms_norm_forward, and a copy of the values; saves the raw projection. About 1 % of a layer.
    """
    return _NormHeadColumns.apply(qkv_TC, q_norm.weight_D, k_norm.weight_D, q_norm.form, k_norm.form)


def split_heads(
    qkv_TC: torch.Tensor, rope: Rope, shares: HeadShares, row_gradient: RowGradient
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries (T, H, W), keys and values (T, G, W), rotated, and normed if the family does so.

    Args:
        qkv_TC: Raw projection.
        rope: Turns it into heads.
        shares: Source of the gradients of keys and values in the backward; if it has none, autograd's are used.
        row_gradient: Source of the gradient of a projection with gates, their columns written by ``gate_heads``.

    Cost:
        That of qk_rope_heads; saves the raw projection if it is normed.
    """
    return _SplitHeads.apply(
        qkv_TC, rope.cos_TW, rope.sin_TW, rope.q_weight_W, rope.k_weight_W, rope.form, shares, row_gradient
    )


def project_add(
    x_TI: torch.Tensor,
    residual_TD: torch.Tensor,
    fused_linear: FusedLinear,
    *,
    factor: float = 1.0,
    session: Session | None,
) -> torch.Tensor:
    """Return ``residual + factor * projection of x``.

    Args:
        x_TI: Output of attention.
        residual_TD: Residual stream.
        fused_linear: The projection.
        factor: Residual multiplier of the family (Granite).
        session: Of the open segment; None outside a plan.

    Cost:
        That of product, and with a factor a pass over the gradient of the output; saves x_TI if a parameter is trained,
        the adapter's low-rank rows and low-precision factors, and a trained weight.
    """
    return _ProjectAdd.apply(fused_linear, factor, session, x_TI, residual_TD, *fused_linear.tensors())


def norm_feed_forward(
    x_TD: torch.Tensor,
    norm: Norm,
    gate_up: FusedLinear,
    down: FusedLinear,
    *,
    form: GateForm,
    factor: float = 1.0,
    session: Session | None,
) -> torch.Tensor:
    """Return ``x + factor * down(gate(gate_up(norm(x))))``.

    Args:
        x_TD: Residual stream.
        norm: Norm before the block.
        gate_up: The first two projections.
        down: The last projection.
        form: How gate and up are combined.
        factor: Residual multiplier of the family (Granite).
        session: Of the open segment; None outside a plan.

    Cost:
        That of the products, and with a factor a pass over the gradient of the output; saves x_TD, gate and up, the
        adapters' low-rank rows and low-precision factors, and trained weights.
    """
    call = _FeedForwardCall(gate_up, down, norm.form, form, session, factor)

    def run(call: _FeedForwardCall) -> torch.Tensor:
        return _NormFeedForward.apply(call, x_TD, norm.weight_D, *gate_up.tensors(), *down.tensors())

    return _run_block(run, call, point=DOWN_VALUE)


def project_norm_add(
    x_TI: torch.Tensor, residual_TD: torch.Tensor, norm: Norm, fused_linear: FusedLinear, *, session: Session | None
) -> torch.Tensor:
    """Return ``residual + norm(projection of x)``, for families that also norm the output of a block.

    Args:
        x_TI: Output of attention.
        residual_TD: Residual stream.
        norm: Norm after the projection.
        fused_linear: The projection.
        session: Of the open segment; None outside a plan.

    Cost:
        That of product and rms_norm_forward, and one addition; saves the projection, x_TI if a parameter is trained,
        the adapter's low-rank rows and low-precision factors, and a trained weight.
    """
    return _ProjectNormAdd.apply(
        fused_linear, norm.form, session, x_TI, residual_TD, norm.weight_D, *fused_linear.tensors()
    )


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

    Args:
        x_TD: Residual stream.
        norm: Norm before the block; None for none.
        gate_up: The first projections.
        down: The last projection.
        post_norm: Norm after the block.
        form: How gate and up are combined.
        session: Of the open segment; None outside a plan.

    Cost:
        That of the products, two norms and one addition; saves x_TD, gate and up, the output of down, the adapters'
        low-rank rows and low-precision factors, and trained weights.
    """
    weight_D, norm_form = (None, None) if norm is None else norm
    call = _FeedForwardCall(gate_up, down, norm_form, form, session)

    def run(call: _FeedForwardCall) -> torch.Tensor:
        return _FeedForwardBetweenNorms.apply(
            call, post_norm.form, x_TD, weight_D, post_norm.weight_D, *gate_up.tensors(), *down.tensors()
        )  # fmt: skip

    return _run_block(run, call, point=POST_NORM_POINT)


class _NormRows(torch.autograd.Function):
    """Norm of rows; saves x."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, form: NormForm) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, weight_D)
        ctx.form = form
        y_TD = rms_norm_forward(x_TD, weight_D, form=form, is_checked=False).y_TD
        return (y_TD, x_TD) if ctx.needs_input_grad[0] else y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor | None, d_x_TD: torch.Tensor | None = None) -> _Grads:
        x_TD, weight_D = ctx.saved_tensors
        return (*_norm_gradients(d_y_TD, d_x_TD, x_TD, weight_D, form=ctx.form, needs=ctx.needs_input_grad[:2]), None)


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

        y_TC, *low = _project_normed(session, QKV_VALUE, fused_linear, x_TD, weight_D, form=form)
        ctx.fused_linear, ctx.form, ctx.num_low = fused_linear, form, len(low)
        ctx.save_for_backward(x_TD, weight_D, *low, *fused_linear.watched_tensors())
        return (y_TC, x_TD) if ctx.needs_input_grad[3] else y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TC: torch.Tensor | None, d_x_TD: torch.Tensor | None = None) -> _Grads:
        x_TD, weight_D, *others = ctx.saved_tensors
        needs_x, needs_weight, *needs = ctx.needs_input_grad[3:]
        if d_y_TC is None:
            return None, None, None, d_x_TD, None, *(None for _ in needs)
        low, fused_linear = others[: ctx.num_low], ctx.fused_linear.with_watched(others[ctx.num_low :])
        return None, None, None, *_normed_gradients(
            fused_linear, low, d_y_TC, d_x_TD, x_TD, weight_D, form=ctx.form, needs=(needs_x, needs_weight, *needs)
        )  # fmt: skip


class _NormHeadColumns(torch.autograd.Function):
    """Norms over the columns of all heads; saves the raw projection."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_TC: torch.Tensor,
        q_weight_I: torch.Tensor,
        k_weight_I: torch.Tensor,
        q_form: NormForm,
        k_form: NormForm,
    ) -> torch.Tensor:
        ctx.forms = q_form, k_form
        ctx.save_for_backward(qkv_TC, q_weight_I, k_weight_I)
        out_TC = torch.empty_like(qkv_TC)
        end = 0
        for weight_I, form in zip((q_weight_I, k_weight_I), ctx.forms):
            columns = slice(end, end := end + len(weight_I))
            rms_norm_forward(qkv_TC[:, columns], weight_I, form=form, out=out_TC[:, columns], is_checked=False)
        out_TC[:, end:].copy_(qkv_TC[:, end:])
        return out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TC: torch.Tensor) -> _Grads:
        qkv_TC, *weights = ctx.saved_tensors
        d_weights: list[torch.Tensor | None] = []
        end = 0
        for weight_I, form, needs_weight in zip(weights, ctx.forms, ctx.needs_input_grad[1:3]):
            columns = slice(end, end := end + len(weight_I))
            # In place, so that the gradients of the values are not copied.
            gradients = rms_norm_backward(
                d_out_TC[:, columns],
                qkv_TC[:, columns],
                weight_I,
                None,
                form=form,
                needs_weight=needs_weight,
                out=d_out_TC[:, columns],
                is_checked=False,
            )
            d_weights.append(None if gradients.d_weight_D is None else gradients.d_weight_D.to(weight_I.dtype))
        return d_out_TC, *d_weights, None, None


class _SplitHeads(torch.autograd.Function):
    """Norm and rotation of heads; saves angles, and the raw projection if it is normed."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_TC: torch.Tensor,
        cos_TW: torch.Tensor,
        sin_TW: torch.Tensor,
        q_weight_W: torch.Tensor | None,
        k_weight_W: torch.Tensor | None,
        form: RopeForm,
        shares: HeadShares,
        row_gradient: RowGradient,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.form, ctx.shares, ctx.row_gradient = form, shares, row_gradient
        # Keys and values have no gradient here if attention passes shares.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos_TW, sin_TW, *((qkv_TC, q_weight_W, k_weight_W) if form.has_norm else ()))
        heads = qk_rope_heads(
            qkv_TC, cos_TW, sin_TW, form=form, q_weight_W=q_weight_W, k_weight_W=k_weight_W, is_checked=False
        )
        return heads.q_THW, heads.k_TGW, heads.v_TGW

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_q_THW: torch.Tensor | None, d_k_TGW: torch.Tensor | None, d_v_TGW: torch.Tensor | None
    ) -> _Grads:
        cos_TW, sin_TW, *others = ctx.saved_tensors
        qkv_TC, q_weight_W, k_weight_W = others if others else (None, None, None)
        needs_weight = any(ctx.needs_input_grad[3:5])
        d_k_TJW, d_v_TJW = ctx.shares.take() or (d_k_TGW, d_v_TGW)
        found = _head_gradients(d_q_THW, d_k_TJW, d_v_TJW, num_tokens=len(cos_TW), form=ctx.form)
        d_raw_TC = ctx.row_gradient.take()
        if d_raw_TC is None and ctx.form.has_gate:
            d_raw_TC = found.d_q_THW.new_zeros(len(cos_TW), ctx.form.num_columns)
        gradients = qk_rope_backward(
            found,
            qkv_TC,
            cos_TW,
            sin_TW,
            form=ctx.form,
            q_weight_W=q_weight_W,
            k_weight_W=k_weight_W,
            needs_weight=needs_weight,
            out=d_raw_TC,
            is_checked=False,
        )
        d_weights = (
            None if d is None or weight is None or not needs else d.to(weight.dtype)
            for d, weight, needs in zip(
                (gradients.d_q_weight_W, gradients.d_k_weight_W), (q_weight_W, k_weight_W), ctx.needs_input_grad[3:5]
            )
        )
        return gradients.d_raw_TC, None, None, *d_weights, None, None, None


def _head_gradients(*found: torch.Tensor | None, num_tokens: int, form: RopeForm) -> HeadGradients:
    """Return the gradients of queries, keys and values as the kernel reads them, zeros for missing ones."""
    like = next(d for d in found if d is not None)
    counts = form.head_counts
    return HeadGradients(
        *(
            like.new_zeros((num_tokens, count, form.head_width)) if d is None else d.contiguous()
            for d, count in zip(found, counts, strict=True)
        )
    )


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
        y_TD, *low = _value(
            session, OUT_VALUE, lambda: _held(product(fused_linear, x_TI, addend_TO=residual_TD, factor=factor))
        )
        ctx.fused_linear, ctx.factor, ctx.num_low = fused_linear, factor, len(low)
        saved_x = (x_TI,) if any(ctx.needs_input_grad[5:]) else ()
        ctx.save_for_backward(*low, *fused_linear.watched_tensors(), *saved_x)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> _Grads:
        needs_x, needs_residual, *needs = ctx.needs_input_grad[3:]
        others = list(ctx.saved_tensors)
        x_TI = others.pop() if any(needs) else None
        low, fused_linear = others[: ctx.num_low], ctx.fused_linear.with_watched(others[ctx.num_low :])
        d_y_TD = _read_rows(d_y_TD)
        d_out_TD = _multiplied(d_y_TD, ctx.factor, reader=fused_linear)
        d_x_TI, d_low_TR = rows_gradients(fused_linear, d_out_TD, needs_x=needs_x)
        gradients: list[torch.Tensor | None] = [None] * len(needs)
        if x_TI is not None:
            gradients = parameter_gradients(
                fused_linear, x_TI, d_out_TD, low[0] if low else None, d_low_TR, needs=needs
            )
        return None, None, None, d_x_TI, d_y_TD if needs_residual else None, *gradients


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
        gate_up_TP, *low = _project_normed(session, GATE_UP_VALUE, call.gate_up, x_TD, weight_D, form=call.norm_form)
        # Without the session, which belongs to a forward.
        ctx.call, ctx.num_low = call._replace(session=None), len(low)
        saved = (x_TD, weight_D, gate_up_TP, *low, *call.gate_up.watched_tensors(), *call.down.watched_tensors())
        if session is not None:
            # Every run of a layer must save the same number of tensors, even one that ends here.
            ctx.save_for_backward(*saved)
            if session.is_last(DOWN_VALUE):
                return unneeded(x_TD, x_TD.shape[-1])
        act_TF = gate_forward(gate_up_TP, form=call.gate_form, is_checked=False)
        out = product(call.down, act_TF, addend_TO=x_TD, factor=call.factor)
        if session is None:
            ctx.save_for_backward(*saved, *(() if out.low_TR is None else (out.low_TR,)))
        return out.y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> _Grads:
        x_TD, weight_D, gate_up_TP, *others = ctx.saved_tensors
        d_y_TD = _read_rows(d_y_TD)
        d_out_TD = _multiplied(d_y_TD, ctx.call.factor, reader=ctx.call.down)
        return None, *_block_gradients(
            ctx.call, others, ctx.num_low, d_out_TD, d_y_TD, x_TD, weight_D, gate_up_TP, needs=ctx.needs_input_grad[1:]
        )  # fmt: skip


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
        out_TD, *low = _value(session, OUT_VALUE, lambda: _held(product(fused_linear, x_TI)))
        ctx.fused_linear, ctx.form, ctx.num_low = fused_linear, form, len(low)
        saved_x = (x_TI,) if any(ctx.needs_input_grad[6:]) else ()
        ctx.save_for_backward(out_TD, weight_D, *low, *fused_linear.watched_tensors(), *saved_x)
        # Round before the addition, as the model does.
        return rms_norm_forward(out_TD, weight_D, form=form, is_checked=False).y_TD.add_(residual_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> _Grads:
        out_TD, weight_D, *others = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, *needs = ctx.needs_input_grad[3:]
        x_TI = others.pop() if any(needs) else None
        low, fused_linear = others[: ctx.num_low], ctx.fused_linear.with_watched(others[ctx.num_low :])
        d_out_TD, d_weight_D = _norm_gradients(
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
            d_x_TI, d_low_TR = rows_gradients(fused_linear, d_out_TD, needs_x=needs_x)
            if x_TI is not None:
                gradients = parameter_gradients(
                    fused_linear, x_TI, d_out_TD, low[0] if low else None, d_low_TR, needs=needs
                )
        return None, None, None, d_x_TI, d_y_TD if needs_residual else None, d_weight_D, *gradients


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
        gate_up_TP, *low = _project_normed(session, GATE_UP_VALUE, call.gate_up, x_TD, weight_D, form=call.norm_form)
        (out_TD,) = _value(
            session,
            DOWN_VALUE,
            lambda: (product(call.down, gate_forward(gate_up_TP, form=call.gate_form, is_checked=False)).y_TO,),
        )
        # Without the session, which belongs to a forward.
        ctx.call, ctx.post_form, ctx.num_low = call._replace(session=None), post_form, len(low)
        watched = (*call.gate_up.watched_tensors(), *call.down.watched_tensors())
        ctx.save_for_backward(x_TD, weight_D, post_weight_D, gate_up_TP, out_TD, *low, *watched)
        if session is not None and session.is_last(POST_NORM_POINT):
            return unneeded(x_TD, x_TD.shape[-1])
        return rms_norm_forward(out_TD, post_weight_D, form=post_form, is_checked=False).y_TD.add_(x_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> _Grads:
        x_TD, weight_D, post_weight_D, gate_up_TP, out_TD, *others = ctx.saved_tensors
        needs_x, needs_weight, needs_post_weight, *needs = ctx.needs_input_grad[2:]
        is_needed = needs_x or needs_weight or any(needs)
        d_out_TD, d_post_weight_D = _norm_gradients(
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
        d_x_TD, d_weight_D, *gradients = _block_gradients(
            ctx.call,
            others,
            ctx.num_low,
            d_out_TD,
            d_y_TD,
            x_TD,
            weight_D,
            gate_up_TP,
            needs=(needs_x, needs_weight, *needs),
        )
        return None, None, d_x_TD, d_weight_D, d_post_weight_D, *gradients


def _held(result: Any) -> tuple[torch.Tensor, ...]:
    """Return a product as a value that a plan can hold."""
    return (result.y_TO,) if result.low_TR is None else (result.y_TO, result.low_TR)


def _value(
    session: Session | None, name: str, compute: Callable[[], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    return compute() if session is None else session.value(name, compute)


def _project_normed(
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
            return _held(product(fused_linear, x_TD))
        rows = rows_for(fused_linear, x_TD)
        return _held(
            product(fused_linear, rms_norm_forward(x_TD, weight_D, form=form, out=rows, is_checked=False).y_TD)
        )

    return _value(session, name, compute)


def _run_block(run: Callable[[_FeedForwardCall], torch.Tensor], call: _FeedForwardCall, *, point: str) -> torch.Tensor:
    """Run the last Function of a layer, whose output a recompute may not need."""
    if call.session is None:
        return run(call)
    return call.session.run_last(point, lambda: run(call), anew=lambda: run(call._replace(session=None)))


def _normed_gradients(
    fused_linear: FusedLinear,
    low: Sequence[torch.Tensor],
    d_y_TC: torch.Tensor,
    d_x_TD: torch.Tensor | None,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    *,
    form: NormForm | None,
    needs: Sequence[bool],
) -> _Grads:
    """Return the gradients of _project_normed: of the rows, of the norm's weight, and of FusedLinear.tensors.

    The gradient of the rows includes that of the residual stream.
    """
    needs_x, needs_weight, *needs_tensors = needs
    if weight_D is None or form is None:
        return _raw_gradients(fused_linear, low, d_y_TC, d_x_TD, x_TD, needs_x=needs_x, needs=needs_tensors)
    d_h_TD, d_low_TR = rows_gradients(fused_linear, d_y_TC, needs_x=needs_x or needs_weight)
    rstd_T = None
    if d_h_TD is not None and _adapters_read_raw_rows(x_TD, needs_tensors):
        rstd_T = x_TD.new_empty(x_TD.shape[0], dtype=wide_dtype(x_TD.dtype))
    # A layer of as many ranks reads this gradient next.
    norm_gradients = _norm_gradients(
        d_h_TD, d_x_TD, x_TD, weight_D, form=form, needs=(needs_x, needs_weight), reader=fused_linear, rstd_out=rstd_T
    )
    del d_h_TD, d_x_TD
    gradients: list[torch.Tensor | None] = [None] * len(needs_tensors)
    low_TR = low[0] if low else None
    if rstd_T is not None and d_low_TR is not None:
        # A normed row is the raw row times one number, its columns times the weight, so it need not be written again.
        d_low_TR = torch.mul(d_low_TR, rstd_T[:, None], out=torch.empty_like(d_low_TR))
        factor_D = shifted_weight(weight_D, rstd_T.dtype, form)
        gradients = parameter_gradients(
            fused_linear, x_TD, d_y_TC, low_TR, d_low_TR, needs=needs_tensors, factor_I=factor_D
        )
    elif any(needs_tensors):
        h_TD = rms_norm_forward(x_TD, weight_D, form=form, is_checked=False).y_TD
        gradients = parameter_gradients(fused_linear, h_TD, d_y_TC, low_TR, d_low_TR, needs=needs_tensors)
    return (*norm_gradients, *gradients)


def _raw_gradients(
    fused_linear: FusedLinear,
    low: Sequence[torch.Tensor],
    d_y_TC: torch.Tensor,
    d_x_TD: torch.Tensor | None,
    x_TD: torch.Tensor,
    *,
    needs_x: bool,
    needs: Sequence[bool],
) -> _Grads:
    """Return the gradients of _project_normed without a norm."""
    found_TD, d_low_TR = rows_gradients(fused_linear, d_y_TC, needs_x=needs_x)
    if found_TD is not None and d_x_TD is not None:
        found_TD = found_TD + d_x_TD
    gradients: list[torch.Tensor | None] = [None] * len(needs)
    if any(needs):
        gradients = parameter_gradients(fused_linear, x_TD, d_y_TC, low[0] if low else None, d_low_TR, needs=needs)
    return found_TD, None, *gradients


def _adapters_read_raw_rows(x_TD: torch.Tensor, needs: Sequence[bool]) -> bool:
    """Return whether only adapters are trained, in a dtype whose range holds 1/rms of a row times a gradient."""
    return any(needs[2::TENSORS_PER_LAYER]) and not any(needs[0::TENSORS_PER_LAYER]) and x_TD.dtype is not torch.float16


def _block_gradients(
    call: _FeedForwardCall,
    others: Sequence[torch.Tensor],
    num_low: int,
    d_out_TD: torch.Tensor,
    d_x_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    gate_up_TP: torch.Tensor,
    *,
    needs: Sequence[bool],
) -> _Grads:
    """Return the gradients of x, the norm's weight, and the tensors of gate_up and down from that of down's output.

    ``others`` holds num_low low-rank rows of gate_up, the watched tensors of both projections, and, if they were saved,
    the low-rank rows of down. d_x_TD is the gradient of the residual stream.
    """
    num_first = num_low + len(call.gate_up.watched_tensors())
    num_watched = num_first + len(call.down.watched_tensors())
    gate_up, down = (
        call.gate_up.with_watched(others[num_low:num_first]),
        call.down.with_watched(others[num_first:num_watched]),
    )
    num_needs = 2 + len(gate_up.tensors())
    d_act_TF, d_low_TR, a_RF = rows_gradients_apart(down, d_out_TD)
    # The gate's backward reads these rows next, so it adds the gradient from the adapter.
    addend = None if d_low_TR is None or a_RF is None else LowRankRows(d_low_TR, _read_rows(a_RF))
    gate = gate_backward(
        d_act_TF, gate_up_TP, form=call.gate_form, addend=addend, need_act=any(needs[num_needs:]), is_checked=False
    )
    del d_act_TF, addend
    d_gate_up_TP = gate.d_gate_up_NP
    d_down: list[torch.Tensor | None] = [None] * len(down.tensors())
    if gate.act_NF is not None:
        # They were saved if the layer ran without a session; else they cost one thin GEMM.
        low_TR = others[num_watched] if len(others) > num_watched else low_rank_rows(down, gate.act_NF)
        d_down = parameter_gradients(down, gate.act_NF, d_out_TD, low_TR, d_low_TR, needs=needs[num_needs:])
    del gate, d_out_TD
    return (
        *_normed_gradients(
            gate_up,
            others[:num_low],
            d_gate_up_TP,
            d_x_TD,
            x_TD,
            weight_D,
            form=call.norm_form,
            needs=needs[:num_needs],
        ),
        *d_down,
    )


def _multiplied(d_y_TD: torch.Tensor, factor: float, *, reader: FusedLinear) -> torch.Tensor:
    """Return a gradient times the residual multiplier, in memory that ``reader`` reads without a copy."""
    return d_y_TD if factor == 1.0 else torch.mul(d_y_TD, factor, out=gradients_for(reader, d_y_TD))


def _read_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows whose elements are contiguous."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _norm_gradients(
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
    gradients = rms_norm_backward(
        _read_rows(d_y_TD),
        x_TD,
        weight_D,
        None,
        form=form,
        d_sum_TD=None if d_x_TD is None else _read_rows(d_x_TD),
        needs_weight=needs_weight,
        out=None if reader is None else gradients_for(reader, x_TD),
        rstd_out=rstd_out,
        is_checked=False,
    )
    d_weight_D = gradients.d_weight_D
    return gradients.d_x_TD if needs_x else None, None if d_weight_D is None else d_weight_D.to(weight_D.dtype)
