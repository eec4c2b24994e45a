"""From the raw projection to queries, keys and values, and back.

Axes: T tokens, C columns of q, k and v side by side, H query heads, G key/value heads, J either, W head width.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.fused.functions.rows import Grads, Norm
from lightning_fastft.kernels.handover import Handover
from lightning_fastft.kernels.qk_rope.op import qk_rope_backward, qk_rope_heads
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm
from lightning_fastft.kernels.rms_norm.op import rms_norm_backward, rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm


def norm_head_columns(qkv_TC: torch.Tensor, q_norm: Norm, k_norm: Norm) -> torch.Tensor:
    """Return the projection with its queries and its keys normed, each over the columns of all heads of a token.

    The keys follow the queries, whose number is the size of their weight.

    Cost:
        Two calls of rms_norm_forward, and a copy of the values; saves the raw projection. About 1 % of a layer.
    """
    return _NormHeadColumns.apply(qkv_TC, q_norm.weight_D, k_norm.weight_D, q_norm.form, k_norm.form)


def split_heads(
    qkv_TC: torch.Tensor, rope: Rope, shares: Handover, row_gradient: Handover
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries (T, H, W), keys and values (T, G, W), rotated, and normed if the family does so.

    ``shares`` and ``row_gradient`` are sources of gradients in the backward: of keys and values, where it has any, and
    of the columns of a projection with gates, which ``gate_heads`` writes.

    Cost:
        That of qk_rope_heads; saves the raw projection if it is normed.
    """
    return _SplitHeads.apply(
        qkv_TC, rope.cos_TW, rope.sin_TW, rope.q_weight_W, rope.k_weight_W, rope.form, shares, row_gradient
    )


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
    def backward(ctx: Any, d_out_TC: torch.Tensor) -> Grads:
        qkv_TC, *weights = ctx.saved_tensors
        d_weights: list[torch.Tensor | None] = []
        end = 0
        for weight_I, form, needs_weight in zip(weights, ctx.forms, ctx.needs_input_grad[1:3]):
            columns = slice(end, end := end + len(weight_I))
            # In place, so that the gradients of the values are not copied.
            _, d_weight_D = rms_norm_backward(
                d_out_TC[:, columns],
                qkv_TC[:, columns],
                weight_I,
                form=form,
                needs_weight=needs_weight,
                out=d_out_TC[:, columns],
                is_checked=False,
            )
            d_weights.append(None if d_weight_D is None else d_weight_D.to(weight_I.dtype))
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
        shares: Handover,
        row_gradient: Handover,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.form, ctx.shares, ctx.row_gradient = form, shares, row_gradient
        # Keys and values have no gradient here if attention passes shares.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos_TW, sin_TW, *((qkv_TC, q_weight_W, k_weight_W) if form.has_norm else ()))
        heads = qk_rope_heads(qkv_TC, Rope(cos_TW, sin_TW, q_weight_W, k_weight_W, form), is_checked=False)
        return heads.q_THW, heads.k_TGW, heads.v_TGW

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_q_THW: torch.Tensor | None, d_k_TGW: torch.Tensor | None, d_v_TGW: torch.Tensor | None
    ) -> Grads:
        cos_TW, sin_TW, *others = ctx.saved_tensors
        qkv_TC, q_weight_W, k_weight_W = others if others else (None, None, None)
        needs_weight = any(ctx.needs_input_grad[3:5])
        d_k_TJW, d_v_TJW = ctx.shares.take() or (d_k_TGW, d_v_TGW)
        num_tokens = cos_TW.shape[0]
        found = _head_gradients(d_q_THW, d_k_TJW, d_v_TJW, num_tokens=num_tokens, form=ctx.form)
        (d_raw_TC,) = ctx.row_gradient.take() or (None,)
        if d_raw_TC is None and ctx.form.has_gate:
            d_raw_TC = found.q_THW.new_zeros(num_tokens, ctx.form.num_columns)
        d_raw_TC, *d_raw_weights = qk_rope_backward(
            found,
            qkv_TC,
            Rope(cos_TW, sin_TW, q_weight_W, k_weight_W, ctx.form),
            needs_weight=needs_weight,
            out=d_raw_TC,
            is_checked=False,
        )
        d_weights = (
            None if d is None or weight is None or not needs else d.to(weight.dtype)
            for d, weight, needs in zip(d_raw_weights, (q_weight_W, k_weight_W), ctx.needs_input_grad[3:5])
        )
        return d_raw_TC, None, None, *d_weights, None, None, None


def _head_gradients(*found: torch.Tensor | None, num_tokens: int, form: RopeForm) -> Heads:
    """Return the gradients of queries, keys and values as the kernel reads them, zeros for missing ones."""
    like = next(d for d in found if d is not None)
    counts = form.head_counts
    return Heads(
        *(
            like.new_zeros((num_tokens, count, form.head_width)) if d is None else d.contiguous()
            for d, count in zip(found, counts, strict=True)
        )
    )
