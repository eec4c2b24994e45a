"""Attention inside a fused decoder layer: from the residual stream to queries, keys and values, and back.

Axes: B rows, S positions, T = B * S tokens, D model width, C columns of q, k and v side by side, W head width.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_fastft.activations.segments import Session
from lightning_fastft.fused.functions.heads import norm_head_columns, split_heads
from lightning_fastft.fused.functions.projections import norm_project, project_add, project_norm_add
from lightning_fastft.fused.functions.rows import Norm
from lightning_fastft.fused.layer_forms import LayerForm
from lightning_fastft.fused.layer_parts import Parts
from lightning_fastft.kernels.attention.flash import Collect
from lightning_fastft.kernels.handover import Handover
from lightning_fastft.kernels.head_columns import HeadColumns
from lightning_fastft.kernels.head_gate.op import gate_heads
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.kernels.qk_rope.reference import Rope, RopeForm
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches.attention import attend, attend_rows


def attend_layer(
    attention: Any,
    form: LayerForm,
    parts: Parts,
    x_TD: torch.Tensor,
    *,
    shape: torch.Size,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    mask: Any,
    options: dict[str, Any],
    factor: float,
    session: Session | None,
) -> torch.Tensor:
    """Return the residual stream after attention, shape (T, D).

    Args:
        attention: The attention layer.
        form: Description of the decoder layer.
        parts: Its products and norms.
        x_TD: The residual stream before the layer.
        shape: (B, S, D).
        angles: cos and sin of the model's rotary embedding; None for a layer without positions (LaraMini).
        mask: The mask that the decoder layer got.
        options: Further keywords that it got.
        factor: Factor on the output before it is added.
        session: As in ``norm_project``.

    Cost:
        That of norm_project, split_heads, attention and project_add.
    """
    projection = parts.out
    assert parts.qkv is not None
    assert projection is not None
    qkv_TC, x_TD = norm_project(x_TD, parts.norms[0], parts.qkv, session=session)
    q_norm, k_norm = parts.head_norms
    if form.has_joint_head_norms:
        assert q_norm is not None
        assert k_norm is not None
        qkv_TC, q_norm, k_norm = norm_head_columns(qkv_TC, q_norm, k_norm), None, None
    # The input of the output projection is as wide as the query heads.
    shares, row_gradient = Handover(), Handover()
    rope = _rope(attention, form, angles, (q_norm, k_norm), rows_TC=qkv_TC, num_query_columns=projection.num_inputs)
    heads = split_heads(qkv_TC, rope, shares, row_gradient)
    out_TI = _attend_heads(attention, form, heads, shape=shape, mask=mask, options=options, collect=shares.put)
    if form.has_gated_heads:
        width, num_heads = rope.form.head_width, rope.form.num_heads
        gate = HeadGateForm(HeadColumns(width, width, num_heads, group_size=1, group_step=2 * width))
        out_TI = gate_heads(out_TI.unflatten(1, (num_heads, width)), qkv_TC, form=gate, row_gradient=row_gradient)
    if parts.post_norms[0] is not None:
        return project_norm_add(out_TI, x_TD, parts.post_norms[0], projection, session=session)
    return project_add(out_TI, x_TD, projection, factor=factor, session=session)


def _attend_heads(
    attention: Any,
    form: LayerForm,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    shape: torch.Size,
    mask: Any,
    options: dict[str, Any],
    collect: Collect,
) -> torch.Tensor:
    """Return the output of attention, a row per token."""
    # LFM2's layers have no dropout.
    dropout = vars(attention).get("attention_dropout", 0.0) if attention.training else 0.0
    # Looking up a missing attribute of a module takes microseconds.
    window = (
        getattr(attention.config, "sliding_window", None)
        if form.has_config_window
        else vars(attention).get("sliding_window")
    )
    if form.rotates_windows_only and not attention.is_sliding:
        # The attribute is the window of the other layers.
        window = None
    softcap = attention.attn_logit_softcapping if form.has_softcap else None
    sink_H = attention._parameters.get("sinks")
    context = options.get("context")
    if isinstance(context, BatchContext) and shape[0] == 1:
        out_THW = attend_rows(
            attention, *heads, mask, dropout=dropout, scale=attention.scaling, window=window, softcap=softcap,
            sink_H=sink_H, context=context, collect=collect, keywords=options, is_checked=False,
        )  # fmt: skip
        return out_THW.flatten(1)
    # Attention layers pass (B, H, S, W).
    q, k, v = (x_THW.view(shape[0], shape[1], *x_THW.shape[1:]).transpose(1, 2) for x_THW in heads)
    out, _ = attend(
        attention, q, k, v, mask, dropout=dropout, scaling=attention.scaling, sliding_window=window, softcap=softcap,
        s_aux=sink_H, collect=collect, **options,
    )  # fmt: skip
    return out.reshape(heads[0].shape[0], -1)


def _rope(
    attention: Any,
    layer_form: LayerForm,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[Norm | None, Norm | None],
    *,
    rows_TC: torch.Tensor,
    num_query_columns: int,
) -> Rope:
    """Return the rotation and the norms that turn projections into heads."""
    width, (num_tokens, num_columns) = int(attention.head_dim), rows_TC.shape
    q_norm = norms[0]
    has_other_windows = layer_form.rotates_windows_only and attention.sliding_window and not attention.is_sliding
    if angles is None or has_other_windows or not vars(attention).get("use_rope", True):
        # Layers without positions (LaraMini, EXAONE 4, SmolLM3): rotate by an angle of 0.
        cos, sin = rows_TC.new_ones(num_tokens, width), rows_TC.new_zeros(num_tokens, width)
    else:
        cos, sin = (
            _angle_rows(angle, num_tokens=num_tokens, is_half=layer_form.has_half_angles, dtype=rows_TC.dtype)
            for angle in angles
        )
    num_gates = num_query_columns if layer_form.has_gated_heads else 0
    form = RopeForm(
        num_heads=num_query_columns // width,
        num_kv_heads=(num_columns - num_query_columns - num_gates) // (2 * width),
        head_width=width,
        rotary_width=cos.shape[1],
        has_norm=q_norm is not None,
        eps=1e-6 if q_norm is None else q_norm.form.eps,
        weight_offset=layer_form.norm_offset,
        is_weight_wide=layer_form.is_norm_wide,
        has_gate=layer_form.has_gated_heads,
    )
    q_weight_W, k_weight_W = (None if norm is None else norm.weight_D for norm in norms)
    return Rope(cos, sin, q_weight_W, k_weight_W, form)


def _angle_rows(angle_BSW: torch.Tensor, *, num_tokens: int, is_half: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return cos or sin with a row per token, for both halves of the rotated columns."""
    if is_half:
        angle_BSW = torch.cat([angle_BSW, angle_BSW], dim=-1)
    if angle_BSW.shape[0] == 1 and angle_BSW.shape[1] < num_tokens:
        angle_BSW = angle_BSW.expand(num_tokens // angle_BSW.shape[1], -1, -1)
    rows = angle_BSW.reshape(num_tokens, -1)
    return rows if rows.dtype in (dtype, torch.float32) else rows.to(dtype)
